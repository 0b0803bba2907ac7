# SPDX-License-Identifier: Apache-2.0
"""What happens at simulated servers besides jobs: balancers ask for health and metrics, faults begin and end, and
requests of others arrive past every balancer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.sim.engine.engine import RequestTooLong, SimRequest
from lbproxy.sim.engine.on_demand import OnDemandEngine
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import FaultKind, FleetOptions, OtherTraffic, ServerFault
from lbproxy.sim.fleet.live import LiveBalancer, LiveServer, page_of

PROBE_UP_S, PROBE_DOWN_S = 2.0, 0.5
"""As in the proxy's default settings."""
LOADED_S = 1.0
"""Likewise."""
DECIDE_S = 0.1
HUNG_SPEED = 1e-9
NAME = "others-"
"""What the ids of their requests begin with; those of jobs do not."""


class Asking:
    """Probes and scrapes of every balancer at every server."""

    def __init__(self, heap: EventHeap, options: FleetOptions, poll: Callable[[LiveBalancer], None]) -> None:
        """`poll` is called with each balancer that was told something."""
        self._heap = heap
        self._options = options
        self._poll = poll

    def start(self, fronts: Sequence[LiveBalancer], servers: Sequence[LiveServer], rng: random.Random) -> None:
        """From now on."""
        options = self._options
        for front in fronts:
            if any(server.spec.loading is not None for server in servers):
                self._heap.at(0.0, self._decide, front)
            for server in servers:
                if options.scrape_interval_s is not None and server.spec.metrics:
                    # The first at once: nobody starts without gauges.
                    self._heap.at(rng.uniform(0, options.scrape_interval_s) * 0.1, self._scrape, (front, server))
                if server.spec.loading is not None and options.follows_loads:
                    self._heap.at(0.0, self._ask_loaded, (front, server))
                if any(fault.speed is None for fault in options.faults):
                    self._heap.at(rng.uniform(0, PROBE_UP_S), self._probe, (front, server))

    def _decide(self, front: LiveBalancer) -> None:
        """Have a balancer decide which models are to be loaded."""
        self._heap.at(self._heap.now + DECIDE_S, self._decide, front)
        front.balancer.sleepers.decide(self._heap.now)
        front.balancer.sleepers.transitions.clear()
        self._poll(front)

    def _probe(self, pair: tuple[LiveBalancer, LiveServer]) -> None:
        front, server = pair
        front.balancer.report_health(server.uids[front.number], server.alive, "probe", now=self._heap.now)
        self._heap.at(self._heap.now + (PROBE_UP_S if server.alive else PROBE_DOWN_S), self._probe, pair)
        self._poll(front)

    def _ask_loaded(self, pair: tuple[LiveBalancer, LiveServer]) -> None:
        """Which models are in memory."""
        front, server = pair
        self._heap.at(self._heap.now + LOADED_S, self._ask_loaded, pair)
        if server.alive and isinstance(server.engine, OnDemandEngine):
            server.engine.look(now=self._heap.now)
            models, asked_at = server.engine.resident(), self._heap.now - self._options.scrape_delay_s
            front.balancer.sleepers.loaded(server.uids[front.number], models, asked_at=asked_at, now=self._heap.now)
            self._poll(front)

    def _scrape(self, pair: tuple[LiveBalancer, LiveServer]) -> None:
        front, server = pair
        now, interval_s = self._heap.now, self._options.scrape_interval_s
        assert interval_s is not None
        self._heap.at(now + interval_s, self._scrape, pair)
        if server.alive:
            front.balancer.scrape_sent(server.uids[front.number])
            self._heap.at(now + self._options.scrape_delay_s, self._scraped, (front, server, page_of(server, now)))

    def _scraped(self, scraped: tuple[LiveBalancer, LiveServer, LoadMetrics]) -> None:
        front, server, metrics = scraped
        if server.alive:
            front.balancer.report_scrape(server.uids[front.number], metrics)
            self._poll(front)


class Faults:
    """All faults of one fleet's servers."""

    def __init__(
        self,
        heap: EventHeap,
        servers: Sequence[LiveServer],
        *,
        lose_all: Callable[[LiveServer], None],
        arm: Callable[[LiveServer], None],
    ) -> None:
        """`lose_all` is called with a server whose process ends, `arm` with one that may have something to do."""
        self._heap = heap
        self._servers = servers
        self._lose_all = lose_all
        self._arm = arm

    def plan(self, faults: Sequence[ServerFault]) -> None:
        """They begin and end in time."""
        for fault in faults:
            self._heap.at(fault.from_s, self._begin, fault)
            self._heap.at(fault.until_s, self._end, fault)

    def _begin(self, fault: ServerFault) -> None:
        server, now = self._servers[fault.server], self._heap.now
        if fault.speed is not None:
            server.engine.set_speed(server.spec.speed * fault.speed, now=now)
        elif fault.kind is FaultKind.HUNG:
            server.engine.set_speed(HUNG_SPEED, now=now)
        elif fault.kind is FaultKind.FAILING:
            server.failing = True
        elif fault.kind is FaultKind.CLEARED:
            server.engine.forget(now=now)
        elif fault.kind is FaultKind.STALE:
            server.page = page_of(server, now)
        elif fault.kind is FaultKind.RESTARTED:
            self._lose_all(server)
        else:
            server.alive = False
            self._lose_all(server)
        self._arm(server)

    def _end(self, fault: ServerFault) -> None:
        server = self._servers[fault.server]
        if fault.speed is None and fault.kind is FaultKind.HUNG:
            self._lose_all(server)
        if fault.speed is None and fault.kind in {FaultKind.DEAD, FaultKind.HUNG}:
            server.started_at = self._heap.now
        server.alive, server.failing, server.page = True, False, None
        server.engine.set_speed(server.spec.speed, now=self._heap.now)
        self._arm(server)


class OthersTraffic:
    """One such stream of requests. Nobody hears how they end; a server that is down loses them."""

    def __init__(
        self,
        heap: EventHeap,
        others: OtherTraffic,
        server: LiveServer,
        arm: Callable[[LiveServer], None],
        *,
        number: int,
        seed: int,
    ) -> None:
        """`arm` is told of a server that has more to do. `number` tells several streams apart."""
        self._heap = heap
        self._others = others
        self._server = server
        self._arm = arm
        self._name = f"{NAME}{number}-"
        self._rng = random.Random(f"{seed}:others:{number}")
        self._sent = 0
        self._next(others.from_s)

    def _next(self, after: float) -> None:
        at = after + self._rng.expovariate(self._others.rate)
        if at < self._others.until_s:
            self._heap.at(at, self._arrive, None)

    def _arrive(self, _: None) -> None:
        now = self._heap.now
        self._sent += 1
        if self._server.alive and not self._server.failing:
            work = SimRequest(f"{self._name}{self._sent}", self._others.prompt_tokens, self._others.output_tokens)
            try:
                self._server.engine.add(work, now=now)
            except RequestTooLong:
                return  # and so would be all that follow
            self._arm(self._server)
        self._next(now)
