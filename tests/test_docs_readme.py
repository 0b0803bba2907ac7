# SPDX-License-Identifier: Apache-2.0
"""The README: short, with one table, of the last runs of routers at their defaults, and without a map of its own."""

from __future__ import annotations

import re
import statistics

import orjson

from benchmarks.overhead import results as kept
from benchmarks.overhead.figures import cpu_us, middle, windows
from benchmarks.overhead.load import DEFAULTS
from tests.support.docs import DOCS, ROOT, expect_generated, table

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
ROUTERS = ("lbproxy", "nginx least_conn", "vllm-router", "sglang-router", "smg")
CELLS = {
    "mooncake": "first token: conversations of Mooncake's trace",
    "b2b": "first token: 75 system prompts of 6,000 tokens",
}
COSTS = {
    "1k": ("CPU: a 1 KB request", "request"),
    "256k": ("CPU: a coding agent's turn of 256 KB", "request"),
    "sse": ("CPU: an event of a stream", "event"),
}


def test_readme_has_the_figures_of_the_last_runs() -> None:
    run = orjson.loads((RESULTS / "routing-http-full.json").read_bytes())
    rows = [[name, *(_mean(run[cell], router) for router in ROUTERS)] for cell, name in CELLS.items()]
    sections = kept.read(RESULTS / "overhead.json")["workloads"]
    for key, (name, unit) in COSTS.items():
        seen = windows(sections[key])
        names = [router.partition(" ")[0] for router in ROUTERS]
        used = [middle(seen.get(f"{name}{DEFAULTS}") or seen[name], cpu_us(unit)) for name in names]
        rows.append([name, *(f"{value:,.0f} us" for value in used if value is not None)])
    expect_generated(README, "measured", table(["", *ROUTERS], rows))


def _mean(cell: dict[str, list[dict[str, float]]], router: str) -> str:
    seconds = statistics.mean(one["ttft_mean"] for one in cell[router])
    return f"{1000 * seconds:,.0f} ms"


def test_readme_is_read_in_a_minute() -> None:
    """One picture, one table; pages by job stand in docs/README.md alone."""
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^\| --- ", text, re.MULTILINE)) == 1
    last = text.rstrip().rpartition("\n\n")[2]
    pages = {*re.findall(r"\(docs/([\w-]+\.md)", last)}
    assert pages == {"README.md", "comparison.md"}, f"{pages} stand in {DOCS.name}/README.md"
