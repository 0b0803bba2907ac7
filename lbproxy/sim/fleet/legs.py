# SPDX-License-Identifier: Apache-2.0
"""Requests that are split between two servers of a fleet: what goes to which engine, and what is held in between.

The contract is NIXL's (docs/decisions/0041): the first leg has the prompt computed and held, then the second is sent
to another server, which reads it. What the second leg reads is freed by that; `drop` frees what none will read. A
second leg that did not reach its server is placed anew (`LiveJob.prefilled_at` stays); after anything else that goes
wrong the request begins again. Engines hear of each other when the fleet asks, after each call of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest
from lbproxy.sim.engine.link import KvLink
from lbproxy.sim.fleet.live import LiveJob, LiveServer


class Legs:
    """The legs of all requests of one fleet."""

    def __init__(self, servers: Sequence[LiveServer]) -> None:
        self._servers = servers
        self._link = KvLink()

    @staticmethod
    def to_place(flight: LiveJob) -> InferenceRequest:
        """What is to be placed next: the second leg, if its prompt is held for it, or the request."""
        if flight.prefilled_at is None:
            return flight.request
        return flight.request.as_leg(DECODE, flight.prefilled_at)

    def add(self, server: LiveServer, flight: LiveJob, ticket: Ticket, *, now: float) -> None:
        """Give a placed request, or a leg of it, to its server. Raises `RequestTooLong`."""
        if ticket.request.leg == PREFILL:
            flight.hold = self._link.prefill(server.engine, flight.work, now=now)
        elif ticket.request.leg == DECODE:
            assert flight.hold is not None
            flight.prefilled_at = None
            self._link.decode(server.engine, flight.work, flight.hold, now=now)
        else:
            server.engine.add(flight.work, now=now)

    def drop(self, flight: LiveJob, *, now: float) -> None:
        """No second leg is going to read what is held: it is freed."""
        flight.prefilled_at = None
        if flight.hold is not None:
            self._link.drop(flight.hold, now=now)
            flight.hold = None

    def settle(self, *, now: float) -> list[LiveServer]:
        """Tell each engine what others have done. Returns the servers that may have something to do now."""
        told = self._link.settle(now=now)
        return [server for server in self._servers if server.engine in told] if told else []
