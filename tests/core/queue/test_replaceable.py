# SPDX-License-Identifier: Apache-2.0
"""Requests that another model may serve: when they end here, so that it does, and what they cost others."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from lbproxy.config.sections.flows import FlowSettings, FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, make_balancer, pool_of, spec


def ask(after_s: float | None = inf, **more: object) -> InferenceRequest:
    return InferenceRequest("r", MODEL, True, 4000, 4000, fallback_after_s=after_s)._replace(**more)  # type: ignore[arg-type]


def full(policy: str = "least-request", **options: object) -> tuple[Balancer, Ticket]:
    """One endpoint that takes one request, and the request that it has."""
    admission = AdmissionSettings(max_in_flight_per_endpoint=1, queue_timeout=30.0)
    balancer, _ = pool_of(1, policy=policy, admission=admission, **options)
    return balancer, balancer.submit(ask(None), now=0.0)


def refuse(balancer: Balancer, ticket: Ticket, now: float, after_s: float | None = None) -> None:
    verdict = balancer.after_failure(ticket, FailureKind.BUSY, (), now=now, retry_after_s=after_s)
    balancer.close(ticket, verdict.outcome, now=now)


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_it_waits_only_for_so_long(policy: str) -> None:
    """Also behind those that wait for as long as it takes, which wait on."""
    balancer, _ = full(policy)
    patient, limited, endless = (balancer.submit(ask(after_s), now=0.0) for after_s in (None, 10.0, inf))
    assert balancer.next_deadline() == 10.0
    assert balancer.poll(now=9.9) == []
    assert balancer.poll(now=10.0) == [limited]
    assert limited.outcome is Outcome.EXPIRED
    assert balancer.poll(now=29.9) == []
    assert set(balancer.poll(now=30.0)) == {patient, endless}


def test_a_wait_that_is_predicted_to_be_longer_does_not_begin() -> None:
    """Two requests a second are served, and ten wait: the next one has five seconds before it."""
    balancer, running = full()
    waiting = [balancer.submit(ask(None), now=0.0) for _ in range(20)]
    for n in range(20):
        balancer.first_byte(running, now=n / 2.0)
        balancer.close(running, Outcome.COMPLETED, now=n / 2.0, usage=Usage(1000, 0, 10))
        placed = balancer.poll(now=n / 2.0)
        if n < 10:
            waiting += [balancer.submit(ask(None), now=n / 2.0)]
        (running,) = placed
    late, patient = balancer.submit(ask(1.0), now=10.0), balancer.submit(ask(30.0), now=10.0)
    assert (late.state, late.outcome) == (TicketState.CLOSED, Outcome.SATURATED)
    assert patient.state is TicketState.WAITING


@pytest.mark.parametrize("tier", [1, 2])
def test_who_holds_the_model_back_is_not_asked_and_not_waited_for(tier: int) -> None:
    balancer = make_balancer(policy="adaptive")
    (one,) = balancer.set_endpoints([replace(spec(1), tier=tier)], now=0.0).added
    bring_up(balancer, [one])
    refuse(balancer, balancer.submit(ask(None), now=0.0), 0.0, 5.0)
    assert balancer.submit(ask(), now=1.0).outcome is Outcome.NO_ENDPOINTS
    patient = balancer.submit(ask(None), now=1.0)
    assert patient.state is (TicketState.PLACED if tier == 1 else TicketState.WAITING)
    assert balancer.submit(ask(), now=5.1).state is TicketState.PLACED or tier == 2
    assert patient.outcome is None


def test_who_waits_leaves_as_soon_as_its_last_endpoint_refuses() -> None:
    balancer, running = full()
    waiting, patient = balancer.submit(ask(), now=0.1), balancer.submit(ask(None), now=0.1)
    refuse(balancer, running, 0.2)
    balancer.drain(balancer.endpoints.members().__iter__().__next__().endpoint.uid, draining=False)  # all are looked at
    assert balancer.poll(now=0.2) == [waiting]
    assert (waiting.outcome, patient.state) == (Outcome.NO_ENDPOINTS, TicketState.WAITING)


def two_tiers(**provider: object) -> Balancer:
    """`a1` of tier 1, and a provider."""
    own = EndpointSpec(name="a1", base_url="http://10.0.0.1:8000")
    there = EndpointSpec(name="b1", base_url="https://x.example/v1", tier=2, metrics=None, health=None, models=(MODEL,))
    balancer = make_balancer(policy="adaptive")
    added = balancer.set_endpoints([own, replace(there, **provider)], now=0.0).added  # type: ignore[arg-type]
    bring_up(balancer, [one for one in added if one.tier == 1])
    return balancer


def test_a_higher_tier_goes_before_another_model() -> None:
    balancer = two_tiers()
    refuse(balancer, balancer.submit(ask(None), now=0.0), 0.0)
    ticket = balancer.submit(ask(), now=0.1)
    assert ticket.placed_state.endpoint.name == "b1"
    assert ticket.overflow is not None
    assert ticket.overflow.value == "full"
    refuse(balancer, ticket, 0.2)
    assert balancer.submit(ask(), now=0.3).outcome is Outcome.NO_ENDPOINTS


def test_limits_that_open_too_late_are_a_refusal() -> None:
    """A provider's tokens of the day are used up: without another model that is a 429."""
    balancer = make_balancer(policy="adaptive")
    there = EndpointSpec(name="b1", base_url="https://x.example/v1", metrics=None, health=None, models=(MODEL,))
    balancer.set_endpoints([replace(there, bounds=Bounds(requests_per_minute=1))], now=0.0)
    balancer.submit(ask(None), now=0.0)
    assert balancer.submit(ask(None), now=0.1).outcome is Outcome.SATURATED
    assert balancer.submit(ask(), now=0.1).outcome is Outcome.NO_ENDPOINTS


