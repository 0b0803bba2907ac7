# SPDX-License-Identifier: Apache-2.0
"""The README's table of routing: the last run of routers before simulated servers over HTTP, each at its defaults."""

from __future__ import annotations

import statistics

import orjson

from tests.support.docs import ROOT, expect_generated, table

RUN = ROOT / "benchmarks" / "results" / "routing-http-full.json"
ROUTERS = ("lbproxy", "nginx least_conn", "vllm-router", "sglang-router", "smg")
CELLS = {"mooncake": "conversations of Mooncake's trace", "b2b": "75 system prompts of 6,000 tokens"}


def test_readme_has_the_routing_of_the_last_run() -> None:
    run = orjson.loads(RUN.read_bytes())
    rows = [[name, *(_mean(run[cell], router) for router in ROUTERS)] for cell, name in CELLS.items()]
    expect_generated(ROOT / "README.md", "routing", table(["", *ROUTERS], rows))


def _mean(cell: dict[str, list[dict[str, float]]], router: str) -> str:
    seconds = statistics.mean(one["ttft_mean"] for one in cell[router])
    return f"{1000 * seconds:,.0f} ms"
