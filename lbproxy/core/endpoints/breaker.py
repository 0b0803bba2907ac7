# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker: when failed requests eject an endpoint, and for how long. One `Breaker` for each endpoint.

It decides; the judge acts (see `core.endpoints.judge`). An endpoint is ejected for one of four reasons:

- Too many faults in a row: no connection, a reset, garbage, 502, 504, no response in time, a response that broke.
- Too small a share of successful responses in the last 30 s. Here a 500 counts too, but only if another endpoint did
  better with the same request, or could not be asked: a request that fails everywhere is its own fault
  (`Ticket.suspect`).
- No progress: see `core.endpoints.progress`.
- It refuses lbproxy's own key, by 401 or 402: so it does for all requests, until somebody changes the key, or pays. 403
  may be about one prompt, and so counts only once requests of several flows got it since one succeeded.

429 and 503 are not faults: they mean "not now", and `core.endpoints.backpressure` handles them. A client that left
shows nothing.

An ejection lasts `ejection` x 2^n, at most `max_ejection`, varied at random by up to a half, so that many endpoints do
not come back at the same time (as in linkerd and Envoy). n grows with each ejection, and starts again at 0 when the
endpoint worked well for `max_ejection`. After the ejection the endpoint is half open: one request at a time tries it.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Final

from lbproxy.config.sections.health import BreakerSettings
from lbproxy.core.requests.retry import FailureKind

WINDOW_INTERVALS: Final = 6
INTERVAL_S: Final = 5.0
"""The window of the success rate: 30 s, of which the oldest interval is dropped at a time."""
MIN_SAMPLES: Final = 5
JITTER: Final = 0.5
FORBIDDEN_FLOWS: Final = 2
NO_FLOWS: Final[frozenset[str]] = frozenset()
TIME_OUTS: Final = frozenset({FailureKind.TIMEOUT, FailureKind.LATE})
FAULTS: Final = TIME_OUTS | {FailureKind.CONNECT, FailureKind.RESET, FailureKind.PROTOCOL, FailureKind.GATEWAY}
"""The failures that count as faults in a row."""


class Cause(Enum):
    """Why an endpoint was ejected: a metric label."""

    FAULTS = "faults"
    UNREACHABLE = "unreachable"
    """Faults in a row, the last of which was a failed connection."""
    SUCCESS_RATE = "success_rate"
    NO_PROGRESS = "no_progress"
    KEY = "key"
    """It refuses the key that lbproxy sends."""


class Breaker:
    """The results of one endpoint's requests. The Balancer writes `successes` and `faults_in_row` on the hot path."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.successes = 0
        """Successful responses in the current interval of the window."""
        self.failures = 0
        self.faults_in_row = 0
        """Faults since the last successful response."""
        self.forbidden = NO_FLOWS
        """Flows whose requests were forbidden since the last successful response: the first few."""
        self._past_successes = [0] * (WINDOW_INTERVALS - 1)
        self._past_failures = [0] * (WINDOW_INTERVALS - 1)
        """The earlier intervals."""
        self._rotated_at = 0.0
        """When the current interval began."""
        self.cause = Cause.FAULTS
        """The cause of the last ejection."""
        self.ejections = 0
        """Ejections in a row: the n of the module's formula."""
        self.until = float("inf")
        """When the ejection ends."""

    def rotate(self, now: float) -> None:
        """Drop what is older than the window. Call it at least once a second, else responses are assigned to later
        intervals.
        """
        passed = int((now - self._rotated_at) / INTERVAL_S)
        if passed <= 0:
            return
        self._rotated_at += passed * INTERVAL_S
        for _ in range(min(passed, WINDOW_INTERVALS)):
            self._past_successes = [self.successes, *self._past_successes[:-1]]
            self._past_failures = [self.failures, *self._past_failures[:-1]]
            self.successes = self.failures = 0

    def fault(self, kind: FailureKind | None, now: float) -> tuple[Cause, str] | None:
        """Count a failed attempt (None: its response broke). Returns the cause and reason of an ejection, if it
        is due.
        """
        settings = self.settings
        self.rotate(now)
        self.failures += 1
        if kind is None or kind in FAULTS:
            self.faults_in_row += 1
            if settings.consecutive_failures is not None and self.faults_in_row >= settings.consecutive_failures:
                cause = Cause.UNREACHABLE if kind is FailureKind.CONNECT else Cause.FAULTS
                return cause, f"{self.faults_in_row} failures in a row"
        good, bad = self.successes + sum(self._past_successes), self.failures + sum(self._past_failures)
        if good + bad >= MIN_SAMPLES and good < settings.success_rate * (good + bad):
            return (
                Cause.SUCCESS_RATE,
                f"{good} successful responses of {good + bad} in {WINDOW_INTERVALS * INTERVAL_S:g} s",
            )
        return None

    def refuses_key(self, kind: FailureKind, flow: str) -> bool:
        """Whether a failed attempt of a request of this flow shows that lbproxy's own key is refused."""
        if kind is FailureKind.FORBIDDEN and len(self.forbidden) < FORBIDDEN_FLOWS:
            self.forbidden |= {flow}
        return kind is FailureKind.REFUSED or (kind is FailureKind.FORBIDDEN and len(self.forbidden) >= FORBIDDEN_FLOWS)

    def eject(self, cause: Cause, now: float, rng: random.Random) -> float:
        """Begin an ejection, and clear the counts. Returns its duration in seconds."""
        settings = self.settings
        if self.ejections and now - self.until >= settings.max_ejection:
            self.ejections = 0
        lasts_s = min(settings.max_ejection, settings.ejection * 2.0 ** min(self.ejections, 40))
        lasts_s *= rng.uniform(1 - JITTER, 1 + JITTER)
        self.ejections += 1
        self.cause = cause
        self.until = now + lasts_s
        self.reset()
        return lasts_s

    def reset(self) -> None:
        self.successes = self.failures = self.faults_in_row = 0
        self._past_successes = [0] * (WINDOW_INTERVALS - 1)
        self._past_failures = [0] * (WINDOW_INTERVALS - 1)
