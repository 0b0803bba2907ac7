# SPDX-License-Identifier: Apache-2.0
"""A line through recent samples, by least squares."""

from __future__ import annotations

from math import sqrt


class Regression:
    """The means and (co)variances of samples (x, y), of which about the last `memory` count."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.count = 0.0
        """Samples, at most `memory`."""
        self.mean_x = self.mean_y = 0.0
        self.xx = self.xy = self.yy = 0.0
        """Mean squares and products of deviations from the means."""

    def learn(self, x: float, y: float) -> None:
        self.count = min(self._memory, self.count + 1.0)
        weight = 1.0 / self.count
        rest = 1.0 - weight
        off_x, off_y = x - self.mean_x, y - self.mean_y
        self.mean_x += weight * off_x
        self.mean_y += weight * off_y
        self.xx = rest * (self.xx + weight * off_x * off_x)
        self.xy = rest * (self.xy + weight * off_x * off_y)
        self.yy = rest * (self.yy + weight * off_y * off_y)

    def forget(self) -> None:
        self.count = 0.0
        self.xx = self.xy = self.yy = 0.0

    def slope(self) -> float:
        """By how much y grows with x. Only if `xx` is above 0."""
        return self.xy / self.xx

    def slope_error(self) -> float:
        """The standard error of the slope. Only if `xx` is above 0."""
        rest = max(0.0, self.yy - self.slope() * self.xy)
        return sqrt(rest / (self.count * self.xx))
