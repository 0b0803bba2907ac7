# SPDX-License-Identifier: Apache-2.0
"""The decision: which endpoint a request goes to now, or why to none.

There may be tiers of endpoints: `core.queue.tiers` decides among them. Nothing above a request's `max_tier` is ever a
candidate (`_members`, `members_by_tier`, `choose_second`).

`Choice.choose` goes from the endpoints that may be asked to the one with the lowest price. It excludes, in this order,
those that already failed the request, those that are backing off, those that are full, and those without slow-start
credit; the policy prices the rest. It does not count: the caller places the ticket before anything else is chosen.
Invariant: nothing changes here except the slow-start credit, and the endpoint for which the ticket would wait.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import inf
from typing import Final, TypeAlias

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.capacity.room import HOLD_MS
from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.explain import MAX_SHOWN, Decision, Explainer
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.policies.split import Split, SplitPrices
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Ticket, Turn, Wait
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest

TEST_S: Final = 1.0
"""A request that would be refused because it cannot meet its deadline is placed all the same if this much time passed
without such a test: a prediction that refuses requests must be tested, as refused requests teach nothing."""

NOTHING_HELD: Final[list[float]] = [0.0, 0.0]
Chosen: TypeAlias = EndpointState | Outcome | Wait
"""Where to place a ticket, or how it ends, or why it waits."""


class Choice:
    """Applies the policy to the endpoints that may be asked."""

    policy: Policy
    holds: bool
    """Requests wait while the endpoint that is best for them is full (`core.capacity.room`), or others wait for it."""
    explains = False
    """Placed tickets get a `Ticket.decision`."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a choice needs
        self,
        policy: Policy,
        admission: AdmissionSettings,
        endpoints: EndpointSet,
        backpressure: Backpressure,
        stored_responses: StoredResponses,
        queue: WaitingQueue,
        rng: random.Random,
    ) -> None:
        self._endpoints, self._queue = endpoints, queue
        self._backpressure = backpressure
        self._stored_responses = stored_responses
        self._slow_start = endpoints.judge.slow_start
        self.starting = self._slow_start.starting
        self._rng = rng
        self._explainer = Explainer()
        self._tested_at = -inf
        self.reconfigure(policy, admission)

    def reconfigure(self, policy: Policy, admission: AdmissionSettings) -> None:
        """Use these from now on."""
        self.policy = policy
        self._split = Split(policy)
        hold = admission.order == "shortest" if admission.hold is None else admission.hold
        self.holds = policy.holds and hold
        self._tolerance = policy.tolerance
        self._skip_price = not (self.holds or policy.may_refuse)
        self._max_in_flight = admission.max_in_flight_per_endpoint

    def choose(self, ticket: Ticket, *, now: float, in_turn: bool = False) -> Chosen:
        """Return the endpoint on which `ticket` is to be placed at once, or why there is none.

        `in_turn`: it is its turn, whichever requests wait for that endpoint. If it is to be held for an endpoint,
        `ticket.best` is that endpoint.
        """
        ticket.best = ticket.decode_on = None
        if self._endpoints.has_tiers:
            return self.choose_by_tier(ticket, now, in_turn)
        members = self._members(ticket, True, now)
        if not members:
            return self.outcome_without_members(ticket, now) or self.wait_without_members(ticket)
        return self.choose_among(ticket, members, members, now, in_turn)

    def choose_by_tier(self, ticket: Ticket, now: float, in_turn: bool) -> Chosen:
        """The same where there are tiers, or endpoints have limits of their own."""
        raise NotImplementedError

    def choose_among(
        self,
        ticket: Ticket,
        candidates: Sequence[EndpointState],
        members: Sequence[EndpointState],
        now: float,
        in_turn: bool,
    ) -> Chosen:
        """The choice among `candidates` of one tier, at least one. `members`: all of the tier, for the explanation."""
        if now < self._backpressure.until:
            active = self._backpressure.not_backing_off(candidates, now=now)
            candidates = self._enough(ticket, active, candidates) or candidates
        if self._max_in_flight is not None:
            candidates = self._enough(ticket, [state for state in candidates if self.below_limit(state)], members)
        if not candidates:
            return Wait.FULL
        if self.starting:
            chosen = self._with_slow_start(ticket, candidates, now, in_turn)
        else:
            chosen = self._by_price(ticket, candidates, now, in_turn)
        made = ticket.decision
        if made is not None and made.candidates < len(members):
            left_out = ((state.endpoint, self._exclusion_reason(state, now)) for state in members)
            excluded = [(endpoint, why) for endpoint, why in left_out if why is not None][:MAX_SHOWN]
            made.excluded = excluded
        return chosen

    def choose_second(self, ticket: Ticket, *, now: float) -> Chosen:
        """Return the endpoint on which the second leg of a request is to be placed at once, or that there is none: what
        was prefilled is kept for a short time only, so it is never held, and no configured limit applies to it.
        """
        request = ticket.request
        first = self._endpoints.get(EndpointUid(request.prefilled_at))
        seconds = []
        if first is not None and first.endpoint.tier <= request.max_tier:
            members = self._endpoints.candidates(request.model, now=now)
            if self._endpoints.has_tiers:
                members = [state for state in members if state.endpoint.tier == first.endpoint.tier]
            seconds = self._split.second(members, first)
        seconds = [state for state in seconds if not _was_tried(state, ticket.avoid)]
        if not seconds:
            return Outcome.NO_ENDPOINTS
        candidates = self._backpressure.not_backing_off(seconds, now=now)
        prices = self._split.price(request, candidates, Context(now, self.explains))
        chosen = candidates[self._lowest_cost(prices.costs, candidates)]
        if self.explains:
            ticket.decision = self._decision(self._split, chosen, candidates, prices.costs, prices.notes, now)
            ticket.decision.is_second = True
            if len(candidates) > MAX_SHOWN:
                ticket.decision.shrink(in_full=True)
        return chosen

    def outcome_if_hopeless(self, ticket: Ticket, *, now: float) -> Outcome | None:
        """How a ticket ends that no endpoint may be asked for any more; None if it may wait. Does not try unreachable
        endpoints.
        """
        if self._endpoints.has_tiers:
            hopeless = not self.members_by_tier(ticket, False, now)
        else:
            hopeless = not self._members(ticket, False, now)
        return self.outcome_without_members(ticket, now) if hopeless else None

    def below_limit(self, state: EndpointState) -> bool:
        """Whether the configured limits of requests in flight allow one more request on `state`."""
        limit, own = self._max_in_flight, state.allowance
        if own is not None and own.max_in_flight is not None:
            limit = own.max_in_flight
        return limit is None or state.requests < limit

    def opens_in_s(self, state: EndpointState, now: float, request: InferenceRequest | None = None) -> float:
        """In how many seconds `state` takes the request, or any, by its limits per time and, above tier 1, by its
        back-off; 0 = now.
        """
        own = state.allowance
        wait_s = 0.0
        if own is not None:
            wait_s = own.wait_s(1.0 if request is None else own.expected_tokens(request), now)
        if state.endpoint.tier > 1 and state.backing_off_until - now > wait_s:
            wait_s = state.backing_off_until - now
        return wait_s

    def others_available(self, ticket: Ticket, now: float, *, at_other_address: bool) -> bool:
        """Whether an endpoint that has not failed a placed request could take it. `at_other_address`: another rank of
        the same server could not.
        """
        if self.response_owner(ticket.request, now) is not None:
            return False
        tried = {ticket.placed_state.endpoint.uid, *ticket.avoid}
        if at_other_address:
            tried.update(one.endpoint.uid for one in ticket.placed_state.siblings)
        members = self._endpoints.candidates(ticket.request.model, now=now)
        if self._endpoints.has_tiers:
            most = ticket.request.max_tier
            members = [one for one in members if one.endpoint.tier <= most and not self._is_closed(one, now)]
            tier = ticket.placed_state.endpoint.tier
            if any(one.endpoint.tier < tier and one.endpoint.uid not in tried for one in members):
                return True  # where it did not want to wait, it still can
        return any(one.endpoint.uid not in tried and self.below_limit(one) for one in members)

    @staticmethod
    def _is_closed(state: EndpointState, now: float) -> bool:
        return state.endpoint.tier > 1 and now < state.backing_off_until

    def has_room(self, state: EndpointState, now: float) -> bool:
        """Whether a waiting request may go to `state` now."""
        if now < state.backing_off_until or not self.below_limit(state):
            return False
        if state.allowance is not None and self.opens_in_s(state, now) > 0.0:
            return False
        return not (self.holds and not state.endpoint.is_elastic and self._is_full(state, now))

    def _is_full(self, state: EndpointState, now: float) -> bool:
        return self.policy.is_full(state, now, self._queue.overload.concerns(state.endpoint.tier))

    # Endpoints that may be asked

    def response_owner(self, request: InferenceRequest, now: float) -> EndpointUid | None:
        """The only endpoint that can take the request, as it has the stored response; None: any endpoint can."""
        if request.response_id is None:
            return None
        stored = self._stored_responses.find(request.response_id, now=now)
        return None if stored is None else stored.uid

    def _members(self, ticket: Ticket, trials: bool, now: float) -> Sequence[EndpointState]:
        """The endpoints that may be asked. `trials`: if none is up, one that is unreachable may be tried."""
        model = ticket.request.model
        if (uid := self.response_owner(ticket.request, now)) is not None:
            return self._owner(ticket, uid)
        up = self._endpoints.candidates(model, now=now)
        members = self._usable(ticket, up)
        if not members and trials and not self._endpoints.any_starting():
            members = self._usable(ticket, [*up, *self._endpoints.trials(model, now=now)])  # one of a pair may be up
        return members

    def members_by_tier(self, ticket: Ticket, trials: bool, now: float) -> list[Sequence[EndpointState]]:
        """The same for each tier up to the request's highest, the lowest tier first; without tiers that have none."""
        request, endpoints = ticket.request, self._endpoints
        found: list[Sequence[EndpointState]]
        if (uid := self.response_owner(request, now)) is not None:
            found = [self._owner(ticket, uid)]
        else:
            up = endpoints.by_tier(request.model, request.max_tier, now=now)
            found = [self._usable(ticket, members) for members in up]
            if not any(found) and trials and not endpoints.any_starting():
                down = [
                    one for one in endpoints.trials(request.model, now=now) if one.endpoint.tier <= request.max_tier
                ]
                tiers = sorted({one.endpoint.tier for one in down})
                every = [*(one for members in up for one in members), *down]
                found = [self._usable(ticket, [one for one in every if one.endpoint.tier == tier]) for tier in tiers]
        return [members for members in found if members]

    def _owner(self, ticket: Ticket, uid: EndpointUid) -> list[EndpointState]:
        """The owner of a stored response, if it may be asked."""
        owner = self._endpoints.get(uid)
        if owner is None or owner.health in {Health.DOWN, Health.EJECTED} or owner.dormant or uid in ticket.avoid:
            return []
        return [owner] if owner.endpoint.tier <= ticket.request.max_tier else []

    def _usable(self, ticket: Ticket, members: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """Those of `members` that did not fail the request yet, and take it by their role."""
        if ticket.avoid:
            members = [state for state in members if not _was_tried(state, ticket.avoid)]
        if self._endpoints.has_tiers and ticket.request.model is None:  # their own name would have no place in it
            members = [state for state in members if state.endpoint.model is None]
        return self._split.usable(ticket.request, members) if self._endpoints.has_roles else members

    def _enough(
        self, ticket: Ticket, some: Sequence[EndpointState], members: Sequence[EndpointState]
    ) -> Sequence[EndpointState]:
        """`some` of `members`; none if they alone cannot take the request by their roles, and all together can."""
        if not self._endpoints.has_roles or self._split.can_serve(ticket.request, some):
            return some
        return () if self._split.can_serve(ticket.request, members) else some

    def outcome_without_members(self, ticket: Ticket, now: float) -> Outcome | None:
        """The outcome when no endpoint may be asked; None = one whose health is not known yet, or that is asleep, may
        serve it.
        """
        if (uid := self.response_owner(ticket.request, now)) is not None:
            owner = self._endpoints.get(uid)
            if uid in self._endpoints.serving.dormant:
                return None
            is_gone = owner is None or owner.health is Health.DOWN
            is_gone = is_gone or (owner is not None and owner.endpoint.tier > ticket.request.max_tier)
            return Outcome.RESPONSE_NOT_FOUND if is_gone else Outcome.NO_ENDPOINTS
        if self._may_rise(ticket):
            return None
        if ticket.avoid:
            return Outcome.NO_ENDPOINTS
        if self._endpoints.any_starting():
            return None
        if self._endpoints.any_up() and not self._endpoints.is_known(ticket.request.model):
            return Outcome.MODEL_NOT_FOUND
        return Outcome.NO_ENDPOINTS

    def _may_rise(self, ticket: Ticket) -> bool:
        """Whether an endpoint that is asleep would take the request if it was woken."""
        serving, request = self._endpoints.serving, ticket.request
        return bool(serving.dormant) and serving.may_rise(request.model, ticket.avoid, below=request.max_tier + 1)

    def wait_without_members(self, ticket: Ticket) -> Wait:
        """Why a ticket waits for which no endpoint may be asked."""
        return Wait.WAKING if self._may_rise(ticket) else Wait.FULL

    # The choice

    def _with_slow_start(
        self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, in_turn: bool
    ) -> Chosen:
        """Choose while some of `candidates` have their slow start: without those, unless no other endpoint is free."""
        allowed = self._enough(ticket, self._slow_start.allowed(candidates), candidates) or candidates
        chosen = self._by_price(ticket, allowed, now, in_turn)
        if not isinstance(chosen, EndpointState) and len(allowed) < len(candidates):
            chosen = self._by_price(ticket, candidates, now, in_turn)
        if isinstance(chosen, EndpointState):
            self._slow_start.placed(chosen, candidates, now)
        return chosen

    def _by_price(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, in_turn: bool) -> Chosen:
        """The candidate with the lowest price, if it has room and no request waits for it."""
        policy: Policy = self._split if self._endpoints.has_roles else self.policy
        if self._skip_price and len(candidates) == 1:
            if self.explains:
                ticket.decision = self._decision(policy, candidates[0], candidates, (), None, now)
            return candidates[0]
        small = len(candidates) <= MAX_SHOWN
        special = ticket.wait is not None or bool(ticket.avoid) or ticket.request.explain
        noted = self.explains and (small or special or self._explainer.in_full(now))
        prices = policy.price(ticket.request, candidates, self._context(ticket, candidates, now, noted))
        index = self._lowest_cost(prices.costs, candidates)
        if prices.costs[index] == inf:
            return Outcome.SATURATED
        if ticket.request.deadline is not None and prices.waits_ms is not None:
            index = self._by_deadline(ticket, index, candidates, prices, now)
            if index < 0:
                return Outcome.TOO_LATE
        if ticket.turn is not None and self.holds:
            index = self._taken_at_once(ticket, ticket.turn, index, candidates, prices, now)
        if isinstance(prices, SplitPrices):
            ticket.decode_on = prices.partner(candidates[index])
        if self.holds and prices.waits_ms is not None:
            wait = self._hold(ticket, candidates[index], index, prices, now, in_turn)
            if wait is not None:
                return wait
        if self.explains:
            costs = None if noted and policy.notes_costs else prices.costs
            ticket.decision = made = self._decision(policy, candidates[index], candidates, costs, prices.notes, now)
            if isinstance(prices, SplitPrices):
                made.decode_on = prices.decode_on
            if not small:
                made.shrink(in_full=noted)
        return candidates[index]

    def _context(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, noted: bool) -> Context:
        """What a price depends on. Above tier 1 no request of the queue counts."""
        queue, tier = self._queue, candidates[0].endpoint.tier
        if not queue.held or tier != 1:
            return Context(now, noted)
        return Context(now, noted, True, queue.share_before(ticket), queue.overload.concerns(tier))

    def _hold(
        self, ticket: Ticket, best: EndpointState, index: int, prices: Prices, now: float, in_turn: bool
    ) -> Wait | None:
        """Whether a ticket is held for its best candidate, which is full, or others are held for; and why."""
        is_full = self._is_full(best, now)
        if best.health is Health.DOWN or best.endpoint.is_elastic:  # a trial: what was queued there is lost
            is_full = False
        second = ticket.decode_on
        if (
            not is_full
            and second is not None
            and self.policy.is_full_for_decode(second, now, self._queue.overload.concerns(second.endpoint.tier))
        ):
            best, is_full = second, True
        if not (is_full or (best.load.room.reservations.count and not in_turn)):
            return None
        assert prices.waits_ms is not None
        ticket.best = best
        ticket.best_wait_s = prices.waits_ms[index] / 1000.0
        ticket.best_tokens = 0.0 if prices.work_tokens is None or best is second else prices.work_tokens[index]
        if not is_full:
            return Wait.BEHIND
        return Wait.BUSY if min(prices.waits_ms) > HOLD_MS else Wait.HELD

    def _taken_at_once(
        self, ticket: Ticket, turn: Turn, index: int, candidates: Sequence[EndpointState], prices: Prices, now: float
    ) -> int:
        """Where a request goes whose turn it is, before others that wait. `index`: of its lowest cost.

        A price includes what a placement costs others, so it may be best to wait for a full endpoint. But the room that
        it leaves goes to those others: it takes that if its own first token comes no later.
        """
        best, works, adapter = candidates[index], prices.work_tokens, ticket.request.model or ""
        waits = not best.endpoint.is_elastic and best.health is not Health.DOWN and self._is_full(best, now)
        if works is None or not waits or isinstance(prices, SplitPrices) or not ticket.request.prompt_bytes:
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

    def _lowest_cost_of(self, indices: list[int], candidates: Sequence[EndpointState], prices: Prices) -> int:
        """The index of the lowest cost among `indices`."""
        return indices[self._lowest_cost([prices.costs[n] for n in indices], [candidates[n] for n in indices])]

    def _by_deadline(
        self, ticket: Ticket, index: int, candidates: Sequence[EndpointState], prices: Prices, now: float
    ) -> int:
        """The candidate with the lowest price that is in time, `index` if it is; below 0: there is none."""
        assert ticket.request.deadline is not None
        assert prices.waits_ms is not None
        in_time = self._in_time(ticket.request.deadline, candidates, prices, now)
        if in_time:
            return index if index in in_time else self._lowest_cost_of(in_time, candidates, prices)
        if self._is_test(candidates, now):
            return index
        ticket.retry_after_s = min(prices.waits_ms) / 1000.0
        return -1

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
        limit = best + self._tolerance
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
        if alike == 1:
            return found
        if not self._tolerance:
            return self._rng.choice([n for n, cost in enumerate(costs) if cost <= limit])
        if oldest_alike > 1:
            same = [n for n, cost in enumerate(costs) if cost <= limit and candidates[n].placed_seq == oldest]
            return self._rng.choice(same)
        while self._rng.getrandbits(
            1
        ):  # draws as much as a choice from one, in a tenth of its time: seeds keep their meaning
            pass
        return found

    def _decision(
        self,
        policy: Policy,
        chosen: EndpointState,
        candidates: Sequence[EndpointState],
        costs: Sequence[float] | None,
        notes: object,
        now: float,
    ) -> Decision:
        return Decision(policy, now, chosen, candidates, costs, notes, self._endpoints.unavailable())

    def _exclusion_reason(self, state: EndpointState, now: float) -> str | None:
        if now < state.backing_off_until:
            return "backing off"
        if not self.below_limit(state):
            return "full"
        if state.allowance is not None and self.opens_in_s(state, now) > 0.0:
            return "limit"
        return "slow start" if state.slow_since is not None and state.slow_credit < 1.0 else None


def _was_tried(state: EndpointState, avoid: Collection[EndpointUid]) -> bool:
    """Whether the endpoint failed the request: itself, or another rank of an address that cannot be connected to."""
    if state.endpoint.uid in avoid:
        return True
    return state.failures_in_row > 0 and any(one.endpoint.uid in avoid for one in state.siblings)


def model_for(policy: Policy) -> PoolModel | None:
    """The empty model that `policy` needs; None if it needs none."""
    return None if policy.block_bytes is None else PoolModel(policy.block_bytes, policy.index_entries)
