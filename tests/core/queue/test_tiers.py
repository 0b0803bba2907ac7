# SPDX-License-Identifier: Apache-2.0
"""Tiers: when a request goes to a higher one, when it never does, and that nothing sticks there.

Endpoint names say the tier: `a1`, `a2` are of tier 1, `b1` of tier 2. A new pool assumes .1 ms a token.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.handover import Role
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.overdue import AGAIN_S
from lbproxy.core.queue.ticket import Answer, Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, card, make_balancer, taken

PROVIDER = EndpointSpec(
    name="b1",
    base_url="https://api.example.com:443/v1",
    tier=2,
    metrics=None,
    health=None,
    models=(MODEL,),
    model="its",
)


def own(n: int, **more: object) -> EndpointSpec:
    return replace(EndpointSpec(name=f"a{n}", base_url=f"http://10.0.0.{n}:8000"), **more)  # type: ignore[arg-type]


def ask(tokens: int = 1000, **more: object) -> InferenceRequest:
    return InferenceRequest("r", MODEL, True, 4 * tokens, 4 * tokens)._replace(**more)  # type: ignore[arg-type]


class Fleet:
    """A balancer, its endpoints by name, and the tickets that `poll` returned."""

    def __init__(self, *specs: EndpointSpec, after: float | None = None, up: bool = True, **options: object) -> None:
        overflow = OverflowSettings(after=after)
        self.balancer: Balancer = make_balancer(**{"policy": "adaptive", "overflow": overflow, **options})  # type: ignore[arg-type]
        added = self.balancer.set_endpoints(specs or (own(1), PROVIDER), now=0.0).added
        self.uids = {one.name: one.uid for one in added}
        for one in added:
            if one.health is not None and up:
                self.balancer.report_models(one.uid, [card(MODEL)])
                self.balancer.report_health(one.uid, True, "", now=0.0)
        taken(self.balancer)

    def submit(self, request: InferenceRequest | None = None, now: float = 0.0, avoid: str = "") -> Ticket:
        tried = frozenset(self.uids[name] for name in avoid.split())
        return self.balancer.submit(request or ask(), now=now, avoid=tried)

    def down(self, name: str, now: float = 0.0) -> None:
        for _ in range(3):
            self.balancer.report_health(self.uids[name], False, "", now=now)

    def up(self, name: str, now: float = 0.0) -> None:
        for _ in range(2):
            self.balancer.report_health(self.uids[name], True, "", now=now)

    def fill(self, tokens: int = 20_000, now: float = 0.0) -> Ticket:
        """Two seconds of prefill, by the speed that is assumed."""
        ticket = self.submit(ask(tokens, max_tier=1), now=now)
        assert where(ticket) == "a1"
        return ticket


def where(ticket: Ticket) -> str:
    if ticket.placed_on is not None:
        return ticket.placed_on.endpoint.name
    return "waits" if ticket.state is TicketState.WAITING else str(ticket.outcome and ticket.outcome.label)


def why(ticket: Ticket) -> str | None:
    return None if ticket.overflow is None else ticket.overflow.value


# When a request goes to a higher tier


def test_the_first_tier_takes_all_that_it_can() -> None:
    fleet = Fleet(own(1), own(2), PROVIDER, after=1.0)
    tickets = [fleet.submit() for _ in range(4)]
    assert sorted(map(where, tickets)) == ["a1", "a1", "a2", "a2"]
    assert {why(one) for one in tickets} == {None}


@pytest.mark.parametrize("policy", ["adaptive", "least-request", "round-robin", "gie", "lmetric"])
def test_a_tier_that_is_down_is_passed_over_and_used_again_at_once(policy: str) -> None:
    fleet = Fleet(policy=policy)
    fleet.down("a1")
    out = fleet.submit(now=1.0)
    assert (where(out), why(out)) == ("b1", "down")
    fleet.up("a1", now=2.0)
    back = fleet.submit(ask(session="s"), now=2.0)
    assert (where(back), why(back)) == ("a1", None)


def test_a_session_and_a_cached_prompt_on_the_second_tier_do_not_keep_a_request_there() -> None:
    fleet = Fleet()
    keys = tuple(range(30))
    fleet.down("a1")
    for n in range(5):
        out = fleet.submit(ask(8000, session="s", block_keys=keys), now=1.0 + n)
        assert where(out) == "b1"
        fleet.balancer.first_byte(out, now=1.1 + n)
        fleet.balancer.close(out, Outcome.COMPLETED, now=1.2 + n, usage=Usage(8000, 7900, 10))
    fleet.up("a1", now=9.0)
    assert where(fleet.submit(ask(8000, session="s", block_keys=keys), now=9.0)) == "a1"


def test_a_health_that_is_not_known_yet_is_no_reason() -> None:
    """lbproxy has just started: the provider is not probed, the GPUs have not answered yet."""
    fleet = Fleet(up=False)
    ticket = fleet.submit()
    assert where(ticket) == "waits"
    fleet.balancer.report_models(fleet.uids["a1"], [card(MODEL)])
    fleet.balancer.report_health(fleet.uids["a1"], True, "", now=0.1)
    assert fleet.balancer.poll(now=0.1) == [ticket]
    assert where(ticket) == "a1"


def test_what_only_a_higher_tier_serves_is_no_overflow() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, models=("big",)))
    ticket = fleet.submit(ask(model="big"))
    assert (where(ticket), why(ticket)) == ("b1", None)
    record = RequestRecord("r", "POST", "/", "", 0.0)
    record.note_placed(ticket)
    assert (record.tier, record.overflow) == (2, None)


def test_servers_that_list_no_models_come_before_a_provider_that_does() -> None:
    fleet = Fleet(own(1), PROVIDER)
    fleet.balancer.report_models(fleet.uids["a1"], None)
    assert where(fleet.submit()) == "a1"


def test_a_predicted_wait_that_is_too_long_overflows_at_once() -> None:
    fleet = Fleet(after=0.5)
    fleet.fill()
    ticket = fleet.submit(now=0.1)
    assert (where(ticket), why(ticket)) == ("b1", "wait")


def test_a_wait_that_is_short_enough_is_waited_for() -> None:
    fleet = Fleet(after=5.0)
    running = fleet.fill()
    ticket = fleet.submit(now=0.1)
    assert where(ticket) == "waits"
    fleet.balancer.first_byte(running, now=1.0)
    assert fleet.balancer.poll(now=1.0) == [ticket]
    assert where(ticket) == "a1"


def test_who_has_waited_long_does_not_wait_again_in_the_engines_queue() -> None:
    """Where responses end together, waiting in the engine's own queue takes as long as a response, and nothing can
    recall a request from there: the place in it goes to one that has just come.
    """
    fleet, short = Fleet(after=5.0), ask(10)
    balancer, a1 = fleet.balancer, fleet.uids["a1"]

    def report(waiting: int, now: float) -> None:
        balancer.scrape_sent(a1)
        balancer.report_scrape(a1, LoadMetrics(scraped_at=now, waiting=waiting, running=4))

    first = [fleet.submit(short) for _ in range(4)]
    for ticket in first:
        balancer.first_byte(ticket, now=0.05)
    queued = fleet.submit(short, now=0.1)
    report(1, 2.8)
    balancer.close(first[0], Outcome.COMPLETED, now=2.9)
    balancer.first_byte(queued, now=3.0)
    young = [fleet.submit(short, now=3.0) for _ in range(2)]
    assert [where(ticket) for ticket in young] == ["a1", "a1"]
    old = fleet.submit(short, now=3.0)
    assert where(old) == "waits"
    report(2, 5.8)
    balancer.close(first[1], Outcome.COMPLETED, now=5.9)
    balancer.first_byte(young[0], now=6.0)
    assert balancer.poll(now=6.0) == []
    assert where(old) == "waits", "it might wait for six seconds in all"
    new = fleet.submit(short, now=6.0)
    balancer.poll(now=6.0)
    assert (where(new), where(old)) == ("a1", "waits")
    assert balancer.poll(now=8.0) == [old]
    assert (where(old), why(old)) == ("b1", "wait")


def test_without_a_time_a_request_waits_as_long_as_without_a_second_tier() -> None:
    fleet = Fleet(after=None)
    fleet.fill()
    ticket = fleet.submit()
    assert where(ticket) == "waits"
    assert fleet.balancer.poll(now=1.0) == []
    assert fleet.balancer.poll(now=2.0) == [ticket]
    assert where(ticket) == "a1"


def test_a_prediction_that_is_wrong_holds_no_request() -> None:
    """Less than `after` is predicted, but a more important request comes. The wake comes from the time alone."""
    fleet = Fleet(after=1.2)
    fleet.fill(10_000)
    ticket = fleet.submit(now=0.1)
    assert where(ticket) == "waits"
    more = fleet.submit(ask(10_000, priority=1, max_tier=1), now=0.2)
    due = None
    while where(ticket) == "waits":
        due = fleet.balancer.next_deadline()
        assert due is not None
        assert due <= 0.1 + 1.2
        fleet.balancer.poll(now=due)
    assert where(more) == "a1"
    assert (where(ticket), why(ticket), due) == ("b1", "wait", 0.1 + 1.2)


def test_a_request_at_a_configured_limit_overflows_when_it_has_waited_so_long() -> None:
    fleet = Fleet(after=1.0, policy="least-request", admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    fleet.submit()
    ticket = fleet.submit(now=0.1)
    assert where(ticket) == "waits"
    assert fleet.balancer.poll(now=1.0) == []
    assert fleet.balancer.poll(now=1.1) == [ticket]
    assert (where(ticket), why(ticket)) == ("b1", "limit")


def test_the_limit_of_a_flow_is_no_reason() -> None:
    """A flow at its limit of requests would only use the provider instead."""
    flows = FlowsSettings.model_validate({"default": {"in_flight": 1}})
    fleet = Fleet(after=1.0, flows=flows)
    first = fleet.submit()
    parked = fleet.submit(now=0.1)
    for now in (1.2, 2.0, 5.0, 20.0):
        assert fleet.balancer.poll(now=now) == []
    fleet.balancer.close(first, Outcome.COMPLETED, now=20.5)
    assert fleet.balancer.poll(now=20.5) == [parked]
    assert where(parked) == "a1"


def test_what_would_be_refused_overflows() -> None:
    """A queue that is full, and the end of the wait."""
    admission = AdmissionSettings(queue_requests=1, max_in_flight_per_endpoint=1)
    fleet = Fleet(policy="least-request", admission=admission)
    fleet.fill()
    waiting, over = fleet.submit(now=0.1), fleet.submit(now=0.1)
    assert (where(waiting), where(over), why(over)) == ("waits", "b1", "full")
    fleet.balancer.close(over, Outcome.COMPLETED, now=5.0)
    assert fleet.balancer.poll(now=30.2) == [waiting]
    assert (where(waiting), why(waiting)) == ("b1", "full")


def test_what_is_shed_for_a_more_important_request_overflows() -> None:
    fleet = Fleet(admission=AdmissionSettings(queue_requests=1))
    fleet.fill()
    low, high = fleet.submit(now=0.1), fleet.submit(ask(priority=1), now=0.2)
    assert fleet.balancer.poll(now=0.2) == [low]
    assert (where(low), where(high)) == ("b1", "waits")


def test_a_deadline_that_the_first_tier_would_miss() -> None:
    fleet = Fleet()
    fleet.fill()
    fleet.submit(ask(deadline=0.3), now=0.1)  # the test that a prediction gets
    ticket = fleet.submit(ask(deadline=0.5), now=0.2)
    assert (where(ticket), why(ticket)) == ("b1", "deadline")


def test_endpoints_that_failed_a_request_one_by_one() -> None:
    fleet = Fleet(own(1), own(2), own(3), PROVIDER)
    tried = ""
    for _ in range(3):
        ticket = fleet.submit(now=0.1, avoid=tried)
        assert where(ticket).startswith("a")
        verdict = fleet.balancer.after_failure(ticket, FailureKind.CONNECT, [], now=0.1, refused=True)
        fleet.balancer.close(ticket, verdict.outcome, now=0.1)
        tried = f"{tried} {where(ticket)}"
    ticket = fleet.submit(now=0.2, avoid=tried)
    assert (where(ticket), why(ticket)) == ("b1", "failed")


def test_what_a_provider_refuses_waits_for_the_first_tier_again() -> None:
    """Which is full, so that it had overflowed: a refusal is no worse than no provider."""
    admission = AdmissionSettings(max_in_flight_per_endpoint=1)
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(max_in_flight=9)), after=0.0, admission=admission)
    first, second = fleet.submit(), fleet.submit()
    assert (where(first), where(second)) == ("a1", "b1")
    verdict = fleet.balancer.after_failure(second, FailureKind.LIMITED, (), now=0.1, retry_after_s=20.0)
    assert verdict.retry
    fleet.balancer.close(second, verdict.outcome, now=0.1)
    again = fleet.submit(now=0.1, avoid="b1")
    assert where(again) == "waits"
    fleet.balancer.close(first, Outcome.COMPLETED, now=1.0)
    assert fleet.balancer.poll(now=1.0) == [again]
    assert where(again) == "a1"


def test_tiers_are_used_in_their_order() -> None:
    third = replace(PROVIDER, name="c1", base_url="https://other.example:443", tier=3)
    fleet = Fleet(third, PROVIDER, own(1))
    fleet.down("a1")
    assert where(fleet.submit()) == "b1"
    fleet.balancer.drain(fleet.uids["b1"])
    ticket = fleet.submit()
    assert (where(ticket), why(ticket)) == ("c1", "down")


# What a higher tier does not do


def test_a_higher_tier_that_is_full_changes_nothing() -> None:
    """The request goes on waiting for the first one, and is placed there when there is room."""
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(max_in_flight=1)), after=0.5)
    running = fleet.fill()
    over = fleet.submit(now=0.1)
    ticket = fleet.submit(now=0.2)
    assert (where(over), where(ticket)) == ("b1", "waits")
    assert fleet.balancer.poll(now=0.8) == []
    fleet.balancer.first_byte(running, now=0.9)
    assert fleet.balancer.poll(now=0.9) == [ticket]
    assert (where(ticket), why(ticket)) == ("a1", None)


def test_room_on_a_higher_tier_is_used_when_it_comes() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(max_in_flight=1)), after=0.5)
    fleet.fill(60_000)
    over, ticket = fleet.submit(now=0.1), fleet.submit(now=0.2)
    fleet.balancer.poll(now=0.7)
    fleet.balancer.close(over, Outcome.COMPLETED, now=1.5)
    assert fleet.balancer.poll(now=1.5) == [ticket]
    assert (where(ticket), why(ticket)) == ("b1", "wait")


def test_a_higher_tier_teaches_the_first_nothing() -> None:
    fleet = Fleet(own(1), own(2), PROVIDER)
    first = fleet.balancer.endpoints.get(fleet.uids["a1"])
    assert first is not None
    before = (first.load.speed.token_ms, first.load.pool.gap_ms, first.load.pool.output_tokens)
    fleet.down("a1")
    fleet.down("a2")
    for n in range(50):
        ticket = fleet.submit(now=float(n))
        fleet.balancer.first_byte(ticket, now=n + 0.9)
        fleet.balancer.close(ticket, Outcome.COMPLETED, now=n + 0.95, usage=Usage(1000, 0, 900))
    assert (first.load.speed.token_ms, first.load.pool.gap_ms, first.load.pool.output_tokens) == before
    added = fleet.balancer.set_endpoints([own(1), own(2), own(3), PROVIDER], now=60.0).added
    new = fleet.balancer.endpoints.get(added[0].uid)
    assert new is not None
    assert (new.load.speed.token_ms, new.load.pool.gap_ms) == before[:2]


def test_a_higher_tier_does_not_count_among_those_that_are_left() -> None:
    """Panic: of three endpoints of the first tier two are ejected, so both are used again, however many there are
    above."""
    specs = [replace(PROVIDER, name=f"b{n}", base_url=f"https://p{n}.example:443") for n in range(5)]
    fleet = Fleet(own(1), own(2), own(3), *specs)
    for name in ("a1", "a2"):
        for _ in range(5):
            ticket = fleet.submit(avoid=" ".join({"a1", "a2", "a3"} - {name}))
            assert where(ticket) == name
            fleet.balancer.after_failure(ticket, FailureKind.RESET, [], now=0.0)
            fleet.balancer.close(ticket, Outcome.UPSTREAM_RESET, now=0.0)
    shown = {one.endpoint.name: one for one in fleet.balancer.snapshot(now=0.1).endpoints}
    assert [shown[name].health for name in ("a1", "a2", "a3")] == [Health.EJECTED, Health.EJECTED, Health.UP]
    assert shown["a1"].readmitted
    assert shown["a2"].readmitted


# Limits of an endpoint, and what it asks for


def test_requests_a_minute() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(requests_per_minute=6)))
    fleet.down("a1")
    tickets = [fleet.submit() for _ in range(8)]
    assert [where(one) for one in tickets] == ["b1"] * 6 + ["waits"] * 2
    assert (due := fleet.balancer.next_deadline()) is not None
    assert 9.9 < due < 10.1
    assert fleet.balancer.poll(now=due) == tickets[6:7]


def test_tokens_are_reserved_and_what_was_used_is_settled() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(tokens_per_minute=2500)))
    fleet.down("a1")
    first, second = fleet.submit(ask(max_tokens=100)), fleet.submit(ask(max_tokens=100))
    third = fleet.submit(ask(max_tokens=100))
    assert [where(one) for one in (first, second, third)] == ["b1", "b1", "waits"]
    fleet.balancer.first_byte(first, now=0.5)
    fleet.balancer.close(first, Outcome.COMPLETED, now=0.6, usage=Usage(20, 0, 10))
    assert fleet.balancer.poll(now=0.6) == [third]


@pytest.mark.parametrize("open_ended", [False, True])
def test_what_a_response_has_beyond_what_it_reserved_counts_while_it_runs(open_ended: bool) -> None:
    """A WebSocket of hours counted what it had reserved, and so did a stream without usage."""
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(tokens_per_day=50_000)))
    fleet.down("a1")
    running = fleet.submit(ask(max_tokens=100)._replace(open_ended=open_ended))
    state = running.placed_state
    assert state.allowance is not None
    reserved = 50_000 * dict(state.allowance.used(1, 0.0))["tokens_per_day"]
    fleet.balancer.first_byte(running, now=1.0)
    for second in range(2, 102):
        fleet.balancer.progress(running, 300, now=float(second))
    used = 50_000 * dict(state.allowance.used(1, 102.0))["tokens_per_day"]
    assert 30_000 <= used <= 30_000 + reserved
    fleet.balancer.close(running, Outcome.CLIENT_CLOSED, now=103.0)
    used = 50_000 * dict(state.allowance.used(0, 103.0))["tokens_per_day"]
    assert 30_000 <= used <= 30_000 + reserved


def test_a_long_prompt_hides_nothing_of_its_response() -> None:
    """The tokens that its prompt had reserved were taken for room for its response."""
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(tokens_per_day=50_000)))
    fleet.down("a1")
    running = fleet.submit(ask(20_000, max_tokens=10_000))
    allowance = running.placed_state.allowance
    assert allowance is not None
    fleet.balancer.first_byte(running, now=1.0)
    for second in range(2, 22):
        fleet.balancer.progress(running, 500, now=float(second))
    assert 50_000 * dict(allowance.used(1, 22.0))["tokens_per_day"] == pytest.approx(30_000)


def test_what_another_process_counted_of_a_running_response_is_not_counted_again() -> None:
    """With workers, each death of the balancer process made it count twice for a day."""
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(tokens_per_day=50_000)))
    request = ask(1000, max_tokens=10_000)
    running = fleet.balancer.adopt(request, fleet.uids[PROVIDER.name], began=True, told_tokens=8000, now=1.0)
    allowance = running.placed_state.allowance
    assert allowance is not None
    fleet.balancer.progress(running, 500, now=2.0)
    assert 50_000 * dict(allowance.used(1, 2.0))["tokens_per_day"] == pytest.approx(500)


def test_what_runs_at_an_endpoint_that_moved_above_its_highest_tier_is_adopted_and_leaks_nothing() -> None:
    """A place of its flow was lost with each, as it was counted before it was found to be a defect."""
    flows = FlowsSettings.model_validate({"default": {"in_flight": 1}})
    fleet = Fleet(own(1), PROVIDER, flows=flows)
    uid = fleet.uids[PROVIDER.name]
    running = fleet.balancer.adopt(ask(max_tier=1), uid, began=True, told_tokens=None, now=1.0)
    assert where(running) == PROVIDER.name
    fleet.balancer.close(running, Outcome.COMPLETED, now=2.0)
    assert where(fleet.submit(ask(), now=3.0)) == "a1"


def test_tokens_a_day_come_back_after_a_day() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(tokens_per_day=1100)))
    fleet.down("a1")
    used = fleet.submit(ask(max_tokens=10))
    fleet.balancer.first_byte(used, now=1.0)
    fleet.balancer.close(used, Outcome.COMPLETED, now=2.0, usage=Usage(1000, 0, 5000))
    refused = fleet.submit(ask(max_tokens=10), now=3.0)
    assert where(refused) == "rejected_saturated", "no wait helps"
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 3600.0
    assert where(fleet.submit(ask(max_tokens=10), now=86_000.0)) == "rejected_saturated"
    assert where(fleet.submit(ask(max_tokens=10), now=88_000.0)) == "b1"


@pytest.mark.parametrize(("asked_s", "kept_s"), [(30.0, 30.0), (1e9, 3600.0), (None, 1.0)])
def test_a_provider_that_refuses_is_left_alone(asked_s: float | None, kept_s: float) -> None:
    """Even as the only one of its tier, unlike a server of one's own."""
    fleet = Fleet()
    fleet.down("a1")
    ticket = fleet.submit()
    fleet.balancer.after_failure(ticket, FailureKind.LIMITED, [], now=0.0, retry_after_s=asked_s)
    fleet.balancer.close(ticket, Outcome.COMPLETED, now=0.0)
    early = fleet.submit(now=kept_s - 0.5)
    assert where(early) == "waits"
    assert fleet.balancer.poll(now=kept_s + 0.01) == [early]
    assert where(early) == "b1"


