# SPDX-License-Identifier: Apache-2.0
"""What balancers ask simulated servers by themselves: health and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import FleetOptions
from lbproxy.sim.fleet.live import LiveBalancer, LiveServer, page_of

PROBE_UP_S, PROBE_DOWN_S = 2.0, 0.5
"""As in the proxy's default settings."""


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
            for server in servers:
                if options.scrape_interval_s is not None and server.spec.metrics:
                    # The first at once: nobody starts without gauges.
                    self._heap.at(rng.uniform(0, options.scrape_interval_s) * 0.1, self._scrape, (front, server))
                if any(fault.speed is None for fault in options.faults):
                    self._heap.at(rng.uniform(0, PROBE_UP_S), self._probe, (front, server))

    def _probe(self, pair: tuple[LiveBalancer, LiveServer]) -> None:
        front, server = pair
        front.balancer.report_health(server.uids[front.number], server.alive, "probe", now=self._heap.now)
        self._heap.at(self._heap.now + (PROBE_UP_S if server.alive else PROBE_DOWN_S), self._probe, pair)
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
