# SPDX-License-Identifier: Apache-2.0
"""The adaptive price, term by term, with numbers that can be checked by hand.

A new pool believes: .1 ms a token, 40 ms fixed, 200 tokens of answer, 30 % of prompts cached, 4 bytes a token, gaps of
15 ms + .0001 ms a token; caches of 2 million tokens.
"""

from __future__ import annotations

import random
from math import inf

import pytest

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.placement import freed_per_ms
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.adaptive import COPY, DECODE, DEMAND, OVERDUE, STALL, STEPS, Adaptive
from lbproxy.core.policies.policy import Context, Prices
from lbproxy.core.requests.request import InferenceRequest

BASE, DECODES = 40.0, DECODE * 200 * 15.0


def pool_of(count: int) -> tuple[PoolModel, list[EndpointState]]:
    pool = PoolModel(1024)
    states = []
    for n in range(count):
        state = EndpointState(Endpoint(uid=EndpointUid(n + 1), name=f"e{n}", base_url=f"http://10.0.0.{n}:8000"))
        state.load = LoadModel(pool)
        state.load.speed.gap_per_token_ms = 0.0  # so that decode is the same everywhere, but where a test wants it
        state.load.speed.gap_until = float("inf")
        states.append(state)
    return pool, states


def prompt(tokens: int, keys: list[int] | None = None, model: str = "m") -> InferenceRequest:
    return InferenceRequest("r", model, True, 4 * tokens, 4 * tokens, tuple(keys or ()))


def price(
    request: InferenceRequest, states: list[EndpointState], context: Context | None = None, *, now: float = 0.0
) -> Prices:
    return Adaptive().price(request, states, context or Context(now))


def decoding(state: EndpointState, streams: int, tokens: int = 1) -> None:
    """So many streams there, beyond their first byte."""
    for _ in range(streams):
        load = state.load
        load.first_byte(load.place(prompt(tokens), 0.0), 0.0)


def test_an_idle_endpoint_costs_its_own_time() -> None:
    _, states = pool_of(1)
    prices = price(prompt(2000), states)
    assert prices.costs == pytest.approx([BASE + 200.0 + DECODES])
    assert (prices.waits_ms, prices.work_tokens) == ([0.0], [2000.0])


def test_a_response_is_not_expected_to_be_longer_than_its_limit() -> None:
    pool, states = pool_of(1)
    for limit, tokens in ((20, 20.0), (200, 200.0), (10_000, pool.output_tokens)):
        prices = price(prompt(2000)._replace(max_tokens=limit), states)
        assert prices.costs == pytest.approx([BASE + 200.0 + DECODES * tokens / 200.0])


def test_what_is_cached_need_not_be_computed() -> None:
    _, (warm, cold) = pool_of(2)
    warm.load.end(warm.load.place(prompt(1024, [1, 2, 3, 4]), 0.0), None, 0.0)
    warm.load.pool.hit_ratio = 0.0
    prices = price(prompt(1536, [1, 2, 3, 4, 5, 6]), [warm, cold])
    assert prices.work_tokens == [512.0, 1536.0]
    assert prices.costs[1] - prices.costs[0] == pytest.approx(102.4)


def test_a_prompt_that_is_cached_whole_still_costs_a_token() -> None:
    _, (warm,) = pool_of(1)
    warm.load.place(prompt(1024, [1, 2, 3, 4]), 0.0)
    assert price(prompt(1024, [1, 2, 3, 4]), [warm]).work_tokens == [1.0]


def test_a_token_behind_a_long_context_is_more_work() -> None:
    """2,000 tokens behind 22,000: half of their own and those are 23,000 on average, 15,000 beyond what is short."""
    pool, (warm, cold) = pool_of(2)
    keys = list(range(100))
    warm.load.end(warm.load.place(prompt(22_000, keys[:86]), 0.0), None, 0.0)
    matched = 86 * 1024 / pool.bytes_per_token
    prices = price(prompt(24_000, keys), [warm, cold])
    left = 24_000 - matched
    assert prices.work_tokens == pytest.approx(
        [left * (1.0 + (matched + left / 2 - 8000) / 30_000), 24_000 * (1.0 + 4000 / 30_000)]
    )
    assert warm.load.place(prompt(24_000, keys), 0.0).work == pytest.approx(prices.work_tokens[0])  # type: ignore[index]


