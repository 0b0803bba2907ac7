# SPDX-License-Identifier: Apache-2.0
"""A request and an event take no more instructions than was recorded. They are counted: a busy machine counts the same.

`python -m benchmarks.instructions --record` in build/compiled writes what is recorded.
"""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.instructions import GUARDED, RECORDED, WORSE, Record, built_with, least, missing, prepare
from lbproxy.processes import process


def recorded() -> Record:
    read: Record = json.loads(RECORDED.read_text())
    return read


@pytest.mark.parametrize("load", GUARDED)
def test_a_request_and_an_event_take_no_more_instructions_than_they_did(load: str) -> None:
    """Two runs of the same code differ by a thousandth."""
    if why := missing():
        pytest.skip(f"NOT TESTED: how many instructions it takes, {why} (make test-tools)")
    record = recorded()
    if (here := built_with()) != (record["python"], record["machine"]):
        pytest.skip(f"NOT TESTED: how many instructions it takes: this is {here}, and the record another's")
    prepare()
    most = WORSE * record["instructions"][load]
    found = least(load, enough=most)
    assert found <= most, f"{load}: {found:,.0f}; recorded {record['instructions'][load]:,}"


def test_what_is_recorded_was_written_by_the_command() -> None:
    record = recorded()
    assert set(record) == set(Record.__annotations__)
    assert set(record["instructions"]) == set(GUARDED)
    assert all(1_000 < one < 10_000_000 for one in record["instructions"].values())


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "for want of valgrind and cc"
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(process, "is_compiled", lambda: False)
    assert "compiled" in (missing() or "")
