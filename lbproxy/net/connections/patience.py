"""The deadlines of one attempt at an endpoint: which clock runs now, and what it means when that runs out.

    clock       runs from            until                                        at most
    connect     the dial             the connection stands                        timeouts.connect
    response    the request is sent  the first event, or byte of any other body   timeouts.first_byte
    silence     the last read        the next one                                 timeouts.stream_idle
    (none)      the client takes nothing, or the response is complete

The head of a response stops no clock: vLLM and others send it when they take a stream, and then it waits in their queue
like any other request. Nor do comments, which only say that somebody is there. Time in which the client takes nothing
is nobody's silence, and neither is time in which we ourselves stood still (`prolong`).

What the end of a clock means is the same for all three: the attempt ends as a time-out. Before the first bytes went to
the client it is told so by a status, or an event where it has the head of a stream; later by an event. Whether the
endpoint is blamed is for `core.endpoints.hang` to say (`goes_on`): not if it shows that it goes on with other work.
That an endpoint hangs, or is dead, is found there too, from outside and sooner. A host that vanished is found by
keep-alive of the kernel (`net.dialing.vanished`), which has no other limit: a busy endpoint may read nothing of a
large body for as long as `response` runs. `connect` runs in the dial, which has no connection yet.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple


class Limits(NamedTuple):
    """How long the clocks of an attempt may run, in seconds."""

    connect_s: float
    response_s: float
    silence_s: float


NO_LIMITS: Final = Limits(inf, inf, inf)


class Patience:
    """One attempt's clock. A connection has one, for the attempts that go over it in turn."""

    __slots__ = ("_began", "_left_s", "_limits", "deadline")

    def __init__(self) -> None:
        self.deadline = inf
        """When the clock that runs now runs out; inf = none runs."""
        self._limits = NO_LIMITS
        self._began = False
        """The first event, or byte of any other body, arrived."""
        self._left_s = inf
        """While no clock runs since the client takes nothing: what is left of it."""

    def sent(self, limits: Limits, now: float) -> None:
        """The request is on its way."""
        self._limits = limits
        self._began = False
        self.deadline = now + limits.response_s

    def began(self, now: float) -> None:
        """The first event, or byte of any other body, arrived."""
        self._began = True
        self.deadline = now + self._limits.silence_s

    def heard(self, now: float) -> None:
        """Bytes arrived."""
        if self._began:
            self.deadline = now + self._limits.silence_s

    def paused(self, now: float) -> None:
        """The client takes nothing."""
        self._left_s = self._limits.silence_s if self._began else self.deadline - now
        self.deadline = inf

    def resumed(self, now: float) -> None:
        """It takes again."""
        self.deadline = now + self._left_s

    def prolong(self, seconds: float) -> None:
        """We stood still for so long."""
        self.deadline += seconds

    def stop(self) -> None:
        """The response is complete, or will never be."""
        self.deadline = inf

    @property
    def reason(self) -> str:
        """What a time-out was about, for the log."""
        if self._began:
            return f"silent for {self._limits.silence_s:g} s in the middle of its response"
        return f"no response within {self._limits.response_s:g} s"
