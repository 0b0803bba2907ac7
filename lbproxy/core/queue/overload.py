"""How fast requests leave the queue, and whether they have been coming faster than that for a while.

Under overload that lasts, the requests that came last are served first, as those served in order of their age would all
be served too late. The rule is that of CoDel (RFC 8289): not how long the queue is, but whether it never gets short. As
its length is known here, and not only the time that the first one waited, the predicted wait of its last request takes
the place of a sojourn time.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

LASTING_S: Final = 5.0
"""A queue that was long for so long stands."""
END_SHARE: Final = 0.5
"""It does until it is shorter than this share of what is too long: requests that waited in vain are among those that
wait, and in order of age they would be the next."""
PACE_SAMPLES: Final = 128
"""Requests by whose leaving the queue's pace is told,"""
MIN_PACE_SAMPLES: Final = 8
"""if so many left it at all."""


class Overload:
    """Of one queue."""

    __slots__ = ("_at", "_busy_s", "_left", "_long_since", "_waiting", "is_lasting")

    def __init__(self) -> None:
        self.is_lasting = False
        """Requests are coming faster than they are served, and have been for a while."""
        self._busy_s = self._at = 0.0
        """For how long there have been requests in the queue, and as of when."""
        self._waiting = 0
        self._left: deque[float] = deque(maxlen=PACE_SAMPLES)
        """As of `_busy_s`: a time in which nobody waits says nothing of the pace."""
        self._long_since = inf

    def request_left(self) -> None:
        """One more request left the queue by its turn, at the time of the latest `observe`."""
        self._left.append(self._busy_s)

    def wait_s(self, before: int) -> float:
        """How long it takes until so many have left. 0: nobody knows."""
        left = self._left
        return before * (self._busy_s - left[0]) / len(left) if len(left) >= MIN_PACE_SAMPLES else 0.0

    def observe(self, waiting: int, long_s: float, now: float) -> None:
        """So many wait from now on; `long_s` is too long."""
        if self._waiting:
            self._busy_s += now - self._at
        self._waiting, self._at = waiting, now
        if self.wait_s(waiting) <= (long_s * END_SHARE if self.is_lasting else long_s):
            self._long_since = inf
            self.is_lasting = False
        elif self._long_since == inf:
            self._long_since = now
        elif now - self._long_since >= LASTING_S:
            self.is_lasting = True
