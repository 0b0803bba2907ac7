# SPDX-License-Identifier: Apache-2.0
"""What waiting requests need of servers that are not awake: read from the queue, summed up by what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointSet
from lbproxy.core.queue.ticket import Ticket, Wait
from lbproxy.core.requests.request import InferenceRequest


class Need:
    """Requests that wait for the same."""

    def __init__(self, model: str | None, uid: EndpointUid | None, avoid: frozenset[EndpointUid]) -> None:
        self.model = model
        self.uid = uid
        """The one endpoint that can take them; None = each that serves the model."""
        self.avoid = avoid
        """Endpoints that failed them."""
        self.oldest_at = inf
        """When the first of them arrived."""
        self.waiting = 0
        self.wait_s = 0.0
        """The longest wait of them, so far or as predicted."""
        self.is_served = False
        """An endpoint that is awake takes them: another one would only shorten their wait."""

    def add(self, at: float, wait_s: float) -> None:
        """One more request, which arrived at this time."""
        self.waiting += 1
        self.oldest_at = min(self.oldest_at, at)
        self.wait_s = max(self.wait_s, wait_s)


def read_needs(
    tickets: Iterable[Ticket],
    endpoints: EndpointSet,
    owner: Callable[[InferenceRequest, float], EndpointUid | None],
    now: float,
) -> list[Need]:
    """What the waiting tickets need. O(n). Requests that wait for their own flow need nothing."""
    needs: dict[tuple[str | None, EndpointUid | None, frozenset[EndpointUid]], Need] = {}
    for ticket in tickets:
        if not ticket.counts_in_flow:
            continue
        request = ticket.request
        uid = None if request.response_id is None else owner(request, now)
        key = (request.model, uid, ticket.avoid)
        need = needs.get(key)
        if need is None:
            need = needs[key] = Need(*key)
            need.is_served = _is_served(need, endpoints, now)
        predicted_s = ticket.best_wait_s if ticket.best is not None or ticket.wait is Wait.WAKING else 0.0
        need.add(ticket.submitted_at, max(now - ticket.submitted_at, predicted_s))
    return list(needs.values())


def _is_served(need: Need, endpoints: EndpointSet, now: float) -> bool:
    if need.uid is not None:
        state = endpoints.get(need.uid)
        return state is not None and not state.dormant
    return is_served(need.model, need.avoid, endpoints, now)


def is_served(model: str | None, avoid: frozenset[EndpointUid], endpoints: EndpointSet, now: float) -> bool:
    """Whether an endpoint that is awake takes requests for `model`. Those of a higher tier than one that sleeps are no
    reason not to wake it. `avoid`: endpoints that do not count.
    """
    lowest = endpoints.serving.lowest_dormant(model)
    candidates = endpoints.candidates(model, now=now)
    return any(state.endpoint.tier <= lowest and state.endpoint.uid not in avoid for state in candidates)
