# SPDX-License-Identifier: Apache-2.0
"""Values over time: an exponential mean, and the least of what was seen. Pure."""

from __future__ import annotations

from math import exp, inf
from typing import Final

LEAST_FORGETS_S: Final = 3600.0
"""Within this time a least value may double, if the hardware is another."""


class Mean:
    """An exponential mean that is right from its first value on."""

    __slots__ = ("_seen", "_sum", "_tau_s")

    def __init__(self, tau_s: float) -> None:
        self._tau_s = tau_s
        self._sum = self._seen = 0.0

    def add(self, value: float, for_s: float) -> None:
        """What it was for so long."""
        weight = 1.0 - exp(-for_s / self._tau_s)
        self._sum += weight * (value - self._sum)
        self._seen += weight * (1.0 - self._seen)

    @property
    def value(self) -> float:
        """0 before the first."""
        return self._sum / self._seen if self._seen else 0.0

    @property
    def over_s(self) -> float:
        """About how long it is a mean of."""
        return 2.0 * self._tau_s * self._seen


class Least:
    """The least of what was seen; it rises slowly."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = inf

    def add(self, value: float, for_s: float) -> None:
        self.value = min(value, self.value * (1.0 + for_s / LEAST_FORGETS_S))
