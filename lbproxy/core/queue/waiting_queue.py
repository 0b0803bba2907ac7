"""The waiting queue: requests that somebody serves but that are not placed yet.

They wait because every endpoint is full, because none is judged yet, or because the policy holds them back: an endpoint
without room (`core.capacity.room`) gains nothing from one more request, while here the request can still go to
whichever is free first. Bounded in requests and in body bytes; each wait has a deadline; a full queue gives the place
of the least important request to a more important one, or one of the flow that has most here to another's. It decides
nothing about endpoints, and whose turn it is, `core.queue.flows` knows.

Invariants: a ticket is in the queue exactly while its state is WAITING; it is parked while its flow has as many
requests as it may have, and then in nobody's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from math import inf
from typing import Final

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import InferenceRequest

AGEING_S: Final = 10.0
"""A request that has waited so long counts as half its work, after twice that as a third: nobody starves."""
WORK_S: Final = 0.5
"""How long a waiting request's least work is believed: caches change."""
MAX_LOOKUPS: Final = 512
"""And how many are asked for anew at a time, the oldest first, so that 10,000 that wait do not hold up the loop."""
YOUTH_S: Final = 1.0
"""Under overload (`core.queue.overload`) a request that has waited so long counts as twice its work: who came last can
still be served in time."""
HEAVY_SHARE: Final = 0.5
"""Of its fair share of the requests that wait: a flow with so many is one of those that overload the queue."""
FAIR_TICKETS: Final = 256
"""Tickets of a priority that take turns by their flows; nobody ever looks so far."""


class _FlowQueue:
    """One flow's waiting tickets of one priority, each in the order in which they came."""

    __slots__ = ("parked", "ready")

    def __init__(self) -> None:
        self.ready: dict[int, Ticket] = {}
        self.parked: dict[int, Ticket] = {}
        """They wait for their own flow, not for an endpoint."""

    def __len__(self) -> int:
        return len(self.ready) + len(self.parked)

    def last_served_first(self, *, overloaded: bool) -> Iterator[Ticket]:
        """Those that are served last first: those that are parked, then the youngest, but under overload the oldest."""
        yield from reversed(self.parked.values())
        yield from list(self.ready.values()) if overloaded else reversed(self.ready.values())


