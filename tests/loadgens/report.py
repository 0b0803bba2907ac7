# SPDX-License-Identifier: Apache-2.0
"""What the load generators and lbproxy report of the same runs, side by side: compared, kept, and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.loadgens.seen import Seen
from tests.loadgens.tools import Summary, Tool
from tests.support.docs import table

RESULTS = Path(__file__).parent / "results" / "loadgens.json"
TOLERANCE = 0.01
"""Of times; counts are the same."""


@dataclass(frozen=True)
class Report:
    """One load generator: a run in which all succeeds, and one in which the servers refuse some requests."""

    tool: str
    """Name and version."""
    missing: str | None
    """Why it did not run."""
    figures: dict[str, tuple[float, float]]
    """What it reports, and what lbproxy reports."""
    others: dict[str, int]
    """Its other requests: method, path and status."""
    cut: int = 0
    """Requests that it closed at its end."""


def figures(tool: Tool, summary: Summary, seen: Seen) -> dict[str, tuple[float, float]]:
    """What both report of the run in which all succeeds."""
    both: dict[str, tuple[float | None, float]] = {
        "requests": (summary.good, seen.good),
        "prompt tokens": (summary.prompt_tokens, seen.prompt_tokens),
        "response tokens": (summary.completion_tokens, seen.completion_tokens),
        "TTFT, s": (summary.ttft_s, seen.ttft_s),
        "E2E, s": (summary.duration_s, seen.duration_s),
    }
    return {name: (ours, theirs) for name, (ours, theirs) in both.items() if ours is not None}


def with_errors(summary: Summary, seen: Seen) -> dict[str, tuple[float, float]]:
    """What both report of the run in which some fail."""
    return {"errors": (summary.failed, seen.failed), "beside them": (summary.good, seen.good)}


def differences(compared: dict[str, tuple[float, float]]) -> list[str]:
    """Counts that differ at all, and times that differ by more than they may."""
    return [
        f"{name}: {theirs} and {ours}"
        for name, (theirs, ours) in compared.items()
        if abs(theirs - ours) > (TOLERANCE * ours if name.endswith(", s") else 0)
    ]


def keep(reports: list[Report]) -> None:
    """Write the results, those of other tools staying as they are."""
    names = {report.tool.rpartition(" ")[0] for report in reports}
    kept = [one for one in (read() if RESULTS.exists() else []) if one.tool.rpartition(" ")[0] not in names]
    every = sorted([*kept, *reports], key=lambda report: report.tool)
    RESULTS.write_text(json.dumps([asdict(report) for report in every], indent=1) + "\n")


def read() -> list[Report]:
    """The results that were kept."""
    return [
        Report(one["tool"], one["missing"], {k: tuple(v) for k, v in one["figures"].items()}, one["others"], one["cut"])
        for one in json.loads(RESULTS.read_text())
    ]


NAMES = ("requests", "errors", "prompt tokens", "response tokens", "TTFT, s", "E2E, s")


def comparison(reports: list[Report]) -> str:
    """A row for each load generator that ran: its figure, then lbproxy's if that is another one."""
    rows = [[report.tool, *(_cell(report, name) for name in NAMES)] for report in reports if report.missing is None]
    return table(["load generator", *NAMES], rows)


def _cell(report: Report, name: str) -> str:
    if name not in report.figures:
        return "-"
    theirs, ours = report.figures[name]
    if not name.endswith(", s"):
        return f"{theirs:g}" if theirs == ours else f"{theirs:g}, {ours:g}"
    return f"{theirs:.3f}, {ours:.3f}: {100 * (theirs - ours) / ours:+.1f} %"


def other_requests(reports: list[Report]) -> str:
    """What else each asked for, and what did not run."""
    rows = [[one.tool, _asked(one)] for one in reports if one.others or one.cut]
    rows += [[one.tool, f"did not run: {one.missing}"] for one in reports if one.missing is not None]
    return table(["load generator", "besides"], rows)


def _asked(report: Report) -> str:
    words = [f"`{name.rpartition(' ')[0]}`: {name.rpartition(' ')[2]}" for name in sorted(report.others)]
    cut = [f"closes {report.cut} streams at its end, which it does not count"] if report.cut else []
    return "; ".join(words + cut)
