# SPDX-License-Identifier: Apache-2.0
"""What this replica tells the others: its placements, first bytes and ends, gathered between two batches.

The Balancer notes events here, which costs an entry in a list; batches are made when the driver takes them. Nothing is
kept for replicas that missed a batch: they ask, and get a reset, which tells every request in flight anew. So memory is
bounded by the requests in flight and `MAX_NOTES`, however long nobody takes anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from lbproxy.core.capacity.allowance import Use
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.stored_responses import StoredResponse
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.replicas.batches import (
    MAX_AGE_MS,
    MAX_AMOUNT,
    MAX_FLOWS,
    MAX_NAME_CHARS,
    MAX_SIZE,
    AnyEvent,
    Batch,
    FlowUse,
    RequestBegan,
    RequestEnded,
    RequestPlaced,
    ResponseStored,
    Used,
    pack_keys,
)
from lbproxy.core.requests.encodable import encodable_text
from lbproxy.core.requests.request import DECODE, Usage

MAX_NOTES: Final = 20_000
"""Events that wait for a batch. If there are more, nobody takes them in time, and a reset follows."""
EVENTS_IN_BATCH: Final = 500
"""Some 2 ms of work."""
KEYS_IN_BATCH: Final = 16_384
"""8 bytes each. Names count as well, as if each of their characters took 4 bytes."""

_PLACED: Final = 0
_BEGAN: Final = 1
_ENDED: Final = 2
Note: TypeAlias = tuple[int, Ticket, float, Usage | None, bool, float]
"""What happened, to which ticket, when; at the end its usage, whether it was completed, and what it used of limits."""


class Journal:
    """This replica's events that no batch has yet."""

    def __init__(self, replica: str, block_bytes: int | None, endpoints: EndpointSet, flows: Flows) -> None:
        self.replica = replica
        """Our id."""
        self.block_bytes = block_bytes
        """The size of the blocks whose keys are told; None = no prompts are read."""
        self._endpoints, self._flows = endpoints, flows
        self._notes: list[Note] = []
        self._numbers = 0
        self._batches = 0
        self._running: dict[int, Ticket] = {}
        """Tickets in flight, by number."""
        self._again: deque[tuple[int, Ticket]] = deque()
        """Requests that a reset still has to tell."""
        self._stored: deque[tuple[str, StoredResponse]] = deque()
        """Stored responses, by their ids."""
        self._uses: deque[tuple[str, Use]] = deque()
        """What was used of endpoints' limits at a reset, as far as it still has to be told."""
        self._told: dict[str, FlowUse] = {}
        self.reset_due = True
        """Somebody missed something, or nobody heard anything yet."""
        self._asks: set[str] = set()
        """Replicas that should send a reset."""
        self.on_news: Callable[[], None] = _ignore
        """Called when there is something to take after there was nothing."""

    # Noting

    def placed(self, ticket: Ticket, now: float) -> None:
        if not self._notes:
            self.on_news()
        self._numbers += 1
        ticket.shared_number = self._numbers
        self._running[self._numbers] = ticket
        self._notes.append((_PLACED, ticket, now, None, False, 0.0))
        if len(self._notes) > MAX_NOTES:
            self._notes.clear()
            self.reset_due = True

    def first_byte(self, ticket: Ticket, now: float) -> None:
        if not self._notes:
            self.on_news()
        self._notes.append((_BEGAN, ticket, now, None, False, 0.0))

    def ended(self, ticket: Ticket, usage: Usage | None, used: float, now: float, *, completed: bool) -> None:
        """It ended. `used`: tokens that count for limits."""
        if self._running.pop(ticket.shared_number, None) is not None:
            if not self._notes:
                self.on_news()
            self._notes.append((_ENDED, ticket, now, usage, completed, used))

    def stored(self, response_id: str, stored: StoredResponse) -> None:
        if len(self._stored) < MAX_NOTES:
            if not self._stored:
                self.on_news()
            self._stored.append((response_id, stored))

    def ask(self, replica: str) -> None:
        """Ask a replica for a reset."""
        self._asks.add(replica)
        self.on_news()

    # Taking

    @property
    def has_news(self) -> bool:
        """Whether `take` returns a batch, flows aside."""
        told = self._notes or self._again or self._uses or self._stored
        return bool(told or self._asks or self.reset_due)

    def take(self, now: float, *, even_empty: bool = False) -> Batch | None:
        """The next batch; None = everything was told. To be called until then, with other work between.

        `even_empty`: a batch in any case, by which others see whether they missed one.
        """
        reset = self.reset_due
        if reset:
            self.reset_due = False
            self._notes.clear()
            self._told.clear()
            self._again = deque(self._running.items())
            self._uses = deque(
                (one.endpoint.key, one.allowance.use(now))
                for one in self._endpoints.members()
                if one.allowance is not None and one.allowance.is_timed
            )
        flows = self._changed_flows(now)
        if not (reset or flows or self.has_news or even_empty):
            return None
        writer = _Writer(now)
        while self._uses and not writer.is_full:
            writer.used(*self._uses.popleft())
        self._tell_again(writer)
        if not (self._again or self._uses):
            taken = 0
            for note in self._notes:
                if writer.is_full:
                    break
                writer.note(note)
                taken += 1
            del self._notes[:taken]
        while self._stored and not writer.is_full:
            response_id, stored = self._stored.popleft()
            state = self._endpoints.get(stored.uid)
            if state is not None:
                writer.stored(response_id, state.endpoint.key, stored)
        self._batches += 1
        asks, self._asks = sorted(self._asks), set()
        return Batch(
            self.replica,
            self._batches,
            self.block_bytes or 0,
            reset,
            len(self._again),
            list(writer.urls),
            writer.events,
            flows,
            asks,
        )

    def _tell_again(self, writer: _Writer) -> None:
        while self._again and not writer.is_full:
            number, ticket = self._again.popleft()
            if number not in self._running:
                continue
            writer.note((_PLACED, ticket, ticket.placed_at or 0.0, None, False, 0.0), counted=True)
            if ticket.first_byte_at is not None:
                writer.note((_BEGAN, ticket, ticket.first_byte_at, None, False, 0.0))

    def _changed_flows(self, now: float) -> dict[str, FlowUse]:
        """The use of flows with limits, where it is not the one that was told last."""
        changed: dict[str, FlowUse] = {}
        limited = self._flows.limited()[:MAX_FLOWS]
        if len(self._told) > len(limited):  # some were forgotten
            names = {flow.name for flow in limited}
            self._told = {name: use for name, use in self._told.items() if name in names}
        for flow in limited:
            before = self._told.get(flow.name)
            if before is None or before.active != flow.active or before.admitted != flow.admitted:
                used = flow.allowance.use(now)
                use = FlowUse(flow.active, flow.admitted, _amount(used.requests), _amount(used.tokens))
                changed[flow.name] = use
                self._told[flow.name] = use
        return changed


