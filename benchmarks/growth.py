# SPDX-License-Identifier: Apache-2.0
"""How a cost grows with a size, from measured points: nothing worse than linear, nothing long on the event loop.

A power is fitted to the last points of a series, least squares on logarithms: at small sizes the fixed part of a cost
hides how it grows. `statement` says in words what was found, whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LAST = 3
"""Points that the power is fitted to."""
TOLERANCE = 0.15
"""Above 1: larger data fits the processor's caches less well, which is no property of the algorithm."""
LONG_MS = 5.0
"""What nothing may take on the event loop at one time."""


@dataclass(frozen=True, slots=True)
class Series:
    """Microseconds of an operation at ascending sizes."""

    operation: str
    by: str
    points: Sequence[tuple[float, float]]
    is_one_turn: bool = True
    """Whether the event loop does all of it at one time."""

    @property
    def power(self) -> float:
        """The exponent: 1 is linear. Of at least two points."""
        last = [(math.log(size), math.log(max(value, 1e-3))) for size, value in self.points[-LAST:]]
        middle_x, middle_y = (sum(values) / len(last) for values in zip(*last, strict=True))
        above = sum((x - middle_x) * (y - middle_y) for x, y in last)
        below = sum((x - middle_x) ** 2 for x, _ in last)
        return float(above / below)


def statement(series: Sequence[Series]) -> str:
    """What is to be said of them all."""
    worse = [one for one in series if one.power > 1 + TOLERANCE]
    steepest = max(series, key=lambda one: one.power)
    lines = []
    if worse:
        lines.append("Worse than linear:\n")
        lines += [f"- {one.operation}, by {one.by}: to the power of {one.power:.2f}" for one in worse]
    else:
        lines.append(
            f"Nothing grows faster than linearly: the greatest power is {steepest.power:.2f} "
            f"({steepest.operation}, by {steepest.by})."
        )
    long = [
        (one, size, value) for one in series if one.is_one_turn for size, value in one.points if value > LONG_MS * 1e3
    ]
    if long:
        lines.append(f"\nLonger than {LONG_MS:g} ms at one time:\n")
        lines += [f"- {one.operation}, {size:,} {one.by}: {value / 1e3:.1f} ms" for one, size, value in long]
    else:
        most = max(
            (value, one.operation, size, one.by) for one in series if one.is_one_turn for size, value in one.points
        )
        value, operation, size, by = most
        lines.append(
            f"Nothing holds up the event loop for more than {LONG_MS:g} ms: the longest is {value / 1e3:.1f} ms "
            f"({operation}, {size:,} {by})."
        )
    return "\n".join(lines) + "\n"


def growth_rows(series: Sequence[Series]) -> list[list[str]]:
    """A table of all series, with heads: first and last point, and the power."""
    rows = [["operation", "by", "from", "us", "to", "us", "power"]]
    for one in series:
        (first, low), (last, high) = one.points[0], one.points[-1]
        rows.append([one.operation, one.by, f"{first:,}", f"{low:.1f}", f"{last:,}", f"{high:.1f}", f"{one.power:.2f}"])
    return rows
