# SPDX-License-Identifier: Apache-2.0
"""Coding agents: their statistics are those of the sources, and what each session says depends on the seed alone."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import fmean, median

import pytest

from lbproxy.sim.workloads.catalogue import UnknownWorkload, checked, make_workload
from lbproxy.sim.workloads.coding_agents import (
    FEWEST_TURNS,
    MOST_AT_ONCE,
    MOST_SUB_AGENTS,
    MOST_TURNS,
    NOTES_TOKENS,
    SUMMARISE_TOKENS,
    SYSTEM_TOKENS,
    TOOLS_TOKENS,
    AgentRole,
)
from lbproxy.sim.workloads.workload import ANSWER_IDS, Arrival, Clients, Job, Source, Workload

SHARED = TOOLS_TOKENS + SYSTEM_TOKENS


def all_of(workload: Workload, response_s: Callable[[Job], float] = lambda _: 8.0) -> Iterator[Arrival]:
    """Every request, each answered after so long."""
    due = [(at, job.id, job) for at, job in workload.begin(0.0) or ()]
    heapq.heapify(due)
    while due:
        at, _, job = heapq.heappop(due)
        yield at, job
        ended_at = at + response_s(job)
        for next_at, following in workload.ended(job, ended_at):
            assert next_at >= ended_at
            heapq.heappush(due, (next_at, following.id, following))


def made(seed: int = 1, name: str = "coding-agents", **parameters: float) -> list[Arrival]:
    return list(all_of(make_workload(name, parameters, seed=seed)))


def conversations(arrivals: list[Arrival]) -> dict[str, list[Job]]:
    """Of sessions and sub-agents, each in order."""
    found: dict[str, list[Job]] = defaultdict(list)
    for _, job in arrivals:
        found[job.id.rpartition("-")[0]].append(job)
    return found


def is_sub(name: str) -> bool:
    return "." in name


@pytest.fixture(scope="module")
def many() -> list[Arrival]:
    return made(sessions=60, duration_s=1500)


def test_sizes_are_those_of_the_sources(many: list[Arrival]) -> None:
    """Within a quarter of TraceLab's 523 output tokens a request and of vLLM's 2,242 tokens of growth a turn."""
    jobs = [job for _, job in many]
    output = fmean(job.answer.tokens for job in jobs if AgentRole.ASSISTANT in job.roles)
    growth = [
        after.prompt_tokens - before.prompt_tokens
        for turns in conversations(many).values()
        for before, after in pairwise(turns)
        if after.prompt_tokens > before.prompt_tokens
    ]
    assert output == pytest.approx(523, rel=0.25)
    assert fmean(growth) == pytest.approx(2242, rel=0.25)
    assert 60 < sum(job.prompt_tokens for job in jobs) / sum(job.answer.tokens for job in jobs) < 150
    assert 30_000 < median(job.prompt_tokens for job in jobs) < 60_000


def known_before(arrivals: list[Arrival]) -> float:
    """The share of all prompt tokens that a cache without bounds would find."""
    known: set[int] = set()
    found = asked = 0
    for _, job in arrivals:
        chain, still = 0, True
        for piece in job.prompt:
            chain = hash((chain, piece))
            still = still and chain in known
            found += piece.tokens if still else 0
            known.add(chain)
        known.add(hash((chain, job.answer)))
        asked += job.prompt_tokens
    return found / asked


def test_nearly_all_of_a_prompt_was_there_before(many: list[Arrival]) -> None:
    """About vLLM's 94.2 %."""
    assert 0.92 < known_before(many) < 0.98


def test_agentx_has_its_statistics() -> None:
    """Medians of 43 turns, 142,000 tokens in, 444 out; over 96 % cached; 4 sub-agents in 44 % of the sessions."""
    arrivals = made(name="agentx", sessions=12, duration_s=14_000, person_s=1, warm_up_s=0)
    assert median(job.prompt_tokens for _, job in arrivals) == pytest.approx(142_000, rel=0.1)
    assert median(job.answer.tokens for _, job in arrivals) == pytest.approx(444, rel=0.05)
    assert 0.96 < known_before(arrivals) < 0.99
    sessions: dict[str, list[str]] = defaultdict(list)
    for name, jobs in conversations(arrivals).items():
        assert jobs[0].session is not None
        sessions[jobs[0].session].extend([name] * len(jobs))
    # Those that are whole: neither a user's first, which began in the middle, nor its last.
    last = {max(of, key=lambda name: int(name.partition("-")[2])) for of in by_user(sessions).values()}
    whole = [names for name, names in sessions.items() if not name.endswith("-1") and name not in last]
    subs = [len({name for name in names if is_sub(name)}) for names in whole]
    assert median(sum(not is_sub(name) for name in names) for names in whole) == pytest.approx(43, rel=0.12)
    assert sum(map(bool, subs)) / len(subs) == pytest.approx(0.44, abs=0.08)
    assert 3 <= median(filter(None, subs)) <= 5


