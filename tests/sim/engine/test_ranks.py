# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one address."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lbproxy.sim.engine.model_server import ModelServer, make_server
from lbproxy.sim.engine.sequence import RequestTooLong, SimRequest, StepDone
from tests.sim.engine.test_engine import STEADY


def drain(engine: ModelServer) -> list[StepDone]:
    steps: list[StepDone] = []
    while (due := engine.next_event()) is not None:
        steps += engine.advance(now=due)
    return steps


def test_a_request_goes_to_the_rank_with_the_fewest() -> None:
    """With one slot each, two ranks run two requests at a time; the third waits for whichever ends first."""
    engine = make_server(dataclasses.replace(STEADY, max_sequences=1), ranks=2)
    engine.add(SimRequest("a", 10, 5), now=0.0)
    engine.add(SimRequest("b", 10, 2), now=0.0)
    engine.advance(now=0.015)
    assert engine.gauges().running == 2
    engine.advance(now=0.025)
    engine.add(SimRequest("c", 10, 1), now=0.025)  # b has ended, a has not
    steps = drain(engine)
    assert {name: round(step.at, 3) for step in steps for name in step.finished} == {"c": 0.035, "a": 0.05}
    assert [step.at for step in steps] == sorted(step.at for step in steps)


def test_prompts_do_not_wait_for_those_of_another_rank() -> None:
    single, both = make_server(STEADY, ranks=1), make_server(STEADY, ranks=2)
    ends = []
    for engine in (single, both):
        for name in "ab":
            engine.add(SimRequest(name, 100, 1), now=0.0)  # a whole step's budget each
        ends.append([round(step.at, 3) for step in drain(engine) for _ in step.finished])
    assert ends == [[0.01, 0.02], [0.01, 0.01]]


def test_gauges_are_of_all_ranks_together() -> None:
    engine = make_server(dataclasses.replace(STEADY, max_sequences=2), ranks=2)
    for number in range(6):
        engine.add(SimRequest(str(number), 16, 50), now=0.0)
    engine.advance(now=0.025)
    gauges = engine.gauges()
    assert (gauges.waiting, gauges.running) == (2, 4)
    assert gauges.kv_usage == pytest.approx(3 / 64)  # as much in each rank
    assert gauges.prompt_tokens == 64
    assert engine.kv_blocks == 128


def test_abort_restart_speed_and_limits() -> None:
    engine = make_server(STEADY, ranks=3, rng=random.Random(1))
    for number in range(4):
        engine.add(SimRequest(str(number), 10, 20), now=0.0)
    engine.advance(now=0.055)
    assert engine.generated("1") > 0
    assert engine.abort("1", now=0.055)
    assert not engine.abort("1", now=0.055)
    assert engine.generated("1") == 0
    engine.set_speed(2.0, now=0.055)
    assert sorted(engine.restart(now=0.06)) == ["0", "2", "3"]
    assert engine.gauges().running == 0
    with pytest.raises(RequestTooLong):
        engine.add(SimRequest("long", 1000, 1000), now=0.07)


def test_when_it_is_asked_changes_nothing() -> None:
    def steps(*, often: bool) -> list[float]:
        engine = make_server(STEADY, ranks=2, rng=random.Random(5))
        for number in range(8):
            engine.add(SimRequest(str(number), 30, 30), now=0.0)
        if often:
            return [step.at for step in drain(engine)]
        return [step.at for step in engine.advance(now=100.0)]

    assert steps(often=True) == steps(often=False)
