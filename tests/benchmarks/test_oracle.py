# SPDX-License-Identifier: Apache-2.0
"""Perfect information: what is foreseen of an engine is what it does, and the oracle goes by it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from pydantic import ValidationError

from benchmarks.foresight import PendingPrefill, foresee, outlook_of, slot_free_at
from benchmarks.oracle import ORACLES, Oracle, OracleBalancer, OracleFleet
from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.presets import PRESETS, Preset
from lbproxy.sim.engine.sequence import SimRequest
from lbproxy.sim.fleet.fleet import FleetOptions, Served, SimulatedServer
from lbproxy.sim.workloads.catalogue import adapter_names, make_workload
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job, OpenLoop, Workload
from tests.sim.engine.test_engine import STEADY

QWEN = dataclasses.replace(PRESETS["qwen-32b-2xh100"], max_model_len=131_072)
ROOMY = AdmissionSettings(queue_requests=100_000, queue_bytes=2**34, queue_timeout=86_400)


def busy(preset: Preset, seed: int, requests: int) -> tuple[Engine, float, random.Random]:
    """An engine in the middle of things: decodes, a prefill in parts, a queue. Nothing is shared."""
    rng = random.Random(seed)
    engine = Engine(preset, name_tokens=False)
    now = 0.0
    for number in range(requests):
        now += rng.expovariate(4.0)
        engine.add(SimRequest(f"{number}", rng.randint(1, 20_000), rng.randint(1, 60)), now=now)
        engine.advance(now=now)
    return engine, now, rng


def first_token_at(engine: Engine, name: str) -> float:
    """Run an engine until a request has its first token."""
    while (due := engine.next_event()) is not None:
        for step in engine.advance(now=due):
            if any(first.id == name for first in step.first):
                return step.at
    raise AssertionError("it never came")


def waiting(engine: Engine) -> list[PendingPrefill]:
    """What is queued in an engine where nothing is cached."""
    return [
        PendingPrefill(
            one.ready_at, one.known_tokens, 0, one.known_tokens // 16 + 1, one.request.output_tokens - one.generated
        )
        for one in outlook_of(engine).queue
    ]


@pytest.mark.parametrize("seed", range(20))
def test_first_token_comes_when_foreseen(seed: int) -> None:
    """To the microsecond, whatever the engine is at, as long as nobody comes after."""
    engine, now, rng = busy(QWEN, seed, requests=rng_count(seed))
    tokens, now = rng.randint(1, 30_000), now + rng.random() / 10
    engine.advance(now=now)
    ready_at = now + QWEN.api_ms / 1000
    found = foresee(outlook_of(engine), waiting(engine), PendingPrefill(ready_at, tokens, 0, tokens // 16 + 1, 5))
    engine.add(SimRequest("mine", tokens, 5), now=now)
    assert found.first_at == pytest.approx(first_token_at(engine, "mine"), abs=1e-6)
    assert ready_at <= found.begins_at < found.first_at


def rng_count(seed: int) -> int:
    """From an idle engine to one with a long queue."""
    return (0, 1, 5, 30)[seed % 4]


def test_full_cache_is_foreseen() -> None:
    """Two answers fill the cache; the third request begins when the first of them ends, in step 51."""
    engine = Engine(dataclasses.replace(STEADY, kv_tokens=320, token_budget=400))
    engine.add(SimRequest("a", 100, 51), now=0.0)
    engine.add(SimRequest("b", 80, 75), now=0.0)
    engine.advance(now=0.1)
    tokens = 120
    found = foresee(outlook_of(engine), [], PendingPrefill(0.1, tokens, 0, 8, 2))
    engine.add(SimRequest("mine", tokens, 2), now=0.1)
    assert found.first_at == pytest.approx(first_token_at(engine, "mine"))
    assert found.begins_at == pytest.approx(0.51)


def test_slot_of_an_adapter_is_foreseen() -> None:
    """Both slots are taken: after two steps, y has 9 of its 10 tokens to come, as it began in the second."""
    engine = Engine(dataclasses.replace(STEADY, max_loras=2))
    engine.add(SimRequest("a", 10, 20, adapter="x"), now=0.0)
    engine.add(SimRequest("b", 10, 10, adapter="y"), now=0.0)
    while outlook_of(engine).steps_done < 2:
        due = engine.next_event()
        assert due is not None
        engine.advance(now=due)
    outlook = outlook_of(engine)
    assert slot_free_at(outlook, "x", 5.0) == slot_free_at(outlook, None, 5.0) == 5.0
    assert slot_free_at(outlook, "z", 5.0) == pytest.approx(5.0 + 9 * 0.010 * outlook.lora.slowdown)


def run(
    form: str, workload: Workload, servers: tuple[SimulatedServer, ...], adapters: tuple[str, ...] = ()
) -> list[Served]:
    options = FleetOptions(servers=servers, adapters=adapters, jitter=False)

    def make(oracle: Oracle, rng: random.Random) -> OracleBalancer:
        return OracleBalancer(oracle, BalancingSettings(admission=ROOMY), rng=rng)

    return OracleFleet(options, workload, make, form=form, seed=1).run()


@pytest.mark.parametrize("form", ORACLES)
@pytest.mark.parametrize("name", ["own", "long-prompts", "lora"])
def test_everything_is_served(form: str, name: str) -> None:
    workload = make_workload(name, {"duration_s": 15, "rate": 12}, seed=2)
    server = SimulatedServer(dataclasses.replace(QWEN, max_loras=3))
    served = run(form, workload, (server,) * 4, tuple(adapter_names(15)))
    assert len(served) > 100
    assert {one.outcome for one in served} == {Outcome.COMPLETED}


def job(name: str, prompt: tuple[Piece, ...], output: int) -> Job:
    return Job(name, prompt, Piece(1000 + ord(name), output))


@pytest.mark.parametrize("form", ORACLES)
def test_oracle_sees_what_is_on_its_way(form: str) -> None:
    """Two at one moment: the second sees the first, which has not reached its server."""
    arrivals = [(0.0, job("a", (Piece(1, 5000),), 5)), (0.0, job("b", (Piece(2, 5000),), 5))]
    a, b = run(form, OpenLoop([arrivals]), (SimulatedServer(QWEN),) * 2)
    assert a.server != b.server


@pytest.mark.parametrize("form", ORACLES)
def test_oracle_knows_caches_and_speeds(form: str) -> None:
    """The long prompt goes where its beginning is; one that is nowhere to the server that is twice as fast, although
    nothing was ever sent there.
    """
    text = Piece(1, 6000)
    arrivals = [
        (0.0, job("a", (text,), 2)),
        (5.0, job("b", (text, Piece(2, 100)), 2)),
        (10.0, job("c", (Piece(3, 6000),), 2)),
    ]
    slow_first = (SimulatedServer(QWEN, speed=0.5), SimulatedServer(QWEN))
    served = run(form, OpenLoop([arrivals]), slow_first)
    assert [one.server for one in served] == [1, 1, 1]
    assert served[1].cached_tokens == 6000
    busy_there = [(0.0, job("a", (text,), 2)), (5.0, job("z", (Piece(9, 40_000),), 2)), (5.1, arrivals[1][1])]
    served = run(form, OpenLoop([busy_there]), (SimulatedServer(QWEN), SimulatedServer(QWEN)))
    # The one with the text may not be the one that computes 40,000 tokens, or else this one goes elsewhere.
    assert served[2].server != served[1].server


def test_late_oracle_serves_short_ones_first() -> None:
    """With one server that has 4 s of work, three more wait in the balancer and go by their size."""
    sizes = {"a": 40_000, "b": 20_000, "c": 30_000, "d": 500}
    arrivals = [(0.01 * n, job(name, (Piece(n, size),), 2)) for n, (name, size) in enumerate(sizes.items())]
    order = {}
    for form in ORACLES:
        served = run(form, OpenLoop([arrivals]), (SimulatedServer(QWEN),))
        order[form] = "".join(one.job.id for one in sorted(served, key=lambda one: one.first_at or 0.0))
    assert order == {"oracle": "abcd", "oracle, late": "adbc"}


def test_nobody_can_choose_an_oracle() -> None:
    for name in ORACLES:
        with pytest.raises(ValidationError):
            RoutingSettings.model_validate({"policy": name})
