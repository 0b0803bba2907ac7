# SPDX-License-Identifier: Apache-2.0
"""Counts of values by bucket. Pure; in a module of its own as it is compiled: each request is counted in three."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Values in each bucket, the last that of values above all bounds."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. A bucket's bound belongs to it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
