# SPDX-License-Identifier: Apache-2.0
"""The rules of other routers decide as their sources say, each in a case where another rule would decide otherwise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.registry import POLICIES
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, bring_up, card, make_balancer, pool_of, show_gauges, spec

WARM = list(range(100))
"""Keys of a prompt of 6,400 tokens."""


def ask(tokens: int, keys: list[int] | None = None, *, priority: int = 0, model: str = MODEL) -> InferenceRequest:
    return InferenceRequest("r", model, True, 0, 4 * tokens, tuple(keys or ()), None, priority)


def fleet(policy: str, count: int = 3) -> tuple[Balancer, list[EndpointState]]:
    """With fresh gauges that show nothing."""
    balancer, endpoints = pool_of(count, policy=policy)
    for endpoint in endpoints:
        show_gauges(balancer, endpoint.uid, now=0.0)
    return balancer, [state_of(balancer, endpoint) for endpoint in endpoints]


def state_of(balancer: Balancer, endpoint: Endpoint) -> EndpointState:
    state = balancer._endpoints.get(endpoint.uid)
    assert state is not None
    return state


def load(state: EndpointState, requests: int, tokens: int = 100, keys: list[int] | None = None) -> None:
    """Requests in flight there, without a first byte."""
    for _ in range(requests):
        state.load.place(ask(tokens, keys), 0.0)
        state.in_flight += 1


def cache(state: EndpointState, keys: list[int]) -> None:
    """A request that was served there."""
    state.load.kv.cache.unpin(state.load.kv.cache.pin(tuple(keys))[1])


def chosen(balancer: Balancer, request: InferenceRequest, now: float = 0.1) -> str:
    """Who gets it; it is over at once."""
    ticket = balancer.submit(request, now=now)
    assert ticket.placed_on is not None
    balancer.close(ticket, Outcome.CLIENT_CLOSED, now=now)
    return ticket.placed_on.endpoint.name


def test_two_choices_never_take_the_fullest_and_not_always_the_emptiest() -> None:
    balancer, states = fleet("p2c")
    states[0].in_flight, states[1].in_flight = 9, 5
    counts = Counter(chosen(balancer, ask(1)) for _ in range(300))
    assert counts["e1"] == 0
    assert counts["e3"] == pytest.approx(200, abs=40), "two pairs of three have it"


def test_gie_weighs_prefix_against_queue_and_cache() -> None:
    """Prefix 3 wins over 2 of the queue, and loses against queue and cache together."""
    balancer, endpoints = pool_of(2, policy="gie")
    cache(state_of(balancer, endpoints[0]), WARM)
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=9.0, kv=0.1)
    show_gauges(balancer, endpoints[1].uid, now=0.0, waiting=0.0, kv=0.1)
    assert chosen(balancer, ask(6400, WARM)) == "e1"
    assert chosen(balancer, ask(6400, [*range(50), *range(500, 550)])) == "e2", "half a match is worth 1.5"
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=9.0, kv=0.8)
    assert chosen(balancer, ask(6400, WARM)) == "e2"


def test_the_tree_takes_short_queues_then_free_cache() -> None:
    balancer, endpoints = pool_of(3, policy="gie-tree")
    for endpoint, waiting, kv in zip(endpoints, (0.0, 1.0, 90.0), (0.9, 0.1, 0.0), strict=True):
        show_gauges(balancer, endpoint.uid, now=0.0, waiting=waiting, kv=kv)
    assert {chosen(balancer, ask(1)) for _ in range(20)} == {"e2"}, "0 and 1 are in the first third of 0 to 90"


def test_the_tree_refuses_what_can_wait_when_nobody_is_free() -> None:
    balancer, endpoints = pool_of(1, policy="gie-tree")
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=6.0, kv=0.1)
    assert balancer.submit(ask(1, priority=-1), now=0.1).outcome is Outcome.SATURATED
    assert balancer.submit(ask(1), now=0.1).state is TicketState.PLACED
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=5.0, kv=0.81)
    assert balancer.submit(ask(1, priority=-1), now=0.1).outcome is Outcome.SATURATED
    show_gauges(balancer, endpoints[0].uid, now=0.0, waiting=5.0, kv=0.8)
    assert balancer.submit(ask(1, priority=-1), now=0.1).state is TicketState.PLACED
    assert balancer.submit(ask(1, priority=-1), now=99.0).outcome is Outcome.SATURATED, "stale gauges count as full"


def test_the_tree_stays_with_an_adapter_below_128_waiting() -> None:
    balancer = make_balancer(policy="gie-tree")
    endpoints = balancer.set_endpoints([spec(1), spec(2)], now=0.0).added
    bring_up(balancer, endpoints)
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card(MODEL), card("lora", parent=MODEL)])
    for endpoint, waiting in zip(endpoints, (100.0, 0.0), strict=True):
        show_gauges(balancer, endpoint.uid, now=0.0, waiting=waiting)
    state_of(balancer, endpoints[0]).load.adapters.placed("lora", 0.0)
    assert {chosen(balancer, ask(1, model="lora")) for _ in range(20)} == {"e1"}
    assert chosen(balancer, ask(1)) == "e2"
    for endpoint, waiting in zip(endpoints, (200.0, 130.0), strict=True):
        show_gauges(balancer, endpoint.uid, now=0.0, waiting=waiting)
    assert chosen(balancer, ask(1, model="lora")) == "e2"


def test_llm_d_sticks_to_the_warm_for_18_seconds() -> None:
    """At .1 ms a token that is 180,000 tokens."""
    balancer, states = fleet("llm-d")
    cache(states[0], WARM[:80])
    load(states[0], 1, 170_000)
    assert chosen(balancer, ask(6400, WARM)) == "e1"
    assert chosen(balancer, ask(6400, [*WARM[:79], *range(500, 521)])) != "e1", "79 of 100 blocks are not warm"
    load(states[0], 1, 11_000)
    assert chosen(balancer, ask(6400, WARM)) != "e1"


def test_llm_d_takes_the_least_tokens_among_equals() -> None:
    balancer, states = fleet("llm-d")
    load(states[0], 1, 3000)
    load(states[1], 5, 100)
    load(states[2], 1, 2000)
    assert chosen(balancer, ask(100)) == "e2"


def test_cache_aware_has_its_three_cases() -> None:
    balancer, states = fleet("cache-aware")
    cache(states[0], WARM)
    cache(states[1], list(range(1000, 1010)))
    assert chosen(balancer, ask(6400, WARM)) == "e1"
    assert chosen(balancer, ask(6400, [*range(30), *range(500, 570)])) == "e3", "0.3 is not above 0.3: emptiest cache"
    load(states[0], 64)
    assert chosen(balancer, ask(6400, WARM)) == "e1"
    load(states[0], 1)
    load(states[2], 1)
    assert chosen(balancer, ask(6400, WARM)) == "e2", "65 apart and more than 1.5 times"
    for state in states:
        load(state, 140)
    other = list(range(2000, 2100))
    cache(states[0], other)
    assert chosen(balancer, ask(6400, other)) == "e1", "65 apart, but 205 is not much more than 140"


def test_prefix_hash_stays_until_its_endpoint_is_full() -> None:
    balancer, states = fleet("prefix-hash", 4)
    homes = {n: chosen(balancer, ask(256, [n, n + 1, n + 2, n])) for n in range(60)}
    assert set(homes.values()) == {"e1", "e2", "e3", "e4"}
    assert all(chosen(balancer, ask(900, [n, n + 1, n + 2, n, 77])) == home for n, home in homes.items())
    for state in states:
        load(state, 8)
    home = next(state for state in states if state.endpoint.name == homes[0])
    load(home, 4)
    assert chosen(balancer, ask(256, [0, 1, 2, 0])) != homes[0], "12 of at most 1.25 * 37 / 4"


def test_preble_goes_to_the_least_loaded_holder_or_by_load() -> None:
    balancer, states = fleet("preble")
    cache(states[0], WARM)
    cache(states[1], WARM)
    load(states[0], 1, 15_000)
    load(states[1], 1, 12_000)
    load(states[2], 1, 1000)
    assert chosen(balancer, ask(6500, WARM)) == "e2"
    assert chosen(balancer, ask(20_000, WARM)) == "e3", "mostly new: 1,000 + 20,000 tokens against 12,000 + 13,600"
    load(states[0], 1, 90_000)
    load(states[1], 1, 90_000)
    assert chosen(balancer, ask(6500, WARM)) == "e3", "the load ratio is too high"


def test_dynamo_adds_prefill_and_space() -> None:
    balancer, states = fleet("dynamo")
    cache(states[0], WARM)
    assert chosen(balancer, ask(6400, WARM)) == "e1"
    load(states[0], 1, 7000)
    assert chosen(balancer, ask(6400, WARM)) != "e1"


def test_lmetric_multiplies() -> None:
    """(1,000 + 500) * 2 on e1, 500 * 5 on e2, (2,000 + 500) * 2 on e3."""
    balancer, states = fleet("lmetric")
    load(states[0], 1, 1000)
    load(states[1], 4, 100)
    for placement in list(states[1].load.work.pending):
        states[1].load.first_byte(placement, 0.05)
    load(states[2], 1, 2000)
    assert chosen(balancer, ask(500)) == "e2"
    load(states[1], 1, 200)
    assert chosen(balancer, ask(500)) == "e1"


def test_min_ttft_cares_for_nobody_else() -> None:
    balancer, states = fleet("min-ttft", 2)
    load(states[0], 50)
    for placement in list(states[0].load.work.pending):
        states[0].load.first_byte(placement, 0.05)
    load(states[1], 1, 6000)
    assert chosen(balancer, ask(500)) == "e1", "50 streams, but nothing queued"


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "weighted"])
def test_every_policy_can_decide_in_every_state(name: str) -> None:
    """Without gauges, without a prompt, with one candidate, under load."""
    rng = random.Random(1)
    balancer, endpoints = pool_of(3, policy=name, admission=AdmissionSettings(max_in_flight_per_endpoint=40))
    tickets: list[Ticket] = []
    for n in range(300):
        now = n * 0.01
        if n == 100:
            show_gauges(balancer, endpoints[0].uid, now=now, waiting=3.0, kv=0.5)
        keys = [rng.randrange(9) * 100 + k for k in range(rng.randrange(12))]
        tickets.append(balancer.submit(ask(rng.randrange(900), keys, priority=rng.randrange(-1, 2)), now=now))
        ticket = rng.choice(tickets)
        balancer.first_byte(ticket, now=now)
        balancer.progress(ticket, 5, now=now)
        balancer.poll(now=now)
        balancer.close(rng.choice(tickets), Outcome.COMPLETED, now=now)
    assert sum(ticket.placed_on is not None for ticket in tickets) > 60 or name == "gie-tree"
    for ticket in tickets:
        balancer.close(ticket, Outcome.COMPLETED, now=4.0)
    assert sum(one.in_flight for one in balancer.snapshot(now=4.0).endpoints) == 0
