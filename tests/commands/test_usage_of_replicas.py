# SPDX-License-Identifier: Apache-2.0
"""`lbproxy usage` of several replicas."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from lbproxy.commands import usage as command
from lbproxy.commands.usage import usage

COUNTS = {"prompt_uncached": 1, "prompt_cached": 2, "completion": 3, "estimated": 4}


def said_of(urls: list[str], monkeypatch: pytest.MonkeyPatch, *, as_json: bool = False) -> str:
    def asked(url: str, token: str | None, days: int, *, own: bool) -> dict[str, Any]:
        assert own is (len(urls) > 1)
        rows = [{"day": "2026-11-28", "flow": "own", "model": url} | COUNTS]
        return {
            "kept": True,
            "all_replicas": False,
            "rows": [*rows, {"day": "2026-11-29", "flow": "f", "model": "m"} | COUNTS],
        }

    monkeypatch.setattr(command, "_asked", asked)
    console = Console(file=io.StringIO(), width=120)
    assert usage(urls, None, None, console, days=9, as_json=as_json) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_of_several_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = json.loads(said_of(["a", "b"], monkeypatch, as_json=True))["rows"]
    counts = {name: 2 * count for name, count in COUNTS.items()}
    assert first == {"day": "2026-11-29", "flow": "f", "model": "m"} | counts
    assert [one["completion"] for one in others] == [3, 3]


def test_that_others_are_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "of one replica alone" in said_of(["a"], monkeypatch)
    assert "replicas" not in said_of(["a", "b"], monkeypatch)
