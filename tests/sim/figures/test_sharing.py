# SPDX-License-Identifier: Apache-2.0
"""Several workloads at a time, whose they are, and what each gets of a fleet."""

from __future__ import annotations

import pytest

from lbproxy.commands.sim import Run, runs_of, serve, workload_of
from lbproxy.config.parse import parse_scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.sharing import Share, as_json, by_flow, rows
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.catalogue import make_workload
from lbproxy.sim.workloads.workload import Clients, Source

TWO = """
fleet: [{count: 2}]
workloads:
  - {name: own, flow: heavy, parameters: {rate: 40, duration_s: 15, prompt_tokens: 2000, output_tokens: 50}}
  - {name: own, flow: light, copies: 3, parameters: {rate: 1, duration_s: 15, prompt_tokens: 500, output_tokens: 50}}
policies: [adaptive]
seeds: 1
admission: {order: fcfs, hold: true, queue_timeout: 10s}
"""


def run_of(text: str) -> Run:
    (run,) = runs_of(parse_scenario(text, environ={}), source="scenario")
    return run


def shares(text: str) -> tuple[dict[str, Share], list[Served]]:
    served = serve(run_of(text))
    return by_flow(served, 2), served


def test_a_mix_keeps_its_clients_apart() -> None:
    """Equal seeds, so that only the mix can keep what they say apart."""
    alone = make_workload("chat", {"users": 2, "duration_s": 30}, seed=1)
    mix = Clients(
        Source(make_workload("chat", {"users": 2, "duration_s": 30}, seed=1), f"f{n}", priority=n) for n in range(2)
    )
    expected, batch = alone.begin(0.0), mix.begin(0.0)
    assert expected is not None
    assert batch is not None
    assert len(batch) == 2 * len(expected) == len({job.id for _, job in batch})
    assert [job.flow for _, job in batch].count("f1") == 2
    first = next(job for _, job in batch if job.flow == "f0")
    twin = next(job for _, job in batch if job.flow == "f1" and job.id[1:] == first.id[1:])
    assert not {hash(piece.id) for piece in first.prompt} & {hash(piece.id) for piece in twin.prompt}
    assert (first.priority, twin.priority) == (0, 1)
    ((_, following),) = mix.ended(twin, 5.0)
    assert following.flow == "f1"
    assert following.prompt[: len(twin.prompt)] == twin.prompt, "the conversation goes on"
    assert alone.ended(expected[0][1], 5.0)


def test_phases_of_a_mix_wait_for_one_another() -> None:
    mix = Clients(Source(make_workload("bursts", {"size": 2, "count": count}, seed=1), f"f{count}") for count in (1, 2))
    sizes = []
    while (batch := mix.begin(0.0)) is not None:
        sizes.append(len(batch))
    assert sizes == [4, 2]


def test_one_workload_that_says_nothing_is_as_it_was() -> None:
    plain = "workload: {name: own}\npolicies: [random]\nseeds: 1"
    assert not isinstance(workload_of(run_of(plain)), Clients)
    listed = workload_of(run_of("workloads: [{name: own, flow: a}]\npolicies: [random]\nseeds: 1"))
    assert isinstance(listed, Clients)
    batch = listed.begin(0.0)
    assert batch is not None
    assert {job.flow for _, job in batch} == {"a"}


def test_light_flows_do_not_wait_behind_a_heavy_one() -> None:
    fair, served = shares(TWO)
    unfair, before = shares(f"{TWO}fair: false")
    assert list(fair) == ["heavy", "light-1", "light-2", "light-3"] or set(fair) == set(unfair)
    for flow in ("light-1", "light-2", "light-3"):
        assert fair[flow].summary.ttft_p99 < 1.5 < unfair[flow].summary.ttft_p99
        assert fair[flow].refused == 0
    assert fair["heavy"].refused > 0
    assert sum(share.tokens_share for share in fair.values()) == pytest.approx(1.0)
    done = [sum(one.outcome is Outcome.COMPLETED for one in log) for log in (served, before)]
    assert done[0] > 0.9 * done[1], "it costs no work"
    assert all(one.outcome is not None for one in served)


def test_shares_are_as_the_weights() -> None:
    text = TWO.replace("own, flow: heavy, p", "own, flow: a, p").replace("flow: light, copies: 3", "flow: b")
    text = text.replace("rate: 1, duration_s: 15, prompt_tokens: 500", "rate: 40, duration_s: 15, prompt_tokens: 2000")
    found, _ = shares(f"{text}flows: {{named: {{b: {{weight: 3}}}}}}")
    assert found["b"].tokens_share / found["a"].tokens_share == pytest.approx(3.0, rel=0.35)


def test_a_priority_goes_first_and_one_below_zero_is_refused_first() -> None:
    text = TWO.replace("flow: heavy,", "flow: heavy, priority: -1,")
    found, served = shares(text)
    assert found["light-1"].summary.ttft_p99 < 1.5
    assert {one.job.flow for one in served if one.outcome is not Outcome.COMPLETED} == {"heavy"}


def test_who_is_in_a_hurry_is_told_early() -> None:
    text = TWO.replace("flow: heavy,", "flow: heavy, slo_ttft: 2s,")
    found, _ = shares(text)
    late, _ = shares(TWO)
    assert found["heavy"].refused > late["heavy"].refused
    assert found["heavy"].refused_after < 1.0, "as soon as it is clear"
    assert late["heavy"].refused_after < 2.0, "nearly all at once; a few waited for nothing while the newest went first"
    assert found["heavy"].summary.ttft_p99 < 3.0


def test_tables_have_every_flow() -> None:
    found, _ = shares(TWO)
    table = rows({"adaptive": [found, found]})
    assert [row[:2] for row in table] == [["adaptive", flow] for flow in found]
    data = as_json({"adaptive": [found, found]})["adaptive"]
    assert isinstance(data, dict)
    assert len(data["heavy"]["runs"]) == 2
