# SPDX-License-Identifier: Apache-2.0
"""What first bytes show of the parallel prefills of an engine that does not report its queue.

Each first byte has the time that its request should have waited for earlier prefills, with as many in parallel as are
assumed, and the time that it did take beyond its own work. The slope of the second over the first (a linear regression
over the recent ones) is 1 where the assumption is right, 0 where no request waits, and above 1 where fewer prefills run
in parallel. What all requests take, as a fixed time to the first token, is the intercept and does not matter. Noise
widens the error of the slope, and nothing is concluded before that is small.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

WINDOW: Final = 32
"""How many of the last first bytes count."""
MIN_WAIT_S: Final = 0.1
"""A shorter predicted wait shows nothing by itself."""
MIN_WAITS: Final = 5
"""Nothing is concluded from fewer requests that should have waited."""
ERRORS: Final = 2.0
"""So many standard errors make it certain."""
MIDDLE: Final = 0.5
"""A slope between that of no wait at all and that of the wait that was predicted."""


class WaitTrend:
    """What the recent first bytes of one endpoint show."""

    __slots__ = ("_mean_x", "_mean_y", "_most", "_samples", "_waits", "_xx", "_xy", "_yy")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._samples = self._waits = self._most = 0
        self._mean_x = self._mean_y = self._xx = self._xy = self._yy = 0.0

    @property
    def most(self) -> int:
        """The most prefills that were before one of the requests."""
        return self._most

    def learn(self, predicted_s: float, took_s: float, before: int) -> None:
        """Learn from a request that should have waited `predicted_s` for the `before` prefills before it, and took
        `took_s` beyond its own work.
        """
        self._samples = min(WINDOW, self._samples + 1)
        self._waits += predicted_s >= MIN_WAIT_S
        self._most = max(self._most, before)
        share = 1.0 / self._samples
        dx, dy = predicted_s - self._mean_x, took_s - self._mean_y
        self._mean_x += share * dx
        self._mean_y += share * dy
        rest = 1.0 - share
        self._xx = rest * (self._xx + share * dx * dx)
        self._xy = rest * (self._xy + share * dx * dy)
        self._yy = rest * (self._yy + share * dy * dy)

    def slope(self) -> tuple[float, float] | None:
        """By how much longer requests take for each second that they should wait, and the error of that; None: not
        known.
        """
        if self._waits < MIN_WAITS or not self._xx:
            return None
        slope = self._xy / self._xx
        rest = max(0.0, self._yy - slope * self._xy)
        return slope, sqrt(rest / (self._samples * self._xx))

    def certain_slope(self) -> float | None:
        """The slope, if it is certain on which side of `MIDDLE` it is."""
        found = self.slope()
        if found is None or abs(found[0] - MIDDLE) <= ERRORS * found[1]:
            return None
        return found[0]
