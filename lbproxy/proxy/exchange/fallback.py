# SPDX-License-Identifier: Apache-2.0
"""The models that serve a request in place of its own: which is next, and what the client is told if none does.

A request is sent for its own model, then for each of `ClientRequest.fallbacks` once, in order: those have none of their
own. Each waits for a place no longer than the settings of the first say (`fallback_after`), but for the last. If the
first was left because of a wait, and not as nobody serves it, the request waits there again at the end, as long as any
request may: it is never worse off than without other models.
"""

from __future__ import annotations

from math import inf
from typing import Final

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.reading import for_model

_UNSERVED: Final = frozenset({Outcome.NO_ENDPOINTS, Outcome.MODEL_NOT_FOUND})
_WAITS: Final = frozenset({Outcome.SATURATED, Outcome.EXPIRED, Outcome.TOO_LATE})
"""It might have been served if it had waited longer."""


def is_reason(ticket: Ticket) -> bool:
    """Whether another model is to serve a request that got no place: not for a limit of its own flow, nor because of
    a wait that the settings do not limit.
    """
    after_s = ticket.request.fallback_after_s
    if ticket.outcome in _WAITS:
        return ticket.refusal is None and after_s is not None and after_s < inf
    return ticket.outcome in _UNSERVED


class Fallback:
    """How far a request is."""

    def __init__(self, request: ClientRequest, placed: InferenceRequest, ticket: Ticket, error: LbError) -> None:
        """`request`, `placed`, `ticket`: for its own model, which does not serve it, as `error` says."""
        self._first = request, placed
        self.error = error
        """For the client, if no model serves it."""
        self._left = request.fallbacks
        self._returns = ticket.placed_on is None and ticket.outcome in _WAITS

    @property
    def is_left(self) -> bool:
        return bool(self._left) or self._returns

    def next(self, block_bytes: int | None) -> tuple[ClientRequest, InferenceRequest]:
        """The request for the next model. `block_bytes`: see RequestRuntime."""
        request, placed = self._first
        if self._left:
            model, self._left = self._left[0], self._left[1:]
            request, placed = for_model(request, placed, model, block_bytes)
            is_last = not (self._left or self._returns)
            return request, placed._replace(fallback_after_s=None) if is_last else placed
        self._returns = False
        return request, placed._replace(fallback_after_s=None)

    def give_up(self, record: RequestRecord) -> LbError:
        """No model serves it: the error for the client. Its record is that of a request for its own model."""
        record.model, record.fallback_from = self._first[1].model, None
        return self.error
