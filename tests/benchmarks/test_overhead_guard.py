"""lbproxy did not become slower: its CPU per request beside nginx's, in one run, against what was recorded.

`python -m benchmarks.overhead.guard --record` writes what is recorded, after a change that makes it faster, or one that
makes it slower on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overhead import guard
from benchmarks.overhead.guard import Measured


def test_cpu_per_request_is_not_much_more_than_it_was() -> None:
    """CPU time, best of interleaved rounds, and a second try: a busy machine moves this ratio by a few per cent."""
    if why := guard.missing():
        pytest.skip(f"NOT TESTED: whether lbproxy became slower, {why} (make test-tools)")
    limit = guard.WORSE * guard.recorded()["ratio"]
    found = guard.measure(guard.ROUNDS)
    if found.ratio > limit:
        found = guard.measure(guard.ROUNDS)
    assert found.ratio <= limit, (
        f"{found}; at most {limit:.2f} times is allowed, {guard.WORSE:g} times what was recorded"
    )


def test_the_best_rounds_count() -> None:
    assert Measured([10.0, 30.0, 11.0], [200.0, 60.0, 90.0], "Python").ratio == 6


def test_what_is_recorded_was_written_by_the_command() -> None:
    record = json.loads(Path(guard.RECORDED).read_text())
    assert set(record) == set(guard.Record.__annotations__)
    assert 1 < record["ratio"] < 30


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert guard.missing() == "for want of nginx and cc and make and taskset"
