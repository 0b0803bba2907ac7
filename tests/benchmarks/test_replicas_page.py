# SPDX-License-Identifier: Apache-2.0
"""The page of replicas: every figure comes from a run, kept results are used again, and a run is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import replicas
from benchmarks.replicas import ALL_SEEN, Case, Found, cases, load, page, save, scenario, simulate
from benchmarks.replicas_cost import REPLICAS, Busy, Cost, busy, cost_of
from lbproxy.sim.fleet.fleet import ExchangeRules

BUSY = Busy(28, 300.0, 20.0, 23.5, 7.0, 30.0)
COST = Cost("50 ms", 36_000, 2000.0, 500_000.0, 40.0, 80.0, 20_000, 0, 250, 0, 1000, 2000)
FOUND = Found([COST], [BUSY])
SHORT = {"first_rate": 10.0, "last_rate": 10.0, "step_s": 10.0, "warm_up_s": 0.0}


def made_up(seeds: int) -> dict[str, dict[str, float]]:
    """A figure of its own for each run."""
    names = (*replicas.FIGURES, "before", "dead", "joined", "cut", "cut_elsewhere", "failed")
    return {
        case.key(seed): dict.fromkeys(names, 10.0 * number + seed)
        for number, case in enumerate(cases())
        for seed in range(1, seeds + 1)
    }


def test_every_case_is_a_scenario_with_a_name_of_its_own() -> None:
    assert len({case.key(1) for case in cases()}) == len(cases())
    for case in cases():
        found = scenario(case, None)
        assert found.balancers == case.replicas
        assert (found.exchange is None) == (case.kind in {"unshared", ALL_SEEN})


def test_the_page_has_the_mean_of_each_case() -> None:
    text = page(made_up(2), FOUND, 2, None)
    for number, case in enumerate(cases()):
        assert f"| {10.0 * number + 1.5:.3f} |" in text, case
    assert "| 50 ms | 36,000 | 2000 | 500.0 | 40.0 | 80.0 | 20.0 | 250 | 0 | 1, 2 |" in text
    assert "| 28 | 300 | 20.0 | +3.5 | 7.0 | 30.0 |" in text


def test_a_page_without_all_runs_is_not_written() -> None:
    results = made_up(1)
    del results[cases()[3].key(1)]
    with pytest.raises(KeyError):
        page(results, FOUND, 1, None)


def test_kept_results_are_those_of_the_same_trace(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert load(file, trace=False) == ({}, Found())
    results = made_up(1)
    save(file, results, FOUND, trace=False)
    assert load(file, trace=False) == (results, FOUND)
    kept, _ = load(file, trace=True)
    assert set(results) - set(kept) == {key for key in results if "Mooncake" in key}


def test_sharing_shows_in_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WORKLOADS", {"short": ("ladder", SHORT)})
    alone, shared = Case("sharing", "short", ALL_SEEN, 1), Case("sharing", "short", "50 ms", 3, {"exchange": {}})
    one, three, unshared = (simulate(case, 1, None) for case in (alone, shared, Case("sharing", "short", "", 3)))
    assert set(one) == set(replicas.FIGURES)
    assert abs(three["hit_ratio"] - one["hit_ratio"]) < unshared["hit_ratio"] * 0.1
    assert unshared["hit_ratio"] < one["hit_ratio"]


def test_a_batch_of_many_has_all_of_them() -> None:
    found = busy(28, rounds=2)
    assert found.bytes > 28 * 8
    assert min(found.alone_us, found.shared_us, found.tell_us, found.hear_us) > 0.0


def test_costs_are_of_all_batches() -> None:
    found = cost_of("short", ExchangeRules(), 6.0)
    assert 20 < found.requests < 120
    assert found.peers_at_end == 0
    assert 0 < found.most_in_flight <= found.requests
    assert found.peers_bytes_end > found.peers_bytes_half > 0
    assert found.bytes_per_1000 > 1000 * 28 * 8, "the keys of each prompt, once"
    assert found.largest_batch * found.batches_per_1000 >= found.bytes_per_1000
    assert found.sent_ms_per_1000 > 0.0
    assert found.heard_ms_per_1000 > 0.0
    assert REPLICAS > 1
