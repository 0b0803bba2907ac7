# SPDX-License-Identifier: Apache-2.0
"""Two servers at twice what they can serve, and a provider behind them: who gets what, in virtual time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.engine.fixed import FixedTimes
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, QueueSample, Served, ServerFault, SimulatedServer
from lbproxy.sim.workloads.catalogue import make_workload

SLOTS, AFTER_S, PROVIDER_TTFT_S = 16, 3.0, 0.96
SLOW = dataclasses.replace(PRESETS["qwen-32b-2xh100"], max_sequences=SLOTS)
OWN = SimulatedServer(SLOW)
PROVIDER = SimulatedServer(
    dataclasses.replace(SLOW, max_sequences=8000),
    times=FixedTimes(ttft_s=0.8, ttft_spread=0.2, token_s=0.01),
    metrics=False,
    tier=2,
)


class Bounded(Balancer):
    """The provider has a limit of its own."""

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        bounds = Bounds(max_in_flight=1000)
        specs = [dataclasses.replace(one, bounds=bounds if one.tier > 1 else None) for one in specs]
        return super().set_endpoints(specs, now=now)


def simulate(
    *servers: SimulatedServer,
    rate: float,
    duration_s: float,
    faults: tuple[ServerFault, ...] = (),
    limit: int | None = None,
) -> tuple[list[Served], list[QueueSample]]:
    def make(rng: random.Random) -> Balancer:
        admission = AdmissionSettings(queue_requests=10_000, queue_timeout=3600.0, max_in_flight_per_endpoint=limit)
        settings = BalancingSettings(admission=admission, overflow=OverflowSettings(after=AFTER_S))
        return Bounded(make_policy(RoutingSettings(), rng), settings, rng=rng)

    mix = {"rate": rate, "duration_s": duration_s, "prompt_tokens": 600, "output_tokens": 200}
    fleet = Fleet(FleetOptions(servers=servers, faults=faults), make_workload("own", mix, seed=3), make, seed=1)
    samples: list[QueueSample] = []
    fleet.watch(0.25, samples.append)
    return fleet.run(), samples


@pytest.mark.parametrize("limit", [SLOTS, None], ids=["slots configured", "slots learned"])
def test_only_the_excess_overflows(limit: int | None) -> None:
    """First-tier utilisation, time to first token, and the share that overflowed, as promised. All responses have one
    length here, so those that began together end together: what waits in an engine's queue then waits for long.
    """
    alone, _ = simulate(OWN, OWN, rate=15.0, duration_s=60.0, limit=limit)
    capacity = sum(20.0 <= one.ended_at < 60.0 for one in alone) / 40.0
    served, samples = simulate(OWN, OWN, PROVIDER, rate=2.0 * capacity, duration_s=120.0, limit=limit)
    counted = [one for one in served if one.submitted_at >= 30.0]
    assert {one.outcome for one in served} == {Outcome.COMPLETED}
    busy = [sum(one.running for one in sample.gauges[:2]) / (2 * SLOTS) for sample in samples if 30 <= sample.at < 120]
    assert sum(busy) / len(busy) >= 0.95
    waits = sorted(one.first_at - one.submitted_at for one in counted if one.first_at is not None)
    assert waits[int(0.99 * len(waits))] <= AFTER_S + PROVIDER_TTFT_S
    excess = 1.0 - 90.0 * capacity / len(counted)
    assert abs(sum(one.server == 2 for one in counted) / len(counted) - excess) <= 0.05 * excess


def test_all_servers_of_the_first_tier_die_and_return() -> None:
    """Nothing fails but streams of which tokens were read; five seconds after the return nothing overflows."""
    faults = tuple(ServerFault(server=number, from_s=20.0, until_s=40.0) for number in (0, 1))
    served, _ = simulate(OWN, OWN, PROVIDER, rate=6.0, duration_s=60.0, faults=faults)
    for one in served:
        had_tokens = one.first_at is not None and one.first_at <= 20.1 and one.submitted_at < 20.0
        assert one.outcome is Outcome.COMPLETED or (one.outcome is Outcome.UPSTREAM_BROKE and had_tokens)
    where = [(one.submitted_at, one.server == 2) for one in served]
    assert {elsewhere for at, elsewhere in where if at < 15.0 or at >= 45.0} == {False}
    assert {elsewhere for at, elsewhere in where if 21.0 <= at < 40.0} == {True}
