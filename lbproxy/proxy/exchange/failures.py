"""The failed attempts of one request, as the next attempt and the client's error need to know them."""

from __future__ import annotations

from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind


class FailedAttempts(NamedTuple):
    """The failed attempts of one request, in order."""

    endpoints: frozenset[EndpointUid] = frozenset()
    """Where they were made."""
    kinds: tuple[FailureKind, ...] = ()
    """Why they failed."""
    suspect: EndpointUid | None = None
    """The one of `endpoints` that returned 500."""
    last: Outcome | None = None
    """The outcome of the last attempt that brought no response."""

    def add(self, uid: EndpointUid, kind: FailureKind, ended: Outcome | None = None) -> FailedAttempts:
        """Return this with one more attempt. `ended`: None if it brought a response, which another endpoint may do
        better.
        """
        suspect = uid if kind is FailureKind.ERROR else self.suspect
        return FailedAttempts(self.endpoints | {uid}, (*self.kinds, kind), suspect, ended or self.last)


NO_FAILURES: Final = FailedAttempts()
