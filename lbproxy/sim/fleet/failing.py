# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, or get slower, for a while: when, and what that does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import FaultKind, ServerFault
from lbproxy.sim.fleet.live import LiveServer, page_of

HUNG_SPEED = 1e-9


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
