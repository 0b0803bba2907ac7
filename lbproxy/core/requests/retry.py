# SPDX-License-Identifier: Apache-2.0
"""Why an attempt fails, and what follows: another attempt elsewhere, or the end.

This is only about failures before the commit (docs/architecture.md): once the first byte of a body went to the client,
nothing is retried. The rules are the rows of docs/failures.md. They follow two principles:

- A request that was not sent, or was refused with "not now", may be tried elsewhere. A request that may have *caused*
  the failure is tried once more and no further: a request that breaks each server must not be sent to all of them.
- Retries are load. All of them, except those after a failed connect or a prompt that was too long, which cost the
  servers nothing, come out of one budget for the pool: a share of the requests of the last 10 s, plus a small constant
  rate. When everything fails, retrying everything would only prolong the failure. (Finagle, linkerd and Envoy have
  retry budgets too.)
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
"""The delay before a retry that costs budget is drawn between 0 and a limit, which doubles each time, from the first
value up to the second. Envoy's values."""


class FailureKind(Enum):
    """Why an attempt failed."""

    CONNECT = "connect"
    """Connection refused, unreachable, or no connection in time: no byte was sent."""
    STALE = "stale"
    """A kept connection was already closed when a request was sent on it: the keep-alive race. The request is sent
    again on a new connection to the same endpoint, and no attempt has failed."""
    RESET = "reset"
    """The connection was reset or closed before the response was complete, and it is not STALE. Or the response ended
    with its connection, as it has no length, and its body is incomplete. Retried only before the commit."""
    PROTOCOL = "protocol"
    """The response is not HTTP, or is ambiguous."""
    TIMEOUT = "timeout"
    """Silence for too long (`net.connections.patience`): no first event, or byte of any other body, in time, with or
    without a head; or, after the commit, a pause in the middle. Also a probe or scrape that took too long. A connection
    that was not made in time is CONNECT."""
    EXHAUSTED = "exhausted"
    """lbproxy has no file descriptor or buffer left: not the endpoint's fault."""
    BUSY = "busy"
    """The endpoint returned 503 or 529, or 409 to inference: overloaded, busy with another model, or shutting down."""
    LIMITED = "limited"
    """The endpoint returned 429."""
    ERROR = "error"
    """The endpoint returned 500, or a status of that class that has no meaning here: the request's fault, or a general
    failure (a vLLM that drains returns it to all requests)."""
    GATEWAY = "gateway"
    """The endpoint returned 502: a proxy in front of it failed."""
    LATE = "late"
    """The endpoint returned 504, or a status that says the same: a proxy in front of it waited for too long, and the
    work may still be running."""
    MISSING = "missing"
    """The endpoint returned 404 for a model or an adapter that it had listed, which is not there any more; or 400 for
    its data-parallel rank, as the server was started anew with fewer."""
    TOO_LONG = "too_long"
    """The endpoint returned 400, as the prompt is longer than the context that it has, and another has a longer one."""
    REFUSED = "refused"
    """The endpoint returned 401 or 402 to a key of lbproxy's own: the key is not valid, or its account is empty."""
    FORBIDDEN = "forbidden"
    """The endpoint returned 403 to such a key: because of the key, or of this request, which another one may take."""
    STRANDED = "stranded"
    """The endpoint was found down, or without progress, while the request waited for its first byte."""


_STATUSES: Final = {
    400: FailureKind.MISSING,
    404: FailureKind.MISSING,
    429: FailureKind.LIMITED,
    502: FailureKind.GATEWAY,
    503: FailureKind.BUSY,
    504: FailureKind.LATE,
    524: FailureKind.LATE,  # Cloudflare
    529: FailureKind.BUSY,  # Anthropic
    598: FailureKind.LATE,  # some proxies
}
_OF_OWN_KEY: Final = {401: FailureKind.REFUSED, 402: FailureKind.REFUSED, 403: FailureKind.FORBIDDEN}
_CERTAIN: Final = frozenset({501, 505, 506, 508, 510, 511})
"""Known statuses of 500 and above that say that this request cannot be served so: not a failure of the endpoint."""


