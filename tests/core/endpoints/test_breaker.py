# SPDX-License-Identifier: Apache-2.0
"""What takes an endpoint out, how long, and what brings it back: the Balancer as a driver sees it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.breaker import JITTER, MIN_SAMPLES, Breaker, Cause
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec
from lbproxy.core.endpoints.endpoint_set import DIAL_S, TRIAL_S
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, card, make_balancer, pool_of, request, seen, spec, taken

K = FailureKind
NO_RAMP = HealthSettings(slow_start=None)
IN_A_ROW = BreakerSettings().consecutive_failures or 0


def submit(balancer: Balancer, now: float) -> Ticket:
    return balancer.submit(request(), now=now)


def name(ticket: Ticket) -> str:
    assert ticket.placed_on is not None
    return ticket.placed_on.endpoint.name


def ticket_on(balancer: Balancer, wanted: str, now: float) -> Ticket:
    """A request that nobody but `wanted` may have."""
    others = frozenset(one.endpoint.uid for one in balancer.snapshot(now=now).endpoints if one.endpoint.name != wanted)
    ticket = balancer.submit(request(), now=now, avoid=others)
    assert name(ticket) == wanted
    return ticket


def fail(balancer: Balancer, ticket: Ticket, kind: FailureKind, now: float) -> None:
    verdict = balancer.after_failure(ticket, kind, (), now=now)
    balancer.close(ticket, verdict.outcome, now=now)


def answer(balancer: Balancer, ticket: Ticket, now: float) -> None:
    balancer.first_byte(ticket, now=now)
    balancer.close(ticket, Outcome.COMPLETED, now=now)


def fail_on(balancer: Balancer, victim: str, kind: FailureKind, now: float, times: int = IN_A_ROW) -> None:
    for _ in range(times):
        fail(balancer, ticket_on(balancer, victim, now), kind, now)


def chosen(balancer: Balancer, now: float, count: int = 12) -> set[str]:
    tickets = [submit(balancer, now) for _ in range(count)]
    for ticket in tickets:
        balancer.close(ticket, Outcome.CLIENT_CLOSED, now=now)
    return {name(ticket) for ticket in tickets if ticket.placed_on is not None}


def health(balancer: Balancer, one: str, now: float = 0.0) -> Health:
    return seen(balancer, now)[one].health


def half_open(count: int = 3, kind: FailureKind = K.RESET) -> tuple[Balancer, float, list[Endpoint]]:
    """A pool whose e1 was ejected, at the moment when that is over."""
    balancer, endpoints = pool_of(count, health=NO_RAMP)
    fail_on(balancer, "e1", kind, 0.0)
    assert health(balancer, "e1") is Health.EJECTED
    return balancer, 2.0, endpoints


# --- What ejects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [K.RESET, K.PROTOCOL, K.TIMEOUT, K.GATEWAY, K.LATE])
def test_five_faults_in_a_row_eject(kind: FailureKind) -> None:
    balancer, _ = pool_of(3)
    for _ in range(60):
        answer(balancer, ticket_on(balancer, "e1", 0.0), 0.0)
    fail_on(balancer, "e1", kind, 0.0, IN_A_ROW - 1)
    assert not balancer.transitions
    fail_on(balancer, "e1", kind, 0.0, 1)
    (change,) = taken(balancer)
    assert (change.before, change.after, change.cause) == (Health.UP, Health.EJECTED, Cause.FAULTS)
    assert f"5 failures in a row, the last: {kind.value}" in change.reason
    assert chosen(balancer, 0.0) == {"e2", "e3"}


def test_a_good_answer_ends_the_row() -> None:
    balancer, _ = pool_of(3)
    for _ in range(60):
        answer(balancer, ticket_on(balancer, "e1", 0.0), 0.0)
    for _ in range(3):
        fail_on(balancer, "e1", K.RESET, 0.0, IN_A_ROW - 1)
        answer(balancer, ticket_on(balancer, "e1", 0.0), 0.0)
    assert not balancer.transitions


def test_fewer_than_four_good_answers_of_five_eject() -> None:
    """Resets that alternate with good answers are never five in a row."""
    balancer, _ = pool_of(3)
    for n in range(MIN_SAMPLES - 1):
        assert not balancer.transitions, "too few to say"
        if n % 2:
            fail_on(balancer, "e1", K.RESET, 0.0, 1)
        else:
            answer(balancer, ticket_on(balancer, "e1", 0.0), 0.0)
    fail_on(balancer, "e1", K.RESET, 0.0, 1)
    (change,) = taken(balancer)
    assert change.cause is Cause.SUCCESS_RATE
    assert "2 successful responses of 5" in change.reason


def test_what_was_half_a_minute_ago_is_forgotten() -> None:
    for every_s, is_ejected in ((5, True), (20, False)):
        balancer, _ = pool_of(3)
        for second in range(0, 200, every_s):
            now = float(second)
            balancer.check(now=now)
            if not balancer.transitions:
                answer(balancer, ticket_on(balancer, "e1", now), now)
                fail_on(balancer, "e1", K.RESET, now, 1)
        assert bool(balancer.transitions) == is_ejected, "five have to be in one window"


@pytest.mark.parametrize("kind", [K.BUSY, K.LIMITED, K.EXHAUSTED])
def test_not_now_and_our_own_fault_never_eject(kind: FailureKind) -> None:
    balancer, _ = pool_of(2)
    now = 0.0
    for _ in range(30):
        now += 20.0
        fail_on(balancer, "e1", kind, now, 1)
    assert not balancer.transitions


def test_clients_that_leave_never_eject() -> None:
    balancer, _ = pool_of(2)
    for _ in range(50):
        balancer.close(ticket_on(balancer, "e1", 0.0), Outcome.CLIENT_CLOSED, now=0.0)
    assert not balancer.transitions


def test_answers_that_break_eject() -> None:
    """Each begins well, so they are never faults in a row."""
    balancer, _ = pool_of(3)
    for _ in range(MIN_SAMPLES):
        ticket = ticket_on(balancer, "e1", 0.0)
        balancer.first_byte(ticket, now=0.0)
        balancer.close(ticket, Outcome.UPSTREAM_BROKE, now=0.0)
    assert health(balancer, "e1") is Health.EJECTED


def test_an_endpoint_that_nobody_probes_is_ejected_when_nobody_can_connect() -> None:
    balancer = make_balancer(health=NO_RAMP)
    specs = [EndpointSpec(name=f"e{n}", base_url=f"http://10.0.0.{n}:8000", health=None) for n in (1, 2)]
    for endpoint in balancer.set_endpoints(specs, now=0.0).added:
        balancer.report_models(endpoint.uid, [card(MODEL)])
    fail_on(balancer, "e1", K.CONNECT, 0.0)
    assert [change.cause for change in taken(balancer)] == [Cause.UNREACHABLE]
    assert chosen(balancer, 0.0) == {"e2"}
    assert chosen(balancer, 2.0) == {"e1", "e2"}, "one may try it"


def test_settings_can_turn_each_way_off() -> None:
    balancer, _ = pool_of(2, breaker=BreakerSettings(consecutive_failures=None, success_rate=0.0))
    for _ in range(40):
        verdict = balancer.after_failure(ticket := submit(balancer, 0.0), K.RESET, (), now=0.0)
        balancer.close(ticket, verdict.outcome, now=0.0)
    assert not balancer.transitions


# --- Whose fault a 500 is ---------------------------------------------------------------------------------------------


def ask_twice(balancer: Balancer, bad: set[str], now: float) -> None:
    """One request as the proxy drives it: a 500 by those in `bad`, tried elsewhere once."""
    first = submit(balancer, now)
    if name(first) not in bad:
        answer(balancer, first, now)
        return
    assert first.placed_on is not None
    uid = first.placed_on.endpoint.uid
    verdict = balancer.after_failure(first, K.ERROR, (), now=now)
    balancer.close(first, verdict.outcome, now=now)
    if verdict.retry:
        second = balancer.submit(request(), now=now, avoid=frozenset({uid}), suspect=uid)
        if second.placed_on is None or name(second) in bad:
            if second.placed_on is not None:
                balancer.after_failure(second, K.ERROR, (K.ERROR,), now=now)
            balancer.close(second, Outcome.COMPLETED, now=now)
        else:
            answer(balancer, second, now)


def test_who_answers_500_to_what_others_can_is_ejected() -> None:
    balancer, _ = pool_of(4, policy="round-robin")
    now = 0.0
    while health(balancer, "e1") is Health.UP:
        now += 0.1
        assert now < 30.0
        ask_twice(balancer, {"e1"}, now)
    (change,) = taken(balancer)
    assert change.cause is Cause.SUCCESS_RATE


def test_a_request_that_fails_everywhere_is_its_own_fault() -> None:
    """Poison: 500 from whoever gets it."""
    balancer, _ = pool_of(4, policy="round-robin")
    for n in range(200):
        bad = {"e1", "e2", "e3", "e4"} if n % 2 else set()
        ask_twice(balancer, bad, n * 0.05)
    assert not balancer.transitions


def test_a_500_that_could_not_be_tried_elsewhere_counts() -> None:
    balancer, _ = pool_of(1)
    fail_on(balancer, "e1", K.ERROR, 0.0, MIN_SAMPLES)
    assert health(balancer, "e1") is Health.EJECTED


# --- Time -------------------------------------------------------------------------------------------------------------


def test_ejections_double_up_to_the_longest_and_are_spread() -> None:
    settings = BreakerSettings(ejection=1.0, max_ejection=60.0)
    lasted: list[list[float]] = []
    for seed in range(40):
        breaker, rng, now = Breaker(settings), random.Random(seed), 100.0
        lasted.append([])
        for _ in range(10):
            lasts_s = breaker.eject(Cause.FAULTS, now, rng)
            assert breaker.until == now + lasts_s
            lasted[-1].append(lasts_s)
            now = breaker.until + 1.0
    for n, middle in enumerate([1, 2, 4, 8, 16, 32, 60, 60, 60, 60]):
        times = [one[n] for one in lasted]
        assert middle * (1 - JITTER) <= min(times) < 0.7 * middle
        assert 1.3 * middle < max(times) <= middle * (1 + JITTER)


def test_who_behaved_for_long_begins_anew() -> None:
    breaker, rng = Breaker(BreakerSettings()), random.Random(1)
    now = 0.0
    for _ in range(8):
        now += breaker.eject(Cause.FAULTS, now, rng)
    assert breaker.eject(Cause.FAULTS, now + 59.0, rng) >= 30.0
    assert breaker.eject(Cause.FAULTS, breaker.until + 60.0, rng) <= 1.5


# --- Half open --------------------------------------------------------------------------------------------------------


def test_one_request_at_a_time_tries_it() -> None:
    balancer, now, _ = half_open()
    tickets = [submit(balancer, now) for _ in range(30)]
    assert sum(name(ticket) == "e1" for ticket in tickets) == 1
    (trial,) = [ticket for ticket in tickets if ticket.is_trial]
    balancer.close(trial, Outcome.CLIENT_CLOSED, now=now)
    assert health(balancer, "e1", now) is Health.HALF_OPEN, "a client that left says nothing"
    assert chosen(balancer, now) == {"e1", "e2", "e3"}, "the next may"


@pytest.mark.parametrize("has_body", [True, False], ids=["first byte", "no body"])
def test_a_good_answer_brings_it_back(has_body: bool) -> None:
    balancer, now, _ = half_open()
    trial = ticket_on(balancer, "e1", now)
    taken(balancer)
    if has_body:
        balancer.first_byte(trial, now=now)
    else:
        balancer.close(trial, Outcome.COMPLETED, now=now)
    (change,) = taken(balancer)
    assert (change.before, change.after) == (Health.HALF_OPEN, Health.UP)


@pytest.mark.parametrize("kind", [K.RESET, K.ERROR, K.GATEWAY, K.TIMEOUT, K.LATE])
def test_a_failed_trial_ejects_again_for_longer(kind: FailureKind) -> None:
    balancer, now, _ = half_open()
    trial = ticket_on(balancer, "e1", now)
    taken(balancer)
    fail(balancer, trial, kind, now)
    (change,) = taken(balancer)
    assert (change.before, change.after) == (Health.HALF_OPEN, Health.EJECTED)
    assert chosen(balancer, now + 0.99) == {"e2", "e3"}, "2 s, less by half at most"
    assert "e1" in chosen(balancer, now + 3.01)


@pytest.mark.parametrize("kind", [K.BUSY, K.LIMITED])
def test_a_trial_that_is_told_not_now_decides_nothing(kind: FailureKind) -> None:
    balancer, now, _ = half_open()
    fail(balancer, ticket_on(balancer, "e1", now), kind, now)
    assert health(balancer, "e1", now) is Health.HALF_OPEN
    assert "e1" not in chosen(balancer, now + 0.9), "left alone for a second, as ever"
    assert "e1" in chosen(balancer, now + 1.1)


def test_what_older_requests_bring_is_no_verdict_on_a_trial() -> None:
    balancer, _ = pool_of(3, health=NO_RAMP)
    old = [ticket_on(balancer, "e1", 0.0) for _ in range(4)]
    fail_on(balancer, "e1", K.RESET, 0.0)
    now = 2.0
    assert chosen(balancer, now) == {"e1", "e2", "e3"}
    taken(balancer)
    fail(balancer, old[0], K.RESET, now)
    balancer.first_byte(old[1], now=now)
    balancer.close(old[2], Outcome.UPSTREAM_BROKE, now=now)
    assert not balancer.transitions


def test_two_good_probes_end_it_too() -> None:
    balancer, now, endpoints = half_open()
    uid = endpoints[0].uid
    balancer.check(now=now)
    assert health(balancer, "e1", now) is Health.HALF_OPEN
    balancer.report_health(uid, True, "200", now=now)
    assert health(balancer, "e1", now) is Health.HALF_OPEN
    balancer.report_health(uid, True, "200", now=now)
    assert health(balancer, "e1", now) is Health.UP


def test_good_probes_prove_nothing_where_they_were_good_all_along() -> None:
    """A black hole's /health says 200 while it answers 500 to everything."""
    balancer, endpoints = pool_of(3)
    for n in range(MIN_SAMPLES):
        balancer._judge._count(balancer._endpoints._states[endpoints[0].uid], K.ERROR, str(n), 0.0)
    assert [change.cause for change in taken(balancer)] == [Cause.SUCCESS_RATE]
    for second in range(2, 20):
        balancer.check(now=float(second))
        balancer.report_health(endpoints[0].uid, True, "200", now=float(second))
    assert health(balancer, "e1", 20.0) is Health.HALF_OPEN


