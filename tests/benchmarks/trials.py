# SPDX-License-Identifier: Apache-2.0
"""Trials as the benchmark over HTTP returns them, with round figures."""

from __future__ import annotations

from benchmarks.http_routing.client import Answer
from benchmarks.http_routing.trial import Trial


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
