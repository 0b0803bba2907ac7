# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md about HTTP, from what `python -m tests.conformance` kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from tests.support.docs import table

RESULTS = Path(__file__).parent / "results"


class Score(TypedDict):
    """What one gateway made of the tables."""

    name: str
    groups: dict[str, tuple[int, int]]
    """Passed, of how many."""
    failed: dict[str, str]
    """Group and case: what was wrong."""


def scores(names: list[str]) -> list[Score]:
    """Those that were kept."""
    paths = [RESULTS / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def by_group(every: list[Score]) -> str:
    """A row for each group, a column for each gateway."""
    groups = list(every[0]["groups"])
    rows = [[group, *(f"{one['groups'][group][0]} of {one['groups'][group][1]}" for one in every)] for group in groups]
    sums = [[sum(n) for n in zip(*one["groups"].values(), strict=True)] for one in every]
    rows.append(["all", *(f"{passed} of {of}" for passed, of in sums)])
    return table(["cases", *(one["name"] for one in every)], rows)


def kind(why: str) -> str:
    """A failure in a few words."""
    why = why.partition(": ")[2]
    for text in ("not refused", "not served", "hangs", "sent a 100", "neither", "does not recover", "changed", "whole"):
        if why.startswith(text):
            return "taken for whole" if text == "whole" else text
    return "the endpoint got another body" if "another body" in why else why.partition(":")[0]


def failures(every: list[Score]) -> str:
    """What each of the others fails."""
    rows = [[one["name"], case, kind(why)] for one in every for case, why in one["failed"].items()]
    return table(["gateway", "case", "what it does"], rows)
