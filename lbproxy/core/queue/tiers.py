# SPDX-License-Identifier: Apache-2.0
"""The choice among tiers: which tier takes a request, and why not a lower one.

Tiers are considered from the lowest. A request goes to a higher one only if no endpoint of a lower one can take it:
they are down or have failed it, or would refuse it, or it would wait there longer than `overflow.after`, as predicted
or because it has waited so long. If no higher tier can take it now, the result of the lowest is the result: a request
is never worse off than without the others. Prices are compared within one tier only. What waits for its flow, or has a
lower `max_tier`, stays.

Endpoints above tier 1 that back off get nothing, and no endpoint gets more than its own limits allow (`_takes`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, NamedTuple

from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings
from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.policy import Policy
from lbproxy.core.queue.choice import Choice, Chosen
from lbproxy.core.queue.dispatcher import Dispatcher
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Overflow, Ticket, TicketState, Wait
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest

AGAIN_S: Final = 1.0
"""How long after a request found no room on a higher tier it is tried again, if no event comes before."""
MAX_DUE: Final = 32
"""Requests that are considered at a time because they have waited too long."""
_REASONS: Final = {
    Outcome.SATURATED: Overflow.FULL,
    Outcome.EXPIRED: Overflow.FULL,
    Outcome.TOO_LATE: Overflow.DEADLINE,
}


class _Result(NamedTuple):
    """What a tier said, and for what the ticket would wait there."""

    chosen: Chosen
    best: EndpointState | None
    best_wait_s: float
    best_tokens: float
    decode_on: EndpointState | None
    retry_after_s: float | None


class TieredChoice(Choice):
    """A Choice that knows tiers. Without any it is the same."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a choice needs
        self,
        policy: Policy,
        admission: AdmissionSettings,
        overflow: OverflowSettings,
        endpoints: EndpointSet,
        backpressure: Backpressure,
        stored_responses: StoredResponses,
        queue: WaitingQueue,
        rng: random.Random,
    ) -> None:
        super().__init__(policy, admission, endpoints, backpressure, stored_responses, queue, rng)
        self.after_s = overflow.after
        """How long a request may wait for a lower tier; None = as long as it takes."""
        self.wakes_in_s: Callable[[Ticket, float], float | None] | None = None
        """In how many seconds an endpoint that sleeps takes a ticket; None: not known."""
        self.passed_by: Callable[[Ticket, float], None] | None = None
        """Called if a ticket does not wait for that."""

    def choose_by_tier(self, ticket: Ticket, now: float, in_turn: bool) -> Chosen:
        """See `Choice.choose`."""
        request, reason, first = ticket.request, None, None
        tiers = self.members_by_tier(ticket, True, now)
        if not tiers:
            return self.outcome_without_members(ticket, now) or self.wait_without_members(ticket)
        lowest = tiers[0][0].endpoint.tier
        if lowest > self._endpoints.lowest_tier and self.response_owner(request, now) is None:
            if self._endpoints.serving.dormant and self._waits_for_wake(ticket, lowest, now):
                return Wait.WAKING
            health = self._endpoints.serving.health_below(request.model, lowest)
            if health is Health.STARTING:
                return Wait.FULL
            if self._endpoints.serving.dormant and self._endpoints.serving.may_rise(request.model, (), below=lowest):
                reason = Overflow.WAIT
            else:
                reason = None if health is None else Overflow.FAILED if ticket.avoid else Overflow.DOWN
        for members in tiers:
            result = self._in_tier(ticket, members, now, in_turn)
            if isinstance(result.chosen, EndpointState) and members is not tiers[-1]:
                result = self._in_time_or_held(ticket, result, tiers, now)
            if isinstance(result.chosen, EndpointState):
                self._note(ticket, reason)
                return result.chosen
            first = first or result
            reason = reason or self._reason(ticket, result, now)
            if reason is None:
                break
        assert first is not None
        chosen, ticket.best, ticket.best_wait_s, ticket.best_tokens, ticket.decode_on, ticket.retry_after_s = first
        ticket.overflow = None
        return self._refusal(ticket, tiers, now) or chosen if chosen is Wait.FULL else chosen

    def _in_time_or_held(
        self, ticket: Ticket, result: _Result, tiers: Sequence[Sequence[EndpointState]], now: float
    ) -> _Result:
        """The same result, unless the ticket might wait too long in the engine's own queue, where nothing can recall
        it, and a higher tier has room: then it waits for a slot as long as it may, and others that have waited for less
        may go there.
        """
        chosen = result.chosen
        assert isinstance(chosen, EndpointState)
        if not self.holds or self.after_s is None:
            return result
        if now - ticket.waits_since + chosen.load.longest_wait_s(now) <= self.after_s:
            return result
        higher = [state for members in tiers for state in members if state.endpoint.tier > chosen.endpoint.tier]
        if not any(self.has_room(state, now) for state in higher):
            return result
        return result._replace(chosen=Wait.HELD, best=chosen, best_wait_s=chosen.load.wait_ms(now) / 1000.0)

    def _waits_for_wake(self, ticket: Ticket, lowest: int, now: float) -> bool:
        """Whether a ticket waits for an endpoint below tier `lowest` that sleeps. It is no reason to overflow that a
        model sleeps, but that its wake takes too long.
        """
        if not self._endpoints.serving.may_rise(ticket.request.model, ticket.avoid, below=lowest):
            return False
        wakes_in_s = None if self.wakes_in_s is None else self.wakes_in_s(ticket, now)
        if self.after_s is None or now - ticket.waits_since + (wakes_in_s or 0.0) < self.after_s:
            return True
        if self.passed_by is not None:
            self.passed_by(ticket, now)
        return False

    def elsewhere(self, ticket: Ticket, outcome: Outcome, now: float) -> EndpointState | None:
        """Where a ticket goes that would end with `outcome` for lack of room: on any tier above the lowest that could
        take it; None: nowhere.
        """
        reason, deadline = _REASONS.get(outcome), ticket.request.deadline
        if reason is None or (deadline is not None and now >= deadline):
            return None
        retry_after_s = ticket.retry_after_s
        for members in self.members_by_tier(ticket, False, now):
            if members[0].endpoint.tier == self._endpoints.lowest_tier:
                continue
            result = self._in_tier(ticket, members, now, True)
            if isinstance(result.chosen, EndpointState):
                self._note(ticket, reason)
                return result.chosen
        ticket.best = ticket.decode_on = None
        ticket.retry_after_s = retry_after_s
        return None

    @property
    def has_tiers(self) -> bool:
        """There are several, or endpoints with limits of their own."""
        return self._endpoints.has_tiers

    def has_room_above(self, now: float) -> bool:
        """Whether an endpoint above the lowest tier has room."""
        lowest = self._endpoints.lowest_tier
        members = self._endpoints.candidates(None, now=now)
        return any(state.endpoint.tier > lowest and self.has_room(state, now) for state in members)

    def _in_tier(self, ticket: Ticket, members: Sequence[EndpointState], now: float, in_turn: bool) -> _Result:
        _forget_best(ticket)
        usable = [state for state in members if self._takes(state, ticket.request, now)]
        chosen = self.choose_among(ticket, usable, members, now, in_turn) if usable else Wait.FULL
        return _Result(
            chosen, ticket.best, ticket.best_wait_s, ticket.best_tokens, ticket.decode_on, ticket.retry_after_s
        )

    @staticmethod
    def _note(ticket: Ticket, reason: Overflow | None) -> None:
        ticket.overflow = reason
        if ticket.decision is not None and reason is not None:
            ticket.decision.overflow = reason.value

    def _takes(self, state: EndpointState, request: InferenceRequest, now: float) -> bool:
        """Whether an endpoint may get one more request, by its own limits and by what it asked for."""
        return self.below_limit(state) and self.opens_in_s(state, now, request) <= 0.0

    def _reason(self, ticket: Ticket, result: _Result, now: float) -> Overflow | None:
        """Why a ticket may go to a higher tier, after this of a lower one; None: it waits."""
        chosen, after_s = result.chosen, self.after_s
        if isinstance(chosen, Outcome):
            return _REASONS.get(chosen)
        if after_s is None:
            return None
        waited_s = now - ticket.waits_since
        if result.best is not None and waited_s + result.best_wait_s > after_s:
            return Overflow.WAIT
        if waited_s < after_s:
            return None
        return Overflow.LIMIT if chosen is Wait.FULL else Overflow.WAIT

    def _refusal(self, ticket: Ticket, tiers: Iterable[Sequence[EndpointState]], now: float) -> Outcome | None:
        """SATURATED if no endpoint will take the ticket before its wait ends, by what they ask for."""
        opens_in_s = min(self.opens_in_s(state, now, ticket.request) for members in tiers for state in members)
        if opens_in_s <= 0.0 or now + opens_in_s <= ticket.expires_at:
            return None
        ticket.retry_after_s = opens_in_s
        return Outcome.SATURATED


def _forget_best(ticket: Ticket) -> None:
    """In a function, or the compiler takes what `choose_among` sets for the None that was set before."""
    ticket.best = ticket.decode_on = ticket.retry_after_s = None


class Overdue:
    """Waiting tickets, by when they have waited long enough for a higher tier. Those that left are skipped."""

    def __init__(self, choice: TieredChoice, dispatcher: Dispatcher, queue: WaitingQueue) -> None:
        self._choice, self._dispatcher, self._queue = choice, dispatcher, queue
        self._heap: list[tuple[float, int, Ticket]] = []
        self._added = 0

    def add(self, ticket: Ticket, now: float) -> None:
        """Add a ticket that begins to wait. No effect if it may wait for ever, or there is no other tier."""
        if self._choice.after_s is not None and self._choice.has_tiers and ticket.state is TicketState.WAITING:
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

    def serve(self, now: float, consider: Callable[[Ticket, float], None], changed: list[Ticket]) -> None:
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