def test_what_probes_call_dead_is_down_and_not_ejected() -> None:
    for now in (0.0, 2.0):
        balancer, _, endpoints = half_open()
        balancer.check(now=now)
        for _ in range(3):
            balancer.report_health(endpoints[0].uid, False, "refused", now=now)
        assert health(balancer, "e1", now) is Health.DOWN
        for _ in range(2):
            balancer.report_health(endpoints[0].uid, True, "200", now=now + 1.0)
        assert health(balancer, "e1", now) is Health.UP


def test_bad_probes_count_on_through_an_ejection() -> None:
    """A frozen server fails requests and probes: what waits there is freed by the third bad probe, ejected or not."""
    balancer, endpoints = pool_of(3)
    uid = endpoints[0].uid
    balancer.report_health(uid, False, "no answer", now=0.0)
    fail_on(balancer, "e1", K.RESET, 0.5)
    balancer.report_health(uid, False, "no answer", now=1.0)
    balancer.check(now=3.0)
    assert health(balancer, "e1", 3.0) is Health.HALF_OPEN
    balancer.report_health(uid, False, "no answer", now=3.0)
    assert health(balancer, "e1", 3.0) is Health.DOWN


# --- Panic ------------------------------------------------------------------------------------------------------------


def eject(balancer: Balancer, *names: str, now: float = 0.0) -> list[Transition]:
    for one in names:
        for state in balancer._endpoints._states.values():
            if state.endpoint.name == one:
                for _ in range(IN_A_ROW):
                    balancer._judge._count(state, K.RESET, "test", now)
    return taken(balancer)


