# SPDX-License-Identifier: Apache-2.0
"""Adapters in the engine: slots, loading, the requests that are passed over, by hand-computed cases."""

import dataclasses
import random

import pytest

from lbproxy.sim.engine.engine import Engine, FirstToken, SimRequest
from lbproxy.sim.engine.lora_slots import DISK_LOAD_MS, HOST_LOAD_MS, STEP_SHARE, LoraSlots
from lbproxy.sim.mock.text import block_hashes
from tests.sim.engine.test_engine import STEADY, drain, hashes, milliseconds

TWO_SLOTS = dataclasses.replace(STEADY, max_loras=2, api_ms=1.0)
STEP_MS = 10.0
DISK_MS, HOST_MS = 650.0, 20.0
"""The middles, as nothing is random here."""


def test_first_use_loads_from_disk_and_each_adapter_slows_the_step() -> None:
    engine = Engine(TWO_SLOTS)
    engine.add(SimRequest("a", 10, 2, adapter="x"), now=0.0)
    one = STEP_MS * (1 + STEP_SHARE)
    assert milliseconds(drain(engine)) == pytest.approx([1 + DISK_MS + one, 1 + DISK_MS + 2 * one])
    # It still has its slot: nothing is loaded for the next one.
    engine.add(SimRequest("b", 10, 1, adapter="x"), now=2.0)
    assert milliseconds(drain(engine)) == pytest.approx([2001 + one])
    # Without adapters a step takes what it always took.
    engine.add(SimRequest("c", 10, 1), now=3.0)
    assert milliseconds(drain(engine)) == pytest.approx([3011])


def test_two_adapters_load_one_after_the_other_in_one_step() -> None:
    engine = Engine(TWO_SLOTS)
    for name in "xy":
        engine.add(SimRequest(name, 10, 1, adapter=name), now=0.0)
    assert milliseconds(drain(engine)) == pytest.approx([1 + 2 * DISK_MS + STEP_MS * (1 + 2 * STEP_SHARE)])


def test_request_whose_adapter_has_no_slot_is_passed_over() -> None:
    """x and y run, z must wait for one of them to end; a later request for x, and one for none, go ahead of it."""
    engine = Engine(TWO_SLOTS)
    for name, adapter, output in (("1", "x", 3), ("2", "y", 2), ("3", "z", 1), ("4", "x", 1), ("5", None, 1)):
        engine.add(SimRequest(name, 10, output, adapter=adapter), now=0.0)
    steps = drain(engine)
    assert [step.tokens for step in steps] == [("1", "2", "4", "5"), ("1", "2"), ("1", "3")]
    assert [sorted(step.finished) for step in steps] == [["4", "5"], ["2"], ["1", "3"]]


def test_gauges_name_the_adapters_that_run_and_that_wait() -> None:
    engine = Engine(dataclasses.replace(TWO_SLOTS, max_loras=1))
    for name, adapter in (("1", "x"), ("2", "y"), ("3", "y")):
        engine.add(SimRequest(name, 10, 2, adapter=adapter), now=0.0)
    engine.advance(now=(1 + DISK_MS + STEP_MS * (1 + STEP_SHARE)) / 1000)
    gauges = engine.gauges()
    assert (gauges.running_adapters, gauges.waiting_adapters, gauges.waiting) == (("x",), ("y",), 2)
    drain(engine)
    assert (engine.gauges().running_adapters, engine.gauges().waiting_adapters) == ((), ())


def test_evicted_adapter_comes_back_from_host_memory() -> None:
    slots = LoraSlots(2)
    for adapter in "xyz":
        assert slots.started(adapter) == DISK_MS
        slots.stopped(adapter)
    # z took the slot of x, the least recently started; y kept its own.
    assert slots.started("y") == 0.0
    assert slots.started("x") == HOST_MS
    assert not slots.fits("z")
    slots.stopped("y")
    assert slots.started("z") == HOST_MS


def test_the_least_recently_started_adapter_goes_first() -> None:
    slots = LoraSlots(2)
    for adapter in "xyxz":
        slots.started(adapter)
        slots.stopped(adapter)
    assert slots.started("x") == 0.0
    assert slots.started("y") == HOST_MS


def test_running_adapters_are_never_evicted() -> None:
    slots = LoraSlots(2)
    slots.started("x")
    slots.started("y")
    slots.stopped("y")
    slots.started("z")
    slots.stopped("z")
    assert slots.started("x") == 0.0


def test_loading_times_vary_within_their_ranges() -> None:
    slots = LoraSlots(1, random.Random(1))
    times = []
    for adapter in "abcabc":
        times.append(slots.started(adapter))
        slots.stopped(adapter)
    assert all(DISK_LOAD_MS[0] <= ms <= DISK_LOAD_MS[1] for ms in times[:3])
    assert all(HOST_LOAD_MS[0] <= ms <= HOST_LOAD_MS[1] for ms in times[3:])
    assert len(set(times)) == 6


def test_abort_and_preemption_give_the_adapter_up() -> None:
    engine = Engine(dataclasses.replace(TWO_SLOTS, max_loras=1))
    engine.add(SimRequest("1", 10, 9, adapter="x"), now=0.0)
    engine.add(SimRequest("2", 10, 1, adapter="y"), now=0.0)
    engine.add(SimRequest("3", 10, 1, adapter="z"), now=0.0)
    engine.abort("3", now=0.01)
    engine.abort("1", now=0.7)
    assert [step.finished for step in drain(engine)][-1] == ("2",)
    assert engine._lora.running == engine._lora.waiting == ()


def test_prefix_computed_with_one_adapter_is_not_hit_by_another() -> None:
    text = b"four" * 48
    assert len({tuple(block_hashes(text, adapter)) for adapter in (None, "x", "y")}) == 3
    engine = Engine(TWO_SLOTS)
    for name, adapter in (("1", None), ("2", "x"), ("3", "x")):
        engine.add(SimRequest(name, 48, 1, block_hashes(text, adapter), adapter), now=float(name))
        drain_first = [first for step in drain(engine) for first in step.first]
        assert drain_first == [FirstToken(name, 32 if name == "3" else 0, loaded_adapter=name == "2")]


def test_preempted_adapter_waits_again() -> None:
    """Four blocks, as in the engine's own case of preemption, each request with an adapter of its own."""
    preset = dataclasses.replace(TWO_SLOTS, kv_tokens=64, max_model_len=64)
    engine = Engine(preset)
    for name in "ab":
        engine.add(SimRequest(name, 16, 20, hashes(prefix=name, blocks=2), adapter=name), now=0.0)
    steps = drain(engine)
    assert engine.gauges().preemptions == 1
    assert sorted(request for step in steps for request in step.finished) == ["a", "b"]
    assert engine._lora.running == engine._lora.waiting == ()
