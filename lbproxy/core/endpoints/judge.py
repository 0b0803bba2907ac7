# SPDX-License-Identifier: Apache-2.0
"""Turns the results of probes, connections and requests into transitions between the states of `core.endpoints.health`.

It owns what several endpoints share in this (when the first ejection ends, the slow start, the progress watch), and
asks `core.endpoints.breaker` whether there are too many failures. `core.endpoints.serving` decides which endpoints may
be asked. Invariants:

- Every change goes through `_move`, makes one `Transition`, and ends the trial in progress.
- A trial request decides once: by the first byte of a successful response, by a failure, or, if it ends otherwise, not
  at all.
- Failures count only against members that are up: those of older requests show nothing about a trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.core.endpoints import health
from lbproxy.core.endpoints.breaker import FAULTS, TIME_OUTS, Breaker, Cause
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.hang import HangWatch
from lbproxy.core.endpoints.health import Event, Health, Transition
from lbproxy.core.endpoints.serving import Serving
from lbproxy.core.endpoints.slow_start import SlowStart
from lbproxy.core.endpoints.state import EndpointState, Trial
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind

OWN_START_S: Final = 30.0
"""Endpoints that come up for the first time, this soon after the first of all, are as old as lbproxy: no slow start."""
_PROBES_SUFFICE: Final = frozenset({Cause.FAULTS, Cause.UNREACHABLE})
"""An endpoint that was ejected for another cause is not readmitted by probes: they passed all along."""


_CAUSES: Final = {
    FailureKind.CONNECT: Cause.UNREACHABLE,
    FailureKind.RESET: Cause.FAULTS,
    FailureKind.PROTOCOL: Cause.FAULTS,
    FailureKind.GATEWAY: Cause.FAULTS,
    FailureKind.LATE: Cause.FAULTS,
    FailureKind.ERROR: Cause.SUCCESS_RATE,
}
"""The cause of the next ejection when a trial failed by this kind; for other kinds, the cause stays the same."""


class Judge:
    """The state machines of all endpoints of one set."""

    def __init__(
        self,
        settings: HealthSettings,
        breaker: BreakerSettings,
        serving: Serving,
        *,
        has_loads: bool,
        rng: random.Random,
        process_ended: Callable[[EndpointState, bool], None],
    ) -> None:
        """`serving` is notified of every transition and trial. `process_ended` is called when an endpoint begins to
        refuse connections, and with True when it can be reached again: another process, as far as known.
        """
        self.transitions: list[Transition] = []
        """Transitions since the driver last cleared the list."""
        self.renewed: list[EndpointUid] = []
        """Endpoints that are other processes than before, likewise: they are to be asked for everything anew."""
        self.due_at = inf
        """When the first ejection ends."""
        self.slow_start = SlowStart(settings.slow_start)
        self.progress = HangWatch(breaker.no_progress, has_loads=has_loads)
        self._rng = rng
        self._serving = serving
        self._process_ended = process_ended
        self._first_up_at: float | None = None
        """When an endpoint took requests for the first time."""
        self.reconfigure(settings, breaker, ())

    def reconfigure(self, settings: HealthSettings, breaker: BreakerSettings, states: Iterable[EndpointState]) -> None:
        """Apply other settings from now on. Running ejections keep their duration."""
        self._breaker = breaker
        self._fall = settings.fall
        self._rise = settings.rise
        self.slow_start.duration_s = settings.slow_start
        self.progress.silence_s = breaker.no_progress
        for state in states:
            state.standing.breaker.settings = breaker

    # Membership

    def joined(self, state: EndpointState, like: EndpointState | None = None, *, now: float) -> None:
        """Note that `state` is new. An endpoint that is not probed is up until requests fail. `like`: another one at
        its address, which says whether the server is up.
        """
        state.standing.breaker = Breaker(self._breaker)
        if like is not None:
            is_known = like.health in {Health.STARTING, Health.DOWN}
            state.health = like.health if is_known else Health.UP  # the breaker judges each rank by itself
            state.standing.was_up, state.standing.reason = like.standing.was_up, like.standing.reason
        elif state.endpoint.health is None:
            state.health = Health.UP
            self._came_up(state, now)

    def key_changed(self, state: EndpointState, *, now: float) -> None:
        """Note that lbproxy sends another key from now on."""
        if state.health is Health.EJECTED and state.standing.breaker.cause is Cause.KEY:
            self._move(state, Event.EJECTION_ENDED, "it gets another key", now=now)

    def probing_stopped(self, state: EndpointState, *, now: float) -> None:
        """Note that `state` is not probed any more: no probe would ever bring it up."""
        self._move(state, Event.HEALTHY, "not probed any more", now=now)

    def removed(self, state: EndpointState) -> None:
        self._release_trial(state)
        self.slow_start.end(state)
        state.removed = True

    # Health

    def probed(self, state: EndpointState, ok: bool, reason: str, *, now: float, refused: bool = False) -> None:
        """Note the result of a probe, or a failed connection. `fall` failures in a row take an endpoint down, `rise`
        passes bring it up; the first result of all decides at once, so that starting does not wait for the counts.

        `refused`: no process listens there.
        """
        if refused:
            if not state.standing.refused_connection:
                state.standing.refused_connection = True
                self._process_ended(state, False)
        elif ok:
            self._reached(state)
        is_probed = state.endpoint.health is not None
        if ok and not is_probed:
            return
        if not ok and not state.failures_in_row and state.health is not Health.DOWN:
            state.standing.progress.failing_since = now
        state.failures_in_row = 0 if ok else state.failures_in_row + 1
        state.standing.passes_in_row = state.standing.passes_in_row + 1 if ok else 0
        first = state.health is Health.STARTING
        if not ok and is_probed and (first or state.failures_in_row >= self._fall):
            self._move(state, Event.UNHEALTHY, reason, now=now)
        elif ok and (first or state.standing.passes_in_row >= self._rise):
            may_prove = state.health is Health.HALF_OPEN and state.standing.trial is None
            if may_prove and state.standing.breaker.cause in _PROBES_SUFFICE:
                self._move(state, Event.RECOVERED, reason, now=now)
            else:
                self._move(state, Event.HEALTHY, reason, now=now)

    # The breaker

    def responded(self, state: EndpointState, suspect: EndpointState | None, *, trial: bool, now: float) -> None:
        """Note the first byte of a successful response. `suspect`: the endpoint that returned 500 to the same request.
        `trial`: the request tried `state`.
        """
        if suspect is not None:
            self._count(suspect, FailureKind.ERROR, "returned 500 to a request that succeeded elsewhere", now)
        if trial:
            self._trial_succeeded(state, now)

    def failed(  # noqa: PLR0913 - what is known of an attempt
        self,
        state: EndpointState,
        kind: FailureKind,
        detail: str,
        flow: str,
        *,
        trial: bool,
        placed_at: float,
        now: float,
        refused: bool = False,
    ) -> None:
        """Note an attempt at `state`, made at `placed_at`, that failed by `kind`, of a request of this flow. A time-out
        does not count while the endpoint makes progress with other work. `trial`: the request tried the endpoint.
        """
        if trial:
            self._release_trial(state)
            self._serving.changed(state)
        if state.removed:
            return
        if kind in TIME_OUTS and self.progress.makes_progress(state, placed_at, now):
            return
        if kind is FailureKind.CONNECT:
            for one in state.at_address:
                self.probed(one, False, detail, now=now, refused=refused)
        if state.standing.breaker.refuses_key(kind, flow):
            if state.health in {Health.UP, Health.HALF_OPEN}:
                self._eject(state, Cause.KEY, f"it refuses the key that lbproxy sends: {detail}", now)
        elif trial and state.health is Health.HALF_OPEN and _counts_as_failure(kind):
            cause = _CAUSES.get(kind, state.standing.breaker.cause)
            self._eject(state, cause, f"the trial request failed: {detail}", now)
        elif _counts_as_failure(kind):
            self._count(state, kind, detail, now)

    def response_broke(self, state: EndpointState, *, timed_out: bool, placed_at: float, now: float) -> None:
        """Note that a response broke after its first byte, which was counted as a success."""
        state.standing.breaker.successes = max(0, state.standing.breaker.successes - 1)
        if not (timed_out and self.progress.makes_progress(state, placed_at, now)):
            self._count(state, None, "a response broke", now)

    def _count(self, state: EndpointState, kind: FailureKind | None, detail: str, now: float) -> None:
        if state.health is Health.UP and not state.removed:
            verdict = state.standing.breaker.fault(kind, now)
            if verdict is not None:
                cause, reason = verdict
                self._eject(state, cause, f"{reason}, the last: {detail}", now)

    # Trials

    def begin_trial(self, state: EndpointState, *, stream: bool, now: float) -> Trial | None:
        """Note that a request was placed on `state`, which is not up. Returns its trial; None if it is not a trial, but
        was placed there because there are too few endpoints.
        """
        if state.standing.trial is not None or self._serving.is_readmitted(state) or state.removed:
            return None
        state.standing.trial = Trial(stream=stream)
        state.standing.tried_at = now
        for one in state.at_address:
            one.standing.dialled_at = now
        self._serving.changed(state)
        return state.standing.trial

    def trial_ended(self, state: EndpointState, outcome: Outcome, *, now: float) -> None:
        """Note that a trial ticket closes, with neither the first byte of a successful response nor a failure."""
        if outcome is Outcome.COMPLETED:  # a response without a body, or an error like 400: the endpoint works
            self._trial_succeeded(state, now)
        else:
            self._release_trial(state)
            self._serving.changed(state)

    def _trial_succeeded(self, state: EndpointState, now: float) -> None:
        reason = "the trial request succeeded"
        self._release_trial(state)
        self._serving.changed(state)
        if state.removed:
            return
        if state.health is Health.DOWN:
            self.probed(state, True, reason, now=now)
        else:
            self._move(state, Event.RECOVERED, reason, now=now)

    @staticmethod
    def _release_trial(state: EndpointState) -> None:
        if state.standing.trial is not None:
            state.standing.trial.ended = True
            state.standing.trial = None

    # Time

    def end_ejections(self, states: Iterable[EndpointState], *, now: float) -> None:
        self.due_at = inf
        for state in states:
            if state.health is Health.EJECTED:
                if state.standing.breaker.until <= now:
                    self._move(state, Event.EJECTION_ENDED, "one trial request at a time is allowed", now=now)
                else:
                    self.due_at = min(self.due_at, state.standing.breaker.until)

    def check(self, states: Sequence[EndpointState], *, now: float) -> None:
        """Apply what time alone changes, once a second."""
        if now >= self.due_at:
            self.end_ejections(states, now=now)
        self.slow_start.expire(now)
        for state in states:
            state.standing.breaker.rotate(now)
        for state, reason in self.progress.hung(states, now):
            self._eject(state, Cause.NO_PROGRESS, reason, now)

    # The state machine

    def _eject(self, state: EndpointState, cause: Cause, reason: str, now: float) -> None:
        lasts_s = state.standing.breaker.eject(cause, now, self._rng)
        self.due_at = min(self.due_at, state.standing.breaker.until)
        state.held_back.clear()  # from now on the breaker decides
        self._move(state, Event.FAILING, f"{reason}; for {lasts_s:.1f} s", now=now, cause=cause)

    def _move(self, state: EndpointState, event: Event, reason: str, *, now: float, cause: Cause | None = None) -> None:
        """Apply `event` to `state`, with all consequences; nothing if it does not change the state."""
        before = state.health
        state.health = health.next_state(before, event)
        if state.health is before:
            return
        self._release_trial(state)
        state.standing.passes_in_row = 0
        if state.health in {Health.UP, Health.DOWN}:
            state.failures_in_row = 0  # else probes go on failing, and an ejection must not delay DOWN
        if state.health is Health.UP:
            self._reached(state)
            state.standing.breaker.reset()
            self._came_up(state, now)
        else:
            self.slow_start.end(state)
        if state.health is Health.DOWN:
            state.standing.dialled_at = now
        self._serving.changed(state)
        if self._serving.is_readmitted(state):
            reason += "; used although ejected, as less than half would be left"
        state.standing.reason = reason
        self.transitions.append(Transition(state.endpoint, before, state.health, reason, cause))

    def _reached(self, state: EndpointState) -> None:
        if state.standing.refused_connection:
            state.standing.refused_connection = False
            self._process_ended(state, True)

    def _came_up(self, state: EndpointState, now: float) -> None:
        if self._first_up_at is None:
            self._first_up_at = now
        if state.standing.was_up or now - self._first_up_at > OWN_START_S:
            self.slow_start.begin(state, now)
        state.standing.was_up = True


def _counts_as_failure(kind: FailureKind) -> bool:
    return kind in FAULTS or kind is FailureKind.ERROR
