# SPDX-License-Identifier: Apache-2.0
"""What the Balancer promises: where a request goes, when it waits, and that counts never go astray."""

from __future__ import annotations

from collections import Counter

import pytest

from lbproxy.config.sections.health import HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from tests.support.pool import MODEL, bring_up, card, make_balancer, pool_of, request, seen, show_gauges, spec, taken


def place(balancer: Balancer, model: str | None = MODEL, *, now: float = 0.0) -> Ticket:
    return balancer.submit(request(model), now=now)


def endpoint_of(ticket: Ticket) -> Endpoint:
    assert ticket.state is TicketState.PLACED
    assert ticket.placed_on is not None
    return ticket.placed_on.endpoint


def test_a_burst_over_idle_endpoints_spreads_evenly_though_gauges_stand_still() -> None:
    """Own counts change with each pick: 64 requests that see one stale picture would all go to one endpoint."""
    balancer, endpoints = pool_of(4)
    for endpoint in endpoints:
        show_gauges(balancer, endpoint.uid, now=0.0)
    counts = Counter(endpoint_of(place(balancer, now=0.01)).name for _ in range(64))
    assert set(counts.values()) == {16}


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CLIENT_CLOSED, Outcome.UPSTREAM_BROKE, Outcome.CUT])
def test_only_a_complete_response_teaches_how_long_responses_are(outcome: Outcome) -> None:
    """One that was cut after hours would be the length of all that follow, in prices and in `explain`."""
    balancer, _ = pool_of(1, policy="adaptive")
    ticket = balancer.submit(request(MODEL)._replace(stream=True, prompt_bytes=100), now=0.0)
    balancer.first_byte(ticket, now=0.1)
    balancer.progress(ticket, 50_000, now=9.0)
    balancer.close(ticket, outcome, now=9.0)
    assert ticket.load is not None
    assert (ticket.load.pool.output_tokens > 200.0) == (outcome is Outcome.COMPLETED)
    assert ticket.load.pool.samples.answer_tokens == (outcome is Outcome.COMPLETED)


def test_an_endpoint_where_others_wait_gets_less() -> None:
    balancer, endpoints = pool_of(4)
    for endpoint in endpoints:
        show_gauges(balancer, endpoint.uid, now=0.0, waiting=6.0 if endpoint is endpoints[0] else 0.0, running=4.0)
    counts = Counter(endpoint_of(place(balancer, now=0.01)).name for _ in range(38))
    assert counts["e1"] == 5
    assert {counts[name] for name in ("e2", "e3", "e4")} == {11}


def test_requests_that_wait_for_no_room_are_load_and_no_queue() -> None:
    """vLLM's deferred ones, which a load report counts among those that wait. Also for what is as many at a time."""
    balancer, endpoints = pool_of(2)
    gauges = LoadMetrics(scraped_at=0.0, waiting=0.0, running=1.0, deferred=5.0, slots=4)
    balancer.report_scrape(endpoints[0].uid, gauges)
    show_gauges(balancer, endpoints[1].uid, now=0.0, running=1.0)
    state = balancer.endpoints.get(endpoints[0].uid)
    assert state is not None
    assert (state.others, state.reported.others_running, state.reported.slots) == (6.0, 6.0, 4)
    ticket = place(balancer)
    assert endpoint_of(ticket) is endpoints[1], "it has fewer"
    ticket = next(one for one in (place(balancer) for _ in range(9)) if endpoint_of(one) is endpoints[0])
    balancer.report_load(ticket, LoadReport(waiting=7.0), now=0.1)
    assert state.metrics is not None
    assert (state.metrics.waiting, state.metrics.deferred, state.metrics.requests) == (2.0, 5.0, 8.0)


