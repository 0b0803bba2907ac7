# SPDX-License-Identifier: Apache-2.0
"""Servers that sleep: what is woken and put to sleep, and that requests wait for it instead of being lost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.config.sleep import HostSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import ColdStart, Endpoint, EndpointUid, SleepSpec
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import MAX_REFUSED, Order, Task
from tests.support.pool import card, spec

HOST = SleepSpec(host="box")


class Fleet:
    """A balancer over servers that may sleep, each with the model of its own name unless it is said."""

    def __init__(
        self,
        *models: str,
        sleep: SleepSpec | None = None,
        asleep: Iterable[int] = (),
        min_awake: float = 10.0,
        timeout: float = 1000.0,
        policy: str = "least-request",
    ) -> None:
        settings = BalancingSettings(
            admission=AdmissionSettings(queue_timeout=timeout), hosts={"box": HostSettings(min_awake=min_awake)}
        )
        routing = RoutingSettings.model_validate({"policy": policy})
        self.balancer = Balancer(make_policy(routing), settings, rng=random.Random(1))
        self.sleepers = self.balancer.sleepers
        sleep = sleep or SleepSpec()
        startable = sleep.cold_start is not None
        specs = [
            replace(spec(n), sleep=sleep, models=(model,) if startable else None) for n, model in enumerate(models)
        ]
        self.endpoints = self.balancer.set_endpoints(specs, now=0.0).added
        for n, (one, model) in enumerate(zip(self.endpoints, models, strict=True)):
            self.balancer.report_models(one.uid, [card(model)])
            if not startable:
                self.balancer.report_health(one.uid, True, "test", now=0.0)
                self.say(n, n in set(asleep), now=0.0)
        self.ranks: list[Endpoint] = []
        self.sleepers.transitions.clear()

    def say(self, n: int, asleep: bool | None, *, now: float) -> None:
        self.sleepers.reported(self.endpoints[n].base_url, asleep, asked_at=now, now=now)

    def ask(self, model: str, *, now: float, deadline: float | None = None) -> Ticket:
        return self.balancer.submit(InferenceRequest("r", model, deadline=deadline), now=now)

    def orders(self, now: float) -> list[tuple[str, int]]:
        found = self.sleepers.decide(now)
        return [(one.task.value, self.number(one)) for one in found]

    def number(self, order: Order) -> int:
        return [one.base_url for one in self.endpoints].index(order.url)

    def end(self, n: int, task: Task, problem: str | None = None, *, now: float) -> None:
        self.sleepers.ended(self.endpoints[n].base_url, task, problem, now=now)

    def phase(self, n: int, now: float = 0.0) -> Phase:
        return self.sleepers.snapshot(now)[self.endpoints[n].uid].phase

    def close(self, ticket: Ticket, *, now: float) -> None:
        self.balancer.close(ticket, Outcome.COMPLETED, now=now)

    def wake(self, n: int, *, now: float, takes: float = 3.0) -> None:
        """Have a server woken by a request that ends at once."""
        ticket = self.ask(f"m{n}", now=now)
        assert self.orders(now) == [("wake", n)]
        self.end(n, Task.WAKE, now=now + takes)
        self.balancer.poll(now=now + takes)
        self.close(ticket, now=now + takes)


def place_of(ticket: Ticket) -> Endpoint:
    assert ticket.state is TicketState.PLACED, (ticket.state, ticket.outcome)
    return ticket.placed_state.endpoint


def test_a_request_for_a_sleeping_model_waits_and_wakes_it() -> None:
    fleet = Fleet("m0", asleep=[0])
    ticket = fleet.ask("m0", now=1.0)
    assert (ticket.state, ticket.wait) == (TicketState.WAITING, Wait.WAKING)
    assert fleet.orders(1.0) == [("wake", 0)]
    assert fleet.phase(0) is Phase.WAKING
    assert fleet.balancer.poll(now=2.0) == []
    fleet.end(0, Task.WAKE, now=4.0)
    assert fleet.balancer.poll(now=4.0) == [ticket]
    assert place_of(ticket) == fleet.endpoints[0]


def test_fifty_requests_wake_it_once() -> None:
    fleet = Fleet("m0", "m0", asleep=[0, 1])
    tickets = [fleet.ask("m0", now=1.0) for _ in range(50)]
    assert [fleet.orders(1.0 + n / 10) for n in range(20)] == [[("wake", 0)], *[[]] * 19]
    fleet.end(0, Task.WAKE, now=4.0)
    placed = [*fleet.balancer.poll(now=4.0), *fleet.balancer.poll(now=4.0)]  # some at a time
    assert len(placed) == 50
    assert {place_of(ticket).name for ticket in tickets} == {"e0"}
    assert fleet.orders(4.1) == []
    assert fleet.sleepers.waited == 50


@pytest.mark.parametrize("problem", [None, "refused"])
def test_a_server_whose_ranks_are_found_while_it_wakes_goes_on_as_before(problem: str | None) -> None:
    """The wake ended at an endpoint that was no more: it never slept again, or was woken for ever."""
    fleet = Fleet("m0", asleep=[0], sleep=SleepSpec(after_s=60.0))
    ticket = fleet.ask("m0", now=1.0)
    assert fleet.orders(1.0) == [("wake", 0)]
    server = replace(spec(0), sleep=SleepSpec(after_s=60.0))
    ranks = [replace(server, name=f"e0#{n}", rank=n) for n in range(2)]
    fleet.ranks = fleet.balancer.set_endpoints(ranks, now=2.0).added
    fleet.end(0, Task.WAKE, problem, now=4.0)
    if problem is not None:
        assert fleet.sleepers.phase_of(fleet.ranks[0].uid) is Phase.ASLEEP
        assert fleet.orders(10.0) == [("wake", 0)], "after a back-off"
        fleet.end(0, Task.WAKE, now=12.0)
    assert fleet.balancer.poll(now=12.0) == [ticket]
    assert place_of(ticket) in fleet.ranks
    fleet.close(ticket, now=13.0)
    assert fleet.orders(14.0) == []
    assert fleet.orders(100.0) == [("sleep", 0)]
    fleet.end(0, Task.SLEEP, now=101.0)
    assert fleet.sleepers.phase_of(fleet.ranks[0].uid) is Phase.ASLEEP


def test_a_sleeping_model_is_known_listed_and_no_other_is() -> None:
    fleet = Fleet("m0", asleep=[0])
    assert [one.id for one in fleet.balancer.endpoints.serving.model_cards()] == ["m0"]
    assert fleet.ask("nope", now=1.0).outcome is Outcome.MODEL_NOT_FOUND
    assert fleet.balancer.endpoints.any_up()
    assert fleet.orders(1.0) == []


def test_no_request_goes_to_a_server_that_did_not_say_yet_whether_it_sleeps() -> None:
    fleet = Fleet("m0")
    balancer = fleet.balancer
    balancer.set_endpoints([], now=0.0)
    one = balancer.set_endpoints([replace(spec(7), sleep=SleepSpec())], now=0.0).added[0]
    balancer.report_models(one.uid, [card("m0")])
    balancer.report_health(one.uid, True, "test", now=0.0)
    ticket = fleet.ask("m0", now=0.0)
    assert ticket.state is TicketState.WAITING
    fleet.sleepers.decide(0.1)
    fleet.sleepers.reported(one.base_url, False, asked_at=0.1, now=0.2)
    assert balancer.poll(now=0.2) == [ticket]


def test_a_server_that_cannot_say_or_never_does_is_taken_to_be_awake() -> None:
    """As every server without `wake`: an engine without sleep mode, or a misspelt setting, must not stop it."""
    fleet = Fleet("m0", "m1")
    balancer = fleet.balancer
    balancer.set_endpoints([], now=0.0)
    specs = [replace(spec(n), sleep=SleepSpec()) for n in (7, 8)]
    mute, silent = balancer.set_endpoints(specs, now=0.0).added
    for one in (mute, silent):
        balancer.report_models(one.uid, [card(one.name)])
        balancer.report_health(one.uid, True, "test", now=0.0)
    fleet.sleepers.reported(mute.base_url, None, asked_at=0.1, now=0.1)
    assert fleet.ask("e7", now=0.2).state is TicketState.PLACED
    assert fleet.ask("e8", now=0.2).state is TicketState.WAITING
    assert fleet.sleepers.decide(9.0) == []
    assert balancer.poll(now=9.0) == []
    fleet.sleepers.decide(11.0)
    assert len(balancer.poll(now=11.0)) == 1


def test_what_the_engine_says_overrules_what_is_believed() -> None:
    """Somebody else wakes servers and puts them to sleep."""
    fleet = Fleet("m0")
    fleet.say(0, True, now=1.0)
    assert fleet.ask("m0", now=1.0).state is TicketState.WAITING
    fleet.say(0, False, now=2.0)
    assert len(fleet.balancer.poll(now=2.0)) == 1


def test_a_report_that_is_older_than_a_wake_is_not_believed() -> None:
    fleet = Fleet("m0", asleep=[0])
    ticket = fleet.ask("m0", now=1.0)
    fleet.orders(1.0)
    fleet.end(0, Task.WAKE, now=4.0)
    fleet.sleepers.reported(fleet.endpoints[0].base_url, True, asked_at=3.9, now=4.1)
    assert fleet.phase(0) is Phase.AWAKE
    fleet.balancer.poll(now=4.1)
    assert place_of(ticket) == fleet.endpoints[0]


def test_a_wake_that_fails_is_tried_again_after_a_back_off() -> None:
    fleet = Fleet("m0", asleep=[0])
    ticket = fleet.ask("m0", now=1.0)
    fleet.orders(1.0)
    fleet.end(0, Task.WAKE, "status 500", now=2.0)
    assert fleet.orders(3.0) == []
    assert fleet.orders(7.1) == [("wake", 0)]
    fleet.end(0, Task.WAKE, "status 500", now=8.0)
    assert fleet.orders(13.1) == []
    assert fleet.orders(18.1) == [("wake", 0)]
    fleet.end(0, Task.WAKE, now=20.0)
    assert fleet.balancer.poll(now=20.0) == [ticket]


def test_another_server_of_the_model_is_woken_if_one_fails_or_is_late() -> None:
    for problem in ("status 500", None):
        fleet = Fleet("m0", "m0", asleep=[0, 1])
        fleet.ask("m0", now=1.0)
        assert fleet.orders(1.0) == [("wake", 0)]
        if problem is not None:
            fleet.end(0, Task.WAKE, problem, now=2.0)
            assert fleet.orders(2.1) == [("wake", 1)]
        else:
            assert fleet.orders(60.0) == []
            assert fleet.orders(61.1) == [("wake", 1)]


def test_a_wake_that_lasts_longer_than_predicted_refuses_nobody() -> None:
    fleet = Fleet("m0", asleep=[0], timeout=30.0)
    fleet.wake(0, now=1.0, takes=3.0)
    fleet.say(0, True, now=5.0)
    first = fleet.ask("m0", now=6.0)
    fleet.orders(6.0)
    later = fleet.ask("m0", now=20.0)
    assert (first.state, later.state) == (TicketState.WAITING, TicketState.WAITING)


@pytest.mark.parametrize("deadline", [None, 8.0])
def test_a_request_that_a_wake_would_make_late_is_refused_at_once_and_wakes_it_all_the_same(
    deadline: float | None,
) -> None:
    """Or nothing would ever wake it: every client is refused, and comes again."""
    fleet = Fleet("m0", asleep=[0], timeout=30.0)
    fleet.wake(0, now=1.0, takes=29.0 if deadline is None else 4.0)
    fleet.say(0, True, now=31.0)
    now = 31.0
    fleet.balancer.reconfigure(None, BalancingSettings(admission=AdmissionSettings(queue_timeout=20.0)), now=now)
    refused = fleet.ask("m0", now=now, deadline=None if deadline is None else now + 3.0)
    assert refused.outcome is (Outcome.EXPIRED if deadline is None else Outcome.TOO_LATE)
    assert refused.retry_after_s == pytest.approx(29.0 if deadline is None else 4.0)
    assert fleet.orders(now) == [("wake", 0)]


def test_a_wait_without_a_prediction_ends_with_the_queue_timeout() -> None:
    fleet = Fleet("m0", asleep=[0], timeout=30.0)
    ticket = fleet.ask("m0", now=1.0)
    assert fleet.balancer.poll(now=31.5) == [ticket]
    assert ticket.outcome is Outcome.EXPIRED


def test_idle_servers_are_put_to_sleep_and_busy_ones_are_not() -> None:
    fleet = Fleet("m0", "m1", sleep=SleepSpec(after_s=60.0))
    ticket = fleet.ask("m0", now=1.0)
    for now in (1.0, 30.0, 61.0):
        assert fleet.orders(now) == ([] if now < 61.0 else [("sleep", 1)])
    fleet.end(1, Task.SLEEP, now=62.0)
    assert fleet.phase(1) is Phase.ASLEEP
    fleet.close(ticket, now=63.0)
    assert fleet.orders(63.0) == []
    assert fleet.orders(122.0) == []
    assert fleet.orders(124.0) == [("sleep", 0)]


def test_a_request_between_two_looks_counts() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(after_s=60.0))
    fleet.orders(1.0)
    fleet.close(fleet.ask("m0", now=50.0), now=50.01)
    assert fleet.orders(61.5) == []


def test_what_others_run_there_is_not_idle() -> None:
    """Engines overrule: another lbproxy, or a client of its own."""
    fleet = Fleet("m0", sleep=SleepSpec(after_s=60.0))
    uid = fleet.endpoints[0].uid
    for now in range(1, 200, 2):
        fleet.balancer.scrape_sent(uid)
        fleet.balancer.report_scrape(uid, LoadMetrics(scraped_at=float(now), running=float(now < 100), waiting=0.0))
        assert fleet.orders(float(now)) == ([] if now < 160 else [("sleep", 0)])
        if now >= 160:
            break


def test_their_requests_between_two_scrapes_count() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(after_s=10.0))
    uid = fleet.endpoints[0].uid
    for now in range(1, 50, 2):
        fleet.balancer.report_scrape(uid, LoadMetrics(scraped_at=float(now), running=0.0, waiting=0.0, work=float(now)))
        assert fleet.orders(float(now)) == []


def test_a_request_that_arrives_while_it_falls_asleep_waits_and_wakes_it_again() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(after_s=60.0))
    assert fleet.orders(0.5) == []
    assert fleet.orders(61.0) == [("sleep", 0)]
    ticket = fleet.ask("m0", now=61.5)
    assert ticket.state is TicketState.WAITING
    assert fleet.orders(61.6) == []
    fleet.end(0, Task.SLEEP, now=62.0)
    assert fleet.orders(62.1) == [("wake", 0)]
    fleet.end(0, Task.WAKE, now=65.0)
    assert fleet.balancer.poll(now=65.0) == [ticket]


def test_a_swap_drains_sleeps_and_then_wakes() -> None:
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[1])
    running = fleet.ask("m0", now=0.5)
    waiting = fleet.ask("m1", now=1.0)
    assert fleet.orders(1.0) == []  # it has requests, and min_awake is not over
    assert fleet.orders(10.1) == []
    assert fleet.phase(0) is Phase.DRAINING
    late = fleet.ask("m0", now=10.2)
    assert late.state is TicketState.WAITING
    assert fleet.orders(15.0) == []  # in flight
    fleet.close(running, now=16.0)
    assert fleet.orders(16.0) == [("sleep", 0)]
    fleet.end(0, Task.SLEEP, now=17.0)
    assert fleet.orders(17.0) == [("wake", 1)]
    fleet.end(1, Task.WAKE, now=20.0)
    assert fleet.balancer.poll(now=20.0) == [waiting]
    fleet.close(waiting, now=20.5)
    assert fleet.orders(20.6) == []  # not idle for long enough
    assert fleet.orders(22.0) == []
    assert fleet.orders(22.0) == [("sleep", 1)]
    fleet.end(1, Task.SLEEP, now=23.0)
    assert fleet.orders(23.0) == [("wake", 0)]
    fleet.end(0, Task.WAKE, now=26.0)
    assert fleet.balancer.poll(now=26.0) == [late]


def test_a_server_that_drains_for_another_is_kept_if_nobody_waits_for_that_any_more() -> None:
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[1])
    fleet.ask("m0", now=0.5)
    waiting = fleet.ask("m1", now=1.0)
    fleet.orders(1.0)
    fleet.orders(11.0)
    assert fleet.phase(0) is Phase.DRAINING
    fleet.balancer.close(waiting, Outcome.CLIENT_CLOSED, now=12.0)
    held = fleet.ask("m0", now=12.0)
    fleet.orders(12.1)
    assert fleet.phase(0) is Phase.AWAKE
    assert fleet.balancer.poll(now=12.1) == [held]


def test_what_runs_for_too_long_does_not_keep_the_others_waiting_for_ever() -> None:
    """A WebSocket may stay open for days: the engine finishes what it computes before it sleeps."""
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[1])
    fleet.ask("m0", now=0.5)
    fleet.ask("m1", now=1.0)
    fleet.orders(1.0)
    fleet.orders(11.0)
    assert fleet.orders(130.0) == []
    assert fleet.orders(131.5) == [("sleep", 0)]


def test_a_server_that_somebody_else_woke_takes_the_place_of_its_host() -> None:
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[0, 1])
    fleet.say(1, False, now=1.0)
    fleet.ask("m1", now=1.5)
    waiting = fleet.ask("m0", now=2.0)
    assert fleet.orders(2.0) == []
    assert fleet.orders(11.5) == []
    assert fleet.phase(1) is Phase.DRAINING
    assert waiting.state is TicketState.WAITING


def test_a_wake_whose_end_is_not_known_keeps_its_place_on_the_host() -> None:
    """It may still come up: nothing else is woken until the server itself says that it sleeps."""
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[0, 1])
    fleet.ask("m0", now=1.0)
    assert fleet.orders(1.0) == [("wake", 0)]
    fleet.end(0, Task.WAKE, "no response within 600 s", now=2.0)
    fleet.ask("m1", now=2.1)
    assert fleet.orders(2.2) == []
    fleet.say(0, True, now=2.5)
    assert fleet.orders(2.6) == [("wake", 1)]


def test_nothing_is_woken_before_every_server_of_the_host_has_said_whether_it_sleeps() -> None:
    """After a restart of lbproxy, which knows nothing."""
    fleet = Fleet("m0", "m1", sleep=HOST)
    balancer = fleet.balancer
    balancer.set_endpoints([], now=0.0)
    one, two = balancer.set_endpoints([replace(spec(n), sleep=HOST) for n in (7, 8)], now=0.0).added
    for it in (one, two):
        balancer.report_models(it.uid, [card(it.name)])
        balancer.report_health(it.uid, True, "test", now=0.0)
    fleet.ask("e7", now=0.1)
    fleet.sleepers.reported(one.base_url, True, asked_at=0.1, now=0.1)
    assert fleet.sleepers.decide(0.2) == []
    fleet.sleepers.reported(two.base_url, True, asked_at=0.3, now=0.3)
    assert [order.url for order in fleet.sleepers.decide(0.4)] == [one.base_url]


def test_of_refused_requests_few_models_are_remembered() -> None:
    """Any name may be asked for where no list is known, and each is a need that every decision goes through."""
    fleet = Fleet("m0")
    fleet.say(0, True, now=1.0)
    fleet.wake(0, now=2.0, takes=30.0)
    fleet.say(0, True, now=40.0)
    fleet.balancer.report_models(fleet.endpoints[0].uid, None)
    for number in range(2 * MAX_REFUSED):
        assert fleet.ask(f"x{number}", now=50.0, deadline=51.0).outcome is Outcome.TOO_LATE
    assert len(fleet.sleepers._refused) == MAX_REFUSED
    assert fleet.orders(50.1) == [("wake", 0)], "they count all the same"


def test_a_server_of_the_host_that_refuses_connections_has_no_memory() -> None:
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[1])
    for _ in range(3):
        fleet.balancer.report_health(fleet.endpoints[0].uid, False, "refused", now=1.0, refused=True)
    fleet.ask("m1", now=1.5)
    assert fleet.orders(1.6) == [("wake", 1)]


def test_a_server_that_is_down_otherwise_keeps_its_place_for_a_minute() -> None:
    """A health check that times out says nothing about the memory of the GPU."""
    fleet = Fleet("m0", "m1", sleep=HOST, asleep=[1])
    for _ in range(3):
        fleet.balancer.report_health(fleet.endpoints[0].uid, False, "no response", now=1.0)
    fleet.ask("m1", now=1.5)
    assert fleet.orders(1.6) == []
    assert fleet.orders(60.0) == []
    assert fleet.orders(62.0) == [("wake", 1)]


def test_one_more_is_woken_when_the_awake_ones_cannot_keep_up() -> None:
    fleet = Fleet("m0", "m0", asleep=[1])
    settings = AdmissionSettings(queue_timeout=100.0, max_in_flight_per_endpoint=1)
    fleet.balancer.reconfigure(None, BalancingSettings(admission=settings), now=0.0)
    fleet.ask("m0", now=1.0)
    waiting = fleet.ask("m0", now=1.0)
    assert waiting.wait is Wait.FULL
    assert fleet.orders(10.0) == []
    assert fleet.orders(11.5) == [("wake", 1)]
    fleet.end(1, Task.WAKE, now=14.0)
    assert fleet.balancer.poll(now=14.0) == [waiting]


def test_one_more_never_takes_the_place_of_another_model() -> None:
    fleet = Fleet("m0", "m0", "m2", sleep=HOST, asleep=[1])
    fleet.say(2, False, now=0.1)
    settings = AdmissionSettings(queue_timeout=100.0, max_in_flight_per_endpoint=1)
    fleet.balancer.reconfigure(None, BalancingSettings(admission=settings), now=0.0)
    for _ in range(3):
        fleet.ask("m0", now=1.0)
    assert [fleet.orders(float(now)) for now in range(2, 90)] == [[]] * 88


def test_a_server_that_is_not_there_is_started_once() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(wake=False, cold_start=ColdStart("http://hook/", 60.0)))
    uid = fleet.endpoints[0].uid
    fleet.balancer.report_health(uid, False, "refused", now=0.0, refused=True)
    fleet.orders(0.5)
    assert fleet.phase(0) is Phase.OFF
    assert [one.id for one in fleet.balancer.endpoints.serving.model_cards()] == ["m0"]
    tickets = [fleet.ask("m0", now=1.0) for _ in range(5)]
    assert {ticket.state for ticket in tickets} == {TicketState.WAITING}
    assert fleet.orders(1.0) == [("start", 0)]
    fleet.end(0, Task.START, now=1.1)
    assert fleet.orders(30.0) == []
    fleet.balancer.report_health(uid, True, "up", now=40.0)
    fleet.balancer.report_health(uid, True, "up", now=40.0)
    fleet.sleepers.decide(40.1)
    assert len(fleet.balancer.poll(now=40.1)) == 5


def test_a_start_that_fails_or_never_ends_is_tried_again_with_a_back_off() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(wake=False, cold_start=ColdStart("http://hook/", 60.0)))
    fleet.balancer.report_health(fleet.endpoints[0].uid, False, "refused", now=0.0, refused=True)
    fleet.ask("m0", now=1.0)
    assert fleet.orders(1.0) == [("start", 0)]
    fleet.end(0, Task.START, "status 500", now=1.1)
    assert fleet.orders(2.0) == []
    assert fleet.orders(7.0) == [("start", 0)]
    fleet.end(0, Task.START, now=7.1)
    assert fleet.orders(60.0) == []
    fleet.orders(67.2)
    assert fleet.phase(0) is Phase.OFF
    assert fleet.orders(77.5) == [("start", 0)]


def test_an_operator_can_wake_and_put_to_sleep() -> None:
    fleet = Fleet("m0", asleep=[0])
    uid = fleet.endpoints[0].uid
    assert fleet.sleepers.ask(uid, Task.WAKE, now=1.0) is None
    assert fleet.orders(1.0) == [("wake", 0)]
    fleet.end(0, Task.WAKE, now=2.0)
    assert fleet.orders(2.1) == []
    assert fleet.sleepers.ask(uid, Task.SLEEP, now=3.0) is None
    assert fleet.orders(3.0) == [("sleep", 0)]
    fleet.end(0, Task.SLEEP, now=4.0)
    assert [fleet.orders(4.0 + n) for n in range(5)] == [[]] * 5


def test_the_prefix_cache_of_a_server_that_sleeps_is_forgotten() -> None:
    fleet = Fleet("m0", policy="adaptive")
    request = InferenceRequest("r", "m0", True, 4096, 4096, tuple(range(8)))
    ticket = fleet.balancer.submit(request, now=1.0)
    fleet.balancer.first_byte(ticket, now=1.1)
    fleet.close(ticket, now=1.2)
    uid = fleet.endpoints[0].uid

    def cached() -> float:
        learned = fleet.balancer.learned(now=2.0)
        assert learned is not None
        return learned[1][uid].cached_tokens

    assert cached() > 0
    fleet.say(0, True, now=2.0)
    assert cached() == 0


def test_requests_left_at_a_server_that_somebody_put_to_sleep_wake_it() -> None:
    """vLLM keeps them until it wakes: without a wake they would hang."""
    fleet = Fleet("m0")
    fleet.ask("m0", now=1.0)
    fleet.say(0, True, now=2.0)
    assert fleet.orders(2.1) == [("wake", 0)]


def test_nothing_is_put_to_sleep_while_lbproxy_stops() -> None:
    fleet = Fleet("m0", "m1", sleep=SleepSpec(after_s=5.0, host="box"), asleep=[1])
    fleet.sleepers.is_closing = True
    waiting = fleet.ask("m1", now=1.0)
    assert [fleet.orders(float(now)) for now in range(1, 100)] == [[]] * 99
    assert waiting.state is TicketState.WAITING
    assert fleet.phase(0) is Phase.AWAKE


class Model:
    """Simulated servers under random events: what they truly are."""

    def __init__(self, fleet: Fleet, rng: random.Random, count: int) -> None:
        self.fleet, self.rng = fleet, rng
        self.asleep = [True] * count
        self.calls: dict[int, tuple[Task, float]] = {}
        self.open: list[Ticket] = []
        self.waiting: dict[int, Ticket] = {}

    def awake(self) -> int:
        """Those that have, or may have, the memory of the GPU."""
        waking = {n for n, (task, _) in self.calls.items() if task is Task.WAKE}
        return len(waking | {n for n, asleep in enumerate(self.asleep) if not asleep})

    def step(self, now: float) -> None:
        fleet, rng = self.fleet, self.rng
        for n, (task, until) in list(self.calls.items()):
            if now >= until:
                del self.calls[n]
                failed = rng.random() < 0.15
                if not failed:
                    self.asleep[n] = task is Task.SLEEP
                fleet.end(n, task, "failed" if failed else None, now=now)
        for n in range(len(self.asleep)):
            if n not in self.calls and rng.random() < 0.3:
                fleet.say(n, self.asleep[n], now=now)
        if rng.random() < 0.5:
            ticket = fleet.ask(f"m{rng.randrange(len(self.asleep))}", now=now)
            (self.open.append if ticket.state is TicketState.PLACED else self.note)(ticket)
        for order in fleet.sleepers.decide(now):
            n = fleet.number(order)
            assert n not in self.calls, "one order at a time"
            self.calls[n] = order.task, now + rng.uniform(0.1, 4.0)
            if order.task is Task.SLEEP:
                assert not any(one.placed_state.endpoint.base_url == order.url for one in self.open)
        assert self.awake() <= 1
        for ticket in fleet.balancer.poll(now=now):
            del self.waiting[id(ticket)]
            assert ticket.state is TicketState.PLACED, ticket.outcome
            self.open.append(ticket)
        for ticket in self.open:
            n = [one.uid for one in fleet.endpoints].index(ticket.placed_state.endpoint.uid)
            assert not self.asleep[n]
            assert n not in self.calls
        for ticket in [one for one in self.open if rng.random() < 0.1]:
            self.open.remove(ticket)
            fleet.close(ticket, now=now)

    def note(self, ticket: Ticket) -> None:
        assert ticket.state is TicketState.WAITING, ticket.outcome
        self.waiting[id(ticket)] = ticket

    def oldest_s(self, now: float) -> float:
        return max((now - one.submitted_at for one in self.waiting.values()), default=0.0)


@pytest.mark.parametrize("seed", range(20))
def test_two_of_a_host_are_never_both_awake_and_nothing_waits_for_ever(seed: int) -> None:
    """Under random requests, calls that fail or take long, and reports. No request is at a server that sleeps."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    fleet = Fleet(
        *(f"m{n}" for n in range(count)),
        sleep=SleepSpec(host="box", after_s=rng.choice([None, 5.0])),
        asleep=range(count),
        min_awake=rng.choice([1.0, 3.0]),
    )
    model, now = Model(fleet, rng, count), 1.0
    for _ in range(3000):
        now += rng.uniform(0.01, 0.3)
        model.step(now)
        assert model.oldest_s(now) < 150.0
    assert fleet.balancer.queue(now=now).waiting == len(model.waiting)


