# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for the right moment: who is held, who goes first, and that nobody is forgotten.

A new pool assumes .1 ms a token, so an endpoint is full with 2,500 tokens of prefill (a quarter of a second).
"""

from __future__ import annotations

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.cache_report import RESTARTED
from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.policy import Prices
from lbproxy.core.queue.dispatcher import MAX_ALL_MOVES, MAX_MOVES, MAX_PRICED, MIN_PRICED, PRICE_AGAIN_S
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.limits import Limits
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.queue.waiting_queue import MAX_LOOKUPS, WaitingQueue, least_work
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.support.compiled import interpreted
from tests.support.pool import MODEL, bring_up, card, make_balancer, pool_of, spec


def ask(
    tokens: int = 1000, *, priority: int = 0, name: str = "r", keys: list[int] | None = None, model: str = MODEL
) -> InferenceRequest:
    return InferenceRequest(name, model, True, 4 * tokens, 4 * tokens, tuple(keys or ()), None, priority)


def adaptive(count: int, **admission: object) -> tuple[Balancer, list[Endpoint]]:
    return pool_of(count, policy="adaptive", admission=AdmissionSettings.model_validate(admission))


def states(tickets: list[Ticket]) -> str:
    """`p` placed, `w` waiting, `c` closed."""
    return "".join(ticket.state.value[0] for ticket in tickets)


def on(tickets: list[Ticket]) -> list[str]:
    return [ticket.placed_on.endpoint.name if ticket.placed_on else "-" for ticket in tickets]


def priced(balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> list[InferenceRequest]:
    """The requests that are priced from now on."""
    asked: list[InferenceRequest] = []
    price = balancer._choice.policy.price

    def counting(request: InferenceRequest, *rest: object, **options: object) -> Prices:
        asked.append(request)
        return price(request, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(balancer._choice.policy, "price", counting)
    return asked


def fill(balancer: Balancer, count: int, tokens: int = 3000, now: float = 0.0) -> list[Ticket]:
    """More than a quarter of a second of prefill for each of `count` idle endpoints."""
    tickets = [balancer.submit(ask(tokens), now=now) for _ in range(count)]
    assert states(tickets) == "p" * count
    return tickets


def serial(state: EndpointState, now: float) -> None:
    """It was seen to compute one prefill after the other."""
    state.load.room.lanes.queue_reported(1.0, 1, now)


def test_an_unsaturated_pool_places_at_once() -> None:
    balancer, _ = adaptive(4)
    tickets = [balancer.submit(ask(), now=0.0) for _ in range(8)]
    assert states(tickets) == "p" * 8
    assert sorted(on(tickets)) == ["e1", "e1", "e2", "e2", "e3", "e3", "e4", "e4"]
    assert balancer.next_deadline() is None


def test_what_exceeds_a_quarter_of_a_second_of_prefill_is_held_and_leaves_as_room_comes() -> None:
    balancer, _ = adaptive(2)
    running = fill(balancer, 2, tokens=5000)
    waiting = [balancer.submit(ask(), now=0.0) for _ in range(3)]
    assert states(waiting) == "www"
    assert balancer.poll(now=0.0) == []
    balancer.first_byte(running[0], now=0.1)
    placed = balancer.poll(now=0.1)
    assert states(waiting) == "ppp", "2,500 tokens are room for 3 * 1,000: the last begins in time"
    assert set(map(id, placed)) == set(map(id, waiting))
    assert set(on(placed)) == set(on(running[:1]))


def test_waiting_ends_also_when_nothing_is_heard() -> None:
    """Work gets done between two first bytes; the moment in which it is little enough is known."""
    balancer, _ = adaptive(1)
    fill(balancer, 1)
    ticket = balancer.submit(ask(), now=0.0)
    assert balancer.poll(now=0.0) == []
    assert balancer.next_deadline() == pytest.approx(0.05, abs=1e-5), "3,000 tokens are down to 2,500"
    assert balancer.poll(now=0.049) == []
    assert balancer.poll(now=0.0501) == [ticket]


def test_a_newcomer_goes_at_once_where_nobody_waits() -> None:
    """Six are held for the endpoint that has their prefix; 50 of another kind are not behind them."""
    balancer, endpoints = adaptive(3)
    keys = list(range(400))
    home = balancer.submit(ask(102_400, keys=keys), now=0.0)
    balancer.first_byte(home, now=0.5)
    balancer.close(home, Outcome.COMPLETED, now=0.6, usage=Usage(102_400, 0, 10))
    elsewhere = frozenset(endpoint.uid for endpoint in endpoints) - {home.placed_state.endpoint.uid}
    busy = balancer.submit(ask(3000), now=0.6, avoid=elsewhere)
    assert busy.placed_state is home.placed_state
    serial(home.placed_state, 0.6)
    held = [balancer.submit(ask(102_400, keys=keys), now=0.6) for _ in range(6)]
    assert states(held) == "w" * 6
    others = [balancer.submit(ask(10, name=str(n)), now=0.6) for n in range(50)]
    assert states(others) == "p" * 50
    assert home.placed_state.endpoint.name not in on(others)


def test_shortest_work_first_counting_what_is_cached() -> None:
    balancer, _ = adaptive(1)
    (running,) = fill(balancer, 1)
    warm = balancer.submit(ask(1024, keys=[1, 2, 3, 4]), now=0.0)
    assert warm.state is TicketState.WAITING
    balancer.close(warm, Outcome.CLIENT_CLOSED, now=0.0)
    running.placed_on.load.kv.cache.pin((1, 2, 3, 4))  # type: ignore[union-attr]
    names = {"long": ask(1900, name="long"), "mid": ask(1500, name="mid"), "warm": ask(1025, keys=[1, 2, 3, 4])}
    tickets = {name: balancer.submit(request, now=0.0) for name, request in names.items()}
    balancer.close(running, Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [tickets["warm"], tickets["mid"], tickets["long"]]


def test_age_counts() -> None:
    """After 30 s a request counts as a quarter of its work."""
    balancer, _ = adaptive(1, queue_timeout="1h")
    (running,) = fill(balancer, 1, tokens=10**6)
    old = balancer.submit(ask(2400), now=0.0)
    young = balancer.submit(ask(700), now=30.0)
    balancer.close(running, Outcome.COMPLETED, now=30.0)
    assert balancer.poll(now=30.0) == [old, young]


def test_held_requests_do_not_all_wait_for_the_same_endpoint() -> None:
    """A plan in which each sees only what is real would send them all where the queue is shortest."""
    balancer, _ = adaptive(2)
    one, two = fill(balancer, 2, tokens=10_000)
    serial(one.placed_state, 0.0)
    serial(two.placed_state, 0.0)
    waiting = [balancer.submit(ask(2800), now=0.0) for _ in range(4)]
    balancer.first_byte(one, now=0.1)
    balancer.first_byte(two, now=0.1)
    assert len(balancer.poll(now=0.1)) == 2
    assert sorted(on([t for t in waiting if t.state is TicketState.PLACED])) == ["e1", "e2"]


def test_a_reservation_lets_those_behind_see_what_is_spoken_for() -> None:
    """e1 has the prefix and .3 s of work; the cold e2 costs 1.1 s and a stall. Some wait for e1, one after the other,
    and then e2 is better.
    """
    balancer, _ = adaptive(2)
    one, two = fill(balancer, 2)
    keys = list(range(40))
    assert one.placed_on is not None
    one.placed_on.load.kv.cache.pin(tuple(keys))
    waiting = [balancer.submit(ask(11_000, keys=[*keys, 100 + n]), now=0.0) for n in range(60)]
    assert {ticket.best for ticket in waiting} == {one.placed_on, two.placed_on}
    learned = balancer.learned(now=0.0)
    assert learned is not None
    held = [learned[1][ticket.placed_state.endpoint.uid].held for ticket in (one, two)]
    assert sum(held) == 60
    assert held[0] > held[1] > 0
    for ticket in waiting:
        balancer.close(ticket, Outcome.CLIENT_CLOSED, now=0.0)
    learned = balancer.learned(now=0.0)
    assert learned is not None
    assert [one.held for one in learned[1].values()] == [0, 0]


def test_priority_goes_first_and_is_not_bought_by_being_short() -> None:
    balancer, _ = adaptive(1)
    (running,) = fill(balancer, 1)
    low = balancer.submit(ask(100, priority=-1), now=0.0)
    plain = balancer.submit(ask(200), now=0.0)
    high = balancer.submit(ask(1000, priority=5), now=0.0)
    balancer.close(running, Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [high, plain, low]


def test_a_full_queue_sheds_the_least_important_and_among_those_the_youngest() -> None:
    balancer, _ = adaptive(1, queue_requests=3)
    fill(balancer, 1, tokens=10**6)
    old, young, plain = (balancer.submit(ask(priority=p), now=0.0) for p in (-1, -1, 0))
    balancer.poll(now=0.0)
    assert balancer.submit(ask(priority=-1), now=0.1).outcome is Outcome.SATURATED, "no better than those that wait"
    high = balancer.submit(ask(priority=1), now=0.1)
    assert balancer.next_deadline() is not None
    assert balancer.poll(now=0.1) == [young]
    assert young.outcome is Outcome.SATURATED
    assert states([old, plain, high]) == "www"
    assert balancer.submit(ask(), now=0.2).state is TicketState.WAITING
    assert old.outcome is Outcome.SATURATED
    assert balancer.submit(ask(), now=0.2).outcome is Outcome.SATURATED
    assert balancer.poll(now=0.2) == [old]


def test_a_large_body_sheds_several_or_nobody() -> None:
    balancer, _ = adaptive(1, queue_bytes=100_000)
    fill(balancer, 1, tokens=10**6)
    small = [balancer.submit(ask(5000, priority=-n), now=0.0) for n in range(5)]  # 20,000 bytes each
    huge = balancer.submit(ask(25_001, priority=9), now=0.0)
    assert huge.outcome is Outcome.SATURATED, "it would not fit into an empty queue"
    assert states(small) == "wwwww"
    large = balancer.submit(ask(10_000, priority=9), now=0.0)
    assert states(small) == "wwwcc"
    assert large.state is TicketState.WAITING
    assert balancer.snapshot(now=0.0).waiting_bytes == 100_000
    assert balancer.poll(now=0.0) == [small[4], small[3]]


def test_a_client_that_leaves_is_out_of_the_queue() -> None:
    balancer, _ = adaptive(1)
    (running,) = fill(balancer, 1)
    one, two = (balancer.submit(ask(), now=0.0) for _ in range(2))
    balancer.close(one, Outcome.CLIENT_CLOSED, now=0.0)
    assert balancer.snapshot(now=0.0).waiting == 1
    balancer.close(running, Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [two]
    assert balancer.next_deadline() is None


def test_a_held_request_waits_only_so_long() -> None:
    balancer, _ = adaptive(1, queue_timeout="5s")
    fill(balancer, 1, tokens=10**6)
    ticket = balancer.submit(ask(), now=1.0)
    assert balancer.poll(now=5.9) == []
    assert balancer.poll(now=6.0) == [ticket]
    assert ticket.outcome is Outcome.EXPIRED


@pytest.mark.parametrize("later", [0.0, 5.0], ids=["at once", "when one of them might try an endpoint"])
def test_held_requests_learn_that_their_endpoints_are_gone(later: float) -> None:
    balancer, endpoints = adaptive(2)
    fill(balancer, 2, tokens=10**6)
    waiting = [balancer.submit(ask(), now=0.0) for _ in range(50)]
    for endpoint in endpoints:
        for _ in range(3):
            balancer.report_health(endpoint.uid, False, "", now=0.0)
    told = balancer.poll(now=later)
    while balancer.next_deadline() is not None:  # so many at a time, but all of them now
        told += balancer.poll(now=later)
    assert len(told) == 50
    trials = [ticket for ticket in waiting if ticket.is_trial]
    assert len(trials) == (2 if later else 0)
    assert all(ticket.outcome is Outcome.NO_ENDPOINTS for ticket in waiting if ticket not in trials)


def test_one_saturated_model_does_not_hold_up_another() -> None:
    """More of them wait than a plan looks at."""
    balancer = make_balancer(policy="adaptive")
    one, two = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, [one], "a")
    bring_up(balancer, [two], "b")
    balancer.submit(ask(10**6, model="a"), now=0.0)
    stuck = [balancer.submit(ask(100, model="a"), now=0.0) for _ in range(100)]
    assert balancer.poll(now=0.1) == []
    other = balancer.submit(ask(5000, model="b"), now=0.1)
    assert other.placed_state.endpoint.uid == two.uid
    assert states(stuck) == "w" * 100


def test_many_models_that_have_no_place_do_not_hold_up_the_last() -> None:
    """One request waits for each of more models than are priced in one pass, and a place is free for the last one's."""
    models = [f"m{n}" for n in range(MAX_PRICED + 8)]
    balancer = make_balancer(policy="adaptive", admission=AdmissionSettings(max_in_flight_per_endpoint=1))
    endpoints = balancer.set_endpoints([spec(n) for n in range(len(models))], now=0.0).added
    for endpoint, model in zip(endpoints, models, strict=True):
        bring_up(balancer, [endpoint], model)
    running = [balancer.submit(ask(10, model=model), now=0.0) for model in models]
    waiting = [balancer.submit(ask(10, model=model), now=0.1) for model in models]
    assert states(running + waiting) == "p" * len(models) + "w" * len(models)
    balancer.close(running[-1], Outcome.COMPLETED, now=1.0)
    balancer.poll(now=1.0)
    assert states(waiting) == "w" * (len(models) - 1) + "p"


