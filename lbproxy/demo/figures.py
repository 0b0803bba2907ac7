# SPDX-License-Identifier: Apache-2.0
"""What clients saw, in figures: by phase and by server. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lbproxy.demo.load import Seen
from lbproxy.demo.timeline import Timeline
from lbproxy.sim.figures.report import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that were due in some time."""

    requests: int
    failed: int
    """Their clients had nothing yet, and got nothing."""
    cut: int
    """Answers that broke off: their server died under them."""
    again: int
    """Requests that were tried on another server, and answered."""
    first_p50_s: float | None
    """To the first byte of a stream; None: there was none."""
    first_p99_s: float | None


def of_phase(seen: Iterable[Seen], timeline: Timeline, number: int) -> Figures:
    """Of a phase: requests and first bytes of what was due in it, failures when they happened."""
    begin, end = timeline.phase(number)
    last = number == len(timeline.steps) - 1
    every = list(seen)
    due = [one for one in every if begin <= one.at_s < end]
    wrong = [one for one in every if one.wrong is not None and begin <= one.ended_s and (last or one.ended_s < end)]
    return _figures(due, wrong)


def of_all(seen: Iterable[Seen]) -> Figures:
    """Of a whole run."""
    every = list(seen)
    return _figures(every, [one for one in every if one.wrong is not None])


def _figures(due: Sequence[Seen], wrong: Sequence[Seen]) -> Figures:
    first = sorted(one.first_s for one in due if one.first_s is not None)
    return Figures(
        len(due),
        failed=sum(one.failed for one in wrong),
        cut=sum(one.cut for one in wrong),
        again=sum(one.attempts > 1 and one.wrong is None for one in due),
        first_p50_s=percentile(first, 50) if first else None,
        first_p99_s=percentile(first, 99) if first else None,
    )


def shares(heads: Iterable[tuple[float, str]], names: Sequence[str], since_s: float) -> dict[str, float]:
    """Each server's share of the responses that began since then; all 0 if there were none."""
    counts = Counter(name for at_s, name in heads if at_s >= since_s)
    total = max(1, counts.total())
    return {name: counts[name] / total for name in names}
