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
    """What each gateway fails, of how many of its cases: a row for each group in which one does."""
    shown = [group for group in every[0]["groups"] if any(passed < of for passed, of in _of(every, group))]
    rows = [[group, *(_failed([one]) for one in _of(every, group))] for group in shown]
    rows.append(["all", *(_failed(one["groups"].values()) for one in every)])
    return table(["cases", *(one["name"] for one in every)], rows)


def _of(every: list[Score], group: str) -> list[tuple[int, int]]:
    return [one["groups"][group] for one in every]


def _failed(groups: Iterable[tuple[int, int]]) -> str:
    passed, of = (sum(counts) for counts in zip(*groups, strict=True))
    return f"{of - passed}/{of}"
