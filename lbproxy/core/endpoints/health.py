"""The state machine of an endpoint's health: what state it is in after what happened to it.

Two words move it. That of *health* goes by what probes and connections say, and knows up and down. That of the
*breaker* goes by what became of requests (see `core.endpoints.breaker` and `core.endpoints.progress`): it ejects an
endpoint that fails them though its health path is fine, for a time, and then lets one request at a time try it. Both
move the one state, so that an endpoint has one standing, one log line for each change, and no two mechanisms that
disagree. `core.endpoints.judge` says when; docs/failures.md draws this table.

Invariants: an event that the table does not have for a state changes nothing; a word of health outweighs one of the
breaker (what is down is not ejected); every state but `UP` can be left without a request (by probes, or by time).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import Endpoint


class Health(Enum):
    """The standing of an endpoint. `UP` endpoints get requests, the others in need only."""

    STARTING = "starting"
    """Not judged yet."""
    UP = "up"
    EJECTED = "ejected"
    """By the breaker, for a time."""
    HALF_OPEN = "half_open"
    """That time is over: one request at a time tries it."""
    DOWN = "down"
    """By probes, or because nobody can connect to it."""


@dataclass(frozen=True)
class Transition:
    """An endpoint changed its standing. One log line each."""

    endpoint: Endpoint
    before: Health
    after: Health
    reason: str
    cause: Cause | None = None
    """Why it was ejected, if it was."""


class Event(Enum):
    """What may change an endpoint's state. The values are the words of the drawing."""

    HEALTHY = "healthy"
    """Probed well: the first time of all, or `health.rise` times in a row."""
    UNHEALTHY = "unhealthy"
    """Probed badly, or not connected to: the first time of all, or `health.fall` times in a row."""
    FAILING = "failing"
    """It failed too many requests, or makes no progress, or failed its trial."""
    EJECTION_ENDED = "ejection ends"
    """Its ejection has lasted long enough."""
    RECOVERED = "recovered"
    """A trial request got a good response, or, where that proves something, two probes did."""


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
"""What each event makes of each state; what is not here changes nothing."""

HEALTHY_STATES = frozenset({Health.UP, Health.EJECTED, Health.HALF_OPEN})
"""Health has nothing against the endpoint; the breaker may."""


def next_state(state: Health, event: Event) -> Health:
    """The state that follows; the same one if the event changes nothing."""
    return TABLE.get((state, event), state)
