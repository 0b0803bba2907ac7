# SPDX-License-Identifier: Apache-2.0
"""One placed request, as its endpoint's load model counts it. The load model writes it."""

from __future__ import annotations

from math import exp
from typing import Final

from lbproxy.core.caches.adapters import Arrival
from lbproxy.core.caches.cache_size import Step
from lbproxy.core.caches.prefix_index import EndpointCache, Node
from lbproxy.core.requests.request import InferenceRequest

NEVER: Final = float("inf")
FREED_S: Final = 15.0
"""Time constant for freed cache space."""


class Placement:
    """One placed request, as its endpoint's load model counts it."""

    def __init__(self, request: InferenceRequest, cache: EndpointCache, root: Node, now: float) -> None:
        """`cache`: the endpoint's, in which the prompt is pinned up to `pinned_end`. `root`: of the prefix index."""
        self.cache = cache
        self.request = request
        self.placed_at = now
        self.prompt_tokens = 1.0
        self.uncached_tokens = 1.0
        self.work = 1.0
        """Its prefill in tokens (`core.knowledge.prefill_work`); for an opaque request its size relative to the mean
        (`core.capacity.opaque`)."""
        self.pinned_end = root
        """The last pinned node of the prompt in `cache`."""
        self.idle_blocks = 0
        """Blocks of the prompt that finished requests left in the cache, and that no request in flight uses."""
        self.steps: tuple[Step, ...] = ()
        """The distances of the blocks that may be cached; empty if they are not needed."""
        self.due_at = NEVER
        """When a non-streaming request counts as prefilled; NEVER for streams, whose first byte shows it."""
        self.late_at = NEVER
        """For streams: when the first byte is so late that earlier prefills do not explain it."""
        self.in_flight = 0
        """Our requests in flight when it was placed."""
        self.predicted_s = 0.0
        """Predicted seconds until its first byte, as of its placement."""
        self.prefill_wait_s = 0.0
        """The part of `predicted_s` for which it waits for other prefills."""
        self.serial_wait_s = 0.0
        """The same if the engine computes one prefill after the other."""
        self.streamed_tokens = 0
        self.reported_at = NEVER
        """The time of its last progress; NEVER = none yet."""
        self.prefilled_ms = 0.0
        """The endpoint's total prefill time at that moment."""
        self.adapter: str | None = None
        """The LoRA adapter that it requests."""
        self.arrival = Arrival.LOADED
        """Whether the endpoint had it loaded."""
        self.ended = False

    def wait_for_model(self) -> None:
        """Note that its model is being loaded: when its response begins says nothing of the endpoint's speed."""
        self.arrival = Arrival.NO_SLOT
        self.late_at = NEVER

    @property
    def waits_for_model(self) -> bool:
        return self.arrival is Arrival.NO_SLOT and self.adapter is None

    @property
    def cached_tokens(self) -> float:
        """Tokens of the prompt that are expected in the endpoint's cache."""
        return max(0.0, self.prompt_tokens - self.uncached_tokens)


def freed_per_ms(freed: tuple[float, float], now: float) -> float:
    """The recent rate at which cache space becomes free, in tokens per millisecond; `freed`: a `Work.freed`."""
    tokens, at = freed
    return tokens * exp((at - now) / FREED_S) / (1000.0 * FREED_S)
