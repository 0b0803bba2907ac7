# SPDX-License-Identifier: Apache-2.0
"""What is read off the windows of a section: medians over its rounds, by subject."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.overhead.load import Figures
from benchmarks.overhead.plan import DIRECT, Section


def windows(section: Section) -> dict[str, list[Figures]]:
    """By subject, subjects in the run's order; those without a window are not there."""
    found: dict[str, list[Figures]] = {name: [] for name in section["subjects"]}
    for one in section["rounds"]:
        found[one["subject"]].append(one["figures"])
    return {name: some for name, some in found.items() if some}


def count(one: Figures, unit: str) -> int:
    """Of events or requests."""
    return one["events"] if unit == "event" else one["requests"]


def cpu_us(unit: str) -> Callable[[Figures], float | None]:
    """The proxy's CPU per request or event; None if there was no proxy, or nothing came."""

    def of(one: Figures) -> float | None:
        used, units = one["proxy_cpu_s"], count(one, unit)
        return used / units * 1e6 if used is not None and units else None

    return of


def known(some: list[Figures], of: Callable[[Figures], float | None]) -> list[float]:
    """Of each window that has it."""
    return [value for one in some if (value := of(one)) is not None]


def middle(some: list[Figures], of: Callable[[Figures], float | None]) -> float | None:
    """The median over the windows."""
    values = known(some, of)
    return statistics.median(values) if values else None


def added_ms(seen: dict[str, list[Figures]], name: str) -> float | None:
    """What a proxy adds to the median time to the first event."""
    direct, through = (middle(seen.get(one, []), lambda f: f["ttft_ms"]["p50"]) for one in (DIRECT, name))
    return None if direct is None or through is None else through - direct