def flows(in_flight: int | None = None, requests_per_minute: int | None = None) -> FlowsSettings:
    return FlowsSettings(default=FlowSettings(in_flight=in_flight, requests_per_minute=requests_per_minute))


def test_a_wait_for_its_own_flow_does_not_count() -> None:
    """The limit of the wait begins when the flow lets it wait for an endpoint."""
    balancer, _ = full(flows=flows(in_flight=1))
    first, parked = balancer.submit(ask(None, flow="f"), now=0.0), balancer.submit(ask(10.0, flow="f"), now=0.0)
    assert (first.wait, parked.wait) == (Wait.FULL, Wait.FLOW)
    assert balancer.poll(now=15.0) == []
    balancer.close(first, Outcome.CLIENT_CLOSED, now=15.0)
    assert balancer.poll(now=24.9) == []
    assert balancer.next_deadline() == 25.0
    assert balancer.poll(now=25.0) == [parked]
    assert (parked.outcome, parked.refusal) == (Outcome.EXPIRED, None)


def test_a_flows_limit_says_so() -> None:
    balancer, _ = pool_of(1, flows=flows(in_flight=1))
    balancer.submit(ask(), now=0.0)
    parked = balancer.submit(ask(10.0), now=0.0)
    assert balancer.poll(now=30.0) == [parked]
    assert parked.refusal is not None


def test_another_model_is_demanded_once_more_and_no_limit_is_charged_twice() -> None:
    balancer, _ = pool_of(1, flows=flows(requests_per_minute=1), policy="adaptive")
    demand = balancer._placing.advice.demand
    demand.know([MODEL])
    balancer.submit(ask(model="big"), now=0.0)
    ticket = balancer.submit(ask(None, fallback_from="big"), now=0.0, resubmitted=True)
    assert ticket.state is TicketState.PLACED
    assert demand.models[MODEL].arrived == 1
    assert balancer.submit(ask(), now=0.0).outcome is Outcome.RATE_LIMITED
