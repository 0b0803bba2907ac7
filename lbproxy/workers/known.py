# SPDX-License-Identifier: Apache-2.0
"""The endpoints as a worker knows them: as the balancer process told last, with the worker's own requests in flight.

While there is no balancer process, requests are placed by this alone (`choose`): the endpoint with the fewest of our
own requests in flight, relative to its weight, of those that may be asked for the model. An endpoint that fails one
then gets no other for `AVOID_S`, as nobody else watches it. It is not a balancer: it holds nothing, predicts nothing,
and knows nothing of the requests of other workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from lbproxy.config.sections.health import BreakerSettings
from lbproxy.core.endpoints.backpressure import held_back
from lbproxy.core.endpoints.breaker import Breaker
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.serving import Serving
from lbproxy.core.endpoints.state import EndpointState, relate_ranks
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.policies.split import whole_servers
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest

AVOID_S: Final = 2.0
"""About what two failed probes take."""


News: TypeAlias = tuple[Endpoint, Health, bool, Handover, str, int]
"""A member, its health, whether it drains, its part where prefill and decode are apart, whether it is dormant, and
which process it is."""


def _apply(state: EndpointState, said: News) -> None:
    state.endpoint, state.health, state.draining, state.handover, state.dormant, state.standing.process = said
    state.held_back.clear()


class Known:
    """What a worker knows of the endpoints. Changed by what the balancer process tells, and by our own requests."""

    def __init__(self) -> None:
        self._states: dict[EndpointUid, EndpointState] = {}
        self.serving = Serving(panic=True)
        self.has_roles = False
        """See EndpointSet."""
        self.block_bytes: int | None = None
        """See RequestRuntime."""
        self.stored_responses = StoredResponses()
        """Stored responses of all workers."""
        self._news: list[News] = []
        """News of members, of which the rest follows."""
        self._list: dict[str, ModelCard] | None = None
        """The beginning of a model list, likewise."""

    # What the balancer process tells

    def begin(self) -> None:
        """Another balancer process tells from now on."""
        self._news, self._list = [], None

    def note_members(self, news: Iterable[News], order: Sequence[int] | None, *, more: bool = False) -> None:
        """What is new of members; `order`: the complete set, if that changed. `more`: the rest follows. A new balancer
        process gives other uids to the same endpoints.
        """
        self._news += news
        if more:
            return
        said, self._news = self._news, []
        if order is not None:
            self._replace({one[0].uid: one for one in said}, order)
            return
        for one in said:
            state = self._states.get(one[0].uid)
            if state is not None:
                _apply(state, one)
                self.serving.changed(state)
        self._note_roles()

    def _replace(self, said: dict[EndpointUid, News], order: Sequence[int]) -> None:
        states = self._states
        before = {one.endpoint.key: one for one in states.values()}
        self._states = {}
        moved: dict[EndpointUid, EndpointUid] = {}
        for number in order:
            uid = EndpointUid(number)
            one = said.get(uid)
            state = states.get(uid) if one is None else before.get(one[0].key)
            if one is not None:
                if state is None:
                    state = EndpointState(one[0])
                    state.standing.breaker = Breaker(BreakerSettings())
                elif state.endpoint.uid != uid:
                    moved[state.endpoint.uid] = uid
                _apply(state, one)
            if state is not None:
                self._states[uid] = state
        if moved:
            self.stored_responses.move(moved)
        self._note_roles()
        relate_ranks(self._states.values())
        self.serving.replace_all(self._states.values())
        for state in self._states.values():
            if state.endpoint.uid in said:
                self.serving.changed(state)

    def _note_roles(self) -> None:
        self.has_roles = any(one.handover.role is not Role.BOTH for one in self._states.values())

    def list_models(
        self,
        uids: Iterable[int],
        cards: Iterable[ModelCard] | None,
        *,
        gone: Iterable[str] = (),
        adds: bool = False,
        more: bool = False,
    ) -> None:
        """What endpoints list, all of them the same; None = they have no such list. `gone`, `adds`, `more`: see
        messages.Models.
        """
        states = [state for uid in uids if (state := self._states.get(EndpointUid(uid))) is not None]
        models = self._list if adds else {}
        if models is None:
            models = dict(states[0].models or {}) if states else {}
        for name in gone:
            models.pop(name, None)
        models.update((card.id, card) for card in cards or ())
        self._list = models if more else None
        if not more:
            for state in states:
                state.models = None if cards is None else models
                self.serving.changed(state)

    # Reading

    def get(self, uid: EndpointUid) -> EndpointState | None:
        """A member; None if it is none (any more)."""
        return self._states.get(uid)

    def members(self) -> Iterable[EndpointState]:
        """All of them, in the order of the settings."""
        return self._states.values()

    def owner(self, request: InferenceRequest, now: float) -> EndpointUid | None:
        """The endpoint that has the stored response of a request; None: there is none, or it is not known."""
        if request.response_id is None:
            return None
        stored = self.stored_responses.find(request.response_id, now=now)
        return None if stored is None else stored.uid

    def others_available(self, ticket: Ticket, now: float) -> bool:
        """Whether an endpoint that has not failed a placed request could take it."""
        if self.owner(ticket.request, now) is not None:
            return False
        tried = {ticket.placed_state.endpoint.uid, *ticket.avoid}
        members = (one for tier in self._by_tier(ticket.request) for one in tier)
        return any(one.endpoint.uid not in tried for one in members)

    def _by_tier(self, request: InferenceRequest) -> list[list[EndpointState]]:
        """Those that may be asked, the lowest tier first. None is above the request's highest tier."""
        found = self.serving.by_tier(request.model, request.max_tier)
        if request.engine is not None:
            found = [[one for one in members if one.has_api(request.engine)] for members in found]
        if request.model is not None:
            return found
        return [[one for one in members if one.endpoint.model is None] for members in found]

    # Placing without the balancer process

    def choose(self, request: InferenceRequest, avoid: frozenset[EndpointUid], now: float) -> EndpointState | Outcome:
        """The endpoint that has the fewest of our own requests; or why there is none."""
        owner = self.owner(request, now)
        if owner is not None:
            state = self._states.get(owner)
            is_there = state is not None and state.endpoint.tier <= request.max_tier
            return state if state is not None and is_there else Outcome.RESPONSE_NOT_FOUND
        members: list[EndpointState] = []
        for tier in self._by_tier(request):
            members = [one for one in tier if one.endpoint.uid not in avoid]
            if self.has_roles:  # alone, it splits no request
                members = whole_servers(members)
            if members:
                break
        if not members:
            served = self.serving.candidates(request.model) or self.serving.may_rise(
                request.model, (), below=request.max_tier + 1
            )
            unknown = not avoid and (self.serving.candidates(None) or self.serving.dormant) and not served
            return Outcome.MODEL_NOT_FOUND if unknown else Outcome.NO_ENDPOINTS
        usable = [one for one in members if now >= one.held_until(request.model)] or members
        return min(usable, key=lambda one: ((one.in_flight + 1) / one.endpoint.weight, one.placed))

    @staticmethod
    def failed(ticket: Ticket, now: float) -> None:
        """Where it was placed gets no other request for its model for a while if there are others."""
        held_back(ticket.placed_state, ticket.request.model).until = now + AVOID_S
