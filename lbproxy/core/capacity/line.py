"""The requests that are held for one endpoint: how many, how much work, and how much of it goes before another.

A request that is held waits in the Balancer's queue, with a reservation here: the prefill work that it would have at
this endpoint. So a newcomer is priced against what is spoken for, and not all that wait go for the same endpoint. Who
goes first is the queue's matter; for a price it is enough to know roughly what goes before: all requests with less
work, told apart by powers of two.
"""

from __future__ import annotations

from math import log2
from typing import Final

SIZES: Final = 24
"""Powers of two of tokens that are told apart."""
AHEAD: Final = 3
"""Powers of two by which a newcomer is ahead of requests that wait, under overload."""


def size_of(work_tokens: float) -> int:
    """The power of two."""
    return min(SIZES - 1, int(log2(work_tokens))) if work_tokens > 1.0 else 0


class Line:
    """One endpoint's."""

    __slots__ = ("_counts", "_tokens", "count", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0.0
        """Prefill work of all of them at this endpoint."""
        self._counts = [0] * SIZES
        self._tokens = [0.0] * SIZES

    def add(self, work_tokens: float, tokens: float) -> None:
        """A request is held: `work_tokens` by which its turn comes, `tokens` of work here."""
        size = size_of(work_tokens)
        self.count += 1
        self.tokens += tokens
        self._counts[size] += 1
        self._tokens[size] += tokens

    def remove(self, work_tokens: float, tokens: float) -> None:
        """One that was added with these is held no more."""
        size = size_of(work_tokens)
        self.count -= 1
        self._counts[size] -= 1
        if not self.count:  # rounding ends here
            self.tokens = 0.0
            self._tokens = [0.0] * SIZES
            return
        self.tokens -= tokens
        self._tokens[size] -= tokens

    def before(self, work_tokens: float, share: float = -1.0, *, newest_first: bool = False) -> tuple[float, float]:
        """How many go before a newcomer with so much work, and their tokens. `share`: those before it by priority and
        flow; below 0: there is but one flow. `newest_first`: see `core.queue.overload`.
        """
        if share >= 0.0:
            return share * self.count, share * self.tokens
        size = size_of(work_tokens) - (AHEAD if newest_first else 0)
        count, tokens = 0.0, 0.0
        for n in range(size):
            count += self._counts[n]
            tokens += self._tokens[n]
        if size >= 0:
            count += self._counts[size] // 2
            tokens += 0.5 * self._tokens[size]
        return count, tokens
