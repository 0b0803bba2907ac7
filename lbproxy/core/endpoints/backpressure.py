# SPDX-License-Identifier: Apache-2.0
"""Endpoints that respond "not now", or fail fast, get no requests for a while if others can take them.

Without this they would attract traffic: an endpoint that refuses at once is always the least loaded. This is a
preference, not a verdict, which `core.endpoints.breaker` gives: when every candidate is backing off, all of them are
used, as if none were. Only above tier 1, at a provider, nothing is sent meanwhile.

- 429 and 503 are explicit: the endpoint backs off for a second, and twice as long each time after that. A failure while
  it backs off does not count: that request was sent before, or because no other endpoint was available. A server that
  refuses fifty requests at once refused once, not fifty times. If it says Retry-After, it backs off at least so long:
  at most an hour, and of tier 1 a minute, as a wrong value must not take away one's own hardware. Other settings end
  it above tier 1; a success does not, as it may be of a request from before.
- 500 may be the request's fault, so only the third in a row without a successful response between counts (a vLLM that
  drains returns 500 for everything while its /health is 200). The breaker counts a 500 if another endpoint did better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.retry import FailureKind

FIRST_S: Final = 1.0
MAX_S: Final = 10.0
MAX_ASKED_S: Final = 3600.0
MAX_ASKED_FIRST_S: Final = 60.0
"""What a Retry-After counts at most: above tier 1, and of tier 1."""
SUSPECT_AFTER: Final = 3
"""Responses with 500 in a row."""
_REFUSALS: Final = frozenset({FailureKind.BUSY, FailureKind.LIMITED})


class Backpressure:
    """Until when each endpoint backs off. The state is in `EndpointState`: `refusals` and `backing_off_until`."""

    def __init__(self) -> None:
        self.until = float("-inf")
        """When the last back-off ends: mostly in the past, so that a decision only costs one comparison."""

    def note_failure(
        self, state: EndpointState, kind: FailureKind, *, now: float, retry_after_s: float | None = None
    ) -> None:
        """Note that an attempt at `state` failed by `kind`. `retry_after_s`: as the endpoint said."""
        if retry_after_s is not None and kind in _REFUSALS:
            most = MAX_ASKED_S if state.endpoint.tier > 1 else MAX_ASKED_FIRST_S
            asked_until = now + min(most, retry_after_s)
            if asked_until > state.backing_off_until:
                state.standing.refusals += now >= state.backing_off_until
                state.backing_off_until = asked_until
                self.until = max(self.until, asked_until)
        if (kind not in _REFUSALS and kind is not FailureKind.ERROR) or now < state.backing_off_until:
            return
        state.standing.refusals += 1
        excess = state.standing.refusals - (1 if kind in _REFUSALS else SUSPECT_AFTER)
        if excess >= 0:
            state.backing_off_until = now + min(MAX_S, FIRST_S * 2.0 ** min(excess, 10))
            self.until = max(self.until, state.backing_off_until)

    def note_success(self, state: EndpointState) -> None:
        """Note a successful response of `state`."""
        state.standing.refusals = 0

    def not_backing_off(self, candidates: Sequence[EndpointState], *, now: float) -> Sequence[EndpointState]:
        """The candidates that are not backing off; all of them, if there are none."""
        if now >= self.until:
            return candidates
        return [state for state in candidates if state.backing_off_until <= now] or candidates
