"""Endpoints that response "not now", or fail fast, get no requests for a moment while others can take them.

Without this they would attract traffic: who refuses at once is always the least loaded. It is a preference and no
verdict, which is for `core.endpoints.breaker`: when every candidate is backing off, all of them are asked, as if none
were.

- 429 and 503 say it themselves: the endpoint is left alone for a second, and for twice as long each time after that.
  What fails while it is left alone was sent before, or because nobody else was there, and is no further time: a server
  that refuses fifty requests at once refused once, not fifty times.
- 500 may be the request's fault, and only the third in a row without a good response between counts (a vLLM that drains
  answers 500 to everything while its /health is 200). The breaker hears of it when another endpoint did better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.retry import FailureKind

FIRST_S: Final = 1.0
MAX_S: Final = 10.0
SUSPECT_AFTER: Final = 3
"""Answers 500 in a row."""
_REFUSALS: Final = frozenset({FailureKind.BUSY, FailureKind.LIMITED})


class Backpressure:
    """Who is left alone until when. The state itself is in `EndpointState`: `refusals` and `backing_off_until`."""

    def __init__(self) -> None:
        self.until = float("-inf")
        """When the last backing-off ends: mostly past, so that a decision pays one comparison."""

    def note_failure(self, state: EndpointState, kind: FailureKind, *, now: float) -> None:
        """An attempt at `state` failed by `kind`."""
        if (kind not in _REFUSALS and kind is not FailureKind.ERROR) or now < state.backing_off_until:
            return
        state.refusals += 1
        excess = state.refusals - (1 if kind in _REFUSALS else SUSPECT_AFTER)
        if excess >= 0:
            state.backing_off_until = now + min(MAX_S, FIRST_S * 2.0 ** min(excess, 10))
            self.until = max(self.until, state.backing_off_until)

    def note_success(self, state: EndpointState) -> None:
        """`state` gave a good response."""
        state.refusals = 0

    def not_backing_off(self, candidates: Sequence[EndpointState], *, now: float) -> Sequence[EndpointState]:
        """Those that are not backing off; all, if there are none."""
        if now >= self.until:
            return candidates
        return [state for state in candidates if state.backing_off_until <= now] or candidates
