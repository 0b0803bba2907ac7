# SPDX-License-Identifier: Apache-2.0
"""Why a request was placed where it was: the parts of a price add up to it, and stay as they were."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.config.sections.health import HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import IN_FULL_PER_S, MAX_SHOWN, Decision
from lbproxy.core.policies.registry import POLICIES
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, card, make_balancer, pool_of, request

SCORERS = {"queue": 2.0, "kv-utilization": 1.0, "in-flight": 0.5, "prefix": 3.0}


def explained(policy: str, count: int, **options: object) -> Balancer:
    scorers = SCORERS if policy == "weighted" else None
    balancer, _ = pool_of(count, policy=policy, scorers=scorers, **options)
    balancer.explain(True)
    return balancer


def prompt(rng: random.Random, model: str = MODEL) -> InferenceRequest:
    first = rng.randrange(4)
    keys = [10 * first + n for n in range(rng.randrange(10))]
    return InferenceRequest("r", model, rng.random() < 0.8, 4000, 1024 * len(keys) + 500, tuple(keys), 200)


def busy(balancer: Balancer, rng: random.Random, events: int) -> list[Ticket]:
    """Something of everything that a price goes by; returns what was placed."""
    uids = [one.endpoint.uid for one in balancer.snapshot(now=0.0).endpoints]
    now, running, placed = 0.0, list[Ticket](), list[Ticket]()
    for uid in uids:
        balancer.report_models(uid, [card(MODEL), card("adapter", parent=MODEL)])
    for _ in range(events):
        now += rng.expovariate(20.0)
        ticket = balancer.submit(prompt(rng, rng.choice([MODEL, MODEL, "adapter"])), now=now)
        balancer.poll(now=now)
        if ticket.state is TicketState.PLACED:
            placed.append(ticket)
            running.append(ticket)
        if running and rng.random() < 0.8:
            balancer.first_byte(rng.choice(running), now=now)
            balancer.progress(rng.choice(running), rng.randrange(200), now=now)
        if rng.random() < 0.3:
            balancer.report_scrape(rng.choice(uids), gauges(rng, now))
        if len(running) > 8 or (running and rng.random() < 0.3):
            balancer.close(running.pop(rng.randrange(len(running))), Outcome.COMPLETED, now=now)
    for ticket in running:
        balancer.close(ticket, Outcome.COMPLETED, now=now)
    return placed


def gauges(rng: random.Random, now: float) -> LoadMetrics:
    lora = LoraMetrics(frozenset(rng.sample(["x", "y"], rng.randrange(3))), frozenset(), 2)
    return LoadMetrics(
        scraped_at=now,
        waiting=float(rng.randrange(9)),
        running=float(rng.randrange(9)),
        kv_utilization=rng.random(),
        block_size_tokens=16,
        kv_blocks=rng.choice([200, 2000]),
        lora=lora,
    )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 5))
def test_the_parts_of_a_price_add_up_to_it_however_late_they_are_asked_for(policy: str, seed: int, count: int) -> None:
    balancer = explained(policy, count)
    for ticket in busy(balancer, random.Random(seed), 30):
        decision = ticket.decision
        assert decision is not None
        assert ticket.placed_on is not None
        assert decision.chosen == ticket.placed_on.endpoint
        assert decision.candidates == len(decision.shown) == count
        parts = decision.breakdown()
        assert len(parts) == len(decision.costs) == count
        for one, cost in zip(parts, decision.costs, strict=True):
            assert sum(one.values()) == pytest.approx(cost, rel=1e-9, abs=1e-9)
        assert decision.cost is not None
        if policy != "adaptive":
            assert decision.cost == min(decision.costs)
        else:
            assert decision.cost <= min(decision.costs) + 1.0
        if policy == "adaptive":
            expected = decision.first_byte_ms()
            assert expected is not None
            assert 0 < expected < decision.cost


def test_of_a_large_fleet_the_cheapest_are_kept() -> None:
    """A thousand remembered decisions over a thousand endpoints must not be a gigabyte."""
    count = 3 * MAX_SHOWN
    balancer = explained("adaptive", count)
    for ticket in busy(balancer, random.Random(5), 100):
        decision = ticket.decision
        assert decision is not None
        assert decision.candidates == count
        assert len({one.uid for one in decision.shown}) == len(decision.costs) == MAX_SHOWN
        assert decision.chosen in decision.shown
        for one, cost in zip(decision.breakdown(), decision.costs, strict=True):
            assert sum(one.values()) == pytest.approx(cost)


@pytest.mark.parametrize("count", [3, 2 * MAX_SHOWN])
def test_every_request_is_explained_but_of_very_many_in_a_large_fleet_in_brief(count: int) -> None:
    """The request that somebody asks about is any; what grows with the fleet must not be done for nobody."""
    balancer = explained("adaptive", count)

    def placed(now: float, avoid: Sequence[Endpoint] = (), **more: object) -> Decision:
        uids = frozenset(one.uid for one in avoid)
        ticket = balancer.submit(request()._replace(**more), now=now, avoid=uids)  # type: ignore[arg-type]
        balancer.first_byte(ticket, now=now)
        balancer.close(ticket, Outcome.COMPLETED, now=now)
        assert ticket.decision is not None
        return ticket.decision

    def full(made: Decision) -> bool:
        return "prefill" in made.breakdown()[made.chosen_index]

    first = placed(10.0)
    for _ in range(IN_FULL_PER_S - 1):
        assert full(placed(10.0))
    small = count <= MAX_SHOWN
    late = placed(10.9)
    assert full(late) is small
    assert late.candidates == count
    assert len(late.shown) == len(late.costs) == (count if small else 2)
    assert late.cost == sum(late.breakdown()[late.chosen_index].values()) or small
    assert (late.first_byte_ms() is not None) is small
    assert full(placed(10.9, explain=True)), "its client asks"
    assert full(placed(10.9, avoid=[first.chosen])), "it is tried again"
    assert full(placed(11.0))


def test_nothing_is_kept_unless_somebody_wants_it() -> None:
    balancer, _ = pool_of(2, policy="adaptive")
    assert balancer.submit(request(), now=0.0).decision is None
    balancer.explain(True)
    assert balancer.submit(request(), now=0.0).decision is not None
    balancer.explain(False)
    assert balancer.submit(request(), now=0.0).decision is None


def test_who_is_alone_is_not_priced() -> None:
    balancer = explained("least-request", 1)
    decision = balancer.submit(request(), now=0.0).decision
    assert decision is not None
    assert (decision.candidates, decision.cost, decision.first_byte_ms()) == (1, None, None)
    assert decision.breakdown() == []


def test_it_says_who_was_left_out_and_why() -> None:
    """The first question of every operator: why does this endpoint get nothing?"""
    health = HealthSettings(slow_start=30.0)
    admission = AdmissionSettings(max_in_flight_per_endpoint=2)
    balancer, endpoints = pool_of(6, policy="least-request", admission=admission, health=health)
    balancer.explain(True)
    full, refusing, draining, down, new, free = (one.uid for one in endpoints)
    balancer.drain(draining)
    for _ in range(3):
        balancer.report_health(down, False, "test", now=40.0)
        balancer.report_health(new, False, "test", now=40.0)
    others = frozenset(one.uid for one in endpoints)
    for _ in range(2):
        assert balancer.submit(request(), now=40.0, avoid=others - {full}).placed_on is not None
    refused = balancer.submit(request(), now=40.0, avoid=others - {refusing})
    balancer.after_failure(refused, FailureKind.BUSY, (), now=40.0)
    for at in (40.1, 40.2):
        balancer.report_health(new, True, "test", now=at)
    balancer.submit(request(), now=40.3, avoid=others - {free})
    ticket = balancer.submit(request(), now=40.3, avoid=others - {new, free})  # which uses up what slow start allows
    assert ticket.placed_on is not None
    assert ticket.placed_on.endpoint.uid == new
    decision = balancer.submit(request(), now=40.4).decision
    assert decision is not None
    assert decision.chosen.uid == free
    assert {one.uid: why for one, why in decision.excluded} == {
        full: "full",
        refusing: "backing off",
        new: "slow start",
    }
    assert {one.uid: why for one, why in decision.unavailable} == {draining: "draining", down: "down"}


def test_a_ticket_says_why_it_waits() -> None:
    balancer, endpoints = pool_of(1, admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    assert balancer.submit(request(), now=0.0).wait is None
    parked = balancer.submit(request(), now=0.0)
    assert parked.wait is Wait.FULL

    balancer = make_balancer(policy="adaptive")
    endpoints = balancer.set_endpoints(list(endpoints), now=0.0).added
    assert balancer.submit(request(), now=0.0).wait is Wait.FULL, "nobody is judged yet"

    balancer, endpoints = pool_of(1, policy="adaptive")
    long = InferenceRequest("r", MODEL, True, 10**5, 4 * 50_000)
    assert balancer.submit(long, now=0.0).wait is None
    ticket = balancer.submit(long, now=0.0)
    assert ticket.wait is Wait.BUSY
    record = RequestRecord("r", "POST", "/v1/completions", "127.0.0.1", 0.0)
    record.note_wait(ticket)
    assert (record.wait, record.held_for, record.full_by) == (Wait.BUSY, "e1", "prefill")

    balancer, _ = pool_of(1, policy="adaptive")
    balancer.submit(request(), now=0.0).placed_state.load.room.reservations.add(1.0, 1.0)
    assert balancer.submit(long, now=0.0).wait is Wait.BEHIND, "it has room, and one that waits goes first"

    record.note_wait(parked)
    assert (record.wait, record.held_for, record.full_by) == (Wait.FULL, None, None), (
        "of the wait before, nothing stays"
    )
