# SPDX-License-Identifier: Apache-2.0
"""What each flow got of a fleet: the figures of `report.py` by flow, and its share.

Shares are counted while all still send, up to the last arrival: afterwards the queues drain, and whoever sent more gets
more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from lbproxy.core.queue.flows import OUTPUT_COST
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import COLUMNS as OF_SUMMARIES
from lbproxy.sim.figures.report import Estimate, Summary, estimate, summarise
from lbproxy.sim.fleet.fleet import Served

REFUSED = frozenset({Outcome.SATURATED, Outcome.EXPIRED, Outcome.RATE_LIMITED, Outcome.TOO_LATE})


@dataclass(frozen=True, slots=True)
class Share:
    """Figures of one flow in a run. Seconds unless said otherwise."""

    summary: Summary
    refused: int
    """Requests that the balancer answered 429; also in `summary.failed`."""
    refused_after: float
    """Mean time until these were told; 0 where there are none."""
    in_time: float
    """Share of all its requests whose first token came within what the client asked for; of those that asked for
    nothing, within which the response came at all."""
    tokens_share: float
    """Share of what flows got while they sent: prompt tokens that were computed, and twice the tokens of responses."""


def by_flow(served: Sequence[Served], servers: int) -> dict[str, Share]:
    """Each flow's figures, in the order in which they first came; the warm-up is left out."""
    counted = [one for one in served if not one.job.phase.startswith("warm-up")]
    groups: dict[str, list[Served]] = defaultdict(list)
    for one in counted:
        groups[one.job.flow].append(one)
    until = max((one.submitted_at for one in counted), default=0.0)
    got = {flow: sum(_cost(one) for one in group if one.ended_at <= until) for flow, group in groups.items()}
    whole = sum(got.values())
    return {flow: _share(group, servers, got[flow] / whole if whole else 0.0) for flow, group in groups.items()}


def _share(group: Sequence[Served], servers: int, tokens_share: float) -> Share:
    refused = [one.ended_at - one.submitted_at for one in group if one.outcome in REFUSED]
    return Share(
        summary=summarise(group, servers),
        refused=len(refused),
        refused_after=fmean(refused) if refused else 0.0,
        in_time=sum(map(_is_in_time, group)) / len(group),
        tokens_share=tokens_share,
    )


def _is_in_time(one: Served) -> bool:
    if one.outcome is not Outcome.COMPLETED or one.first_at is None:
        return False
    return one.job.slo_ttft_s is None or one.first_at - one.submitted_at <= one.job.slo_ttft_s


def _cost(one: Served) -> float:
    if one.outcome is not Outcome.COMPLETED:
        return 0.0
    return one.job.prompt_tokens - one.cached_tokens + OUTPUT_COST * one.job.answer.tokens


# Over seeds

COLUMNS: Mapping[str, tuple[str, float, str]] = {
    **{name: OF_SUMMARIES[name] for name in ("ttft_mean", "ttft_p50", "ttft_p99", "goodput")},
    "requests": ("requests", 1, ".0f"),
    "refused": ("refused", 1, ".3g"),
    "refused_after": ("after s", 1, ".2g"),
    "tokens_share": ("share of tokens", 1, ".2f"),
}
"""By figure: heading, factor, format."""


def figure(share: Share, name: str) -> float:
    """One figure, of the flow's own or of its summary's."""
    found = getattr(share, name) if name in _OWN else getattr(share.summary, name)
    return float(found)


_OWN = frozenset(Share.__dataclass_fields__) - {"summary"}


def headings() -> list[str]:
    """Of the columns of `rows`."""
    return ["policy", "flow", *(heading for heading, _, _ in COLUMNS.values())]


def rows(results: Mapping[str, Sequence[Mapping[str, Share]]]) -> list[list[str]]:
    """For each policy a row for each flow: means over its runs."""
    found = []
    for policy, runs in results.items():
        for flow in runs[0]:
            row = [policy, flow]
            for name, (_, factor, form) in COLUMNS.items():
                row.append(format(factor * fmean(figure(run[flow], name) for run in runs), form))
            found.append(row)
    return found


def over_seeds(runs: Sequence[Share]) -> dict[str, Estimate]:
    """Each figure that is shown, over one flow's runs."""
    return {name: estimate([figure(run, name) for run in runs]) for name in (*COLUMNS, "in_time")}


def as_json(results: Mapping[str, Sequence[Mapping[str, Share]]]) -> dict[str, object]:
    """Plain values: by policy, by flow, each run and the means with intervals."""
    return {
        policy: {
            flow: {
                "runs": [asdict(run[flow]) for run in runs],
                "over_seeds": {name: asdict(one) for name, one in over_seeds([run[flow] for run in runs]).items()},
            }
            for flow in runs[0]
        }
        for policy, runs in results.items()
    }
