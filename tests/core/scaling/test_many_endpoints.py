# SPDX-License-Identifier: Apache-2.0
"""What is done once a second, or ten times, costs little over 1,000 endpoints, and nobody is forgotten for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.config.sleep import HostSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, SleepSpec
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import Task
from tests.support.pool import card, spec

COUNT = 1000
BOUND_MS = 15.0
"""Of CPU in a second, not compiled and on a busy machine. It is 1 to 3 ms; advice took 100, decisions
about sleep 40 to 75."""


def of_many(
    per_model: int = 1, sleep: Callable[[int], SleepSpec | None] = lambda _: None
) -> tuple[Balancer, list[Endpoint]]:
    routing = RoutingSettings.model_validate({"policy": "adaptive"})
    settings = BalancingSettings(hosts={f"h{n}": HostSettings(awake=2) for n in range(COUNT)})
    balancer = Balancer(make_policy(routing), settings, rng=random.Random(1))
    added = balancer.set_endpoints([replace(spec(n), sleep=sleep(n)) for n in range(COUNT)], now=0.0).added
    for n, one in enumerate(added):
        balancer.report_models(one.uid, [card(f"m{n // per_model}")])
        balancer.report_health(one.uid, True, "test", now=0.0)
        if sleep(n) is not None:
            balancer.sleepers.reported(one.base_url, n % 4 > 0, asked_at=0.0, now=0.0)
    balancer.transitions.clear()
    return balancer, added


def ms_of(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1000.0 * (time.process_time() - began)


@pytest.mark.parametrize("per_model", [1, 10, 100, COUNT])
def test_advice_takes_milliseconds_a_second(per_model: int) -> None:
    balancer, _ = of_many(per_model)
    balancer.check(now=1.0)
    assert min(ms_of(lambda: balancer.check(now=2.0 + n)) for n in range(7)) < BOUND_MS  # noqa: B023


def test_every_model_has_its_turn_and_those_that_requests_wait_for_have_it_at_once() -> None:
    balancer, endpoints = of_many(2)
    for second in range(20):
        balancer.check(now=float(second))
    assert len(balancer.snapshot(now=20.0).models) == COUNT // 2
    for one in endpoints[:2]:
        balancer.drain(one.uid)
    balancer.drain(endpoints[4].uid)
    balancer.report_health(endpoints[6].uid, False, "test", now=20.0)
    for second in range(20, 40):
        balancer.check(now=float(second))
    found = {one.model: one.endpoints for one in balancer.snapshot(now=40.0).models}
    assert [found[f"m{n}"] for n in (0, 1, 2, 4)] == [0, 2, 1, 2]


@pytest.mark.parametrize("hosts", [None, 4, 10])
def test_decisions_about_sleep_take_milliseconds_a_second(hosts: int | None) -> None:
    """`hosts`: servers that share one."""

    def sleep(n: int) -> SleepSpec:
        return SleepSpec(after_s=600.0, host=None if hosts is None else f"h{n // hosts}")

    balancer, _ = of_many(sleep=sleep)
    now = 1.0
    for n in range(20):
        balancer.submit(InferenceRequest("r", f"m{50 * n + 1}"), now=now)

    def second() -> None:
        nonlocal now
        for _ in range(10):
            balancer.sleepers.decide(now)
            now += 0.1

    assert min(ms_of(second) for _ in range(7)) < 4 * BOUND_MS, "with 20 models that requests wait for"


def test_of_many_servers_each_falls_asleep_and_wakes_in_time() -> None:
    balancer, endpoints = of_many(sleep=lambda _: SleepSpec(after_s=10.0))
    sleepers, now = balancer.sleepers, 1.0
    fell: dict[str, float] = {}
    while now < 16.0:
        for order in sleepers.decide(now):
            assert order.task is Task.SLEEP
            fell[order.url] = now
            sleepers.ended(order.url, order.task, None, now=now)
        now += 0.1
    assert len(fell) == COUNT // 4
    assert 10.0 <= min(fell.values()) <= max(fell.values()) <= 14.5
    ticket = balancer.submit(InferenceRequest("r", "m777"), now=now)
    (order,) = sleepers.decide(now)
    assert (order.task, order.url) == (Task.WAKE, endpoints[777].base_url)
    sleepers.ended(order.url, order.task, None, now=now)
    assert balancer.poll(now=now) == [ticket]
    assert sleepers.phase_of(endpoints[777].uid) is Phase.AWAKE
