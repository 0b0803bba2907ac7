# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what contradicts the model: its cells, its verdicts, and that it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import orjson
import pytest

from benchmarks import surprises
from benchmarks.surprise_cells import ALONE, SURPRISES, Surprise
from benchmarks.surprises import OURS, Crowd, Kept, Task, chosen, crowd, do, verdict
from lbproxy.commands.sim import runs_of, serve
from lbproxy.core.requests.outcome import Outcome
from tests.benchmarks.test_overload_cells import served

CELL = Surprise("a cell", [{}], [{"name": "own", "parameters": {}}], counted_from=10.0)
FINE = Crowd(requests=100, refused=0.0, in_time=1.0, ttft_mean=0.1, ttft_p99=1.0, e2e_mean=5.0)


def but(**figures: float) -> Crowd:
    return dataclasses.replace(FINE, **figures)  # type: ignore[arg-type]


def test_every_cell_can_be_simulated() -> None:
    assert len({one.name for one in SURPRISES}) == len(SURPRISES) >= 58
    assert 10 <= sum(one.is_quick for one in SURPRISES) <= 14
    for one in SURPRISES:
        assert runs_of(one.scenario("adaptive"), source=one.name)
        asked = one.scenario("adaptive", 5.0).sources
        assert {workload.parameters["duration_s"] for workload in asked} == {5.0}


def test_what_is_counted() -> None:
    found = crowd(
        CELL,
        [
            served("before", 9.0, 30.0, 31.0, Outcome.COMPLETED),
            served("soon", 10.0, 11.0, 13.0, Outcome.COMPLETED),
            served("late", 10.0, 17.0, 19.0, Outcome.COMPLETED),
            served("refused", 12.0, None, 14.0, Outcome.EXPIRED),
            served("broken", 12.0, 12.5, 14.0, Outcome.UPSTREAM_BROKE),
        ],
    )
    assert dataclasses.replace(found, ttft_p99=7.0) == Crowd(4, 0.25, 0.25, ttft_mean=4.0, ttft_p99=7.0, e2e_mean=6.0)
    assert found.ttft_p99 == pytest.approx(6.94)


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong"),
    [
        (FINE, FINE, ()),
        (but(ttft_mean=0.109, ttft_p99=1.24, e2e_mean=5.4), FINE, ()),
        (but(ttft_mean=0.111, ttft_p99=1.26, e2e_mean=5.6), FINE, ("ttft", "p99", "e2e")),
        (but(ttft_mean=0.06, ttft_p99=1.9), FINE, ()),
        (but(ttft_mean=0.08, ttft_p99=1.9), FINE, ("p99",)),
        (but(refused=0.011), FINE, ("refused",)),
        (but(refused=0.011), but(in_time=0.9), ()),
    ],
)
def test_what_is_wrong(ours: Crowd, theirs: Crowd, wrong: tuple[str, ...]) -> None:
    assert verdict(CELL, {OURS: [ours], "lmetric": [theirs]}).wrong == wrong


def test_the_best_rule_serves_as_much_in_time() -> None:
    """A rule that refuses, or is late with, what is hard has short times for the rest."""
    runs = {OURS: [FINE], "gie": [but(ttft_mean=0.01, in_time=0.97)], "lmetric": [but(ttft_mean=0.09, in_time=0.98)]}
    assert verdict(CELL, runs).rule == "lmetric"
    assert verdict(CELL, {OURS: [but(in_time=0.98)], **{rule: runs[rule] for rule in ("gie", "lmetric")}}).rule == "gie"


def test_ratios_are_medians_of_pairs() -> None:
    ours = [but(ttft_mean=one) for one in (0.1, 0.3, 9.0)]
    theirs = [but(ttft_mean=one) for one in (0.1, 0.2, 0.1)]
    assert verdict(CELL, {OURS: ours, "gie": theirs}).ttft == pytest.approx(1.5)


def test_it_runs_and_keeps_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Surprise("tiny", [{}], [{"name": "own", "parameters": {"rate": 5, "duration_s": 5}}], counted_from=0.0)
    monkeypatch.setattr(surprises, "SURPRISES", [tiny])
    monkeypatch.setattr(surprises, "PAGE", tmp_path / "page.md")
    kept = tmp_path / "rules.json"
    given = ["--seeds", "2", "--policies", "gie", "--baselines", str(kept)]
    surprises.main(given)
    first = capsys.readouterr()
    assert "tiny, gie, seed 2" in first.err
    assert len(orjson.loads(kept.read_bytes())) == 2
    surprises.main([*given, "--write"])
    again = capsys.readouterr()
    assert "gie" not in again.err
    assert "tiny, adaptive, seed 2" in again.err
    assert again.out == first.out
    assert (tmp_path / "page.md").read_text("utf-8").endswith(first.out[:-1])
    assert Kept(kept).found(Task(tiny, OURS, 1)) is None
    # Another cell of the same name is another simulation.
    other = dataclasses.replace(tiny, counted_from=1.0)
    assert Kept(kept).found(Task(tiny, "gie", 1)) == do(Task(tiny, "gie", 1))
    assert Kept(kept).found(Task(other, "gie", 1)) is None


def test_the_page_has_the_cells_that_there_are() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in surprises.PAGE.read_text("utf-8").splitlines()]
    assert [one.name for one in SURPRISES] == [row for row in rows if row in {one.name for one in SURPRISES}]
    assert sum(line.startswith("| ") for line in surprises.PAGE.read_text("utf-8").splitlines()) == len(SURPRISES) + 2


def test_cells_are_chosen_by_words() -> None:
    assert len(chosen(["hot prompt"], quick=True)) == 1
    assert {one.name for one in chosen(["hot prompt", "frozen"], quick=False)} >= {
        "frozen pages with a queue",
        "hot prompt, 3/s",
    }


@pytest.mark.parametrize("cell", ALONE, ids=[one.name for one in ALONE])
def test_a_server_that_is_not_as_the_model_says_is_not_held_back(cell: Surprise) -> None:
    """A fixed time to the first token, ranks behind one address, others who fill the queues: many were refused once."""
    cell = dataclasses.replace(cell, counted_from=0.0)
    free = dataclasses.replace(cell, more={**cell.more, "admission": {"hold": False}})
    held, free_found = (crowd(one, serve(runs_of(one.scenario(OURS), source="")[0])) for one in (cell, free))
    assert held.refused == free_found.refused == 0
    assert held.ttft_mean <= 1.4 * free_found.ttft_mean, (held, free_found)
