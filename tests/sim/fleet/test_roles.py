# SPDX-License-Identifier: Apache-2.0
"""A fleet with roles: prompts computed at one server, responses generated at another, and what goes wrong between."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.engines.handover import Role
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FaultKind, FleetOptions, QueueSample, Served, ServerFault, SimulatedServer
from lbproxy.sim.workloads.workload import OpenLoop, Workload
from tests.sim.engine.test_engine import STEADY
from tests.sim.fleet.test_cluster import QWEN, ROOMY, job, small

APART = dataclasses.replace(STEADY, transfer_ms=2.0, transfer_token_ms=0.1)
"""Steps of 10 ms; a transfer of 48 tokens takes 6.8."""
HAND = FleetOptions(
    servers=(SimulatedServer(APART, role=Role.PREFILL), SimulatedServer(APART, role=Role.DECODE)),
    network_s=0.001,
    jitter=False,
)


def fleet(workload: Workload, options: FleetOptions, split: object = "always", seed: int = 1) -> Fleet:
    """One that is not run yet."""

    def make(rng: random.Random) -> Balancer:
        routing = RoutingSettings.model_validate({"policy": "adaptive", "split": split})
        return Balancer(make_policy(routing, rng), BalancingSettings(admission=ROOMY), rng=rng)

    return Fleet(options, workload, make, seed=seed)


def apart(shape: str, **more: object) -> FleetOptions:
    """p, d and b: the roles of the servers."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    servers = tuple(dataclasses.replace(QWEN, role=roles[one]) for one in shape)
    return FleetOptions(servers=servers, **more)  # type: ignore[arg-type]


def impatient(workload: Workload, patience_s: Callable[[], float]) -> OpenLoop:
    """Its clients leave some time after they came."""
    batch = workload.begin(0.0)
    assert batch is not None
    return OpenLoop([[(at, dataclasses.replace(one, patience_s=patience_s())) for at, one in batch]])


def run_to_the_end(one: Fleet, for_s: float = 5.0) -> tuple[list[Served], QueueSample]:
    """All jobs, and how it looks some time later; within 5 s no lease ends."""
    samples: list[QueueSample] = []
    one.watch(0.5, samples.append)
    served = one.run()
    one.settle(for_s)
    return served, samples[-1]


def test_a_split_request_by_hand() -> None:
    """At its first server from 1 to 11 ms, known at 12; at the second at 13, transferred until 19.8, a step more, and
    on its way for 1; two more tokens.
    """
    (one,) = fleet(OpenLoop([[(0.0, job("a", 48, 3))]]), HAND).run()
    assert (one.prefill, one.server, one.attempts) == (0, 1, 1)
    assert one.prefilled_at == pytest.approx(0.012)
    assert one.first_at == pytest.approx(0.0308)
    assert one.ended_at == pytest.approx(0.0508)


def test_cached_tokens_are_those_of_the_prefill() -> None:
    """What decode has is not computed there, so it says nothing of caches."""
    again = [(0.0, job("a", 48, 3)), (1.0, dataclasses.replace(job("a", 48, 3), id="a again"))]
    first, second = fleet(OpenLoop([again]), HAND).run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


def test_never_leaves_prefill_servers_idle_and_always_leaves_them_all_prompts() -> None:
    whole = fleet(small(rate=4, prompt_tokens=2000), apart("pdd"), "never").run()
    assert {(one.prefill, one.server) for one in whole} == {(None, 1), (None, 2)}
    split = fleet(small(rate=4, prompt_tokens=2000), apart("pdd"), "always").run()
    assert {(one.prefill, one.server) for one in split} == {(0, 1), (0, 2)}


@pytest.mark.parametrize("stream_share", [1.0, 0.5, 0.0])
def test_everything_is_served_once_and_nothing_stays_held(stream_share: float) -> None:
    options = apart("ppddb", stream_share=stream_share)
    served, last = run_to_the_end(fleet(small(rate=8, prompt_tokens=3000, spread=0.8), options))
    assert {one.outcome for one in served} == {Outcome.COMPLETED}
    assert sum(gauges.transfers for gauges in last.gauges) == len(served)
    assert [(gauges.held_blocks, gauges.kv_usage, gauges.garbage) for gauges in last.gauges] == [(0, 0.0, 0)] * 5


