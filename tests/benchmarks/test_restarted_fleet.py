# SPDX-License-Identifier: Apache-2.0
"""A balancer that is restarted under load: with what the old one learned nothing changes, and where that is wrong by
then, it is soon as if there had been nothing.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from statistics import fmean

import pytest

from benchmarks.restarted_fleet import NewEngine, Restart, RestartedFleet, mean_ttft
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.fleet import FleetOptions, Served
from lbproxy.sim.workloads.catalogue import make_workload
from tests.sim.fleet.test_cluster import QWEN, replicas

AT_S, END_S = 40.0, 110.0
LADDER = {"groups": 40, "prompts": 3, "output_tokens": 100, "warm_up_s": 0, "step_s": END_S}
SLOW_AND_SMALL = dataclasses.replace(QWEN.preset, kv_tokens=80_000)


@cache
def served(restart: Restart, rate: int = 10, gauges: bool = True, seed: int = 3) -> list[Served]:
    options = FleetOptions(servers=(QWEN,) * 4, scrape_interval_s=0.2 if gauges else None)
    workload = make_workload("ladder", {**LADDER, "first_rate": rate, "last_rate": rate}, seed=seed)
    return RestartedFleet(options, workload, replicas("adaptive"), seed=seed, restart=restart).run()


def ttft(one: list[Served], from_s: float, until_s: float) -> float:
    return mean_ttft(one, from_s, until_s, end_s=END_S)


def test_after_a_hot_restart_with_prefixes_first_tokens_come_as_before() -> None:
    new = served(Restart(at_s=AT_S))
    assert {one.outcome for one in new} == {Outcome.COMPLETED}
    assert {one.balancer for one in new if one.submitted_at >= AT_S} == {1}
    before = ttft(new, AT_S - 20.0, AT_S)
    assert ttft(new, AT_S, AT_S + 20.0) <= 1.15 * before
    assert ttft(served(Restart(at_s=AT_S, saved=False)), AT_S, AT_S + 20.0) > 1.5 * before


def test_after_a_crash_all_that_ran_is_sent_again() -> None:
    new = served(Restart(at_s=AT_S, age_s=10.0, crash=True))
    cut = [one for one in new if one.outcome is Outcome.CUT]
    assert cut
    assert {one.outcome for one in new} == {Outcome.COMPLETED, Outcome.CUT}
    again = {one.job.id for one in new if one.submitted_at == AT_S and one.balancer == 1}
    assert {one.job.id for one in cut} <= again
    fresh = served(Restart(at_s=AT_S, saved=False, crash=True))
    assert ttft(new, AT_S, AT_S + 20.0) < ttft(fresh, AT_S, AT_S + 20.0)


@pytest.mark.parametrize(("reports_start", "gauges"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("count", [1, 4])
def test_engines_that_became_slower_and_smaller_meanwhile(count: int, reports_start: bool, gauges: bool) -> None:
    """Half as fast, with a quarter of the cache, and nothing in it: the data is all wrong. Where an engine reports its
    start, it is as if there were none; otherwise not much worse once the first responses have shown it.
    """
    engine = NewEngine(server=0, preset=SLOW_AND_SMALL, speed=0.5, reports_start=reports_start)
    engines = tuple(dataclasses.replace(engine, server=number) for number in range(count))
    restart = Restart(at_s=AT_S, engines=engines)
    first, rest = [], []
    for seed in range(1, 5):
        with_file = served(restart, 3, gauges, seed)
        without = served(dataclasses.replace(restart, saved=False), 3, gauges, seed)
        first.append(ttft(with_file, AT_S, AT_S + 30.0) / ttft(without, AT_S, AT_S + 30.0))
        rest.append(ttft(with_file, AT_S + 30.0, END_S) / ttft(without, AT_S + 30.0, END_S))
    if reports_start:
        assert fmean(first) <= 1.1
    # Over eight seeds .95 and 1.08 with gauges (one engine, four), 1.14 and 1.26 without.
    assert fmean(rest) <= (1.2 if gauges else 1.4)


def test_a_restart_is_deterministic() -> None:
    restart = Restart(at_s=AT_S)
    first = [(one.job.id, one.server, one.first_at) for one in served(restart)]
    served.cache_clear()
    assert [(one.job.id, one.server, one.first_at) for one in served(restart)] == first
