# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md, from the JSON lines that the tests wrote.

`results/NAME.jsonl` is what one run of `make chaos` wrote about NAME: lbproxy or a peer. A test's last line counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from tests.support.docs import table

RESULTS = Path(__file__).parent / "results"
HIDDEN = (
    "`",
    "descriptors too",
    "tasks too",
    "lag, ms",
    "lag of our own",
    "CPU of the busiest",
    "internal errors",
    "left in flight",
)
"""Figures that are the same row after row: they have a table of their own."""


MOST_FIGURES = 4
INVARIANTS = (
    *("left in flight", "descriptors too many", "tasks too many", "internal errors"),
    *("`Traceback` in the log", "`never retrieved` in the log", "lag of our own, ms"),
)
STOPPED = "T28"
"""The test that stops the process itself, which is a lag."""


class Line(TypedDict):
    """One test's line."""

    test: str
    proxy: str
    form: str
    what: str
    figures: dict[str, float | int | str]
    missed: list[str]
    seconds: float


def lines(name: str) -> dict[str, Line]:
    """By test, in the order of the tests."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return {}
    read: list[Line] = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["test"]: line for line in sorted(read, key=lambda line: line["test"])}


def written(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value == 1e9:
        return "never"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def figures(line: Line) -> str:
    """The first of those that are not 0, as what may not happen is."""
    of = line["figures"].items()
    shown = [f"{name} {written(value)}" for name, value in of if value != 0 and not name.startswith(HIDDEN)]
    missed = [f"**missed: {', '.join(line['missed'])}**"] if line["missed"] else []
    return "; ".join(shown[:MOST_FIGURES] + missed)


def own_results() -> str:
    """What lbproxy did in each test, a line each."""
    return "".join(f"- **{line['test']}** {line['what']}: {figures(line)}\n" for line in lines("lbproxy").values())


def invariants_table() -> str:
    """What every test asserts, at its worst over all of them."""
    every = list(lines("lbproxy").values())
    rows = []
    for name in INVARIANTS:
        values = [float(line["figures"][name]) for line in every if name in line["figures"] and line["test"] != STOPPED]
        rows.append([name, written(max(values, default=0.0)), str(len(values))])
    return table(["figure", "worst", "tests"], rows)


FAILED = ("UF", "UF of the others")
SILENT = ("SF",)


def verdict(line: Line | None) -> str:
    """A cell: what a proxy did in a test, of that which it may not; 0 if nothing."""
    if line is None:
        return "-"
    shown = []
    for names, word in ((FAILED, "failed"), (SILENT, "silent")):
        counts = [line["figures"][name] for name in names if name in line["figures"]]
        shown += [f"{written(counts[0])} {word}"] if counts and counts[0] else []
    of = line["figures"].get("requests") or line["figures"].get("answers")
    text = (", ".join(shown) or "0") + (f" of {written(of)}" if of else "")
    counted = (*FAILED, *SILENT)
    rest = [one.partition(", must")[0] for one in line["missed"] if one.partition(" is ")[0] not in counted]
    return f"{text}; {', '.join(rest)}".replace("is 1e+09", "never") if rest else text


def peers_table(names: list[str]) -> str:
    """lbproxy beside others: requests that failed needlessly, and answers that looked whole and were not."""
    own, others = lines("lbproxy"), [lines(name) for name in names]
    tests = [test for test in own if any(test in other for other in others)]
    rows = [[test, verdict(own[test]), *(verdict(one.get(test)) for one in others)] for test in tests]
    return table(["test", "lbproxy", *names], rows)
