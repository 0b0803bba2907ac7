# SPDX-License-Identifier: Apache-2.0
"""Which runs of a benchmark over HTTP go on side by side, and which are done again."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest

from benchmarks.http_routing.results import Row, keep, read
from benchmarks.http_routing.runs import ATTEMPTS, batches, measure, order
from benchmarks.http_routing.trial import Task, TrialError
from benchmarks.overhead.process import StartError
from tests.benchmarks.trials import row

A, B = Task("b2b", 1, "a"), Task("b2b", 1, "b")


def test_routers_take_turns_and_every_second_seed_goes_backwards() -> None:
    tasks = order(["b2b"], 2, ["a", "b"])
    assert tasks == [A, B, Task("b2b", 2, "b"), Task("b2b", 2, "a")]


def test_a_batch_is_of_one_cell_and_seed() -> None:
    """Runs side by side are to be compared: with those of another seed a slow moment would fall on one of a pair."""
    tasks = [Task(cell, seed, name) for cell, seed in (("a", 1), ("b", 1), ("b", 2)) for name in "xyz"]
    found = list(batches(tasks, 2))
    assert [one for batch in found for one in batch] == tasks
    assert [len(batch) for batch in found] == [2, 1] * 3
    assert all(len({(one.cell, one.seed) for one in batch}) == 1 for batch in found)
    assert [len(batch) for batch in batches(tasks, 5)] == [3, 3, 3]


def test_runs_of_a_batch_go_on_side_by_side(tmp_path: Path) -> None:
    both = Barrier(2)

    def run(task: Task, number: int) -> Row:
        both.wait(10)
        return row(task.router, task.seed, 0.1)

    assert measure([A, B], run, tmp_path / "runs.jsonl", at_a_time=2) == []
    assert [one["router"] for one in read(tmp_path / "runs.jsonl")] == ["a", "b"]


@pytest.mark.parametrize("error", [StartError, TrialError])
def test_late_and_failed_runs_are_done_again_after_the_others(error: type[Exception], tmp_path: Path) -> None:
    done: list[str] = []

    def run(task: Task, number: int) -> Row:
        done.append(task.router)
        if done == ["a"]:
            raise error("no")
        return {**row(task.router, task.seed, 0.1), "rejected": "late" if done == ["a", "b", "a"] else None}

    assert measure([A, B], run, tmp_path / "runs.jsonl", at_a_time=1) == []
    assert done == ["a", "b", "a", "a"]
    kept = [(one["router"], one["rejected"]) for one in read(tmp_path / "runs.jsonl")]
    assert kept == [("b", None), ("a", "late"), ("a", None)]


def test_what_there_is_stays_and_what_never_came_is_told(tmp_path: Path) -> None:
    store, done = tmp_path / "runs.jsonl", list[Task]()
    keep(store, row("a", 1, 0.1))
    keep(store, {**row("b", 1, 0.1), "rejected": "late"})

    def run(task: Task, number: int) -> Row:
        done.append(task)
        raise StartError("no port")

    assert measure([A, B], run, store, at_a_time=2) == ["b, b2b, seed 1: no port"]
    assert done == [B] * ATTEMPTS
    slow: Row = {**row("b", 1, 0.1), "rejected": "slow"}
    assert measure([B], lambda *_: slow, store, at_a_time=1, attempts=1) == ["b, b2b, seed 1: rejected, slow"]
