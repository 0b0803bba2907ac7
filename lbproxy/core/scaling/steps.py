# SPDX-License-Identifier: Apache-2.0
"""How long a step of an engine takes, by how many requests run: learned from how many run and how many tokens come.

It is a line through two points: the present load, for which it is exact, and the lowest load of the last day. Until
there are two, a share of the step is assumed to grow with the requests in it.
"""

from __future__ import annotations

from math import inf
from typing import Final

MIN_RUNNING: Final = 1.0
"""Requests that generate at each endpoint: fewer show little of how long a step takes, and use little."""
MIN_STARTS: Final = 60.0
"""Requests before a load counts as the lowest."""
LOW: Final = 1.0 / 1.5
"""The lowest load must be that much lower to show anything."""
LOW_FORGETS_S: Final = 86_400.0
MIN_GROWS: Final = 0.1
GROWS: Final = 0.3
"""The share of a step that is assumed to grow with the requests in it until two loads have shown it."""
MAX_PREFILL: Final = 0.8
SURE_PREFILL: Final = 0.5
"""With a larger share of prefill the rest shows nothing of decoding; with more than the second, little."""


class Steps:
    """Of the endpoints of one group, on average. Without the time that prefills take."""

    __slots__ = ("_low", "_low_age_s", "_now")

    def __init__(self) -> None:
        self._now, self._low = (0.0, 0.0), (inf, 0.0)
        """Requests that run, and how long a step takes then, in seconds."""
        self._low_age_s = 0.0

    def learn(self, running: float, prefill: float, tokens: float, starts: float, for_s: float) -> None:
        """Note that `running` requests got so many `tokens` a second of one endpoint while prefills took a share of its
        time. `starts`: requests of which that is the mean.
        """
        self._low_age_s += for_s
        if running < MIN_RUNNING or tokens < 1.0 or prefill > MAX_PREFILL:
            return
        self._now = (running, (1.0 - prefill) * running / tokens)
        is_sure = prefill < SURE_PREFILL and starts >= MIN_STARTS
        if is_sure and (running < self._low[0] or self._low_age_s > LOW_FORGETS_S):
            self._low, self._low_age_s = self._now, 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything showed it."""
        return self._now[0] > 0.0

    def line(self) -> tuple[float, float]:
        """Seconds that a step takes with no request in it, and what each adds."""
        (running, step_s), (low, low_s) = self._now, self._low
        if not running:
            return 0.0, 0.0
        share = GROWS
        if low < LOW * running:
            share = (step_s - low_s) / (running - low) * running / step_s
        more_s = min(1.0, max(MIN_GROWS, share)) * step_s / running
        return step_s - more_s * running, more_s
