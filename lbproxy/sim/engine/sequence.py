# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine, what comes out of it, and what it keeps of a request in between.

Values only, and mutable records: one for each request inside, and one for the KV of each prompt that is prefilled for
another engine (`Hold`). What changes them, and when, is `engine.py`'s and `handover.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

LEASE_S = 30.0
"""vLLM's `kv_lease_duration`: how long prefilled KV is held for a decode that has not been heard of."""
RENEWAL_SHARE = 2 / 3
"""The share of a lease by which a heartbeat of the decode extends it. As vLLM 0.33 (nixl/base_scheduler.py)."""
HEARTBEATS = 6
"""Heartbeats of a decode that waits, in each lease."""


class KvState(Enum):
    """Whether prefilled KV can be read."""

    PENDING = "pending"
    """It is being computed, or its engine has not said yet that it is there."""
    HELD = "held"
    FREED = "freed"
    """It was read, or is not wanted any more."""
    EXPIRED = "expired"
    """Nobody renewed its lease. Whoever reads its blocks now gets wrong data, and is not told."""
    LOST = "lost"
    """Its engine failed, or the prefill was aborted: reading it fails."""


@dataclass(slots=True, eq=False)
class Hold:
    """Asks the engine that prefills a request to hold its KV, and says what became of that. One for one request."""

    lease_s: float = LEASE_S
    changed: Callable[[], None] | None = None
    """Called when the state changes, while the engine computes: it may not call that engine."""
    state: KvState = KvState.PENDING
    expires_at: float = 0.0
    """When held KV expires; set before it is held, it is when the lease ends at the earliest."""
    blocks: Sequence[int] = ()
    wanted: bool = True
    """False: it was released before the prompt was computed, and its blocks are not kept."""

    def become(self, state: KvState) -> None:
        """Change the state."""
        self.state = state
        if self.changed is not None:
            self.changed()


class KvSource(Protocol):
    """From where an engine has the KV of a prompt, for one request. Its methods may not call that engine."""

    recompute: bool
    """If the KV is lost, the engine computes the prompt itself, instead of failing the request."""

    @property
    def state(self) -> KvState:
        """Looked at when the transfer is to begin, after each `Engine.poke`, and at its end. FREED is as EXPIRED."""

    def begin(self, *, now: float) -> None:
        """There are blocks for it: it can be read as soon as it is there."""

    def finish(self, *, now: float, was_read: bool) -> None:
        """The KV was read, or never will be: the engine that holds it may free it. Called once, unless `abandon` is."""

    def abandon(self, *, now: float) -> None:
        """The engine that wanted it failed: nobody renews the lease from now on."""


class RequestTooLong(ValueError):  # noqa: N818 - it is a refusal, named as the client will read it
    """The request can never run on this engine: prompt and output exceed `max_model_len`."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One sequence to compute."""

    id: str
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1: the engine generates exactly so many."""
    block_hashes: Sequence[int] = ()
    """Chained hash of each full block of the text, prompt first and then output. Blocks past its end are never hit.
    The hash chain starts from the adapter: what one adapter computed is of no use to another."""
    adapter: str | None = None
    """The LoRA adapter to compute it with; None = the base model. Only for engines with `max_loras`."""
    rank: int | None = None
    """The data-parallel rank to compute it; None = the server chooses."""
    hold: Hold | None = None
    """Its KV is held when it has ended, unless it is aborted. Usually it has one token of output."""
    source: KvSource | None = None
    """Where the KV of its prompt comes from; None = it is computed here."""


def check_length(request: SimRequest, max_model_len: int) -> None:
    """Raises `RequestTooLong`."""
    if request.prompt_tokens + request.output_tokens > max_model_len:
        raise RequestTooLong(
            f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens exceed "
            f"the {max_model_len} of the model"
        )


class FirstToken(NamedTuple):
    """A request's prefill is done."""

    id: str
    cached_tokens: int
    """How much of the prompt came from the prefix cache when the request was first scheduled."""
    loaded_adapter: bool = False
    """The server had to load the request's adapter for it."""
    received_tokens: int = 0
    """How much of the prompt came from another engine."""
    garbage: bool = False
    """It read wrong data: the text of this request has nothing to do with its prompt."""


class StepDone(NamedTuple):
    """One step's results: what the server would now send."""

    at: float
    tokens: tuple[str, ...]
    """Every request that got one token; empty if the engine was told that nobody wants to know."""
    first: tuple[FirstToken, ...]
    """Requests that got their first token."""
    finished: tuple[str, ...]
    """Requests that got their last token."""
    failed: tuple[str, ...] = ()
    """Requests that ended without a last token, because the KV of their prompt could not be read."""


class PlainServer:
    """Those calls of `engine.Engine` that have no effect on a server which keeps no KV between requests."""

    def release(self, hold: Hold, *, now: float) -> bool:
        """Nothing is held here."""
        return False

    def renew(self, hold: Hold, expires_at: float, *, now: float) -> None:
        """Nothing is held here."""

    def poke(self, request_id: str, *, now: float) -> None:
        """Nothing is received here."""

    def unload_adapter(self, adapter: str, *, now: float) -> None:
        """No adapter has a slot here."""

    def forget(self, *, now: float) -> None:
        """Nothing is cached here."""


@dataclass(slots=True)
class EngineCounts:
    """What an engine counts, since its start: see EngineGauges."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class EngineGauges(NamedTuple):
    """What /metrics shows: the state after the latest step. The counters never fall."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """Blocks in use by requests over all blocks; cached blocks without a user do not count."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running_adapters: tuple[str, ...] = ()
    """Distinct adapters of the running requests."""
    waiting_adapters: tuple[str, ...] = ()
    """Distinct adapters of the waiting requests."""
    deferred: int = 0
    """Waiting requests whose KV comes from another engine and has been given space."""
    held_blocks: int = 0
    """In use by requests that were prefilled here, for another engine to read."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from other engines."""
    transfers: int = 0
    """Requests whose KV did."""
    failed_transfers: int = 0
    expired_holds: int = 0
    """Prefilled requests whose lease ended before they were read."""
    garbage: int = 0
    """Requests that read KV which was not held any more."""


class SequencePhase(Enum):
    """How far a request has come."""

    ARRIVING = "arriving"
    """In the API server."""
    WAITING = "waiting"
    RECEIVING = "receiving"
    """It has blocks; its KV is on its way from another engine, or here and not in a step yet."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Running:
    """A request inside the engine, running or not. Of a decode, `computed` and `generated` are as of `mark`."""

    request: SimRequest
    ready_at: float
    phase: SequencePhase = SequencePhase.ARRIVING
    computed: int = 0
    """Tokens whose KV is in `blocks`, those of the chunk in flight included."""
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading blocks that are hittable, or were found."""
    cached_tokens: int | None = None
    """None until first scheduled."""
    loaded_adapter: bool = False
    source: KvSource | None = None
    """Where its KV is to come from; None once it is here, and of a request that computes its prompt."""
    received_tokens: int = 0
    garbage: bool = False
    mark: int = 0
    """How many steps were done when it began to decode."""
    crosses_at: int = -1
    """The step, by the same count, in which it needs its next block; -1 = none."""
    finishes_at: int = -1
    """How many steps will be done when it has its last token; -1 = not decoding."""

    @property
    def known_tokens(self) -> int:
        """The prompt and what was generated: what a prefill, or one after a preemption, has to compute."""
        return self.request.prompt_tokens + self.generated