def status_failure(status: int, *, own_key: bool, is_inference: bool) -> FailureKind | None:
    """As which failure a response of this status is retried elsewhere, as another endpoint may do better; 400 and 404
    only for what is known to be somewhere. None: it passes unchanged, as it does if no retry is possible. `own_key`:
    the endpoint got a key of lbproxy's own, so that no client can do anything about 401. `is_inference`: 409 cannot be
    about what the client made; Lemonade says so while it loads another model.

    An unknown status of 500 and above is a 500 (RFC 9110, section 15).
    """
    kind = _OF_OWN_KEY.get(status) if own_key and status < 404 else None
    kind = kind or (FailureKind.BUSY if status == 409 and is_inference else _STATUSES.get(status))
    return FailureKind.ERROR if kind is None and 500 <= status < 600 and status not in _CERTAIN else kind


class UpstreamError(Exception):
    """One attempt failed. `detail` is for the log: it may contain addresses. `refused`: no process listens there.
    `retry_after_s`: as the endpoint said.
    """

    def __init__(
        self, kind: FailureKind, detail: str, *, refused: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.refused = refused
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Verdict:
    """What follows a failed attempt."""

    retry: bool
    outcome: Outcome
    """How the attempt ended. If it is not retried and there is no response to pass on, also how the request ended."""
    delay_s: float = 0.0
    """Seconds to wait before the retry."""


@dataclass(frozen=True)
class _Rule:
    """What may follow one kind of failure."""

    outcome: Outcome
    max_retries: int = 0
    """How often one request may be retried for this reason; `attempts` limits it as well."""
    unless_started_before: bool = False
    """No retry if an endpoint that had started on this request failed before."""
    free: bool = False
    """The retry costs no budget, and is made at once."""


_ANY_NUMBER: Final = 1000
_NOT_STARTED: Final = frozenset(
    {
        FailureKind.CONNECT,
        FailureKind.STALE,
        FailureKind.BUSY,
        FailureKind.LIMITED,
        FailureKind.MISSING,
        FailureKind.TOO_LONG,
        FailureKind.REFUSED,
        FailureKind.FORBIDDEN,
    }
)
"""After these failures the endpoint had not started on the request, so the request cannot be their cause."""
_SAFE_TO_REPEAT: Final = _NOT_STARTED - {FailureKind.STALE}
"""After these failures even a request that must not be executed twice may be sent again."""
_RULES: Final = {
    FailureKind.CONNECT: _Rule(Outcome.CONNECT_FAILED, max_retries=_ANY_NUMBER, free=True),
    FailureKind.RESET: _Rule(Outcome.UPSTREAM_RESET, max_retries=1),
    FailureKind.PROTOCOL: _Rule(Outcome.UPSTREAM_PROTOCOL, max_retries=1),
    FailureKind.TIMEOUT: _Rule(Outcome.UPSTREAM_TIMEOUT),  # the endpoint may still be working: a retry would double it
    FailureKind.EXHAUSTED: _Rule(Outcome.OVERLOADED),
    FailureKind.BUSY: _Rule(Outcome.COMPLETED, max_retries=_ANY_NUMBER),
    FailureKind.LIMITED: _Rule(Outcome.COMPLETED, max_retries=1),
    FailureKind.ERROR: _Rule(Outcome.COMPLETED, max_retries=1, unless_started_before=True),
    FailureKind.GATEWAY: _Rule(Outcome.COMPLETED, max_retries=_ANY_NUMBER),
    FailureKind.LATE: _Rule(Outcome.COMPLETED),  # as after a time-out
    FailureKind.MISSING: _Rule(Outcome.COMPLETED, max_retries=_ANY_NUMBER),
    FailureKind.TOO_LONG: _Rule(Outcome.COMPLETED, max_retries=_ANY_NUMBER, free=True),
    FailureKind.REFUSED: _Rule(Outcome.NO_ENDPOINTS, max_retries=_ANY_NUMBER),
    FailureKind.FORBIDDEN: _Rule(Outcome.COMPLETED, max_retries=1),
    FailureKind.STRANDED: _Rule(Outcome.UPSTREAM_TIMEOUT, max_retries=_ANY_NUMBER),
}


def may_repeat(kind: FailureKind, earlier: Sequence[FailureKind], *, repeatable: bool) -> bool:
    """Whether a request may be sent again at all after it failed by `kind`, and by those `earlier`."""
    rule = _RULES[kind]
    return (
        earlier.count(kind) < rule.max_retries
        and not (rule.unless_started_before and any(one not in _NOT_STARTED for one in earlier))
        and (repeatable or kind in _SAFE_TO_REPEAT)
    )


def may_fall_back(kinds: Sequence[FailureKind], *, repeatable: bool) -> bool:
    """Whether a request may be sent for another model after these failures: none, or one that had not started, or that
    may be repeated. How many endpoints refused it does not count.
    """
    return not kinds or kinds[-1] in _SAFE_TO_REPEAT or may_repeat(kinds[-1], kinds[:-1], repeatable=repeatable)


def started(kinds: Sequence[FailureKind]) -> tuple[FailureKind, ...]:
    """Those of failures that the request may have caused: they count wherever it is sent."""
    return tuple(one for one in kinds if one not in _NOT_STARTED)


class Retries:
    """Decides about retries, and keeps the budget of the pool."""

    def __init__(self, settings: RetrySettings, rng: random.Random) -> None:
        self._rng = rng
        self.reconfigure(settings)
        # One counter a second. That of the current second is counted up; those of the window are added up when needed.
        self._requests = [0] * WINDOW_S
        self._spent = [0] * WINDOW_S
        self._second = 0

    def reconfigure(self, settings: RetrySettings) -> None:
        """Replace the limits. The budget that was spent stays spent."""
        self._attempts = settings.attempts
        self._ratio = settings.budget_ratio
        self._per_second = settings.budget_per_second

    def count_request(self, *, now: float) -> None:
        """Count a new request, of which the budget is a share."""
        second = int(now)
        if second != self._second:
            self._advance_to(second)
        self._requests[second % WINDOW_S] += 1

    def budget(self, *, now: float) -> float:
        """Retries that the budget allows now."""
        self._advance_to(int(now))
        return self._ratio * sum(self._requests) + self._per_second * WINDOW_S - sum(self._spent)

    def decide(
        self,
        kind: FailureKind,
        earlier: Sequence[FailureKind],
        *,
        others_available: bool,
        now: float,
        repeatable: bool = True,
    ) -> Verdict:
        """Decide what follows an attempt that failed by `kind`, after those `earlier` of the same request.

        `others_available`: another endpoint could take the request. `repeatable`: see InferenceRequest. Spends budget
        if the verdict is to retry.
        """
        rule = _RULES[kind]
        retry = (
            len(earlier) + 1 < self._attempts
            and (rule.free or others_available)
            and may_repeat(kind, earlier, repeatable=repeatable)
        )
        if not retry and rule.free and not others_available:
            return Verdict(False, Outcome.NO_ENDPOINTS)  # no attempts are left, or no endpoints
        if not retry or rule.free:
            return Verdict(retry, rule.outcome)
        if self.budget(now=now) < 1.0:
            return Verdict(False, rule.outcome)
        self._spent[self._second % WINDOW_S] += 1
        most_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** len(earlier))
        return Verdict(True, rule.outcome, self._rng.uniform(0.0, most_s))

    def _advance_to(self, second: int) -> None:
        """Clear the counters of the seconds that have passed."""
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._requests[passed % WINDOW_S] = self._spent[passed % WINDOW_S] = 0
        self._second = max(self._second, second)
