"""The waiting queue: requests that somebody serves but that are not placed yet.

They wait because every endpoint is full, because none is judged yet, or because the policy holds them back: an endpoint
that has a second of prefill before it gains nothing from one more request, while here the request can still go to
whichever is free first. Bounded in requests and in body bytes; each wait has a deadline; a full queue gives the place
of the least important request to a more important one. It decides nothing about endpoints.

Invariant: a ticket is in the queue exactly while its state is WAITING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lbproxy.config import AdmissionSettings
from lbproxy.core.types import InferenceRequest, Ticket

AGEING_S = 10.0
"""A request that has waited so long counts as half its work, after twice that as a third: nobody starves."""
WORK_S = 0.5
"""How long a waiting request's least work is believed: caches change."""
LOOKUPS = 512
"""And how many are asked for anew in one plan, the oldest first, so that 10,000 that wait do not hold up the loop:
at a plan each 10 ms, 25,000 are as fresh as `WORK_S` says."""


class WaitingQueue:
    """Waiting tickets. Push, remove and the first deadline are O(1), but for a push into a full queue."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._take_limits(settings)
        self._tickets: dict[int, Ticket] = {}
        self._lanes: dict[int, dict[int, Ticket]] = {}
        """By priority; each in the order in which they came, and none of them empty."""
        self._bytes = 0

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

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they came, over a copy, so that the loop may remove."""
        return iter(list(self._tickets.values()))

    @property
    def bytes(self) -> int:
        """Body bytes of all waiting requests."""
        return self._bytes

    def push(self, ticket: Ticket) -> list[Ticket]:
        """Take a ticket in. Returns those that have no place any more: none, itself, or less important ones.

        When there is no room, those of the lowest priority go, the youngest first, as far as they are below the
        newcomer's. If that is not enough, nobody goes but the newcomer.
        """
        size = ticket.request.body_bytes
        shed = self._shed_for(ticket) if not self._fits(len(self._tickets), self._bytes + size) else []
        if shed is None:
            return [ticket]
        for victim in shed:
            self.remove(victim)
        self._tickets[id(ticket)] = ticket
        self._lanes.setdefault(ticket.request.priority, {})[id(ticket)] = ticket
        self._bytes += size
        return shed

    def _fits(self, others: int, size: int) -> bool:
        return others < self._max_requests and size <= self._max_bytes

    def _shed_for(self, ticket: Ticket) -> list[Ticket] | None:
        count, size = len(self._tickets), self._bytes + ticket.request.body_bytes
        shed = []
        for priority in sorted(self._lanes):
            if priority >= ticket.request.priority:
                break
            for victim in reversed(self._lanes[priority].values()):
                shed.append(victim)
                count -= 1
                size -= victim.request.body_bytes
                if self._fits(count, size):
                    return shed
        return None

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that was placed or closed; no-op if it is not in."""
        if self._tickets.pop(id(ticket), None) is not None:
            self._bytes -= ticket.request.body_bytes
            lane = self._lanes[ticket.request.priority]
            del lane[id(ticket)]
            if not lane:
                del self._lanes[ticket.request.priority]

    def in_order(self, work: Callable[[Ticket], float] | None, now: float) -> list[Ticket]:
        """All, in the order of service: by priority, then the least work first, discounted by age; or, without `work`,
        first come, first served. O(n log n).
        """
        ordered: list[Ticket] = []
        for priority in sorted(self._lanes, reverse=True):
            lane = self._lanes[priority].values()
            if work is None:
                ordered += lane
            else:
                ordered += sorted(lane, key=lambda t: work(t) / (1.0 + (now - t.submitted_at) / AGEING_S))
        return ordered

    def expired(self, now: float) -> list[Ticket]:
        """Those whose wait is over. No wait ends before an older one's, so they are the oldest."""
        expired = []
        for ticket in self._tickets.values():
            if ticket.deadline > now:
                break
            expired.append(ticket)
        return expired

    def first_deadline(self) -> float | None:
        """When the first wait ends."""
        return next((ticket.deadline for ticket in self._tickets.values()), None)


def least_work(uncached: Callable[[InferenceRequest], float], now: float) -> Callable[[Ticket], float]:
    """How much prefill work a ticket is at least, as of lately. `uncached`: asked where nothing of late is known, and
    of no more than `LOOKUPS` about which something older is.
    """
    left = LOOKUPS
    unknown = float("-inf")

    def work(ticket: Ticket) -> float:
        nonlocal left
        if now - ticket.work_at >= WORK_S and (left > 0 or ticket.work_at == unknown):
            left -= 1
            ticket.work_tokens = uncached(ticket.request)
            ticket.work_at = now
        return ticket.work_tokens

    return work
