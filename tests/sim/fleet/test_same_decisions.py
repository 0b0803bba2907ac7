# SPDX-License-Identifier: Apache-2.0
"""Virtual time and asyncio are two drivers of one Balancer: told the same events, it decides the same.

A simulated fleet is run, and every word that its balancer was told is written down. The same words are then said, each
at its moment, to a balancer behind the asyncio runtime, on a loop whose clock jumps from event to event. What that
decides, by itself and by its own timers, must be what was decided in virtual time.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.runtime import Runtime
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, SimulatedServer
from lbproxy.sim.workloads.catalogue import make_workload
from tests.support.pool import submit

BUSY = {"prompt_tokens": 6000, "shared_tokens": 3000, "groups": 4, "output_tokens": 60, "rate": 20, "duration_s": 12}


class Decision(NamedTuple):
    request: str
    endpoint: str | None
    """None: refused."""
    at_ms: float
    waited: bool


class Event(NamedTuple):
    at: float
    say: Callable[[Replay], object]


class Recorder(Balancer):
    """Writes down what it is told, and what it decides."""

    def __init__(self, policy: str, seed: int) -> None:
        rng = random.Random(seed)
        super().__init__(
            make_policy(RoutingSettings.model_validate({"policy": policy}), rng),
            BalancingSettings(
                admission=AdmissionSettings(max_in_flight_per_endpoint=None if policy == "adaptive" else 6)
            ),
            rng=rng,
        )
        self.clock: Callable[[], float] = lambda: 0.0
        """The fleet's: not everything is told with its time."""
        self.events: list[Event] = []
        self.decisions: list[Decision] = []

    def _decided(self, ticket: Ticket, now: float) -> None:
        if ticket.state is not TicketState.WAITING:
            name = None if ticket.placed_on is None else ticket.placed_on.endpoint.name
            self.decisions.append(Decision(ticket.request.id, name, round(1000 * now, 3), now > ticket.submitted_at))

    def submit(
        self,
        request: InferenceRequest,
        *,
        now: float,
        avoid: frozenset[EndpointUid] = frozenset(),
        suspect: EndpointUid | None = None,
        resubmitted: bool = False,
    ) -> Ticket:
        self.events.append(Event(now, lambda it: it.submit(request, avoid)))
        ticket = super().submit(request, now=now, avoid=avoid, suspect=suspect, resubmitted=resubmitted)
        self._decided(ticket, now)
        return ticket

    def poll(self, *, now: float) -> list[Ticket]:
        changed = super().poll(now=now)
        for ticket in changed:
            self._decided(ticket, now)
        return changed

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        name = ticket.request.id
        self.events.append(Event(now, lambda it: it.runtime.first_byte(it.tickets[name])))
        super().first_byte(ticket, now=now)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        name = ticket.request.id
        self.events.append(Event(now, lambda it: it.runtime.progress(it.tickets[name], tokens)))
        super().progress(ticket, tokens, now=now)

    def close(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, timed_out: bool = False
    ) -> None:
        name = ticket.request.id
        self.events.append(Event(now, lambda it: it.runtime.close(it.tickets[name], outcome, usage)))
        super().close(ticket, outcome, now=now, usage=usage, timed_out=timed_out)

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        self.events.append(Event(now, lambda it: it.runtime.set_endpoints(specs)))
        return super().set_endpoints(specs, now=now)

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, now: float, refused: bool = False) -> None:
        self.events.append(Event(now, lambda it: it.runtime.report_health(uid, ok, reason, refused=refused)))
        super().report_health(uid, ok, reason, now=now, refused=refused)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        listed = None if cards is None else list(cards)
        self.events.append(Event(self.clock(), lambda it: it.runtime.report_models(uid, listed)))
        super().report_models(uid, listed)

    def scrape_sent(self, uid: EndpointUid) -> None:
        self.events.append(Event(self.clock(), lambda it: it.runtime.balancer.scrape_sent(uid)))
        super().scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        self.events.append(Event(self.clock(), lambda it: it.runtime.report_scrape(uid, metrics)))
        super().report_scrape(uid, metrics)


class Replay:
    """The runtime under test, and the tickets that it gave."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tickets: dict[str, Ticket] = {}

    def submit(self, request: InferenceRequest, avoid: frozenset[EndpointUid]) -> None:
        self.tickets[request.id] = submit(self.runtime, request, avoid)


class JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: the clock goes to where it would have waited to."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulate(recorder: Recorder, options: FleetOptions, seed: int) -> int:
    """Run a fleet before `recorder`; returns how many requests there were."""
    fleet = Fleet(options, make_workload("own", BUSY, seed=seed), lambda _: recorder, seed=seed)
    recorder.clock = lambda: fleet.now
    return len(fleet.run())


async def replay(events: Sequence[Event], balancer: Recorder) -> None:
    loop = asyncio.get_running_loop()
    runtime = Runtime(balancer)
    runtime.now = loop.time
    it = Replay(runtime)
    for at, at_once in groupby(events, lambda event: event.at):
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        for event in at_once:  # the tokens of one step arrive together
            event.say(it)
        await asyncio.sleep(0)  # the runtime acts in the loop's next turn
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("policy", "stream_share", "seed"),
    [
        *(("adaptive", 0.5, seed) for seed in (1, 6, 7)),
        ("adaptive", 1.0, 1),
        ("least-request", 1.0, 1),
        ("gie", 0.5, 1),
    ],
)
def test_both_drivers_give_the_same_decisions(policy: str, stream_share: float, seed: int) -> None:
    """Though the simulated one asks more often whether anything is to be done: nobody learns by asking."""
    preset = PRESETS["qwen-32b-2xh100"]
    simulated = Recorder(policy, 1)
    options = FleetOptions(
        servers=tuple(SimulatedServer(preset, 1.0) for _ in range(3)),
        block_tokens=256 if policy == "adaptive" else 64,
        stream_share=stream_share,
    )
    assert simulate(simulated, options, seed) == len(simulated.decisions)
    assert sum(one.waited for one in simulated.decisions) > 5, "too little load to be of interest"
    assert len({one.endpoint for one in simulated.decisions}) == 3

    real = Recorder(policy, 1)
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(replay(simulated.events, real))
    assert real.decisions == simulated.decisions


def test_the_same_seed_gives_the_same_decisions_and_another_seed_others() -> None:
    def decisions(seed: int) -> list[Decision]:
        recorder = Recorder("adaptive", seed)
        options = FleetOptions(servers=tuple(SimulatedServer(PRESETS["qwen-32b-2xh100"], 1.0) for _ in range(3)))
        simulate(recorder, options, seed)
        return recorder.decisions

    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)
