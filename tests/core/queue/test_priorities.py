# SPDX-License-Identifier: Apache-2.0
"""Requests of a higher priority while endpoints are full: what they leave goes to less important ones.

A new pool assumes .1 ms a token, so an endpoint is full with 2,500 tokens of prefill (a quarter of a second).
"""

from __future__ import annotations

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, pool_of

STREAMS = 60
"""At the second endpoint: each has to wait for a prefill there, which is part of its price."""


def ask(tokens: int, priority: int = 0, keys: tuple[int, ...] = ()) -> InferenceRequest:
    return InferenceRequest("r", MODEL, True, 4 * tokens, 4 * tokens, keys, None, priority)


def with_a_busy_endpoint() -> tuple[Balancer, list[Endpoint], Ticket]:
    """Two endpoints, of which the second has many streams, and the first a long prefill: the ticket."""
    balancer, endpoints = pool_of(2, policy="adaptive")
    first, second = endpoints
    balancer.drain(first.uid)
    for _ in range(STREAMS):
        balancer.first_byte(balancer.submit(ask(20), now=0.0), now=0.01)
    balancer.drain(first.uid, draining=False)
    balancer.drain(second.uid)
    prefill = balancer.submit(ask(6000), now=1.0)
    balancer.drain(second.uid, draining=False)
    assert prefill.placed_state.endpoint is first
    return balancer, endpoints, prefill


def test_alone_a_request_waits_where_it_costs_others_less() -> None:
    balancer, endpoints, _ = with_a_busy_endpoint()
    waits = balancer.submit(ask(2000, 1), now=1.0)
    balancer.poll(now=1.0)
    assert waits.state is TicketState.WAITING
    assert waits.best is not None
    assert waits.best.endpoint is endpoints[0]


def test_a_less_important_request_does_not_take_the_endpoint_that_another_left() -> None:
    balancer, endpoints, _ = with_a_busy_endpoint()
    high = balancer.submit(ask(2000, 1), now=1.0)
    low = balancer.submit(ask(2), now=1.1)
    assert high in balancer.poll(now=1.1)
    assert high.placed_state.endpoint is endpoints[1], "it would have been the other's"
    assert low.state in {TicketState.PLACED, TicketState.WAITING}


def test_it_still_waits_where_its_own_first_token_comes_sooner() -> None:
    balancer, endpoints, prefill = with_a_busy_endpoint()
    keys = tuple(range(1, 41))
    balancer.close(prefill, Outcome.COMPLETED, now=1.0)
    balancer.drain(endpoints[1].uid)
    cached = balancer.submit(ask(10_000, 1, keys), now=1.0)
    balancer.first_byte(cached, now=2.0)
    balancer.close(cached, Outcome.COMPLETED, now=2.0)
    balancer.submit(ask(6000), now=2.0)
    balancer.drain(endpoints[1].uid, draining=False)
    high = balancer.submit(ask(10_000, 1, keys), now=2.0)
    low = balancer.submit(ask(2), now=2.1)
    balancer.poll(now=2.1)
    assert high.state is TicketState.WAITING
    assert high.best is not None
    assert high.best.endpoint is endpoints[0], "a second of prefill at the other, and a third of one to wait here"
    assert low.placed_on is not None
    assert low.placed_on.endpoint is endpoints[1]
