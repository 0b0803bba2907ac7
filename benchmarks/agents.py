# SPDX-License-Identifier: Apache-2.0
"""Coding agents in virtual time: every policy on sessions of `coding_agents`, and the page AGENTS.md.

`python -m benchmarks.routing --agents` runs it; `python -m benchmarks.http_routing --group agents` writes the page's
last part (`benchmarks.page`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.cells import AGENTS, Cell
from lbproxy import __version__
from lbproxy.sim.figures.report import Summary, as_table, cells, headings, paired

OURS = "adaptive"
FIGURES = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "e2e_mean",
    "tpot_mean",
    "output_tokens_s",
    "goodput",
    "hit_ratio",
    "imbalance",
    "queue_mean",
    "failed",
)
ABOUT = """
[Sessions](../docs/simulator.md#coding-agents) in a closed loop, so that a slow policy is asked less (`requests`).
Goodput: TTFT within 1 s and TPOT within 50 ms; hits: prompt tokens from a prefix cache; imbalance: the busiest server's
requests over the mean; queued: time in the balancer. The last column is paired over seeds, with a 95 % bootstrap
interval.
"""


def page(found: Mapping[str, Mapping[str, Sequence[Summary]]], seeds: int) -> str:
    """The part of virtual time. `found`: by cell, by policy, in the order of the seeds."""
    parts = [
        "# Coding agents\n\n",
        f"`python -m benchmarks.routing --agents --seeds {seeds}`, lbproxy {__version__}, virtual time.\n{ABOUT}",
        f"\n## {OURS} against the best other policy of each figure\n\n{against_best(found)}",
    ]
    for name, runs in found.items():
        parts.append(f"\n## {name}\n\n{described(AGENTS[name])}\n\n{table(runs)}")
    return "".join(parts)


def described(cell: Cell) -> str:
    """What of it is not the default."""
    parameters = ", ".join(f"{key} {value:g}" for key, value in cell.parameters.items())
    return f"`{cell.workload}` ({parameters}), {cell.servers} servers."


def table(runs: Mapping[str, Sequence[Summary]]) -> str:
    """A row for each policy."""
    heads = headings(FIGURES)
    heads[1:1] = ["requests"]
    rows = []
    for policy, of_policy in sorted(runs.items(), key=lambda one: _mean(one[1], "ttft_mean")):
        row = cells(policy, of_policy, FIGURES)
        row[1:1] = [f"{_mean(of_policy, 'requests'):.0f}"]
        rows.append([*row, _change(of_policy, runs.get(OURS))])
    return as_table([*heads, f"TTFT against {OURS}"], rows)


def _change(runs: Sequence[Summary], ours: Sequence[Summary] | None) -> str:
    if ours is None or runs is ours:
        return ""
    change = paired(runs, ours, "ttft_mean")
    return f"{change.mean:+.0%} [{change.low:+.0%}, {change.high:+.0%}]"


def against_best(found: Mapping[str, Mapping[str, Sequence[Summary]]]) -> str:
    """Ours over the best other, figure by figure."""
    figures = {"ttft_mean": min, "ttft_p99": min, "e2e_mean": min, "goodput": max, "hit_ratio": max, "requests": max}
    rows = []
    for name, runs in found.items():
        others = {policy: of_policy for policy, of_policy in runs.items() if policy != OURS}
        if OURS not in runs or not others:
            continue
        row = [name]
        for figure, choose in figures.items():
            best = choose(others, key=lambda policy: _mean(others[policy], figure))
            ratio = _mean(runs[OURS], figure) / (_mean(others[best], figure) or 1.0)
            row.append(f"{ratio:.2f}x ({best})")
        rows.append(row)
    heads = ["cell", "TTFT mean", "TTFT p99", "E2E mean", "goodput", "hits", "requests"]
    return as_table(heads, rows)


def _mean(runs: Sequence[Summary], figure: str) -> float:
    return fmean(getattr(run, figure) for run in runs)


# The page
