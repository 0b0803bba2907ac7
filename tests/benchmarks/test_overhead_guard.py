# SPDX-License-Identifier: Apache-2.0
"""lbproxy did not become slower: its CPU per request beside nginx's, in one run, against what was recorded.

`python -m benchmarks.overhead.guard --record` writes what is recorded, after a change that makes it faster, or one that
makes it slower on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overhead import guard
from benchmarks.overhead.guard import Measured, Verdict


def test_cpu_per_request_is_not_much_more_than_it_was() -> None:
    """CPU time, best of interleaved rounds, and a second try: a busy machine moves this ratio by a few per cent."""
    if why := guard.missing():
        pytest.skip(f"NOT TESTED: whether lbproxy became slower, {why} (make test-tools)")
    recorded = guard.recorded()["ratio"]
    found = guard.measure(guard.ROUNDS)
    if found.verdict(recorded) is not Verdict.GOOD:
        found = guard.measure(guard.ROUNDS)
    if found.verdict(recorded) is Verdict.TOO_BUSY:
        pytest.skip(
            f"NOT TESTED: whether lbproxy became slower: {Verdict.TOO_BUSY.value}: {found}; recorded {recorded}"
        )
    assert found.verdict(recorded) is Verdict.GOOD, f"{found}; recorded {recorded}"


@pytest.mark.parametrize(
    ("ratio", "others", "verdict"),
    [
        (1.4, 0.0, Verdict.GOOD),
        (1.4, 0.9, Verdict.GOOD),
        (1.6, 0.1, Verdict.SLOWER),
        (1.6, 0.3, Verdict.TOO_BUSY),
        (2.6, 0.9, Verdict.SLOWER),
    ],
)
def test_a_busy_machine_proves_only_what_is_gross(ratio: float, others: float, verdict: Verdict) -> None:
    assert Measured([10.0], [10.0 * ratio * 5.0], others, "Python").verdict(5.0) is verdict


def test_the_best_rounds_count() -> None:
    assert Measured([10.0, 30.0, 11.0], [200.0, 60.0, 90.0], 0.0, "Python").ratio == 6


def test_what_is_recorded_was_written_by_the_command() -> None:
    record = json.loads(Path(guard.RECORDED).read_text())
    assert set(record) == set(guard.Record.__annotations__)
    assert 1 < record["ratio"] < 30


def test_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert guard.missing() == "for want of nginx and cc and make and taskset"
