# SPDX-License-Identifier: Apache-2.0
"""What fleets can do that a balancer does not expect: others' traffic, clients that leave, metrics that lack."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.engine.fixed import FixedTimes
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import (
    FaultKind,
    FleetOptions,
    OtherTraffic,
    QueueSample,
    Served,
    ServerFault,
    SimulatedServer,
)
from lbproxy.sim.workloads.workload import Job, OpenLoop
from tests.sim.engine.test_engine import STEADY
from tests.sim.fleet.test_cluster import QWEN, job, replicas, run, shared

ONE_SLOT = SimulatedServer(dataclasses.replace(STEADY, max_sequences=1, kv_tokens=100_000, max_model_len=8192))
"""10 ms a token, one request at a time."""


class Listener(Balancer):
    """Keeps what scrapes said."""

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics | None, *args: object, **more: object) -> None:
        self.heard = [*getattr(self, "heard", []), (uid, metrics)]
        super().report_scrape(uid, metrics, *args, **more)  # type: ignore[arg-type]


def listening(options: FleetOptions, *jobs: tuple[float, Job]) -> list[tuple[EndpointUid, LoadMetrics]]:
    made: list[Listener] = []

    def make(rng: random.Random) -> Balancer:
        balancer = replicas("round-robin", Listener)(rng)
        assert isinstance(balancer, Listener)
        made.append(balancer)
        return balancer

    Fleet(options, OpenLoop([list(jobs)]), make, seed=1).run()
    return made[0].heard


def patient(name: str, prompt: int, output: int, patience_s: float) -> Job:
    return dataclasses.replace(job(name, prompt, output), patience_s=patience_s)


def test_others_are_seen_in_gauges_alone() -> None:
    others = OtherTraffic(server=1, rate=50, prompt_tokens=10, output_tokens=20)
    options = FleetOptions(servers=(ONE_SLOT, ONE_SLOT), others=(others,), jitter=False)
    heard = listening(options, (0.0, job("a", 10, 200)), (3.0, job("b", 10, 1)))
    most = {uid: max(metrics.waiting or 0 for one, metrics in heard if one == uid) for uid, _ in heard}
    first, second = sorted(most)
    assert most[first] == 0
    assert most[second] > 30
    served = run("round-robin", OpenLoop([[(0.0, job("a", 10, 5)), (1.0, job("b", 10, 1))]]), options)
    assert [one.job.id for one in served] == ["a", "b"]
    assert served[0].first_at is not None
    assert served[0].first_at < 0.05
    assert served[1].first_at is not None
    assert served[1].first_at - served[1].submitted_at > 1.0  # it waited behind theirs


def test_others_come_from_and_until() -> None:
    others = OtherTraffic(server=0, rate=100, prompt_tokens=10, output_tokens=1, from_s=1.0, until_s=2.0)
    options = FleetOptions(servers=(SimulatedServer(STEADY),), others=(others,), jitter=False)
    seen: list[QueueSample] = []
    fleet = Fleet(options, OpenLoop([[(0.0, job("a", 10, 400))]]), replicas("random"), seed=1)
    fleet.watch(0.25, seen.append)
    fleet.run()
    counted = {round(one.at, 2): one.gauges[0].prompt_tokens for one in seen}
    assert counted[1.0] == 10
    assert 600 < counted[2.25] < 1500
    assert counted[3.5] == counted[2.25]


def test_a_server_that_fails_loses_others_requests_too() -> None:
    options = FleetOptions(
        servers=(ONE_SLOT, ONE_SLOT),
        others=(OtherTraffic(server=0, rate=40, prompt_tokens=10, output_tokens=20),),
        faults=(
            ServerFault(server=0, from_s=0.5, until_s=1.0),
            ServerFault(server=0, from_s=2, until_s=3, kind=FaultKind.FAILING),
        ),
    )
    served = run("round-robin", OpenLoop([[(0.3 * n, job(chr(97 + n), 10, 5)) for n in range(12)]]), options)
    assert {one.outcome for one in served} == {Outcome.COMPLETED}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_clients_leave_that_read_nothing(share: float) -> None:
    """One slot: a runs for 1 s, b waits behind it and leaves at .6 s, c gets the slot when a has ended or left."""
    options = FleetOptions(servers=(ONE_SLOT,), stream_share=share, jitter=False, network_s=0.0)
    a, b, c = run(
        "round-robin",
        OpenLoop([[(0.0, patient("a", 10, 100, 0.5)), (0.1, patient("b", 10, 1, 0.5)), (0.2, job("c", 10, 1))]]),
        options,
    )
    assert b.outcome is (Outcome.CLIENT_CLOSED if share else Outcome.COMPLETED)
    assert a.outcome is (Outcome.COMPLETED if share else Outcome.CLIENT_CLOSED)
    assert (b.ended_at if share else a.ended_at) == pytest.approx(0.6 if share else 0.5)
    assert c.outcome is Outcome.COMPLETED
    # The slot is free as soon as nobody waits for the answer any more.
    assert c.ended_at == pytest.approx(1.01 if share else 0.53, abs=0.011)


def test_every_ticket_of_impatient_clients_is_closed() -> None:
    """In the queue, on the way, in the engine, between two attempts: nothing stays counted as in flight."""
    servers = (dataclasses.replace(QWEN, preset=dataclasses.replace(QWEN.preset, max_sequences=4)),) * 3
    faults = (
        ServerFault(server=0, from_s=2, until_s=6),
        ServerFault(server=1, from_s=8, until_s=12, kind=FaultKind.FAILING),
    )
    options = FleetOptions(servers=servers, faults=faults, stream_share=0.5)
    workload = shared(rate=25.0)
    batch = workload.begin(0.0)
    assert batch is not None
    rng = random.Random(1)
    jobs = [(at, dataclasses.replace(one, patience_s=rng.uniform(0.0001, 2.0))) for at, one in batch]
    for policy in ("round-robin", "adaptive"):
        balancers: list[Balancer] = []
        fleet = Fleet(options, OpenLoop([jobs]), _keeping(policy, balancers), seed=1)
        served = fleet.run()
        outcomes = {one.outcome for one in served}
        assert outcomes >= {Outcome.COMPLETED, Outcome.CLIENT_CLOSED}
        assert None not in outcomes
        for one in served:
            if one.outcome is Outcome.CLIENT_CLOSED:
                assert one.ended_at - one.submitted_at == pytest.approx(one.job.patience_s or 0.0)
                assert one.first_at is None or not one.streamed
        assert all(state.in_flight == 0 for state in balancers[0].snapshot(now=fleet.now).endpoints)


def _keeping(policy: str, kept: list[Balancer]) -> Callable[[random.Random], Balancer]:
    def make(rng: random.Random) -> Balancer:
        kept.append(replicas(policy)(rng))
        return kept[-1]

    return make


def test_a_server_without_metrics_and_one_that_hides_its_queue() -> None:
    shy = dataclasses.replace(ONE_SLOT, shows_waiting=False)
    options = FleetOptions(servers=(ONE_SLOT, dataclasses.replace(ONE_SLOT, metrics=False), shy))
    heard = listening(options, (0.0, job("a", 10, 100)))
    said = {uid: metrics.waiting for uid, metrics in heard}
    assert len(said) == 2
    assert said[max(said)] is None
    assert said[min(said)] == 0


def test_ranks_and_fixed_times_in_a_fleet() -> None:
    fixed = SimulatedServer(QWEN.preset, times=FixedTimes(ttft_s=0.5, token_s=0.01))
    served: dict[str, list[Served]] = {}
    for name, server in (("fixed", fixed), ("ranks", dataclasses.replace(QWEN, ranks=4)), ("one", QWEN)):
        served[name] = run("adaptive", shared(), FleetOptions(servers=(server, server)))
        assert {one.outcome for one in served[name]} == {Outcome.COMPLETED}
    assert all((one.first_at or 0) - (one.placed_at or 0) == pytest.approx(0.501) for one in served["fixed"])


def test_jitter_of_a_server() -> None:
    wild = dataclasses.replace(QWEN, jitter=0.5)
    ends = [
        [one.ended_at for one in run("round-robin", shared(), FleetOptions(servers=(server,) * 3))]
        for server in (QWEN, wild)
    ]
    assert ends[0] != ends[1]


def test_until_and_watch() -> None:
    fleet = Fleet(FleetOptions(servers=(QWEN,) * 3), shared(), replicas("round-robin"), seed=1)
    seen: list[QueueSample] = []
    fleet.watch(0.5, seen.append)
    served = fleet.run(until_s=5.0)
    assert fleet.now == pytest.approx(5.0, abs=0.1)
    assert any(one.outcome is None for one in served)
    assert len(seen) in {9, 10}
    assert all(len(one.gauges) == 3 for one in seen)
