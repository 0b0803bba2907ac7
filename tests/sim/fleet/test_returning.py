# SPDX-License-Identifier: Apache-2.0
"""A server returns while few requests come, and the other is a little faster: it gets its share again."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.policies.registry import make_policy
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, ServerFault, SimulatedServer
from lbproxy.sim.workloads.catalogue import make_workload

AWAY_S, BACK_S, END_S = 40.0, 60.0, 140.0


@pytest.mark.parametrize("slower", [0, 1])
@pytest.mark.parametrize("policy", ["adaptive", "least-request"])
def test_a_returning_server_gets_its_share_whichever_is_a_little_faster(policy: str, slower: int) -> None:
    """Mostly one request at a time, which the other server could always take. For `slow_start` its share grows."""
    preset = PRESETS["qwen-32b-2xh100"]
    late = dataclasses.replace(preset, host_ms=1.02 * preset.host_ms, weights_ms=1.02 * preset.weights_ms)
    servers = tuple(SimulatedServer(late if number == slower else preset) for number in range(2))

    def make(rng: random.Random) -> Balancer:
        return Balancer(
            make_policy(RoutingSettings.model_validate({"policy": policy}), rng), BalancingSettings(), rng=rng
        )

    mix = {"rate": 2.0, "duration_s": END_S, "prompt_tokens": 600, "output_tokens": 50}
    faults = (ServerFault(server=1, from_s=AWAY_S, until_s=BACK_S),)
    served = Fleet(FleetOptions(servers=servers, faults=faults), make_workload("own", mix, seed=1), make, seed=1).run()

    def share(since: float, until: float) -> float:
        those = [one.server == 1 for one in served if since <= one.submitted_at < until]
        return sum(those) / len(those)

    assert share(AWAY_S + 1.0, BACK_S) == 0.0
    assert 0.05 <= share(BACK_S, BACK_S + 20.0) <= 0.4
    assert share(BACK_S + 20.0, BACK_S + 40.0) >= 0.4
    assert 0.4 <= share(BACK_S + 40.0, END_S) <= 0.7
