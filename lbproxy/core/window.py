"""How many requests may wait in one engine for others to end.

An engine runs only so many requests at a time, and only those that fit into its cache. One that comes when all that is
taken waits there until another ends, which says nothing about prefill and can take a minute; whoever is placed behind
waits too, whosever turn it is. Nobody tells the limit, and scrapes are late; but a first byte that comes much later
than the prefills before it explain shows that the engine is full. From then on no more may wait there than it begins in
`LATE_S`, or `LEAST`, and one more for each that is in time again: so it always has somebody to go on with, and hardly
more. Requests that do not stream show no first byte, and nothing is learned from them.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

LATE_S: Final = 0.25
"""A first byte so long after it was expected is late."""
LEAST: Final = 4.0
"""So many may wait anywhere: one that is slow for other reasons, or not known yet, must not run dry."""
FULL_S: Final = 10.0
"""An engine counts as full for so long after one was late."""
STARTS_S: Final = 2.0
"""Over which time the rate of first bytes is averaged."""


class Window:
    """One engine's. It opens wide when nobody was late for `FULL_S`."""

    __slots__ = ("_size", "_starts", "_starts_at", "_until")

    def __init__(self) -> None:
        self._size = 0.0
        self._until = -inf
        self._starts = 0.0
        self._starts_at = 0.0

    def started(self, late_at: float, now: float) -> None:
        """A first byte came, which would have been late at `late_at`."""
        self._starts = 1.0 + self._starts * exp((self._starts_at - now) / STARTS_S)
        self._starts_at = now
        if late_at <= now:
            self.late(now)
        else:
            self._size += 1.0

    def late(self, now: float) -> None:
        """One came late, or is late and has not come."""
        starts = self._starts * exp((self._starts_at - now) / STARTS_S) / STARTS_S
        self._size = max(LEAST, LATE_S * starts)
        self._until = now + FULL_S

    def is_full(self, waiting: int, late_at: float, now: float) -> bool:
        """Whether no more should wait there than the `waiting`, of which the first is late at `late_at`."""
        if waiting and late_at <= now:
            self.late(now)
        return now < self._until and waiting >= self._size
