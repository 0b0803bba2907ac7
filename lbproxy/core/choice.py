"""The decision: which endpoint a request goes to now, or why to none.

`Choice.choose` goes from the endpoints that may be asked to the one that is cheapest by the policy, in steps: without
those that failed the request already, those that are backing off, those that are full, those whose slow start gives
them no turn; the policy prices who is left. It counts nothing: whoever asks places the ticket, before anything else is
chosen. Invariant: nothing changes here but the slow start's credit and the plan that is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Final, TypeAlias

from lbproxy.config import AdmissionSettings
from lbproxy.core.admission import WaitingQueue
from lbproxy.core.backpressure import Backpressure
from lbproxy.core.endpoints import EndpointSet
from lbproxy.core.estimate import LoadModel, PoolModel
from lbproxy.core.explain import MAX_SHOWN, Decision, Explainer
from lbproxy.core.flows import Flows
from lbproxy.core.pricing import Plan, Policy, Prices
from lbproxy.core.types import EndpointState, Outcome, Ticket, Wait

HOLD_MS: Final = 1000.0
"""An endpoint with more prefill work than this gets no more. Less starves the engines, more binds too early."""
SHARED_HOLD_MS: Final = 250.0
"""The same where several flows or priorities share the endpoints: all that is placed before a request goes before it,
whosever turn it is. Engines are as busy with it (benchmarks/FAIRNESS.md)."""


Chosen: TypeAlias = EndpointState | Outcome | Wait
"""Where to place a ticket, or how it ends, or why it waits."""


class Choice:
    """Applies the policy to the endpoints that may be asked."""

    policy: Policy
    holds: bool
    """Requests wait while their cheapest endpoint has more than `HOLD_MS` queued; where flows or priorities share the
    endpoints, more than `SHARED_HOLD_MS`, or is full."""
    explains = False
    """Tickets that are placed say why: `Ticket.decision`."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the Balancer that it reads
        self,
        policy: Policy,
        admission: AdmissionSettings,
        endpoints: EndpointSet,
        backpressure: Backpressure,
        flows: Flows,
        queue: WaitingQueue,
        rng: random.Random,
    ) -> None:
        self._flows = flows
        self._queue = queue
        self._endpoints = endpoints
        self._backpressure = backpressure
        self._slow_start = endpoints.judge.slow_start
        self._starting = self._slow_start.starting
        self._rng = rng
        self._explainer = Explainer()
        self.adopt(policy, admission)

    def adopt(self, policy: Policy, admission: AdmissionSettings) -> None:
        """Choose by these from now on."""
        self.policy = policy
        hold = admission.order == "shortest" if admission.hold is None else admission.hold
        self.holds = policy.holds and hold
        self._tolerance = policy.tolerance
        self._skip_price = not (self.holds or policy.refuses)
        self._max_in_flight = admission.max_in_flight_per_endpoint

    def choose(self, ticket: Ticket, *, plan: Plan | None, now: float) -> Chosen:
        """The endpoint that `ticket` is to be placed on at once, or why there is none.

        `plan`: what was reserved so far, to which a ticket that is held adds its work; None = nothing is planned.
        """
        members = self._members(ticket, True, now)
        if not members:
            return self._why_nobody(ticket) or Wait.FULL
        candidates = members
        if now < self._backpressure.until:
            candidates = self._backpressure.willing(members, now=now)
        limit = self._max_in_flight
        if limit is not None:
            candidates = [state for state in candidates if state.in_flight < limit]
        if not candidates:
            return Wait.FULL
        if self._starting:
            chosen = self._gently(ticket, candidates, now, plan)
        else:
            chosen = self._cheapest(ticket, candidates, now, plan)
        made = ticket.decision
        if made is not None and made.candidates < len(members):
            left_out = ((state.endpoint, self._why_not(state, now)) for state in members)
            told = [(endpoint, why) for endpoint, why in left_out if why is not None][:MAX_SHOWN]
            made.left_out = told
        return chosen

    def hopeless(self, ticket: Ticket, *, now: float) -> Outcome | None:
        """How a ticket ends that nobody may be asked for any more; None if it may wait. Tries nobody who is down."""
        return None if self._members(ticket, False, now) else self._why_nobody(ticket)

    def takes(self, state: EndpointState) -> bool:
        """Whether `state` has room for one more."""
        return self._max_in_flight is None or state.in_flight < self._max_in_flight

    def any_room(self, pool: PoolModel, serving: Sequence[EndpointState], now: float) -> bool:
        """Whether, under a policy by which requests are held back, one of `serving` might get one more."""
        if not self._flows.is_shared(now):
            return pool.any_room(serving, HOLD_MS, now)
        return pool.any_room([state for state in serving if not _is_full(state.load, now)], SHARED_HOLD_MS, now)

    # Who may be asked

    def _members(self, ticket: Ticket, trials: bool, now: float) -> Sequence[EndpointState]:
        """The endpoints that may be asked. `trials`: if nobody is up, one that is down may be tried."""
        model = ticket.request.model
        members = self._endpoints.candidates(model, now=now)
        if not members and trials and not self._endpoints.any_starting():
            members = self._endpoints.trials(model, now=now)
        if ticket.avoid:
            return [state for state in members if state.endpoint.uid not in ticket.avoid]
        return members

    def _why_nobody(self, ticket: Ticket) -> Outcome | None:
        """Nobody may be asked: the outcome; None = an endpoint that is not judged yet may bring the answer."""
        if ticket.avoid:
            return Outcome.NO_ENDPOINTS
        if self._endpoints.any_starting():
            return None
        if self._endpoints.any_up() and not self._endpoints.is_known(ticket.request.model):
            return Outcome.MODEL_NOT_FOUND
        return Outcome.NO_ENDPOINTS

    # Which of them

    def _gently(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, plan: Plan | None) -> Chosen:
        """Choose while some of `candidates` have their slow start: without those, unless nobody else is free."""
        allowed = self._slow_start.allowed(candidates)
        reserved = None if plan is None else plan.copy()
        chosen = self._cheapest(ticket, allowed, now, plan)
        if isinstance(chosen, Wait) and len(allowed) < len(candidates):
            if plan is not None and reserved is not None:
                plan[:] = reserved
            chosen = self._cheapest(ticket, candidates, now, plan)
        if isinstance(chosen, EndpointState):
            self._slow_start.placed(chosen, candidates, now)
        return chosen

    def _cheapest(self, ticket: Ticket, candidates: Sequence[EndpointState], now: float, plan: Plan | None) -> Chosen:
        """The cheapest of `candidates`, if it has not enough to do."""
        if self._skip_price and len(candidates) == 1:
            if self.explains:
                ticket.decision = self._decision(candidates[0], candidates, (), None, now)
            return candidates[0]
        small = len(candidates) <= MAX_SHOWN
        self.policy.explains = noted = self.explains and (small or self._explainer.in_full(ticket, now))
        prices = self.policy.price(ticket.request, candidates, plan=plan, now=now)
        index = self._lowest(prices.costs, candidates)
        if prices.costs[index] == inf:
            return Outcome.SATURATED
        if ticket.request.deadline is not None and prices.waits_ms is not None:
            in_time = self._in_time(ticket.request.deadline, candidates, prices, now)
            if not in_time:
                return Outcome.TOO_LATE
            if index not in in_time:
                index = self._lowest_of(in_time, candidates, prices)
        if self.holds and prices.waits_ms is not None:
            is_shared = self._flows.is_shared(now)
            limit_ms, load = SHARED_HOLD_MS if is_shared else HOLD_MS, candidates[index].load
            is_busy = prices.waits_ms[index] > limit_ms
            held = is_busy or (is_shared and _is_full(load, now))
            if held and is_shared and self._queue.is_contested:
                sooner = self._sooner(index, candidates, prices, now)
                held, index = not sooner, self._lowest_of(sooner or [index], candidates, prices)
            if held:
                if plan is not None and prices.uncached_tokens is not None:
                    plan[load.slot] += prices.uncached_tokens[index]
                return Wait.BUSY if is_busy and min(prices.waits_ms) > limit_ms else Wait.HELD
        if self.explains:
            costs = None if noted and self.policy.notes_costs else prices.costs
            ticket.decision = made = self._decision(candidates[index], candidates, costs, prices.notes, now)
            if not small:
                made.cut(in_full=noted)
        return candidates[index]

    def _lowest_of(self, indices: list[int], candidates: Sequence[EndpointState], prices: Prices) -> int:
        """The cheapest of these."""
        return indices[self._lowest([prices.costs[n] for n in indices], [candidates[n] for n in indices])]

    @staticmethod
    def _sooner(index: int, candidates: Sequence[EndpointState], prices: Prices, now: float) -> list[int]:
        """The indices of those that have room and bring the first token sooner than the cheapest, which has none.

        Who waits for the cheapest does it for the good of all: elsewhere it would hold up more. Where others wait whose
        turn is later, they would go there meanwhile, and it would have waited for them.
        """
        waits, uncached = prices.waits_ms, prices.uncached_tokens
        assert waits is not None
        assert uncached is not None
        bound = candidates[index].load.first_byte_ms(waits[index], uncached[index], now)
        return [
            n
            for n, state in enumerate(candidates)
            if waits[n] <= SHARED_HOLD_MS
            and prices.costs[n] < inf
            and not _is_full(state.load, now)
            and state.load.first_byte_ms(waits[n], uncached[n], now) < bound
        ]

    @staticmethod
    def _in_time(deadline: float, candidates: Sequence[EndpointState], prices: Prices, now: float) -> list[int]:
        """The indices of those that are expected to bring the first token by then."""
        left_ms = 1000.0 * (deadline - now)
        assert prices.waits_ms is not None
        assert prices.uncached_tokens is not None
        return [
            n
            for n, (state, wait, uncached) in enumerate(
                zip(candidates, prices.waits_ms, prices.uncached_tokens, strict=True)
            )
            if prices.costs[n] < inf and state.load.first_byte_ms(wait, uncached, now) <= left_ms
        ]

    def _lowest(self, costs: list[float], candidates: Sequence[EndpointState]) -> int:
        """The index of the lowest cost; among those as good, the endpoint chosen longest ago, or any never chosen."""
        if len(costs) == 1:
            return 0
        # Loops of one's own: min() and lists of some of them take three times as long when compiled.
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
        while self._rng.getrandbits(1):  # what a choice of one draws, in a tenth of its time: seeds mean what they did
            pass
        return found

    def _decision(
        self,
        chosen: EndpointState,
        candidates: Sequence[EndpointState],
        costs: Sequence[float] | None,
        notes: object,
        now: float,
    ) -> Decision:
        return Decision(self.policy, now, chosen, candidates, costs, notes, self._endpoints.absent())

    def _why_not(self, state: EndpointState, now: float) -> str | None:
        if now < state.backing_off_until:
            return "backing off"
        if not self.takes(state):
            return "full"
        return "slow start" if state.slow_since is not None and state.slow_credit < 1.0 else None


def _is_full(load: LoadModel, now: float) -> bool:
    """Whether enough requests wait there for others to end."""
    pending = load.pending
    return bool(pending) and load.window.is_full(len(pending), next(iter(pending)).late_at, now)


def model_for(policy: Policy) -> PoolModel | None:
    """What `policy` needs, empty; None if it needs nothing."""
    return None if policy.block_bytes is None else PoolModel(policy.block_bytes, policy.index_entries)
