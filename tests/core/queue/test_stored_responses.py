# SPDX-License-Identifier: Apache-2.0
"""A stored response has one owner, and what is about it goes there and nowhere else."""

from __future__ import annotations

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.queue import stored_responses
from lbproxy.core.queue.stored_responses import KEPT_S, StoredResponses
from lbproxy.core.queue.ticket import TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, pool_of, request


def about(response_id: str, model: str | None = MODEL) -> InferenceRequest:
    return request(model)._replace(response_id=response_id)


def stored_at(balancer: Balancer, endpoint: Endpoint, response_id: str = "resp_1") -> None:
    balancer.stored_responses.remember(response_id, endpoint.uid, request(), now=0.0)


def test_what_is_about_a_response_goes_to_its_owner_however_busy_that_is() -> None:
    balancer, endpoints = pool_of(4)
    stored_at(balancer, endpoints[2])
    for _ in range(20):
        ticket = balancer.submit(about("resp_1"), now=1.0)
        assert ticket.placed_state.endpoint == endpoints[2]
    assert balancer.submit(about("resp_1", None), now=1.0).placed_state.endpoint == endpoints[2], "a GET names no model"
    assert balancer.submit(request(), now=1.0).placed_state.endpoint != endpoints[2]


def test_nobody_takes_over_a_response_by_its_id() -> None:
    """vLLM takes the id of a response from the request, so that a client can choose another's."""
    balancer, endpoints = pool_of(3)
    stored_at(balancer, endpoints[0])
    stored_at(balancer, endpoints[1])
    assert balancer.submit(about("resp_1"), now=1.0).placed_state.endpoint == endpoints[0]
    found = balancer.stored_responses.find("resp_1", now=1.0)
    assert found is not None
    later = found.until + 1.0
    balancer.stored_responses.remember("resp_1", endpoints[1].uid, request(), now=later)
    assert balancer.submit(about("resp_1"), now=later).placed_state.endpoint == endpoints[1], "it was forgotten"


def test_an_owner_that_drains_still_has_its_responses() -> None:
    balancer, endpoints = pool_of(2)
    stored_at(balancer, endpoints[0])
    balancer.drain(endpoints[0].uid)
    assert balancer.submit(about("resp_1"), now=1.0).placed_state.endpoint == endpoints[0]
    assert balancer.submit(request(), now=1.0).placed_state.endpoint == endpoints[1]


def test_a_response_whose_owner_is_gone_is_not_found() -> None:
    """It was in that process's memory. Another endpoint would say that it never heard of it."""
    balancer, endpoints = pool_of(2)
    stored_at(balancer, endpoints[0])
    for _ in range(3):
        balancer.report_health(endpoints[0].uid, False, "dead", now=1.0)
    ticket = balancer.submit(about("resp_1"), now=2.0)
    assert (ticket.state, ticket.outcome) == (TicketState.CLOSED, Outcome.RESPONSE_NOT_FOUND)
    balancer.set_endpoints([], now=3.0)
    assert balancer.submit(about("resp_1"), now=4.0).outcome is Outcome.RESPONSE_NOT_FOUND


def test_the_first_request_that_finds_its_owner_dead_hears_so_and_goes_nowhere_else() -> None:
    balancer, endpoints = pool_of(3)
    stored_at(balancer, endpoints[0])
    ticket = balancer.submit(about("resp_1"), now=1.0)
    verdict = balancer.after_failure(ticket, FailureKind.CONNECT, (), now=1.1, refused=True)
    assert (verdict.retry, verdict.outcome) == (False, Outcome.RESPONSE_NOT_FOUND)
    busy = balancer.submit(about("resp_1"), now=1.0)
    if busy.state is TicketState.PLACED:
        assert not balancer.after_failure(busy, FailureKind.BUSY, (), now=1.1).retry


def test_an_owner_that_is_ejected_may_come_back_with_its_responses() -> None:
    """So this is no 404, which a client may take for the last word."""
    balancer, endpoints = pool_of(3)
    stored_at(balancer, endpoints[0])
    for n in range(50):
        ticket = balancer.submit(request()._replace(response_id="resp_1"), now=1.0 + 0.01 * n)
        if ticket.state is not TicketState.PLACED:
            break
        balancer.after_failure(ticket, FailureKind.RESET, (), now=1.0 + 0.01 * n)
        balancer.close(ticket, Outcome.UPSTREAM_RESET, now=1.0 + 0.01 * n)
    else:
        raise AssertionError("it is ejected by then")
    assert ticket.outcome is Outcome.NO_ENDPOINTS


def test_a_response_that_nobody_remembers_is_placed_like_any_request() -> None:
    balancer, _ = pool_of(2)
    ticket = balancer.submit(about("resp_unknown"), now=1.0)
    assert ticket.state is TicketState.PLACED
    assert balancer.after_failure(ticket, FailureKind.MISSING, (), now=1.0).retry, "another may have it"


def test_what_is_remembered_is_bounded_in_number_keys_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 10)
    monkeypatch.setattr(stored_responses, "MAX_KEYS", 100)
    book, uid = StoredResponses(), EndpointUid(1)
    for n in range(20):
        book.remember(f"r{n}", uid, request(), now=0.0)
    assert len(book) == 10
    assert book.find("r9", now=0.0) is None
    assert book.find("r10", now=0.0) is not None, "and now it was used last"
    book.remember("r20", uid, request(), now=0.0)
    assert book.find("r10", now=0.0) is not None
    assert book.find("r11", now=0.0) is None
    for n in range(3):
        book.remember(f"long{n}", uid, request()._replace(block_keys=tuple(range(40))), now=0.0)
    assert book.find("long0", now=0.0) is None
    assert len(book) == 2
    book.remember("long2", uid, request()._replace(block_keys=tuple(range(99))), now=0.0)
    assert len(book) == 1, "the keys of the one that it takes the place of do not count any more"
    assert book.find("long2", now=KEPT_S - 1.0) is not None
    assert book.find("long2", now=2 * KEPT_S - 2.0) is not None, "to be asked for is to be used"
    assert book.find("long2", now=4 * KEPT_S) is None
    assert len(book) == 0
