# SPDX-License-Identifier: Apache-2.0
"""Endpoints that respond "not now", or fail fast, get no requests for that model for a while if others can take them.

Without this they would attract traffic: an endpoint that refuses at once is always the least loaded. This is a
preference, not a verdict, which `core.endpoints.breaker` gives: when every candidate is backing off, all of them are
used, as if none were. Only above tier 1, at a provider, nothing is sent meanwhile. It holds of one model, and the
adapters of it: a server of many may load, or limit, each apart.

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
from math import inf
from typing import Final

from lbproxy.core.endpoints.state import EndpointState, HeldBack
from lbproxy.core.requests.retry import FailureKind

FIRST_S: Final = 1.0
MAX_S: Final = 10.0
MAX_ASKED_S: Final = 3600.0
MAX_ASKED_FIRST_S: Final = 60.0
"""What a Retry-After counts at most: above tier 1, and of tier 1."""
SUSPECT_AFTER: Final = 3
"""Responses with 500 in a row."""
MAX_HELD_BACK: Final = 1000
"""Models of one endpoint: where it lists none, clients write the names. Of more, the oldest is forgotten."""
_REFUSALS: Final = frozenset({FailureKind.BUSY, FailureKind.LIMITED})


class Backpressure:
    """Until when each endpoint backs off, by model. The state is in `EndpointState.held_back`."""

    def __init__(self) -> None:
        self.until = -inf
        """When the last back-off ends: mostly in the past, so that a decision only costs one comparison."""

    def note_failure(
        self,
        state: EndpointState,
        model: str | None,
        kind: FailureKind,
        *,
        now: float,
        retry_after_s: float | None = None,
    ) -> None:
        """Note that an attempt at `state` failed by `kind`. `retry_after_s`: as the endpoint said."""
        if kind not in _REFUSALS and kind is not FailureKind.ERROR:
            return
        one = held_back(state, model)
        if retry_after_s is not None and kind in _REFUSALS:
            most = MAX_ASKED_S if state.endpoint.tier > 1 else MAX_ASKED_FIRST_S
            asked_until = now + min(most, retry_after_s)
            if asked_until > one.until:
                one.refusals += now >= one.until
                one.until = asked_until
                self.until = max(self.until, asked_until)
        if now < one.until:
            return
        one.refusals += 1
        excess = one.refusals - (1 if kind in _REFUSALS else SUSPECT_AFTER)
        if excess >= 0:
            one.until = now + min(MAX_S, FIRST_S * 2.0 ** min(excess, 10))
            self.until = max(self.until, one.until)

    def note_success(self, state: EndpointState, model: str | None) -> None:
        if state.held_back and (one := state.held_back.get(state.engine_model(model))) is not None:
            one.refusals = 0

    def not_backing_off(
        self, candidates: Sequence[EndpointState], model: str | None, *, now: float
    ) -> Sequence[EndpointState]:
        """The candidates that are not backing off; all of them, if there are none."""
        if now >= self.until:
            return candidates
        return [state for state in candidates if state.held_until(model) <= now] or candidates


def held_back(state: EndpointState, model: str | None) -> HeldBack:
    """What `state` refused of a model, to be changed."""
    found, name = state.held_back, state.engine_model(model)
    if name not in found:
        if len(found) >= MAX_HELD_BACK:
            del found[next(iter(found))]
        found[name] = HeldBack()
    return found[name]


def closed_until(state: EndpointState) -> float:
    """Until when an endpoint holds back all models that it lists; in the past: it does not."""
    if not state.held_back or not state.models:
        return -inf
    return min(state.held_until(model) for model in state.models)


def next_opening(state: EndpointState, now: float) -> float:
    """When the first back-off ends that an endpoint has; infinite: it has none."""
    return min((one.until for one in state.held_back.values() if one.until > now), default=inf)
