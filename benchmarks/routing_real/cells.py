# SPDX-License-Identifier: Apache-2.0
"""Who asks the real servers for what: cells, and the recorded sessions of a seed. No I/O, no chance but seeds.

A session is recorded: texts, lengths and pauses depend on the seed alone, and what stands in a prompt as an earlier
response is the recording's, not what the server said. So every router is asked the same. Only when a turn is sent
depends on when the response before it ended, as people and tools wait for it (a closed loop): servers that are slower
are asked less, and never fall behind for ever.

Cells are told once, for one core: a prompt of 2,000 tokens that is not cached takes it about as long as a GPU one of
50,000. `sized` makes of a cell one for other servers: the same users with longer texts, more of them, in faster motion.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NotRequired, TypedDict, cast

from benchmarks.http_routing.cells import MODEL
from lbproxy.sim.workloads.catalogue import WARM_UP
from lbproxy.sim.workloads.mix import Ask, body
from lbproxy.sim.workloads.prompts import Piece, size
from lbproxy.sim.workloads.workload import ANSWER_IDS, Arrival, Job, lognormal

SPREAD = 0.5
"""Sigma of the lognormal distributions of lengths."""
MAX_ANSWER = 64
"""Or four times the median, if that is more."""
_HEADS_OF_KIND, _TEXTS_OF_USER = 1 << 10, 1 << 24
"""More than a kind has system prompts, and than a user writes texts: ids are counted from a multiple of these."""
_WORDS_APART = 1 << 80
"""More than any id of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Users who ask alike. Tokens are medians, times are means."""

    users: int
    heads: int = 0
    """System prompts; each user has one of them. 0: none."""
    head_tokens: int = 0
    turn_tokens: int
    answer_tokens: int
    turns: int
    """Of a session; then the user begins a new one."""
    max_context: int
    """Tokens; a session that would become longer ends before."""
    think_s: float
    """From a response to the next request."""


ORDINARY = 0.7
"""Of what the servers can do: below it every router does, above it waits grow by themselves."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Who is there."""

    title: str
    kinds: dict[str, Kind]
    load: float = ORDINARY
    """Of what the servers can do, where that is measured before (`load.py`)."""
    warm_up_s: float = 8
    """Requests before do not count: caches are empty."""
    duration_s: float = 34
    """No request is sent after so long, warm-up included."""
    tokens_per_word: float = 1.0
    """The model's, for each word of a text: what `Kind` calls tokens are words."""
    most_per_s: float | None = None
    """Responses that the servers give at most; None: not measured."""


MIXED = "agents with a growing context, chat in six apps with a system prompt each, and prompts that come once"
AGENTS = Kind(
    users=4, heads=1, head_tokens=1200, turn_tokens=180, answer_tokens=16, turns=12, max_context=3600, think_s=1.2
)
CHAT = Kind(users=7, heads=6, head_tokens=900, turn_tokens=50, answer_tokens=24, turns=6, max_context=2400, think_s=5.0)
ONE_OFF = Kind(users=1, turn_tokens=500, answer_tokens=16, turns=1, max_context=2400, think_s=4.0)
APPS = Kind(
    users=16, heads=16, head_tokens=1400, turn_tokens=60, answer_tokens=20, turns=3, max_context=2400, think_s=4
)
CELLS: dict[str, Cell] = {
    "mixed": Cell(MIXED, {"agents": AGENTS, "chat": CHAT, "one-off": ONE_OFF}),
    "system prompts": Cell("users of many apps: sixteen system prompts, and short questions", {"apps": APPS}),
    "hot prompt": Cell(
        "three of four users are of one app, so that its system prompt alone is more than one server's share",
        {"hot": replace(APPS, users=12, heads=1), "others": replace(APPS, users=4, heads=4)},
    ),
    "overload": Cell(
        "those of mixed, twice as many as the servers can serve",
        {"agents": AGENTS, "chat": CHAT, "one-off": ONE_OFF},
        load=2.0,
    ),
    "agents": Cell("agents alone: one system prompt, contexts that grow and are read again", {"agents": AGENTS}),
}
ON_ONE_CORE = ["mixed", "system prompts"]
"""Measured on CPU if no cell is named."""


class CellFields(TypedDict):
    """A Cell as JSON."""

    title: str
    kinds: dict[str, dict[str, float]]
    load: float
    warm_up_s: float
    duration_s: float
    tokens_per_word: float
    most_per_s: NotRequired[float | None]