def test_queued_prefills_are_waited_for() -> None:
    _, (busy, idle) = pool_of(2)
    busy.load.place(prompt(3000), 0.0)
    prices = price(prompt(10), [busy, idle])
    assert prices.waits_ms == [300.0, 0.0]
    assert price(prompt(10), [busy, idle], now=0.01).waits_ms == [300.0, 0.0], "its step has to end"
    assert price(prompt(10), [busy, idle], now=0.13).waits_ms == pytest.approx([200.0, 0.0])
    busy.load.room.reservations.add(5.0, 50.0)
    idle.load.room.reservations.add(5.0, 7000.0)
    held = Context(0.0, any_held=True)
    assert price(prompt(10), [busy, idle], held).waits_ms == pytest.approx([305.0, 700.0])
    assert price(prompt(2), [busy, idle], held).waits_ms == [300.0, 0.0], "less work goes before more"


def test_a_prefill_holds_up_the_streams_there() -> None:
    pool, (quiet, streaming) = pool_of(2)
    pool.hit_ratio = 0.0
    decoding(streaming, 5)
    prices = price(prompt(1000), [quiet, streaming])
    assert prices.costs[1] - prices.costs[0] == pytest.approx(STALL * 5 * 100.0)


def test_decode_is_dearer_where_more_context_is_read() -> None:
    """Each of 200 tokens: [.0001 * (C + P) + D * .0001 * P], with C = 6 * 5,000 and P = 1,000."""
    pool, (one, two) = pool_of(2)
    pool.hit_ratio = 0.0
    two.load.speed.gap_per_token_ms = one.load.speed.gap_per_token_ms = 1e-4
    decoding(two, 6, 5000)
    prices = price(prompt(1000), [one, two])
    stall = STALL * 6 * 100.0
    assert prices.costs[0] == pytest.approx(BASE + 100.0 + DECODES + DECODE * 200 * 1e-4 * 1000)
    assert prices.costs[1] - prices.costs[0] - stall == pytest.approx(DECODE * 200 * 1e-4 * (30_000 + 6 * 1000))


def test_space_is_dearer_where_the_cache_is_full() -> None:
    """20 * .3 * fill * prefill."""
    pool, (empty, full) = pool_of(2)
    for state in (empty, full):
        state.load.kv.capacity_tokens = state.load.kv.known_tokens = 102_400.0
    full.load.end(full.load.place(prompt(51_200, list(range(200))), 0.0), None, 0.0)
    pool.hit_ratio = 0.3
    prices = price(prompt(1000), [empty, full])
    assert prices.costs[1] - prices.costs[0] == pytest.approx(20 * 0.3 * 0.5 * 100.0)


def test_space_of_another_copy_is_dearer_than_space_that_is_taken_anywhere() -> None:
    """A prompt of 1,024 tokens of which 768 are in one of two caches, both half full. Its last 256 tokens take space
    wherever it goes.
    """
    pool, (home, other) = pool_of(2)
    for state, keys in ((home, [1, 2, 3]), (other, [7, 8, 9])):
        state.load.kv.capacity_tokens = state.load.kv.known_tokens = 1536.0
        state.load.end(state.load.place(prompt(768, keys), 0.0), None, 0.0)
    pool.hit_ratio = 0.3
    prices = price(prompt(1024, [1, 2, 3, 4]), [home, other])
    anywhere, copy = 20 * 0.3 * 0.5 * 25.6, COPY * 20 * 0.3 * 0.5 * 76.8
    assert prices.costs == pytest.approx([BASE + 25.6 + DECODES + anywhere, BASE + 102.4 + DECODES + anywhere + copy])


def test_an_engine_that_is_late_is_expected_to_stay_so() -> None:
    """A prefill of 100 ms, with 40 ms before its first byte: at 300 ms it is late by 110 ms of the 190 ms that are
    plausible, whatever the reason is.
    """
    pool, (late, idle) = pool_of(2)
    pool.hit_ratio = 0.0
    late.load.place(prompt(1000), 0.0)
    late.load.speed.mean_gap_ms = 0.0
    in_time, now = 0.001 * OVERDUE * 100.0, 0.3
    assert price(prompt(500), [late, idle], now=in_time).waits_ms == pytest.approx([0.0, 0.0])
    waits = price(prompt(500), [late, idle], now=now).waits_ms
    assert waits == pytest.approx([300.0 - OVERDUE * 100.0 - BASE, 0.0])