class WaitingQueue:
    """Waiting tickets. Push, remove and the first deadline are O(1), or O(log n) where a ticket has its own deadline,
    but for a push into a full queue.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._take_limits(settings)
        self.late_s = inf
        """Finite: requests have been coming faster than they are served. The newest go first, and those that have
        waited for so long last. Set by `core.queue.dispatcher`."""
        self._tickets: dict[int, Ticket] = {}
        self._by_priority: dict[int, dict[Flow, _FlowQueue]] = {}
        """By priority and flow; none of them empty."""
        self._own_deadlines: list[tuple[float, int, Ticket]] = []
        """A heap of those whose deadline is their own, some of which are gone."""
        self._bytes = 0
        self._ready = 0

    def _take_limits(self, settings: AdmissionSettings) -> None:
        self._max_requests = settings.queue_requests
        self._max_bytes = settings.queue_bytes

    def reconfigure(self, settings: AdmissionSettings, *, now: float) -> None:
        """Other limits from now on. Who is in stays, but no longer than a newcomer may: the oldest stay the first that
        are over.
        """
        self._take_limits(settings)
        for ticket in self._tickets.values():
            ticket.deadline = min(ticket.deadline, now + settings.queue_timeout)
        self._own_deadlines = [(ticket.deadline, key, ticket) for _, key, ticket in self._own_deadlines]
        heapify(self._own_deadlines)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they came, over a copy, so that the loop may remove."""
        return iter(list(self._tickets.values()))

    @property
    def ready(self) -> int:
        """How many wait for an endpoint; the others wait for their own flow."""
        return self._ready

    @property
    def bytes(self) -> int:
        """Body bytes of all waiting requests."""
        return self._bytes

    def by_flow(self) -> dict[Flow, int]:
        """How many wait of each flow that has some here."""
        counts: dict[Flow, int] = {}
        for flow_queues in self._by_priority.values():
            for flow, queue in flow_queues.items():
                counts[flow] = counts.get(flow, 0) + len(queue)
        return counts

    @property
    def overloaded(self) -> bool:
        """The newest go first."""
        return self.late_s < inf

    def push(self, ticket: Ticket, *, parked: bool = False) -> list[Ticket]:
        """Take a ticket in. Returns those that have no place any more: none, itself, or less important ones.

        When there is no room, those of the lowest priority go, of the flow that has the most waiting for its weight,
        the youngest first, as far as they are below the newcomer's priority; then, at its own priority, those of a flow
        that has more waiting than the newcomer's. If that is not enough, nobody goes but the newcomer. Under overload
        the oldest go first, and at the newcomer's own priority those of its own flow as well: they waited in vain. Who
        goes is still in: whoever ends it, removes it.
        """
        request = ticket.request
        fits = self._fits(len(self._tickets), self._bytes + request.body_bytes)
        shed = [] if fits else self._shed_for(ticket)
        if shed is None:
            return [ticket]
        key = id(ticket)
        self._tickets[key] = ticket
        queue = self._by_priority.setdefault(request.priority, {}).setdefault(_flow(ticket), _FlowQueue())
        if parked:
            queue.parked[key] = ticket
        else:
            queue.ready[key] = ticket
            self._ready += 1
        self._bytes += request.body_bytes
        if request.deadline is not None:
            heappush(self._own_deadlines, (ticket.deadline, key, ticket))
        return shed

    def _fits(self, others: int, size: int) -> bool:
        return others < self._max_requests and size <= self._max_bytes

    def _shed_for(self, ticket: Ticket) -> list[Ticket] | None:
        count, size = len(self._tickets), self._bytes + ticket.request.body_bytes
        shed = []
        for victim in self._victims(ticket):
            shed.append(victim)
            count -= 1
            size -= victim.request.body_bytes
            if self._fits(count, size):
                return shed
        return None

    def _victims(self, ticket: Ticket) -> Iterator[Ticket]:
        """Who goes before `ticket` does, in this order."""
        flow, overloaded = _flow(ticket), self.overloaded
        for priority in sorted(self._by_priority):
            if priority > ticket.request.priority:
                return
            flow_queues = self._by_priority[priority]
            least = 0.0
            if priority == ticket.request.priority:
                least = ((len(flow_queues[flow]) if flow in flow_queues else 0) + 1) / flow.weight
            longest = [
                (-len(queue) / one.weight, n, one, queue.last_served_first(overloaded=overloaded))
                for n, (one, queue) in enumerate(flow_queues.items())
            ]
            heapify(longest)
            while longest:
                length, n, one, last = longest[0]
                if least and (-length < least - 1 / flow.weight if overloaded else one is flow or -length <= least):
                    break
                victim = next(last, None)
                if victim is None:
                    heappop(longest)
                    continue
                heapreplace(longest, (length + 1 / one.weight, n, one, last))
                yield victim

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that was placed or closed; no-op if it is not in."""
        key, request = id(ticket), ticket.request
        if self._tickets.pop(key, None) is None:
            return
        self._bytes -= request.body_bytes
        flow = _flow(ticket)
        flow_queues = self._by_priority[request.priority]
        queue = flow_queues[flow]
        if queue.parked.pop(key, None) is None:
            del queue.ready[key]
            self._ready -= 1
        if not queue:
            del flow_queues[flow]
            if not flow_queues:
                del self._by_priority[request.priority]

    def unpark(self, flow: Flow) -> Ticket | None:
        """Let the flow's next parked ticket wait for an endpoint. None = none is parked."""
        for priority in sorted(self._by_priority, reverse=True):
            queue = self._by_priority[priority].get(flow)
            if queue is not None and queue.parked:
                key = next(iter(queue.parked))
                queue.ready[key] = ticket = queue.parked.pop(key)
                self._ready += 1
                return ticket
        return None

    def in_order(self, work: Callable[[Ticket], float] | None, flows: Flows, now: float) -> Iterator[Ticket]:
        """Those that are ready, in the order of service: by priority; then the flow whose turn it is; then the least
        work first, discounted by age, or, without `work`, first come, first served. O(n log n). Who comes after the
        first `FAIR_TICKETS` of a priority comes flow by flow. Tickets may be removed meanwhile.
        """
        newest_first, late_at = self.overloaded, now - self.late_s
        for priority in sorted(self._by_priority, reverse=True):
            queues = [
                (flow, _sorted(queue.ready.values(), work, now, newest_first=newest_first))
                for flow, queue in self._by_priority.get(priority, {}).items()
            ]
            if len(queues) == 1:
                yield from queues[0][1]
            elif not newest_first:
                yield from _in_turn(queues, flows, now)
            else:  # no flow's turn comes for a request that waited in vain, while another's is in time
                late = [(flow, [one for one in queue if one.submitted_at < late_at]) for flow, queue in queues]
                in_time = [(flow, [one for one in queue if one.submitted_at >= late_at]) for flow, queue in queues]
                yield from _in_turn(in_time, flows, now)
                yield from _in_turn(late, flows, now)

    def share_before(self, ticket: Ticket) -> float:
        """The share of those that are ready which goes before a newcomer, by priority and flow. Below 0: it depends on
        their work, as all of them are of its own flow and priority; or, under overload, as its flow has not clearly
        fewer of them than others have.
        """
        flow, priority = _flow(ticket), ticket.request.priority
        by_priority = self._by_priority
        if not self._ready:
            return -1.0
        if len(by_priority) == 1 and priority in by_priority:
            flow_queues = by_priority[priority]
            if flow in flow_queues:
                fair_share = self._ready / len(flow_queues)
                if len(flow_queues) == 1 or (
                    self.overloaded and len(flow_queues[flow].ready) >= HEAVY_SHARE * fair_share
                ):
                    return -1.0
        before = 0
        for one, flow_queues in by_priority.items():
            size = sum(len(queue.ready) for queue in flow_queues.values())
            if one > priority:
                before += size
            elif one == priority:
                own = flow_queues.get(flow)
                turns = 1 if self.overloaded or not own else len(own.ready) + 1
                before += min(size, turns * len(flow_queues))
        return before / self._ready

    def expired(self, now: float) -> list[Ticket]:
        """Those whose wait is over. But for those with a deadline of their own no wait ends before an older one's."""
        expired = []
        while self._own_deadlines and self._own_deadlines[0][0] <= now:
            ticket = heappop(self._own_deadlines)[2]
            if id(ticket) in self._tickets:
                expired.append(ticket)
        for ticket in self._tickets.values():
            if ticket.request.deadline is None:
                if ticket.deadline > now:
                    break
                expired.append(ticket)
        return expired

    def first_deadline(self) -> float | None:
        """When the first wait ends."""
        while self._own_deadlines and id(self._own_deadlines[0][2]) not in self._tickets:
            heappop(self._own_deadlines)
        first = next((ticket.deadline for ticket in self._tickets.values()), None)
        return first if first is None or not self._own_deadlines else min(first, self._own_deadlines[0][0])


