# SPDX-License-Identifier: Apache-2.0
"""When the newest requests go first."""

from __future__ import annotations

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.limits import Limits
from lbproxy.core.queue.queue_overload import LASTING_S, MIN_PACE_SAMPLES, QueueOverload
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL


def of_one_a_second() -> QueueOverload:
    overload = QueueOverload()
    for n in range(MIN_PACE_SAMPLES):
        overload.observe(1, 5.0, float(n))
        overload.request_left()
    overload.observe(0, 5.0, float(MIN_PACE_SAMPLES))
    return overload


def test_the_wait_is_told_by_the_pace_at_which_requests_leave() -> None:
    overload = of_one_a_second()
    assert overload.wait_s(100) == pytest.approx(100.0)
    overload.observe(1, 5.0, 3600.0)
    assert overload.wait_s(100) == pytest.approx(100.0), "an hour in which nobody waited"
    overload.observe(1, 5.0, 3600.0 + MIN_PACE_SAMPLES)
    assert overload.wait_s(100) == pytest.approx(200.0), "as long again in which nobody left"
    assert QueueOverload().wait_s(100) == 0.0, "nobody knows"


def test_a_queue_that_stays_long_is_overload_until_it_is_short() -> None:
    overload = of_one_a_second()
    now = 100.0

    def observe(waiting: int, after: float) -> bool:
        nonlocal now
        now += after
        for _ in range(round(after)):
            overload.request_left()
        overload.observe(waiting, 5.0, now)
        return overload.is_lasting

    assert not observe(8, 0.0)
    assert not observe(8, LASTING_S - 1)
    assert not observe(4, 2.0)
    assert not observe(8, 1.0), "it was short once"
    assert not observe(8, LASTING_S - 1)
    assert observe(8, 1.0)
    assert observe(4, 1.0), "those that waited in vain are no reason to end it"
    assert not observe(1, 1.0)


def overloaded(queue: WaitingQueue, timely: int = 0) -> None:
    """From now on, with 5 s as what is too late."""
    queue.overload.is_lasting, queue.overload.late_s, queue.overload.timely = True, 5.0, timely


def waiting(queue: WaitingQueue, flow: Flow, name: str, at: float, priority: int = 0) -> Ticket:
    request = InferenceRequest(name, MODEL, True, 100, 400, (), None, priority)
    ticket = Ticket(request, at, at + 30.0, frozenset())
    ticket.flow = flow
    queue.push(ticket)
    return ticket


def test_under_overload_no_flow_has_a_turn_with_what_waited_in_vain_before_what_is_in_time() -> None:
    flows, queue = Flows(FlowsSettings(), Limits()), WaitingQueue(AdmissionSettings())
    quiet, busy = flows.of("quiet", 0.0), flows.of("busy", 0.0)
    waiting(queue, quiet, "old", 0.0)
    for n in range(4):
        waiting(queue, busy, f"b{n}", 6.0 + n)
    waiting(queue, quiet, "new", 9.5)

    def order() -> list[str]:
        return [ticket.request.id for ticket in queue.in_order(lambda _: 100.0, flows, 10.0)]

    assert order()[0] == "old"
    overloaded(queue)
    assert order()[0] in {"new", "b3"}
    assert order()[-1] == "old"


def test_only_what_is_too_much_for_the_endpoints_is_served_newest_first() -> None:
    """A priority whose requests, with those above it, are few has no overload: its oldest are not served last."""
    flows, queue = Flows(FlowsSettings(), Limits()), WaitingQueue(AdmissionSettings())
    flow = flows.of("one", 0.0)
    for n in range(3):
        waiting(queue, flow, f"high{n}", 1.0 + n, 1)
        waiting(queue, flow, f"low{n}", 1.0 + n, -1)

    def order() -> list[str]:
        return [ticket.request.id for ticket in queue.in_order(lambda _: 100.0, flows, 10.0)]

    in_age = ["high0", "high1", "high2", "low0", "low1", "low2"]
    assert order() == in_age
    overloaded(queue, timely=3)
    assert [queue.overloaded(priority) for priority in (1, 0, -1)] == [False, False, True]
    assert order() == [*in_age[:3], "low2", "low1", "low0"]
    new = Ticket(InferenceRequest("new", MODEL, True, 100, 400, (), None, 1), 10.0, 40.0, frozenset())
    new.flow = flow
    assert queue.share_before(new) == pytest.approx(3 / 6), "behind those of its priority, which are not overtaken"
    overloaded(queue, timely=2)
    assert order()[:3] == ["high2", "high1", "high0"]
    assert queue.share_before(new) == pytest.approx(1 / 6)


def test_so_many_are_in_time_as_leave_within_half_of_what_is_too_long() -> None:
    assert of_one_a_second().in_time(8.0) == 4
    assert QueueOverload().in_time(8.0) == 0


def test_a_flow_with_few_requests_keeps_its_turns_for_those_that_waited_long() -> None:
    """It is not what overloads the endpoints: after a time in which nothing could be placed, its requests are next."""
    flows, queue = Flows(FlowsSettings(), Limits()), WaitingQueue(AdmissionSettings())
    light, heavy = flows.of("light", 0.0), flows.of("heavy", 0.0)
    waiting(queue, light, "old", 0.0)
    waiting(queue, light, "new", 9.0)
    for n in range(20):
        waiting(queue, heavy, f"h{n}", 8.0 + n / 100)
    overloaded(queue)
    order = [ticket.request.id for ticket in queue.in_order(lambda _: 100.0, flows, 10.0)]
    assert order.index("old") < order.index("new") < 5
    for n in range(20):  # they wait for their own limits, and take no part in it
        other = flows.of(f"limited{n}", 0.0)
        parked = Ticket(InferenceRequest("p", MODEL, True, 100, 400), 0.0, 30.0, frozenset())
        parked.flow = other
        queue.push(parked, parked=True)
    assert [ticket.request.id for ticket in queue.in_order(lambda _: 100.0, flows, 10.0)] == order
