"""Finds endpoints that take requests and do nothing with them: a hung worker behind an HTTP server that is well.

Its /health answers 200 and its gauges stand still, so that nothing else would ever tell. An endpoint hangs if several
requests are there and for a while no byte came of any of them, no gauge of its metrics moved, and another endpoint did
go on meanwhile. Looked at once a second, from outside (`Balancer.check`). Invariants:

- Silence that may be ours is nobody's fault: a look that comes late makes everybody's silence begin anew. The same is
  true of a pool in which nobody goes on.
- A prefill that is known to be long is waited for, five times over.
- An endpoint whose gauges are not known may be computing answers that do not stream: there only answers that began, and
  then fell silent, count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lbproxy.core.types import EndpointState, Health, LoadMetrics

CHECK_S: Final = 1.0
"""Between two looks."""
LATE_S: Final = 3.0
"""A look so long after the last one means that we stood still."""
MIN_REQUESTS: Final = 3
PREDICTED: Final = 5.0
"""Times the time that the first in line should take to its first byte."""
UNSTREAMED: Final = 3.0
"""Times as long for the trial of an endpoint whose answer does not stream."""


class ProgressWatch:
    """When each endpoint last did something. The rest is in `EndpointState`."""

    def __init__(self, silence_s: float | None, *, has_loads: bool) -> None:
        """`has_loads`: the states have a `load`, which knows how long a prefill takes."""
        self.silence_s = silence_s
        self.has_loads = has_loads
        self._looked_at = float("-inf")

    def scraped(self, state: EndpointState, metrics: LoadMetrics) -> None:
        """Gauges came: more or fewer requests computed, cache filled or freed, or a shorter queue is progress."""
        before = state.metrics
        if before is None or metrics.running != before.running or metrics.kv_utilization != before.kv_utilization:
            moved = True
        else:
            moved = metrics.waiting is not None and before.waiting is not None and metrics.waiting < before.waiting
        if moved:
            state.progress_at = metrics.scraped_at

    def hung(self, states: Sequence[EndpointState], now: float) -> list[tuple[EndpointState, str]]:
        """Those that make no progress, with the reason."""
        late = now - self._looked_at > LATE_S
        self._looked_at = now
        found = []
        for state in states:
            if late or not self._is_busy(state, now):
                state.quiet_since = now
            elif self.silence_s is not None:
                since = max(state.quiet_since, state.progress_at)
                if now - since >= self._patience_s(state, now) and _goes_on(states, state, since):
                    found.append((state, f"no byte for {now - since:.0f} s from {state.in_flight} requests"))
        return found

    @staticmethod
    def _is_busy(state: EndpointState, now: float) -> bool:
        if state.health is not Health.UP:
            return state.health is Health.HALF_OPEN and state.trial is not None
        known = now <= state.fresh_until
        return (state.in_flight if known else state.in_flight - state.awaiting_first_byte) >= MIN_REQUESTS

    def _patience_s(self, state: EndpointState, now: float) -> float:
        assert self.silence_s is not None
        patience_s = self.silence_s
        if state.trial is not None and not state.trial.request.stream:
            patience_s *= UNSTREAMED
        if self.has_loads:
            patience_s = max(patience_s, PREDICTED * state.load.next_first_byte_s(now))
        return patience_s


def _goes_on(states: Iterable[EndpointState], silent: EndpointState, since: float) -> bool:
    return any(one is not silent and one.progress_at > since for one in states)
