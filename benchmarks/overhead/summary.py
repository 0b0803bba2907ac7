# SPDX-License-Identifier: Apache-2.0
"""The README's table: the figures that most readers ask for, of the last run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.overhead.figures import cpu_us, middle, windows
from benchmarks.overhead.goals import OURS
from benchmarks.overhead.load import Figures
from benchmarks.overhead.report import number, table
from benchmarks.overhead.results import Results

BEGIN = "<!-- generated: cost -->"
SHOWN = (OURS, "nginx", "envoy", "vllm-router", "sglang-router", "smg", "litellm")
Cell = Callable[[list[Figures]], str]


def _cpu(unit: str, some: list[Figures]) -> str:
    value = middle(some, cpu_us(unit))
    return "-" if value is None else f"{number(value, 0)} us"


def _memory(some: list[Figures]) -> str:
    return f"{max(one['proxy_rss_bytes'] or 0 for one in some) / 1e6:.0f} MB"


ROWS: dict[str, tuple[str, Cell]] = {
    "1k": ("1 KB request", partial(_cpu, "request")),
    "32k": ("32 KB prompt", partial(_cpu, "request")),
    "sse": ("event of a stream", partial(_cpu, "event")),
    "streams": ("RSS at 2,000 streams", _memory),
}


def summarize(results: Results) -> str:
    """A sentence, a table, and what one core does. Only if the sections of ROWS are there."""
    sections = {key: results["workloads"][key] for key in ROWS}
    seen = {key: windows(section) for key, section in sections.items()}
    names = [name for name in SHOWN if any(name in some for some in seen.values())]
    rows = []
    for key, (what, cell) in ROWS.items():
        rows.append([what, *(cell(seen[key][name]) if name in seen[key] else "-" for name in names)])
    first = sections["1k"]
    about = f"Proxy CPU on two cores, {first['date']}. lbproxy:\n{first['subjects'][OURS]['note']}"
    requests, events = (_per_core(seen[key][OURS], unit) for key, unit in (("1k", "request"), ("sse", "event")))
    return (
        f"{about}\n([all figures and the method](benchmarks/RESULTS.md); `make bench-overhead` repeats it):\n\n"
        f"{table(['', *names], rows)}\n\n"
        f"So one core relays about {requests:,} small requests or {events:,} events a second.\n"
    )


def _per_core(some: list[Figures], unit: str) -> int:
    """A second, a core, two significant digits."""
    used = middle(some, cpu_us(unit))
    assert used, "a proxy uses CPU"
    return int(float(f"{1e6 / used:.1e}"))