def test_while_half_is_left_the_ejected_get_nothing() -> None:
    balancer, _ = pool_of(4)
    eject(balancer, "e1", "e2")
    assert chosen(balancer, 0.0) == {"e3", "e4"}
    assert not seen(balancer)["e1"].readmitted


def test_when_less_than_half_would_be_left_all_are_used() -> None:
    balancer, _ = pool_of(4)
    changes = eject(balancer, "e1", "e2", "e3")
    assert chosen(balancer, 0.0) == {"e1", "e2", "e3", "e4"}
    assert seen(balancer)["e1"].readmitted
    assert "used although ejected" in changes[-1].reason


def test_panic_can_be_turned_off() -> None:
    balancer, _ = pool_of(2, breaker=BreakerSettings(panic=False))
    eject(balancer, "e1", "e2")
    assert submit(balancer, 0.0).outcome is Outcome.NO_ENDPOINTS
    assert not balancer.endpoints.any_up()


def test_panic_never_readmits_what_health_calls_down() -> None:
    balancer, endpoints = pool_of(4)
    for _ in range(3):
        balancer.report_health(endpoints[3].uid, False, "", now=0.0)
    eject(balancer, "e1", "e2")
    assert chosen(balancer, 0.0, 40) == {"e1", "e2", "e3"}, "one of three is left"


