"""One placed request, as the model of its endpoint's work counts it. The load model writes it."""

from __future__ import annotations

from math import exp
from typing import Final

from lbproxy.core.caches.adapters import Arrival
from lbproxy.core.caches.cache_size import Step
from lbproxy.core.caches.prefix_index import EndpointCache, Node
from lbproxy.core.requests.request import InferenceRequest

NEVER: Final = float("inf")
FREED_S: Final = 15.0
"""Over which time freed cache space is averaged."""


class Placement:
    """One placed request, as its endpoint's model counts it."""

    __slots__ = (
        "adapter",
        "arrival",
        "before",
        "cache",
        "due_at",
        "end",
        "ended",
        "in_flight",
        "late_at",
        "left_blocks",
        "placed_at",
        "predicted_s",
        "prefilled_ms",
        "prompt_tokens",
        "reported_at",
        "request",
        "steps",
        "streamed",
        "uncached",
        "waits_s",
        "work",
    )

    def __init__(self, request: InferenceRequest, cache: EndpointCache, root: Node, now: float) -> None:
        """`cache`: the endpoint's, in which the prompt is pinned up to `end`; `root`: of the index of prefixes."""
        self.cache = cache
        self.request = request
        self.placed_at = now
        self.prompt_tokens = 1.0
        self.uncached = 1.0
        self.work = 1.0
        """Its prefill, in tokens (`core.knowledge.prefill_work`); if it cannot be read, its size beside others like it
        (`core.capacity.unread`)."""
        self.end = root
        """The end of what is pinned of the prompt in `cache`."""
        self.left_blocks = 0
        """Blocks of the prompt that finished requests left in the cache, and no request in flight uses."""
        self.steps: tuple[Step, ...] = ()
        """How far the blocks were that the endpoint may have; empty if nobody wants to know."""
        self.due_at = NEVER
        """When a request that does not stream counts as prefilled; NEVER for streams, which say so."""
        self.late_at = NEVER
        """Of streams: by when the first byte is so late that it was not the prefills before it that took so long."""
        self.before = 0
        """Requests placed before it that had no first byte yet."""
        self.in_flight = 0
        """Requests of ours that were there before it."""
        self.predicted_s = 0.0
        """Until its first byte, by what was known when it was placed,"""
        self.waits_s = 0.0
        """of which it waits so long for other prefills."""
        self.streamed = 0
        self.reported_at = NEVER
        """When its last progress came; NEVER = none yet."""
        self.prefilled_ms = 0.0
        """How long the endpoint had computed prompts in all, by then."""
        self.adapter: str | None = None
        """The LoRA adapter that it asks for."""
        self.arrival = Arrival.LOADED
        """Whether the endpoint had it loaded."""
        self.ended = False

    @property
    def cached_tokens(self) -> float:
        """How much of the prompt is expected in the endpoint's cache."""
        return max(0.0, self.prompt_tokens - self.uncached)


def freed_per_ms(freed: tuple[float, float], now: float) -> float:
    """Tokens of cache space that became free, per millisecond, of late: from a `Work.freed`."""
    tokens, at = freed
    return tokens * exp((at - now) / FREED_S) / (1000.0 * FREED_S)
