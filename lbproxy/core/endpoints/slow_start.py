# SPDX-License-Identifier: Apache-2.0
"""The slow start: an endpoint that came back, or is new, gets a share of requests that grows from a tenth to all.

Its cache is empty and its engine still compiles, while it is the least loaded of all, so that every policy would send
it everything. The share is one of placements, so it holds under every policy and at every load. While endpoints start,
each placement gives each of them credit: its weight over the weights of all candidates (1 for those that do not start).
An endpoint that starts is a candidate only with a credit of at least 1, which a placement there costs. The policy still
chooses which requests it gets. Invariant: this is a preference: a request that cannot be placed otherwise goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lbproxy.core.endpoints.state import EndpointState

FLOOR: Final = 0.1
MAX_CREDIT: Final = 2.0
"""An endpoint that the policy did not choose for a while does not get everything that it missed at once."""


class SlowStart:
    """The endpoints in slow start, and their credit."""

    def __init__(self, duration_s: float | None) -> None:
        self.duration_s = duration_s
        self.starting: list[EndpointState] = []
        """Mostly empty, so that a decision only costs one check."""

    def begin(self, state: EndpointState, now: float) -> None:
        if self.duration_s is None:
            return
        if state.slow_since is None:
            self.starting.append(state)
        state.slow_since = now
        state.slow_credit = 1.0

    def end(self, state: EndpointState) -> None:
        """End the slow start of `state`; no effect if it has none."""
        if state.slow_since is not None:
            state.slow_since = None
            self.starting.remove(state)

    def expire(self, now: float) -> None:
        for state in self.starting[:]:
            if self.share(state, now) >= 1.0:
                self.end(state)

    def share(self, state: EndpointState, now: float) -> float:
        """The weight of an endpoint relative to one without slow start, from `FLOOR` to 1."""
        if state.slow_since is None or self.duration_s is None:
            return 1.0
        return min(1.0, max(FLOOR, (now - state.slow_since) / self.duration_s))

    def allowed(self, candidates: Sequence[EndpointState]) -> Sequence[EndpointState]:
        """The candidates with enough credit; all of them, if there are none."""
        return [one for one in candidates if one.slow_since is None or one.slow_credit >= 1.0] or candidates

    def placed(self, chosen: EndpointState, candidates: Sequence[EndpointState], now: float) -> None:
        """Note that one of `candidates` got a request."""
        total = sum(self.share(state, now) for state in candidates)
        for state in candidates:
            if state.slow_since is not None:
                state.slow_credit = min(MAX_CREDIT, state.slow_credit + self.share(state, now) / total)
        if chosen.slow_since is not None:
            chosen.slow_credit = max(0.0, chosen.slow_credit - 1.0)
