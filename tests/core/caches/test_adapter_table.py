# SPDX-License-Identifier: Apache-2.0
"""Which adapters an endpoint has loaded: the engine's own rule, played with what a proxy knows."""

from __future__ import annotations

import random

import pytest

from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.adapters import DEFAULT_SLOTS, MAX_REMEMBERED, AdapterTable, Arrival, LoadTimes, prices_ms
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.policies.policy import Context
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, card, pool_of

LOADED, RELOAD, FIRST_LOAD, NO_SLOT = Arrival.LOADED, Arrival.RELOAD, Arrival.FIRST_LOAD, Arrival.NO_SLOT
TIMES = LoadTimes(again=20.0, first=60.0)


def table_of(slots: int) -> AdapterTable:
    table = AdapterTable()
    table.report((), slots, now=0.0, until=0.0)
    return table


def use(table: AdapterTable, *adapters: str) -> list[Arrival]:
    """One request each, one after the other."""
    found = []
    for adapter in adapters:
        found.append(table.placed(adapter, 0.0))
        table.closed(adapter, 0.0)
    return found


def price(table: AdapterTable, adapter: str, in_flight: float = 0.0, now: float = 0.0) -> float:
    return prices([table], adapter, in_flight=in_flight, now=now)[0]


def prices(
    tables: list[AdapterTable], adapter: str, in_flight: float = 0.0, now: float = 0.0, times: LoadTimes = TIMES
) -> list[float]:
    count = len(tables)
    return prices_ms(adapter, tables, times=times, in_flight=[in_flight] * count, response_ms=[1000.0] * count, now=now)


def test_an_adapter_costs_its_load_once() -> None:
    table = AdapterTable()
    assert price(table, "a", in_flight=10) == 60.0 * 4
    assert table.placed("a", 0.0) is FIRST_LOAD
    assert price(table, "a") == 0.0
    table.closed("a", 0.0)
    assert price(table, "a") == 0.0, "idle, but nobody needed its slot"
    assert use(table, "a") == [LOADED]


def test_an_idle_adapter_stays_until_its_slot_is_needed_the_least_recently_used_first() -> None:
    table = table_of(2)
    assert use(table, "a", "b", "a", "c") == [FIRST_LOAD, FIRST_LOAD, LOADED, FIRST_LOAD]
    assert [table.is_loaded(name, 0.0) for name in "abc"] == [True, False, True]
    later = 1e6
    assert (price(table, "b", now=later), price(table, "d", now=later)) == (20.0, 60.0), "from memory, and from disk"
    assert use(table, "b") == [RELOAD]


def test_what_is_in_use_keeps_its_slot() -> None:
    table = table_of(2)
    table.placed("old", 0.0)
    assert use(table, "b", "c") == [FIRST_LOAD, FIRST_LOAD]
    assert [table.is_loaded(name, 0.0) for name in ("old", "b", "c")] == [True, False, True]


def test_its_last_use_ends_with_its_last_request() -> None:
    table = table_of(2)
    table.placed("long", 0.0)
    use(table, "b")
    table.closed("long", 0.0)
    use(table, "c")
    assert [table.is_loaded(name, 0.0) for name in ("long", "b", "c")] == [True, False, True]


def test_who_finds_no_slot_waits_for_the_first_that_becomes_free() -> None:
    table = table_of(2)
    arrivals = [table.placed(name, 0.0) for name in ("a", "b", "x", "y", "x")]
    assert arrivals == [FIRST_LOAD, FIRST_LOAD, NO_SLOT, NO_SLOT, NO_SLOT]
    assert not table.has_room(0.0)
    assert table.is_waiting("x")
    table.closed("b", 0.0)
    assert [table.is_loaded(name, 0.0) for name in "abxy"] == [True, False, True, False]
    assert not table.is_waiting("x")
    table.closed("y", 0.0)
    table.closed("a", 0.0)
    assert table.has_room(0.0), "y left before it was its turn"


def test_a_request_without_a_slot_waits_for_half_an_answer_and_more_and_for_the_load() -> None:
    table = table_of(2)
    for adapter in ("a", "a", "a", "b", "b"):
        table.placed(adapter, 0.0)
    assert price(table, "c") == pytest.approx(500 * (1 + 1.0986) + 60, rel=1e-3)
    assert price(table, "a") == 0.0
    table.closed("b", 0.0)
    table.closed("b", 0.0)
    assert price(table, "c", now=1e6) == 60.0


