# SPDX-License-Identifier: Apache-2.0
"""A server whose times are fixed."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lbproxy.sim.engine.fixed import FirstTokenSpread, FixedEngine, FixedTimes
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.engine.sequence import RequestTooLong, SimRequest, StepDone

TWO_SLOTS = dataclasses.replace(PRESETS["llama-8b-h100"], max_sequences=2)
TIMES = FixedTimes(ttft_s=1.0, token_s=0.1)


def drain(engine: FixedEngine) -> list[StepDone]:
    steps: list[StepDone] = []
    while (due := engine.next_event()) is not None:
        steps += engine.advance(now=due)
    return steps


def firsts(steps: list[StepDone]) -> dict[str, float]:
    return {first.id: round(step.at, 6) for step in steps for first in step.first}


def ends(steps: list[StepDone]) -> dict[str, float]:
    return {name: round(step.at, 6) for step in steps for name in step.finished}


@pytest.mark.parametrize("name_tokens", [True, False])
def test_slots_are_given_in_order_and_prompts_do_not_slow_one_another(name_tokens: bool) -> None:
    engine = FixedEngine(TWO_SLOTS, TIMES, name_tokens=name_tokens)
    for name, prompt, output in (("a", 50_000, 11), ("b", 10, 1), ("c", 10, 2), ("d", 10, 1)):
        engine.add(SimRequest(name, prompt, output), now=0.0)
    assert (engine.gauges().running, engine.gauges().waiting) == (2, 2)
    steps = drain(engine)
    # b's slot is free at 1 s, and c's at 2.1 s; a's at 2.0 s.
    assert firsts(steps) == {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0}
    assert ends(steps) == {"a": 2.0, "b": 1.0, "c": 2.1, "d": 3.0}
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    assert engine.gauges().generation_tokens == 15
    assert len([name for step in steps for name in step.tokens]) == (15 if name_tokens else 0)


def test_spread_is_even_around_the_time() -> None:
    engine = FixedEngine(
        PRESETS["llama-8b-h100"], FixedTimes(ttft_s=1.0, ttft_spread=0.5), rng=random.Random(1), name_tokens=False
    )
    for number in range(1000):
        engine.add(SimRequest(str(number), 1, 1), now=0.0)
    times = sorted(firsts(drain(engine)).values())
    assert 0.5 <= times[0] < 0.52
    assert 1.48 < times[-1] <= 1.5
    assert sum(times) / 1000 == pytest.approx(1.0, abs=0.03)


def test_speed_stretches_what_has_begun() -> None:
    engine = FixedEngine(TWO_SLOTS, TIMES)
    engine.add(SimRequest("a", 10, 2), now=0.0)
    engine.set_speed(0.5, now=0.5)
    steps = drain(engine)
    assert firsts(steps) == {"a": 1.5}
    assert ends(steps) == {"a": 1.7}


def test_progress_can_be_read_between_first_and_last() -> None:
    engine = FixedEngine(TWO_SLOTS, TIMES, name_tokens=False)
    engine.add(SimRequest("a", 10, 100), now=0.0)
    seen = []
    while (due := engine.next_event()) is not None and due < 2.0:
        engine.advance(now=due)
        seen.append(engine.generated("a"))
    assert seen[0] == 1
    assert seen[-1] == 10
    assert seen == sorted(seen)


def test_abort_frees_the_slot_and_restart_loses_all() -> None:
    engine = FixedEngine(dataclasses.replace(TWO_SLOTS, max_sequences=1), TIMES)
    for name in "abc":
        engine.add(SimRequest(name, 10, 1), now=0.0)
    assert engine.abort("b", now=0.2)
    assert engine.abort("a", now=0.5)
    assert not engine.abort("a", now=0.5)
    assert firsts(engine.advance(now=1.5)) == {"c": 1.5}
    for name in "de":
        engine.add(SimRequest(name, 10, 1), now=2.0)
    assert engine.restart(now=2.5) == ["d", "e"]
    assert engine.gauges().running == engine.gauges().waiting == 0
    assert engine.next_event() is None
    with pytest.raises(RequestTooLong):
        engine.add(SimRequest("long", 131_000, 1000), now=3.0)


@pytest.mark.parametrize(("ttft_s", "token_s", "spread"), [(0.0, 0.02, 0.0), (1.0, 0.0, 0.0), (1.0, 0.02, 2.0)])
def test_times_that_cannot_be(ttft_s: float, token_s: float, spread: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        FixedTimes(ttft_s=ttft_s, token_s=token_s, ttft_spread=spread)


@pytest.mark.parametrize(
    ("form", "median", "p90", "most"),
    [
        ("lognormal", 1.0, 1.9, 9.0),
        ("bimodal", 1.0, 10.0, 10.0),
        ("heavy", 1.41, 3.16, 100.0),
        ("prompt", 1.0, 1.9, 9.0),
    ],
)
def test_other_forms_of_spread(form: str, median: float, p90: float, most: float) -> None:
    """A sigma of .5; a share of .2; a Pareto exponent of 2."""
    spread = 0.2 if form == "bimodal" else 0.5
    times = FixedTimes(ttft_s=1.0, ttft_spread=spread, form=FirstTokenSpread(form))
    engine = FixedEngine(PRESETS["llama-8b-h100"], times, rng=random.Random(1), name_tokens=False)
    for number in range(1000):
        engine.add(SimRequest(str(number), 1, 1, (number, 7)), now=0.0)
    found = sorted(firsts(drain(engine)).values())
    assert found[500] == pytest.approx(median, rel=0.1)
    assert found[900] == pytest.approx(p90, rel=0.15)
    assert 4 < found[-1] <= most


def test_equal_prompts_take_equally_long_if_that_is_the_form() -> None:
    times = FixedTimes(ttft_s=1.0, ttft_spread=0.5, form=FirstTokenSpread.PROMPT)
    engine = FixedEngine(PRESETS["llama-8b-h100"], times, rng=random.Random(1), name_tokens=False)
    for name, own in (("a", 1), ("b", 2), ("c", 1)):
        engine.add(SimRequest(name, 1, 1, (own, 7)), now=0.0)
    found = firsts(drain(engine))
    assert found["a"] == found["c"] != found["b"]