def test_panic_looks_at_those_that_serve_the_model() -> None:
    """The only endpoint of a model is used whatever the breaker says; that others serve other models is no help."""
    balancer = make_balancer()
    endpoints = balancer.set_endpoints([spec(n) for n in range(1, 5)], now=0.0).added
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card("a" if endpoint.name == "e1" else "b")])
        balancer.report_health(endpoint.uid, True, "", now=0.0)
    eject(balancer, "e1", "e2")
    assert name(balancer.submit(request("a"), now=0.0)) == "e1"
    names = {name(balancer.submit(request("b"), now=0.0)) for _ in range(10)}
    assert names == {"e3", "e4"}


# --- Down -------------------------------------------------------------------------------------------------------------


def all_down(count: int = 2) -> tuple[Balancer, list[Endpoint]]:
    balancer, endpoints = pool_of(count, health=NO_RAMP)
    for endpoint in endpoints:
        for _ in range(3):
            balancer.report_health(endpoint.uid, False, "refused", now=0.0)
    taken(balancer)
    return balancer, endpoints


def test_when_all_are_down_each_is_tried_twice_a_second_and_others_are_refused_at_once() -> None:
    balancer, _ = all_down()
    tried: list[tuple[float, str]] = []
    now = 0.0
    while now < 5.0:
        ticket = submit(balancer, now)
        if ticket.state is TicketState.PLACED:
            tried.append((now, name(ticket)))
            fail(balancer, ticket, K.CONNECT, now)
        else:
            assert ticket.outcome is Outcome.NO_ENDPOINTS
        now += 0.01
    for one in ("e1", "e2"):
        times = [at for at, who in tried if who == one]
        assert 9 <= len(times) <= 10
        assert min(b - a for a, b in pairwise(times)) >= TRIAL_S


