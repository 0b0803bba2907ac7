# SPDX-License-Identifier: Apache-2.0
"""What a simulation was like: figures of one run, and how policies compare over paired seeds.

Figures are of what clients see: times from the moment a request came to the balancer. Requests of phases that are named
`warm-up...` do not count. A request that failed counts in `failed` and against `goodput`, and in nothing else.

Policies are compared seed by seed, as equal seeds mean equal arrivals: the interval of a difference is a bootstrap over
the seeds' differences, which is far narrower than the spread between seeds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean

from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.fleet import Served

GOOD_TTFT_S = 1.0
GOOD_TPOT_S = 0.050
"""Goodput is the share of requests within both."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run, or of one phase of it. Seconds unless said otherwise; 0 where there was no such request."""

    requests: int
    failed: int
    ttft_mean: float
    """Time to first token."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    e2e_mean: float
    """Until the last token."""
    tpot_mean: float
    """Time per output token after the first, of responses of at least two."""
    tpot_p99: float
    output_tokens_s: float
    """Output tokens a second, from the first arrival to the last end of each phase."""
    goodput: float
    """Share of requests with TTFT within 1 s and TPOT within 50 ms."""
    hit_ratio: float
    """Share of prompt tokens that came from a prefix cache."""
    imbalance: float
    """Requests in flight, averaged over time: the busiest server's over the mean of all; 1 = even."""
    queue_mean: float
    """Waited in the balancer."""
    queue_p99: float
    adapter_loads: float = 0.0
    """Requests in a thousand for which the server had to load the adapter."""


LOWER_IS_BETTER = frozenset(field.name for field in fields(Summary)) - {
    "requests",
    "output_tokens_s",
    "goodput",
    "hit_ratio",
}


def summarise(served: Sequence[Served], servers: int) -> Summary:
    """The figures of these requests, of a fleet of so many servers."""
    counted = [one for one in served if not one.job.phase.startswith("warm-up")]
    done = [one for one in counted if one.outcome is Outcome.COMPLETED]
    ttfts = sorted(_first_at(one) - one.submitted_at for one in done)
    tpots = sorted(_tpot(one) for one in done if one.job.answer.tokens > 1)
    queues = sorted(one.placed_at - one.submitted_at for one in done if one.placed_at is not None)
    good = sum(_first_at(one) - one.submitted_at <= GOOD_TTFT_S and _tpot(one) <= GOOD_TPOT_S for one in done)
    prompt_tokens = sum(one.job.prompt_tokens for one in done)
    return Summary(
        requests=len(counted),
        failed=len(counted) - len(done),
        ttft_mean=_mean(ttfts),
        ttft_p50=percentile(ttfts, 50),
        ttft_p90=percentile(ttfts, 90),
        ttft_p99=percentile(ttfts, 99),
        e2e_mean=_mean([one.ended_at - one.submitted_at for one in done]),
        tpot_mean=_mean(tpots),
        tpot_p99=percentile(tpots, 99),
        output_tokens_s=_output_tokens_s(done),
        goodput=good / len(counted) if counted else 0.0,
        hit_ratio=sum(one.cached_tokens for one in done) / prompt_tokens if prompt_tokens else 0.0,
        imbalance=_imbalance(done, servers),
        queue_mean=_mean(queues),
        queue_p99=percentile(queues, 99),
        adapter_loads=1000.0 * sum(one.loaded_adapter for one in done) / len(done) if done else 0.0,
    )


