# SPDX-License-Identifier: Apache-2.0
"""A fleet whose balancer is restarted in the middle of the run, with or without what the old one had learned.

After a hot restart the old balancer finishes the requests that it has, and the new one gets all others. After a crash
the old one is gone: its requests break, and their clients send them again at once. What was learned goes through the
lines of `core.saved`, as it does through a file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.hang import CHECK_S
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.saved.reading import encode, read_lines
from lbproxy.sim.engine.presets import Preset
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, Served, SimulatedServer
from lbproxy.sim.fleet.live import LiveBalancer, LiveJob, engine_of, introduce
from lbproxy.sim.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEngine:
    """A server that is restarted together with the balancer, as another one."""

    server: int
    """Its number in the fleet."""
    preset: Preset
    speed: float
    reports_start: bool = True
    """Its metrics have the time of its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The restart of the balancer."""

    at_s: float
    crash: bool = False
    age_s: float = 0.0
    """How old the data is at the restart."""
    saved: bool = True
    prefixes: bool = True
    engines: tuple[NewEngine, ...] = ()


class RestartedFleet(Fleet):
    """One simulation. `run` it once. `Served.balancer` is 1 for what the new balancer got."""

    def __init__(
        self,
        options: FleetOptions,
        workload: Workload,
        make_balancer: Callable[[random.Random], Balancer],
        *,
        seed: int,
        restart: Restart,
    ) -> None:
        assert options.balancers == 1
        assert not options.adapters
        super().__init__(options, workload, make_balancer, seed=seed)
        self._make_balancer = make_balancer
        self._restart = restart
        self._lines: list[bytes] = []
        for engine in restart.engines:
            if not engine.reports_start:
                self._servers[engine.server].started_at = None
        if restart.saved:
            self._heap.at(restart.at_s - restart.age_s, self._save, None)
        self._heap.at(restart.at_s, self._begin_anew, None)

    def _front(self, rng: random.Random) -> LiveBalancer:
        rng.randrange(1)  # as without a restart
        return self._fronts[-1]

    def _save(self, _: None) -> None:
        balancer = self._fronts[0].balancer
        steps = balancer.restarts.save(saved_at=self.now, prefixes=self._restart.prefixes, now=self.now)
        self._lines = [encode(piece) for piece in steps if piece is not None]

    def _begin_anew(self, _: None) -> None:
        for engine in self._restart.engines:
            self._replace(engine)
        old = self._fronts[0]
        broken = [flight for server in self._servers for flight in server.flights.values()]
        broken += old.waiting.values()
        self._fronts.append(self._new_front())
        if self._restart.crash:
            for flight in broken:
                self._break(old, flight)

    def _replace(self, new: NewEngine) -> None:
        """The server's process ends, and another engine starts."""
        server = self._servers[new.server]
        self._lose_all(server)
        server.spec = SimulatedServer(new.preset, new.speed)
        server.engine = engine_of(server.spec, random.Random(f"{self._seed}:new engine:{new.server}"))
        server.wakes_at = float("inf")
        if new.reports_start:
            server.started_at = self.now

    def _new_front(self) -> LiveBalancer:
        front = LiveBalancer(1, self._new_balancer(1))
        introduce(front, self._servers, self._options, now=self.now)
        self._asking.start([front], self._servers, random.Random(f"{self._seed}:clocks:1"))
        self._heap.at(self.now + CHECK_S, self._check, front)
        if self._lines:
            saved = read_lines(self._lines)
            restoring = front.balancer.restarts.restore(saved, age_s=self._restart.age_s, now=self.now)
            while restoring is not None and restoring.step():
                pass
        return front

    def _break(self, old: LiveBalancer, flight: LiveJob) -> None:
        """A request of the old balancer breaks, and its client sends it again."""
        served, server = flight.served, flight.server
        old.waiting.pop(id(flight.ticket), None)
        if server is not None and server.flights.pop(served.job.id, None) is not None:
            server.engine.abort(served.job.id, now=self.now)
            self._arm(server)
        self._close(flight, Outcome.CUT)
        self._live += 1
        self._end(flight, Outcome.CUT)
        self._arrive(served.job)


def mean_ttft(served: Sequence[Served], from_s: float, until_s: float, *, end_s: float) -> float:
    """Mean seconds to the first token of the requests that were sent then, without those that were cut before it. Those
    that have none when the run ends, at `end_s`, count as if it came then.
    """
    return fmean(
        (end_s if one.first_at is None else one.first_at) - one.submitted_at
        for one in served
        if from_s <= one.submitted_at < until_s and (one.first_at is not None or one.outcome is None)
    )
