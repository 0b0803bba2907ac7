# SPDX-License-Identifier: Apache-2.0
"""What clients send: jobs, and the order in which a simulation gets them.

A workload is asked twice only: `begin` for the next batch, once everything before has ended (a ladder waits between its
steps), and `ended` for what the same client sends next (a closed loop). It never sees servers or policies, and its
chance comes from its seed, so the same seed asks the same of every policy: open loops send the same requests at the
same times, closed loops the same conversations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from lbproxy.sim.workloads.prompts import Piece, size

ANSWER_IDS = 1 << 60
"""Ids of responses and of private texts start here; lower ones are the traces' and the shared texts'."""
TEXTS_APART = 1 << 51
"""Between the ids of the pieces of one workload and the next: more than any has of either kind (see `ANSWER_IDS`). And
256 of them stay below 2**61 - 1, modulo which Python hashes integers.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a client."""

    id: str
    """Unique in a workload."""
    prompt: tuple[Piece, ...]
    answer: Piece
    """What the server will generate: exactly so many tokens."""
    model: str | None = None
    """The LoRA adapter to ask for; None = the base model."""
    session: str | None = None
    phase: str = ""
    """Which part of the workload it belongs to, for the report; phases that start with `warm-up` are left out of it."""
    roles: str = ""
    """What each piece of the prompt is in a conversation, a letter each (`AgentRole`), to write a request body from;
    empty = not known."""
    flow: str = "anonymous"
    """Whose it is."""
    priority: int | None = None
    """What it asks for; None = nothing."""
    slo_ttft_s: float | None = None
    """How long after its arrival its client wants the first token, or none."""
    patience_s: float | None = None
    """How long after its arrival its client leaves if it has read nothing by then; None = it waits for ever."""
    stream_share: float | None = None
    """How likely it wants a stream; None = as the fleet's requests do."""

    @property
    def prompt_tokens(self) -> int:
        return size(self.prompt)


Arrival = tuple[float, Job]
"""(when, what)."""


class Workload(Protocol):
    """Where jobs come from. One run of one simulation uses it up."""

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """The next batch, at `now` or later, in order of time; None = there is no more. All before has ended."""

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """What its client sends next, each at `now` or later; also asked after a job that failed."""


class OpenLoop:
    """Clients that do not wait for answers: phases, each of which starts when the one before has drained."""

    def __init__(self, phases: Iterable[Sequence[Arrival]]) -> None:
        """Times within a phase count from its begin."""
        self._phases = iter(phases)

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """The next phase."""
        phase = next(self._phases, None)
        return None if phase is None else [(now + at, job) for at, job in phase]

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """Nothing follows."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How the clients of a closed loop talk. Tokens; drawn anew for each turn, lognormal around the given medians."""

    users: int
    shared_tokens: int
    """System prompt, the same for all users of an app."""
    apps: int = 1
    turn_tokens: int
    """What a user adds in a turn."""
    answer_tokens: int
    spread: float = 0.6
    """Sigma of the lognormal distributions."""
    think_s: float
    """Mean of the exponential time between a response and the next turn."""
    max_context: int
    """A conversation that would grow beyond it ends, and the user begins a new one."""
    ends: float = 0.0
    """Chance that a conversation ends after a turn."""
    duration_s: float
    """Nobody begins a turn after so long."""
    ramp_s: float = 10.0
    """Users begin spread over so long."""


class _User:
    """One client: its own chance, so that what it says does not depend on when others are served."""

    def __init__(self, number: int, seed: int, conversation: Conversation) -> None:
        self.rng = random.Random(f"{seed}:user:{number}")
        self.number = number
        self.shared = Piece(number % conversation.apps, conversation.shared_tokens)
        self.history: tuple[Piece, ...] = ()
        self.sessions = 0
        self.turns = 0


