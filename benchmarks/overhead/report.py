"""Raw figures -> Markdown. Pure; `python -m benchmarks.overhead --render FILE` does it again from the JSON.

Of a subject's windows the median counts; what it is compared with is the median of nginx and of sglang-router in the
same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from benchmarks.overhead.load import Figures
from benchmarks.overhead.plan import AboutStage, Results

BASES = ("nginx", "sglang-router")
TimeKind = Literal["latency_ms", "ttft_ms", "delay_ms", "gap_ms"]
CORES = 2
FULL = 0.95
"""Share of a core from which on it counts as full."""
DISTURBED = 0.1
"""Share of the machine that others may have before the report says so."""
BEHIND = 0.95
"""Share of the events that must come on time."""
BEGIN, END = "<!-- generated: overhead -->", "<!-- end -->"


def render(results: Results) -> str:
    """The whole section."""
    parts = ["## Proxy overhead", _preface(results), _subjects(results)]
    for stage in results["stages"]:
        tables = _streams if stage["workload"] == "streams" else _cpu
        parts += [f"### {stage['title']}", tables(results, stage)]
    return "\n\n".join(parts) + "\n"


def insert(page: str, section: str) -> str:
    """The page with the section between its marks; at its end if it has no marks."""
    block = f"{BEGIN}\n{section}{END}\n"
    before, begin, rest = page.partition(BEGIN)
    if not begin:
        return f"{page.rstrip()}\n\n{block}".lstrip()
    after = rest.partition(END)[2].removeprefix("\n")
    return f"{before}{block}{after}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _preface(results: Results) -> str:
    busy = ", ".join(f"{value:.1f}" for value in results["load_average"])
    return (
        f"`{results['command']}`, {results['date']}. {results['machine']}; load average before the run {busy}.\n"
        "Method and limits: [docs/benchmarks.md](../docs/benchmarks.md); raw figures:\n"
        "[results/overhead.json](results/overhead.json). CPU is user and system time of all of the proxy's processes;\n"
        "x nginx and x sglang-router are its CPU divided by theirs, so below 1 is less. Busy is the share of core 0\n"
        "that the proxy used, and of core 1 that load and model server used. Median of the rounds."
    )


def _subjects(results: Results) -> str:
    rows = [(name, about["version"], about["note"]) for name, about in results["subjects"].items()]
    lines = [table(("subject", "version", "runs"), rows)]
    lines += [f"Not measured: {name}: {why}." for name, why in results["missing"].items()]
    lines += [f"Failed: {where}: {why}" for where, why in results["failed"].items()]
    return "\n\n".join(lines)


def _cpu(results: Results, stage: AboutStage) -> str:
    """One row a subject: CPU per request or event, and what the load saw."""
    unit = stage["unit"]
    is_stream = unit == "event"
    windows = _windows(results, stage)
    base = {name: _middle(windows[name], _cpu_us(unit)) for name in BASES if name in windows}
    rows = []
    for name, some in windows.items():
        middle = _middle(some, _cpu_us(unit))
        rows.append(
            [
                name,
                _number(middle, 1),
                _spread(some, _cpu_us(unit)),
                *(_ratio(middle, base.get(other)) for other in BASES),
                _number(_middle(some, lambda one: _count(one, unit) / one["seconds"]), 0),
                *_times(some, "delay_ms" if is_stream else "latency_ms"),
                *_busy(some),
            ]
        )
    time = "event delay" if is_stream else "latency"
    heads = ["proxy", f"CPU per {unit}, us", "min - max", *(f"x {name}" for name in BASES), f"{unit}s/s"]
    heads += [f"{time} p50, ms", "p99, ms", "core 0 busy", "core 1 busy"]
    return "\n\n".join([_rounds(stage), table(heads, rows), *_warnings(windows, stage)])


def _streams(results: Results, stage: AboutStage) -> str:
    """One row a subject: memory and delays."""
    windows = _windows(results, stage)
    rows = []
    for name, some in windows.items():
        idle = results["idle_rss_bytes"].get(f"{stage['workload']}: {name}")
        peak = max((one["proxy_rss_bytes"] or 0 for one in some), default=0)
        rows.append(
            [
                name,
                _number(idle and idle / 1e6, 0),
                _number(peak / 1e6 if peak else None, 0),
                *_times(some, "delay_ms"),
                *_times(some, "ttft_ms"),
                _number(_middle(some, _cpu_us("event")), 1),
                *_busy(some),
            ]
        )
    heads = ["proxy", "RSS idle, MB", "RSS at 2,000 streams, MB", "event delay p50, ms", "p99, ms", "TTFT p50, ms"]
    heads += ["p99, ms", "CPU per event, us", "core 0 busy", "core 1 busy"]
    return "\n\n".join([_rounds(stage), table(heads, rows), *_warnings(windows, stage)])


def _rounds(stage: AboutStage) -> str:
    unit = "streams" if stage["unit"] == "event" else "connections"
    times = "1 round" if stage["rounds"] == 1 else f"{stage['rounds']} rounds"
    return f"{stage['connections']:,} {unit}, body {stage['body_bytes']:,} bytes, {times} of {stage['seconds']:g} s."


def _warnings(windows: dict[str, list[Figures]], stage: AboutStage) -> list[str]:
    """What a reader must know before believing a row."""
    pace = stage["events_per_s"]
    full = _names(windows, lambda one: _load_share(one) > FULL)
    disturbed = _names(windows, lambda one: one["others_cpu_s"] / one["seconds"] / CORES > DISTURBED)
    behind = _names(windows, lambda one: one["events"] / one["seconds"] < BEHIND * pace)
    said = {
        "Core 1 was full, so that rates and delays are the load's and not the proxy's (CPU per unit stands)": full,
        f"Others used more than {DISTURBED:.0%} of the machine, so that figures are too high": disturbed,
        f"Fewer than {BEHIND:.0%} of the events that were due came, so that figures do not compare": behind,
    }
    lines = [f"{what}, in half of the rounds or more: {', '.join(names)}." for what, names in said.items() if names]
    for name, some in windows.items():
        if errors := sum(one["errors"] for one in some):
            said_first = next(one["complaints"] for one in some if one["errors"])
            lines.append(f"Failed requests: {name} {errors} ({said_first}).")
    return lines


def _names(windows: dict[str, list[Figures]], wrong: Callable[[Figures], bool]) -> list[str]:
    """The subjects with something wrong in half of their windows or more."""
    return [name for name, some in windows.items() if 2 * sum(map(wrong, some)) >= len(some)]


# --- Figures ----------------------------------------------------------------------------------------------------------


def _windows(results: Results, stage: AboutStage) -> dict[str, list[Figures]]:
    """The windows of a stage by subject, subjects in the run's order."""
    rounds = [one for one in results["rounds"] if one["workload"] == stage["workload"]]
    found = {name: [one["figures"] for one in rounds if one["subject"] == name] for name in results["subjects"]}
    return {name: some for name, some in found.items() if some}