def test_what_cannot_wait_so_long_is_refused_at_once_and_told_when() -> None:
    fleet = Fleet()
    fleet.down("a1")
    ticket = fleet.submit()
    fleet.balancer.after_failure(ticket, FailureKind.BUSY, [], now=0.0, retry_after_s=500.0)
    refused = fleet.submit(now=100.0)
    assert (where(refused), refused.retry_after_s) == ("rejected_saturated", 400.0)


def test_other_settings_end_what_a_provider_asked_for() -> None:
    fleet = Fleet()
    fleet.down("a1")
    ticket = fleet.submit()
    fleet.balancer.after_failure(ticket, FailureKind.LIMITED, [], now=0.0, retry_after_s=3000.0)
    fleet.balancer.reconfigure(None, BalancingSettings(), now=1.0)
    assert where(fleet.submit(now=1.0)) == "b1"


def test_a_server_of_the_first_tier_that_refuses_is_used_if_it_is_the_only_one() -> None:
    fleet = Fleet(own(1))
    ticket = fleet.submit()
    fleet.balancer.after_failure(ticket, FailureKind.BUSY, [], now=0.0, retry_after_s=500.0)
    assert where(fleet.submit(now=1.0)) == "a1"


def test_a_server_of_the_first_tier_that_refuses_rests_for_a_minute_while_there_is_another() -> None:
    fleet = Fleet(own(1), own(2), PROVIDER)
    ticket = fleet.submit()
    name = where(ticket)
    fleet.balancer.after_failure(ticket, FailureKind.BUSY, [], now=0.0, retry_after_s=500.0)
    fleet.balancer.close(ticket, Outcome.COMPLETED, now=0.0)
    for now, places in ((59.0, {"a1", "a2"} - {name}), (61.0, {"a1", "a2"})):
        tickets = [fleet.submit(ask(10), now=now) for _ in range(4)]
        assert set(map(where, tickets)) == places
        for one in tickets:
            fleet.balancer.close(one, Outcome.COMPLETED, now=now)