class ClosedLoop:
    """Users who read the response, think, and go on: each turn's prompt is all that was said before, and more."""

    def __init__(self, conversation: Conversation, seed: int) -> None:
        self._conversation = conversation
        self._users = {str(number): _User(number, seed, conversation) for number in range(conversation.users)}
        self._ids = fresh_ids()
        self._begun = False
        self._ends_at = 0.0

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """Every user's first turn."""
        if self._begun:
            return None
        self._begun = True
        self._ends_at = now + self._conversation.duration_s
        ramp_s = self._conversation.ramp_s
        starts = [(now + user.rng.uniform(0, ramp_s), user) for user in self._users.values()]
        return [(at, self._turn(user)) for at, user in sorted(starts, key=lambda start: start[0])]

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """The same user's next turn, after thinking."""
        user = self._users[job.id.partition("-")[0]]
        user.history = (*job.prompt[1:], job.answer)
        if user.rng.random() < self._conversation.ends:
            user.history = ()
        at = now + user.rng.expovariate(1 / self._conversation.think_s)
        return ((at, self._turn(user)),) if at < self._ends_at else ()

    def _turn(self, user: _User) -> Job:
        conversation = self._conversation
        said = Piece(self._ids(), lognormal(user.rng, conversation.turn_tokens, conversation.spread))
        answer = Piece(self._ids(), lognormal(user.rng, conversation.answer_tokens, conversation.spread))
        if size((user.shared, *user.history, said, answer)) > conversation.max_context:
            user.history = ()
        if not user.history:
            user.sessions += 1
        user.turns += 1
        session = f"{user.number}-{user.sessions}"
        return Job(f"{user.number}-{user.turns}", (user.shared, *user.history, said), answer, session=session)


def fresh_ids() -> Callable[[], int]:
    """A source of piece ids that nothing else has."""
    last = ANSWER_IDS

    def take() -> int:
        nonlocal last
        last += 1
        return last

    return take


def lognormal(rng: random.Random, median: float, sigma: float, *, at_most: int = 1 << 30) -> int:
    """A length in tokens, at least 1."""
    return max(1, min(at_most, round(median * rng.lognormvariate(0.0, sigma))))


def poisson(rng: random.Random, rate: float, duration_s: float) -> list[float]:
    """Arrival times of so many a second, from 0 to `duration_s`."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def renewals(rng: random.Random, rate: float, duration_s: float, shape: float) -> list[float]:
    """Arrival times of so many a second on average, from 0 to `duration_s`, the times between which follow a gamma
    distribution. The coefficient of variation is `shape` to the power of -1/2; its square is the index of dispersion of
    counts.
    """
    times: list[float] = []
    at = rng.gammavariate(shape, 1 / (rate * shape))
    while at < duration_s:
        times.append(at)
        at += rng.gammavariate(shape, 1 / (rate * shape))
    return times


def popularity(things: int, skew: float) -> list[float]:
    """As cumulative weights: of the n-th, n to the power of minus `skew`."""
    return list(accumulate((number + 1) ** -skew for number in range(things)))


@dataclass(frozen=True, slots=True)
class Source:
    """One of the workloads, and what all its requests say."""

    workload: Workload
    flow: str
    priority: int | None = None
    slo_ttft_s: float | None = None
    patience_s: float | None = None
    stream_share: float | None = None


class Clients:
    """A workload made of several, each of a flow of its own: clients that know nothing of each other.

    What they send shares no text, and each has its own seed, so that one of them is the same whoever else there is.
    Those that come in steps wait for one another between steps.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self._live: dict[str, tuple[int, Job]] = {}
        """Jobs that have not ended: which source each is of, and what it is there."""

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """The next batch of each."""
        batches = [source.workload.begin(now) for source in self._sources]
        if all(batch is None for batch in batches):
            return None
        arrivals = [self._marked(number, *one) for number, batch in enumerate(batches) for one in batch or ()]
        return sorted(arrivals, key=lambda arrival: arrival[0])

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """What the same client sends next."""
        number, own = self._live.pop(job.id)
        return [self._marked(number, *one) for one in self._sources[number].workload.ended(own, now)]

    def _marked(self, number: int, at: float, job: Job) -> Arrival:
        source = self._sources[number]
        marked = replace(
            job,
            id=f"{number}/{job.id}",
            prompt=tuple(_apart(piece, number) for piece in job.prompt),
            answer=_apart(job.answer, number),
            session=None if job.session is None else f"{number}/{job.session}",
            flow=source.flow,
            priority=source.priority,
            slo_ttft_s=source.slo_ttft_s,
            patience_s=source.patience_s,
            stream_share=source.stream_share,
        )
        self._live[marked.id] = number, job
        return at, marked


def _apart(piece: Piece, number: int) -> Piece:
    return Piece(piece.id + number * TEXTS_APART, piece.tokens)
