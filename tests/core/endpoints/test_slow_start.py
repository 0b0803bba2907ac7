# SPDX-License-Identifier: Apache-2.0
"""Who comes back gets a share that grows, under every policy; nobody is left without an answer for it."""

from __future__ import annotations

from collections import Counter

import pytest

from lbproxy.config.sections.health import HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.core.endpoints.health import Health
from lbproxy.core.policies.registry import POLICIES
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, bring_up, card, pool_of, seen, spec

POLICY_NAMES = [name for name in POLICIES if name != "weighted"]
RAMP_S = 30.0


def bounce(balancer: Balancer, endpoint: Endpoint, now: float) -> None:
    """Down, and up again."""
    for ok in (False, False, False, True, True):
        balancer.report_health(endpoint.uid, ok, "", now=now)


def ask(balancer: Balancer, n: int, now: float) -> Ticket:
    """Request number n: its own prompt, streamed."""
    keys = (n * 1000, n * 1000 + 1)
    return balancer.submit(InferenceRequest(str(n), MODEL, True, 2048, 2048, keys, session=str(n)), now=now)


def shares(balancer: Balancer, begin: float, seconds: float, rate: float = 40.0) -> Counter[str]:
    """Where requests go that arrive evenly and take half a second each."""
    went: Counter[str] = Counter()
    running: list[tuple[float, Ticket]] = []
    for n in range(round(seconds * rate)):
        now = begin + n / rate
        while running and running[0][0] <= now:
            at, ticket = running.pop(0)
            balancer.first_byte(ticket, now=at)
            balancer.close(ticket, Outcome.COMPLETED, now=at)
        balancer.check(now=now)
        ticket = ask(balancer, round(begin * 1000) + n, now)
        assert ticket.placed_on is not None
        went[ticket.placed_on.endpoint.name] += 1
        running.append((now + 0.5, ticket))
    for at, ticket in running:
        balancer.close(ticket, Outcome.COMPLETED, now=at)
    return went


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_share_of_who_comes_back_grows_under_every_policy(policy: str) -> None:
    """A tenth of a share is 1 of 31 requests, a third 1 of 10; a whole one, whatever the policy gives."""
    balancer, endpoints = pool_of(4, policy=policy)
    shares(balancer, 0.0, 5.0)
    bounce(balancer, endpoints[0], 100.0)
    assert seen(balancer, 100.0)["e1"].share == 0.1
    first = shares(balancer, 100.0, 3.0)
    assert first["e1"] <= 1 + 2 + 120 / 31, "the first credit, what may be saved up, and its share"
    middle = shares(balancer, 110.0, 5.0)
    assert middle["e1"] <= 3 + 200 * 0.5 / 3.5
    last = shares(balancer, 131.0, 10.0)
    assert seen(balancer, 131.0)["e1"].share == 1.0
    if policy not in {"prefix-hash", "cache-aware", "gie-tree", "gie", "preble", "llm-d"}:
        assert last["e1"] >= 60, "a fourth of 400, more or less"


def test_it_gets_its_first_request_at_once() -> None:
    balancer, endpoints = pool_of(4)
    bounce(balancer, endpoints[0], 100.0)
    assert shares(balancer, 100.0, 0.5)["e1"] >= 1


def test_several_that_come_back_together_share_alike() -> None:
    balancer, endpoints = pool_of(4, policy="round-robin")
    for endpoint in endpoints:
        bounce(balancer, endpoint, 100.0)
    went = shares(balancer, 100.0, 5.0)
    assert max(went.values()) - min(went.values()) <= 4


def test_it_is_no_reason_to_refuse_or_wait() -> None:
    """The only one is used whole, and so is one beside others that are full."""
    balancer, endpoints = pool_of(1)
    bounce(balancer, endpoints[0], 100.0)
    assert shares(balancer, 100.0, 2.0)["e1"] == 80
    limit = AdmissionSettings(max_in_flight_per_endpoint=2)
    balancer, endpoints = pool_of(3, admission=limit)
    bounce(balancer, endpoints[0], 100.0)
    tickets = [ask(balancer, n, 100.0) for n in range(6)]
    assert all(ticket.placed_on is not None for ticket in tickets)


def test_with_late_binding_nobody_waits_for_a_share() -> None:
    """When the others have a second of prefill queued, the one that starts gets more than its share, and not more than
    a second of prefill either.
    """
    balancer, endpoints = pool_of(3, policy="adaptive")
    bounce(balancer, endpoints[0], 100.0)
    tickets = [
        balancer.submit(InferenceRequest(str(n), MODEL, True, 40_000, 40_000, (n,)), now=100.0) for n in range(12)
    ]
    placed = Counter(t.placed_on.endpoint.name for t in tickets if t.placed_on is not None)
    assert placed["e1"] >= 1
    assert max(placed.values()) - min(placed.values()) <= 1
    assert sum(placed.values()) < 12, "and the others wait"


def test_not_at_our_own_start() -> None:
    balancer, endpoints = pool_of(2)
    assert [one.share for one in balancer.snapshot(now=0.0).endpoints] == [1.0, 1.0]
    late = _added(balancer.set_endpoints([spec(1), spec(2), spec(3)], now=20.0))
    bring_up(balancer, late)
    assert seen(balancer, 20.0)["e3"].share == 1.0, "its server is no younger than the others', for all we know"
    del endpoints


def test_who_joins_later_starts_slowly() -> None:
    balancer, _ = pool_of(2)
    (new,) = _added(balancer.set_endpoints([spec(1), spec(2), spec(3)], now=300.0))
    balancer.report_models(new.uid, [card(MODEL)])
    balancer.report_health(new.uid, False, "still loading", now=300.0)
    for _ in range(2):
        balancer.report_health(new.uid, True, "200", now=400.0)
    assert seen(balancer, 400.0)["e3"].health is Health.UP
    assert seen(balancer, 400.0)["e3"].share == 0.1
    assert seen(balancer, 415.0)["e3"].share == 0.5


def test_going_down_ends_it_and_it_begins_anew() -> None:
    balancer, endpoints = pool_of(2)
    bounce(balancer, endpoints[0], 100.0)
    bounce(balancer, endpoints[0], 120.0)
    assert seen(balancer, 120.0)["e1"].share == 0.1
    balancer.set_endpoints([spec(2)], now=121.0)
    assert not balancer._judge.slow_start.starting


def test_it_can_be_off() -> None:
    balancer, endpoints = pool_of(2, health=HealthSettings(slow_start=None))
    bounce(balancer, endpoints[0], 100.0)
    assert seen(balancer, 100.0)["e1"].share == 1.0


def _added(changes: EndpointChanges) -> list[Endpoint]:
    return changes.added
