# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests are considered, and when.

A waiting request is held for the endpoint that is best for it, with a reservation there (`core.capacity.reservations`),
or waits for any endpoint (`Ticket.best`). An event at an endpoint wakes it (`wake`); an endpoint that works off a
prefill queue is woken when that is short enough (`_wake_later`); without events nothing is computed. `serve` considers
waiting requests in the order of service, as long as a woken endpoint has room: all that are held for it, and a few
others that may do better there. The Balancer decides whether a request is placed.

Invariant: `_wake_times` has at most one valid entry for each endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final, TypeAlias

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.endpoints.backpressure import next_opening
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.queue.candidates import Candidates
from lbproxy.core.queue.choice import Choice
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.ticket import ALONE, Ticket, TicketState, Turn, Wait
from lbproxy.core.queue.waiting_queue import WORK_S, WaitingQueue, least_work
from lbproxy.core.requests.outcome import Outcome

MAX_PRICED: Final = 32
"""Waiting requests that are priced at a time; if there are more, other work of the event loop gets a turn between."""
MIN_PRICED: Final = 16
MAX_PRICES: Final = 16_000
"""Prices at a time: over more than 500 endpoints fewer requests than `MAX_PRICED`, `MIN_PRICED` at least."""
MAX_MOVES: Final = 6
"""Of these, and of each priority, requests held for other endpoints that may do better at an endpoint with room."""
MAX_ALL_MOVES: Final = 2 * MAX_MOVES
"""The same of all priorities: those that are held for an endpoint with room have to get their turn, too."""
PRICE_AGAIN_S: Final = 0.05
"""How long after its last price a request that is held for another endpoint is priced again at the earliest."""
TIMEOUT_PARTS: Final = 6.0
"""The queue is too long if its last request would wait for a sixth of the queue timeout: 5 s by default. Where longer
waits are configured, late responses are preferred to refusals."""
NO_FLOWS: Final[frozenset[Flow]] = frozenset()
MAX_DECLINED: Final = 5
"""Where several flows or priorities wait, that time doubles each time, so often: else the first few are considered at
each event, and those after them never."""
ROUNDING_S: Final = 1e-6
"""So that rounding does not wake an endpoint just before it has room."""

Consider: TypeAlias = Callable[[Ticket, float, Turn], None]
"""Place a waiting ticket whose turn it is, close it, or leave it waiting."""


class _Turns:
    """One pass through the queue, in the order of service."""

    def __init__(
        self, queue: WaitingQueue, endpoints: EndpointSet, with_room: dict[EndpointUid, EndpointState]
    ) -> None:
        self._endpoints = endpoints
        self._serve: dict[str | None, bool] = {}
        """By model: whether an endpoint with room may be asked for it."""
        self._classes = queue.classes()
        self._turn = Turn(with_room)
        self._reached: Ticket | None = None
        self._priority: int | None = None
        self._left, self._all_left = MAX_MOVES, MAX_ALL_MOVES

    def reached(self, ticket: Ticket) -> None:
        """Note the next ticket, and where the one before it is held now."""
        before, self._reached = self._reached, ticket
        if ticket.request.priority != self._priority:
            self._priority, self._left = ticket.request.priority, MAX_MOVES
        if self._classes is None or before is None or before.best is None or before.state is not TicketState.WAITING:
            return
        held = self._turn.held.setdefault(before.best.endpoint.uid, [0.0, 0.0])
        held[0] += 1.0
        held[1] += before.best_tokens

    def may_move(self, ticket: Ticket, now: float) -> bool:
        """Whether to consider a ticket that is held for another endpoint than those with room; then it counts."""
        if self._left <= 0 or self._all_left <= 0 or now - ticket.priced_at < PRICE_AGAIN_S * (1 << ticket.declined):
            return False
        model, with_room = ticket.request.model, self._turn.with_room
        if model not in self._serve:
            some = self._endpoints.candidates(model, now=now)
            self._serve[model] = any(state.endpoint.uid in with_room for state in some)
        if not self._serve[model]:
            return False
        self._left -= 1
        self._all_left -= 1
        return True

    def take(self, ticket: Ticket, now: float, consider: Consider) -> None:
        """Have a ticket considered."""
        turn, best = self._of(ticket), ticket.best
        asked = turn is not ALONE and best is not None and best.endpoint.uid not in self._turn.with_room
        consider(ticket, now, turn)
        ticket.declined = min(MAX_DECLINED, ticket.declined + 1) if asked and ticket.best is best else 0

    def _of(self, ticket: Ticket) -> Turn:
        """The turn of a ticket."""
        flows = None if self._classes is None else self._classes.get(ticket.request.model)
        if flows is None:
            return ALONE
        priority = ticket.request.priority
        alike = flows.get(priority, NO_FLOWS)
        others = len(alike) > 1 or (len(alike) == 1 and ticket.flow not in alike)
        return self._turn if others or min(flows) < priority else ALONE