# What may not leave


def test_a_stored_response_on_a_higher_tier_is_not_continued_there() -> None:
    fleet = Fleet()
    fleet.balancer.stored_responses.remember("resp_1", fleet.uids["b1"], ask(), now=0.0)
    assert where(fleet.submit(ask(response_id="resp_1"))) == "b1"
    assert where(fleet.submit(ask(response_id="resp_1", max_tier=1))) == "response_not_found"


def test_a_second_leg_stays_on_the_tier_of_the_first() -> None:
    roles = [own(1, role=Role.PREFILL, connector="nixl"), own(2, role=Role.DECODE, connector="nixl")]
    above = [replace(one, name=f"b{n}", tier=2, base_url=f"http://10.1.0.{n}:8000") for n, one in enumerate(roles)]
    fleet = Fleet(*roles, *above)
    second = ask(leg=DECODE, prefilled_at=fleet.uids["a1"])
    assert where(fleet.submit(second)) == "a2"
    fleet.down("a2")
    assert where(fleet.submit(second)) == "no_endpoints"
    assert where(fleet.submit(ask(leg=DECODE, prefilled_at=fleet.uids["b0"], max_tier=1))) == "no_endpoints"


def test_a_defect_of_the_choice_ends_the_request_instead_of_leaking_it() -> None:
    fleet = Fleet()
    state = fleet.balancer.endpoints.get(fleet.uids["b1"])
    assert state is not None
    ticket = fleet.submit(ask(max_tier=1))
    with pytest.raises(AssertionError, match="above its highest tier"):
        fleet.balancer._place(ticket, Answer(state), state, 0.0)
    assert state.in_flight == 0