def test_a_trial_without_an_answer_is_the_only_one() -> None:
    balancer, _ = all_down(1)
    assert submit(balancer, 1.0).state is TicketState.PLACED
    assert submit(balancer, 30.0).outcome is Outcome.NO_ENDPOINTS


def test_good_trials_bring_it_up_like_good_probes() -> None:
    balancer, _ = all_down(1)
    answer(balancer, submit(balancer, 1.0), 1.0)
    assert health(balancer, "e1") is Health.DOWN
    answer(balancer, submit(balancer, 2.0), 2.0)
    assert health(balancer, "e1") is Health.UP


def test_while_somebody_is_up_who_is_down_is_not_tried() -> None:
    balancer, endpoints = pool_of(2)
    for _ in range(3):
        balancer.report_health(endpoints[0].uid, False, "refused", now=0.0)
    assert chosen(balancer, 5.0) == {"e2"}


def test_probes_and_trials_together_dial_at_most_three_times_a_second() -> None:
    balancer, endpoints = all_down(1)
    dialled: list[float] = []
    now, probe_at = 0.0, 0.1
    while now < 10.0:
        now += 0.01
        if now >= probe_at:
            wait_s = balancer.endpoints.may_probe_in(endpoints[0].uid, now=now)
            assert wait_s <= DIAL_S
            if not wait_s:
                dialled.append(now)
                balancer.report_health(endpoints[0].uid, False, "refused", now=now)
            probe_at = now + (wait_s or 0.45)
        ticket = submit(balancer, now)
        if ticket.state is TicketState.PLACED:
            dialled.append(now)
            fail(balancer, ticket, K.CONNECT, now)
    assert max(sum(at <= one < at + 1.0 for one in dialled) for at in dialled) <= 3
    assert len(dialled) >= 20, "neither starves the other"


def test_where_a_thousand_are_down_each_is_dialled_less_often() -> None:
    balancer, endpoints = all_down(1000)
    assert balancer.endpoints.may_probe_in(endpoints[0].uid, now=10.0) == 0.0
    assert balancer.endpoints.may_probe_in(endpoints[0].uid, now=10.0) == pytest.approx(5.0)
    balancer.report_health(endpoints[0].uid, True, "200", now=15.0)
    balancer.report_health(endpoints[0].uid, True, "200", now=16.0)
    assert health(balancer, "e1") is Health.UP
    assert balancer.endpoints.may_probe_in(endpoints[0].uid, now=16.0) == 0.0, (
        "one that is up is probed at its own interval"
    )


def test_probes_of_those_that_are_up_are_not_held_up() -> None:
    balancer, endpoints = pool_of(1)
    assert [balancer.endpoints.may_probe_in(endpoints[0].uid, now=0.0) for _ in range(5)] == [0.0] * 5


def test_who_leaves_while_it_is_tried_is_let_go() -> None:
    balancer, now, _ = half_open()
    trial = ticket_on(balancer, "e1", now)
    balancer.set_endpoints([spec(2), spec(3)], now=now)
    taken(balancer)
    fail(balancer, trial, K.RESET, now)
    assert not balancer.transitions
    assert set(seen(balancer, now)) == {"e2", "e3"}
