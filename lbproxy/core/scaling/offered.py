# SPDX-License-Identifier: Apache-2.0
"""What clients ask of one group of models: how many requests come, and how large they are.

Rates are exponential means. Two of them tell how many requests come: a slow one, and a quick one less what chance
explains of it, so that a rise counts as soon as it is certain. Sizes are means of the same time: those of prompts as
they arrive, what of them is not cached, and the length of responses, as far as requests were served.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final, NamedTuple

from lbproxy.core.scaling.demand import ModelDemand
from lbproxy.core.scaling.trends import Mean

QUICK_S: Final = 20.0
SLOW_S: Final = 120.0
"""Time constants."""
CERTAIN: Final = 2.0
"""Standard errors by which the quick rate must be higher."""


class Counts(NamedTuple):
    """What a group's counts are at a moment: see `demand.ModelDemand`."""

    arrived: int
    arrived_bytes: int
    placed: int
    placed_bytes: int
    placed_work: float
    completed: int
    output_tokens: int
    streamless_tokens: int


def total(models: Iterable[ModelDemand]) -> Counts:
    """The counts of a group."""
    found = list(models)
    return Counts(
        sum(one.arrived for one in found),
        sum(one.arrived_bytes for one in found),
        sum(one.placed for one in found),
        sum(one.placed_bytes for one in found),
        sum(one.placed_work for one in found),
        sum(one.completed for one in found),
        sum(one.output_tokens for one in found),
        sum(one.streamless_tokens for one in found),
    )


def growth(counts: Counts, before: Counts) -> Counts | None:
    """By how much they have grown; None: a model has left the group."""
    change = Counts(
        counts.arrived - before.arrived,
        counts.arrived_bytes - before.arrived_bytes,
        counts.placed - before.placed,
        counts.placed_bytes - before.placed_bytes,
        counts.placed_work - before.placed_work,
        counts.completed - before.completed,
        counts.output_tokens - before.output_tokens,
        counts.streamless_tokens - before.streamless_tokens,
    )
    return change if min(change) >= 0 else None


class Offered:
    """Of one group."""

    def __init__(self) -> None:
        self._quick, self._slow = Mean(QUICK_S), Mean(SLOW_S)
        """Requests a second."""
        self._bytes, self._placed, self._placed_bytes, self._work = (Mean(SLOW_S) for _ in range(4))
        self._completed, self._output = Mean(SLOW_S), Mean(SLOW_S)

    def add(self, change: Counts, for_s: float) -> None:
        """Note by how much the counts have grown in this time."""
        for mean, value in (
            (self._quick, change.arrived),
            (self._slow, change.arrived),
            (self._bytes, change.arrived_bytes),
            (self._placed, change.placed),
            (self._placed_bytes, change.placed_bytes),
            (self._work, change.placed_work),
            (self._completed, change.completed),
            (self._output, change.output_tokens),
        ):
            mean.add(value / for_s, for_s)

    @property
    def rate(self) -> float:
        """Requests a second."""
        quick = self._quick.value
        certain = quick - CERTAIN * sqrt(quick / self._quick.over_s) if quick else 0.0
        return max(self._slow.value, certain)

    @property
    def work(self) -> float:
        """Tokens to prefill of each request that arrives."""
        arrived, sent = self._slow.value, self._placed_bytes.value
        return self._bytes.value / arrived * self._work.value / sent if arrived and sent else self.placed_work

    @property
    def placed_work(self) -> float:
        """The same of each request that was placed: under overload the short ones are."""
        placed = self._placed.value
        return self._work.value / placed if placed else 0.0

    @property
    def output(self) -> float:
        """Tokens of each response."""
        completed = self._completed.value
        return self._output.value / completed if completed else 0.0
