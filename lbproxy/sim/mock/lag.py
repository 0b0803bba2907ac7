# SPDX-License-Identifier: Apache-2.0
"""How late things came out, over the last minute: the largest and the 99th percentile, in constant memory.

A minute is kept as one histogram a second, with four buckets to each doubling of a microsecond, so recording costs the
same however many steps there are, and a percentile is at most 19 % too high.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

WINDOW_S = 60
_BUCKETS_PER_DOUBLING = 4


@dataclass(slots=True)
class _Second:
    number: int = -1
    """Which second of the clock this slot holds."""
    largest_s: float = 0.0
    counts: Counter[int] = field(default_factory=Counter)


class LagMeter:
    """Records lags; `now` must not go back."""

    def __init__(self) -> None:
        self._seconds = [_Second() for _ in range(WINDOW_S)]

    def record(self, lag_s: float, *, now: float) -> None:
        """Note that something was `lag_s` late, at `now`."""
        number = int(now)
        second = self._seconds[number % WINDOW_S]
        if second.number != number:
            second.number = number
            second.largest_s = 0.0
            second.counts.clear()
        second.largest_s = max(second.largest_s, lag_s)
        second.counts[math.ceil(math.log2(max(1.0, lag_s * 1e6)) * _BUCKETS_PER_DOUBLING)] += 1

    def figures(self, *, now: float) -> tuple[float, float]:
        """(largest, 99th percentile) in seconds; zeros if nothing was recorded in the last minute."""
        counts: Counter[int] = Counter()
        largest_s = 0.0
        for second in self._seconds:
            if second.number > int(now) - WINDOW_S:
                counts.update(second.counts)
                largest_s = max(largest_s, second.largest_s)
        above = counts.total() // 100
        for bucket in sorted(counts, reverse=True):
            above -= counts[bucket]
            if above < 0:
                return largest_s, min(largest_s, 2 ** (bucket / _BUCKETS_PER_DOUBLING) / 1e6)
        return 0.0, 0.0
