# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reliability.md about HTTP, from what `python -m tests.conformance` kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
    """What each gateway fails, of how many of its cases: a row for each group, a column for each gateway."""
    rows = [[group, *(_failed([one["groups"][group]]) for one in every)] for group in every[0]["groups"]]
    rows.append(["all", *(_failed(one["groups"].values()) for one in every)])
    return table(["cases", *(one["name"] for one in every)], rows)


def _failed(groups: Iterable[tuple[int, int]]) -> str:
    passed, of = (sum(counts) for counts in zip(*groups, strict=True))
    return f"{of - passed}/{of}"
