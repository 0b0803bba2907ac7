# SPDX-License-Identifier: Apache-2.0
"""The state machine of a model server that may sleep: its phase after each event.

    unknown ──▶ awake ──▶ draining ──▶ falling_asleep ──▶ asleep ──▶ waking ──▶ awake
                                                   off ──▶ starting ──▶ unknown

It stands beside health: a server that is down has the phase `unknown`, or `off` if a webhook can start it. What the
engine reports overrules what is believed, except while a call that changes it is under way: then only the end of the
call counts, or a report that the wanted state is reached.

Invariants: an event that the table does not have for a phase changes nothing. Requests go to `awake` alone. Every
phase but `awake`, `asleep` and `off` ends by itself: by a report, by the end of a call, or by time.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """The values are what is shown."""

    UNKNOWN = "unknown"
    """It has not been asked yet, or it is down."""
    AWAKE = "awake"
    DRAINING = "draining"
    """It gets no new requests; as soon as it has none, it is put to sleep."""
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    OFF = "off"
    """It is not there, and a webhook can start it."""
    STARTING = "starting"
    """The webhook was called."""


class SleepEvent(Enum):
    """What changes a phase."""

    SAID_AWAKE = "said awake"
    SAID_ASLEEP = "said asleep"
    SAID_NOTHING = "cannot say"
    """It has no sleep mode, or none that can be read; or it has not responded for too long."""
    SLEEP = "sleep"
    """It is to be put to sleep."""
    KEEP = "keep"
    """It is not to be put to sleep any more."""
    DRAINED = "drained"
    SLEPT = "slept"
    SLEEP_FAILED = "sleep failed"
    WAKE = "wake"
    """The call that wakes it is made."""
    WOKE = "woke"
    WAKE_FAILED = "wake failed"
    GONE = "gone"
    """It is down, and no webhook can start it."""
    GONE_STARTABLE = "gone, startable"
    START = "start"
    START_FAILED = "start failed"
    CAME_UP = "came up"
    """It is reachable again."""


TABLE: dict[tuple[Phase, SleepEvent], Phase] = {
    (Phase.UNKNOWN, SleepEvent.SAID_AWAKE): Phase.AWAKE,
    (Phase.UNKNOWN, SleepEvent.SAID_ASLEEP): Phase.ASLEEP,
    (Phase.UNKNOWN, SleepEvent.SAID_NOTHING): Phase.AWAKE,
    (Phase.AWAKE, SleepEvent.SAID_ASLEEP): Phase.ASLEEP,
    (Phase.AWAKE, SleepEvent.SLEEP): Phase.DRAINING,
    (Phase.DRAINING, SleepEvent.KEEP): Phase.AWAKE,
    (Phase.DRAINING, SleepEvent.DRAINED): Phase.FALLING_ASLEEP,
    (Phase.DRAINING, SleepEvent.SAID_ASLEEP): Phase.ASLEEP,
    (Phase.FALLING_ASLEEP, SleepEvent.SLEPT): Phase.ASLEEP,
    (Phase.FALLING_ASLEEP, SleepEvent.SLEEP_FAILED): Phase.UNKNOWN,
    (Phase.ASLEEP, SleepEvent.SAID_AWAKE): Phase.AWAKE,
    (Phase.ASLEEP, SleepEvent.WAKE): Phase.WAKING,
    (Phase.WAKING, SleepEvent.WOKE): Phase.AWAKE,
    (Phase.WAKING, SleepEvent.SAID_AWAKE): Phase.AWAKE,
    (Phase.WAKING, SleepEvent.WAKE_FAILED): Phase.ASLEEP,
    (Phase.OFF, SleepEvent.START): Phase.STARTING,
    (Phase.OFF, SleepEvent.CAME_UP): Phase.UNKNOWN,
    (Phase.STARTING, SleepEvent.START_FAILED): Phase.OFF,
    (Phase.STARTING, SleepEvent.CAME_UP): Phase.UNKNOWN,
    **{
        (phase, SleepEvent.GONE): Phase.UNKNOWN
        for phase in Phase
        if phase not in {Phase.UNKNOWN, Phase.OFF, Phase.STARTING}
    },
    **{(phase, SleepEvent.GONE_STARTABLE): Phase.OFF for phase in Phase if phase not in {Phase.OFF, Phase.STARTING}},
}
"""The next phase for each event; events that are missing here change nothing."""


class SleepTransition(NamedTuple):
    """A change of phase. One log line each."""

    endpoint: str
    """The server's name."""
    before: Phase
    after: Phase
    reason: str
    lasted_s: float
    """How long the phase before lasted."""
    model: str | None = None
    """The model that changed it, of an endpoint that loads models on demand."""


def next_phase(phase: Phase, event: SleepEvent) -> Phase:
    """The phase after an event; the same one if the event changes nothing."""
    return TABLE.get((phase, event), phase)