def test_uids_of_other_endpoints_are_no_servers() -> None:
    fleet = Fleet("m0")
    fleet.sleepers.reported("http://gone:1", True, asked_at=1.0, now=1.0)
    fleet.sleepers.ended("http://gone:1", Task.WAKE, None, now=1.0)
    assert fleet.sleepers.ask(EndpointUid(99), Task.WAKE, now=1.0) is not None


def test_a_request_for_a_stored_response_wakes_the_endpoint_that_stores_it_and_no_other() -> None:
    """vLLM's store is in its API server, and survives the sleep."""
    fleet = Fleet("m0", "m0", asleep=[1])
    store = fleet.balancer.stored_responses
    request = InferenceRequest("r", "m0", response_id="resp_1")
    store.remember("resp_1", fleet.endpoints[1].uid, request, now=0.5)
    ticket = fleet.balancer.submit(request, now=1.0)
    assert (ticket.state, ticket.wait) == (TicketState.WAITING, Wait.WAKING)
    assert fleet.orders(1.0) == [("wake", 1)]
    fleet.end(1, Task.WAKE, now=4.0)
    assert fleet.balancer.poll(now=4.0) == [ticket]
    assert place_of(ticket) == fleet.endpoints[1]


def test_what_waits_for_a_wake_does_not_look_like_overload_to_other_models() -> None:
    """Overload would serve the newest first, and predict waits by a pace that is not theirs."""
    fleet = Fleet("m0", "m1", asleep=[1], policy="adaptive")
    for n in range(40):
        fleet.ask("m1", now=1.0 + n / 100)
    for n in range(200):
        now = 2.0 + n / 5
        fleet.close(fleet.ask("m0", now=now), now=now)
        fleet.balancer.poll(now=now)
    queue = fleet.balancer._queue
    assert (queue.ready, queue.waking) == (40, 40)
    assert not queue.overloaded(0)
    assert fleet.balancer._queue.overload._waiting == 0
    for ticket in list(queue):
        fleet.balancer.close(ticket, Outcome.CLIENT_CLOSED, now=50.0)
    assert queue.waking == 0


def test_a_retry_waits_for_a_sleeping_server_that_has_not_failed_it() -> None:
    fleet = Fleet("m0", "m0", asleep=[1])
    failed = frozenset({fleet.endpoints[0].uid})
    ticket = fleet.balancer.submit(InferenceRequest("r", "m0"), now=1.0, avoid=failed)
    assert ticket.state is TicketState.WAITING
    assert fleet.orders(1.0) == [("wake", 1)]


def test_the_first_request_after_a_server_went_down_waits_for_the_webhook() -> None:
    fleet = Fleet("m0", sleep=SleepSpec(wake=False, cold_start=ColdStart("http://hook/", 60.0)))
    fleet.balancer.report_health(fleet.endpoints[0].uid, False, "refused", now=0.0, refused=True)
    assert fleet.ask("m0", now=0.1).state is TicketState.WAITING