def test_a_request_that_does_not_fit_waits_for_space() -> None:
    """Over by 1,000 pinned + 200 still to come + 1,024 new + 200 - 2,000 tokens, at .2 * 1 / 15 a millisecond."""
    pool, (full,) = pool_of(1)
    pool.hit_ratio = 0.0
    full.load.kv.capacity_tokens = full.load.kv.known_tokens = 2000.0
    full.load.first_byte(full.load.place(prompt(1024, [1, 2, 3, 4]), 0.0), 0.0)
    pool.hit_ratio = 0.0
    request = prompt(1024, [5, 6, 7, 8])
    own = BASE + 102.4 * (1.0 + STALL) + DECODES
    over = 1024 + 200 + 1024 + 200 - 2000
    assert price(request, [full]).costs == pytest.approx([own + over / 0.05])
    full.load.end(full.load.place(prompt(16), 0.0), None, 0.0)
    full.load.work.freed = 15_000.0, 0.0  # one token a millisecond
    assert price(request, [full]).costs[0] == pytest.approx(own + over / 1.0, rel=0.01)


def test_the_wait_for_space_is_a_minute_at_most() -> None:
    pool, (full,) = pool_of(1)
    pool.hit_ratio = 0.0
    full.load.kv.capacity_tokens = full.load.kv.known_tokens = 16.0
    assert price(prompt(100_000, list(range(390))), [full]).costs == pytest.approx(
        [BASE + 10_000 * (1 + 42_000 / 30_000) + DECODES + 60_000]
    )


def test_a_slow_endpoint_costs_its_own_speed() -> None:
    _, (slow, fast) = pool_of(2)
    slow.load.speed.factor = 4.0
    for state in (slow, fast):
        state.load.place(prompt(1000), 0.0)
    prices = price(prompt(500), [slow, fast])
    assert prices.waits_ms == [400.0, 100.0]


def test_what_others_do_there_counts_while_it_is_fresh() -> None:
    pool, (shared, own) = pool_of(2)
    pool.hit_ratio = 0.0
    said = LoadMetrics(scraped_at=0.0, waiting=4.0, running=6.0)
    for _ in range(2):
        shared.load.scraped(said, others=10.0, queued=4.0, fresh_until=2.0)
        own.load.scraped(LoadMetrics(scraped_at=0.0, waiting=0.0, running=0.0), others=0.0, queued=0.0, fresh_until=2.0)
    prices = price(prompt(1000), [shared, own], now=1.0)
    assert prices.waits_ms == pytest.approx([1000.0 * 5 / 6, 0.0]), "six run, in a second each, and four wait"
    assert prices.costs[0] - prices.costs[1] == pytest.approx(1000.0 * 5 / 6 + STALL * 10 * 100.0)
    shared.load.room.slots.limit = inf
    assert price(prompt(1000), [shared, own], now=1.0).waits_ms == [4 * 50.0, 0.0]
    assert price(prompt(1000), [shared, own], now=3.0).waits_ms == [0.0, 0.0]


def test_requests_that_do_not_stream_leave_the_queue_by_themselves() -> None:
    _, (state,) = pool_of(1)
    state.load.place(prompt(1000)._replace(stream=False), 0.0)
    assert price(prompt(1), [state], now=0.13).waits_ms == [0.0]
    assert state.load.work.pending, "not yet due: 140 ms"
    assert price(prompt(1), [state], now=0.15).waits_ms == [0.0]
    assert not state.load.work.pending


def test_a_request_that_cannot_be_read_goes_where_least_is_going_on() -> None:
    pool, (busy, idle) = pool_of(2)
    decoding(busy, 3)
    costs = price(InferenceRequest("r", None, False, 10**6), [busy, idle]).costs
    assert costs[1] < costs[0]
    assert pool.hit_ratio > 0