def cell_of(fields: CellFields) -> Cell:
    """From JSON."""
    kinds = {name: Kind(**cast(dict[str, int], kind)) for name, kind in fields["kinds"].items()}
    return replace(Cell("", {}), **{**fields, "kinds": kinds})  # type: ignore[arg-type]


def sized(cell: Cell, *, users: float, words: float, pace: float, tokens_per_word: float) -> Cell:
    """For other servers: so many times the users, lengths and seconds. System prompts stay as many."""

    def longer(size: int) -> int:
        return max(4, round(size * words)) if size else 0

    kinds = {
        name: replace(
            who,
            users=max(1, round(who.users * users)),
            head_tokens=longer(who.head_tokens),
            turn_tokens=longer(who.turn_tokens),
            answer_tokens=longer(who.answer_tokens),
            max_context=longer(who.max_context),
            think_s=who.think_s * pace,
        )
        for name, who in cell.kinds.items()
    }
    return replace(
        cell,
        kinds=kinds,
        warm_up_s=cell.warm_up_s * pace,
        duration_s=cell.duration_s * pace,
        tokens_per_word=tokens_per_word,
    )


@dataclass(slots=True, eq=False)
class _User:
    """Its chance is its own, so that it says the same whatever the order in which servers respond."""

    number: int
    kind: str
    who: Kind
    head: tuple[Piece, ...]
    rng: random.Random
    said: list[Piece] = field(default_factory=list)
    texts: int = 0
    sessions: int = 0
    turns: int = 0
    """Of this session."""

    def write(self, median: int, at_most: int) -> Piece:
        self.texts += 1
        first = ANSWER_IDS + self.number * _TEXTS_OF_USER
        return Piece(first + self.texts, lognormal(self.rng, median, SPREAD, at_most=at_most))


class Recorded:
    """The sessions of a seed, as a Workload."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._cell = cell
        self._users: list[_User] = []
        self._began_at: float | None = None
        for place, (kind, who) in enumerate(cell.kinds.items()):
            for of_kind in range(who.users):
                number = len(self._users)
                head = (Piece(place * _HEADS_OF_KIND + of_kind % who.heads, who.head_tokens),) if who.heads else ()
                rng = random.Random(f"{seed}:{kind}:{of_kind}")
                self._users.append(_User(number, kind, who, head, rng))

    def begin(self, now: float) -> Sequence[Arrival] | None:
        """Every user's first request, spread over half of the warm-up. Users are somewhere in a session."""
        if self._began_at is not None:
            return None
        self._began_at = now
        found = []
        for user in self._users:
            user.turns = user.rng.randrange(user.who.turns)
            at = now + user.rng.uniform(0, self._cell.warm_up_s / 2)
            found.append((at, self._turn(user, at)))
        return sorted(found, key=lambda arrival: arrival[0])

    def ended(self, job: Job, now: float) -> Sequence[Arrival]:
        """The same user's next request."""
        assert self._began_at is not None
        user = self._users[int(job.id.partition("-")[0])]
        user.said.append(job.answer)
        at = now + user.rng.expovariate(1 / user.who.think_s)
        return () if at - self._began_at >= self._cell.duration_s else [(at, self._turn(user, at))]

    def _turn(self, user: _User, at: float) -> Job:
        assert self._began_at is not None
        who = user.who
        asked = user.write(who.turn_tokens, who.max_context // 2)
        answer = user.write(who.answer_tokens, max(MAX_ANSWER, 4 * who.answer_tokens))
        if user.turns >= who.turns or size((*user.head, *user.said, asked, answer)) > who.max_context:
            user.turns, user.said = 0, []
            user.sessions += 1
        user.said.append(asked)
        user.turns += 1
        return Job(
            f"{user.number}-{user.texts}",
            (*user.head, *user.said),
            answer,
            session=f"{user.number}-{user.sessions}",
            phase=WARM_UP if at - self._began_at < self._cell.warm_up_s else "",
            flow=user.kind,
        )


def kind_of(cell: Cell, job: str) -> str:
    """Of a job, by its id."""
    number = int(job.partition("-")[0])
    for kind, who in cell.kinds.items():
        if number < who.users:
            return kind
        number -= who.users
    raise ValueError(f"{job} is of no user of this cell")


def chat_body(job: Job, model: str = MODEL, words: int = 0) -> bytes:
    """As a streamed chat completion. `words`: another number, other words everywhere, of the same lengths."""
    prompt = tuple(Piece(piece.id + words * _WORDS_APART, piece.tokens) for piece in job.prompt)
    return body(Ask(0.0, job.flow, replace(job, prompt=prompt), stream=True), model)
