# SPDX-License-Identifier: Apache-2.0
"""Requests of a higher priority while endpoints are full: what they leave goes to less important ones.

A new pool assumes .1 ms a token, so an endpoint is full with 2,500 tokens of prefill (a quarter of a second).
"""

from __future__ import annotations

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, card, pool_of

STREAMS = 60
"""At the second endpoint: each has to wait for a prefill there, which is part of its price."""


def ask(
    tokens: int, priority: int = 0, keys: tuple[int, ...] = (), *, flow: str = "a", model: str = MODEL
) -> InferenceRequest:
    return InferenceRequest("r", model, True, 4 * tokens, 4 * tokens, keys, None, priority, flow=flow)


def with_streams(balancer: Balancer, endpoints: list[Endpoint]) -> Ticket:
    """The second endpoint has many streams, and the first a long prefill: its ticket."""
    first, second = endpoints
    balancer.drain(first.uid)
    for _ in range(STREAMS):
        balancer.first_byte(balancer.submit(ask(20), now=0.0), now=0.01)
    balancer.drain(first.uid, draining=False)
    balancer.drain(second.uid)
    prefill = balancer.submit(ask(6000), now=1.0)
    balancer.drain(second.uid, draining=False)
    assert prefill.placed_state.endpoint is first
    return prefill


def with_a_busy_endpoint() -> tuple[Balancer, list[Endpoint], Ticket]:
    balancer, endpoints = pool_of(2, policy="adaptive")
    return balancer, endpoints, with_streams(balancer, endpoints)


def with_a_cached_prompt() -> tuple[Balancer, list[Endpoint], Ticket, tuple[int, ...]]:
    """The first endpoint has it in its cache, and a long prefill: the ticket, and the prompt."""
    balancer, endpoints, before = with_a_busy_endpoint()
    keys = tuple(range(1, 41))
    balancer.close(before, Outcome.COMPLETED, now=1.0)
    balancer.drain(endpoints[1].uid)
    cached = balancer.submit(ask(10_000, 1, keys), now=1.0)
    balancer.first_byte(cached, now=2.0)
    balancer.close(cached, Outcome.COMPLETED, now=2.0)
    prefill = balancer.submit(ask(6000), now=2.0)
    balancer.drain(endpoints[1].uid, draining=False)
    return balancer, endpoints, prefill, keys


def serial(*tickets: Ticket) -> None:
    """Their endpoints were seen to compute one prefill after the other."""
    for ticket in tickets:
        ticket.placed_state.load.room.lanes.queue_reported(1.0, 1, 2.0)


def fill(balancer: Balancer, endpoints: list[Endpoint], tokens: int = 3000) -> Ticket:
    """More than a quarter of a second of prefill for the second endpoint."""
    balancer.drain(endpoints[0].uid)
    prefill = balancer.submit(ask(tokens), now=1.0)
    balancer.drain(endpoints[0].uid, draining=False)
    assert prefill.placed_state.endpoint is endpoints[1]
    return prefill


def test_alone_a_request_waits_where_it_costs_others_less() -> None:
    balancer, endpoints, _ = with_a_busy_endpoint()
    waits = balancer.submit(ask(2000, 1), now=1.0)
    balancer.poll(now=1.0)
    assert waits.state is TicketState.WAITING
    assert waits.best is not None
    assert waits.best.endpoint is endpoints[0]


def test_a_less_important_request_does_not_take_the_endpoint_that_another_left() -> None:
    balancer, endpoints, _ = with_a_busy_endpoint()
    prefill = fill(balancer, endpoints)
    high, low = balancer.submit(ask(2000, 1), now=1.0), balancer.submit(ask(2000), now=1.0)
    assert high.state is low.state is TicketState.WAITING
    balancer.first_byte(prefill, now=1.2)
    assert balancer.poll(now=1.2) == [high]
    assert high.placed_state.endpoint is endpoints[1]


