# SPDX-License-Identifier: Apache-2.0
"""A model that sleeps, and a second tier that has it too: it is woken for requests that can wait so long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, SleepSpec
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Overflow, Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.sleeping.sleepers import Task
from tests.support.pool import card, spec


class Fleet:
    """One server that sleeps in tier 1, and one of tier 2, both with the model m."""

    def __init__(self, after: float | None, *, timeout: float = 60.0) -> None:
        settings = BalancingSettings(
            admission=AdmissionSettings(queue_timeout=timeout), overflow=OverflowSettings(after=after)
        )
        policy = make_policy(RoutingSettings.model_validate({"policy": "least-request"}))
        self.balancer = Balancer(policy, settings, rng=random.Random(1))
        specs = [replace(spec(0), sleep=SleepSpec()), replace(spec(1), tier=2)]
        self.own, self.other = self.balancer.set_endpoints(specs, now=0.0).added
        for one in (self.own, self.other):
            self.balancer.report_models(one.uid, [card("m")])
            self.balancer.report_health(one.uid, True, "test", now=0.0)
        self.balancer.sleepers.reported(self.own.base_url, True, asked_at=0.0, now=0.0)

    def ask(self, now: float, *, max_tier: int = 9, deadline: float | None = None) -> Ticket:
        request = InferenceRequest("r", "m", deadline=deadline)._replace(max_tier=max_tier)
        return self.balancer.submit(request, now=now)

    def orders(self, now: float) -> list[Task]:
        return [one.task for one in self.balancer.sleepers.decide(now)]

    def wake(self, now: float, takes_s: float) -> None:
        """Learn how long a wake takes."""
        ticket = self.ask(now, max_tier=1)
        assert self.orders(now) == [Task.WAKE]
        self.balancer.sleepers.ended(self.own.base_url, Task.WAKE, None, now=now + takes_s)
        assert self.balancer.poll(now=now + takes_s) == [ticket]
        self.balancer.close(ticket, Outcome.COMPLETED, now=now + takes_s)
        self.balancer.sleepers.reported(self.own.base_url, True, asked_at=now + takes_s + 1, now=now + takes_s + 1)


def place_of(ticket: Ticket) -> Endpoint:
    assert ticket.state is TicketState.PLACED, (ticket.state, ticket.outcome)
    return ticket.placed_state.endpoint


def test_without_a_time_to_overflow_a_sleeping_model_is_waited_for() -> None:
    fleet = Fleet(None)
    ticket = fleet.ask(1.0)
    assert (ticket.state, ticket.wait) == (TicketState.WAITING, Wait.WAKING)
    assert fleet.orders(1.0) == [Task.WAKE]


def test_a_wake_that_is_known_to_take_longer_sends_requests_elsewhere_and_is_made_all_the_same() -> None:
    fleet = Fleet(5.0)
    fleet.wake(1.0, takes_s=20.0)
    ticket = fleet.ask(100.0)
    assert (place_of(ticket), ticket.overflow) == (fleet.other, Overflow.WAIT)
    assert fleet.orders(100.0) == [Task.WAKE], "what comes next is served here"


def test_a_wake_of_unknown_length_is_waited_for_as_long_as_the_settings_say() -> None:
    fleet = Fleet(5.0)
    ticket = fleet.ask(1.0)
    assert ticket.state is TicketState.WAITING
    assert fleet.orders(1.0) == [Task.WAKE]
    assert fleet.balancer.poll(now=5.9) == []
    assert fleet.balancer.next_deadline() == pytest.approx(6.0)
    assert fleet.balancer.poll(now=6.0) == [ticket]
    assert (place_of(ticket), ticket.overflow) == (fleet.other, Overflow.WAIT)


def test_a_wake_in_time_serves_it() -> None:
    fleet = Fleet(5.0)
    ticket = fleet.ask(1.0)
    fleet.orders(1.0)
    fleet.balancer.sleepers.ended(fleet.own.base_url, Task.WAKE, None, now=3.0)
    assert fleet.balancer.poll(now=3.0) == [ticket]
    assert (place_of(ticket), ticket.overflow) == (fleet.own, None)


def test_a_request_that_would_be_refused_for_a_long_wake_overflows() -> None:
    fleet = Fleet(None, timeout=10.0)
    fleet.wake(1.0, takes_s=8.0)
    late = fleet.ask(100.0, deadline=103.0)
    assert (place_of(late), late.overflow) == (fleet.other, Overflow.DEADLINE)


def test_what_may_not_leave_waits_for_the_wake() -> None:
    fleet = Fleet(0.1)
    ticket = fleet.ask(1.0, max_tier=1)
    assert ticket.state is TicketState.WAITING
    assert fleet.balancer.poll(now=30.0) == []
    fleet.balancer.poll(now=61.5)
    assert ticket.outcome in {Outcome.EXPIRED, Outcome.NO_ENDPOINTS}
