# SPDX-License-Identifier: Apache-2.0
"""What the KV cache of an engine without gauges has space for, learned from streams that stall.

An engine takes requests as long as their prompts fit. As the responses grow it sends running requests back to its
queue, and no new one starts meanwhile (vLLM preempts the latest). Through a stream that shows as silence while the
engine's other streams go on. Silence alone proves nothing: an engine's parser keeps back a tool call until it is
complete, and one that stands still is silent altogether. So it counts only together with a first byte that is late,
while most streams go on, and if two observations in a row say the same: that is what a limit does.

The limit is in tokens of prompts and responses in flight, as they are known here: prompts from their bytes, shared
prefixes as often as they are used. Whatever that is off by, the limit is off by as well. Where an engine reports its
queue and the use of its cache, that counts instead (`core.capacity.slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

STALLED: Final = 2
"""So many silent streams at a time; one may have any reason."""
EVERY_S: Final = 0.5
"""Between two observations: what one shows, the next request shows again."""
DECREASE: Final = 0.3
"""Share of the limit's error that one observation corrects."""
INCREASE: Final = 1.003
"""By which the limit grows with a first byte in time while it is nearly used up."""
NEARLY: Final = 0.9
"""What is used up, or is the same, within this factor."""
GROWTH: Final = 0.5
"""Share of the responses' expected growth that space is kept for: some end while others grow."""


class Space:
    """One engine's."""

    def __init__(self) -> None:
        self.limit_tokens = inf
        """Tokens in flight; infinite: nothing showed it yet."""
        self._seen_at = -inf
        self._held = 0.0
        """What the latest observation showed."""

    def save(self) -> dict[str, float]:
        """The limit, for `restore`; empty while there is none."""
        return {} if self.limit_tokens == inf else {"limit_tokens": self.limit_tokens}

    def restore(self, saved: Mapping[str, float]) -> None:
        self.limit_tokens = saved.get("limit_tokens", inf)

    def lacked(self, context_tokens: float, in_flight: int, stalled: int, now: float) -> None:
        """A first byte is late while `stalled` of the streams among `in_flight` requests, which have so many tokens in
        all, are silent.
        """
        if not STALLED <= stalled < 0.5 * in_flight or now < self._seen_at + EVERY_S:
            return
        held, before = context_tokens * (1.0 - stalled / in_flight), self._held
        self._seen_at, self._held = now, held
        if not NEARLY * before < held < before / NEARLY:
            return
        self.limit_tokens = (
            held if self.limit_tokens == inf else self.limit_tokens + DECREASE * (held - self.limit_tokens)
        )

    def sufficed(self, context_tokens: float) -> None:
        """A first byte came in time with so many tokens in flight."""
        if context_tokens > NEARLY * self.limit_tokens:
            self.limit_tokens *= INCREASE

    def is_full(self, context_tokens: float, growth_tokens: float) -> bool:
        """Whether no more requests should go there. `growth_tokens`: what those that are there are expected to add."""
        return context_tokens + GROWTH * growth_tokens > self.limit_tokens