def test_who_waits_for_the_same_adapter_waits_together_and_others_behind_them() -> None:
    table = table_of(1)
    table.placed("a", 0.0)
    table.placed("x", 0.0)
    one_wait = 500 * (1 + 0.6931)
    assert price(table, "x") == pytest.approx(one_wait, rel=1e-3), "what is loaded for those before it"
    assert price(table, "y") == pytest.approx(2 * one_wait + 60, rel=1e-3)


def test_where_all_slots_are_in_use_never_costs_less_than_where_one_is_free() -> None:
    """Answers are short, and loads from disk take long: waiting and a load from memory would be cheaper for this one
    request, but not for the next.
    """
    full, free = table_of(1), table_of(1)
    use(full, "x")
    full.placed("a", 0.0)
    slow_disk = LoadTimes(again=20.0, first=5000.0)
    assert prices([full, free], "x", times=slow_disk) == [5000.0, 5000.0]
    full.placed("x", 0.0)
    assert prices([full, free], "x", now=1e6, times=slow_disk) == [5000.0, 5000.0], "those who join a wait too"


def test_a_slot_whose_adapter_is_soon_needed_again_costs_more_than_an_empty_one() -> None:
    empty, rare, often = table_of(1), table_of(1), table_of(1)
    use(rare, "b")
    use(often, *["b"] * 20)
    found = prices([empty, rare, often], "x")
    assert found == [60.0, pytest.approx(60 + 20 * 0.283, rel=1e-2), pytest.approx(80.0, rel=1e-2)]
    assert prices([often], "x", now=1e6) == [60.0], "not any more"


def test_a_first_load_is_invested_in_once_reloads_have_paid_for_it() -> None:
    """Three adapters are known to one server with two slots, and another is idle."""
    busy, idle = table_of(2), table_of(2)
    use(busy, "a", "b", "c")
    at_first = prices([busy, idle], "a")
    assert at_first[0] < at_first[1]
    for _ in range(3):
        use(busy, "a", "b", "c")
    reloading, first = prices([busy, idle], "a")
    assert first < reloading
    use(idle, "a")
    assert prices([busy, idle], "a")[1] == 0.0, "it has a home now, and b and c have theirs"
    assert use(busy, "b", "c", "b", "c") == [LOADED] * 4


def test_what_is_asked_for_rarely_is_never_invested_in() -> None:
    busy, idle = table_of(2), table_of(2)
    use(busy, "a", "b", "c")
    for minute in range(1, 30):
        for name in "abc":
            now = minute * 60.0
            busy.placed(name, now)
            busy.closed(name, now)
    now = 30 * 60.0
    reloading, first = prices([busy, idle], "a", now=now)
    assert reloading < first


def test_those_who_wait_for_a_slot_pay_for_a_first_load_too() -> None:
    full, idle = table_of(1), table_of(1)
    full.placed("a", 0.0)
    times = LoadTimes(again=60.0, first=3000.0)
    before = prices([full, idle], "x", times=times)[1]
    for _ in range(4):
        full.placed("x", 0.0)
    found = prices([full, idle], "x", times=times)
    assert (before, found[1]) == (3000.0, 1000.0)
    for _ in range(2):
        full.placed("x", 0.0)
    waits, load = prices([full, idle], "x", times=times)
    assert load < waits


def test_a_load_holds_up_sixteen_streams_at_most() -> None:
    assert price(AdapterTable(), "a", in_flight=16) == price(AdapterTable(), "a", in_flight=300) == 60.0 * 5.8


def test_a_scrape_adds_what_others_use_and_is_believed_while_it_is_fresh() -> None:
    table = AdapterTable()
    table.report(["x", "y"], 2, now=0.0, until=2.0)
    assert price(table, "x") == 0.0
    assert price(table, "z") == pytest.approx(500 * (1 + 0.6931) + 60, rel=1e-3)
    assert price(table, "z", now=3.0) == 60.0
    assert price(table, "x", now=3.0) == 0.0, "idle now, but loaded"


def test_what_a_scrape_shows_of_our_own_is_no_news() -> None:
    """Labels lag: the adapter of a request that ended since is not in use by somebody else."""
    table = table_of(1)
    use(table, "ours")
    table.report(["ours"], 1, now=0.1, until=9.0)
    assert price(table, "new", now=0.2) < 80.0
    table.report(["ours"], 1, now=0.3, until=9.0)
    assert price(table, "new", now=0.4) > 500.0, "still there, and none of ours ran since: others use it"


def test_what_left_the_labels_is_not_unloaded() -> None:
    """vLLM lists adapters with live requests only."""
    table = AdapterTable()
    table.report(["x"], 4, now=0.0, until=2.0)
    table.report([], 4, now=1.0, until=3.0)
    assert table.is_loaded("x", 1.0)