def test_an_engine_that_somebody_else_put_to_sleep_is_down_until_it_is_awake() -> None:
    """Its health check passes all along, and a request there would wait until somebody wakes it."""
    balancer, endpoints = pool_of(2)
    asleep, now = endpoints[0].uid, 0.0

    def pass_time(*, sleeps: bool) -> set[str]:
        nonlocal now
        assert balancer.wants_scrape(asleep), "or nobody would see it wake up"
        for _ in range(3):
            now += 1.0
            balancer.report_scrape(asleep, LoadMetrics(scraped_at=now, waiting=0.0, running=0.0, asleep=sleeps))
            for endpoint in endpoints:
                balancer.report_health(endpoint.uid, True, "GET /health returned 200", now=now)
        tickets = [place(balancer, now=now) for _ in range(8)]
        names = {endpoint_of(ticket).name for ticket in tickets}
        for ticket in tickets:
            balancer.close(ticket, Outcome.COMPLETED, now=now)
        return names

    assert pass_time(sleeps=False) == {"e1", "e2"}
    taken(balancer)
    assert pass_time(sleeps=True) == {"e2"}
    (change,) = taken(balancer)
    assert (change.after, change.reason) == (Health.DOWN, "its engine sleeps, as its metrics show")
    assert pass_time(sleeps=False) == {"e1", "e2"}


def test_own_requests_in_the_gauges_are_not_counted_twice() -> None:
    """A gauge shows our own requests too: only what was not ours when the scrape left is others' load."""
    balancer, endpoints = pool_of(2)
    tickets = [place(balancer) for _ in range(8)]
    for endpoint in endpoints:
        show_gauges(balancer, endpoint.uid, now=0.1, running=4.0)  # exactly our own four each
    for ticket in tickets:
        if endpoint_of(ticket) is endpoints[0]:
            balancer.close(ticket, Outcome.COMPLETED, now=0.2)
    counts = Counter(endpoint_of(place(balancer, now=0.2)).name for _ in range(4))
    assert counts == {"e1": 4}


def test_stale_endpoint_is_judged_by_in_flight_only() -> None:
    """Old gauges say nothing about now, neither good nor bad."""
    balancer, endpoints = pool_of(2)
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=50.0)
    show_gauges(balancer, endpoints[1].uid, now=0.0)
    assert endpoint_of(place(balancer, now=1.0)) is endpoints[1]
    later = [endpoint_of(place(balancer, now=10.0)).name for _ in range(3)]
    assert Counter(later) == {"e1": 2, "e2": 1}


def test_a_scrape_that_misses_running_still_counts_what_waits() -> None:
    balancer, endpoints = pool_of(2)
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=3.0, running=None)
    show_gauges(balancer, endpoints[1].uid, now=0.0, waiting=None, running=None)
    assert Counter(endpoint_of(place(balancer)).name for _ in range(3)) == {"e2": 3}


def test_round_robin_takes_turns_and_a_returning_endpoint_is_not_flooded() -> None:
    balancer, endpoints = pool_of(3, policy="round-robin", health=HealthSettings(slow_start=None))
    first = [endpoint_of(place(balancer)).name for _ in range(6)]
    assert first[:3] == first[3:]
    assert sorted(first[:3]) == ["e1", "e2", "e3"]
    for _ in range(3):
        balancer.report_health(endpoints[0].uid, False, "down", now=0.0)
    assert "e1" not in {endpoint_of(place(balancer)).name for _ in range(10)}
    for _ in range(2):
        balancer.report_health(endpoints[0].uid, True, "back", now=0.0)
    assert Counter(endpoint_of(place(balancer)).name for _ in range(6))["e1"] == 2


def test_random_spreads_and_repeats_with_its_seed() -> None:
    one, two = (
        [endpoint_of(place(b)).name for _ in range(300)] for b in (pool_of(3, policy="random")[0] for _ in "ab")
    )
    assert one == two
    assert min(Counter(one).values()) > 70


def test_ties_are_broken_at_random_not_by_order() -> None:
    first = {endpoint_of(place(pool_of(4, seed=seed)[0])).name for seed in range(40)}
    assert first == {"e1", "e2", "e3", "e4"}


def test_gie_prefers_short_queues_and_free_cache_and_never_what_it_cannot_see() -> None:
    """Its scores (queue 2, cache 2): e1 = 2*0 + 2*0.9, e2 = 2*1 + 2*0.5, e3 unknown."""
    balancer, endpoints = pool_of(3, policy="gie")
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=8.0, kv=0.1)
    show_gauges(balancer, endpoints[1].uid, now=0.0, waiting=2.0, kv=0.5)
    assert Counter(endpoint_of(place(balancer, now=0.1)).name for _ in range(20)) == {"e2": 20}


