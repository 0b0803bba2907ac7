"""What goes into the engine, what comes out of it, and what it keeps of a request in between.

Values only, and one mutable record for each request inside. What changes them, and when, is `engine.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from lbproxy.sim.engine.kv_cache import BlockPool
from lbproxy.sim.engine.lora_slots import LoraSlots
from lbproxy.sim.engine.presets import Preset


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


class FirstToken(NamedTuple):
    """A request's prefill is done."""

    id: str
    cached_tokens: int
    """How much of the prompt came from the prefix cache when the request was first scheduled."""
    loaded_adapter: bool = False
    """The server had to load the request's adapter for it."""


class StepDone(NamedTuple):
    """One step's results: what the server would now send."""

    at: float
    tokens: tuple[str, ...]
    """Every request that got one token; empty if the engine was told that nobody wants to know."""
    first: tuple[FirstToken, ...]
    """Those that got their first token."""
    finished: tuple[str, ...]
    """Those that got their last."""


class Gauges(NamedTuple):
    """What /metrics shows: the state after the latest step. The counters never fall."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """Blocks in use by requests over all blocks; cached blocks without a user do not count."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those found there."""
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running_adapters: tuple[str, ...] = ()
    """Distinct adapters of the running requests."""
    waiting_adapters: tuple[str, ...] = ()
    """Distinct adapters of the waiting requests."""


class Phase(Enum):
    """How far a request has come."""

    ARRIVING = "arriving"
    """In the API server."""
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Running:
    """A request inside the engine, running or not. Of a decode, `computed` and `generated` are as of `mark`."""

    request: SimRequest
    ready_at: float
    phase: Phase = Phase.ARRIVING
    computed: int = 0
    """Tokens whose KV is in `blocks`, those of the chunk in flight included."""
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading blocks that are hittable, or were found."""
    cached_tokens: int | None = None
    """None until first scheduled."""
    loaded_adapter: bool = False
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


class Outlook(NamedTuple):
    """The engine's own state, for who has to foresee what it will do; not to be changed."""

    preset: Preset
    seconds_per_ms: float
    pool: BlockPool
    lora: LoraSlots
    step_ends_at: float | None
    """Of the step in flight; None = idle."""
    steps_done: int
    context: int
    """Computed tokens of all decodes together."""
    decoding: Mapping[str, Running]
    finishing: Mapping[int, Sequence[Running]]
    """By how many steps will be done then; an entry counts if the sequence's `finishes_at` says the same."""
    prefills: Sequence[Running]
    """Those with a chunk in the step in flight."""
    partial: Running | None
    """The one whose prefill goes on after that."""
    queue: Sequence[Running]
    """Not begun, in the order in which they will; some may be GONE."""
