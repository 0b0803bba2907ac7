# SPDX-License-Identifier: Apache-2.0
"""Raw figures -> Markdown. Pure; `python -m benchmarks.overhead --render FILE` does it again from the JSON.

Of a subject's windows the median counts; what it is compared with is the median of nginx and of sglang-router in the
same section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from benchmarks.overhead.figures import added_ms, count, cpu_us, known, middle, windows
from benchmarks.overhead.goals import Goal, goals
from benchmarks.overhead.load import Figures, Kind
from benchmarks.overhead.plan import DIRECT, Section
from benchmarks.overhead.results import Results

BASES = ("nginx", "sglang-router")
TimeKind = Literal["latency_ms", "ttft_ms", "delay_ms", "gap_ms"]
CORES = 2
FULL = 0.95
"""Share of a core from which on it counts as full."""
DISTURBED = 0.1
"""Share of the machine that others may have before the report says so."""
BEHIND = 0.95
"""Share of the events that must come on time."""
PLOTTED = {"1k", "32k", "sse", "ttft", "streams"}
"""Sections that the picture shows."""
BEGIN, END = "<!-- generated: overhead -->", "<!-- end -->"


def render(results: Results) -> str:
    """The whole part of the page."""
    sections = results["workloads"].values()
    made = {_made(section) for section in sections}
    parts = ["## Proxy overhead", PREFACE, *(made if len(made) == 1 else ()), _subjects(sections)]
    if goals := table_of_goals(results):
        parts += ["### Targets", ABOUT_GOALS, goals]
    if PLOTTED & set(results["workloads"]):
        parts.append("![CPU, delays and memory](results/overhead.png)")
    for section in sections:
        about = [_about(section)] if len(made) == 1 else [_about(section), _made(section)]
        parts += [f"### {section['title']}", *about, TABLES[section["kind"]](section)]
    return "\n\n".join(parts) + "\n"


def insert(page: str, section: str, mark: str = BEGIN) -> str:
    """The page with the section between its marks; at its end if it has no marks."""
    block = f"{mark}\n{section}{END}\n"
    before, begin, rest = page.partition(mark)
    if not begin:
        return f"{page.rstrip()}\n\n{block}".lstrip()
    after = rest.partition(END)[2].removeprefix("\n")
    return f"{before}{block}{after}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PREFACE = """\
[Method and limits](../docs/benchmarks.md), [raw figures](results/overhead.json). CPU is of all of the proxy's
processes; x nginx and x sglang-router are its CPU divided by theirs. The proxy has core 0, load and model server core
1; where that was full, rates and delays are the load's (CPU per unit stands). Median of the rounds."""
ABOUT_GOALS = "By the sections below and by benchmarks of lbproxy alone."


def table_of_goals(results: Results) -> str:
    """Ours, must, stretch, and whether it is met; nothing if no goal has what it needs."""
    rows = []
    for goal, ours in goals(results):
        rows.append([goal.what, number(ours, goal.digits), goal.said(goal.must), goal.said(goal.stretch)])
        rows[-1].append("-" if ours is None else ", ".join(_verdicts(goal, ours)))
    heads = ("measure", "lbproxy", "must", "stretch", "verdict")
    return table(heads, rows) if any(row[1] != "-" for row in rows) else ""


def _verdicts(goal: Goal, ours: float) -> Iterator[str]:
    if goal.must is not None:
        yield "met" if goal.met(ours, goal.must) else "**not met**"
    if goal.stretch is not None:
        yield "stretch met" if goal.met(ours, goal.stretch) else "stretch not met"


def _subjects(sections: Iterable[Section]) -> str:
    about: dict[str, tuple[list[str], str]] = {}
    missing: dict[str, str] = {}
    failed: dict[str, str] = {}
    for section in sections:
        for name, one in section["subjects"].items():
            versions, _ = about.setdefault(name, ([], one["note"]))
            if one["version"] not in versions:
                versions.append(one["version"])
        missing |= section["missing"]
        failed |= {f"{section['title']}: {name}": why for name, why in section["failed"].items()}
    rows = [(name, "; ".join(versions), note) for name, (versions, note) in about.items()]
    lines = [table(("subject", "version", "runs"), rows)]
    lines += [f"Not measured: {name}: {why}." for name, why in missing.items()]
    lines += [f"Failed: {where}: {why}" for where, why in failed.items()]
    return "\n\n".join(lines)


def _made(section: Section) -> str:
    return f"`{section['command']}`, {section['date']}. {section['machine']}."


def _about(section: Section) -> str:
    unit = "requests at a time" if section["unit"] == "request" else "streams"
    times = "1 round" if section["planned"] == 1 else f"{section['planned']} rounds"
    busy = ", ".join(f"{value:.1f}" for value in section["load_average"])
    size = f"{section['body_bytes']:,} bytes"
    return (
        f"{section['connections']:,} {unit}, body {size}, {times} of {section['seconds']:g} s; load average before it "
        f"{busy}."
    )


