# SPDX-License-Identifier: Apache-2.0
"""Trials as the benchmark over HTTP returns them, and what is kept of them, with round figures."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.http_routing.client import Answer
from benchmarks.http_routing.results import Row
from benchmarks.http_routing.routers import OURS
from benchmarks.http_routing.trial import Trial
from lbproxy.sim.figures.report import summarise


def one_trial(cell: str, answer: Answer, *, shares: list[int], seconds: float) -> Trial:
    """One of lbproxy's, with the first seed."""
    return Trial(
        cell=cell,
        seed=1,
        router="lbproxy",
        answer=answer,
        router_cpu_s=1.0,
        router_waited_s=0.0,
        servers_cpu_s=1.0,
        others_cpu_s=0.0,
        shares=shares,
        seconds=seconds,
    )


def row(name: str, seed: int, ttft_s: float, *, hits: float = 0.8, late_s: float = 0.002, asked: str = "d") -> Row:
    """A run of `b2b`; `asked`: what its digest is, but for the seed."""
    figures = {**asdict(summarise([], 4)), "ttft_mean": ttft_s, "ttft_p99": 4 * ttft_s, "requests": 10, "failed": seed}
    return Row(
        cell="b2b",
        seed=seed,
        router=name,
        short=False,
        rejected=None,
        digest=f"{asked}{seed}",
        summary=figures,
        phases={},
        usage_hit_ratio=hits,
        itl_p99=0.05,
        answered=[],
        preemptions=0,
        shares=[10] if name == OURS else [4, 6],
        failures={},
        server_lag_s=0.001 * seed,
        client_lag_s=late_s,
        router_cpu_s=3.0,
        router_waited_s=0.0,
        servers_cpu_s=4.0,
        client_cpu_s=2.0,
        others_cpu_s=0.0,
        seconds=60.0,
    )