def test_the_price_of_a_random_state_is_the_formula() -> None:
    """Written once more, as the specification has it."""
    rng = random.Random(7)
    pool, states = pool_of(6)
    for state in states:
        state.load.kv.capacity_tokens = state.load.kv.known_tokens = 40_000.0
        state.load.speed.gap_per_token_ms = rng.uniform(0, 1e-3)
        state.load.speed.factor = rng.choice([1.0, 2.0, 0.5])
        for n in range(rng.randrange(9)):
            placement = state.load.place(prompt(rng.randrange(300, 4000), [n, n + 1, n + 2]), 0.0)
            if rng.random() < 0.7:
                state.load.first_byte(placement, 0.01)
                state.load.progress(placement, rng.randrange(400), 0.02)
    now, request = 0.03, prompt(2000, [1, 2, 3, 4, 5, 6, 7])
    mean = sum(state.load.work.in_flight for state in states) / len(states)
    block = 1024 / pool.bytes_per_token
    prices, demanded = price(request, states, now=now), pool.index.demanded(request.block_keys, DEMAND * mean) * block
    deepest = max(pool.index.match(request.block_keys)) * block
    least = max(0.0, 2000 - max(demanded, deepest))
    for state, cost in zip(states, prices.costs, strict=True):
        e, output, d = state.load, pool.output_tokens, state.load.work.in_flight
        matched = pool.index.match(request.block_keys)[e.kv.member_id] * block
        rate = pool.token_ms * e.speed.factor
        prefill = max(1.0, 2000 - matched) * rate
        spaced = max(0.0, max(1.0, 2000 - matched) - max(0.0, demanded - matched))
        backlog = e.work.pending_tokens - min(
            max(0.0, 1000 * (now - e.work.prefill_since) - STEPS * e.speed.mean_gap_ms) / rate, e.work.head_tokens
        )
        lanes = e.room.lanes.lanes
        wait = 0.0 if lanes > 1.0 and len(e.work.pending) < lanes else backlog * rate / lanes
        fill = (e.kv.cache.size * block + e.work.live_tokens) / e.kv.known_tokens
        context = e.work.context_tokens
        g = e.work.live_tokens / max(1, d)
        over = e.kv.cache.pinned * block + d * max(g, output - g) + 7 * block - matched + output - e.kv.capacity_tokens
        space = 0.0
        if over > 0:
            decodes = 0.2 * e.work.streams / max(5.0, e.speed.mean_gap_ms)
            space = min(60_000, over / max(freed_per_ms(e.work.freed, now), decodes, 0.05))
        expected = (
            ((e.speed.base_ms if e.speed.base_until > now else pool.base_ms) + wait + prefill)
            + STALL * d * prefill
            + DECODE * output * (e.speed.gap_ms + e.speed.gap_per_token_ms * (context + 2000 + d * 2000))
            + 20 * pool.hit_ratio * fill * (min(spaced, least) + COPY * max(0.0, spaced - least)) * rate
            + space
        )
        assert cost == pytest.approx(expected)


def test_a_prompt_that_many_want_at_once_is_not_kept_at_its_home() -> None:
    """A burst of one prompt went 40, 0, 0, 0: its own hits made another copy dear."""
    pool, states = pool_of(4)
    pool.hit_ratio = 0.9
    placed = [0] * len(states)
    for n in range(40):
        costs = price(prompt(6000, list(range(20))), states, now=0.001 * n).costs
        best = costs.index(min(costs))
        states[best].load.place(prompt(6000, list(range(20))), 0.001 * n)
        placed[best] += 1
    assert min(placed) >= 5


def test_only_requests_for_adapters_pay_for_them() -> None:
    pool, states = pool_of(2)
    pool.adapters = frozenset(["lora"])
    states[0].load.place(prompt(1, model="lora"), 0.0)
    states[0].load.work.in_flight = 0
    with_base, with_lora = price(prompt(100), states).costs, price(prompt(100, model="lora"), states).costs
    assert [lora - base for lora, base in zip(with_lora, with_base, strict=True)] == pytest.approx([0.0, 500.0])


def test_an_endpoint_that_does_not_report_has_what_others_have_on_average() -> None:
    """Its metrics hang: it is not idle for that, and took all that came one after the other."""
    _, (crowded, idle, silent) = pool_of(3)
    for _ in range(40):
        for state, others in ((crowded, 20.0), (idle, 0.0)):
            said = LoadMetrics(scraped_at=0.0, waiting=0.0, running=others)
            state.load.scraped(said, others=others, queued=0.0, fresh_until=2.0)
    costs = price(prompt(1000), [crowded, idle, silent], now=1.0).costs
    assert costs[1] < costs[2] < costs[0]
    assert price(prompt(1000), [crowded, idle, silent], now=3.0).costs[0] == pytest.approx(costs[1]), "nobody knows"


def test_cache_space_that_others_use_counts() -> None:
    """Two servers alike in all but their KV cache, which others fill."""
    _, states = pool_of(2)
    for state, share in zip(states, (0.99, 0.03), strict=True):
        said = LoadMetrics(
            scraped_at=0.0, waiting=0.0, running=1.0, kv_utilization=share, kv_blocks=20_000, block_size_tokens=16
        )
        state.load.scraped(said, others=1.0, queued=0.0, fresh_until=2.0)
    full, empty = price(prompt(100), states, now=1.0).costs
    assert full > empty + 10.0
    assert price(prompt(100), states, now=3.0).costs[0] == pytest.approx(price(prompt(100), states, now=3.0).costs[1])
