# SPDX-License-Identifier: Apache-2.0
"""How long servers take to wake survives a restart: the first request afterwards is told, or refused, as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import ColdStart, EndpointSpec, SleepSpec
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.saved.pieces import MAX_WAKE_S, Durations
from lbproxy.core.saved.reading import Saved, encode, read_lines
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import Task
from tests.core.sleeping.test_sleepers import Fleet
from tests.support.pool import make_balancer, spec


def saved_by(balancer: Balancer, now: float = 0.0) -> Saved:
    pieces = balancer.restarts.save(saved_at=1e9, prefixes=True, now=now)
    return read_lines([encode(one) for one in pieces if one is not None])


def woken(*takes: float, policy: str = "least-request") -> Fleet:
    """A server that took so long to wake, and one second to fall asleep again."""
    fleet = Fleet("m0", sleep=SleepSpec(after_s=5.0), asleep=[0], policy=policy)
    now = 1.0
    for took in takes:
        fleet.wake(0, now=now, takes=took)
        fleet.orders(now + took)
        assert fleet.orders(now + took + 6.0) == [("sleep", 0)]
        fleet.end(0, Task.SLEEP, now=now + took + 7.0)
        now += 100.0
    return fleet


def sleeping(n: int) -> EndpointSpec:
    return replace(spec(n), sleep=SleepSpec())


@pytest.mark.parametrize("policy", ["adaptive", "least-request"])
def test_the_first_wake_after_a_restart_is_predicted(policy: str) -> None:
    saved = saved_by(woken(3.0, 90.0, 20.0, policy=policy).balancer)
    assert saved.sleep == {spec(0).base_url: Durations((3.0, 90.0, 20.0), (1.0, 1.0, 1.0), ())}
    fleet = Fleet("m0", asleep=[0], policy=policy, timeout=15.0)
    fleet.balancer.restarts.restore(saved, age_s=60.0, now=0.0)
    late = fleet.ask("m0", now=1.0)
    assert (late.outcome, late.retry_after_s) == (Outcome.EXPIRED, 20.0)
    patient = Fleet("m0", asleep=[0], policy=policy, timeout=25.0)
    patient.balancer.restarts.restore(saved, age_s=60.0, now=0.0)
    ticket = patient.ask("m0", now=1.0)
    assert (ticket.state, ticket.best_wait_s) == (TicketState.WAITING, 20.0)


def noted(ticket: Ticket) -> tuple[float | None, float | None]:
    """How long the wake was predicted to take and took, as a request's record has it."""
    record = RequestRecord("r", "POST", "/v1/completions", "127.0.0.1", 1.0)
    record.note_wait(ticket)
    if ticket.placed_on is not None:
        record.note_placed(ticket)
    return record.wake_predicted_s, record.wake_took_s


def test_a_record_has_what_was_predicted_and_what_it_took() -> None:
    fleet = woken(3.0)
    ticket = fleet.ask("m0", now=1000.0)
    assert noted(ticket) == (3.0, None), "it waits"
    assert fleet.orders(1001.0) == [("wake", 0)]
    fleet.end(0, Task.WAKE, now=1006.5)
    assert fleet.balancer.poll(now=1007.0) == [ticket]
    assert noted(ticket) == (3.0, 6.5), "the wake, not what the request waited after it"
    fleet.close(ticket, now=1008.0)
    at_once = fleet.ask("m0", now=1009.0)
    assert noted(at_once) == (None, None)


def test_a_wake_of_which_nothing_is_known_and_one_that_failed() -> None:
    fleet = Fleet("m0", asleep=[0], timeout=20.0)
    ticket = fleet.ask("m0", now=1.0)
    fleet.orders(1.0)
    fleet.end(0, Task.WAKE, "it is broken", now=2.0)
    assert fleet.balancer.poll(now=30.0) == [ticket]
    assert ticket.outcome is Outcome.EXPIRED
    assert noted(ticket) == (None, None)


def test_times_before_a_restart_and_since_count_alike() -> None:
    fleet = woken(5.0)
    fleet.balancer.restarts.restore(saved_by(woken(1.0, 2.0, 3.0, 4.0, 4.0).balancer), age_s=0.0, now=0.0)
    (durations,) = fleet.sleepers.durations().values()
    assert durations.wakes == (2.0, 3.0, 4.0, 4.0, 5.0)


def test_a_server_that_is_found_later_or_comes_back_keeps_its_times() -> None:
    saved = saved_by(woken(3.0).balancer)
    balancer = make_balancer()
    balancer.restarts.restore(saved, age_s=60.0, now=0.0)
    assert saved_by(balancer).sleep == saved.sleep, "saved again, though it is not there"
    for _ in range(2):
        balancer.set_endpoints([sleeping(0)], now=1.0)
        assert balancer.sleepers.durations() == saved.sleep
        balancer.set_endpoints([sleeping(1)], now=2.0)
        assert balancer.sleepers.durations() == saved.sleep
    balancer.set_endpoints([sleeping(1), sleeping(0)], now=2.0)
    assert balancer.sleepers.durations() == saved.sleep


def test_starts_are_kept_too() -> None:
    sleep = SleepSpec(wake=False, cold_start=ColdStart("http://starter/start", 600.0, None))
    fleet = Fleet("m0", sleep=sleep)
    for _ in range(3):
        fleet.balancer.report_health(fleet.endpoints[0].uid, False, "refused", now=1.0, refused=True)
    fleet.orders(1.0)
    assert fleet.phase(0) is Phase.OFF
    fleet.ask("m0", now=2.0)
    assert fleet.orders(2.0) == [("start", 0)]
    fleet.end(0, Task.START, now=3.0)
    for _ in range(2):
        fleet.balancer.report_health(fleet.endpoints[0].uid, True, "test", now=42.0)
    fleet.orders(42.0)
    (durations,) = saved_by(fleet.balancer).sleep.values()
    assert durations == Durations((), (), (40.0,))


def test_a_wake_that_took_longer_than_a_file_may_say_is_left_out() -> None:
    balancer = make_balancer()
    balancer.sleepers.remember({"http://a": Durations((1.0, MAX_WAKE_S + 1.0, 2.0), (), ())})
    assert saved_by(balancer).sleep == {"http://a": Durations((1.0, 2.0), (), ())}


def test_servers_that_are_not_there_are_bounded() -> None:
    balancer = make_balancer()
    balancer.sleepers.remember({f"http://x{n}": Durations((1.0,)) for n in range(4000)})
    assert len(balancer.sleepers.durations()) == 1024
