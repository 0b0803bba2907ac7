# SPDX-License-Identifier: Apache-2.0
"""A server that loads models on demand."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from lbproxy.sim.engine.fixed import FixedEngine, FixedTimes
from lbproxy.sim.engine.on_demand import Loading, OnDemandEngine
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.engine.sequence import RequestTooLong, SimRequest, StepDone

TWO_SLOTS = dataclasses.replace(PRESETS["llama-8b-h100"], max_sequences=2)
TIMES = FixedTimes(ttft_s=1.0, token_s=0.1)


def engine(most: int = 1, keep_s: float = 300.0, *, holds_up: bool = True) -> OnDemandEngine:
    loading = Loading(load_s={"a": 5.0, "b": 10.0, "c": 2.0}, most=most, keep_s=keep_s, holds_up=holds_up)
    return OnDemandEngine(partial(FixedEngine, TWO_SLOTS, TIMES), loading)


def run_to(one: OnDemandEngine, until: float) -> list[StepDone]:
    steps: list[StepDone] = []
    while (due := one.next_event()) is not None and due <= until:
        steps += one.advance(now=due)
    return steps


def firsts(steps: list[StepDone]) -> dict[str, tuple[float, bool]]:
    return {first.id: (round(step.at, 6), first.loaded_adapter) for step in steps for first in step.first}


def test_requests_wait_for_the_load_and_those_of_a_loaded_model_do_not() -> None:
    one = engine()
    one.add(SimRequest("1", 10, 1), now=0.0)  # the first model, which needs no name
    one.add(SimRequest("2", 10, 1, adapter="a"), now=1.0)
    assert firsts(run_to(one, 20.0)) == {"1": (6.0, True), "2": (6.0, False)}
    assert one.resident() == ("a",)
    one.add(SimRequest("3", 10, 1, adapter="a"), now=20.0)
    assert firsts(run_to(one, 30.0)) == {"3": (21.0, False)}
    assert one.loads == 1


def test_a_request_that_waits_for_a_place_holds_up_all_behind_it() -> None:
    one = engine()
    one.add(SimRequest("1", 10, 21, adapter="a"), now=0.0)  # until 5 + 1 + 2
    one.add(SimRequest("2", 10, 1, adapter="b"), now=6.0)
    one.add(SimRequest("3", 10, 1, adapter="a"), now=6.5)
    assert one.gauges().waiting == 2
    found = firsts(run_to(one, 100.0))
    assert found == {"1": (6.0, True), "2": (19.0, True), "3": (25.0, True)}
    assert one.loads == 3


def test_in_a_router_it_holds_up_those_that_wait_for_a_place_too() -> None:
    """The others go on, and the one that waited first is loaded first."""
    one = engine(holds_up=False)
    one.add(SimRequest("1", 10, 21, adapter="a"), now=0.0)  # until 5 + 1 + 2
    assert (one.loading(), one.resident()) == (("a",), ())
    one.add(SimRequest("2", 10, 1, adapter="b"), now=6.0)
    one.add(SimRequest("3", 10, 1, adapter="a"), now=6.5)
    one.add(SimRequest("4", 10, 1, adapter="c"), now=6.5)
    assert (one.loading(), one.resident()) == ((), ("a",))
    found = firsts(run_to(one, 100.0))
    assert found == {"1": (6.0, True), "3": (7.5, False), "2": (19.0, True), "4": (22.0, True)}


def test_the_model_that_was_idle_for_longest_gives_way() -> None:
    one = engine(most=2)
    for at, name in ((0.0, "a"), (20.0, "b"), (40.0, "a"), (60.0, "c")):
        one.add(SimRequest(f"{at}", 10, 1, adapter=name), now=at)
        run_to(one, at + 19.0)
    assert set(one.resident()) == {"a", "c"}


@pytest.mark.parametrize(("keep_s", "loaded"), [(30.0, ()), (60.0, ("a",))])
def test_an_idle_model_is_unloaded(keep_s: float, loaded: tuple[str, ...]) -> None:
    one = engine()
    one.keep("a", keep_s)
    one.add(SimRequest("1", 10, 1), now=0.0)
    run_to(one, 50.0)
    assert one.resident() == loaded


def test_what_is_aborted_leaves_a_load_that_goes_on_and_a_restart_loses_all() -> None:
    one = engine()
    one.add(SimRequest("1", 10, 1), now=0.0)
    assert one.abort("1", now=1.0)
    assert not one.abort("1", now=1.0)
    one.add(SimRequest("2", 10, 5), now=2.0)
    one.add(SimRequest("3", 10, 5, adapter="b"), now=2.0)
    assert firsts(run_to(one, 6.0)) == {"2": (6.0, False)}
    assert one.generated("2") == 1
    assert one.restart(now=6.1) == ["2", "3"]
    assert one.resident() == ()
    assert all(not (step.first or step.finished) for step in run_to(one, 99.0))


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(RequestTooLong):
        engine().add(SimRequest("1", 10**9, 1), now=0.0)