def by_phase(served: Sequence[Served], servers: int) -> dict[str, Summary]:
    """The figures of each phase by itself, in order; the warm-up is left out."""
    phases: dict[str, list[Served]] = defaultdict(list)
    for one in served:
        if not one.job.phase.startswith("warm-up"):
            phases[one.job.phase].append(one)
    return {phase: summarise(group, servers) for phase, group in phases.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, interpolated; 0.0 of none."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _first_at(one: Served) -> float:
    assert one.first_at is not None, "what completed had a first token"
    return one.first_at


def _tpot(one: Served) -> float:
    return (one.ended_at - _first_at(one)) / max(1, one.job.answer.tokens - 1)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _output_tokens_s(done: Sequence[Served]) -> float:
    spans: dict[str, tuple[float, float]] = {}
    for one in done:
        begin, end = spans.get(one.job.phase, (one.submitted_at, one.ended_at))
        spans[one.job.phase] = (min(begin, one.submitted_at), max(end, one.ended_at))
    seconds = sum(end - begin for begin, end in spans.values())
    return sum(one.job.answer.tokens for one in done) / seconds if seconds else 0.0


def _imbalance(done: Sequence[Served], servers: int) -> float:
    occupied = [0.0] * servers
    for one in done:
        if one.server is not None and one.placed_at is not None:
            occupied[one.server] += one.ended_at - one.placed_at
    return max(occupied) / fmean(occupied) if any(occupied) else 1.0


# Over seeds


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with a 95 % interval."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of these values, and where it would lie with other seeds: a bootstrap, the same in every process."""
    if len(values) < 2:
        return Estimate(_mean(values), _mean(values), _mean(values))
    rng = random.Random(f"{len(values)}:bootstrap")
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Estimate(fmean(values), percentile(means, 2.5), percentile(means, 97.5))


def over_seeds(runs: Sequence[Summary]) -> dict[str, Estimate]:
    """Each figure of one policy, over its runs."""
    columns = [asdict(run) for run in runs]
    return {field.name: estimate([column[field.name] for column in columns]) for field in fields(Summary)}


def paired(runs: Sequence[Summary], baseline: Sequence[Summary], figure: str) -> Estimate:
    """How a figure differs from the baseline's, run by run in the order of the seeds: -0.2 = less by a fifth of the
    baseline's mean.
    """
    differences = [getattr(run, figure) - getattr(base, figure) for run, base in zip(runs, baseline, strict=True)]
    scale = fmean(getattr(base, figure) for base in baseline)
    found = estimate(differences)
    return Estimate(found.mean / scale, found.low / scale, found.high / scale) if scale else Estimate(0.0, 0.0, 0.0)


# Tables

COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "ttft_mean": ("TTFT s", 1, ".3g"),
    "ttft_p50": ("p50", 1, ".3g"),
    "ttft_p90": ("p90", 1, ".3g"),
    "ttft_p99": ("p99", 1, ".3g"),
    "e2e_mean": ("E2E s", 1, ".3g"),
    "tpot_mean": ("TPOT ms", 1000, ".3g"),
    "tpot_p99": ("p99", 1000, ".3g"),
    "output_tokens_s": ("tokens/s", 1, ".0f"),
    "goodput": ("goodput", 1, ".2f"),
    "hit_ratio": ("hits", 1, ".2f"),
    "imbalance": ("imbalance", 1, ".2f"),
    "queue_mean": ("queued s", 1, ".2g"),
    "failed": ("failed", 1, ".3g"),
}
"""By figure: heading, factor, format."""


def headings(figures: Iterable[str] = tuple(COLUMNS)) -> list[str]:
    """Of the columns of `cells`, the policy first."""
    return ["policy", *(COLUMNS[figure][0] for figure in figures)]


def cells(policy: str, runs: Sequence[Summary], figures: Iterable[str] = tuple(COLUMNS)) -> list[str]:
    """One policy's row: means over its runs."""
    row = [policy]
    for figure in figures:
        _, factor, form = COLUMNS[figure]
        row.append(format(factor * fmean(getattr(run, figure) for run in runs), form))
    return row


def markdown(results: Mapping[str, Sequence[Summary]]) -> str:
    """A table of policies, each with its runs in the order of the seeds. The first is what others are compared with."""
    first, base = next(iter(results.items()))
    rows = [headings()]
    rows[0].append(f"TTFT against {first}")
    for policy, runs in results.items():
        change = paired(runs, base, "ttft_mean")
        rows.append([*cells(policy, runs), f"{change.mean:+.0%} [{change.low:+.0%}, {change.high:+.0%}]"])
    return as_table(rows[0], rows[1:])


def as_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """In Markdown; the first `left` columns are text, the others figures."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *rows]) + "\n"


def as_json(results: Mapping[str, Sequence[Summary]]) -> dict[str, object]:
    """The same and more as plain values: each policy's runs, and its means with intervals."""
    first, base = next(iter(results.items()))
    return {
        policy: {
            "runs": [asdict(run) for run in runs],
            "over_seeds": {figure: asdict(found) for figure, found in over_seeds(runs).items()},
            f"against {first}": {field.name: asdict(paired(runs, base, field.name)) for field in fields(Summary)},
        }
        for policy, runs in results.items()
    }
