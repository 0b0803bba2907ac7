# SPDX-License-Identifier: Apache-2.0
"""The requests that are held for one endpoint: how many, how much work, and how much of it precedes another request.

A held request waits in the Balancer's queue, with a reservation here: the prefill work that it would have at this
endpoint. So a new request is priced with the reserved work included, and not all waiting requests choose the same
endpoint. The queue decides the order of service. For a price a rough estimate of what precedes is enough: all requests
with less work, in size classes (powers of two).
"""

from __future__ import annotations

from math import log2
from typing import Final

SIZE_CLASSES: Final = 24
"""Size classes: powers of two of tokens."""
NEWEST_FIRST_CLASSES: Final = 3
"""Size classes by which a new request precedes waiting ones, under overload."""


def size_class(work_tokens: float) -> int:
    return min(SIZE_CLASSES - 1, int(log2(work_tokens))) if work_tokens > 1.0 else 0


class Reservations:
    """The reservations at one endpoint."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0.0
        """The prefill work of all of them at this endpoint."""
        self._counts = [0] * SIZE_CLASSES
        self._tokens = [0.0] * SIZE_CLASSES

    def add(self, work_tokens: float, tokens: float) -> None:
        """Add a held request: `work_tokens` determines its turn, `tokens` is its work here."""
        size = size_class(work_tokens)
        self.count += 1
        self.tokens += tokens
        self._counts[size] += 1
        self._tokens[size] += tokens

    def remove(self, work_tokens: float, tokens: float) -> None:
        size = size_class(work_tokens)
        self.count -= 1
        self._counts[size] -= 1
        if not self.count:  # clears rounding errors
            self.tokens = 0.0
            self._tokens = [0.0] * SIZE_CLASSES
            return
        self.tokens -= tokens
        self._tokens[size] -= tokens

    def ahead_of(self, work_tokens: float, share: float = -1.0, *, newest_first: bool = False) -> tuple[float, float]:
        """How many requests precede a new one with `work_tokens`, and their tokens.

        `share`: the share that precedes it by priority and flow; below 0: there is only one flow. `newest_first`: see
        `core.queue.queue_overload`.
        """
        if share >= 0.0:
            return share * self.count, share * self.tokens
        size = size_class(work_tokens) - (NEWEST_FIRST_CLASSES if newest_first else 0)
        count, tokens = 0.0, 0.0
        for n in range(size):
            count += self._counts[n]
            tokens += self._tokens[n]
        if size >= 0:
            count += self._counts[size] // 2
            tokens += 0.5 * self._tokens[size]
        return count, tokens