@pytest.mark.parametrize("policy", ["adaptive", "least-request"])
def test_private_requests_never_leave(policy: str) -> None:  # noqa: PLR0912 - all that may happen
    """10,000 requests that may not leave, among others that may, under failures, overload and changes of the set."""
    rng = random.Random(20)
    specs = [own(1), own(2), PROVIDER, replace(PROVIDER, name="c1", base_url="https://c.example:443", tier=3)]
    admission = AdmissionSettings(queue_requests=20, queue_timeout=2.0, max_in_flight_per_endpoint=4)
    fleet = Fleet(*specs, after=0.3, policy=policy, admission=admission)
    balancer, now, running, private, left = fleet.balancer, 0.0, [], 0, 0
    states = [state for uid in fleet.uids.values() if (state := balancer.endpoints.get(uid)) is not None]
    outcomes: set[str] = set()
    waiting: list[Ticket] = []

    def settle(ticket: Ticket) -> None:
        nonlocal left
        outcomes.add(where(ticket))
        if ticket.placed_on is not None:
            assert ticket.placed_on.endpoint.tier <= ticket.request.max_tier
            left += ticket.placed_on.endpoint.tier > 1
            running.append(ticket)

    while private < 10_000:
        now += rng.expovariate(40.0)
        what = rng.random()
        if what < 0.55:
            tier = 1 if rng.random() < 0.8 else rng.choice((2, 3, 9))
            private += tier == 1
            deadline = now + rng.uniform(0.05, 3.0) if rng.random() < 0.3 else None
            stored = rng.choice(("resp", None, None, None))
            tried = rng.sample(list(fleet.uids.values()), rng.choice((0, 0, 0, 1, 2)))
            request = ask(rng.choice((10, 2000, 20_000)), max_tier=tier, deadline=deadline, response_id=stored)
            request = request._replace(session=rng.choice(("s", None)), priority=rng.choice((0, 0, 1)))
            ticket = balancer.submit(request, now=now, avoid=frozenset(tried))
            if ticket.state is TicketState.WAITING:
                waiting.append(ticket)
            else:
                settle(ticket)
        elif what < 0.9 and running:
            ticket = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.7:
                balancer.first_byte(ticket, now=now)
                balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(100, 0, 10))
            else:
                kind = rng.choice([FailureKind.LIMITED, FailureKind.RESET, FailureKind.CONNECT, FailureKind.ERROR])
                balancer.after_failure(ticket, kind, [], now=now, retry_after_s=rng.choice((None, 0.5)))
                balancer.close(ticket, Outcome.UPSTREAM_RESET, now=now)
        elif what < 0.93:
            uid = rng.choice(list(fleet.uids.values()))
            balancer.report_health(uid, rng.random() < 0.7, "", now=now)
        elif what < 0.95:
            balancer.drain(rng.choice(list(fleet.uids.values())), draining=rng.random() < 0.3)
        elif what < 0.96:
            balancer.stored_responses.remember("resp", rng.choice(states).endpoint.uid, ask(), now=now)
        elif what < 0.965:
            kept = [one for one in specs if rng.random() < 0.8] or specs
            for one in balancer.set_endpoints(kept, now=now).added:
                fleet.uids[one.name] = one.uid
        balancer.check(now=now)
        for ticket in balancer.poll(now=now):
            waiting.remove(ticket)
            settle(ticket)
    assert left > 500, "others did leave"
    assert {"a1", "b1", "c1", "rejected_saturated", "response_not_found", "rejected_ttl_expired"} <= outcomes


