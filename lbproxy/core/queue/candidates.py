# SPDX-License-Identifier: Apache-2.0
"""Who may be asked: the endpoints that a request may go to, before any price.

An endpoint may be asked if it serves the model, is up (if none is: unreachable), has not failed the request yet, is not
above its `max_tier`, takes it by its role, takes prompts as long as its, if any does, and has the stored response that
the request refers to. Whether it may get one more request now is a second question: its own limits and those of all say
so (`below_limit`, `opens_in_s`). Nothing changes here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from lbproxy.core.capacity.allowance import Claim
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.split import Split
from lbproxy.core.queue.limits import Limits
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.context_length import MARGIN
from lbproxy.core.requests.models import is_among
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest


class Candidates:
    """The endpoints that may be asked."""

    _split: Split
    _max_in_flight: int | None

    def __init__(self, endpoints: EndpointSet, stored_responses: StoredResponses, limits: Limits) -> None:
        self._endpoints, self._stored_responses, self._limits = endpoints, stored_responses, limits

    def reconfigure(self, split: Split, max_in_flight: int | None) -> None:
        """Use these from now on. `max_in_flight`: of an endpoint without a limit of its own; None: no limit."""
        self._split, self._max_in_flight = split, max_in_flight
        self.limited = max_in_flight is not None
        """Endpoints without a limit of their own have one."""

    def response_owner(self, request: InferenceRequest, now: float) -> EndpointUid | None:
        """The only endpoint that can take the request, as it has the stored response; None: any endpoint can."""
        if request.response_id is None:
            return None
        stored = self._stored_responses.find(request.response_id, now=now)
        return None if stored is None else stored.uid

    def members(self, ticket: Ticket, trials: bool, now: float) -> Sequence[EndpointState]:
        """The endpoints that may be asked. `trials`: if none is up, one that is unreachable may be tried, if no other
        model may serve the request.
        """
        model = ticket.request.model
        trials = trials and ticket.request.fallback_after_s is None
        if (uid := self.response_owner(ticket.request, now)) is not None:
            return self._owner(ticket, uid)
        up = self._endpoints.candidates(model, now=now)
        if self.is_long(ticket.request):
            (up,) = self._long_enough(ticket.request, [up])
        members = self._usable(ticket, up)
        if not members and trials and not self._endpoints.any_starting():
            members = self._usable(ticket, [*up, *self._endpoints.trials(model, now=now)])  # one of a pair may be up
        return members

    def by_tier(self, ticket: Ticket, trials: bool, now: float) -> list[Sequence[EndpointState]]:
        """The same for each tier up to the request's highest, the lowest tier first; without tiers that have none."""
        request, endpoints = ticket.request, self._endpoints
        trials = trials and request.fallback_after_s is None
        found: list[Sequence[EndpointState]]
        if (uid := self.response_owner(request, now)) is not None:
            found = [self._owner(ticket, uid)]
        else:
            up: Sequence[Sequence[EndpointState]] = endpoints.by_tier(request.model, request.max_tier, now=now)
            if self.is_long(request):
                up = self._long_enough(request, up)
            found = [self._usable(ticket, members) for members in up]
            if not any(found) and trials and not endpoints.any_starting():
                down = [
                    one for one in endpoints.trials(request.model, now=now) if one.endpoint.tier <= request.max_tier
                ]
                tiers = sorted({one.endpoint.tier for one in down})
                every = [*(one for members in up for one in members), *down]
                found = [self._usable(ticket, [one for one in every if one.endpoint.tier == tier]) for tier in tiers]
        return [members for members in found if members]

    def seconds(self, ticket: Ticket, now: float) -> list[EndpointState]:
        """The endpoints that can continue what was prefilled for a second leg. No limit applies to it."""
        request = ticket.request
        first = self._endpoints.get(EndpointUid(request.prefilled_at))
        if first is None or first.endpoint.tier > request.max_tier:
            return []
        members = self._endpoints.candidates(request.model, now=now)
        if self._endpoints.has_tiers:
            members = [state for state in members if state.endpoint.tier == first.endpoint.tier]
        return [state for state in self._split.second(members, first) if not _was_tried(state, ticket.avoid)]

    def _owner(self, ticket: Ticket, uid: EndpointUid) -> list[EndpointState]:
        """The owner of a stored response, if it may be asked."""
        owner = self._endpoints.get(uid)
        if owner is None or owner.health in {Health.DOWN, Health.EJECTED} or owner.dormant or uid in ticket.avoid:
            return []
        return [owner] if owner.endpoint.tier <= ticket.request.max_tier else []

    def is_long(self, request: InferenceRequest) -> bool:
        """Whether the request may be too long for an endpoint."""
        shortest = self._endpoints.serving.shortest_context
        return shortest > 0 and self._expected_tokens(request) + (request.max_tokens or 0) > shortest

    def too_long_for(self, request: InferenceRequest, now: float) -> list[EndpointState]:
        """The endpoints that get no such request, as it is too long and others take longer ones."""
        if not self.is_long(request):
            return []
        members = self._endpoints.candidates(request.model, now=now)
        (fit,) = self._long_enough(request, [members])
        return [state for state in members if state not in fit]

    def _long_enough(
        self, request: InferenceRequest, tiers: Sequence[Sequence[EndpointState]]
    ) -> list[Sequence[EndpointState]]:
        """Those of each tier for which the request is not too long; if it is for all, those with the longest context:
        only an endpoint refuses a prompt. One whose context is not known is long enough.
        """
        limits = [[state.prompt_limit(request) for state in members] for members in tiers]
        longest = max((inf if limit is None else limit for each in limits for limit in each), default=inf)
        tokens = min(self._expected_tokens(request), longest)
        return [
            [state for state, limit in zip(members, each, strict=True) if limit is None or limit >= tokens]
            for members, each in zip(tiers, limits, strict=True)
        ]

    def _expected_tokens(self, request: InferenceRequest) -> float:
        """The tokens that its prompt may well have."""
        if request.least_tokens:
            return max(0, request.least_tokens)
        return self._endpoints.prompt_tokens(request) * MARGIN if request.prompt_bytes else 0.0

    def _usable(self, ticket: Ticket, members: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """Those of `members` that did not fail the request yet, and take it by their role."""
        if ticket.avoid:
            members = [state for state in members if not _was_tried(state, ticket.avoid)]
        if (engine := ticket.request.engine) is not None:
            members = [state for state in members if state.has_api(engine)]
        if self._endpoints.has_tiers and ticket.request.model is None:  # their own name would have no place in it
            members = [state for state in members if state.endpoint.model is None]
        if ticket.request.context_tokens is not None or self._endpoints.serving.has_contexts:
            members = self._loaded_for(ticket, members)
        return self._split.usable(ticket.request, members) if self._endpoints.has_roles else members

    def _loaded_for(self, ticket: Ticket, members: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """Those that have the model as a request wants it. If there are none it is loaded anew: where there is room,
        for which it waits, else in place of what it is now.
        """
        request = ticket.request
        found = [state for state in members if state.is_loaded_for(request)]
        return members if not found and not self._has_place(ticket) else found

    def _has_place(self, ticket: Ticket) -> bool:
        request = ticket.request
        model = request.model or ""
        return any(
            (on_demand := state.standing.on_demand) is not None
            and on_demand.has_place
            and not (state.endpoint.loading.sizes or is_among(model, state.endpoint.loading.never))
            and (request.engine is None or state.has_api(request.engine))
            and state.endpoint.uid not in ticket.avoid
            and state.endpoint.tier <= request.max_tier
            for state in self._endpoints.serving.dormant.serving(model)
        )

    def enough(
        self, ticket: Ticket, some: Sequence[EndpointState], members: Sequence[EndpointState]
    ) -> Sequence[EndpointState]:
        """`some` of `members`; none if they alone cannot take the request by their roles, and all together can."""
        if not self._endpoints.has_roles or self._split.can_serve(ticket.request, some):
            return some
        return () if self._split.can_serve(ticket.request, members) else some

    def why_none(self, ticket: Ticket, now: float) -> Outcome | Wait:
        """How a ticket ends for which no endpoint may be asked, or why it waits."""
        return self._outcome(ticket, now) or (Wait.WAKING if self._may_rise(ticket) else Wait.FULL)

    def _outcome(self, ticket: Ticket, now: float) -> Outcome | None:
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
        if self._endpoints.any_up() and not self._endpoints.is_known(ticket.request.model, ticket.request.engine):
            return Outcome.MODEL_NOT_FOUND
        return Outcome.NO_ENDPOINTS

    def _may_rise(self, ticket: Ticket) -> bool:
        """Whether an endpoint that is asleep would take the request if it was woken."""
        serving, request = self._endpoints.serving, ticket.request
        return bool(serving.dormant) and serving.may_rise(request.model, ticket.avoid, below=request.max_tier + 1)

    def outcome_if_hopeless(self, ticket: Ticket, *, now: float) -> Outcome | None:
        """How a ticket ends that no endpoint may be asked for any more; None if it may wait. Does not try unreachable
        endpoints.
        """
        if self._endpoints.has_tiers:
            hopeless = not self.by_tier(ticket, False, now)
        else:
            hopeless = not self.members(ticket, False, now)
        return self._outcome(ticket, now) if hopeless else None

    # What may get one more request

    def below_limit(self, state: EndpointState) -> bool:
        """Whether the configured limits of requests in flight allow one more request on `state`."""
        limit, own = self._max_in_flight, state.allowance
        if own is not None and own.max_in_flight is not None:
            limit = own.max_in_flight
        return limit is None or state.requests < limit

    def opens_in_s(self, state: EndpointState, now: float, ticket: Ticket | None = None) -> float:
        """In how many seconds `state` takes a waiting ticket by its limits per time and, above tier 1, by its back-off;
        0 = now. None: the one that has claimed the limits, or else the smallest; whatever model is held back.
        """
        own = state.allowance
        wait_s = 0.0
        if own is not None:
            if ticket is not None:
                wait_s = self._limits.wait_s(ticket, own, now)
            else:
                wait_s = own.wait_s(1.0, 1.0 if own.claim is None else own.claim.tokens, now)
        if ticket is not None and state.endpoint.tier > 1:
            wait_s = max(wait_s, state.held_until(ticket.request.model) - now)
        return wait_s

    def claim(self, ticket: Ticket, state: EndpointState) -> Claim | None:
        """What is kept of an endpoint's limits for a waiting ticket from now on; None: they are kept for another."""
        own, priority = state.allowance, ticket.request.priority
        if own is None or (own.claim is not None and own.claim.priority >= priority):
            return None
        own.claim = Claim(own, state.endpoint.uid, self._limits.expected_tokens(ticket.request, own), priority)
        return own.claim

    def takes(self, state: EndpointState, ticket: Ticket, now: float) -> bool:
        """Whether an endpoint may get one more request, by its own limits and by what it asked for."""
        return self.below_limit(state) and self.opens_in_s(state, now, ticket) <= 0.0

    def excluded_by(self, state: EndpointState, model: str | None, now: float) -> str | None:
        """Why an endpoint that may be asked gets no request for a model now; None: it may get one."""
        if now < state.held_until(model):
            return "backing off"
        if not self.below_limit(state):
            return "full"
        if state.allowance is not None and self.opens_in_s(state, now) > 0.0:
            return "limit"
        return "slow start" if state.slow_since is not None and state.slow_credit < 1.0 else None

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
        if (engine := ticket.request.engine) is not None:
            members = [one for one in members if one.has_api(engine)]
        if self._endpoints.has_tiers:
            most = ticket.request.max_tier
            members = [one for one in members if one.endpoint.tier <= most and not _is_closed(one, ticket, now)]
            tier = ticket.placed_state.endpoint.tier
            if any(one.endpoint.tier < tier and one.endpoint.uid not in tried for one in members):
                return True  # where it did not want to wait, it still can
        return any(one.endpoint.uid not in tried and self.below_limit(one) for one in members)


def _is_closed(state: EndpointState, ticket: Ticket, now: float) -> bool:
    return state.endpoint.tier > 1 and now < state.held_until(ticket.request.model)


def _was_tried(state: EndpointState, avoid: Collection[EndpointUid]) -> bool:
    """Whether the endpoint failed the request: itself, or another rank of an address that cannot be connected to."""
    if state.endpoint.uid in avoid:
        return True
    return state.failures_in_row > 0 and any(one.endpoint.uid in avoid for one in state.siblings)