@pytest.mark.parametrize("flow", ["a", "b"])
def test_nor_does_a_request_of_another_flow_in_its_turn(flow: str) -> None:
    balancer, endpoints, _ = with_a_busy_endpoint()
    prefill = fill(balancer, endpoints)
    first = balancer.submit(ask(2000, flow="a"), now=1.0)
    balancer.submit(ask(2000, flow=flow), now=1.0)
    balancer.first_byte(prefill, now=1.2)
    assert (first in balancer.poll(now=1.2)) == (flow == "b"), "of one flow both wait where they cost less"


def test_what_waits_for_another_model_takes_nothing() -> None:
    balancer, endpoints = pool_of(3, policy="adaptive")
    balancer.report_models(endpoints[2].uid, [card("other")])
    with_streams(balancer, endpoints[:2])
    balancer.submit(ask(60_000, model="other"), now=1.0)
    low = balancer.submit(ask(100, model="other"), now=1.0)
    prefill = fill(balancer, endpoints)
    high = balancer.submit(ask(2000, 1), now=1.0)
    balancer.first_byte(prefill, now=1.2)
    balancer.poll(now=1.2)
    assert high.state is low.state is TicketState.WAITING


def test_one_of_many_that_may_move_gets_its_turn() -> None:
    """Six of a priority are priced at a time. The others follow 50 ms later, although lower ones wait all the time."""
    balancer, endpoints, prefill, keys = with_a_cached_prompt()
    prefill_there = fill(balancer, endpoints, 20_000)
    serial(prefill, prefill_there)
    cached = [balancer.submit(ask(10_000, 1, keys), now=2.0) for _ in range(8)]
    odd = balancer.submit(ask(400, 1), now=2.0)
    low = balancer.submit(ask(10_000, -1, keys), now=2.0)
    balancer.first_byte(prefill_there, now=2.06)
    for n in range(6):
        balancer.poll(now=2.06 + n / 100)
        balancer.report_scrape(endpoints[1].uid, LoadMetrics(scraped_at=2.06 + n / 100))
    assert odd.placed_on is not None
    assert odd.placed_on.endpoint is endpoints[1]
    assert low.state is TicketState.WAITING
    assert all(one.state is TicketState.WAITING for one in cached)
    assert prefill.state is TicketState.PLACED


def test_it_still_waits_where_its_own_first_token_comes_sooner() -> None:
    balancer, endpoints, cached, keys = with_a_cached_prompt()
    prefill = fill(balancer, endpoints, 8000)
    serial(prefill, cached)
    high, low = balancer.submit(ask(10_000, 1, keys), now=2.0), balancer.submit(ask(2), now=2.0)
    balancer.first_byte(prefill, now=2.1)
    balancer.poll(now=2.1)
    assert high.state is TicketState.WAITING
    assert high.best is not None
    assert high.best.endpoint is endpoints[0], "a second of prefill at the other, and a third of one to wait here"
    assert low.placed_on is not None
    assert low.placed_on.endpoint is endpoints[1]


def test_what_waits_for_another_model_takes_no_turn() -> None:
    """Six of each of two priorities were considered for an endpoint that does not serve their model, at each event,
    while it stood idle and a request that it could serve waited for another one."""
    balancer, endpoints = pool_of(3, policy="adaptive")
    balancer.report_models(endpoints[0].uid, [card("other")])
    balancer.submit(ask(400_000, model="other"), now=1.0)
    long, _ = (balancer.submit(ask(tokens), now=1.0) for tokens in (150_000, 100_000))
    idle = long.placed_state.endpoint
    for priority in (2, 1):
        for _ in range(6):
            balancer.submit(ask(1000, priority, model="other"), now=1.0)
    waits = balancer.submit(ask(45_000), now=1.01)
    assert waits.best is not None
    assert waits.best.endpoint is not idle
    balancer.close(long, Outcome.CLIENT_CLOSED, now=1.1)
    balancer.poll(now=1.1)
    for now in (1.2, 1.3):
        balancer.report_scrape(idle.uid, LoadMetrics(scraped_at=now))
        balancer.poll(now=now)
    assert waits.placed_on is not None
    assert waits.placed_on.endpoint is idle
