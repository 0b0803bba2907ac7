# SPDX-License-Identifier: Apache-2.0
"""The decision: which endpoint a request goes to now, or why to none. Nothing is counted or written here: the Balancer
acts on the `Answer` before anything else is chosen. Nothing changes but the slow-start credit, `_tested_at`, what
`LoadModel.look` learns before an endpoint is asked whether it is full, and what `passed_by` notes.

**Who may be asked** says `core.queue.candidates`. Of these, endpoints that are backing off, full by a limit, or without
slow-start credit are left out.

**Who is best** says the policy: the one with the lowest price, unless only others are in time for a deadline
(`_by_deadline`), or it is full and others would take the room that is left to this request (`_taken_at_once`).

**May it be held** is asked of the best one (`_hold`): it is, if that is full (`core.capacity.room`)
or others wait for it.

**Tiers** are considered from the lowest. A request goes to a higher one only if no endpoint of a lower one can take it:
they are down or have failed it, or would refuse it, or it would wait there longer than `overflow.after`, as predicted
or because it has waited so long. If no higher tier can take it now, the result of the lowest is the result: a request
is never worse off than without the others. Prices are compared within one tier only. What waits for its flow, or has a
lower `max_tier`, stays. Endpoints above tier 1 that back off get nothing, and no endpoint gets more than its own limits
allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings
from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.backpressure import Backpressure, closed_until
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.explain import MAX_SHOWN, Decision, Explainer
from lbproxy.core.policies.policy import Context, Policy, Prices, partner_of
from lbproxy.core.policies.split import Split
from lbproxy.core.queue.candidates import Candidates
from lbproxy.core.queue.ticket import ALONE, Answer, Overflow, Ticket, Turn, Wait
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.outcome import Outcome

TEST_S: Final = 1.0
"""A request that would be refused because it cannot meet its deadline is placed all the same if this much time passed
without such a test: a prediction that refuses requests must be tested, as refused requests teach nothing."""

NOTHING_HELD: Final[list[float]] = [0.0, 0.0]
_REASONS: Final = {
    Outcome.SATURATED: Overflow.FULL,
    Outcome.EXPIRED: Overflow.FULL,
    Outcome.TOO_LATE: Overflow.DEADLINE,
    Outcome.NO_ENDPOINTS: Overflow.FULL,  # all of a tier back off, and another model may serve it
}


class Choice:
    """Applies the policy to the endpoints that may be asked."""

    policy: Policy
    holds: bool
    """Requests wait while the endpoint that is best for them is full (`core.capacity.room`), or others wait for it."""
    explains = False
    """Answers with a place have a `decision`."""

    def __init__(
        self,
        candidates: Candidates,
        endpoints: EndpointSet,
        backpressure: Backpressure,
        queue: WaitingQueue,
        rng: random.Random,
    ) -> None:
        """To be configured before it is asked."""
        self._candidates, self._endpoints, self._queue = candidates, endpoints, queue
        self._backpressure = backpressure
        self._slow_start = endpoints.judge.slow_start
        self._rng = rng
        self._explainer = Explainer()
        self._tested_at = -inf
        self._unheld = Context(0.0)
        """That of prices while nothing is held, which is nearly always: an object for each is what costs most of it."""
        self.wakes_in_s: Callable[[Ticket, float], float | None] | None = None
        """In how many seconds an endpoint that sleeps takes a ticket; None: not known."""
        self.passed_by: Callable[[Ticket, float], None] | None = None
        """Called if a ticket does not wait for that."""

    def reconfigure(self, policy: Policy, admission: AdmissionSettings, overflow: OverflowSettings) -> None:
        """Use these from now on."""
        self.policy = policy
        self._split = Split(policy)
        hold = admission.order == "shortest" if admission.hold is None else admission.hold
        self.holds = policy.holds and hold
        self.after_s = overflow.after
        """How long a request may wait for a lower tier; None = as long as it takes."""
        self._candidates.reconfigure(self._split, admission.max_in_flight_per_endpoint)

    def choose(self, ticket: Ticket, *, now: float, turn: Turn | None = None) -> Answer:
        """Return the endpoint on which `ticket` is to be placed at once, or why there is none. `turn`: that in which it
        is considered, whichever requests wait for that endpoint; None: it is new.
        """
        if self._endpoints.has_tiers:
            return self._by_tier(ticket, now, turn)
        members = self._candidates.members(ticket, True, now)
        if not members:
            return Answer(self._candidates.why_none(ticket, now))
        return self._in_tier(ticket, members, members, now, turn)

    def choose_second(self, ticket: Ticket, *, now: float) -> Answer:
        """Return the endpoint on which the second leg of a request is to be placed at once, or that there is none: what
        was prefilled is kept for a short time only, so it is never held, and no configured limit applies to it.
        """
        seconds = self._candidates.seconds(ticket, now)
        if not seconds:
            return Answer(Outcome.NO_ENDPOINTS)
        candidates = self._backpressure.not_backing_off(seconds, ticket.request.model, now=now)
        prices = self._split.price(ticket.request, candidates, Context(now, self.explains))
        chosen = candidates[self._lowest_cost(prices.costs, candidates)]
        if not self.explains:
            return Answer(chosen)
        absent = self._endpoints.unavailable()
        made = Decision(self._split, now, chosen, candidates, prices.costs, prices.notes, absent)
        made.is_second = True
        if len(candidates) > MAX_SHOWN:
            made.shrink(in_full=True)
        return Answer(chosen, decision=made)

    def elsewhere(self, ticket: Ticket, outcome: Outcome, now: float) -> Answer | None:
        """Where a ticket goes that would end with `outcome` for lack of room: on any tier above the lowest that could
        take it; None: nowhere.
        """
        reason, deadline = _REASONS.get(outcome), ticket.request.deadline
        if reason is None or (deadline is not None and now >= deadline):
            return None
        for members in self._candidates.by_tier(ticket, False, now):
            if members[0].endpoint.tier > self._endpoints.lowest_tier:
                answer = self._takers(ticket, members, now, ALONE)
                if isinstance(answer.chosen, EndpointState):
                    return answer.overflowing(reason)
        return None

    def has_room(self, state: EndpointState, now: float) -> bool:
        """Whether a waiting request may go to `state` now."""
        if now < closed_until(state) or not self._candidates.below_limit(state):
            return False
        if state.allowance is not None and self._candidates.opens_in_s(state, now) > 0.0:
            return False
        return not (self.holds and not state.endpoint.is_elastic and self._is_full(state, now))

    def has_room_above(self, now: float) -> bool:
        """Whether an endpoint above the lowest tier has room."""
        lowest = self._endpoints.lowest_tier
        members = self._endpoints.candidates(None, now=now)
        return any(state.endpoint.tier > lowest and self.has_room(state, now) for state in members)

    def _is_full(self, state: EndpointState, now: float) -> bool:
        overloaded = self._queue.overload.concerns(state.endpoint.tier)
        state.load.look(now, overloaded)
        return self.policy.is_full(state, now, overloaded)

    # Tiers

    def _by_tier(self, ticket: Ticket, now: float, turn: Turn | None) -> Answer:
        """See `choose`, where there are tiers, or endpoints have limits of their own."""
        first: Answer | None = None
        tiers = self._candidates.by_tier(ticket, True, now)
        if not tiers:
            return Answer(self._candidates.why_none(ticket, now))
        reason = self._why_not_lower(ticket, tiers[0][0].endpoint.tier, now)
        if isinstance(reason, Wait):
            return Answer(reason)
        for members in tiers:
            answer = self._takers(ticket, members, now, turn)
            if isinstance(answer.chosen, EndpointState) and members is not tiers[-1]:
                answer = self._in_time_or_held(ticket, answer, tiers, now)
            if isinstance(answer.chosen, EndpointState):
                return answer if reason is None else answer.overflowing(reason)
            first = first or answer
            reason = reason or self._why_higher(ticket, answer, now)
            if reason is None:
                break
        assert first is not None
        return self._at_limits(ticket, tiers, now) if first.chosen is Wait.FULL else first

    def _why_not_lower(self, ticket: Ticket, lowest: int, now: float) -> Overflow | Wait | None:
        """Why no endpoint below tier `lowest` takes a ticket, or why it waits for one; None: there is none."""
        request, serving = ticket.request, self._endpoints.serving
        if lowest <= self._endpoints.lowest_tier or self._candidates.response_owner(request, now) is not None:
            return None
        if serving.dormant and self._waits_for_wake(ticket, lowest, now):
            return Wait.WAKING
        health = serving.health_below(request.model, lowest)
        if health is Health.STARTING:
            return Wait.FULL
        if serving.dormant and serving.may_rise(request.model, (), below=lowest):
            return Overflow.WAIT
        return None if health is None else Overflow.FAILED if ticket.avoid else Overflow.DOWN

    def _in_time_or_held(
        self, ticket: Ticket, answer: Answer, tiers: Sequence[Sequence[EndpointState]], now: float
    ) -> Answer:
        """The same answer, unless the ticket might wait too long in the engine's own queue, where nothing can recall
        it, and a higher tier has room: then it waits for a slot as long as it may, and others that have waited for less
        may go there.
        """
        chosen = answer.chosen
        assert isinstance(chosen, EndpointState)
        if not self.holds or self.after_s is None:
            return answer
        if now - ticket.waits_since + chosen.load.longest_wait_s(now) <= self.after_s:
            return answer
        higher = [state for members in tiers for state in members if state.endpoint.tier > chosen.endpoint.tier]
        if not any(self._candidates.takes(state, ticket, now) and self.has_room(state, now) for state in higher):
            return answer
        return Answer(Wait.HELD, chosen, chosen.load.wait_ms(now) / 1000.0, ticket.best_tokens, answer.decode_on)

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

    def _takers(self, ticket: Ticket, members: Sequence[EndpointState], now: float, turn: Turn | None) -> Answer:
        """The choice among those of a tier that may get one more request."""
        takers = [state for state in members if self._candidates.takes(state, ticket, now)]
        return self._in_tier(ticket, takers, members, now, turn) if takers else Answer(Wait.FULL)

    def _why_higher(self, ticket: Ticket, answer: Answer, now: float) -> Overflow | None:
        """Why a ticket may go to a higher tier, after this of a lower one; None: it waits."""
        chosen, after_s = answer.chosen, self.after_s
        if isinstance(chosen, Outcome):
            return _REASONS.get(chosen)
        if after_s is None:
            return None
        waited_s = now - ticket.waits_since
        if answer.best is not None and waited_s + answer.best_wait_s > after_s:
            return Overflow.WAIT
        if waited_s < after_s:
            return None
        return Overflow.LIMIT if chosen is Wait.FULL else Overflow.WAIT

    def _at_limits(self, ticket: Ticket, tiers: Sequence[Sequence[EndpointState]], now: float) -> Answer:
        """That it waits for the endpoint that takes it first, by what they ask for; or that it ends with SATURATED, if
        none does before its wait ends. If another model may serve it, it does not wait for who refused it.
        """
        members, request = [state for one in tiers for state in one], ticket.request
        opens = [self._candidates.opens_in_s(state, now, ticket) for state in members]
        opens_in_s, falls_back = min(opens), request.fallback_after_s is not None
        if falls_back and all(now < state.held_until(request.model) for state in members):
            return Answer(Outcome.NO_ENDPOINTS)
        if opens_in_s <= 0.0:
            return Answer(Wait.FULL)
        if now + opens_in_s > ticket.expires_at:
            return Answer(Outcome.NO_ENDPOINTS if falls_back else Outcome.SATURATED, retry_after_s=opens_in_s)
        return Answer(Wait.FULL, short=members[opens.index(opens_in_s)])

    # The choice

    def _in_tier(
        self,
        ticket: Ticket,
        candidates: Sequence[EndpointState],
        members: Sequence[EndpointState],
        now: float,
        turn: Turn | None,
    ) -> Answer:
        """The choice among `candidates` of one tier, at least one. `members`: all of the tier, for the explanation."""
        asked = self._candidates
        if now < self._backpressure.until:
            active = self._backpressure.not_backing_off(candidates, ticket.request.model, now=now)
            if now < active[0].held_until(ticket.request.model):  # all of them back off
                if ticket.request.fallback_after_s is not None:
                    return Answer(Outcome.NO_ENDPOINTS)
                if turn is not None:
                    return Answer(Wait.FULL)  # who waits leaves what room there is to other models
            candidates = asked.enough(ticket, active, candidates) or candidates
        if asked.limited:
            candidates = asked.enough(ticket, [state for state in candidates if asked.below_limit(state)], members)
        if not candidates:
            return Answer(Wait.FULL)
        if self._slow_start.starting:
            answer = self._with_slow_start(ticket, candidates, now, turn)
        else:
            answer = self._by_price(ticket, candidates, now, turn)
        made = answer.decision
        if made is not None and made.candidates < len(members):
            left_out = ((state.endpoint, asked.excluded_by(state, ticket.request.model, now)) for state in members)
            excluded = [(endpoint, why) for endpoint, why in left_out if why is not None][:MAX_SHOWN]
            made.excluded = excluded
        if made is not None and (short := asked.too_long_for(ticket.request, now)):
            excluded = [*made.excluded, *((state.endpoint, "context too short") for state in short)]
            made.excluded = excluded[:MAX_SHOWN]
        return answer

    def _with_slow_start(
        self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, turn: Turn | None
    ) -> Answer:
        """Choose while some of `candidates` have their slow start: without those, unless no other endpoint is free."""
        allowed = self._candidates.enough(ticket, self._slow_start.allowed(candidates), candidates) or candidates
        answer = self._by_price(ticket, allowed, now, turn)
        if not isinstance(answer.chosen, EndpointState) and len(allowed) < len(candidates):
            answer = self._by_price(ticket, candidates, now, turn)
        if isinstance(answer.chosen, EndpointState):
            self._slow_start.placed(answer.chosen, candidates, now)
        return answer

    def _by_price(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, turn: Turn | None) -> Answer:
        """The candidate with the lowest price, if it has room and no request waits for it."""
        policy: Policy = self._split if self._endpoints.has_roles else self.policy
        if len(candidates) == 1 and not (self.holds or self.policy.may_refuse):
            only, absent = candidates[0], self._endpoints.unavailable()
            return Answer(
                only, decision=Decision(policy, now, only, candidates, (), None, absent) if self.explains else None
            )
        small = len(candidates) <= MAX_SHOWN
        special = ticket.wait is not None or bool(ticket.avoid) or ticket.request.explain
        noted = self.explains and (small or special or self._explainer.in_full(now))
        prices = policy.price(ticket.request, candidates, self._context(ticket, candidates, now, noted))
        index = self._lowest_cost(prices.costs, candidates)
        if prices.costs[index] == inf:
            return Answer(Outcome.SATURATED)
        if ticket.request.deadline is not None and prices.waits_ms is not None:
            index = self._by_deadline(ticket.request.deadline, index, candidates, prices, now)
            if index < 0:
                return Answer(Outcome.TOO_LATE, retry_after_s=min(prices.waits_ms) / 1000.0)
        if turn is not None and turn.with_room and self.holds:
            index = self._taken_at_once(ticket, turn, index, candidates, prices, now)
        best = candidates[index]
        second = partner_of(best, prices.decode_on) if policy is self._split else None
        if self.holds and prices.waits_ms is not None:
            held = self._hold(best, second, prices, index, now, turn)
            if held is not None:
                return held
        if not self.explains:
            return Answer(best, decode_on=second)
        costs = None if noted and policy.notes_costs else prices.costs
        absent = self._endpoints.unavailable()
        made = Decision(policy, now, best, candidates, costs, prices.notes, absent)
        made.decode_on = prices.decode_on
        if not small:
            made.shrink(in_full=noted)
        return Answer(best, decode_on=second, decision=made)

    def _context(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, noted: bool) -> Context:
        """What a price depends on. Above tier 1 no request of the queue counts."""
        queue = self._queue
        if not queue.held or candidates[0].endpoint.tier != 1:
            self._unheld.now, self._unheld.explains = now, noted
            return self._unheld
        return Context(now, noted, True, queue.share_before(ticket), queue.overload.concerns(1))

    def _hold(
        self,
        best: EndpointState,
        second: EndpointState | None,
        prices: Prices,
        index: int,
        now: float,
        turn: Turn | None,
    ) -> Answer | None:
        """Whether a ticket is held for its best candidate, which is full, or others are held for; and why. `second`:
        the endpoint of its second leg.
        """
        is_full = self._is_full(best, now)
        if best.health is Health.DOWN or best.endpoint.is_elastic:  # a trial: what was queued there is lost
            is_full = False
        if not is_full and second is not None:
            overloaded = self._queue.overload.concerns(second.endpoint.tier)
            if self.policy.is_full_for_decode(second, now, overloaded):
                best, is_full = second, True
        if not (is_full or (best.load.room.reservations.count and turn is None)):
            return None
        waits_ms = prices.waits_ms
        assert waits_ms is not None
        wait = Wait.BEHIND if not is_full else Wait.BUSY if min(waits_ms) > HOLD_MS else Wait.HELD
        tokens = 0.0 if prices.work_tokens is None or best is second else prices.work_tokens[index]
        return Answer(wait, best, waits_ms[index] / 1000.0, tokens, second)

    def _taken_at_once(
        self, ticket: Ticket, turn: Turn, index: int, candidates: Sequence[EndpointState], prices: Prices, now: float
    ) -> int:
        """Where a request goes whose turn it is, before others that wait. `index`: of its lowest cost.

        A price includes what a placement costs others, so it may be best to wait for a full endpoint. But the room that
        it leaves goes to those others: it takes that if its own first token comes no later.
        """
        best, works, adapter = candidates[index], prices.work_tokens, ticket.request.model or ""
        waits = not best.endpoint.is_elastic and best.health is not Health.DOWN and self._is_full(best, now)
        if works is None or not waits or self._endpoints.has_roles or not ticket.request.prompt_bytes:
            return index
        held, tokens = turn.held.get(best.endpoint.uid, NOTHING_HELD)
        latest_ms = best.load.speed.first_byte_ms(best.load.wait_ms(now, held, tokens), works[index], now)
        has_adapter = best.load.adapters.is_loaded(adapter, now)
        open_ones = [n for n, state in enumerate(candidates) if state.endpoint.uid in turn.with_room]
        for n in sorted(open_ones, key=prices.costs.__getitem__):
            load = candidates[n].load
            is_as_good = prices.costs[n] < inf and (not has_adapter or load.adapters.is_loaded(adapter, now))
            in_time = load.speed.first_byte_ms(load.wait_ms(now), works[n], now) <= latest_ms
            if is_as_good and in_time and not self._is_full(candidates[n], now):
                return n
        return index

    def _by_deadline(
        self, deadline: float, index: int, candidates: Sequence[EndpointState], prices: Prices, now: float
    ) -> int:
        """The candidate with the lowest price that is in time, `index` if it is; below 0: there is none."""
        in_time = self._in_time(deadline, candidates, prices, now)
        if index in in_time:
            return index
        if in_time:
            return in_time[self._lowest_cost([prices.costs[n] for n in in_time], [candidates[n] for n in in_time])]
        return index if self._is_test(candidates, now) else -1

    def _is_test(self, candidates: Sequence[EndpointState], now: float) -> bool:
        """Whether to place a request on one of `candidates` although it is predicted to be late, to test the
        prediction.
        """
        if now - self._tested_at < TEST_S and all(state.requests for state in candidates):
            return False
        self._tested_at = now
        return True

    @staticmethod
    def _in_time(deadline: float, candidates: Sequence[EndpointState], prices: Prices, now: float) -> list[int]:
        """The indices of candidates that are predicted to send the first token by the deadline."""
        left_ms = 1000.0 * (deadline - now)
        assert prices.waits_ms is not None
        assert prices.work_tokens is not None
        return [
            n
            for n, (state, wait, work) in enumerate(zip(candidates, prices.waits_ms, prices.work_tokens, strict=True))
            if prices.costs[n] < inf and state.load.speed.first_byte_ms(wait, work, now) <= left_ms
        ]

    def _lowest_cost(self, costs: list[float], candidates: Sequence[EndpointState]) -> int:
        """The index of the lowest cost; of equal ones, the endpoint chosen longest ago, or one never chosen."""
        if len(costs) == 1:
            return 0
        # Plain loops: compiled, min() and comprehensions take three times as long.
        best = costs[0]
        for cost in costs:
            if cost < best:  # noqa: PLR1730
                best = cost
        limit = best + self.policy.tolerance
        found = alike = oldest_alike = 0
        oldest = -1
        for index, cost in enumerate(costs):
            if cost <= limit:
                alike += 1
                placed_seq = candidates[index].placed_seq
                if oldest < 0 or placed_seq < oldest:
                    oldest, found, oldest_alike = placed_seq, index, 1
                elif placed_seq == oldest:
                    oldest_alike += 1
        if alike > 1 and not self.policy.tolerance:
            return self._rng.choice([n for n, cost in enumerate(costs) if cost <= limit])
        if oldest_alike > 1:
            same = [n for n, cost in enumerate(costs) if cost <= limit and candidates[n].placed_seq == oldest]
            return self._rng.choice(same)
        return found


def model_for(policy: Policy) -> PoolModel | None:
    """The empty model that `policy` needs; None if it needs none."""
    return None if policy.block_bytes is None else PoolModel(policy.block_bytes, policy.index_entries)
