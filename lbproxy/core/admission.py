"""The waiting queue: requests that a model serves but no endpoint can take right now.

First come, first served; bounded in requests and in body bytes; each wait has a deadline. It decides nothing about
endpoints. Invariant: a ticket is in the queue exactly while its state is WAITING.
"""

from __future__ import annotations

from collections.abc import Iterator

from lbproxy.config import AdmissionSettings
from lbproxy.core.types import Ticket


class WaitingQueue:
    """Tickets in the order in which they came. Push, remove and the first deadline are O(1)."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._max_requests = settings.queue_requests
        self._max_bytes = settings.queue_bytes
        self._tickets: dict[int, Ticket] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Over a copy, so that the loop may remove."""
        return iter(list(self._tickets.values()))

    @property
    def bytes(self) -> int:
        """Body bytes of all waiting requests."""
        return self._bytes

    def push(self, ticket: Ticket) -> bool:
        """Append; False if there is no room."""
        size = ticket.request.body_bytes
        if len(self._tickets) >= self._max_requests or self._bytes + size > self._max_bytes:
            return False
        self._tickets[id(ticket)] = ticket
        self._bytes += size
        return True

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that was placed or closed; no-op if it is not in."""
        if self._tickets.pop(id(ticket), None) is not None:
            self._bytes -= ticket.request.body_bytes

    def first_deadline(self) -> float | None:
        """When the first wait ends. Every wait lasts equally long, so that is the oldest ticket's."""
        return next((ticket.deadline for ticket in self._tickets.values()), None)
