"""Why an attempt failed, and what follows: another attempt, or the outcome that the client sees.

Attempts end here only before the first byte went to the client; after that nothing is ever retried.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lbproxy.core.types import Outcome


class FailureKind(Enum):
    """Why an attempt failed."""

    CONNECT = "connect"
    """Refused, unreachable, or not answered in time: no byte was sent."""
    STALE = "stale"
    """A kept connection turned out to be closed just when a request went out: the keep-alive race, nobody's fault."""
    RESET = "reset"
    """Reset or closed before the answer's head was whole, on a new connection."""
    PROTOCOL = "protocol"
    """What came is not HTTP, or is ambiguous."""
    TIMEOUT = "timeout"
    """No answer in time."""
    EXHAUSTED = "exhausted"
    """We have no file descriptor or buffer left: our fault, not the endpoint's."""


class UpstreamError(Exception):
    """One attempt failed. `detail` is for the log: it may name addresses."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows a failed attempt."""

    again: bool
    """Try another endpoint."""
    outcome: Outcome
    """How the attempt ended, and the request too if it is not tried again."""
    blame: bool
    """The failure counts against the endpoint."""


_OUTCOMES = {
    FailureKind.CONNECT: Outcome.CONNECT_FAILED,
    FailureKind.STALE: Outcome.UPSTREAM_RESET,
    FailureKind.RESET: Outcome.UPSTREAM_RESET,
    FailureKind.PROTOCOL: Outcome.UPSTREAM_PROTOCOL,
    FailureKind.TIMEOUT: Outcome.UPSTREAM_TIMEOUT,
    FailureKind.EXHAUSTED: Outcome.OVERLOADED,
}


def decide(kind: FailureKind, *, attempts: int, max_attempts: int) -> Verdict:
    """After `attempts` attempts of at most `max_attempts`, the last of which failed by `kind`.

    Only failures to connect are tried again: nothing was sent, so nothing can run twice.
    """
    connect = kind is FailureKind.CONNECT
    return Verdict(again=connect and attempts < max_attempts, outcome=_OUTCOMES[kind], blame=connect)
