"""Several balancers before one fleet, and what it takes for each to know what the others do.

Balancers that share nothing ruin every kind of prefix routing: each fills all caches with its own view. `Replica` is
the real Balancer that can also be told of a request that *another* one placed. It then counts that request as if it had
placed it itself: in flight, in its picture of the cache, in its estimates; what follows (first byte, progress, end) is
told with the ticket that it returned. This lives in the simulation only, to learn what an exchange would be worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.sim.fleet.des import EventHeap


class Replica(Balancer):
    """One of several balancers."""

    def mirror(self, request: InferenceRequest, uid: EndpointUid, *, now: float) -> Ticket | None:
        """Another balancer placed `request` on `uid`. Close the ticket when that ends; None = no such endpoint."""
        state = self._endpoints.get(uid)
        if state is None:
            return None
        ticket = Ticket(request, now, now, frozenset())
        ticket.flow = self._flows.of(request.flow, now)
        self._place(ticket, state, now)
        return ticket


@dataclass(slots=True, eq=False)
class Echo:
    """One attempt, as the other balancers hear of it."""

    request: InferenceRequest
    by: int
    """The balancer that placed it."""
    uids: Sequence[EndpointUid]
    """Its endpoint, in each balancer's own words."""
    tickets: list[tuple[Replica, Ticket]] = field(default_factory=list)
    """The others' tickets for it, once they have heard."""
    end: tuple[Outcome, Usage | None] = (Outcome.COMPLETED, None)


class Exchange:
    """Brings dispatch, first byte and end of every request to all other balancers, all `delay_s` late."""

    def __init__(self, heap: EventHeap, replicas: Sequence[Replica], delay_s: float) -> None:
        self._heap = heap
        self._replicas = replicas
        self._delay_s = delay_s

    def placed(self, request: InferenceRequest, by: int, uids: Sequence[EndpointUid]) -> Echo:
        """Balancer number `by` placed a request on the endpoint that balancer n calls `uids[n]`."""
        echo = Echo(request, by, uids)
        self._heap.at(self._heap.now + self._delay_s, self._heard_placed, echo)
        return echo

    def first_byte(self, echo: Echo) -> None:
        """Its first byte came."""
        self._heap.at(self._heap.now + self._delay_s, self._heard_first_byte, echo)

    def ended(self, echo: Echo, outcome: Outcome, usage: Usage | None) -> None:
        """It is over."""
        echo.end = (outcome, usage)
        self._heap.at(self._heap.now + self._delay_s, self._heard_end, echo)

    def _heard_placed(self, echo: Echo) -> None:
        for number, replica in enumerate(self._replicas):
            if number != echo.by:
                ticket = replica.mirror(echo.request, echo.uids[number], now=self._heap.now)
                if ticket is not None:
                    echo.tickets.append((replica, ticket))

    def _heard_first_byte(self, echo: Echo) -> None:
        for replica, ticket in echo.tickets:
            replica.first_byte(ticket, now=self._heap.now)

    def _heard_end(self, echo: Echo) -> None:
        outcome, usage = echo.end
        for replica, ticket in echo.tickets:
            replica.close(ticket, outcome, now=self._heap.now, usage=usage)
