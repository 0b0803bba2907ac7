# SPDX-License-Identifier: Apache-2.0
"""Traffic of others: requests that reach a simulated server past every balancer."""

from __future__ import annotations

import random
from collections.abc import Callable

from lbproxy.sim.engine.engine import RequestTooLong, SimRequest
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import OtherTraffic
from lbproxy.sim.fleet.live import LiveServer

NAME = "others-"
"""What the ids of their requests begin with; those of jobs do not."""


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
