# SPDX-License-Identifier: Apache-2.0
"""Servers that die, hang or fail fast, before the real Balancer in virtual time: what becomes of requests, and when the
server is used again. And healthy fleets under every load, of which no server may ever be ejected.
"""

from __future__ import annotations

from collections import Counter

import pytest

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FaultKind, FleetOptions, Served, ServerFault
from lbproxy.sim.workloads.workload import Workload
from tests.sim.fleet.test_cluster import QWEN, replicas, small

FROM_S, UNTIL_S = 30.0, 60.0
POLICIES = ["least-request", "adaptive"]
policies = pytest.mark.parametrize("policy", POLICIES)


class Story:
    """One run, and what is told of it."""

    def __init__(
        self, policy: str, workload: Workload, *faults: ServerFault, servers: int = 4, **options: float
    ) -> None:
        fleet_options = FleetOptions(servers=(QWEN,) * servers, faults=faults, **options)  # type: ignore[arg-type]
        fleet = Fleet(fleet_options, workload, replicas(policy), seed=1)
        self.served = fleet.run()
        self.moves = [(at, move.endpoint.name, move.after, move.cause) for at, move in fleet.transitions if at > 1.0]
        self.outcomes = Counter(one.outcome for one in self.served)

    def placed_on(self, server: int, begin: float, end: float) -> list[Served]:
        return [one for one in self.served if one.server == server and begin <= (one.placed_at or 0.0) < end]

    def first(self, after: Health) -> float:
        return next(at for at, name, state, _ in self.moves if name == "s0" and state is after)

    def back_at(self) -> float:
        """When s0 is up for good."""
        return next(at for at, _, state, _ in reversed(self.moves) if state is Health.UP)


def steady(rate: float = 12.0, duration_s: float = 120.0) -> Workload:
    return small(rate=rate, duration_s=duration_s, prompt_tokens=800, shared_tokens=200, output_tokens=150)


@policies
def test_a_server_that_dies_is_left_alone_and_used_again_slowly(policy: str) -> None:
    it = Story(policy, steady(), ServerFault(server=0, from_s=FROM_S, until_s=UNTIL_S))
    assert set(it.outcomes) <= {Outcome.COMPLETED, Outcome.UPSTREAM_BROKE}, "who had no byte was answered elsewhere"
    assert it.first(Health.DOWN) <= FROM_S + 7.0
    assert not it.placed_on(0, FROM_S + 7.0, UNTIL_S)
    assert it.back_at() <= UNTIL_S + 3.0
    ramp = [len(it.placed_on(0, UNTIL_S + 2.0 + n * 10, UNTIL_S + 12.0 + n * 10)) for n in range(4)]
    assert 1 <= ramp[0] < ramp[2] < 1.5 * ramp[3]
    assert ramp[0] < 0.5 * ramp[3], "a sixth of a share on average, then half, then five sixths"


@policies
def test_a_server_that_hangs_is_found_and_its_requests_are_answered_elsewhere(policy: str) -> None:
    """Its /health is 200 all the while and its gauges stand still."""
    it = Story(policy, steady(), ServerFault(server=0, from_s=FROM_S, until_s=UNTIL_S, kind=FaultKind.HUNG))
    ejected = [(at, cause) for at, _, state, cause in it.moves if state is Health.EJECTED]
    assert {cause for _, cause in ejected} <= {Cause.NO_PROGRESS, Cause.FAULTS}
    assert ejected[0][1] is Cause.NO_PROGRESS
    assert FROM_S + 9.0 <= ejected[0][0] <= FROM_S + 14.0
    assert set(it.outcomes) <= {Outcome.COMPLETED, Outcome.UPSTREAM_BROKE}
    silent = [one for one in it.placed_on(0, FROM_S + 15.0, UNTIL_S) if one.outcome is not Outcome.COMPLETED]
    assert len(silent) <= 3, "trials"
    moved = [one for one in it.served if one.attempts > 1]
    assert moved
    assert all((one.first_at or 0.0) < UNTIL_S for one in moved if one.submitted_at < FROM_S + 10.0)
    assert it.placed_on(0, UNTIL_S + 35.0, 120.0)


@policies
def test_a_server_that_fails_fast_gets_five_requests_and_one_in_a_hundred(policy: str) -> None:
    """It is always the least loaded: 500 after 1 ms, while the others take a second."""
    it = Story(policy, steady(rate=20.0), ServerFault(server=0, from_s=FROM_S, until_s=UNTIL_S, kind=FaultKind.FAILING))
    assert it.outcomes == {Outcome.COMPLETED: len(it.served)}, "all of them were answered elsewhere"
    during = [one for one in it.served if FROM_S <= one.submitted_at < UNTIL_S]
    failed = [one for one in during if one.attempts > 1]
    assert 5 <= len(failed) <= 5 + 0.01 * len(during) + 3, "3: a burst that was under way"
    assert next(cause for *_, state, cause in it.moves if state is Health.EJECTED) is Cause.SUCCESS_RATE
    assert it.placed_on(0, UNTIL_S + 35.0, 120.0)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_server_failing_and_coming_back_leaves_nobody_behind(kind: FaultKind) -> None:
    faults = [ServerFault(server=n, from_s=FROM_S, until_s=FROM_S + 15.0, kind=kind) for n in range(4)]
    it = Story("adaptive", steady(), *faults)
    late = [one for one in it.served if one.submitted_at > FROM_S + 20.0]
    assert {one.outcome for one in late} == {Outcome.COMPLETED}
    assert len({one.server for one in late}) == 4


@policies
@pytest.mark.parametrize("scraped", [True, False])
@pytest.mark.parametrize("stream_share", [1.0, 0.3])
def test_a_healthy_fleet_is_never_ejected_however_loaded(policy: str, scraped: bool, stream_share: float) -> None:
    """Long prompts at several times what the fleet can do: first bytes come minutes late, and nobody hangs."""
    for workload, servers in (
        (small(rate=12.0, duration_s=30.0, prompt_tokens=20_000, output_tokens=100), 3),
        (small(rate=60.0, duration_s=20.0, prompt_tokens=500, output_tokens=1500), 2),
    ):
        interval_s = 0.2 if scraped else None
        options: dict[str, float] = {"stream_share": stream_share}
        it = Story(policy, workload, servers=servers, scrape_interval_s=interval_s, **options)  # type: ignore[arg-type]
        assert max((one.first_at or one.ended_at) - one.submitted_at for one in it.served) > 100.0, "minutes late"
        assert not it.moves, it.moves
        assert it.outcomes == {Outcome.COMPLETED: len(it.served)}


def test_equal_seeds_eject_alike() -> None:
    fault = ServerFault(server=0, from_s=5.0, until_s=15.0, kind=FaultKind.FAILING)
    one, two = (Story("adaptive", steady(duration_s=30.0), fault).moves for _ in range(2))
    assert one == two
    assert one
