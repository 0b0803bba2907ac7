# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, by hand; comparisons over paired seeds; tables."""

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.plots import can_plot, plot
from lbproxy.sim.figures.report import (
    Summary,
    as_json,
    by_phase,
    cells,
    estimate,
    headings,
    markdown,
    over_seeds,
    paired,
    percentile,
    summarise,
)
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job


def served(  # noqa: PLR0917
    name: str, at: float, first: float, end: float, output: int, server: int = 0, phase: str = "", cached: int = 0
) -> Served:
    job = Job(name, (Piece(1, 100),), Piece(2, output), phase=phase)
    return Served(job, at, 0, True, at + 0.1, first, end, server, cached, 1, Outcome.COMPLETED)


def failed(name: str, at: float) -> Served:
    return Served(Job(name, (Piece(1, 100),), Piece(2, 5)), at, 0, True, ended_at=at + 9, outcome=Outcome.NO_ENDPOINTS)


def test_figures_by_hand() -> None:
    """a: TTFT 0.5 s and 10 tokens in 0.45 s after it, so good. b: the first token took 2 s. c failed."""
    a = served("a", 0.0, 0.5, 0.95, 10, server=0, cached=50)
    b = served("b", 1.0, 3.0, 3.0, 1, server=1)
    found = summarise([a, b, failed("c", 1.0)], servers=2)
    assert (found.requests, found.failed) == (3, 1)
    assert (found.ttft_mean, found.ttft_p50) == (1.25, 1.25)
    assert found.ttft_p90 == pytest.approx(1.85)
    assert found.e2e_mean == pytest.approx((0.95 + 2) / 2)
    assert found.tpot_mean == pytest.approx(0.05)
    assert found.output_tokens_s == pytest.approx(11 / 3)
    assert found.goodput == pytest.approx(1 / 3)
    assert found.hit_ratio == 0.25
    assert found.queue_mean == pytest.approx(0.1)
    # On the servers for 0.85 and 1.9 s.
    assert found.imbalance == pytest.approx(1.9 / 1.375)


def test_slow_tokens_are_not_good() -> None:
    assert summarise([served("a", 0.0, 0.5, 0.5 + 9 * 0.051, 10)], 1).goodput == 0
    assert summarise([served("a", 0.0, 0.5, 0.5 + 9 * 0.049, 10)], 1).goodput == 1


def test_throughput_leaves_out_the_pauses_between_phases_and_the_warm_up() -> None:
    runs = [
        served("w", 0, 1, 2, 999, phase="warm-up"),
        served("a", 10, 11, 12, 100, phase="1"),
        served("b", 100, 101, 102, 300, phase="2"),
    ]
    assert summarise(runs, 1).output_tokens_s == 100
    assert summarise(runs, 1).requests == 2
    assert {name: found.output_tokens_s for name, found in by_phase(runs, 1).items()} == {"1": 50, "2": 150}


def test_nothing_served_is_no_error() -> None:
    found = summarise([failed("a", 0.0)], 2)
    assert (found.requests, found.failed, found.ttft_mean, found.goodput, found.imbalance) == (1, 1, 0.0, 0.0, 1.0)


def test_percentiles_are_interpolated() -> None:
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 50, 75, 100)] == [1, 2, 3, 4]
    assert percentile([], 50) == 0.0


def with_ttft(*means: float) -> list[Summary]:
    return [summarise([served("a", 0.0, mean, 10.0, 5)], 1) for mean in means]


def test_differences_are_taken_seed_by_seed() -> None:
    """The seeds differ by far more than the policies, and yet the difference is certain."""
    base, other = with_ttft(1.0, 2.0, 6.0), with_ttft(0.9, 1.9, 5.9)
    alone = over_seeds(other)["ttft_mean"]
    assert alone.high - alone.low > 3
    change = paired(other, base, "ttft_mean")
    assert change.mean == pytest.approx(-0.1 / 3)
    assert change.low == pytest.approx(change.high)


def test_intervals_hold_the_mean_and_are_the_same_every_time() -> None:
    found = estimate([1.0, 2.0, 3.0, 10.0])
    assert found.low < found.mean == 4.0 < found.high
    assert found == estimate([1.0, 2.0, 3.0, 10.0])
    assert estimate([3.0]).low == estimate([3.0]).high == 3.0


def test_tables_have_a_row_for_each_policy() -> None:
    results = {"one": with_ttft(1.0, 2.0), "two": with_ttft(0.5, 1.0)}
    lines = markdown(results).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].startswith("| two | 0.75 |")
    assert "-50% [" in lines[3]
    assert len(cells("one", results["one"])) == len(headings())
    data = as_json(results)
    assert isinstance(data["two"], dict)
    assert data["two"]["against one"]["ttft_mean"]["mean"] == -0.5


@pytest.mark.skipif(not can_plot(), reason="matplotlib is an extra")
@pytest.mark.parametrize("phases", [1, 3])
def test_plots_are_pictures(phases: int) -> None:
    run = {str(n): with_ttft(1.0 + n)[0] for n in range(phases)}
    assert plot({"a": [run, run], "b": [run, run]}, title="t", form="png").startswith(b"\x89PNG")
    assert b"<svg" in plot({"a": [run]}, title="t", form="svg")
