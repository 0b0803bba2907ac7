# SPDX-License-Identifier: Apache-2.0
"""What is known of an engine is known of a process: with another one at its address it is forgotten, and asked anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, make_balancer, request, spec


def page(balancer: Balancer, uid: EndpointUid, now: float, started_at: float | None) -> None:
    balancer.report_scrape(uid, LoadMetrics(scraped_at=now, running=0.0, waiting=0.0, started_at=started_at))


def told(policy: str = "adaptive") -> tuple[Balancer, EndpointState]:
    """A server that has said everything of itself, and refused requests."""
    balancer = make_balancer(policy=policy)
    (one,) = balancer.set_endpoints([spec(1)], now=0.0).added
    bring_up(balancer, [one])
    page(balancer, one.uid, 1.0, 1000.0)
    balancer.report_cache_size(one.uid, 5000)
    balancer.report_slots(one.uid, 4)
    balancer.report_role(one.uid, Handover(Role.BOTH, "nixl"))
    balancer.report_cache(one.uid, CacheReport(tokens=400, size_tokens=5000))
    ticket = balancer.submit(request(), now=1.0)
    balancer.after_failure(ticket, FailureKind.BUSY, (), now=1.0)
    balancer.endpoints.judge.renewed.clear()
    (state,) = balancer.endpoints.members()
    assert state.held_until(MODEL) > 1.0
    return balancer, state


def another_start(balancer: Balancer, state: EndpointState) -> None:
    page(balancer, state.endpoint.uid, 2.0, 2000.0)


def nothing_listens(balancer: Balancer, state: EndpointState) -> None:
    balancer.report_health(state.endpoint.uid, False, "test", now=2.0, refused=True)
    balancer.report_health(state.endpoint.uid, False, "test", now=2.1, refused=True)


def a_request_is_refused(balancer: Balancer, state: EndpointState) -> None:
    ticket = balancer.submit(request(), now=2.0)
    balancer.after_failure(ticket, FailureKind.CONNECT, (), now=2.0, refused=True)


@pytest.mark.parametrize("policy", ["adaptive", "round-robin"])
@pytest.mark.parametrize("shows", [another_start, nothing_listens, a_request_is_refused])
def test_what_a_process_said_ends_with_it(shows: Callable[[Balancer, EndpointState], None], policy: str) -> None:
    balancer, state = told(policy)
    before = state.standing.process
    shows(balancer, state)
    said = state.reported.cache_tokens, state.reported.slots, state.reported.handover, state.reported.cached_tokens
    assert said == (None, None, None, None)
    assert state.held_until(MODEL) < 2.0, "what it refused"
    assert state.standing.process == before + 1
    assert balancer.endpoints.judge.renewed == [state.endpoint.uid], "it is asked at once"
    if policy == "adaptive":
        assert not state.load.kv.known_tokens
        balancer.report_cache_size(state.endpoint.uid, 7000)
        balancer.report_slots(state.endpoint.uid, 9)
        assert (state.load.kv.known_tokens, state.load.room.slots.limit) == (7000.0, 9.0)


@pytest.mark.parametrize("started_at", [1000.0, None])
def test_the_same_process_stays_known(started_at: float | None) -> None:
    balancer, state = told()
    page(balancer, state.endpoint.uid, 2.0, started_at)
    balancer.report_health(state.endpoint.uid, False, "a time-out", now=2.0)
    assert (state.reported.cache_tokens, state.reported.slots, state.standing.process) == (5000, 4, 0)
    assert balancer.endpoints.judge.renewed == []
