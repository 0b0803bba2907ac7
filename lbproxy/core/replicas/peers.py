# SPDX-License-Identifier: Apache-2.0
"""What the other replicas placed, as the Balancer counts it: as requests of known work at its endpoints.

Each of their requests gets a ticket of ours, so that it counts in the load model of its endpoint, in its prefix cache,
in its adapters and in its flow as if it had been placed here. It does not count in `EndpointState.in_flight`, which is
ours and exact, but in `elsewhere`: whoever compares counts with what an engine reports takes both.

A batch counts once, in order: one with an old number is ignored, and after a missing one the replica is asked for a
reset. Until that comes its events are applied all the same, as most of them are right. A reset changes nothing for
requests that are known: when it is complete, those that it did not contain are closed. A replica that is not heard of
any more is taken out by `lose`, with everything that it had in flight; what caches contain because of it stays.

What counts for limits is what the replica says that a request used (`RequestEnded.tokens`), so that all count the same.

A request that is told long after its placement counts from now on, and its first byte teaches nothing about speed.

Memory is bounded: `MAX_PEERS`, and twice `MAX_IN_FLIGHT` requests and `MAX_FLOWS` flows of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from lbproxy.core.capacity.allowance import Use
from lbproxy.core.capacity.bucket import Spent
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.replicas.batches import (
    MAX_FLOWS,
    Batch,
    FlowUse,
    RequestBegan,
    RequestEnded,
    RequestPlaced,
    ResponseStored,
    Used,
    unpack_keys,
)
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.requests.request import DECODE, WHOLE, InferenceRequest, Usage

MAX_PEERS: Final = 32
MAX_IN_FLIGHT: Final = 50_000
"""Requests of one replica."""
ASK_AGAIN_S: Final = 1.0
"""The least time between two requests for a reset."""
MAX_AGE_S: Final = 1.0
"""An event that is older took place before we were told of the request: models learn nothing from its time."""


class PeerSnapshot(NamedTuple):
    """One other replica at one moment."""

    replica: str
    in_flight: int
    batches: int
    """Batches that were applied."""
    resets: int
    missed: int
    """Gaps in the numbers of its batches."""
    repeated: int
    """Batches that were ignored, as they or later ones had come before."""
    unknown: int
    """Events of requests at endpoints that are not in our set, or beyond `MAX_IN_FLIGHT`."""
    heard_s: float
    """Seconds since its last batch arrived."""
    is_complete: bool
    """Its requests in flight are all known: no reset is awaited."""


class _Peer:
    """What is known of one other replica."""

    def __init__(self, replica: str, now: float) -> None:
        self.replica = replica
        self.number = 0
        """The number of its last batch."""
        self.tickets: dict[int, Ticket] = {}
        self.unconfirmed: dict[int, Ticket] = {}
        """Requests of before a reset that it has not told again yet."""
        self.flows: dict[str, FlowUse] = {}
        self.is_complete = False
        self.asked_at = -ASK_AGAIN_S
        self.heard_at = now
        self.batches = self.resets = self.missed = self.repeated = self.unknown = 0


class Peers:
    """The other replicas. Changes endpoints, flows and stored responses of the Balancer, whose part it is."""

    def __init__(
        self,
        journal: Journal,
        endpoints: EndpointSet,
        flows: Flows,
        stored: StoredResponses,
        *,
        wake: Callable[[EndpointState], None],
        unpark: Callable[[Flow, float], None],
    ) -> None:
        """`journal`: what we tell. `wake` is called with an endpoint that may have room again, `unpark` with a flow of
        which others use less.
        """
        self._journal, self._endpoints, self._stored = journal, endpoints, stored
        self._flows, self._limits = flows, flows.limits
        self._wake, self._unpark = wake, unpark
        self._peers: dict[str, _Peer] = {}

    def snapshot(self, now: float) -> list[PeerSnapshot]:
        """All of them, in the order in which they were first heard of."""
        return [
            PeerSnapshot(
                one.replica,
                len(one.tickets) + len(one.unconfirmed),
                one.batches,
                one.resets,
                one.missed,
                one.repeated,
                one.unknown,
                now - one.heard_at,
                one.is_complete,
            )
            for one in self._peers.values()
        ]

    def hear(self, batch: Batch, now: float) -> None:
        """Apply a batch of another replica."""
        if batch.replica == self._journal.replica:
            return
        peer = self._peers.get(batch.replica)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return
            peer = self._peers[batch.replica] = _Peer(batch.replica, now)
        peer.heard_at = now
        if batch.number <= peer.number:
            peer.repeated += 1
            return
        if batch.is_reset:
            for ticket in peer.tickets.values():  # they are part of what it says that all use
                self._limits.settle(ticket, 0.0, now)
            peer.unconfirmed = {**peer.unconfirmed, **peer.tickets}
            peer.tickets = {}
            self._limit_unconfirmed(peer, now)
            peer.resets += 1
            peer.is_complete = True
        elif batch.number != peer.number + 1:
            peer.missed += peer.is_complete
            peer.is_complete = False
        peer.number = batch.number
        peer.batches += 1
        if self._journal.replica in batch.asks:
            self._journal.reset_due = True
        self._apply(peer, batch, now)
        if peer.is_complete and not batch.untold:
            self._close_all(peer.unconfirmed, now)
        if not peer.is_complete and now >= peer.asked_at + ASK_AGAIN_S:
            peer.asked_at = now
            self._journal.ask(batch.replica)

    def tell_stored(self, most: int) -> None:
        """Tell the others of the stored responses that were used last: one of them may have joined."""
        for response_id, stored in self._stored.latest(most):
            self._journal.stored(response_id, stored)

    def lose(self, replica: str, now: float) -> None:
        """A replica is gone, or cannot be heard: it has nothing in flight."""
        peer = self._peers.pop(replica, None)
        if peer is not None:
            self._drop(peer, now)

    # Events

    def _apply(self, peer: _Peer, batch: Batch, now: float) -> None:
        keyed = batch.block_bytes == self._journal.block_bytes
        for event in batch.events:
            if isinstance(event, RequestPlaced):
                ticket = self._placed(peer, event, batch.urls[event.endpoint], now, keyed=keyed)
                if ticket is not None:
                    ticket.counted = event.counted
                    self._limits.placed(ticket, now)
                    self._flows.placed(ticket, now)
            elif isinstance(event, ResponseStored):
                self._note_stored(event, batch.urls[event.endpoint], now, keyed=keyed)
            elif isinstance(event, RequestBegan):
                self._began(peer, event, now)
            elif isinstance(event, Used):
                self._used(event, batch.urls[event.endpoint], now)
            else:
                self._ended(peer, event, now)
        if batch.is_reset:  # it contains all flows
            for name in [one for one in peer.flows if one not in batch.flows]:
                self._give_back(peer, name, now)
        for name, use in batch.flows.items():
            self._use(peer, name, use, now, joins=batch.is_reset)

    def _placed(self, peer: _Peer, one: RequestPlaced, url: str, now: float, *, keyed: bool) -> Ticket | None:
        """Returns its ticket, if that is new."""
        known = peer.unconfirmed.pop(one.number, None)
        if known is not None:
            peer.tickets[one.number] = known
            self._confirmed(known, now)
            return None
        state = self._endpoints.by_key.get(url)
        if state is None or len(peer.tickets) >= MAX_IN_FLIGHT or one.number in peer.tickets:
            peer.unknown += 1
            return None
        request = InferenceRequest(
            id=f"{peer.replica}/{one.number}",
            model=one.model,
            stream=one.stream,
            body_bytes=one.body_bytes,
            prompt_bytes=one.prompt_bytes,
            block_keys=unpack_keys(one.keys) if keyed else (),
            max_tokens=one.max_tokens,
            session=one.session,
            flow=one.flow,
            media_tokens=one.media_tokens,
            binary=one.binary,
            open_ended=one.open_ended,
            leg=DECODE if one.second_leg else WHOLE,
        )
        age_s = one.age_ms / 1000.0
        at = now - age_s if age_s <= MAX_AGE_S else now
        ticket = peer.tickets[one.number] = Ticket(request, at, at, frozenset())
        ticket.flow = self._flows.of(request.flow, now)
        ticket.state, ticket.placed_on, ticket.placed_at = TicketState.PLACED, state, now - age_s
        state.elsewhere += 1
        state.reported.elsewhere_awaiting += 1
        if self._endpoints.has_loads and not request.open_ended:
            ticket.load = state.load
            ticket.placement = ticket.load.place(request, at)
        return ticket

    def _began(self, peer: _Peer, one: RequestBegan, now: float) -> None:
        ticket = peer.tickets.get(one.number) or peer.unconfirmed.get(one.number)
        if ticket is None or ticket.first_byte_at is not None:
            return
        age_s = one.age_ms / 1000.0
        ticket.first_byte_at = now - age_s
        state, load, placement = ticket.placed_state, ticket.load, ticket.placement
        state.reported.elsewhere_awaiting -= 1
        if load is None or placement is None:
            return
        if age_s <= MAX_AGE_S:
            load.first_byte(placement, now - age_s)
        elif placement in load.work.pending:
            load.work.prefilled((placement,), now, load.speed)
            placement.placed_at = ticket.placed_at or now
        self._wake(state)

    def _ended(self, peer: _Peer, one: RequestEnded, now: float) -> None:
        ticket = peer.tickets.pop(one.number, None)
        if ticket is None and (ticket := peer.unconfirmed.pop(one.number, None)) is not None:
            self._confirmed(ticket, now)
        if ticket is not None:
            ticket.response_tokens = one.response_tokens
            usage = None if one.usage is None else Usage(*one.usage)
            at = now - min(MAX_AGE_S, one.age_ms / 1000.0)
            self._limits.settle(ticket, one.tokens, now)
            self._close(ticket, usage, at, completed=one.completed)

    def _close_all(self, tickets: dict[int, Ticket], now: float) -> None:
        for ticket in tickets.values():
            self._close(ticket, None, now, completed=False)
        tickets.clear()

    def _confirmed(self, ticket: Ticket, now: float) -> None:
        """Note what a request counts for that a reset has told again, or that ended before it could."""
        ticket.counted = True
        self._limits.placed(ticket, now)

    def _close(self, ticket: Ticket, usage: Usage | None, at: float, *, completed: bool) -> None:
        state = ticket.placed_state
        ticket.state = TicketState.CLOSED
        state.elsewhere -= 1
        if ticket.first_byte_at is None:
            state.reported.elsewhere_awaiting -= 1
        served = ticket.first_byte_at is not None or (completed and usage is not None)
        self._flows.ended(ticket, usage, at, served=served)
        if ticket.load is not None and ticket.placement is not None:
            ticket.load.end(ticket.placement, usage, at, completed=completed)
        self._wake(state)

    def _used(self, one: Used, url: str, now: float) -> None:
        state = self._endpoints.by_key.get(url)
        if state is not None and state.allowance is not None:
            day = Spent(now - one.day_age_ms / 1000.0, tuple(one.day))
            state.allowance.used_elsewhere(Use(now, one.requests, one.tokens, day), now)

    def _note_stored(self, one: ResponseStored, url: str, now: float, *, keyed: bool) -> None:
        state = self._endpoints.by_key.get(url)
        if state is not None and self._stored.find(one.response_id, now=now) is None:
            keys = unpack_keys(one.keys) if keyed else ()
            self._stored.note(one.response_id, state.endpoint.uid, one.prompt_bytes, keys, now=now)

    def _limit_unconfirmed(self, peer: _Peer, now: float) -> None:
        """Close the oldest if there are too many, as after resets in a row that were not complete."""
        while len(peer.unconfirmed) > MAX_IN_FLIGHT:
            ticket = peer.unconfirmed.pop(next(iter(peer.unconfirmed)))
            self._close(ticket, None, now, completed=False)

    def _use(self, peer: _Peer, name: str, use: FlowUse, now: float, *, joins: bool) -> None:
        """A flow uses this much at a replica. `joins`: some of what it used before may not be known."""
        flow = self._flows.of(name, now)
        if flow.name != name:  # the table is full
            return
        before = peer.flows.pop(name, None)
        peer.flows[name] = use
        if len(peer.flows) > MAX_FLOWS:
            self._give_back(peer, next(iter(peer.flows)), now)
        flow.elsewhere += use.active - (0 if before is None else before.active)
        if before is not None:
            flow.allowance.take(max(0.0, float(use.admitted - before.admitted)), 0.0, now)
        elif peer.resets and not joins:  # a flow that is new there: the reset contained all others
            flow.allowance.take(float(min(use.admitted, round(use.used_requests))), 0.0, now)
        if joins or not peer.resets:
            flow.allowance.used_elsewhere(Use(now, use.used_requests, use.used_tokens, None), now)
        if before is not None and use.active < before.active:
            self._unpark(flow, now)

    def _give_back(self, peer: _Peer, name: str, now: float) -> None:
        """A flow uses nothing there any more. What its limits per minute have admitted stays used."""
        use, flow = peer.flows.pop(name), self._flows.of(name, now)
        if use.active and flow.name == name:
            flow.elsewhere -= use.active
            self._unpark(flow, now)

    def _drop(self, peer: _Peer, now: float) -> None:
        """Take out everything that a replica has in flight."""
        for ticket in peer.tickets.values():
            self._limits.ended(ticket, None, now, served=ticket.first_byte_at is not None)
        self._close_all(peer.unconfirmed, now)
        self._close_all(peer.tickets, now)
        for name in list(peer.flows):
            self._give_back(peer, name, now)