@interpreted
def test_so_many_are_priced_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All want the busy e1, where the prefix is; e2 has room, and each time some of them could go there instead."""
    balancer, _ = adaptive(2)
    one, two = fill(balancer, 2, tokens=4000)
    keys = list(range(400))
    assert one.placed_on is not None
    one.placed_on.load.kv.cache.pin(tuple(keys))
    waiting = [balancer.submit(ask(102_400, keys=keys), now=0.0) for _ in range(100)]
    asked = priced(balancer, monkeypatch)
    balancer.first_byte(two, now=0.1)
    assert balancer.poll(now=0.1) == []
    assert len(asked) == MAX_MOVES
    assert states(waiting) == "w" * 100
    balancer.progress(two, 1, now=0.101)
    assert balancer.poll(now=0.101) == []
    assert len(asked) == MAX_MOVES, "nothing happened"
    balancer.close(two, Outcome.COMPLETED, now=0.102)
    balancer.poll(now=0.102)
    assert len(asked) == 2 * MAX_MOVES, "others: the first were priced just now"
    assert MAX_ALL_MOVES < MIN_PRICED < MAX_PRICED
    assert PRICE_AGAIN_S > 0.002


@interpreted
@pytest.mark.parametrize(("endpoints", "at_a_time"), [(4, MAX_PRICED), (800, 20), (2000, MIN_PRICED)])
def test_fewer_are_priced_at_a_time_over_many_endpoints(
    endpoints: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that wait may be served, one pass after the other."""
    balancer, _ = adaptive(endpoints)
    running = [balancer.submit(ask(10_000), now=0.0) for _ in range(endpoints)]
    waiting = [balancer.submit(ask(100, name=f"r{n}"), now=0.0) for n in range(100)]
    assert states(running + waiting) == "p" * endpoints + "w" * 100
    for ticket in running:
        balancer.first_byte(ticket, now=1.0)
    asked = priced(balancer, monkeypatch)
    balancer.poll(now=1.0)
    assert len(asked) == at_a_time
    passes = 1
    while balancer.poll(now=1.0):
        passes += 1
    assert states(waiting) == "p" * 100
    assert passes == -(-100 // at_a_time)


def test_nobody_is_asked_while_no_endpoint_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer, endpoints = adaptive(2)
    running = fill(balancer, 2, tokens=10**6)
    waiting = [balancer.submit(ask(), now=0.0) for _ in range(20)]
    monkeypatch.setattr(balancer._choice.policy, "price", None)
    balancer.progress(running[0], 1, now=1.0)
    balancer.scrape_sent(endpoints[0].uid)
    balancer.report_scrape(endpoints[0].uid, LoadMetrics(scraped_at=1.0))
    assert balancer.poll(now=1.0) == []
    assert states(waiting) == "w" * 20


def test_without_hold_all_leave_at_once() -> None:
    for admission in ({"hold": False}, {"order": "fcfs"}):
        balancer, _ = adaptive(1, **admission)
        assert states([balancer.submit(ask(10**6), now=0.0) for _ in range(5)]) == "ppppp"


def test_first_come_first_served_can_hold_too() -> None:
    balancer, _ = adaptive(1, order="fcfs", hold=True)
    (running,) = fill(balancer, 1)
    first, second = balancer.submit(ask(2000), now=0.0), balancer.submit(ask(10), now=0.0)
    balancer.close(running, Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [first, second]


def test_the_limit_per_endpoint_holds_also_without_hold() -> None:
    """And among those that wait the shortest goes first, as the policy knows which that is."""
    balancer, _ = adaptive(1, hold=False, max_in_flight_per_endpoint=1)
    running = balancer.submit(ask(), now=0.0)
    long, short = balancer.submit(ask(9000), now=0.0), balancer.submit(ask(100), now=0.0)
    assert states([running, long, short]) == "pww"
    balancer.close(running, Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [short]
    balancer.close(short, Outcome.COMPLETED, now=0.2)
    assert balancer.poll(now=0.2) == [long]


def test_the_limit_per_endpoint_holds_with_hold() -> None:
    balancer, _ = adaptive(2, max_in_flight_per_endpoint=1)
    tickets = [balancer.submit(ask(10), now=0.0) for _ in range(3)]
    balancer.poll(now=0.0)
    assert states(tickets) == "ppw"
    balancer.close(tickets[0], Outcome.COMPLETED, now=0.1)
    assert balancer.poll(now=0.1) == [tickets[2]]


def test_an_adapter_is_known_by_its_card() -> None:
    balancer = make_balancer(policy="adaptive")
    endpoints = balancer.set_endpoints([spec(n) for n in range(1, 5)], now=0.0).added
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card(MODEL), card("lora", parent=MODEL)])
        balancer.report_health(endpoint.uid, True, "", now=0.0)
    home = balancer.submit(ask(10, model="lora"), now=0.0)
    balancer.close(home, Outcome.COMPLETED, now=0.1)
    later = [balancer.submit(ask(10, model="lora"), now=0.2) for _ in range(2)]
    assert on(later[:1]) == on([home]), "loaded there"
    assert on([balancer.submit(ask(10), now=0.2)]) != on([home]), "the base model is everywhere"


def test_a_scrape_and_a_restart_reach_the_model_of_the_cache() -> None:
    balancer, endpoints = adaptive(2)
    home = balancer.submit(ask(4096, keys=list(range(16))), now=0.0)
    balancer.close(home, Outcome.COMPLETED, now=0.5, usage=Usage(4096, 0, 10))
    again = ask(4100, keys=list(range(16)))
    for _ in range(4):
        ticket = balancer.submit(again, now=1.0)
        balancer.first_byte(ticket, now=1.0)
        balancer.close(ticket, Outcome.COMPLETED, now=1.0)
        assert on([ticket]) == on([home])
    assert home.placed_on is not None
    uid = home.placed_on.endpoint.uid
    for started_at, cached in ((7.0, 16), (7.0, 16), (8.0, 0)):
        balancer.scrape_sent(uid)
        balancer.report_scrape(uid, LoadMetrics(scraped_at=2.0, started_at=started_at))
        assert home.placed_on.load.kv.cache.size == cached
    balancer.close(balancer.submit(again, now=3.0), Outcome.COMPLETED, now=3.0)
    for endpoint in endpoints:
        balancer.report_cache(endpoint.uid, RESTARTED)
    balancer.report_cache(EndpointUid(999), RESTARTED)
    assert home.placed_on.load.pool.index.entries == 0


def test_policies_without_models_keep_none() -> None:
    balancer, endpoints = pool_of(1)
    ticket = balancer.submit(ask(), now=0.0)
    assert ticket.placement is None
    assert balancer.block_bytes is None
    balancer.report_cache(endpoints[0].uid, RESTARTED)
    assert adaptive(1)[0].block_bytes == 1024


def test_the_same_seed_decides_the_same() -> None:
    def run() -> list[str]:
        balancer, _ = adaptive(5)
        tickets: list[Ticket] = []
        for n in range(300):
            now = n * 0.01
            keys = [n % 7 * 100 + k for k in range(n % 11)]
            tickets.append(balancer.submit(ask(2500 * (n % 11) + 10, keys=keys), now=now))
            balancer.poll(now=now)
            if n % 3 == 0:
                balancer.first_byte(tickets[n // 2], now=now)
            if n % 2 == 0:
                balancer.close(tickets[n // 3], Outcome.COMPLETED, now=now)
            balancer.poll(now=now)
        return on(tickets)

    first = run()
    assert first == run()
    assert len(set(first)) == 6, "all five, and some waited or were given up"


def test_the_threshold_is_what_the_docs_say() -> None:
    assert HOLD_MS == 250.0


def test_few_of_many_are_looked_up_and_the_oldest_first() -> None:
    """10,000 that wait must not hold up the loop because half a second has passed; who is new is always looked up."""
    asked: list[str] = []

    def uncached(request: InferenceRequest) -> float:
        asked.append(request.id)
        return 1.0

    queue, flows = WaitingQueue(AdmissionSettings(queue_requests=100_000)), Flows(FlowsSettings(), Limits())
    for number in range(MAX_LOOKUPS + 100):
        ticket = Ticket(InferenceRequest(str(number), None), 0.0, 60.0, frozenset())
        ticket.flow = flows.of("one", 0.0)
        queue.push(ticket)
    list(queue.in_order(least_work(uncached, 0.0), flows, 0.0))
    assert len(asked) == MAX_LOOKUPS + 100
    asked.clear()
    list(queue.in_order(least_work(uncached, 1.0), flows, 1.0))
    assert asked == [str(number) for number in range(MAX_LOOKUPS)]
    list(queue.in_order(least_work(uncached, 1.01), flows, 1.01))
    assert asked[MAX_LOOKUPS:] == [str(MAX_LOOKUPS + number) for number in range(100)]


def test_an_endpoint_that_reports_more_slots_gets_what_waits_for_it() -> None:
    """An engine that was started anew with more of them; no other event need come."""
    balancer, (one,) = adaptive(1)
    balancer.report_slots(one.uid, 4)
    tickets = [balancer.submit(ask(10), now=0.0) for _ in range(12)]
    waiting = states(tickets).count("w")
    assert waiting
    balancer.report_slots(one.uid, 64)
    balancer.poll(now=0.0)
    assert states(tickets) == "p" * 12


def test_an_endpoint_that_reports_a_larger_cache_gets_what_waits_for_its_space() -> None:
    """Responses that will not fit into the reported cache fit into a larger one; no other event need come."""
    balancer, (one,) = adaptive(1)
    balancer.report_cache_size(one.uid, 900)
    for ticket in [balancer.submit(ask(1), now=0.0) for _ in range(10)]:
        balancer.first_byte(ticket, now=0.0)
    balancer.scrape_sent(one.uid)
    balancer.report_scrape(one.uid, LoadMetrics(scraped_at=0.0, waiting=2.0, running=10.0, kv_utilization=1.0))
    balancer.report_scrape(one.uid, LoadMetrics(scraped_at=0.1, waiting=0.0, running=8.0, kv_utilization=0.5))
    waiting = balancer.submit(ask(1), now=0.1)
    assert balancer.poll(now=0.1) == []
    assert states([waiting]) == "w", "ten responses of 200 tokens, half done, will need more than the other half"
    balancer.report_cache_size(one.uid, 100_000)
    assert balancer.poll(now=0.1) == [waiting]
    assert states([waiting]) == "p"
