"""Why an attempt fails, and what follows: another attempt elsewhere, or the end.

Attempts fail here only before the first byte of a body went to the client; after that nothing is ever retried. The
rules are the rows of docs/failures.md. Two ideas stand behind them:

- What was not sent, or was answered by "not now", may be tried elsewhere. What may have *caused* the failure is tried
  once more and no further: a request that breaks each server it meets must not tour the fleet.
- Retries are load. All but those after a failed connect, which cost nobody anything, come out of one budget for the
  whole pool, a share of the requests of the last 10 s and a small constant rate: when everything fails, retrying
  everything would only keep it down. (The same idea as the retry budgets of Finagle, linkerd and Envoy.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lbproxy.config.sections.routing import RetrySettings
from lbproxy.core.requests.outcome import Outcome

WINDOW_S: Final = 10
"""How far back the budget looks."""
BACKOFF_FIRST_S: Final = 0.025
BACKOFF_MAX_S: Final = 0.25
"""Before a retry that costs budget: doubled each time, and spread from 0 up to there. Envoy's values."""


class FailureKind(Enum):
    """Why an attempt failed."""

    CONNECT = "connect"
    """Refused, unreachable, or not answered in time: no byte was sent."""
    STALE = "stale"
    """A kept connection turned out to be closed just when a request went out: the keep-alive race, nobody's fault. It
    goes out again on a new connection to the same endpoint; no attempt has failed."""
    RESET = "reset"
    """Reset or closed before the response's head was whole, on a new connection."""
    PROTOCOL = "protocol"
    """What came is not HTTP, or is ambiguous."""
    TIMEOUT = "timeout"
    """No response in time."""
    EXHAUSTED = "exhausted"
    """We have no file descriptor or buffer left: our fault, not the endpoint's."""
    BUSY = "busy"
    """It answered 503: overloaded, or it leaves."""
    LIMITED = "limited"
    """It answered 429."""
    ERROR = "error"
    """It answered 500: the request's fault, or everybody's (a vLLM that drains says it to all)."""
    GATEWAY = "gateway"
    """It answered 502 or 504: a proxy of its own failed."""
    MISSING = "missing"
    """It answered 404 for a LoRA adapter that it listed: somebody unloaded it there."""
    STRANDED = "stranded"
    """It was found down, or to make no progress, while the request waited for a first byte there."""


STATUS_FAILURES: Final = {
    404: FailureKind.MISSING,
    429: FailureKind.LIMITED,
    500: FailureKind.ERROR,
    502: FailureKind.GATEWAY,
    503: FailureKind.BUSY,
    504: FailureKind.GATEWAY,
}
"""Answers that another endpoint may do better; 404 only for an adapter that is listed. If none can, the client gets
them as they are."""


class UpstreamError(Exception):
    """One attempt failed. `detail` is for the log: it may name addresses. `refused`: nothing listens there."""

    def __init__(self, kind: FailureKind, detail: str, *, refused: bool = False) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.refused = refused


@dataclass(frozen=True)
class Verdict:
    """What follows a failed attempt."""

    again: bool
    """Try another endpoint."""
    outcome: Outcome
    """How the attempt ended; and the request too, if it is not tried again and has no response to pass on."""
    delay_s: float = 0.0
    """Wait so long first."""


@dataclass(frozen=True)
class _Rule:
    """What may follow one kind of failure."""

    outcome: Outcome
    again: int = 0
    """How often one request may be tried again for this; `attempts` bounds it anyway."""
    only_unsuspected: bool = False
    """Not if an endpoint that took this request failed on it before."""
    free: bool = False
    """Costs no budget, and is tried again at once."""