def test_no_request_is_forgotten_while_a_higher_tier_is_full_for_long() -> None:
    fleet = Fleet(own(1), replace(PROVIDER, bounds=Bounds(requests_per_minute=60)), after=0.2)
    fleet.fill(100_000)
    tickets = [fleet.submit(now=0.0) for _ in range(70)]
    assert [where(one) for one in tickets].count("b1") == 60
    now = 0.0
    while any(where(one) == "waits" for one in tickets):
        due = fleet.balancer.next_deadline()
        assert due is not None
        now = max(now + 0.01, due)
        assert now < 12.0 + AGAIN_S
        fleet.balancer.poll(now=now)
    assert {where(one) for one in tickets} == {"b1"}


def test_an_unknown_uid_as_the_first_leg() -> None:
    fleet = Fleet()
    assert where(fleet.submit(ask(leg=DECODE, prefilled_at=EndpointUid(99)))) == "no_endpoints"


def test_an_endpoints_own_limit_of_requests_replaces_that_of_all() -> None:
    admission = AdmissionSettings(max_in_flight_per_endpoint=1)
    fleet = Fleet(
        own(1), replace(PROVIDER, bounds=Bounds(max_in_flight=3)), policy="least-request", admission=admission
    )
    fleet.down("a1")
    assert [where(fleet.submit()) for _ in range(4)] == ["b1", "b1", "b1", "waits"]


def test_a_private_request_tries_no_provider_that_is_down() -> None:
    """When nothing is up, one request at a time tries what is down: of the tiers that it may go to."""
    fleet = Fleet(own(1), replace(PROVIDER, health="/health"))
    fleet.down("a1")
    fleet.down("b1")
    for now in range(1, 9):
        ticket = fleet.submit(ask(max_tier=1), now=float(now))
        assert where(ticket) in {"a1", "no_endpoints"}
    assert where(fleet.submit(now=20.0)) in {"a1", "b1"}


def test_a_request_that_waited_for_its_flow_alone_does_not_overflow_at_the_end() -> None:
    flows = FlowsSettings.model_validate({"default": {"in_flight": 1}})
    fleet = Fleet(flows=flows)
    fleet.submit()
    parked = fleet.submit(now=0.1)
    assert fleet.balancer.poll(now=30.2) == [parked]
    assert where(parked) == "rejected_ttl_expired"
