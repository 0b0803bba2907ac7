# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: CPU per request and per event, what is added to the first event, delays, memory."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.overhead.figures import added_ms, cpu_us, known, middle, windows
from benchmarks.overhead.goals import OURS
from benchmarks.overhead.load import Figures
from benchmarks.overhead.plan import DIRECT, Section
from benchmarks.overhead.results import Results

Bars = dict[str, tuple[float, float, float]]
"""By subject: the median, and how far the least and the greatest round lie from it."""
MUCH = 6.0
"""A bar of more than this many times lbproxy's is cut, with its figure written on it."""


def draw(results: Results, path: Path) -> str:
    """Write the picture; returns what was done, for whoever waits."""
    panels = _panels(results)
    if not panels:
        return "no picture: none of its sections is there"
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        return "no picture: it needs matplotlib (pip install '.[plots]')"
    figure = Figure(figsize=(4.2 * min(3, len(panels)), 3.4 * -(-len(panels) // 3)), layout="constrained")
    places = list(figure.subplots(-(-len(panels) // 3), min(3, len(panels)), squeeze=False).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, (title, bars) in zip(places, panels.items(), strict=False):
        axes.set_axis_on()
        names = list(bars)
        limit = 1.25 * min(max(one[0] + one[2] for one in bars.values()), MUCH * bars.get(OURS, (1e9,))[0]) or 1.0
        colours = ["#c44e52" if name.startswith(OURS) else "#8c9bb0" for name in names]
        errors = [[bars[name][side] for name in names] for side in (1, 2)]
        axes.barh(names, [bars[name][0] for name in names], xerr=errors, color=colours, ecolor="#444", height=0.65)
        for row, name in enumerate(names):
            value, _, above = bars[name]
            is_cut = value > limit
            end = 0.7 * limit if is_cut else min(value + above, limit)
            text = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            axes.text(end + 0.02 * limit, row, text + " (cut)" * is_cut, va="center", size=8)
        axes.set_xlim(0, limit * 1.05)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, facecolor="white")
    return f"drew {path.name}"


def _panels(results: Results) -> dict[str, Bars]:
    wanted = {
        "1k": ("CPU per 1 KB request, us", cpu_us("request")),
        "32k": ("CPU per 32 KB request, us", cpu_us("request")),
        "sse": ("CPU per streamed event, us", cpu_us("event")),
        "streams": ("event delay p99, 2,000 streams, ms", lambda one: one["delay_ms"]["p99"]),
    }
    panels = {}
    for key, (title, of) in wanted.items():
        if key in results["workloads"]:
            seen = windows(results["workloads"][key])
            panels[title] = {name: _bar(known(some, of)) for name, some in seen.items() if _shown(name, some)}
    if "streams" in results["workloads"]:
        panels["memory at 2,000 streams, MB"] = _memory(results["workloads"]["streams"])
    if "ttft" in results["workloads"]:
        seen = windows(results["workloads"]["ttft"])
        added = {name: added_ms(seen, name) for name in seen if name != DIRECT}
        panels["added to the first event at low load, p50, ms"] = {
            name: (value, 0.0, 0.0) for name, value in added.items() if value is not None
        }
    return {title: bars for title, bars in panels.items() if bars}


def _shown(name: str, some: list[Figures]) -> bool:
    return name != DIRECT and middle(some, lambda one: one["proxy_cpu_s"]) is not None


def _memory(section: Section) -> Bars:
    return {
        name: _bar([max(one["proxy_rss_bytes"] or 0 for one in some) / 1e6])
        for name, some in windows(section).items()
        if _shown(name, some)
    }


def _bar(values: list[float]) -> tuple[float, float, float]:
    value = statistics.median(values)
    return value, value - min(values), max(values) - value
