# SPDX-License-Identifier: Apache-2.0
"""The waiting queue: requests that could be served but are not placed yet.

They wait because every endpoint is full, because the health of none is known yet, or because the policy holds them: an
endpoint without room (`core.capacity.room`) gains nothing from one more request, while here the request can still go to
the endpoint that has room first. It is bounded in requests and in body bytes, and each wait has a deadline. A full
queue sheds the least important request for a more important one, or one of the flow that has most here for another
flow's. It decides nothing about endpoints; `core.queue.flows` decides which flow is next.

Invariants: a ticket is in the queue exactly while its state is WAITING. It is parked while its flow is at its limit of
requests, and does not delay other flows then. A ticket has a reservation only while it is in the queue; `held` is the
number of reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from math import inf
from typing import Final, TypeAlias

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.capacity.reservations import Reservations
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.queue_overload import QueueOverload
from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.request import InferenceRequest

AGEING_S: Final = 10.0
"""A request that has waited this long counts as half its work, after twice that as a third: no request starves."""
WORK_S: Final = 0.5
"""How long the least work of a waiting request is valid: caches change."""
MAX_LOOKUPS: Final = 512
"""How many of these are computed again at a time, for the requests that waited longest, so that 10,000 waiting requests
do not block the event loop."""
NEWEST_FIRST_S: Final = 1.0
"""Under overload (`core.queue.queue_overload`) a request that has waited this long counts as twice its work: the newest
can still be served in time."""
HEAVY_SHARE: Final = 0.5
"""As a share of its fair share of waiting requests: a flow with at least this many is one that overloads the queue."""
Classes: TypeAlias = dict[str | None, dict[int, set[Flow]]]
FAIR_TICKETS: Final = 256
"""Tickets of a priority that take turns by their flows; no caller reads that far."""


class _FlowQueue:
    """One flow's waiting tickets of one priority, in the order of their arrival."""

    def __init__(self) -> None:
        self.ready: dict[int, Ticket] = {}
        self.parked: dict[int, Ticket] = {}
        """They wait for their own flow, not for an endpoint."""

    def __len__(self) -> int:
        return len(self.ready) + len(self.parked)

    def last_served_first(self, *, overloaded: bool) -> Iterator[Ticket]:
        """Those that would be served last first: parked ones, then the newest, but under overload the oldest."""
        yield from reversed(self.parked.values())
        yield from list(self.ready.values()) if overloaded else reversed(self.ready.values())