def _flow(ticket: Ticket) -> Flow:
    flow = ticket.flow
    assert flow is not None, "a ticket has a flow before it waits"
    return flow


def _sorted(
    tickets: Iterable[Ticket], work: Callable[[Ticket], float] | None, now: float, *, newest_first: bool
) -> list[Ticket]:
    if work is None:
        return list(tickets)
    if newest_first:
        return sorted(tickets, key=lambda ticket: work(ticket) * (1.0 + (now - ticket.submitted_at) / YOUTH_S))
    return sorted(tickets, key=lambda ticket: work(ticket) / (1.0 + (now - ticket.submitted_at) / AGEING_S))


def _in_turn(queues: list[tuple[Flow, list[Ticket]]], flows: Flows, now: float) -> Iterator[Ticket]:
    """The next ticket of the flow whose turn it is, as if each was placed when it is yielded."""
    turns = [(flows.virtual_start(flow, now), n, iter(tickets)) for n, (flow, tickets) in enumerate(queues)]
    heapify(turns)
    left = FAIR_TICKETS
    while turns and left:
        start, n, tickets = turns[0]
        ticket = next(tickets, None)
        if ticket is None:
            heappop(turns)
        else:
            left -= 1
            heapreplace(turns, (start + flows.cost_of(ticket), n, tickets))
            yield ticket
    yield from chain.from_iterable(tickets for _, _, tickets in sorted(turns, key=lambda turn: turn[1]))


def least_work(least: Callable[[InferenceRequest], float], now: float) -> Callable[[Ticket], float]:
    """How much prefill work a ticket is at least, as of lately. `least`: asked where nothing of late is known, and
    of no more than `MAX_LOOKUPS` about which something older is.
    """
    left = MAX_LOOKUPS
    unknown = float("-inf")

    def work(ticket: Ticket) -> float:
        nonlocal left
        if now - ticket.work_at >= WORK_S and (left > 0 or ticket.work_at == unknown):
            left -= 1
            ticket.work_tokens = least(ticket.request)
            ticket.work_at = now
        return ticket.work_tokens

    return work