def _count(one: Figures, unit: str) -> int:
    return one["events"] if unit == "event" else one["requests"]


def _cpu_us(unit: str) -> Callable[[Figures], float | None]:
    """The proxy's CPU per request or event; None if there was no proxy, or nothing came."""

    def of(one: Figures) -> float | None:
        used, count = one["proxy_cpu_s"], _count(one, unit)
        return used / count * 1e6 if used is not None and count else None

    return of


def _load_share(one: Figures) -> float:
    return (one["cpu_s"] + one["server_cpu_s"]) / one["seconds"]


def _proxy_share(one: Figures) -> float | None:
    return None if one["proxy_cpu_s"] is None else one["proxy_cpu_s"] / one["seconds"]


def _known(some: list[Figures], of: Callable[[Figures], float | None]) -> list[float]:
    return [value for one in some if (value := of(one)) is not None]


def _middle(some: list[Figures], of: Callable[[Figures], float | None]) -> float | None:
    known = _known(some, of)
    return statistics.median(known) if known else None


def _spread(some: list[Figures], of: Callable[[Figures], float | None]) -> str:
    known = _known(some, of)
    return f"{min(known):.1f} - {max(known):.1f}" if known else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(some: list[Figures], kind: TimeKind) -> list[str]:
    return [
        _number(_middle(some, lambda one: one[kind]["p50"]), 2),
        _number(_middle(some, lambda one: one[kind]["p99"]), 2),
    ]


def _busy(some: list[Figures]) -> list[str]:
    return [_share(_middle(some, _proxy_share)), _share(_middle(some, _load_share))]
