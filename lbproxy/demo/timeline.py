# SPDX-License-Identifier: Apache-2.0
"""What happens to a fleet, and when: a list of timed steps. Values only; `fleet.py` carries them out.

A step opens a phase, which lasts until the next one. Its acts run for all its servers at the same time, one after the
other for each server. Time counts from when the traffic began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Verb(Enum):
    """What can be done to a server."""

    SLOW = "slow"
    """It computes `SLOWNESS` times as slowly."""
    WELL = "well"
    """As fast as ever again."""
    KILL = "kill"
    """SIGKILL: the kernel closes its connections, nobody says goodbye."""
    START = "start"
    """Start it again by the same command, with an empty cache. Done when it answers."""
    DRAIN = "drain"
    """It gets no new requests. Done when its last one has ended."""
    RESTART = "restart"
    """SIGTERM, and `START`: what a deploy does."""
    UNDRAIN = "undrain"
    """It takes requests again."""


SLOWNESS = 5


@dataclass(frozen=True, slots=True)
class Act:
    """One thing done to some servers."""

    verb: Verb
    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """What begins at a time."""

    at_s: float
    phase: str
    """A few words, for a table's row."""
    says: str
    """One sentence for whoever watches."""
    acts: tuple[Act, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps in order of time; the first at 0."""

    steps: tuple[TimelineStep, ...]
    ends_s: float

    def scaled(self, ends_s: float) -> Timeline:
        """The same in another time. What servers and lbproxy take for each thing does not scale."""
        factor = ends_s / self.ends_s
        return Timeline(tuple(replace(step, at_s=step.at_s * factor) for step in self.steps), ends_s)

    def at(self, elapsed_s: float) -> int:
        """The number of the step whose phase it is."""
        return max(number for number, step in enumerate(self.steps) if step.at_s <= max(0.0, elapsed_s))

    def phase(self, number: int) -> tuple[float, float]:
        """From when until when."""
        after = self.steps[number + 1].at_s if number + 1 < len(self.steps) else self.ends_s
        return self.steps[number].at_s, after


def names(count: int) -> list[str]:
    """What the servers are called."""
    return [f"server-{number}" for number in range(1, count + 1)]


def bad_night(servers: Sequence[str]) -> Timeline:
    """Two and a half minutes in which a server slows down, another dies and comes back, and a deploy takes a third of
    the fleet: two of six. At least six servers.
    """
    slow, dead, third = servers[2], servers[4], tuple(servers[: len(servers) // 3])
    drained = f"{', '.join(third[:-1])} and {third[-1]}"
    deploy = tuple(Act(verb, third) for verb in (Verb.DRAIN, Verb.RESTART, Verb.UNDRAIN))
    return Timeline(
        (
            TimelineStep(0.0, "all is well", "Chats, agents, LoRA adapters: each request goes where it costs least."),
            TimelineStep(
                20.0,
                f"{slow} is slow",
                f"{slow} is {SLOWNESS}x slower, while its /health is 200: watch its share fall.",
                (Act(Verb.SLOW, (slow,)),),
            ),
            TimelineStep(
                50.0,
                f"{dead} is dead",
                f"kill -9 {dead}. Its running streams break off; all other requests succeed.",
                (Act(Verb.KILL, (dead,)),),
            ),
            TimelineStep(
                80.0,
                "both come back",
                f"{dead} is back with an empty cache: slow start. {slow} is fast again.",
                (Act(Verb.WELL, (slow,)), Act(Verb.START, (dead,))),
            ),
            TimelineStep(
                110.0,
                "a deploy",
                f"A deployment: {drained} are drained, restarted, undrained.",
                deploy,
            ),
        ),
        150.0,
    )
