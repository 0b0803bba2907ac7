# SPDX-License-Identifier: Apache-2.0
"""What the page of split requests shows: the figures of a run, and whether prices are as good as the best rule."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks.disaggregation import (
    DRAIN_S,
    RULES,
    WARM_UP_S,
    Cell,
    Figures,
    against_best,
    cells,
    figures_of,
    forget,
    found_in,
    key_of,
    page,
    rules_of,
    scenario,
)
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job


def served(at: float, first: float | None, end: float, outcome: Outcome | None = Outcome.COMPLETED) -> Served:
    job = Job("a", (Piece(1, 100),), Piece(2, 101))
    return Served(job, at, 0, True, first_at=first, ended_at=end, outcome=outcome)


def test_good_requests_are_in_time_and_the_warm_up_does_not_count() -> None:
    begin = WARM_UP_S
    found = figures_of(
        [
            served(begin - 1.0, begin, begin + 1.0),
            served(begin, begin + 1.9, begin + 4.3),
            served(begin, begin + 2.1, begin + 4.3),
            served(begin, begin + 1.0, begin + 3.6),
            served(begin, None, 0.0, None),
            served(begin, None, begin + 30.0, Outcome.EXPIRED),
        ],
        begin + 10.0,
    )
    assert (found.goodput, found.rate) == (0.2, 0.1)
    assert found.refused == pytest.approx(0.2)
    assert found.ttft_p99 == pytest.approx(10.0 + DRAIN_S, rel=0.05), "what has no first token is late"


def test_every_cell_is_compared_under_every_rule_and_with_servers_that_do_both() -> None:
    every = cells("")
    assert {cell.servers for cell in every} == {4, 8}
    for cell in every:
        assert list(rules_of(cell)) == (list(RULES) if cell.prefill else ["priced"])
        assert Cell(cell.workload, cell.load, 0, cell.servers) in every
        made = scenario(cell, 2000, 1, None)
        assert [(group.role, group.count) for group in made.fleet] == (
            [("prefill", cell.prefill), ("decode", cell.decode)] if cell.prefill else [("both", cell.decode)]
        )


def test_the_page_marks_rows_in_which_a_rule_is_better() -> None:
    results: dict[tuple[Cell, object], Figures] = {}
    for number, cell in enumerate(cells("long")):
        for rule in rules_of(cell):
            goodput = 0.5 if rule == "priced" else 0.6 if (rule == 8000 and number == 1) else 0.51
            results[cell, rule] = Figures(1.0, goodput, 1.0, 2.0, 0.02, 0.5, 0.0)
    apart = [cell for cell in cells("long") if cell.prefill]
    assert against_best(results, apart[0]) == pytest.approx(0.5 / 0.6)
    text = page(results, 2, replayed=False)
    assert f"in {len(apart) - 1} of {len(apart)} rows" in text
    assert text.count("**!**") == 1


def test_runs_are_kept_by_name_and_their_means_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    with file.open("wb") as out:
        for cell in cells(""):
            for rule in rules_of(cell):
                for seed in (1, 2):
                    figures = Figures(1.0, 0.2 * seed, 1.0, 2.0, 0.02, 0.5, 0.0)
                    out.write(orjson.dumps({"run": key_of(cell, rule, seed), **figures._asdict()}) + b"\n")
    every = found_in(file, "", 2)
    assert set(every) == {(cell, rule) for cell in cells("") for rule in rules_of(cell)}
    assert {round(one.goodput, 6) for one in every.values()} == {0.3}
    with pytest.raises(KeyError, match="3"):
        found_in(file, "", 3)
    forget("long", file)
    assert set(found_in(file, "Mooncake", 2)) == {key for key in every if key[0].workload.startswith("Mooncake")}
    with pytest.raises(KeyError, match="long prompts"):
        found_in(file, "long", 2)
