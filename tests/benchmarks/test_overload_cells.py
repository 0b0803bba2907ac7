# SPDX-License-Identifier: Apache-2.0
"""The overload benchmark: what it counts, which cells there are, and that its smallest one runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import orjson
import pytest

from benchmarks import overload
from benchmarks.overload import CELLS, KINDS, QUICK, Cell, Figures, Kind, chosen, figures
from lbproxy.commands.sim import runs_of
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.engine.sequence import EngineGauges
from lbproxy.sim.fleet.fleet import QueueSample, Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job


def served(name: str, at: float, first: float | None, end: float, outcome: Outcome | None) -> Served:
    job = Job(name, (Piece(1, 10),), Piece(2, 10))
    return Served(job, at, 0, True, placed_at=at, first_at=first, ended_at=end, outcome=outcome)


def test_what_is_counted() -> None:
    """From 10 to 20 s: what began before and ended then is throughput, and goodput is by the first token's time."""
    found = figures(
        [
            served("before", 2.0, 9.0, 11.0, Outcome.COMPLETED),
            served("late", 8.0, 14.0, 15.0, Outcome.COMPLETED),
            served("good", 11.0, 15.0, 16.0, Outcome.COMPLETED),
            served("best", 12.0, 13.0, 30.0, Outcome.COMPLETED),
            served("goes on", 19.0, 19.5, 0.0, None),
            served("after", 19.0, 21.0, 22.0, Outcome.COMPLETED),
            served("refused", 15.0, None, 16.0, Outcome.EXPIRED),
            served("left", 15.0, None, 16.0, Outcome.CLIENT_CLOSED),
        ],
        [QueueSample(at, (EngineGauges(waiting=at), EngineGauges(waiting=0)), 7) for at in range(30)],
        10.0,
        20.0,
    )
    assert found.throughput == 0.3
    assert found.good == 0.3
    assert found.best == 0.2
    assert found.refused == pytest.approx(1 / 6)
    assert found.failed == pytest.approx(1 / 6)
    assert found.starts == 4 / 10 / 2 / 2
    assert 18 < found.engines <= 19
    assert found.waiting == 7


def test_verdict() -> None:
    fine = Figures(10.0, 9.0, 8.0, 0.5, 0.0, engines=4.0, starts=1.0, waiting=100.0, ttft=1.0)
    assert fine.passes(10.0)
    assert not fine.passes(10.1)
    assert not dataclasses.replace(fine, engines=4.5).passes(10.0)
    assert dataclasses.replace(fine, engines=4.5, starts=4.5).passes(10.0)


def test_cells() -> None:
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == 144
    assert set(QUICK) <= set(CELLS)
    assert [str(cell) for cell in chosen(["slots 2x streams gauges 1"], CELLS)] == ["slots 2x, streams, gauges, 1 flow"]
    assert len(chosen(["slots 2x", "10x, whole"], CELLS)) == 12 + 18
    assert chosen(None, CELLS) == CELLS
    scenario = Cell("slots", 2.0, streams=False, gauges=False, flows=10).scenario("adaptive/hold=false", 12.0, 150.0)
    assert scenario.admission == AdmissionSettings(hold=False)
    assert scenario.scrape_interval is None
    assert scenario.stream_share == 0
    (workload,) = scenario.workloads
    assert workload.copies == 10
    assert workload.parameters["rate"] == pytest.approx(2.4)


def test_the_smallest_runs_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Kind({"prompt_tokens": 50, "output_tokens": 20}, {"max_sequences": 2}, probe_rate=40)
    monkeypatch.setitem(KINDS, "slots", tiny)
    monkeypatch.setattr(overload, "CAPACITY_S", 8.0)
    monkeypatch.setattr(overload, "capacity_of", lambda kind: 20.0)
    given = ["--cells", "slots 2x streams gauges 1", "--seconds", "10", "--processes", "1"]
    files = ["--results", str(tmp_path / "r" / "found.json"), "--page", str(tmp_path / "page.md")]
    overload.main([*given, *files])
    printed = capsys.readouterr()
    assert "| slots 2x, streams, gauges, 1 flow | adaptive |" in printed.out
    assert "throughput" in printed.err
    kept = orjson.loads((tmp_path / "r" / "found.json").read_bytes())
    assert list(kept["capacity"].values()) == [20.0]
    assert len(kept["runs"]) == 1
    assert not (tmp_path / "page.md").exists()
    overload.main([*given, *files])
    assert not capsys.readouterr().err
    monkeypatch.setattr(overload, "CELLS", [])
    overload.main(["--render", *files])
    assert (tmp_path / "page.md").read_text("utf-8").startswith("# Overload")


def test_capacity_is_what_the_servers_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of about 14.4 ms, four servers with two slots, 20 tokens each and 12 ms of API: some 27 a second."""
    tiny = Kind({"prompt_tokens": 50, "output_tokens": 20}, {"max_sequences": 2}, probe_rate=60)
    monkeypatch.setitem(KINDS, "slots", tiny)
    assert overload.capacity_of("slots", 20.0) == pytest.approx(26.5, abs=1.5)


CAPACITY = {"slots": 13.46, "space": 12.4, "prefill": 10.9}
"""Completions a second of the servers of each kind when they are saturated, as the benchmark measures them."""
MUST = [
    "slots 3x, streams, gauges, 1 flow",
    "slots 3x, streams, no-gauges, 1 flow",
    "slots 3x, whole, gauges, 1 flow",
    "slots 10x, streams, gauges, 10 flows",
    "space 2x, streams, gauges, 1 flow",
    "prefill 2x, streams, no-gauges, 2 flows",
]


@pytest.mark.parametrize("name", MUST)
def test_under_overload_requests_wait_in_lbproxy_and_are_served_in_time(name: str) -> None:
    """All of it waited in the engines, and nothing was served within 5 s."""
    (cell,) = chosen([name.replace(",", "")], CELLS)
    capacity = CAPACITY[cell.kind]
    (run,) = runs_of(cell.scenario("adaptive", capacity, 90.0), source=name)
    found = overload.run_cell(run, 90.0)
    assert found.good >= 0.9 * capacity, found
    assert found.engines <= max(4.0, found.starts), found
