# SPDX-License-Identifier: Apache-2.0
"""The deadlines of one attempt at an endpoint: which clock runs now, and what happens when it expires.

    clock       runs from            until                                        at most
    connect     the dial             the connection is established                timeouts.connect
    response    the request is sent  the first event, or byte of any other body   timeouts.first_byte
    silence     the last read        the next one                                 timeouts.stream_idle
    (none)      the client does not read, or the response is complete

The head of a response stops no clock: vLLM and others send it when they accept a stream, which then waits in their
queue like any other request. Neither do comments, which only show that the server is alive. Time in which the client
does not read is not the endpoint's silence, and neither is time in which lbproxy itself was stopped (`prolong`).

An expired `connect` is a failed connection (FailureKind.CONNECT): the request was not sent, and is retried at once.
The other two end the attempt as a TIMEOUT, which is not retried: the endpoint may still compute the response. Before
any body bytes went to the client it gets a status, or an event if it has the head of a stream; later it gets an event.
docs/failures.md has a table of all timers of an attempt, with their outcomes.

After a TIMEOUT `core.endpoints.hang` (`makes_progress`) decides whether the endpoint is blamed: not if it makes
progress with other work. It also finds endpoints that hang or are dead, from outside and sooner. A host that vanished
is found by the kernel's keep-alive (`net.dialing.vanished`), which has no other limit: a busy endpoint may read nothing
of a large body for as long as `response` runs. `connect` runs in the dial (`net.dialing`), which has no connection yet.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple


class ClockLimits(NamedTuple):
    """The limits of an attempt's clocks, in seconds."""

    connect_s: float
    response_s: float
    silence_s: float


NO_LIMITS: Final = ClockLimits(inf, inf, inf)


class Patience:
    """The clock of one attempt. A connection has one, for the attempts that use it one after the other."""

    def __init__(self) -> None:
        self.deadline = inf
        """When the current clock expires; inf = none runs."""
        self.sent_at = 0.0
        """When the request was sent."""
        self._limits = NO_LIMITS
        self._began = False
        """The first event, or byte of any other body, arrived."""
        self._left_s = inf
        """What is left of the clock while it is stopped, as the client does not read."""

    def sent(self, limits: ClockLimits, now: float) -> None:
        self._limits = limits
        self.sent_at = now
        self._began = False
        self.deadline = now + limits.response_s

    def began(self, now: float) -> None:
        self._began = True
        self.deadline = now + self._limits.silence_s

    def heard(self, now: float) -> None:
        if self._began:
            self.deadline = now + self._limits.silence_s

    def paused(self, now: float) -> None:
        self._left_s = self._limits.silence_s if self._began else self.deadline - now
        self.deadline = inf

    def resumed(self, now: float) -> None:
        self.deadline = now + self._left_s

    def prolong(self, seconds: float) -> None:
        """lbproxy itself was stopped for `seconds`."""
        self.deadline += seconds

    def stop(self) -> None:
        """The response is complete, or will never be."""
        self.deadline = inf

    @property
    def reason(self) -> str:
        """The reason for a time-out, for the log."""
        if self._began:
            return f"silent for {self._limits.silence_s:g} s in the middle of its response"
        return f"no response within {self._limits.response_s:g} s"
