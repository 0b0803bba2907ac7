# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks: what happens to the address happens to all of them, and the rest to each alone."""

from __future__ import annotations

from dataclasses import replace

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, card, make_balancer, request, seen, show_gauges, spec


def ranked(count: int = 4, *others: int, policy: str = "least-request") -> tuple[Balancer, list[Endpoint]]:
    """One server of so many ranks, and other servers, all up."""
    balancer = make_balancer(policy=policy)
    specs = [replace(spec(1), name=f"e1#{n}", rank=n) for n in range(count)]
    endpoints = balancer.set_endpoints([*specs, *map(spec, others)], now=0.0).added
    bring_up(balancer, [one for one in endpoints if not one.rank])
    return balancer, endpoints


def name_of(ticket: Ticket) -> str:
    assert ticket.state is TicketState.PLACED
    return ticket.placed_state.endpoint.name


def healths(balancer: Balancer, now: float = 1.0) -> dict[str, Health]:
    return {name: one.health for name, one in seen(balancer, now).items()}


def test_one_probe_and_one_list_of_models_are_those_of_all_ranks() -> None:
    balancer, endpoints = ranked()
    assert set(healths(balancer).values()) == {Health.UP}
    assert {name_of(balancer.submit(request(), now=1.0)) for _ in range(4)} == {f"e1#{n}" for n in range(4)}
    for _ in range(3):
        balancer.report_health(endpoints[0].uid, False, "test", now=2.0)
    assert set(healths(balancer).values()) == {Health.DOWN}
    assert [one.endpoint.name for one in balancer.transitions] == [f"e1#{n}" for n in (0, 1, 2, 3)]


def test_a_connection_that_fails_is_no_reason_to_try_another_rank() -> None:
    """And one that cannot be made often enough takes all of them down."""
    balancer, endpoints = ranked(4, 2)
    for _ in range(3):
        ticket = balancer.submit(request(), now=1.0, avoid=frozenset({endpoints[4].uid}))
        failed = ticket.placed_state.endpoint.uid
        verdict = balancer.after_failure(ticket, FailureKind.CONNECT, (), now=1.0, refused=True)
        balancer.close(ticket, verdict.outcome, now=1.0)
        hopeless = balancer.submit(request(), now=1.0, avoid=frozenset({failed, endpoints[4].uid}))
        assert hopeless.state is TicketState.CLOSED, "all that is left are ranks of the same address"
        again = balancer.submit(request(), now=1.0, avoid=frozenset({failed}))
        assert name_of(again) == "e2"
        balancer.close(again, Outcome.COMPLETED, now=1.0)
    assert healths(balancer) == {
        "e1#0": Health.DOWN,
        "e1#1": Health.DOWN,
        "e1#2": Health.DOWN,
        "e1#3": Health.DOWN,
        "e2": Health.UP,
    }


def test_an_error_is_of_its_rank_alone_and_another_rank_is_asked() -> None:
    balancer, endpoints = ranked(2)
    for _ in range(5):
        ticket = balancer.submit(request(), now=1.0, avoid=frozenset({endpoints[1].uid}))
        assert name_of(ticket) == "e1#0"
        verdict = balancer.after_failure(ticket, FailureKind.RESET, (), now=1.0)
        balancer.close(ticket, verdict.outcome, now=1.0)
        again = balancer.submit(request(), now=1.0, avoid=frozenset({endpoints[0].uid}))
        assert name_of(again) == "e1#1"
        balancer.first_byte(again, now=1.0)
        balancer.close(again, Outcome.COMPLETED, now=1.0)
    assert healths(balancer) == {"e1#0": Health.EJECTED, "e1#1": Health.UP}


def test_a_scrape_counts_what_each_rank_has_of_ours_when_it_is_sent() -> None:
    balancer, endpoints = ranked(2)
    tickets = [balancer.submit(request(), now=1.0) for _ in range(4)]
    balancer.scrape_sent(endpoints[0].uid)
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=1.1)
    states = [balancer.endpoints.by_key[one.key] for one in endpoints]
    assert [state.reported.in_flight_at_scrape for state in states] == [2, 2]


def test_a_server_that_is_found_to_have_ranks_goes_on_as_it_was() -> None:
    """No request waits for a health check of what is up; what runs on the server ends as ever."""
    balancer = make_balancer(policy="adaptive")
    (whole,) = balancer.set_endpoints([spec(1)], now=0.0).added
    bring_up(balancer, [whole])
    balancer.report_cache_size(whole.uid, 32_000)
    running = balancer.submit(request(), now=50.0)
    changes = balancer.set_endpoints([replace(spec(1), name=f"e1#{n}", rank=n) for n in range(2)], now=100.0)
    assert (changes.removed, [one.name for one in changes.added]) == ([whole], ["e1#0", "e1#1"])
    assert [one.health for one in seen(balancer, 100.0).values()][:2] == [Health.UP, Health.UP]
    assert {name_of(balancer.submit(request(), now=100.0)) for _ in range(2)} == {"e1#0", "e1#1"}, "no slow start"
    assert balancer.endpoints.by_key[changes.added[1].key].reported.cache_tokens == 32_000
    balancer.first_byte(running, now=101.0)
    balancer.close(running, Outcome.COMPLETED, now=102.0)
    (again,) = balancer.set_endpoints([spec(1)], now=110.0).added
    assert name_of(balancer.submit(request(), now=110.0)) == again.name == "e1"


def test_of_a_server_that_is_down_the_ranks_are_too() -> None:
    balancer = make_balancer()
    (whole,) = balancer.set_endpoints([spec(1)], now=0.0).added
    balancer.report_health(whole.uid, False, "test", now=0.0)
    balancer.set_endpoints([replace(spec(1), name=f"e1#{n}", rank=n) for n in range(2)], now=1.0)
    assert set(healths(balancer).values()) == {Health.DOWN}


def test_a_conversation_returns_to_its_rank() -> None:
    balancer, _ = ranked(4, policy="adaptive")
    where = []
    for turn in range(6):
        for talk in range(8):
            keys = tuple(range(1000 * talk + 1, 1000 * talk + 20 + 10 * turn))
            size = 64 * len(keys) * 4
            asked = InferenceRequest("r", MODEL, False, size, size, block_keys=keys)
            ticket = balancer.submit(asked, now=10.0 * turn + talk)
            where.append((talk, name_of(ticket)))
            balancer.first_byte(ticket, now=10.0 * turn + talk + 0.1)
            balancer.close(ticket, Outcome.COMPLETED, now=10.0 * turn + talk + 0.2)
    assert len(set(where)) == 8, "each on one rank"
    assert len({name for _, name in where}) == 4, "and all ranks have some"


def test_models_that_come_later_are_those_of_all() -> None:
    balancer, endpoints = ranked(2)
    balancer.report_models(endpoints[1].uid, [card(MODEL), card("new", MODEL)])
    assert {name_of(balancer.submit(request("new"), now=1.0)) for _ in range(2)} == {"e1#0", "e1#1"}


def test_gauges_are_of_each() -> None:
    balancer, endpoints = ranked(2)
    show_gauges(balancer, endpoints[0].uid, now=1.0, waiting=9.0)
    show_gauges(balancer, endpoints[1].uid, now=1.0)
    assert {name_of(balancer.submit(request(), now=1.0)) for _ in range(4)} == {"e1#1"}