class WaitingQueue:
    """The waiting tickets. Push, remove and the first deadline are O(1), or O(log n) for tickets with a deadline of
    their own, except for a push into a full queue.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._take_limits(settings)
        self.overload = QueueOverload()
        """While it lasts, the newest requests are served first, and those that will be late last."""
        self.held = 0
        """Tickets with a reservation."""
        self.unclaimed: list[int] = []
        """Endpoints of whose limits nothing is kept any more for the request that waited for them."""
        self._tickets: dict[int, Ticket] = {}
        self._by_priority: dict[int, dict[Flow, _FlowQueue]] = {}
        """By priority and flow; none of them empty."""
        self._own_deadlines: list[tuple[float, int, Ticket]] = []
        """A heap of the tickets with a deadline of their own, some of which have left."""
        self._bytes = 0
        self._ready = 0
        self._waking: dict[int, int] = {}
        """By priority: tickets that began to wait for an endpoint that is asleep. They show no overload."""

    def _take_limits(self, settings: AdmissionSettings) -> None:
        self._max_requests = settings.queue_requests
        self._max_bytes = settings.queue_bytes

    def reconfigure(self, settings: AdmissionSettings, *, now: float) -> None:
        """Apply other limits. Requests in the queue stay, but no longer than a new one may, so that the oldest still
        end first.
        """
        self._take_limits(settings)
        for ticket in self._tickets.values():
            ticket.expires_at = min(ticket.expires_at, now + settings.queue_timeout)
        self._own_deadlines = [(ticket.expires_at, key, ticket) for _, key, ticket in self._own_deadlines]
        heapify(self._own_deadlines)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """In the order of arrival, over a copy, so that the loop may remove tickets."""
        return iter(list(self._tickets.values()))

    @property
    def ready(self) -> int:
        """How many wait for an endpoint; the others wait for their own flow."""
        return self._ready

    @property
    def waking(self) -> int:
        """How many began to wait for an endpoint that is asleep."""
        return sum(self._waking.values())

    @property
    def bytes(self) -> int:
        """Body bytes of all waiting requests."""
        return self._bytes

    def by_flow(self) -> dict[Flow, int]:
        """How many requests of each flow wait, for flows with any."""
        counts: dict[Flow, int] = {}
        for flow_queues in self._by_priority.values():
            for flow, queue in flow_queues.items():
                counts[flow] = counts.get(flow, 0) + len(queue)
        return counts

    def overloaded(self, priority: int) -> bool:
        """Whether the newest requests of this priority are served first. Not while with those of higher priorities they
        are so few that all are served in time.
        """
        if not self.overload.is_lasting or len(self._by_priority) <= 1:
            return self.overload.is_lasting
        before = sum(_ready(queues) for one, queues in self._by_priority.items() if one >= priority)
        return before - sum(count for one, count in self._waking.items() if one >= priority) > self.overload.timely

    def push(self, ticket: Ticket, *, parked: bool = False) -> list[Ticket]:
        """Add a ticket. Returns the tickets to be closed: none, itself, or less important ones.

        If the queue is full, tickets of the lowest priority are shed, of the flow with the most waiting for its weight,
        the newest first, as long as they are below the new ticket's priority; then, at its own priority, those of a
        flow with more waiting than its flow. If that is not enough, only the new ticket is shed. Under overload the
        oldest are shed first, and at its own priority also those of its own flow: they waited in vain. Shed tickets are
        still in the queue: the caller closes and removes them.
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
        if ticket.wait is Wait.WAKING:
            self._waking[request.priority] = self._waking.get(request.priority, 0) + 1
        if _has_own_deadline(request):
            heappush(self._own_deadlines, (ticket.expires_at, key, ticket))
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
        """The tickets that are shed before `ticket`, in this order."""
        flow = _flow(ticket)
        for priority in sorted(self._by_priority):
            if priority > ticket.request.priority:
                return
            flow_queues, overloaded = self._by_priority[priority], self.overloaded(priority)
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
        """Remove a ticket that was placed or closed, with its reservation and claim; no effect if it is not in the
        queue.
        """
        self.release(ticket)
        self.unclaim(ticket)
        key, request = id(ticket), ticket.request
        if self._tickets.pop(key, None) is None:
            return
        self._bytes -= request.body_bytes
        if ticket.wait is Wait.WAKING:
            self._waking[request.priority] -= 1
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

    def reserve(self, ticket: Ticket, at: Reservations, tokens: float) -> None:
        """Reserve a place for a ticket at an endpoint, where its prefill work is `tokens`."""
        at.add(ticket.work_tokens, tokens)
        ticket.reservation = at, ticket.work_tokens, tokens
        self.held += 1

    def release(self, ticket: Ticket) -> None:
        """Release a ticket's reservation, if it has one."""
        if ticket.reservation is not None:
            reservations, work, tokens = ticket.reservation
            reservations.remove(work, tokens)
            ticket.reservation = None
            self.held -= 1

    def unclaim(self, ticket: Ticket) -> None:
        """Keep nothing for a ticket of any limits any more."""
        claim, ticket.claim = ticket.claim, None
        if claim is not None and claim.holds:
            claim.allowance.claim = None
            self.unclaimed.append(claim.uid)

    def parked(self, flow: Flow) -> Ticket | None:
        """The flow's next parked ticket. None = none is parked."""
        for priority in sorted(self._by_priority, reverse=True):
            queue = self._by_priority[priority].get(flow)
            if queue is not None and queue.parked:
                return next(iter(queue.parked.values()))
        return None

    def unpark(self, ticket: Ticket) -> None:
        """Let a parked ticket wait for an endpoint, until its `expires_at`."""
        key, request = id(ticket), ticket.request
        queue = self._by_priority[request.priority][_flow(ticket)]
        queue.ready[key] = queue.parked.pop(key)
        self._ready += 1
        if _has_own_deadline(request):
            heappush(self._own_deadlines, (ticket.expires_at, key, ticket))

    def in_order(self, work: Callable[[Ticket], float] | None, flows: Flows, now: float) -> Iterator[Ticket]:
        """The tickets that are ready, in the order of service: by priority; then the next flow; then the least work
        first, discounted by age, or, without `work`, first come, first served.

        O(n log n). After the first `FAIR_TICKETS` of a priority the rest follows flow by flow. Tickets may be removed
        meanwhile.
        """
        late_at = now - self.overload.late_s
        for priority in sorted(self._by_priority, reverse=True):
            by_flow = self._by_priority.get(priority, {})
            least = self._least_heavy(by_flow) if self.overloaded(priority) else inf
            queues = [
                (flow, _sorted(queue.ready.values(), work, now, newest_first=len(queue.ready) >= least))
                for flow, queue in by_flow.items()
            ]
            if len(queues) == 1:
                yield from queues[0][1]
            elif least == inf:
                yield from _in_turn(queues, flows, now)
            else:  # no heavy flow's turn comes for what waited in vain while another flow's request is in time
                in_time, late = [], []
                for flow, queue in queues:
                    since = late_at if len(queue) >= least else -inf
                    in_time.append((flow, [one for one in queue if one.submitted_at >= since]))
                    late.append((flow, [one for one in queue if one.submitted_at < since]))
                yield from _in_turn(in_time, flows, now)
                yield from _in_turn(late, flows, now)

    @staticmethod
    def _least_heavy(by_flow: Mapping[Flow, _FlowQueue]) -> float:
        """How many ready requests a flow has at least that has its part in an overload: see `HEAVY_SHARE`."""
        ready = [len(queue.ready) for queue in by_flow.values() if queue.ready]
        return HEAVY_SHARE * sum(ready) / len(ready) if ready else inf

    def classes(self) -> Classes | None:
        """The priorities and flows of ready requests, by model; None if all have the same. O(n)."""
        if len(self._by_priority) == 1 and len(next(iter(self._by_priority.values()))) == 1:
            return None
        found: Classes = {}
        for priority, flow_queues in self._by_priority.items():
            for flow, queue in flow_queues.items():
                for ticket in queue.ready.values():
                    if ticket.wait is not Wait.WAKING or ticket.best is not None:
                        found.setdefault(ticket.request.model, {}).setdefault(priority, set()).add(flow)
        return found

    def share_before(self, ticket: Ticket) -> float:
        """The share of ready tickets that precedes a new one, by priority and flow.

        Below 0: it depends on their work, as all of them have its flow and priority; or, under overload, as its flow
        does not have clearly fewer of them than others.
        """
        flow, priority = _flow(ticket), ticket.request.priority
        by_priority = self._by_priority
        if not self._ready:
            return -1.0
        if len(by_priority) == 1 and priority in by_priority:
            flow_queues = by_priority[priority]
            if flow in flow_queues:
                is_heavy = len(flow_queues[flow].ready) >= self._least_heavy(flow_queues)
                if len(flow_queues) == 1 or (self.overload.is_lasting and is_heavy):
                    return -1.0
        before = 0
        for one, flow_queues in by_priority.items():
            size = _ready(flow_queues)
            if one > priority:
                before += size
            elif one == priority:
                own = flow_queues.get(flow)
                newest = own and self.overloaded(priority) and len(own.ready) >= self._least_heavy(flow_queues)
                turns = 1 if newest or not own else len(own.ready) + 1
                before += min(size, turns * len(flow_queues))
        return before / self._ready

    def expired(self, now: float) -> list[Ticket]:
        """The tickets whose wait has ended. Except for those with their own deadline, no wait ends before an older
        one's.
        """
        expired = []
        while self._own_deadlines and self._own_deadlines[0][0] <= now:
            ticket = heappop(self._own_deadlines)[2]
            if id(ticket) in self._tickets:
                expired.append(ticket)
        for ticket in self._tickets.values():
            if not _has_own_deadline(ticket.request):
                if ticket.expires_at > now:
                    break
                expired.append(ticket)
        return expired

    def first_deadline(self) -> float | None:
        """When the first wait ends."""
        while self._own_deadlines and id(self._own_deadlines[0][2]) not in self._tickets:
            heappop(self._own_deadlines)
        first = next((ticket.expires_at for ticket in self._tickets.values()), None)
        return first if first is None or not self._own_deadlines else min(first, self._own_deadlines[0][0])


def _ready(flow_queues: Mapping[Flow, _FlowQueue]) -> int:
    return sum(len(queue.ready) for queue in flow_queues.values())


def _has_own_deadline(request: InferenceRequest) -> bool:
    """Whether its wait may end before that of an older one."""
    return request.deadline is not None or request.fallback_after_s is not None


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
        return sorted(tickets, key=lambda ticket: work(ticket) * (1.0 + (now - ticket.submitted_at) / NEWEST_FIRST_S))
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
    """Return a function for the least work of a ticket, as of recently. `least` is called if no recent value is known,
    and for at most `MAX_LOOKUPS` tickets with an older one.
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
