# SPDX-License-Identifier: Apache-2.0
"""Waiting requests that have waited long enough for a higher tier of endpoints (`core.queue.choice`)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.queue.choice import Choice
from lbproxy.core.queue.dispatcher import Consider, Dispatcher
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.queue.waiting_queue import WaitingQueue

AGAIN_S: Final = 1.0
"""How long after a request found no room on a higher tier it is tried again, if no event comes before."""
MAX_DUE: Final = 32
"""Requests that are considered at a time because they have waited too long."""


class Overdue:
    """Waiting tickets, by when they have waited long enough for a higher tier. Those that left are skipped."""

    def __init__(self, endpoints: EndpointSet, choice: Choice, dispatcher: Dispatcher, queue: WaitingQueue) -> None:
        self._endpoints, self._choice, self._dispatcher, self._queue = endpoints, choice, dispatcher, queue
        self._heap: list[tuple[float, int, Ticket]] = []
        self._added = 0

    def add(self, ticket: Ticket, now: float) -> None:
        """Add a ticket that begins to wait. No effect if it may wait for ever, or there is no other tier."""
        if self._choice.after_s is not None and self._endpoints.has_tiers and ticket.state is TicketState.WAITING:
            self._push(ticket, now + self._choice.after_s)

    def _push(self, ticket: Ticket, at: float) -> None:
        if len(self._heap) > 64 + 4 * len(self._queue):
            self._heap = [one for one in self._heap if one[2].state is TicketState.WAITING]
            heapify(self._heap)
        self._added += 1
        heappush(self._heap, (at, self._added, ticket))

    def next_at(self) -> float:
        """When the first is due; infinite: never."""
        while self._heap and self._heap[0][2].state is not TicketState.WAITING:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def serve(self, now: float, consider: Consider, changed: list[Ticket]) -> None:
        """Have those that are due considered. Those that stop waiting are appended to `changed`."""
        due: list[Ticket] = []
        while len(due) < MAX_DUE and self.next_at() <= now:
            due.append(heappop(self._heap)[2])
        has_room = bool(due) and self._choice.has_room_above(now)
        for ticket in due:
            wait_s = AGAIN_S
            if not ticket.counts_in_flow:  # it waits for its flow
                ticket.waits_since, wait_s = now, max(AGAIN_S, self._choice.after_s or 0.0)
            else:
                ticket.is_overdue = True
                if has_room and self._dispatcher.serve_one(ticket, now, consider):
                    changed.append(ticket)
                    continue
            self._push(ticket, now + wait_s)