class Dispatcher:
    """Wakes the waiting requests in the Balancer's queue."""

    def __init__(
        self, endpoints: EndpointSet, candidates: Candidates, choice: Choice, queue: WaitingQueue, flows: Flows
    ) -> None:
        self._endpoints, self._candidates, self._choice = endpoints, candidates, choice
        self._queue, self._flows = queue, flows
        self._pool: PoolModel | None = None
        self._by_work = False
        self._too_long_s = 0.0
        self._woken: dict[EndpointUid, EndpointState] = {}
        """Endpoints with an event since the queue was last considered."""
        self._all_woken = False
        """Since then there was an event that concerns all endpoints: see `wake_all`."""
        self._claimed: dict[int, Ticket] = {}
        """By endpoint that reached a limit per time since no request waited: the last one that it was kept for."""
        self._wake_times: list[tuple[float, EndpointUid]] = []
        """A heap: when endpoints may have room again without an event."""
        self._next_wake: dict[EndpointUid, float] = {}
        """The valid entries."""

    def reconfigure(self, admission: AdmissionSettings, pool: PoolModel | None) -> None:
        """Apply other settings, and perhaps other models of the endpoints: waiting requests are considered again."""
        if pool is not self._pool:
            for ticket in self._queue:
                self._queue.release(ticket)
                ticket.best = None
        self._pool = pool
        self._by_work = admission.order == "shortest" and pool is not None
        self._queue_timeout_s = admission.queue_timeout
        self._too_long_s = admission.queue_timeout / TIMEOUT_PARTS
        self._all_woken = True

    # Events

    def wake(self, state: EndpointState | None) -> None:
        """Wake an endpoint; None: it left the set."""
        if state is not None and self._queue:
            self._woken[state.endpoint.uid] = state

    def wake_all(self) -> None:
        """Wake all endpoints, after what may change more than one endpoint's room, or which endpoints may be asked: a
        change of the set, of a health, of a model list or of the settings, a failure that counts against an endpoint,
        draining, or a flow below its limit again.
        """
        self._all_woken = True

    def wake_at(self, uid: EndpointUid, at: float) -> None:
        """Wake an endpoint at this time."""
        if at < self._next_wake.get(uid, inf):
            self._next_wake[uid] = at
            heappush(self._wake_times, (at, uid))

    @property
    def has_work(self) -> bool:
        """Whether `serve` has something to do."""
        return bool(self._queue.ready and (self._woken or self._all_woken or self._queue.unclaimed))

    @property
    def next_wake_at(self) -> float:
        """When it will have, if no event comes."""
        return self._wake_times[0][0] if self._wake_times and self._queue.ready else inf

    # Waiting requests

    def start_waiting(self, ticket: Ticket, now: float) -> None:
        """Prepare a ticket that will wait, before it is put into the queue."""
        if not self._queue.ready:  # without waiting requests no wake times were kept
            self._woken.clear()
            self._all_woken = False
            for state in self._endpoints.candidates(None, now=now):
                self._wake_later(state, now)
        self._observe(self._queue.ready + (ticket.wait is not Wait.WAKING), now)
        self._reserve(ticket, now)
        if ticket.best is not None and self._choice.has_room(ticket.best, now):
            self._woken[ticket.best.endpoint.uid] = ticket.best

    def predicted_wait_s(self, ticket: Ticket) -> float:
        """How long a new request waits for any endpoint, at the pace of those before it. 0 = unknown."""
        if not self._queue.ready:
            return 0.0
        share = self._queue.share_before(ticket)
        return self._queue.overload.wait_s(self._queue.ready if share < 0.0 else round(share * self._queue.ready))

    def lateness(self, ticket: Ticket, now: float) -> Outcome | None:
        """How a new request ends that waits for any endpoint and will miss its deadline at the current pace, or wait so
        long that another model is to serve it; None: it waits.
        """
        deadline, after_s = ticket.request.deadline, ticket.request.fallback_after_s
        if (deadline is None and after_s is None) or ticket.best is not None or ticket.wait is Wait.WAKING:
            return None
        ticket.retry_after_s = wait_s = self.predicted_wait_s(ticket)
        if deadline is not None and now + wait_s > deadline:
            return Outcome.TOO_LATE
        return Outcome.SATURATED if after_s is not None and wait_s > after_s else None

    def exceeds_timeout(self, ticket: Ticket, now: float) -> bool:
        """Whether a new request would wait longer than the timeout for the endpoint that is best for it, by learned
        speeds, or so long that another model is to serve it.
        """
        if ticket.best is None:
            return False
        load = ticket.best.load
        is_known = load.pool.samples.prefill_ms_per_token or load.room.slots.limit < inf
        if not is_known or not load.room.reservations.count:
            return False
        after_s = ticket.request.fallback_after_s
        if after_s is not None and ticket.best_wait_s > after_s:
            return True
        return now + ticket.best_wait_s > ticket.submitted_at + self._queue_timeout_s

    def clear(self, now: float) -> None:
        """Forget everything: no request waits."""
        self._observe(0, now)
        self._woken.clear()
        self._wake_times.clear()
        self._next_wake.clear()
        self._claimed.clear()
        self._queue.unclaimed.clear()
        self._all_woken = False

    def claim(self, ticket: Ticket, short: EndpointState | None, now: float) -> None:
        """Keep what a waiting ticket needs of the limits per time of `short`, unless something is kept for another one.
        None: it does not wait for any.
        """
        claim = ticket.claim
        if short is None:
            self._queue.unclaim(ticket)
        elif claim is None or not claim.holds or claim.uid != short.endpoint.uid:
            claim = self._candidates.claim(ticket, short)
            if claim is not None:
                self._queue.unclaim(ticket)
                ticket.claim, self._claimed[short.endpoint.uid] = claim, ticket
                self._wake_later(short, now)

    def _reserve(self, ticket: Ticket, now: float) -> None:
        """Reserve a ticket's work at the endpoint that it is held for."""
        state, pool = ticket.best, self._pool
        if state is None or pool is None:
            return
        if self._by_work and now - ticket.work_at >= WORK_S:
            ticket.work_tokens, ticket.work_at = pool.least_work(ticket.request), now
        self._queue.reserve(ticket, state.load.room.reservations, ticket.best_tokens)
        self._wake_later(state, now)

    def _observe(self, waiting: int, now: float) -> None:
        """Update the overload state: while there is overload, the newest requests are served first."""
        self._queue.overload.observe(max(0, waiting - self._queue.waking), self._too_long_s, now)

    def _wake_later(self, state: EndpointState, now: float) -> None:
        """Wake an endpoint when it has worked off enough."""
        has_room_in_s = 0.0
        if self._pool is not None and self._choice.holds and not state.endpoint.is_elastic:
            has_room_in_s = state.load.has_room_in_s(now, self._queue.overload.concerns(state.endpoint.tier))
        if self._endpoints.has_tiers:
            has_room_in_s = max(has_room_in_s, self._candidates.opens_in_s(state, now))
        if 0.0 < has_room_in_s < inf:
            self.wake_at(state.endpoint.uid, now + has_room_in_s + ROUNDING_S)
        if state.held_back and (opens_at := next_opening(state, now)) < inf:
            self.wake_at(state.endpoint.uid, opens_at)

    # Service

    def wake_due(self, now: float) -> None:
        """Wake the endpoints whose time has come."""
        while self._wake_times and self._wake_times[0][0] <= now:
            at, uid = heappop(self._wake_times)
            if self._next_wake.get(uid) == at:
                del self._next_wake[uid]
                self.wake(self._endpoints.get(uid))

    def serve(self, now: float, consider: Consider, changed: list[Ticket]) -> None:
        """Have waiting requests considered for what was woken, in the order of service. Those that stop waiting are
        appended to `changed`.
        """
        self._observe(self._queue.ready, now)
        everything, self._all_woken = self._all_woken, False
        woken, self._woken = self._woken, {}
        for uid in self._queue.unclaimed:
            state = self._endpoints.get(EndpointUid(uid))
            if state is not None:
                woken[state.endpoint.uid] = state
        self._queue.unclaimed.clear()
        has_room = self._choice.has_room
        with_room = {uid: state for uid, state in woken.items() if has_room(state, now)}
        if everything:
            for state in self._endpoints.candidates(None, now=now):
                if has_room(state, now):
                    with_room[state.endpoint.uid] = state
        if self._claimed:
            self._serve_claims(with_room, now, consider, changed)
        if with_room or everything:
            self._serve_by_turn(with_room, everything, now, consider, changed)
        for state in woken.values():
            self._wake_later(state, now)

    def _serve_claims(
        self, with_room: dict[EndpointUid, EndpointState], now: float, consider: Consider, changed: list[Ticket]
    ) -> None:
        """Have those considered for whom limits were kept, which now suffice."""
        for uid, state in list(with_room.items()):
            ticket = self._claimed.get(uid)
            if ticket is None or ticket.claim is None or not ticket.claim.holds:
                continue
            if self.serve_one(ticket, now, consider):
                changed.append(ticket)
                if not self._choice.has_room(state, now):
                    del with_room[uid]

    def _waits_for_ends(self, with_room: dict[EndpointUid, EndpointState], now: float) -> bool:
        """Whether requests wait for others to end or for tokens of a limit, and not for prefills: the least work first
        gains nothing then, but lets some wait for long.
        """
        if not self._claimed.keys().isdisjoint(with_room):
            return True
        if not with_room or self._queue.overload.is_lasting:
            return False
        return all(state.load.lacks_slots(now) for state in with_room.values())

    def _serve_by_turn(
        self,
        with_room: dict[EndpointUid, EndpointState],
        everything: bool,
        now: float,
        consider: Consider,
        changed: list[Ticket],
    ) -> None:
        endpoints = max(1, len(self._endpoints.candidates(None, now=now)))
        left = min(MAX_PRICED, max(MIN_PRICED, MAX_PRICES // endpoints))
        moved, turns = False, _Turns(self._queue, self._endpoints, with_room)
        lowest = min((state.endpoint.tier for state in with_room.values()), default=0)
        stuck: set[tuple[str | None, frozenset[EndpointUid], int, bool]] = set()
        by_work = self._by_work and not self._waits_for_ends(with_room, now)
        work = least_work(self._pool.least_work, now) if by_work and self._pool is not None else None
        for ticket in self._queue.in_order(work, self._flows, now):
            turns.reached(ticket)
            request, best = ticket.request, ticket.best
            key = (request.model, ticket.avoid, request.max_tier, ticket.is_overdue)
            if best is None or (everything and self._is_unavailable(best, key[0])):
                if key in stuck:
                    continue
            elif best.endpoint.uid not in with_room or now < best.held_until(request.model):
                if best.endpoint.tier < lowest and not (ticket.is_overdue and lowest <= request.max_tier):
                    continue
                if not turns.may_move(ticket, now):
                    continue
            left -= 1
            if left < 0:  # the rest in another turn, if that may place any
                if moved:
                    self._woken.update(with_room)
                    self._all_woken = self._all_woken or everything
                return
            self._queue.release(ticket)
            turns.take(ticket, now, consider)
            moved = moved or ticket.best is not best
            if ticket.state is TicketState.WAITING:
                self._reserve(ticket, now)
                if ticket.best is None:  # no endpoint may be asked: nothing was priced, and others like it wait too
                    stuck.add(key)
                    left += 1
                continue
            moved = True
            self._queue.remove(ticket)
            self._queue.overload.request_left()
            changed.append(ticket)
            stuck.discard(key)
            placed_on = ticket.placed_on
            if placed_on is not None and not self._choice.has_room(placed_on, now):
                with_room.pop(placed_on.endpoint.uid, None)
            if not with_room and not everything:
                return

    def serve_one(self, ticket: Ticket, now: float, consider: Consider) -> bool:
        """Have one waiting request considered. Returns whether it stopped waiting."""
        self._queue.release(ticket)
        consider(ticket, now, ALONE)
        if ticket.state is TicketState.WAITING:
            self._reserve(ticket, now)
            return False
        self._queue.remove(ticket)
        self._queue.overload.request_left()
        return True

    def _is_unavailable(self, state: EndpointState, model: str | None) -> bool:
        """Whether an endpoint takes no requests for `model` any more."""
        if state.removed or state.draining or state.dormant:
            return True
        return state.health is not Health.UP and not self._endpoints.serving.is_readmitted_for(state, model)
