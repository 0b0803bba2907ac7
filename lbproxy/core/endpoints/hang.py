"""Finds endpoints that take requests and do nothing with them: a hung worker behind an HTTP server that is well.

Its /health answers 200 and its gauges stand still, so that nothing else would ever tell. An endpoint hangs if several
requests are there, for a while no byte came of any of them, no metric moved, and another endpoint of the same model did
go on meanwhile. It is looked at once a second, from outside (`Balancer.check`). The rule behind all of this: work that
may be running is not killed on a suspicion. So:

- Responses that do not stream show nothing until they are complete, so silence says something of an endpoint only if
  its metrics were *seen* to move with its work (`Progress.shows_work`): a counter of steps or tokens, or KV cache use
  that moved while no request began or ended. Until then only streams that began, and then fell silent, count.
- An endpoint whose metric moves every few seconds (SGLang writes its own every 40 steps) is given several such times.
- A prefill that is known to be long is waited for, five times over.
- Silence that may be ours is nobody's fault: a look that comes late makes everybody's silence begin anew. The same is
  true of a pool in which nobody else goes on.
- An endpoint whose health checks fail keeps what runs there as long as it shows any sign of life; and whole responses,
  of which minutes of work may be lost, for as long as silence is no proof (`is_dead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState

CHECK_S: Final = 1.0
"""Between two looks."""
STALL_S: Final = 3.0
"""A look so long after the last one means that we stood still."""
MIN_REQUESTS: Final = 3
PATIENCE_FACTOR: Final = 5.0
"""Times the time that the first in line should take to its first byte, or that the metrics take to move."""
NON_STREAMING_FACTOR: Final = 3.0
"""Times as long for the trial of an endpoint whose response does not stream."""
SILENCE_S: Final = 10.0
"""Where the settings do not look for endpoints that hang, as long without a sign of life is still no progress."""


class HangWatch:
    """Looks at all endpoints. What it knows of each is in `EndpointState.progress`."""

    def __init__(self, silence_s: float | None, *, has_loads: bool) -> None:
        """`has_loads`: the states have a `load`, which knows how long a prefill takes."""
        self.silence_s = silence_s
        self.has_loads = has_loads
        self._looked_at = -inf

    def hung(self, states: Sequence[EndpointState], now: float) -> list[tuple[EndpointState, str]]:
        """Those that make no progress, with the reason."""
        late = now - self._looked_at > STALL_S
        self._looked_at = now
        found = []
        for state in states:
            progress = state.progress
            if late or not self._is_busy(state, now):
                progress.silent_since = now
            elif self.silence_s is not None:
                since = max(progress.silent_since, progress.last_at)
                if now - since >= self._patience_s(state, now) and _another_progresses(states, state, since):
                    found.append((state, f"no byte for {now - since:.0f} s from {state.in_flight} requests"))
        return found

    def is_dead(self, state: EndpointState, now: float, *, stream: bool) -> bool:
        """Whether requests wait in vain for a first byte from `state`: it hangs, or its health checks fail and it does
        not speak either. A page of metrics is a sign of life unless it should have moved.

        `stream`: these requests stream, so that their first byte should come soon.
        """
        if state.health in {Health.EJECTED, Health.HALF_OPEN}:
            return state.breaker.cause is Cause.NO_PROGRESS
        if state.health is not Health.DOWN:
            return False
        progress, metrics = state.progress, state.metrics
        heard_at = max(progress.last_at, progress.failing_since)
        if metrics is not None:
            if stream and max(progress.last_at, metrics.scraped_at) < progress.failing_since:
                return True  # as soon as its health checks failed its metrics did: nothing answers any more
            if not progress.shows_work:
                heard_at = max(heard_at, metrics.scraped_at)
        return now - heard_at >= max(self._silence_s, PATIENCE_FACTOR * progress.interval_s)

    def makes_progress(self, state: EndpointState, since: float, now: float) -> bool:
        """Whether the endpoint showed work of late, and since then: a time-out there is no fault of it."""
        progress = state.progress
        silence_s = max(self._silence_s, PATIENCE_FACTOR * progress.interval_s)
        return now - progress.last_at < silence_s and progress.last_at > since

    @property
    def _silence_s(self) -> float:
        return SILENCE_S if self.silence_s is None else self.silence_s

    @staticmethod
    def _is_busy(state: EndpointState, now: float) -> bool:
        known = now <= state.scrape_until and state.progress.shows_work
        if state.health is not Health.UP:
            trial = state.trial
            if trial is None or state.health is not Health.HALF_OPEN:
                return False
            return known or trial.stream or state.breaker.cause is Cause.NO_PROGRESS
        expected = state.in_flight - state.progress.open_ended
        return (expected if known else expected - state.awaiting_first_byte) >= MIN_REQUESTS

    def _patience_s(self, state: EndpointState, now: float) -> float:
        patience_s = max(self._silence_s, PATIENCE_FACTOR * state.progress.interval_s)
        if state.trial is not None and not state.trial.stream:
            patience_s *= NON_STREAMING_FACTOR
        if self.has_loads:
            patience_s = max(patience_s, PATIENCE_FACTOR * state.load.next_first_byte_s(now))
        return patience_s


def _another_progresses(states: Iterable[EndpointState], silent: EndpointState, since: float) -> bool:
    return any(one is not silent and one.progress.last_at > since and _share_a_model(one, silent) for one in states)


def _share_a_model(one: EndpointState, other: EndpointState) -> bool:
    """They serve a model together, as far as is known."""
    return one.models is None or other.models is None or not one.models.keys().isdisjoint(other.models)