def _cpu(section: Section) -> str:
    """One row a subject: CPU per request or event, and what the load saw."""
    unit = section["unit"]
    is_stream = unit == "event"
    seen = windows(section)
    base = {name: middle(seen[name], cpu_us(unit)) for name in BASES if name in seen}
    rows = []
    for name, some in seen.items():
        used = middle(some, cpu_us(unit))
        rows.append(
            [
                name,
                number(used, 1),
                _spread(some, cpu_us(unit)),
                *(_ratio(used, base.get(other)) for other in BASES),
                number(middle(some, lambda one: count(one, unit) / one["seconds"]), 0),
                *_times(some, "delay_ms" if is_stream else "latency_ms"),
                *_busy(some),
            ]
        )
    time = "event delay" if is_stream else "latency"
    heads = ["proxy", f"CPU per {unit}, us", "min - max", *(f"x {name}" for name in BASES), f"{unit}s/s"]
    heads += [f"{time} p50, ms", "p99, ms", "core 0 busy", "core 1 busy"]
    return "\n\n".join([table(heads, rows), *_warnings(seen, section)])


def _ttft(section: Section) -> str:
    """One row a subject: times to the first event, and what a proxy adds to them."""
    seen = windows(section)
    rows = []
    for name, some in seen.items():
        used = middle(some, cpu_us("request"))
        rows.append(
            [
                name,
                *_times(some, "ttft_ms"),
                number(None if name == DIRECT else added_ms(seen, name), 3),
                number(used, 0),
                number(used and 1e6 / used, 0),
                number(middle(some, lambda one: one["requests"] / one["seconds"]), 0),
                *_busy(some),
            ]
        )
    heads = ["proxy", "TTFT p50, ms", "p99, ms", "p50 over direct, ms", "CPU per request, us", "requests/s per core"]
    heads += ["requests/s", "core 0 busy", "core 1 busy"]
    return "\n\n".join([table(heads, rows), *_warnings(seen, section)])


def _streams(section: Section) -> str:
    """One row a subject: memory and delays."""
    seen = windows(section)
    rows = []
    for name, some in seen.items():
        idle = section["idle_rss_bytes"].get(name)
        peak = max((one["proxy_rss_bytes"] or 0 for one in some), default=0)
        rows.append(
            [
                name,
                number(idle and idle / 1e6, 0),
                number(peak / 1e6 if peak else None, 0),
                *_times(some, "delay_ms"),
                *_times(some, "ttft_ms"),
                number(middle(some, cpu_us("event")), 1),
                str(sum(one["errors"] for one in some)),
                *_busy(some),
            ]
        )
    heads = ["proxy", "RSS idle, MB", f"RSS at {section['connections']:,} streams, MB", "event delay p50, ms"]
    heads += ["p99, ms", "TTFT p50, ms", "p99, ms", "CPU per event, us", "errors", "core 0 busy", "core 1 busy"]
    return "\n\n".join([table(heads, rows), *_warnings(seen, section)])


TABLES: dict[Kind, Callable[[Section], str]] = {"requests": _cpu, "events": _cpu, "memory": _streams, "ttft": _ttft}


def _warnings(seen: dict[str, list[Figures]], section: Section) -> list[str]:
    """What a reader must know before believing a row."""
    pace = section["events_per_s"]
    full = _names(seen, lambda one: _load_share(one) > FULL)
    disturbed = _names(seen, lambda one: one["others_cpu_s"] / one["seconds"] / CORES > DISTURBED)
    behind = _names(seen, lambda one: one["events"] / one["seconds"] < BEHIND * pace)
    said = {
        "Core 1 was full": full,
        f"Others used more than {DISTURBED:.0%} of the machine, so that figures are too high": disturbed,
        f"Fewer than {BEHIND:.0%} of the events that were due came, so that figures do not compare": behind,
    }
    lines = [f"{what}, in half of the rounds or more: {', '.join(names)}." for what, names in said.items() if names]
    for name, some in seen.items():
        if errors := sum(one["errors"] for one in some):
            said_first = next(one["complaints"] for one in some if one["errors"])
            lines.append(f"Failed requests: {name} {errors} ({said_first}).")
    return lines


def _names(seen: dict[str, list[Figures]], wrong: Callable[[Figures], bool]) -> list[str]:
    """The subjects with something wrong in half of their windows or more."""
    return [name for name, some in seen.items() if 2 * sum(map(wrong, some)) >= len(some)]


def _load_share(one: Figures) -> float:
    return (one["cpu_s"] + one["server_cpu_s"]) / one["seconds"]


def _proxy_share(one: Figures) -> float | None:
    return None if one["proxy_cpu_s"] is None else one["proxy_cpu_s"] / one["seconds"]


def _spread(some: list[Figures], of: Callable[[Figures], float | None]) -> str:
    values = known(some, of)
    return f"{min(values):.1f} - {max(values):.1f}" if values else "-"


def number(value: float | None, digits: int) -> str:
    """As text; a dash for what is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(some: list[Figures], kind: TimeKind) -> list[str]:
    return [
        number(middle(some, lambda one: one[kind]["p50"]), 2),
        number(middle(some, lambda one: one[kind]["p99"]), 2),
    ]


def _busy(some: list[Figures]) -> list[str]:
    return [_share(middle(some, _proxy_share)), _share(middle(some, _load_share))]
