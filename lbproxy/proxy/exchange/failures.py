"""The attempts of one request that failed, as the next attempt and the client's error need to know them."""

from __future__ import annotations

from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind


class FailedAttempts(NamedTuple):
    """Of one request, in order."""

    endpoints: frozenset[EndpointUid] = frozenset()
    """Where they were made."""
    kinds: tuple[FailureKind, ...] = ()
    """Why they failed."""
    accused: EndpointUid | None = None
    """The one of `endpoints` that answered 500."""
    last: Outcome | None = None
    """How the last of them ended that brought no response."""

    def add(self, uid: EndpointUid, kind: FailureKind, ended: Outcome | None = None) -> FailedAttempts:
        """With one more. `ended`: None if it brought a response, which another endpoint may do better."""
        accused = uid if kind is FailureKind.ERROR else self.accused
        return FailedAttempts(self.endpoints | {uid}, (*self.kinds, kind), accused, ended or self.last)


NO_FAILURES: Final = FailedAttempts()
