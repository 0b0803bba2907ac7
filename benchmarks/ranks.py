# SPDX-License-Identifier: Apache-2.0
"""Servers with data-parallel ranks: one endpoint for each address against one for each rank.

Virtual time: two simulated servers of four ranks each. Behind one endpoint the server distributes as vLLM 0.24 did, to
the rank with the fewest requests; a rank that is an endpoint is, to a simulation without failures, a server of its own.

    python -m benchmarks.ranks --seeds 2     # writes RANKS.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lbproxy import __version__
from lbproxy.commands.sim import runs_of, serve
from lbproxy.config.scenario import Scenario
from lbproxy.sim.figures.report import Summary, as_table, summarise

PAGE = Path(__file__).parent / "RANKS.md"
SERVERS, RANKS = 2, 4
WORKLOADS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "agents, 60 users": ("agents", {"users": 60, "duration_s": 60}),
    "coding agents, 60 sessions": ("coding-agents", {"sessions": 60}),
    "chat, 600 users": ("chat", {"users": 600, "duration_s": 40}),
    "b2b, 15 requests/s": ("ladder", {"step_s": 60, "warm_up_s": 20, "first_rate": 15, "last_rate": 15}),
}
FLEETS: Mapping[str, Mapping[str, int]] = {
    "address": {"count": SERVERS, "ranks": RANKS},
    "rank": {"count": SERVERS * RANKS, "ranks": 1},
}
"""By what is one endpoint."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one workload and one fleet, means over the seeds."""

    ttft_mean: float
    ttft_p99: float
    hit_ratio: float
    goodput: float
    failed: float


def scenario(workload: str, fleet: str, seeds: int) -> Scenario:
    """As a file of `lbproxy sim` would have it."""
    name, parameters = WORKLOADS[workload]
    return Scenario.model_validate(
        {
            "fleet": [{**FLEETS[fleet], "max_model_len": 131_072}],
            "workload": {"name": name, "parameters": dict(parameters)},
            "policies": ["adaptive"],
            "seeds": seeds,
        }
    )


def measure(workload: str, fleet: str, seeds: int) -> Figures:
    """Simulate one row of the page."""
    runs = runs_of(scenario(workload, fleet, seeds), source=workload, trace=None)
    found: list[Summary] = []
    for run in runs:
        found.append(summarise(serve(run), SERVERS * RANKS))
        print(f"{workload}, one endpoint for each {fleet}: {len(found)}/{seeds}", file=sys.stderr, flush=True)
    return Figures(
        ttft_mean=fmean(one.ttft_mean for one in found),
        ttft_p99=fmean(one.ttft_p99 for one in found),
        hit_ratio=fmean(one.hit_ratio for one in found),
        goodput=fmean(one.goodput for one in found),
        failed=fmean(one.failed for one in found),
    )


def page(rows: Mapping[str, tuple[Figures, Figures]], seeds: int) -> str:
    """RANKS.md. `rows`: for each workload one endpoint for each address, and one for each rank."""
    table: list[Sequence[str]] = []
    for workload, (address, rank) in rows.items():
        for name, one in (("address", address), ("rank", rank)):
            times = [f"{one.ttft_mean:.3f}", f"{one.ttft_mean / address.ttft_mean:.2f}x", f"{one.ttft_p99:.2f}"]
            table.append([workload, name, *times, f"{one.hit_ratio:.3f}", f"{one.goodput:.3f}", f"{one.failed:.0f}"])
    heads = ["workload", "an endpoint is", "TTFT mean, s", "of one for each address", "p99, s", "hit ratio"]
    return (
        f"# Data-parallel ranks\n\n`python -m benchmarks.ranks --seeds {seeds}`, lbproxy {__version__}, virtual time."
        f" {SERVERS} servers of {RANKS} ranks each, every rank a Qwen3-32B on\ntwo H100, policy `adaptive`."
        " With an endpoint for each address the server chooses the rank with the fewest requests; with\none for each"
        " rank [lbproxy chooses](../docs/ranks.md). Goodput: TTFT within 1 s and TPOT within 50 ms.\n\n"
        + as_table([*heads, "goodput", "failed"], table)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    seeds = parser.parse_args().seeds
    rows = {name: (measure(name, "address", seeds), measure(name, "rank", seeds)) for name in WORKLOADS}
    PAGE.write_text(page(rows, seeds), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