def _ignore() -> None:
    pass


def _bounded(count: int) -> int:
    """A client's or an engine's number, within what others accept."""
    return min(max(count, 0), MAX_SIZE)


def _amount(amount: float) -> float:
    return min(amount, MAX_AMOUNT)


def _count(count: int | None) -> int | None:
    return None if count is None else _bounded(count)


class _Writer:
    """The events of one batch."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._keys = 0
        self.urls: dict[str, int] = {}
        self.events: list[AnyEvent] = []

    @property
    def is_full(self) -> bool:
        """The rest belongs into another batch."""
        return len(self.events) >= EVENTS_IN_BATCH or self._keys >= KEYS_IN_BATCH

    def _url(self, url: str) -> int:
        return self.urls.setdefault(url, len(self.urls))

    def _pack(self, keys: tuple[object, ...]) -> bytes:
        self._keys += len(keys)
        return pack_keys(keys)

    def _name(self, name: str) -> str:
        name = encodable_text(name)[:MAX_NAME_CHARS]
        self._keys += len(name) // 2
        return name

    def note(self, note: Note, *, counted: bool = False) -> None:
        """Add an event. `counted`: see `RequestPlaced`."""
        kind, ticket, at, usage, completed, used = note
        number, age_ms = ticket.shared_number, min(MAX_AGE_MS, max(0.0, 1000.0 * (self._now - at)))
        if kind == _PLACED:
            self.events.append(self._placed(ticket, number, age_ms, counted))
        elif kind == _BEGAN:
            self.events.append(RequestBegan(number, age_ms))
        else:
            told = None if usage is None else (_count(usage[0]), _count(usage[1]), _count(usage[2]))
            tokens = _bounded(ticket.response_tokens)
            self.events.append(RequestEnded(number, age_ms, completed, tokens, told, _amount(max(0.0, used))))

    def _placed(self, ticket: Ticket, number: int, age_ms: float, counted: bool) -> RequestPlaced:
        request = ticket.request
        return RequestPlaced(
            number,
            self._url(ticket.placed_state.endpoint.key),
            age_ms,
            self._pack(request.block_keys),
            _bounded(request.prompt_bytes),
            _bounded(request.body_bytes),
            None if request.model is None else self._name(request.model),
            request.stream,
            None if request.session is None else self._name(request.session),
            self._name(request.flow),
            _count(request.max_tokens),
            _bounded(request.media_tokens),
            request.binary,
            request.open_ended,
            request.leg == DECODE,
            counted,
        )

    def used(self, url: str, use: Use) -> None:
        """Add what was used of an endpoint's limits."""
        amounts, age_s = ((), 0.0) if use.day is None else (use.day.amounts, self._now - use.day.at)
        self._keys += len(amounts)
        day = [_amount(amount) for amount in amounts]
        age_ms = min(MAX_AGE_MS, max(0.0, 1000.0 * age_s))
        self.events.append(Used(self._url(url), _amount(use.requests), _amount(use.tokens), age_ms, day))

    def stored(self, response_id: str, url: str, stored: StoredResponse) -> None:
        if len(response_id) <= MAX_NAME_CHARS:
            keys = self._pack(stored.block_keys)
            self.events.append(
                ResponseStored(self._name(response_id), self._url(url), _bounded(stored.prompt_bytes), keys)
            )