def test_same_seed_same_times() -> None:
    def log() -> list[object]:
        served = fleet(small(rate=8, prompt_tokens=3000, spread=0.8), apart("pddb"), "priced").run()
        return [(one.prefill, one.server, one.first_at, one.ended_at) for one in served]

    assert log() == log()


def test_clients_that_leave_free_what_is_held() -> None:
    """While it is computed, held, transferred or decoded: whenever they leave."""
    rng = random.Random(1)
    workload = impatient(small(rate=10, prompt_tokens=6000, spread=0.8), lambda: rng.uniform(0.001, 2.0))
    served, last = run_to_the_end(fleet(workload, apart("ppdd", network_s=0.05)))
    outcomes = {one.outcome for one in served}
    assert outcomes == {Outcome.COMPLETED, Outcome.CLIENT_CLOSED}
    left = [one for one in served if one.outcome is Outcome.CLIENT_CLOSED]
    assert any(one.prefilled_at is None for one in left)
    assert any(one.prefilled_at is not None for one in left)
    assert [(gauges.held_blocks, gauges.kv_usage) for gauges in last.gauges] == [(0, 0.0)] * 4


@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("server", [0, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize("split", ["always", "priced"])
def test_failures_lose_no_request_and_leave_nothing(kind: FaultKind, server: int, split: str) -> None:
    """A request fails only if its client had some of it, as without roles."""
    fault = ServerFault(server=server, from_s=5.0, until_s=10.0, kind=kind)
    workload = small(rate=6, prompt_tokens=4000, spread=0.8)
    served, last = run_to_the_end(fleet(workload, apart("ppdd", faults=(fault,)), split), for_s=31.0)
    broken = [one for one in served if one.outcome is not Outcome.COMPLETED]
    assert all(one.outcome is Outcome.UPSTREAM_BROKE and one.server == server for one in broken), broken
    assert [(gauges.held_blocks, gauges.kv_usage) for gauges in last.gauges] == [(0, 0.0)] * 4


def test_a_prefill_server_that_dies_during_a_transfer_has_the_request_begin_again() -> None:
    """At 15 ms 4 ms of the transfer are left, so decode answers 500 and the rest of the fleet serves it."""
    options = dataclasses.replace(
        HAND,
        servers=(*HAND.servers, SimulatedServer(APART, role=Role.DECODE)),
        faults=(ServerFault(server=0, from_s=0.015, until_s=1.0),),
    )
    (one,) = fleet(OpenLoop([[(0.0, job("a", 48, 3))]]), options).run()
    assert one.outcome is Outcome.COMPLETED
    assert (one.attempts, one.prefill, one.server) == (3, None, 2), "the second found the prefill server gone"
    assert one.first_at is not None
    assert one.first_at < 0.2


def test_a_decode_server_that_is_gone_costs_no_second_prefill() -> None:
    """The second leg is placed anew while its prompt is held."""
    options = dataclasses.replace(
        HAND,
        servers=(*HAND.servers, SimulatedServer(APART, role=Role.DECODE)),
        faults=(ServerFault(server=1, from_s=0.0, until_s=1.0), ServerFault(server=2, from_s=0.0115, until_s=0.0116)),
    )
    (one,) = fleet(OpenLoop([[(0.005, job("a", 48, 3))]]), options).run()
    assert one.outcome is Outcome.COMPLETED
    assert (one.attempts, one.prefill, one.server) == (1, 0, 2)
    assert one.prefilled_at == pytest.approx(0.017)


def test_without_decode_servers_prefill_servers_serve_whole_requests() -> None:
    fault = ServerFault(server=1, from_s=0.0, until_s=100.0)
    workload = OpenLoop([[(5.0, job("a", 48, 3))]])
    (one,) = fleet(workload, dataclasses.replace(HAND, faults=(fault,))).run()
    assert (one.outcome, one.prefill, one.server) == (Outcome.COMPLETED, None, 0)
