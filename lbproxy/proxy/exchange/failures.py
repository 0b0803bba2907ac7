# SPDX-License-Identifier: Apache-2.0
"""The failed attempts of one request, as the next attempt and the client's error need to know them; and which of them
an error of the endpoint is.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.context_length import is_too_long
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.proxy.exchange.fallback import Fallback
from lbproxy.proxy.request.client_request import rank_is_gone
from lbproxy.proxy.request.own_responses import rate_fields, refusal
from lbproxy.proxy.request.routes import Route


class AttemptFailures(NamedTuple):
    """The failed attempts of one request, in order."""

    endpoints: frozenset[EndpointUid] = frozenset()
    """Where they were made, or would be in vain."""
    kinds: tuple[FailureKind, ...] = ()
    """Why they failed."""
    suspect: EndpointUid | None = None
    """The one of `endpoints` that returned 500."""
    last: Outcome | None = None
    """The outcome of the last attempt that brought no response."""
    doubtful: EndpointUid | None = None
    """Whose stream broke before a token of a second leg. Either its process ended, or it could not fetch what prefill
    had handed over: it gets the request only if no other endpoint can."""
    has_looked: bool = False
    """None listed its model, and all were asked again."""
    refused_usage: EndpointUid | None = None
    """The endpoint that refused to be asked for usage, and is asked again without."""
    fallback: Fallback | None = None
    """How far it is, if its own model did not serve it: these attempts were for another one."""

    @property
    def avoid(self) -> frozenset[EndpointUid]:
        """Where the request does not go."""
        return self.endpoints if self.doubtful is None else self.endpoints | {self.doubtful}

    def add(self, uid: EndpointUid, kind: FailureKind, ended: Outcome | None = None) -> AttemptFailures:
        """Return this with one more attempt. `ended`: None if it brought a response, which another endpoint may do
        better.
        """
        suspect = uid if kind is FailureKind.ERROR else self.suspect
        kinds, last = (*self.kinds, kind), ended or self.last
        return self._replace(endpoints=self.endpoints | {uid}, kinds=kinds, suspect=suspect, last=last, doubtful=None)

    def without(self, uids: frozenset[EndpointUid]) -> AttemptFailures:
        """Return this with endpoints that would fail it as well."""
        return self._replace(endpoints=self.endpoints | uids)

    def doubt(self, uid: EndpointUid, kind: FailureKind) -> AttemptFailures:
        """Return this with an attempt that failed at an endpoint which may be well."""
        return self._replace(kinds=(*self.kinds, kind), doubtful=uid)


NO_FAILURES: Final = AttemptFailures()


def without_response(kind: FailureKind) -> Outcome:
    """How a request ends by a response of this kind that cannot be passed on, as the client did not ask for it."""
    return _WITHOUT.get(kind, Outcome.UPSTREAM_RESET)


_WITHOUT: Final = {
    FailureKind.BUSY: Outcome.NO_ENDPOINTS,
    FailureKind.REFUSED: Outcome.NO_ENDPOINTS,
    FailureKind.LIMITED: Outcome.SATURATED,
    FailureKind.LATE: Outcome.UPSTREAM_TIMEOUT,
}


def lacking(
    runtime: RequestRuntime, route: Route, placed: InferenceRequest, ticket: Ticket, status: int, body: bytes
) -> tuple[FailureKind | None, InferenceRequest]:
    """What a 400 or 404 says is lacking where the request was sent, and another endpoint may have, None: nothing; and
    the request, with what that tells of it.

    MISSING only where it can mean nothing else: the rank that lbproxy named, a model or adapter that is listed (the
    path exists on every model server), or a stored response whose endpoint is not known.
    """
    state = ticket.placed_state
    if status == 400 and not rank_is_gone(state.endpoint, body):
        if not (is_too_long(body) and runtime.takes_longer(ticket)):
            return None, placed
        return FailureKind.TOO_LONG, placed._replace(least_tokens=(state.prompt_limit(placed) or 0) + 1)
    if status == 400 or (route.is_common and runtime.lists(placed.model)):
        runtime.doubt_models(state.endpoint.uid)
        return FailureKind.MISSING, placed
    is_unknown = placed.response_id is not None and runtime.stored(placed.response_id) is None
    return (FailureKind.MISSING if is_unknown else None), placed


def refusal_after(failed: AttemptFailures, ticket: Ticket, runtime: RequestRuntime, record: RequestRecord) -> LbError:
    """The error of a request that was not placed. Notes in its record how many endpoints are draining, if none is left:
    for the log, not for the client.
    """
    model = ticket.request.model
    if ticket.outcome is Outcome.NO_ENDPOINTS:
        if failed.last is not None and runtime.any_up():
            return LbError(failed.last)  # a live pool failed this request
        if record.error is None and (count := runtime.count_draining(model)):
            record.error = f"no endpoint takes this request ({count} {'is' if count == 1 else 'are'} draining)"
    return refusal(ticket, record.alias or model, rate_fields(ticket, record.route, runtime.now()))


_FIELD: Final = re.compile(rb"(?im)^(retry-after|date):[ \t]*([^\r\n]{1,64}?)[ \t]*\r$")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def retry_after_s(fields: bytes) -> float | None:
    """The seconds that the field lines of a response ask for, above 0; None: none, or nothing that can be read.

    How long an endpoint that refused asks to be left alone: Retry-After (RFC 9110, section 10.2.3). Pure but for the
    clock, which a date is compared with if the response has no Date of its own.
    """
    found = {name.lower(): value.decode("latin-1") for name, value in _FIELD.findall(fields)}
    asked = found.get(b"retry-after")
    if asked is None:
        return None
    if _SECONDS.fullmatch(asked):
        return float(asked) or None
    until = _at(asked)
    if until is None:
        return None
    now = _at(found.get(b"date", "")) or datetime.fromtimestamp(time.time(), UTC)
    return max(0.0, (until - now).total_seconds()) or None


def _at(date: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(date)
    except (ValueError, IndexError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
