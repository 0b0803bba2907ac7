# SPDX-License-Identifier: Apache-2.0
"""The state machine of an endpoint's health: its state after each event.

There are two sources of events. *Health* is what probes and connections show; it distinguishes up and down. The
*breaker* judges by the results of requests (see `core.endpoints.breaker` and `core.endpoints.progress`): it ejects an
endpoint that fails requests although its health checks pass, for a time, and then lets one request at a time try it.
Both change the same state, so that an endpoint has one state and one log line for each transition, and two mechanisms
cannot disagree. `core.endpoints.judge` raises the events; docs/failures.md draws this table.

Invariants: an event that the table does not have for a state changes nothing. Health overrules the breaker (an endpoint
that is down is not ejected). Every state except `UP` can be left without a request, by probes or by time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import Endpoint


class Health(Enum):
    """The state of an endpoint. `UP` endpoints get requests, the others only if there are none."""

    STARTING = "starting"
    """Not known yet."""
    UP = "up"
    EJECTED = "ejected"
    """Ejected by the breaker, for a time."""
    HALF_OPEN = "half_open"
    """The ejection has ended: one request at a time tries it."""
    DOWN = "down"
    """Down by probes, or because no connection can be made."""


@dataclass(frozen=True)
class Transition:
    """A change of an endpoint's state. One log line each."""

    endpoint: Endpoint
    before: Health
    after: Health
    reason: str
    cause: Cause | None = None
    """The cause of the ejection, if it was ejected."""


class Event(Enum):
    """What may change an endpoint's state. The values are the labels in the diagram."""

    HEALTHY = "healthy"
    """Probes passed: the first of all, or `health.rise` in a row."""
    UNHEALTHY = "unhealthy"
    """Probes or connections failed: the first of all, or `health.fall` in a row."""
    FAILING = "failing"
    """Too many requests failed, or there is no progress, or its trial failed."""
    EJECTION_ENDED = "ejection ends"
    """Its ejection has lasted long enough."""
    RECOVERED = "recovered"
    """A trial request got a successful response; or two probes passed, where that is sufficient."""


TABLE: dict[tuple[Health, Event], Health] = {
    (Health.STARTING, Event.HEALTHY): Health.UP,
    (Health.STARTING, Event.UNHEALTHY): Health.DOWN,
    (Health.UP, Event.UNHEALTHY): Health.DOWN,
    (Health.UP, Event.FAILING): Health.EJECTED,
    (Health.EJECTED, Event.EJECTION_ENDED): Health.HALF_OPEN,
    (Health.EJECTED, Event.RECOVERED): Health.UP,
    (Health.EJECTED, Event.UNHEALTHY): Health.DOWN,
    (Health.HALF_OPEN, Event.RECOVERED): Health.UP,
    (Health.HALF_OPEN, Event.FAILING): Health.EJECTED,
    (Health.HALF_OPEN, Event.UNHEALTHY): Health.DOWN,
    (Health.DOWN, Event.HEALTHY): Health.UP,
}
"""The next state for each event; events that are missing here change nothing."""

HEALTHY_STATES = frozenset({Health.UP, Health.EJECTED, Health.HALF_OPEN})
"""Probes pass; the breaker may have ejected it."""


def next_state(state: Health, event: Event) -> Health:
    """The state after an event; the same one if the event changes nothing."""
    return TABLE.get((state, event), state)