def test_weighted_scorers_weigh() -> None:
    for weights, best in (({"queue": 1.0, "kv-utilization": 9.0}, "e1"), ({"queue": 9.0, "kv-utilization": 1.0}, "e2")):
        balancer, endpoints = pool_of(2, policy="weighted", scorers=weights)
        show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=8.0, kv=0.1)
        show_gauges(balancer, endpoints[1].uid, now=0.0, waiting=2.0, kv=0.5)
        assert endpoint_of(place(balancer, now=0.1)).name == best


def test_a_down_endpoint_gets_nothing_until_it_is_up_again() -> None:
    balancer, endpoints = pool_of(2)
    for _ in range(3):
        assert not balancer.transitions
        balancer.report_health(endpoints[0].uid, False, "refused", now=0.0)
    (change,) = taken(balancer)
    assert (change.before, change.after, change.reason) == (Health.UP, Health.DOWN, "refused")
    assert {endpoint_of(place(balancer)).name for _ in range(4)} == {"e2"}
    balancer.report_health(endpoints[0].uid, True, "ok", now=0.0)
    assert not balancer.transitions
    balancer.report_health(endpoints[0].uid, True, "ok", now=0.0)
    (change,) = taken(balancer)
    assert (change.before, change.after, change.reason) == (Health.DOWN, Health.UP, "ok")
    assert endpoint_of(place(balancer)).name == "e1"


def test_one_bad_probe_between_good_ones_changes_nothing() -> None:
    balancer, endpoints = pool_of(1)
    for ok in (False, False, True) * 5:
        balancer.report_health(endpoints[0].uid, ok, "", now=0.0)
    assert not balancer.transitions


def test_nobody_up_is_said_at_once() -> None:
    balancer, endpoints = pool_of(2)
    for endpoint in endpoints:
        for _ in range(3):
            balancer.report_health(endpoint.uid, False, "", now=0.0)
    assert place(balancer).outcome is Outcome.NO_ENDPOINTS


def test_a_model_that_a_down_endpoint_served_is_unavailable_not_unknown() -> None:
    """404 tells a client to give up; 503 to come back."""
    balancer = make_balancer()
    one, two = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, [one], "a")
    bring_up(balancer, [two], "b")
    for _ in range(3):
        balancer.report_health(two.uid, False, "", now=0.0)
    assert place(balancer, "b").outcome is Outcome.NO_ENDPOINTS
    assert place(balancer, "c").outcome is Outcome.MODEL_NOT_FOUND
    assert endpoint_of(place(balancer, "a")) is one


def test_at_the_start_requests_wait_for_the_first_verdicts() -> None:
    """A request of the first millisecond must not be refused because no probe came back yet."""
    balancer = make_balancer()
    one, two = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    ticket = place(balancer)
    assert ticket.state is TicketState.WAITING
    assert balancer.next_deadline() == 30.0
    bring_up(balancer, [one], "other")
    assert balancer.poll(now=0.1) == []
    bring_up(balancer, [two])
    assert balancer.poll(now=0.2) == [ticket]
    assert endpoint_of(ticket) is two
    assert balancer.next_deadline() is None


def test_an_endpoint_not_judged_yet_never_makes_others_wait() -> None:
    balancer = make_balancer()
    one, _ = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, [one])
    assert endpoint_of(place(balancer)) is one


def test_the_wait_ends_when_the_last_endpoint_turns_out_dead() -> None:
    balancer = make_balancer()
    (one,) = balancer.set_endpoints([spec(1)], now=0.0).added
    ticket = place(balancer)
    balancer.report_health(one.uid, False, "refused", now=0.0)
    assert balancer.poll(now=0.1) == [ticket]
    assert ticket.outcome is Outcome.NO_ENDPOINTS


