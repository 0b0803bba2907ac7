# SPDX-License-Identifier: Apache-2.0
"""Coding agents: sessions of many turns in a closed loop, with tool results, sub-agents and compaction.

A session is a program such as Claude Code or Codex that works on a task. Each of its requests is the tools, the system
prompt, the project's notes, and all that was said so far. The response calls a tool; the tool runs for a while; its
result is appended and the next request is sent. Some responses start sub-agents, which have the same tools, system
prompt and notes but a conversation of their own; the session waits for all of them, and their last responses are its
tool results. A conversation that has grown too long is compacted: one request has it summarised, and the next begins
with the summary in its place. Sometimes a person is asked, which takes longer than a tool. A session that has ended is
followed by another one of the same user.

Sizes and times are lognormal around medians, bounded. Where they come from:

- TraceLab (arXiv 2606.30560, github.com/uw-syfi/TraceLab: 4,265 sessions of Claude Code and Codex, 357,161 requests):
  186.9 million output tokens, so 523 a request; appended to a prompt of 32 to 256 thousand tokens: median 700 to 950,
  90th percentile 3,200 to 8,300, earlier output included; tools take 0.3 s (median), 13.6 s (90th percentile); people
  1.4 min (median), 20.6 min (90th percentile); 8.9 requests of a session follow a person's message, 73.6 a tool's
  result; 9.7 % of the sessions are compacted at least once; 52.6 of 54.9 billion input tokens came from a cache.
- vLLM's blog of 2026-05-06 (610 traces of Codex on SWE-bench Pro): 33 turns (median), context grows from 12,000 to
  80,000 tokens (medians) and by 2,242 tokens a turn (mean), 131 input tokens for one of output, 94.2 % of the input
  cacheable.
- Claude Code's own listing of its context (its issues 12464, 17567): system prompt 2,700 to 3,100 tokens, tools 14,600
  to 15,400, notes of the project up to 4,300. SemiAnalysis' traces (cc-traces-weka-042026): tools 12,439 to 12,974
  tokens and system prompts 2,771 to 4,243 in the rows that the data set's page shows.
- Claude Code compacts at about 83.5 % of the context window (its issue 31806); 109,000 is that share of 131,072.
- vLLM's blog of 2026-09-08 about SemiAnalysis' AgentX, for `agentx`: medians of 43 turns a session, 142,000 tokens in
  and 444 out, over 96 % of the prompts cached, sub-agents in 44 % of the sessions, there 4 (median).
- novita/agentic_code_dataset_22 (22 sessions of Claude Code): 26.2 % of the calls are those of Explore sub-agents.

Assumptions, as no source was found: sigma of the output's length; 20 to 100 turns; how many turns a sub-agent has and
how many run at a time; lengths of tasks, summaries and reports; that a person answers within 5 minutes at most and a
tool ends within 60 s, because a simulation is minutes long; that all sessions have the same tools and system prompt.

Every session's chance and piece ids are its own, so that it says the same whatever the order in which servers answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from lbproxy.sim.workloads.prompts import Piece, size
from lbproxy.sim.workloads.workload import ANSWER_IDS, Arrival, Job, lognormal


class AgentRole:
    """The letters of `Job.roles`."""

    TOOLS: Final = "T"
    SYSTEM: Final = "S"
    USER: Final = "U"
    ASSISTANT: Final = "A"
    RESULT: Final = "R"
    """A result of the tool call that the response before it made; several in a row: it made so many calls."""


TOOLS_TOKENS, SYSTEM_TOKENS = 12_800, 3_200
NOTES_TOKENS = 4000
TASK_TOKENS, TASK_SIGMA, TASK_MOST = 400, 1.0, 4000
"""What a person writes."""
RESULT_TOKENS, RESULT_SIGMA, RESULT_MOST = 650, 1.4, 12_000
OUTPUT_TOKENS, OUTPUT_SIGMA, OUTPUT_MOST = 320, 1.0, 4000
TURNS_SIGMA = 0.8
FEWEST_TURNS, MOST_TURNS = 20, 100
TOOL_SIGMA, TOOL_MOST_S = 2.98, 60.0
"""A 90th percentile of 13.6 s beside a median of 0.3 s."""
PERSON_SIGMA, PERSON_MOST_S = 2.1, 300.0
SUMMARISE_TOKENS = 300
SUMMARY_TOKENS, SUMMARY_SIGMA, SUMMARY_MOST = 2500, 0.3, 4000
SUB_TURNS, SUB_TURNS_SIGMA, FEWEST_SUB_TURNS, MOST_SUB_TURNS = 8, 0.5, 3, 25
MOST_SUB_AGENTS = 3
"""At a time."""
START_S = 0.05
"""From a response to a request that waits for no tool: starting a sub-agent, compacting, going on after either."""
MOST_AT_ONCE = RESULT_MOST + OUTPUT_MOST + SUMMARISE_TOKENS + SUMMARY_MOST
"""Tokens by which prompt and response may exceed `compact_at`. Results of several sub-agents are within it."""

_TOOLS, _SYSTEM, _FIRST_NOTES = 0, 1, 2
"""Ids of the shared pieces; each project has the next one for its notes."""
_AGENT_IDS = 1 << 10
"""Piece ids of one conversation: two a turn, and some for compaction."""
_USER_IDS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Who codes, and how. Tokens and seconds; medians, unless said otherwise."""

    sessions: int
    """At the same time."""
    projects: int
    turns: int
    """Turns of a usual session; all are between `FEWEST_TURNS` and `most_turns`."""
    most_turns: int = MOST_TURNS
    result_tokens: int = RESULT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    compact_at: int
    """A prompt of more tokens is compacted."""
    tool_s: float
    person_share: float
    """Share of a session's turns that a person's message follows, not a tool's result."""
    person_s: float
    delegate: float
    """Share of a session's turns that start sub-agents."""
    most_sub_agents: int = MOST_SUB_AGENTS
    """That start at a time."""
    duration_s: float
    """No request is sent after so long."""
    warm_up_s: float
    """Requests before do not count: caches are empty and all sessions send their first prompt."""
    ramp_s: float
    """Sessions begin spread over so long, each somewhere in the middle of its turns."""


