# SPDX-License-Identifier: Apache-2.0
"""Finds endpoints that accept requests and make no progress: a hung worker behind a healthy HTTP server.

Its /health returns 200 and its gauges do not change, so that nothing else would detect it. An endpoint hangs if it has
several requests, for a while none of them got a byte, no metric changed, and another endpoint of the same model made
progress meanwhile. It is checked once a second, from outside (`Balancer.check`). The principle: work that may be
running is not stopped on suspicion. So:

- Non-streaming responses show nothing until they are complete. So silence counts only if the endpoint's metrics were
  *seen* to change with its work (`Progress.shows_work`): a counter of steps or tokens, or KV cache use that changed
  while no request began or ended. Until then only streams count that began, and then fell silent.
- An endpoint whose metric changes every few seconds (SGLang updates its own every 40 steps) gets several such
  intervals.
- A prefill that is predicted to be long gets five times its predicted time.
- Silence that lbproxy may have caused does not count: after a late check, silence is counted from that check. The same
  is true if no other endpoint makes progress.
- An endpoint whose health checks fail keeps its requests as long as it shows any sign of life. Non-streaming responses,
  with minutes of work in them, are kept as long as silence is no proof (`is_dead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState

CHECK_S: Final = 1.0
"""Between two checks."""
STALL_S: Final = 3.0
"""A check this long after the last one means that lbproxy itself was stopped."""
MIN_REQUESTS: Final = 3
PATIENCE_FACTOR: Final = 5.0
"""Times the predicted time to the next first byte, or the interval in which the metrics change."""
NON_STREAMING_FACTOR: Final = 3.0
"""Times as long for the trial of an endpoint whose response does not stream."""
SILENCE_S: Final = 10.0
"""If the settings do not look for endpoints that hang, this long without a sign of life is still no progress."""


class HangWatch:
    """Watches all endpoints. The data of each is in `EndpointState.progress`."""

    def __init__(self, silence_s: float | None, *, has_loads: bool) -> None:
        """`has_loads`: the states have a `load`, which predicts the time of a prefill."""
        self.silence_s = silence_s
        self.has_loads = has_loads
        self._looked_at = -inf

    def hung(self, states: Sequence[EndpointState], now: float) -> list[tuple[EndpointState, str]]:
        """The endpoints that make no progress, with the reason."""
        late = now - self._looked_at > STALL_S
        self._looked_at = now
        found = []
        for state in states:
            progress = state.standing.progress
            if late or not self._is_busy(state, now):
                progress.silent_since = now
            elif self.silence_s is not None:
                since = max(progress.silent_since, progress.last_at)
                if now - since >= self._patience_s(state, now) and _another_progresses(states, state, since):
                    found.append((state, f"no byte for {now - since:.0f} s from {state.in_flight} requests"))
        return found

    def is_dead(self, state: EndpointState, now: float, *, stream: bool) -> bool:
        """Whether the requests without a first byte at `state` are stranded: it hangs, or its health checks fail and it
        sends nothing either. A metrics page is a sign of life unless it should have changed.

        `stream`: these requests stream, so that their first byte should arrive soon.
        """
        if state.health in {Health.EJECTED, Health.HALF_OPEN}:
            return state.standing.breaker.cause is Cause.NO_PROGRESS
        if state.health is not Health.DOWN:
            return False
        progress, metrics = state.standing.progress, state.metrics
        heard_at = max(progress.last_at, progress.failing_since)
        if metrics is not None:
            if stream and max(progress.last_at, metrics.scraped_at) < progress.failing_since:
                return True  # its metrics page failed as soon as its health checks did: it does not respond any more
            if not progress.shows_work:
                heard_at = max(heard_at, metrics.scraped_at)
        return now - heard_at >= max(self._silence_s, PATIENCE_FACTOR * progress.interval_s)

    def makes_progress(self, state: EndpointState, since: float, now: float) -> bool:
        """Whether the endpoint showed work recently, and after `since`: a time-out there is not its fault."""
        progress = state.standing.progress
        silence_s = max(self._silence_s, PATIENCE_FACTOR * progress.interval_s)
        return now - progress.last_at < silence_s and progress.last_at > since

    @property
    def _silence_s(self) -> float:
        return SILENCE_S if self.silence_s is None else self.silence_s

    @staticmethod
    def _is_busy(state: EndpointState, now: float) -> bool:
        known = now <= state.reported.scrape_until and state.standing.progress.shows_work
        if state.health is not Health.UP:
            trial = state.standing.trial
            if trial is None or state.health is not Health.HALF_OPEN:
                return False
            return known or trial.stream or state.standing.breaker.cause is Cause.NO_PROGRESS
        expected = state.in_flight - state.standing.progress.open_ended
        return (expected if known else expected - state.awaiting_first_byte) >= MIN_REQUESTS

    def _patience_s(self, state: EndpointState, now: float) -> float:
        patience_s = max(self._silence_s, PATIENCE_FACTOR * state.standing.progress.interval_s)
        if state.standing.trial is not None and not state.standing.trial.stream:
            patience_s *= NON_STREAMING_FACTOR
        if self.has_loads:
            patience_s = max(patience_s, PATIENCE_FACTOR * state.load.next_first_byte_s(now))
        return patience_s


def _another_progresses(states: Iterable[EndpointState], silent: EndpointState, since: float) -> bool:
    return any(
        one is not silent and one.standing.progress.last_at > since and _share_a_model(one, silent) for one in states
    )


def _share_a_model(one: EndpointState, other: EndpointState) -> bool:
    """Whether they serve a model together, as far as known."""
    return one.models is None or other.models is None or not one.models.keys().isdisjoint(other.models)