def by_user(sessions: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sessions:
        found[name.partition("-")[0]].append(name)
    return found


def test_sessions_have_20_to_100_turns() -> None:
    """Counted from a session's first request, and without those that compact."""
    turns = [
        sum(job.prompt[-1].tokens != SUMMARISE_TOKENS for job in jobs)
        for name, jobs in conversations(made(sessions=40, duration_s=20_000, person_s=1)).items()
        if not is_sub(name) and not name.endswith("-1")
    ]
    # The last one of each user was cut off by the end.
    whole = sorted(turns)[40:]
    assert len(whole) > 200
    assert max(whole) <= MOST_TURNS
    assert min(whole) >= FEWEST_TURNS
    assert 28 < median(whole) < 45


def test_sub_agents_make_a_quarter_of_the_requests(many: list[Arrival]) -> None:
    """As those of the 22 recorded sessions: 26 %."""
    sub = sum(is_sub(job.id) for _, job in many)
    assert sub / len(many) == pytest.approx(0.26, abs=0.06)


def test_everybody_shares_tools_and_system_prompt_and_a_project_its_notes(many: list[Arrival]) -> None:
    heads = {job.prompt[:2] for _, job in many}
    notes = {job.prompt[2] for _, job in many}
    ((tools, system),) = heads
    assert tools.tokens + system.tokens == SHARED
    assert len(notes) == 8
    assert {piece.tokens for piece in notes} == {NOTES_TOKENS}
    assert all(len(job.roles) == len(job.prompt) and job.roles.startswith("TSU") for _, job in many)


def test_a_turn_begins_with_the_prompt_and_the_response_before_it(many: list[Arrival]) -> None:
    compactions = 0
    for turns in conversations(many).values():
        for before, after in pairwise(turns):
            said = (*before.prompt, before.answer)
            if before.prompt[-1].tokens == SUMMARISE_TOKENS and before.prompt_tokens > 109_000:
                assert after.prompt == (*before.prompt[:3], before.answer), "the summary replaces the conversation"
                compactions += 1
            else:
                assert after.prompt[: len(said)] == said
                assert after.roles[len(before.roles)] == AgentRole.ASSISTANT
                assert set(after.roles[len(said) :]) <= {AgentRole.USER, AgentRole.RESULT}
    assert compactions > 3


def test_prompts_that_grew_too_long_are_compacted_and_all_fit() -> None:
    limit = 40_000
    arrivals = made(sessions=20, duration_s=900, compact_at=limit, person_share=0)
    longest = max(job.prompt_tokens + job.answer.tokens for _, job in arrivals)
    assert limit < longest <= limit + MOST_AT_ONCE
    for turns in conversations(arrivals).values():
        for before, after in pairwise(turns):
            compacts = before.prompt_tokens > limit
            assert compacts == (before.prompt[-1].tokens == SUMMARISE_TOKENS and len(after.prompt) == 4)


def test_a_session_waits_for_all_its_sub_agents_and_gets_their_last_responses(many: list[Arrival]) -> None:
    found = conversations(many)
    starts = {job.id: at for at, job in many}
    delegated = 0
    for name in {name.rpartition("-")[0] for name in found if is_sub(name)}:
        turns = found[name]
        for before, after in pairwise(turns):
            subs = [found[sub] for sub in found if sub.startswith(f"{name}-{before.id.rpartition('-')[2]}.")]
            if not subs:
                continue
            assert 1 <= len(subs) <= MOST_SUB_AGENTS
            assert after.prompt[len(before.prompt) + 1 :][: len(subs)] == tuple(sub[-1].answer for sub in subs)
            assert all(starts[sub[-1].id] < starts[after.id] for sub in subs)
            assert all(sub[0].prompt[:3] == before.prompt[:3] and sub[0].session == before.session for sub in subs)
            delegated += len(subs) > 1
    assert delegated > 5


def test_what_a_session_says_does_not_depend_on_when_responses_come() -> None:
    """Otherwise policies would not be asked the same, nor one server the same as another."""

    def said(response_s: Callable[[Job], float]) -> dict[str, tuple[object, ...]]:
        workload = make_workload("coding-agents", {"sessions": 8, "duration_s": 600}, seed=3)
        return {job.id: (job.prompt, job.answer, job.roles) for _, job in all_of(workload, response_s)}

    rng = random.Random(5)
    quick, slow = said(lambda _: 1.0), said(lambda _: rng.uniform(0.5, 40.0))
    both = quick.keys() & slow.keys()
    assert len(both) > 80
    assert {name: quick[name] for name in both} == {name: slow[name] for name in both}


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    first, again, other = (made(seed, sessions=6, duration_s=120) for seed in (1, 1, 2))
    assert first == again != other


def test_no_two_conversations_have_a_text_in_common_but_what_all_share(many: list[Arrival]) -> None:
    """But for the last response of a sub-agent, which its session gets."""
    owner: dict[int, str] = {}
    for name, turns in conversations(many).items():
        for piece in (piece for job in turns for piece in (*job.prompt[3:], job.answer)):
            assert piece.id > ANSWER_IDS - 1
            other = owner.setdefault(piece.id, name)
            assert other.startswith(name) or name.startswith(other)


def test_caches_fill_in_a_warm_up_that_does_not_count(many: list[Arrival]) -> None:
    assert {job.phase for at, job in many if at < 150} == {"warm-up"}
    assert {job.phase for at, job in many if at >= 150} == {""}


def test_people_and_sub_agents_can_be_left_out() -> None:
    arrivals = made(sessions=10, duration_s=300, person_share=0, delegate=0)
    assert not any(is_sub(job.id) for _, job in arrivals)
    assert all(
        set(job.roles[5:]) <= {AgentRole.ASSISTANT, AgentRole.RESULT} or job.prompt_tokens > 40_000
        for _, job in arrivals
    )
    with pytest.raises(UnknownWorkload, match="turns: expected a number above 0"):
        checked("coding-agents", {"turns": 0})


def test_they_can_be_one_of_several_workloads() -> None:
    mix = Clients(Source(make_workload("coding-agents", {"sessions": 3}, seed=n), f"f{n}") for n in (1, 2))
    arrivals = [arrival for arrival, _ in zip(all_of(mix), range(60), strict=False)]
    ids = [{piece.id for _, job in arrivals if job.flow == flow for piece in job.prompt} for flow in ("f1", "f2")]
    assert not ids[0] & ids[1]
    assert all(job.roles for _, job in arrivals)