def test_an_endpoint_that_cannot_say_what_it_serves_is_asked_last() -> None:
    balancer = make_balancer()
    silent, known = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    balancer.report_models(silent.uid, None)
    balancer.report_health(silent.uid, True, "", now=0.0)
    assert endpoint_of(place(balancer, "anything")) is silent
    bring_up(balancer, [known], "b")
    assert {endpoint_of(place(balancer, "b")) for _ in range(3)} == {known}
    assert endpoint_of(place(balancer, "else")) is silent


def test_requests_without_a_model_go_anywhere() -> None:
    balancer, _ = pool_of(3)
    assert {endpoint_of(place(balancer, None)).name for _ in range(3)} == {"e1", "e2", "e3"}


def test_full_endpoints_make_requests_wait_in_order() -> None:
    balancer, _ = pool_of(2, admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    running = [place(balancer) for _ in range(2)]
    waiting = [place(balancer, now=1.0 + n) for n in range(3)]
    assert {ticket.state for ticket in waiting} == {TicketState.WAITING}
    balancer.close(running[0], Outcome.COMPLETED, now=5.0)
    assert balancer.poll(now=5.0) == [waiting[0]]
    balancer.close(waiting[1], Outcome.CLIENT_CLOSED, now=6.0)
    balancer.close(running[1], Outcome.COMPLETED, now=7.0)
    assert balancer.poll(now=7.0) == [waiting[2]]
    assert balancer.snapshot(now=7.0).waiting == 0


def test_a_wait_is_bounded_in_time() -> None:
    settings = AdmissionSettings.model_validate({"max_in_flight_per_endpoint": 1, "queue_timeout": "2s"})
    balancer, _ = pool_of(1, admission=settings)
    place(balancer)
    ticket = place(balancer, now=1.0)
    assert balancer.next_deadline() == 3.0
    assert balancer.poll(now=2.9) == []
    assert balancer.poll(now=3.0) == [ticket]
    assert ticket.outcome is Outcome.EXPIRED


@pytest.mark.parametrize(
    ("bound", "fits"), [({"queue_requests": 2}, 2), ({"queue_bytes": 250}, 2), ({"queue_requests": 0}, 0)]
)
def test_the_queue_is_bounded_in_requests_and_bytes(bound: dict[str, int], fits: int) -> None:
    settings = AdmissionSettings.model_validate({"max_in_flight_per_endpoint": 1, **bound})
    balancer, _ = pool_of(1, admission=settings)
    assert place(balancer).state is TicketState.PLACED
    tickets = [place(balancer) for _ in range(fits + 1)]
    assert [t.state for t in tickets[:fits]] == [TicketState.WAITING] * fits
    assert tickets[fits].outcome is Outcome.SATURATED


def test_one_model_waiting_does_not_hold_up_another() -> None:
    balancer = make_balancer(admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    one, two = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, [one], "a")
    bring_up(balancer, [two], "b")
    first, _ = place(balancer, "b"), place(balancer, "a")
    behind_a, behind_b = place(balancer, "a"), place(balancer, "b")
    balancer.close(first, Outcome.COMPLETED, now=1.0)
    assert balancer.poll(now=1.0) == [behind_b]
    assert behind_a.state is TicketState.WAITING
    assert balancer.snapshot(now=0.0).waiting == 1


def test_a_retry_avoids_what_failed_and_ends_when_nothing_else_is_left() -> None:
    balancer, endpoints = pool_of(2)
    avoid = frozenset({endpoints[0].uid})
    for _ in range(5):
        assert endpoint_of(balancer.submit(request(), now=0.0, avoid=avoid)) is endpoints[1]
    everywhere = frozenset(endpoint.uid for endpoint in endpoints)
    assert balancer.submit(request(), now=0.0, avoid=everywhere).outcome is Outcome.NO_ENDPOINTS


def test_close_counts_once_in_every_state() -> None:
    balancer, _ = pool_of(1, admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    placed, waiting = place(balancer), place(balancer)
    for ticket in (placed, waiting):
        for outcome in (Outcome.CLIENT_CLOSED, Outcome.COMPLETED):
            balancer.close(ticket, outcome, now=1.0)
        assert ticket.outcome is Outcome.CLIENT_CLOSED
    assert seen(balancer)["e1"].in_flight == 0
    assert balancer.snapshot(now=0.0).waiting_bytes == 0


def test_phases_are_counted() -> None:
    balancer, _ = pool_of(1)
    one, two = place(balancer), place(balancer)
    balancer.first_byte(one, now=0.1)
    balancer.first_byte(one, now=0.2)
    balancer.progress(one, 7, now=0.3)
    state = seen(balancer)["e1"]
    assert (state.in_flight, state.awaiting_first_byte, state.tokens_streamed) == (2, 1, 7)
    balancer.close(two, Outcome.UPSTREAM_TIMEOUT, now=1.0)
    balancer.close(one, Outcome.COMPLETED, now=1.0)
    balancer.progress(one, 7, now=1.0)
    state = seen(balancer)["e1"]
    assert (state.in_flight, state.awaiting_first_byte, state.tokens_streamed) == (0, 0, 7)


def test_an_endpoint_that_left_finishes_what_it_runs() -> None:
    balancer, endpoints = pool_of(2)
    tickets = [place(balancer) for _ in range(4)]
    changes = balancer.set_endpoints([spec(2), spec(3)], now=0.0)
    assert [e.name for e in changes.removed] == ["e1"]
    assert [e.name for e in changes.added] == ["e3"]
    assert changes.added[0].uid not in {e.uid for e in endpoints}
    assert {endpoint_of(place(balancer)).name for _ in range(3)} == {"e2"}, "e3 is not up yet"
    assert seen(balancer)["e1"].in_flight == 2
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=1.0)
    assert "e1" not in seen(balancer)


def test_an_address_that_comes_back_is_a_new_endpoint() -> None:
    balancer, endpoints = pool_of(1)
    balancer.set_endpoints([], now=0.0)
    (again,) = balancer.set_endpoints([spec(1)], now=0.0).added
    assert again.uid != endpoints[0].uid
    balancer.report_health(endpoints[0].uid, True, "late probe of the old one", now=0.0)
    assert not balancer.transitions
    assert seen(balancer)["e1"].health is Health.STARTING


def test_a_draining_endpoint_gets_nothing_new() -> None:
    balancer, endpoints = pool_of(2)
    balancer.drain(endpoints[0].uid)
    assert {endpoint_of(place(balancer)).name for _ in range(4)} == {"e2"}
    balancer.drain(endpoints[0].uid, draining=False)
    assert endpoint_of(place(balancer)).name == "e1"


def test_passive_endpoints_are_up_without_probes_and_stay_up() -> None:
    """`health: null`: nobody asks, so nobody can bring it back either."""
    balancer = make_balancer()
    (one,) = balancer.set_endpoints(
        [type(spec(1))(name="e1", base_url="http://10.0.0.1:8000", health=None)], now=0.0
    ).added
    balancer.report_models(one.uid, [card(MODEL)])
    assert endpoint_of(place(balancer)) is one
    for _ in range(10):
        balancer.report_health(one.uid, False, "connect failed", now=0.0)
    assert seen(balancer)["e1"].health is Health.UP


def test_models_merge_with_their_unknown_fields_and_the_first_endpoints_word() -> None:
    balancer = make_balancer()
    one, two = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, [one], "a")
    balancer.report_models(two.uid, [card("a"), card("b"), card("lora", parent="a")])
    balancer.report_health(two.uid, True, "", now=0.0)
    assert [c.id for c in balancer.endpoints.serving.model_cards()] == ["a", "b", "lora"]
    assert balancer.endpoints.serving.base_models() == ["a", "b"]


def test_the_snapshot_tells_stale_from_fresh() -> None:
    balancer, endpoints = pool_of(1)
    assert seen(balancer)["e1"].stale
    show_gauges(balancer, endpoints[0].uid, now=10.0, running=3.0)
    assert not seen(balancer, 11.0)["e1"].stale
    late = seen(balancer, 12.5)["e1"]
    assert (late.stale, late.metrics_age_s) == (True, 2.5)
