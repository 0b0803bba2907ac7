# SPDX-License-Identifier: Apache-2.0
"""The cells of published traffic run as they are, and become a page of their own."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.cells import PUBLISHED
from benchmarks.page import Page
from lbproxy.sim.workloads.published import TRAFFIC


def test_each_published_traffic_has_a_cell() -> None:
    assert {cell.workload for cell in PUBLISHED.values()} == {*TRAFFIC, "agentx"}


def test_a_page_has_each_cell_with_each_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few seconds of each. What is missing is run, what is there is not."""
    warm_up = {"agentx": {"warm_up_s": 0}}
    cells = {
        name: replace(cell, parameters={**cell.parameters, "duration_s": 2, **warm_up.get(cell.workload, {})})
        for name, cell in PUBLISHED.items()
    }
    monkeypatch.setattr(routing, "PUBLISHED", cells)
    monkeypatch.setattr(routing, "HERE", tmp_path)
    monkeypatch.setattr(routing, "PUBLISHED_PAGE", Page(tmp_path / "PUBLISHED.md", "Over HTTP"))
    args = argparse.Namespace(policies=["random", "adaptive"], seeds=1, mooncake=None, azure=None)
    assert routing.run_published(args) == 0
    page = (tmp_path / "PUBLISHED.md").read_text("utf-8")
    assert all(f"\n## {name}\n" in page for name in cells)
    assert page.count("\n| adaptive | ") == page.count("\n| random | ") == len(cells)
    kept = (tmp_path / "results" / "published.json").read_bytes()
    assert routing.run_published(args) == 0
    assert (tmp_path / "results" / "published.json").read_bytes() == kept
    assert (tmp_path / "PUBLISHED.md").read_text("utf-8") == page