_ANY_NUMBER: Final = 1000
_NOT_ITS_FAULT: Final = frozenset(
    {FailureKind.CONNECT, FailureKind.STALE, FailureKind.BUSY, FailureKind.LIMITED, FailureKind.MISSING}
)
"""These endpoints did not take the request, whatever it was: it is not under suspicion of breaking servers."""
_NOT_TAKEN: Final = _NOT_ITS_FAULT - {FailureKind.STALE}
"""After these even what must not be done twice may be sent again."""
_RULES: Final = {
    FailureKind.CONNECT: _Rule(Outcome.CONNECT_FAILED, again=_ANY_NUMBER, free=True),
    FailureKind.RESET: _Rule(Outcome.UPSTREAM_RESET, again=1),
    FailureKind.PROTOCOL: _Rule(Outcome.UPSTREAM_PROTOCOL, again=1),
    FailureKind.TIMEOUT: _Rule(Outcome.UPSTREAM_TIMEOUT),  # the work may be running: a retry would double it
    FailureKind.EXHAUSTED: _Rule(Outcome.OVERLOADED),
    FailureKind.BUSY: _Rule(Outcome.COMPLETED, again=_ANY_NUMBER),
    FailureKind.LIMITED: _Rule(Outcome.COMPLETED, again=1),
    FailureKind.ERROR: _Rule(Outcome.COMPLETED, again=1, only_unsuspected=True),
    FailureKind.GATEWAY: _Rule(Outcome.COMPLETED, again=_ANY_NUMBER),
    FailureKind.MISSING: _Rule(Outcome.COMPLETED, again=_ANY_NUMBER),
    FailureKind.STRANDED: _Rule(Outcome.UPSTREAM_TIMEOUT, again=_ANY_NUMBER),
}


class Retries:
    """Decides, and keeps the pool's budget."""

    def __init__(self, settings: RetrySettings, rng: random.Random) -> None:
        self._rng = rng
        self.reconfigure(settings)
        # One slot a second; the slot of the current second is filled, those of the window are summed when asked.
        self._requests = [0] * WINDOW_S
        self._spent = [0] * WINDOW_S
        self._second = 0

    def reconfigure(self, settings: RetrySettings) -> None:
        """Other limits from now on. What was spent is spent."""
        self._attempts = settings.attempts
        self._ratio = settings.budget_ratio
        self._per_second = settings.budget_per_second

    def requested(self, *, now: float) -> None:
        """A new request came: what the budget is a share of."""
        second = int(now)
        if second != self._second:
            self._turn_to(second)
        self._requests[second % WINDOW_S] += 1

    def budget(self, *, now: float) -> float:
        """Retries that may be made now."""
        self._turn_to(int(now))
        return self._ratio * sum(self._requests) + self._per_second * WINDOW_S - sum(self._spent)

    def decide(
        self, kind: FailureKind, earlier: Sequence[FailureKind], *, elsewhere: bool, now: float, repeatable: bool = True
    ) -> Verdict:
        """After an attempt that failed by `kind`, and those `earlier` of the same request.

        `elsewhere`: another endpoint could take it. `repeatable`: see InferenceRequest. Spends budget if the verdict is
        to try again.
        """
        rule = _RULES[kind]
        again = (
            len(earlier) + 1 < self._attempts
            and earlier.count(kind) < rule.again
            and not (rule.only_unsuspected and any(one not in _NOT_ITS_FAULT for one in earlier))
            and (rule.free or elsewhere)
            and (repeatable or kind in _NOT_TAKEN)
        )
        if not again and rule.free and not elsewhere:
            return Verdict(False, Outcome.NO_ENDPOINTS)  # whether its attempts ran out first, or the endpoints
        if not again or rule.free:
            return Verdict(again, rule.outcome)
        if self.budget(now=now) < 1.0:
            return Verdict(False, rule.outcome)
        self._spent[self._second % WINDOW_S] += 1
        most_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** len(earlier))
        return Verdict(True, rule.outcome, self._rng.uniform(0.0, most_s))

    def _turn_to(self, second: int) -> None:
        """Empty the slots of the seconds that have passed since."""
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._requests[passed % WINDOW_S] = self._spent[passed % WINDOW_S] = 0
        self._second = max(self._second, second)
