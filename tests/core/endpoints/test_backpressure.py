# SPDX-License-Identifier: Apache-2.0
"""Who refuses is left alone for a moment, and is never the reason that nobody is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.backpressure import MAX_HELD_BACK, MAX_S, SUSPECT_AFTER
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, card, make_balancer, pool_of, request, seen, spec

K = FailureKind
NO_BREAKER = BreakerSettings(consecutive_failures=None, success_rate=0.0)


def ask(balancer: Balancer, now: float) -> Ticket:
    return balancer.submit(request(), now=now)


def name(ticket: Ticket) -> str:
    assert ticket.placed_on is not None
    return ticket.placed_on.endpoint.name


def fail_on(balancer: Balancer, victim: str, kind: FailureKind, now: float) -> None:
    """One request that `victim` gets, and fails."""
    tickets: list[Ticket] = []
    while not tickets or name(tickets[-1]) != victim:
        tickets.append(ask(balancer, now))
    balancer.after_failure(tickets[-1], kind, (), now=now)
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=now)


def chosen(balancer: Balancer, now: float, count: int = 12) -> set[str]:
    tickets = [ask(balancer, now) for _ in range(count)]
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=now)
    return {name(ticket) for ticket in tickets}


@pytest.mark.parametrize("kind", [K.BUSY, K.LIMITED])
def test_who_says_not_now_is_left_alone_for_a_second(kind: FailureKind) -> None:
    balancer, _ = pool_of(3, policy="round-robin", breaker=NO_BREAKER)
    fail_on(balancer, "e2", kind, 10.0)
    assert chosen(balancer, 10.0) == chosen(balancer, 10.9) == {"e1", "e3"}
    assert seen(balancer, 10.5)["e2"].backing_off
    assert chosen(balancer, 11.1) == {"e1", "e2", "e3"}
    assert not seen(balancer, 11.1)["e2"].backing_off


def test_what_may_be_the_requests_fault_counts_from_the_third_in_a_row() -> None:
    kind = K.ERROR
    balancer, _ = pool_of(2, policy="round-robin", breaker=NO_BREAKER)
    for _ in range(SUSPECT_AFTER - 1):
        fail_on(balancer, "e1", kind, 0.0)
    assert chosen(balancer, 0.0) == {"e1", "e2"}
    good = next(one for one in (ask(balancer, 0.0), ask(balancer, 0.0)) if name(one) == "e1")
    balancer.first_byte(good, now=0.0)
    fail_on(balancer, "e1", kind, 0.0)
    assert chosen(balancer, 0.0) == {"e1", "e2"}, "a good answer between"
    for _ in range(SUSPECT_AFTER - 1):
        fail_on(balancer, "e1", kind, 0.0)
    assert chosen(balancer, 0.0) == {"e2"}


@pytest.mark.parametrize("kind", [K.BUSY, K.ERROR])
def test_many_that_fail_together_count_once(kind: FailureKind) -> None:
    """A server that refuses fifty requests at once gets some again two seconds later."""
    balancer, _ = pool_of(2, policy="round-robin")
    tickets = [ask(balancer, 0.0) for _ in range(100)]
    for ticket in tickets:
        if name(ticket) == "e1":
            balancer.after_failure(ticket, kind, (), now=0.1)
        balancer.close(ticket, Outcome.COMPLETED, now=0.1)
    assert chosen(balancer, 0.2) == {"e2"}
    assert chosen(balancer, 2.0) == {"e1", "e2"}


@pytest.mark.parametrize("kind", [K.CONNECT, K.TIMEOUT, K.EXHAUSTED, K.GATEWAY, K.LATE, K.RESET])
def test_other_failures_are_for_the_breaker_or_for_us(kind: FailureKind) -> None:
    health = HealthSettings(fall=100)
    balancer, _ = pool_of(2, policy="round-robin", breaker=NO_BREAKER, health=health)
    for _ in range(5):
        fail_on(balancer, "e1", kind, 0.0)
    assert chosen(balancer, 0.0) == {"e1", "e2"}


def test_each_time_it_is_longer_up_to_a_bound() -> None:
    balancer, _ = pool_of(2, policy="round-robin", breaker=NO_BREAKER)
    now = 0.0
    waits = []
    for _ in range(7):
        fail_on(balancer, "e1", K.BUSY, now)
        end = now
        while chosen(balancer, end) == {"e2"}:
            end += 0.25
        waits.append(end - now)
        now = end
    assert waits == [1.0, 2.0, 4.0, 8.0, MAX_S, MAX_S, MAX_S]


def test_when_all_refuse_all_are_asked() -> None:
    balancer, _ = pool_of(2, policy="round-robin", breaker=NO_BREAKER)
    fail_on(balancer, "e1", K.BUSY, 0.0)
    fail_on(balancer, "e2", K.BUSY, 0.0)
    assert chosen(balancer, 0.1) == {"e1", "e2"}


# --- By model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [K.BUSY, K.LIMITED])
def test_only_the_model_is_held_back_that_was_refused(kind: FailureKind) -> None:
    """A server of many models loads, or limits, each apart; an adapter is served by the engine of its base."""
    balancer, endpoints = pool_of(2, policy="round-robin", breaker=NO_BREAKER)
    for one in endpoints:
        balancer.report_models(one.uid, [card(MODEL), card("lora", MODEL), card("other")])
    fail_on(balancer, "e1", kind, 0.0)

    def where(model: str | None, now: float = 0.5) -> set[str]:
        tickets = [balancer.submit(request(model), now=now) for _ in range(6)]
        for ticket in tickets:
            balancer.close(ticket, Outcome.COMPLETED, now=now)
        return {name(ticket) for ticket in tickets}

    assert where(MODEL) == where("lora") == {"e2"}
    assert where("other") == where(None) == {"e1", "e2"}
    assert where(MODEL, 1.1) == {"e1", "e2"}


def test_a_success_of_another_model_says_nothing() -> None:
    balancer, endpoints = pool_of(1, policy="round-robin", breaker=NO_BREAKER)
    balancer.report_models(endpoints[0].uid, [card(MODEL), card("other")])
    (state,) = balancer.endpoints.members()
    fail_on(balancer, "e1", K.BUSY, 0.0)
    for model, refusals in (("other", 1), (MODEL, 0)):
        ticket = balancer.submit(request(model), now=0.1)
        balancer.first_byte(ticket, now=0.1)
        assert state.held_back[MODEL].refusals == refusals


def test_who_waits_for_another_model_does_not_wait_for_the_end_of_it() -> None:
    """Nor does who came first for the model that was refused take the room from it: its turn comes a second later."""
    balancer, endpoints = pool_of(1, policy="adaptive", admission=AdmissionSettings(max_in_flight_per_endpoint=2))
    balancer.report_models(endpoints[0].uid, [card(MODEL), card("other")])
    first, second = (balancer.submit(request(model), now=0.0) for model in (MODEL, "other"))
    refused, waiting = (balancer.submit(request(model), now=0.1) for model in (MODEL, "other"))
    verdict = balancer.after_failure(first, K.BUSY, (), now=0.2)
    balancer.close(first, verdict.outcome, now=0.2)
    balancer.poll(now=0.2)
    assert (refused.state, waiting.placed_at) == (TicketState.WAITING, 0.2)
    balancer.close(second, Outcome.COMPLETED, now=0.3)
    assert balancer.poll(now=0.3) == []
    assert balancer.next_deadline() == pytest.approx(1.2)
    assert balancer.poll(now=1.2) == [refused]
    assert refused.state is TicketState.PLACED


def test_a_provider_gets_other_models_while_it_holds_one_back() -> None:
    """Above tier 1 nothing is sent to it of what it refused: that waits, and is woken in time."""
    balancer = make_balancer(policy="adaptive", breaker=NO_BREAKER)
    (one,) = balancer.set_endpoints([replace(spec(1), tier=2)], now=0.0).added
    bring_up(balancer, [one])
    balancer.report_models(one.uid, [card(MODEL), card("other")])
    refused = balancer.submit(request(), now=0.0)
    balancer.close(refused, balancer.after_failure(refused, K.LIMITED, (), now=0.0, retry_after_s=5.0).outcome, now=0.0)
    waiting, other = balancer.submit(request(), now=1.0), balancer.submit(request("other"), now=1.0)
    assert (waiting.state, other.state) == (TicketState.WAITING, TicketState.PLACED)
    assert balancer.next_deadline() == pytest.approx(5.0)
    assert balancer.poll(now=4.9) == []
    assert balancer.poll(now=5.01) == [waiting]
    assert waiting.state is TicketState.PLACED


def test_names_of_models_that_nobody_lists_are_bounded() -> None:
    balancer, endpoints = pool_of(1, policy="round-robin", breaker=NO_BREAKER)
    balancer.report_models(endpoints[0].uid, None)
    (state,) = balancer.endpoints.members()
    for n in range(MAX_HELD_BACK + 100):
        ticket = balancer.submit(request(f"m{n}"), now=0.0)
        balancer.after_failure(ticket, K.BUSY, (), now=0.0)
        balancer.close(ticket, Outcome.COMPLETED, now=0.0)
    assert len(state.held_back) == MAX_HELD_BACK
    assert state.held_until(f"m{MAX_HELD_BACK + 99}") > 0.0