def test_fewer_slots_than_guessed_are_as_many_adapters_less() -> None:
    table = AdapterTable()
    use(table, "a", "b", "c")
    table.report([], 2, now=0.0, until=2.0)
    assert [table.is_loaded(name, 0.0) for name in "abc"] == [False, True, True]


def test_a_restart_loses_all_and_what_ran_still_ends() -> None:
    table = table_of(2)
    table.placed("a", 0.0)
    use(table, "b")
    table.forget()
    assert [table.is_loaded(name, 0.0) for name in "ab"] == [False, False]
    table.closed("a", 0.0)
    assert use(table, "a") == [FIRST_LOAD]


def test_an_adapter_that_is_not_listed_any_more_is_not_loaded() -> None:
    table = table_of(4)
    use(table, "a", "b")
    table.placed("busy", 0.0)
    table.retain({"a"})
    assert [table.is_loaded(name, 0.0) for name in ("a", "b", "busy")] == [True, False, True]


def test_memory_is_bounded_whatever_comes() -> None:
    rng = random.Random(3)
    table = AdapterTable()
    running: list[str] = []
    for step in range(4000):
        if running and rng.random() < 0.5:
            table.closed(running.pop(rng.randrange(len(running))), float(step))
        else:
            running.append(str(rng.randrange(600)))
            table.placed(running[-1], float(step))
        if rng.random() < 0.1:
            shown = [str(rng.randrange(900)) for _ in range(rng.randrange(3))]
            table.report(shown, rng.choice([None, 1, 4, 8]), now=float(step), until=step + 20.0)
        in_use = table._active.keys()
        assert len(table._loaded) <= 8, "as many as the most slots that it was ever said to have"
        assert in_use <= table._loaded.keys() | table._waiting.keys()
        assert not table._loaded.keys() & table._waiting.keys()
        assert not table._waiting.keys() - in_use
    assert len(table._known) <= MAX_REMEMBERED
    assert len(table._demand) <= MAX_REMEMBERED
    for adapter in running:
        table.closed(adapter, 4000.0)
    assert not table._active
    assert not table._waiting


# --- The scorer -------------------------------------------------------------------------------------------------------


def weighted_pool(count: int) -> tuple[Balancer, list[EndpointState], list[Endpoint]]:
    balancer, endpoints = pool_of(count, policy="weighted", scorers={"lora": 1.0})
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card(MODEL), *(card(name, parent=MODEL) for name in "abcdef")])
    states = [balancer._endpoints.get(endpoint.uid) for endpoint in endpoints]
    return balancer, [state for state in states if state is not None], endpoints


def scores(states: list[EndpointState], model: str) -> list[float]:
    policy = make_policy(RoutingSettings.model_validate({"policy": "weighted", "scorers": {"lora": 1.0}}))
    request = InferenceRequest("r", model)
    return [-cost for cost in policy.price(request, states, Context(0.0)).costs]


def test_the_scorer_prefers_loaded_to_a_free_slot_to_waiting_to_evicting() -> None:
    _, states, _ = weighted_pool(4)
    loaded, _, waiting, full = (state.load.adapters for state in states)
    use(loaded, "a")
    for table in (waiting, full):
        for name in "bcdef"[:DEFAULT_SLOTS]:
            table.placed(name, 0.0)
    waiting.placed("a", 0.0)
    assert scores(states, "a") == [1.0, 0.8, 0.6, 0.0]


def test_the_scorer_has_no_opinion_on_the_base_model() -> None:
    _, states, _ = weighted_pool(2)
    use(states[0].load.adapters, "a")
    assert scores(states, MODEL) == [1.0, 1.0]


def test_a_new_process_has_nothing_loaded() -> None:
    balancer, states, endpoints = weighted_pool(2)
    use(states[0].load.adapters, "a")
    for started_at, score in ((1.0, 1.0), (2.0, 0.8)):
        lora = LoraMetrics(max_lora=4)
        page = LoadMetrics(scraped_at=0.0, waiting=0.0, running=0.0, lora=lora, started_at=started_at)
        balancer.scrape_sent(endpoints[0].uid)
        balancer.report_scrape(endpoints[0].uid, page)
        assert scores(states, "a") == [score, 0.8]


def test_an_adapter_that_left_the_list_left_its_slot() -> None:
    balancer, states, endpoints = weighted_pool(2)
    use(states[0].load.adapters, "a")
    balancer.report_models(endpoints[0].uid, [card(MODEL), card("b", parent=MODEL)])
    balancer.report_models(endpoints[0].uid, [card(MODEL), card("a", parent=MODEL)])
    assert scores(states, "a") == [0.8, 0.8], "unloaded, and loaded again by somebody: not yet used there"
