# SPDX-License-Identifier: Apache-2.0
"""What the fairness benchmark reads from a log of decisions: it must find what it says is not there."""

from __future__ import annotations

import pytest

from benchmarks.fairness import EXPERIMENTS, inversions, longest_queue, run_one
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job


def served(name: str, priority: int, came: float, placed: float | None, ended: float = 9.0) -> Served:
    job = Job(name, (Piece(0, 10),), Piece(1, 10), priority=priority)
    outcome = Outcome.EXPIRED if placed is None else Outcome.COMPLETED
    return Served(job, came, 0, True, placed_at=placed, ended_at=ended, outcome=outcome)


@pytest.mark.parametrize(
    ("others", "count"),
    [
        ([served("high", 1, 0.0, 5.0)], 1),
        ([served("high", 1, 0.0, None)], 1),
        ([served("high", 1, 0.0, 1.0)], 0),
        ([served("high", 1, 3.0, 5.0)], 0),
        ([served("same", 0, 0.0, 5.0)], 0),
        ([served("lower", -1, 0.0, 5.0)], 0),
    ],
)
def test_a_priority_that_is_passed_over_is_found(others: list[Served], count: int) -> None:
    assert inversions([served("placed", 0, 1.0, 2.0), *others]) == count


def test_the_longest_queue_is_that_of_those_that_wait_at_a_time() -> None:
    log = [served(str(n), 0, float(n), n + 2.5) for n in range(5)] + [served("at once", 0, 1.0, 1.0)]
    assert longest_queue(log) == 3
    assert longest_queue([served("refused", 0, 0.0, None, ended=0.0)]) == 0


def test_every_experiment_is_a_scenario() -> None:
    for keys in EXPERIMENTS.values():
        assert Scenario.model_validate(keys).sources


def test_under_overload_higher_priorities_go_first() -> None:
    """Three priorities, each two thirds of the capacity. When holding was by endpoint alone, requests of the highest
    priority waited up to 30 s for one server while those of lower ones took the other: 330 of 1,180."""
    figures = run_one(("priorities", 1))[2]
    assert figures.inversions <= 30, "a new one may take what those before it left"
    assert figures.flows["above"]["refused"] == 0
    assert figures.flows["above"]["ttft_mean"] < 1.0
    assert figures.flows["below-zero"]["refused"] > 0.9


def test_a_heavy_flow_delays_no_light_one() -> None:
    """When prefills that share a step passed for parallel ones, a hundred requests of the heavy flow were placed at
    once, and light ones waited 30 s behind them."""
    light = run_one(("prefill, shortest, flows", 1))[2].flows["light"]
    assert light["refused"] == 0
    assert light["ttft_p99"] < 2.0
