"""The Balancer: tell it what happened and what time it is, and it says where each request goes.

Sans-io. It owns the endpoint set and the waiting queue, and is driven by the asyncio runtime, by the simulation and by
tests alike. The contract of a driver is four steps:

1. Tell it every event as it happens (`submit`, `first_byte`, `progress`, `close`, `report_*`, `set_endpoints`).
2. After any event, call `poll` and act on the tickets that it returns: each was placed or closed just now.
3. Call `poll` again at `next_deadline`.
4. `close` every ticket that was placed, exactly once, whatever happened to its request.

Invariants: an endpoint's in-flight count is the number of its PLACED tickets; a ticket closes once (a second `close` is
a no-op); choosing and counting happen without anything in between, so two requests are never placed on one stale
picture; nothing here awaits, so every method is atomic on an event loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from lbproxy.config import AdmissionSettings, HealthSettings, RetrySettings, ScrapeSettings
from lbproxy.core.admission import WaitingQueue
from lbproxy.core.endpoints import EndpointChanges, EndpointSet
from lbproxy.core.policy import Policy
from lbproxy.core.retry import FailureKind, Retries, Verdict
from lbproxy.core.types import (
    EndpointSpec,
    EndpointState,
    EndpointUid,
    Health,
    InferenceRequest,
    LoadMetrics,
    ModelCard,
    Outcome,
    PoolSnapshot,
    Ticket,
    TicketState,
    Transition,
    Usage,
)


class Balancer:
    """Places requests on endpoints. See the module for the driver's contract."""

    def __init__(
        self,
        policy: Policy,
        *,
        admission: AdmissionSettings,
        health: HealthSettings,
        scrape: ScrapeSettings,
        retry: RetrySettings,
        rng: random.Random,
    ) -> None:
        self._policy = policy
        self._retries = Retries(retry, rng)
        self._endpoints = EndpointSet(health, scrape)
        self._queue = WaitingQueue(admission)
        self._queue_timeout_s = admission.queue_timeout
        self._max_in_flight = admission.max_in_flight_per_endpoint
        self._rng = rng
        self._placements = 0

    # Requests

    def submit(self, request: InferenceRequest, *, now: float, avoid: frozenset[EndpointUid] = frozenset()) -> Ticket:
        """Ask for a place. The ticket comes back placed, closed with the reason, or waiting (then `poll` returns it).

        `avoid`: endpoints that failed this request already. If only such ones are left, NO_ENDPOINTS.
        """
        if not avoid:
            self._retries.requested(now=now)
        ticket = Ticket(request, now, now + self._queue_timeout_s, avoid)
        self._consider(ticket, now)
        if ticket.state is TicketState.WAITING and not self._queue.push(ticket):
            self._end(ticket, Outcome.SATURATED)
        return ticket

    def poll(self, *, now: float) -> list[Ticket]:
        """The tickets that stopped waiting, in the order in which they came: placed now, or closed with the reason."""
        if not self._queue:
            return []
        changed = []
        full: set[tuple[str | None, frozenset[EndpointUid]]] = set()
        for ticket in self._queue:
            key = (ticket.request.model, ticket.avoid)
            if key not in full:
                self._consider(ticket, now)
            if ticket.state is TicketState.WAITING and now >= ticket.deadline:
                self._end(ticket, Outcome.EXPIRED if self._endpoints.any_up() else Outcome.NO_ENDPOINTS)
            if ticket.state is TicketState.WAITING:
                full.add(key)
            else:
                self._queue.remove(ticket)
                changed.append(ticket)
        return changed

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        """The first byte of the answer's body came. Later calls for the same ticket are no-ops."""
        if ticket.state is TicketState.PLACED and ticket.first_byte_at is None:
            ticket.first_byte_at = now
            _placed_on(ticket).awaiting_first_byte -= 1

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        """`tokens` more came. At most every 250 ms per stream, never per chunk."""
        if ticket.state is TicketState.PLACED:
            _placed_on(ticket).tokens_streamed += tokens

    def close(self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None) -> None:
        """The request, or this attempt at it, is over. Legal in every state; the first call counts.

        `usage`: what the endpoint said that the request used.
        """
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.WAITING:
            self._queue.remove(ticket)
        else:
            state = _placed_on(ticket)
            state.in_flight -= 1
            if ticket.first_byte_at is None:
                state.awaiting_first_byte -= 1
            self._endpoints.released(state)
        self._end(ticket, outcome)

    def after_failure(
        self, ticket: Ticket, kind: FailureKind, earlier: Sequence[FailureKind], *, now: float
    ) -> Verdict:
        """What follows an attempt that failed before anything of an answer went to the client.

        `earlier`: why the same request's earlier attempts failed. Does not close the ticket.
        """
        tried = {_placed_on(ticket).endpoint.uid, *ticket.avoid}
        elsewhere = any(self._takes(state, tried) for state in self._endpoints.candidates(ticket.request.model))
        return self._retries.decide(kind, earlier, elsewhere=elsewhere, now=now)

    def _takes(self, state: EndpointState, tried: set[EndpointUid]) -> bool:
        """Whether `state` is another endpoint, with room."""
        full = self._max_in_flight is not None and state.in_flight >= self._max_in_flight
        return not full and state.endpoint.uid not in tried

    def next_deadline(self) -> float | None:
        """When `poll` has something to do though nothing happens until then; None = never."""
        return self._queue.first_deadline()

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec]) -> EndpointChanges:
        """The complete set, from discovery. Names and addresses are distinct."""
        return self._endpoints.replace(specs)

    def report_health(self, uid: EndpointUid, ok: bool, reason: str) -> Transition | None:
        """A probe's answer, or a connection that failed; the transition that it caused, if any."""
        return self._endpoints.report_health(uid, ok, reason)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What an endpoint says it serves; None if it cannot say."""
        self._endpoints.report_models(uid, cards)

    def scrape_sent(self, uid: EndpointUid) -> None:
        """A scrape leaves now."""
        self._endpoints.scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """What the scrape that was sent last said."""
        self._endpoints.report_scrape(uid, metrics)

    def drain(self, uid: EndpointUid, *, draining: bool = True) -> None:
        """Give an endpoint no new requests (or again)."""
        self._endpoints.drain(uid, draining)

    # Reading

    def health(self, uid: EndpointUid) -> Health | None:
        """The verdict on an endpoint; None if it left the set."""
        state = self._endpoints.get(uid)
        return None if state is None else state.health

    def any_up(self) -> bool:
        """Whether an endpoint takes requests."""
        return self._endpoints.any_up()

    def base_models(self) -> list[str]:
        """The distinct base models that the endpoints serve."""
        return self._endpoints.base_models()

    def model_cards(self) -> list[ModelCard]:
        """One card for each model, adapters included, that an endpoint which is up serves."""
        return self._endpoints.model_cards()

    def snapshot(self, *, now: float) -> PoolSnapshot:
        """Everything, at this moment."""
        return PoolSnapshot(self._endpoints.snapshot(now=now), len(self._queue), self._queue.bytes)

    # The decision

    def _consider(self, ticket: Ticket, now: float) -> None:
        """Place the ticket, or close it if waiting cannot help, or leave it."""
        model = ticket.request.model
        candidates = self._endpoints.candidates(model)
        if ticket.avoid:
            candidates = [state for state in candidates if state.endpoint.uid not in ticket.avoid]
        if not candidates:
            outcome = self._why_nobody(model, bool(ticket.avoid))
            if outcome is not None:
                self._end(ticket, outcome)
            return
        limit = self._max_in_flight
        if limit is not None:
            candidates = [state for state in candidates if state.in_flight < limit]
        if candidates:
            self._place(ticket, self._choose(ticket.request, candidates, now), now)

    def _why_nobody(self, model: str | None, retried: bool) -> Outcome | None:
        """Nobody may be asked for `model`: the outcome; None = an endpoint not judged yet may bring the answer."""
        if retried:
            return Outcome.NO_ENDPOINTS
        if self._endpoints.any_starting():
            return None
        if self._endpoints.any_up() and not self._endpoints.is_known(model):
            return Outcome.MODEL_NOT_FOUND
        return Outcome.NO_ENDPOINTS

    def _choose(self, request: InferenceRequest, candidates: Sequence[EndpointState], now: float) -> EndpointState:
        if len(candidates) == 1:
            return candidates[0]
        costs = self._policy.price(request, candidates, now=now)
        best = min(costs)
        if costs.count(best) == 1:
            return candidates[costs.index(best)]
        return self._rng.choice([state for state, cost in zip(candidates, costs, strict=True) if cost == best])

    def _place(self, ticket: Ticket, state: EndpointState, now: float) -> None:
        self._placements += 1
        state.in_flight += 1
        state.awaiting_first_byte += 1
        state.placed += 1
        state.placed_seq = self._placements
        ticket.state = TicketState.PLACED
        ticket.placed_on = state
        ticket.placed_at = now

    @staticmethod
    def _end(ticket: Ticket, outcome: Outcome) -> None:
        ticket.state = TicketState.CLOSED
        ticket.outcome = outcome


def _placed_on(ticket: Ticket) -> EndpointState:
    state = ticket.placed_on
    assert state is not None, "a placed ticket has an endpoint"
    return state
