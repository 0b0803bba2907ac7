"""How many requests may wait in an engine that runs no more of them."""

from __future__ import annotations

from math import inf

from lbproxy.core.types import InferenceRequest, Outcome, TicketState, Wait
from lbproxy.core.window import FULL_S, LATE_S, LEAST, Window
from tests.support.pool import MODEL, pool_of


def ask(flow: str) -> InferenceRequest:
    """Of twenty tokens."""
    return InferenceRequest(flow, MODEL, True, 80, 80, flow=flow)


def test_nobody_late_means_no_limit() -> None:
    window = Window()
    for n in range(100):
        window.started(n + 1.0, float(n))
    assert not window.is_full(10_000, inf, 100.0)


def test_who_is_late_shows_how_many_it_begins_and_each_in_time_opens_it_by_one() -> None:
    window = Window()
    for n in range(400):
        window.started(9.0, n / 100)
    window.late(4.0)
    size = next(size for size in range(1000) if window.is_full(size, inf, 4.0))
    assert 0.7 * 100 * LATE_S < size < 1.1 * 100 * LATE_S, "of a hundred a second"
    window.started(9.0, 4.01)
    assert not window.is_full(size, inf, 4.01)
    assert not window.is_full(10_000, inf, 4.0 + FULL_S)


def test_an_engine_of_which_nothing_is_known_never_runs_dry() -> None:
    window = Window()
    assert not window.is_full(int(LEAST) - 1, 0.5, 1.0)
    assert window.is_full(int(LEAST), 2.0, 1.0)


def test_requests_of_another_flow_wait_here_while_the_engine_is_full() -> None:
    """Fifty short prompts are no second of prefill; but that nothing begins shows that the engine runs no more."""
    balancer, _ = pool_of(1, policy="adaptive")
    placed = [balancer.submit(ask("heavy"), now=0.0) for _ in range(50)]
    assert {ticket.state for ticket in placed} == {TicketState.PLACED}
    light = balancer.submit(ask("light"), now=5.0)
    assert light.wait is Wait.HELD
    again = balancer.submit(ask("heavy"), now=5.1)
    changed = []
    for n, ticket in enumerate(placed):
        now = 5.2 + n / 1000
        balancer.first_byte(ticket, now=now)
        balancer.close(ticket, Outcome.COMPLETED, now=now)
        changed += balancer.poll(now=now)
    assert changed == [light, again], "first in turn, as the other flow had its share"


def test_a_flow_by_itself_is_held_back_by_prefill_alone() -> None:
    balancer, _ = pool_of(1, policy="adaptive")
    for n in range(50):
        assert balancer.submit(ask("one"), now=n / 10).state is TicketState.PLACED
