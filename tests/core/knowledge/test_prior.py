# SPDX-License-Identifier: Apache-2.0
"""Weights as a guess of speeds: under policies that learn these, until they have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lbproxy.commands.sim import Run, fleet_of, workload_of
from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.parse import parse_scenario
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.sim.fleet.fleet import Served
from tests.support.pool import MODEL, bring_up, make_balancer, spec


def pool(*weights: float, policy: str = "adaptive") -> Balancer:
    balancer = make_balancer(policy=policy)
    join(balancer, *weights)
    return balancer


def join(balancer: Balancer, *weights: float) -> None:
    specs = [replace(spec(n), weight=weight) for n, weight in enumerate(weights, 1)]
    bring_up(balancer, balancer.set_endpoints(specs, now=0.0).added)


LONG = InferenceRequest("r", MODEL, stream=True, body_bytes=32_000, prompt_bytes=32_000)


def speeds(balancer: Balancer) -> list[float]:
    """Prefill time relative to the pool's."""
    return [state.load.speed.factor for state in balancer._endpoints.members()]


def prefill(balancer: Balancer, name: str, took_s: float, now: float) -> None:
    """One stream of a long prompt on an endpoint shows how fast it is."""
    others = frozenset(s.endpoint.uid for s in balancer._endpoints.members() if s.endpoint.name != name)
    ticket = balancer.submit(LONG, now=now, avoid=others)
    assert ticket.placed_on is not None
    assert ticket.placed_on.endpoint.name == name
    balancer.first_byte(ticket, now=now + took_s)
    balancer.close(ticket, Outcome.COMPLETED, now=now + took_s + 1.0)


def test_twice_the_weight_is_taken_for_half_the_time() -> None:
    first, second, third = speeds(pool(1, 2, 2))
    assert first == pytest.approx(2 * second)
    assert second == third
    assert first * second * third == pytest.approx(1.0), "the pool's mean stays what it is"


@pytest.mark.parametrize("weight", [1.0, 7.0, 0.3])
def test_equal_weights_change_nothing_at_all(weight: float) -> None:
    balancer = pool(weight, weight, weight)
    assert [state.load.speed.ln_factor for state in balancer._endpoints.members()] == [0.0, 0.0, 0.0]
    assert speeds(balancer) == [1.0, 1.0, 1.0]


def test_a_guess_is_bounded() -> None:
    """A weight may be anything from 0.001 to 100,000, and an SRV record's says nothing of speed."""
    assert speeds(pool(1, 100_000)) == pytest.approx([2.0, 0.5])


def test_the_faster_one_is_chosen_first() -> None:
    balancer = pool(1, 2)
    ticket = balancer.submit(LONG, now=0.0)
    assert ticket.placed_on is not None
    assert ticket.placed_on.endpoint.name == "e2"


def test_what_was_measured_counts_more_than_any_later_guess() -> None:
    balancer = pool(1, 1)
    prefill(balancer, "e1", 3.0, now=1.0)
    measured = speeds(balancer)[0], next(iter(balancer._endpoints.members())).load.speed.ln_factor
    assert measured[1] > 0.0
    join(balancer, 8, 1)  # a reload
    assert (speeds(balancer)[0], next(iter(balancer._endpoints.members())).load.speed.ln_factor) == measured
    assert speeds(balancer)[1] == pytest.approx(2.0), "nothing was measured of that one"


def test_a_wrong_guess_is_corrected() -> None:
    """Both take the same time."""
    balancer = pool(1, 4)
    for n in range(60):
        prefill(balancer, f"e{1 + n % 2}", 0.8, now=10.0 * n + 1.0)
    assert speeds(balancer)[0] / speeds(balancer)[1] < 1.3


def test_another_policy_begins_with_the_guess_too() -> None:
    balancer = pool(1, 4, policy="least-request")
    balancer.reconfigure(
        make_policy(RoutingSettings(policy="adaptive")),
        BalancingSettings(),
        now=1.0,
    )
    assert speeds(balancer) == pytest.approx([2.0, 0.5])


# --- What it is worth -------------------------------------------------------------------------------------------------


def served(fleet: str, policy: str = "adaptive") -> list[Served]:
    workload = "{name: own, parameters: {rate: 3, prompt_tokens: 4000, spread: 0.8, duration_s: 40}}"
    scenario = parse_scenario(f"fleet: {fleet}\nworkload: {workload}\npolicies: [{{policy: {policy}}}]\n", environ={})
    run = Run(scenario, scenario.policies[0], 1)
    return fleet_of(run, workload_of(run)).run()


def first_token_s(jobs: list[Served]) -> float:
    waits = [one.first_at - one.submitted_at for one in jobs if one.first_at is not None]
    return math.fsum(waits) / len(waits)


def figures(jobs: list[Served]) -> list[tuple[object, ...]]:
    return [(one.placed_at, one.first_at, one.ended_at, one.server, one.cached_tokens) for one in jobs]


@pytest.mark.parametrize("policy", ["adaptive", "min-ttft"])
def test_no_figure_of_a_simulation_changes_where_all_weights_are_equal(policy: str) -> None:
    plain = served("[{count: 2}, {count: 6, speed: 0.25}]", policy)
    weighed = served("[{count: 2, weight: 7}, {count: 6, speed: 0.25, weight: 7}]", policy)
    assert figures(plain) == figures(weighed)


def test_right_weights_bring_first_tokens_sooner_and_wrong_ones_do_little_harm() -> None:
    plain = first_token_s(served("[{count: 2}, {count: 6, speed: 0.25}]"))
    right = first_token_s(served("[{count: 2, weight: 4}, {count: 6, speed: 0.25}]"))
    wrong = first_token_s(served("[{count: 2}, {count: 6, speed: 0.25, weight: 4}]"))
    assert right < 0.97 * plain
    assert wrong < 1.15 * plain