@dataclass(slots=True, eq=False)
class _Agent:
    """One conversation, of a session or of a sub-agent. `rng` and `ids` are its own."""

    name: str
    session: str
    rng: random.Random
    ids: Iterator[int]
    head: tuple[Piece, ...]
    """Tools, system prompt and the project's notes."""
    turns: int
    """Turns that are left, the one in flight included."""
    parent: _Agent | None = None
    place: int = 0
    """Among its parent's sub-agents."""
    sent: int = 0
    said: list[Piece] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    compacting: bool = False
    reports: list[Piece | None] = field(default_factory=list)
    """What its sub-agents reported, in the order of their start; None = still at work."""

    def add(self, role: str, piece: Piece) -> None:
        self.said.append(piece)
        self.roles.append(role)

    def add_new(self, role: str, median: float, sigma: float, at_most: int) -> None:
        self.add(role, Piece(next(self.ids), lognormal(self.rng, median, sigma, at_most=at_most)))


@dataclass(slots=True, eq=False)
class _AgentUser:
    """Has one session after the other."""

    number: int
    agents: Iterator[int]
    """Numbers of conversations."""
    sessions: int = 0


class CodingAgents:
    """The workload: see the module."""

    def __init__(self, coding: Coding, seed: int) -> None:
        self._coding = coding
        self._seed = seed
        self._users = [_AgentUser(number, count()) for number in range(coding.sessions)]
        self._live: dict[str, tuple[_AgentUser, _Agent]] = {}
        """The user and the agent of each job in flight."""
        self._begun = False
        self._began_at = 0.0

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """The first request of each session, which has a part of its turns behind it."""
        if self._begun:
            return None
        self._begun, self._began_at = True, now
        arrivals: list[Arrival] = []
        for user in self._users:
            agent = self._session(user)
            self._skip(agent, agent.rng.randrange(agent.turns))
            arrivals += self._send(user, agent, now + agent.rng.uniform(0.0, self._coding.ramp_s))
        return sorted(arrivals, key=lambda arrival: arrival[0])

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """What follows: the next turn, or sub-agents, or a compaction, or the user's next session. Empty while a
        session waits for its other sub-agents, and after `duration_s`.
        """
        user, agent = self._live.pop(job.id)
        if agent.compacting:
            self._replace(agent, job.answer)
            return self._send(user, agent, now + START_S)
        agent.add(AgentRole.ASSISTANT, job.answer)
        agent.turns -= 1
        if not agent.turns:
            return self._over(user, agent, now)
        draw = agent.rng.random()
        if agent.parent is None and draw < self._coding.delegate:
            return self._delegate(user, agent, now)
        return self._send(user, agent, now + self._next(agent, draw))

    # Conversations

    def _session(self, user: _AgentUser) -> _Agent:
        user.sessions += 1
        name = f"{user.number}-{user.sessions}"
        agent = self._agent(user, name, name)
        project = agent.rng.randrange(self._coding.projects)
        agent.head = (*agent.head, Piece(_FIRST_NOTES + project, NOTES_TOKENS))
        agent.turns = _turns(agent.rng, self._coding.turns, TURNS_SIGMA, FEWEST_TURNS, self._coding.most_turns)
        agent.add_new(AgentRole.USER, TASK_TOKENS, TASK_SIGMA, TASK_MOST)
        return agent

    def _agent(self, user: _AgentUser, name: str, session: str) -> _Agent:
        first = ANSWER_IDS + user.number * _USER_IDS + next(user.agents) * _AGENT_IDS
        return _Agent(
            name=name,
            session=session,
            rng=random.Random(f"{self._seed}:coding-agents:{name}"),
            ids=count(first),
            head=(Piece(_TOOLS, TOOLS_TOKENS), Piece(_SYSTEM, SYSTEM_TOKENS)),
            turns=1,
        )

    def _delegate(self, user: _AgentUser, agent: _Agent, now: float) -> Sequence[Arrival]:
        """Start sub-agents; the session goes on when the last of them has ended."""
        started: list[Arrival] = []
        agent.reports = [None] * agent.rng.randint(1, self._coding.most_sub_agents)
        for place in range(len(agent.reports)):
            sub = self._agent(user, f"{agent.name}-{agent.sent}.{place}", agent.session)
            sub.head, sub.parent, sub.place = agent.head, agent, place
            sub.turns = _turns(sub.rng, SUB_TURNS, SUB_TURNS_SIGMA, FEWEST_SUB_TURNS, MOST_SUB_TURNS)
            sub.add_new(AgentRole.USER, TASK_TOKENS, TASK_SIGMA, TASK_MOST)
            started += self._send(user, sub, now + START_S)
        return started

    def _over(self, user: _AgentUser, agent: _Agent, now: float) -> Sequence[Arrival]:
        """A conversation has had its last response."""
        parent = agent.parent
        if parent is None:
            return self._send(user, self._session(user), now + self._person(agent.rng))
        parent.reports[agent.place] = agent.said[-1]
        if None in parent.reports:
            return ()
        for report in parent.reports:
            assert report is not None
            parent.add(AgentRole.RESULT, report)
        return self._send(user, parent, now + START_S)

    def _next(self, agent: _Agent, draw: float) -> float:
        """Append what follows a response: a tool's result, or what a person writes. How long that takes, in seconds."""
        coding = self._coding
        if agent.parent is None and draw < coding.delegate + coding.person_share:
            agent.add_new(AgentRole.USER, TASK_TOKENS, TASK_SIGMA, TASK_MOST)
            return self._person(agent.rng)
        agent.add_new(AgentRole.RESULT, coding.result_tokens, RESULT_SIGMA, RESULT_MOST)
        return min(TOOL_MOST_S, coding.tool_s * agent.rng.lognormvariate(0.0, TOOL_SIGMA))

    def _person(self, rng: random.Random) -> float:
        return min(PERSON_MOST_S, self._coding.person_s * rng.lognormvariate(0.0, PERSON_SIGMA))

    def _skip(self, agent: _Agent, turns: int) -> None:
        """Let it have so many turns behind it, of which nobody was asked."""
        for _ in range(turns):
            if self._too_long(agent):
                self._replace(agent, Piece(next(agent.ids), _summary(agent.rng)))
            agent.add(AgentRole.ASSISTANT, Piece(next(agent.ids), self._output(agent.rng)))
            self._next(agent, agent.rng.uniform(self._coding.delegate, 1.0))
        agent.turns -= turns

    def _too_long(self, agent: _Agent) -> bool:
        return size((*agent.head, *agent.said)) > self._coding.compact_at

    def _output(self, rng: random.Random) -> int:
        return lognormal(rng, self._coding.output_tokens, OUTPUT_SIGMA, at_most=OUTPUT_MOST)

    @staticmethod
    def _replace(agent: _Agent, summary: Piece) -> None:
        """The conversation is its summary from now on."""
        agent.said, agent.roles, agent.compacting = [summary], [AgentRole.USER], False

    # Requests

    def _send(self, user: _AgentUser, agent: _Agent, at: float) -> Sequence[Arrival]:
        """The agent's next request: its turn, or a compaction before it."""
        since = at - self._began_at
        if since >= self._coding.duration_s:
            return ()
        if self._too_long(agent):
            agent.compacting = True
            agent.add(AgentRole.USER, Piece(next(agent.ids), SUMMARISE_TOKENS))
        agent.sent += 1
        tokens = _summary(agent.rng) if agent.compacting else self._output(agent.rng)
        job = Job(
            f"{agent.name}-{agent.sent}",
            (*agent.head, *agent.said),
            Piece(next(agent.ids), tokens),
            session=agent.session,
            phase="warm-up" if since < self._coding.warm_up_s else "",
            roles=AgentRole.TOOLS + AgentRole.SYSTEM + AgentRole.USER + "".join(agent.roles),
        )
        self._live[job.id] = user, agent
        return ((at, job),)


def _turns(rng: random.Random, median: float, sigma: float, fewest: int, most: int) -> int:
    return max(fewest, lognormal(rng, median, sigma, at_most=most))


def _summary(rng: random.Random) -> int:
    return lognormal(rng, SUMMARY_TOKENS, SUMMARY_SIGMA, at_most=SUMMARY_MOST)
