# SPDX-License-Identifier: Apache-2.0
"""How fast requests leave the queue, and whether they have been arriving faster than that for a while.

Under lasting overload the newest requests are served first: served in order of age, all would be too late. The rule is
that of CoDel (RFC 8289): not how long the queue is, but whether it never gets short. As its length is known here, and
not only the time that the first request waited, the predicted wait of its last request replaces the sojourn time.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final

LASTING_S: Final = 5.0
"""A queue that is too long for this time shows lasting overload."""
LATE_SHARE: Final = 0.8
"""Under overload, requests that have waited for this share of what is too long will be late when they are served."""
END_SHARE: Final = 0.5
"""Overload lasts until the queue is shorter than this share of what is too long: it contains requests that waited in
vain, which would be next in order of age."""
PACE_SAMPLES: Final = 128
"""The pace is that of the last requests that left the queue, at most this many."""
MIN_PACE_SAMPLES: Final = 8
"""The pace is unknown until this many requests have left the queue."""


class QueueOverload:
    """The overload state of one queue."""

    def __init__(self) -> None:
        self.is_lasting = False
        """Requests have been arriving faster than they are served, for a while."""
        self.late_s = inf
        """While that lasts, a request that has waited so long will be late; else infinite."""
        self.timely = 0
        """So many waiting requests would be served in time all the same."""
        self._busy_s = self._at = 0.0
        """For how long there have been requests in the queue, and as of when."""
        self._waiting = 0
        self._left: deque[float] = deque(maxlen=PACE_SAMPLES)
        """Times by `_busy_s`: a time without waiting requests shows nothing of the pace."""
        self._long_since = inf

    def request_left(self) -> None:
        """Note that a request left the queue by its turn, at the time of the latest `observe`."""
        self._left.append(self._busy_s)

    def wait_s(self, before: int) -> float:
        """Seconds until `before` requests have left. 0: unknown."""
        left = self._left
        return before * (self._busy_s - left[0]) / len(left) if len(left) >= MIN_PACE_SAMPLES else 0.0

    def concerns(self, tier: int) -> bool:
        """Whether it lasts and is that of an endpoint of this tier: what goes to higher ones does not wait here."""
        return self.is_lasting and tier == 1

    def in_time(self, too_long_s: float) -> int:
        """How many requests may wait without overload that lasts."""
        each_s = self.wait_s(1)
        return int(END_SHARE * too_long_s / each_s) if each_s else 0

    def observe(self, waiting: int, too_long_s: float, now: float) -> None:
        """Note that `waiting` requests wait from now on. `too_long_s`: a predicted wait that is too long."""
        if self._waiting:
            self._busy_s += now - self._at
        self._waiting, self._at = waiting, now
        if self.wait_s(waiting) <= (too_long_s * END_SHARE if self.is_lasting else too_long_s):
            self._long_since = inf
            self.is_lasting = False
        elif self._long_since == inf:
            self._long_since = now
        elif now - self._long_since >= LASTING_S:
            self.is_lasting = True
        self.late_s = inf
        if self.is_lasting:
            self.late_s, self.timely = LATE_SHARE * too_long_s, self.in_time(too_long_s)
