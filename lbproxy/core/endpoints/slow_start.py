"""The slow start: an endpoint that came back, or is new, gets a share that grows from a tenth to all of it.

Its cache is empty and its engine still compiles, while it is the least loaded of all, so that every policy would send
it everything. The share is one of placements, so it holds under every policy and at every load: while endpoints start,
each placement gives each of them credit, its weight over the weights of all candidates (1 for those that do not start),
and an endpoint that starts is a candidate only with a whole credit, which a placement there costs. Which requests it
gets is still the policy's choice. Invariant: it is a preference and no verdict: who could not be placed otherwise goes
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lbproxy.core.endpoints.state import EndpointState

FLOOR: Final = 0.1
MAX_CREDIT: Final = 2.0
"""An endpoint that the policy did not want for a while does not get all that it missed at once."""


class SlowStart:
    """The endpoints that start, and what they may have."""

    def __init__(self, duration_s: float | None) -> None:
        self.duration_s = duration_s
        self.starting: list[EndpointState] = []
        """Mostly empty, so that a decision pays one look."""

    def begin(self, state: EndpointState, now: float) -> None:
        """`state` takes requests from now on."""
        if self.duration_s is None:
            return
        if state.slow_since is None:
            self.starting.append(state)
        state.slow_since = now
        state.slow_credit = 1.0

    def end(self, state: EndpointState) -> None:
        """It is out again, or its time is over; no-op if it does not start."""
        if state.slow_since is not None:
            state.slow_since = None
            self.starting.remove(state)

    def expire(self, now: float) -> None:
        """Let go of those whose time is over."""
        for state in self.starting[:]:
            if self.share(state, now) >= 1.0:
                self.end(state)

    def share(self, state: EndpointState, now: float) -> float:
        """`FLOOR` to 1: the weight of an endpoint beside one that does not start."""
        if state.slow_since is None or self.duration_s is None:
            return 1.0
        return min(1.0, max(FLOOR, (now - state.slow_since) / self.duration_s))

    def allowed(self, candidates: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """Those whose turn it may be; all, if that is nobody."""
        return [one for one in candidates if one.slow_since is None or one.slow_credit >= 1.0] or candidates

    def placed(self, chosen: EndpointState, candidates: Sequence[EndpointState], now: float) -> None:
        """One of `candidates` got a request."""
        total = sum(self.share(state, now) for state in candidates)
        for state in candidates:
            if state.slow_since is not None:
                state.slow_credit = min(MAX_CREDIT, state.slow_credit + self.share(state, now) / total)
        if chosen.slow_since is not None:
            chosen.slow_credit = max(0.0, chosen.slow_credit - 1.0)
