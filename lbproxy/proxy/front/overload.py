# SPDX-License-Identifier: Apache-2.0
"""Protection when lbproxy itself is the bottleneck: what is refused then, and when that ends.

There are three resources. *Memory*: of what the process may use (the cgroup's limit, the machine's, or a setting), from
85 % on connections are not kept alive, from 92 % on new requests get 503, and from 97 % on the largest request is
ended, one every quarter of a second, since being killed would end all. *Time*: if the event loop is more than 250 ms
late for a second, by its own work, new requests get 503 until it has kept up for a second. *Bodies*: held bodies are
counted, and one that would exceed their limit gets 503, unless others that still arrive make room for it (`arrivals`).
(The shares are those of Envoy's overload manager, as it is usually configured.)

The state is a few plain attributes that requests read; they change on the pulse's ticks. Running requests continue, and
the admin listener is not affected. Each state ends at a lower mark than it began at, so that it does not oscillate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from lbproxy.config.sections.clients import LimitSettings
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.front.arrivals import Arrivals, Holder

logger = logging.getLogger("lbproxy")

MEMORY_MARKS = (0.85, 0.92, 0.97)
MEMORY_MARGIN = 0.05
"""A state ends this far below its mark."""
MEMORY_EVERY_S = 0.25
RELIEVE_MARK = 0.5
"""From here on free memory is returned to the system regularly, so that there is room for the next burst of large
bodies."""
RELIEVE_EVERY_S = 5.0
RELIEVE_BYTES = 64 << 20
"""After a crowd that took so much it is returned in any case, once no body was held for `REST_S`: else the heap of the
next one would begin in the holes of this one."""
REST_S = 0.5
REST_EVERY_S = 30.0
"""Returning 250 MiB takes the allocator 40 ms, in which nobody gets memory."""
LATE_S, IN_TIME_S = 0.25, 0.125
LAG_FOR_S = 1.0
BUSY = 0.2
"""A loop that is late and used less than this share of the time did not get a CPU: another program or machine had it.
Refusing requests would not help, and soon all can be served."""
MAX_BODIES_BYTES = 512 << 20
BODIES_SHARE = 4
"""Held bodies may take this fraction of memory: what is made of one can be as large again, for a moment."""
LAG, MEMORY, BODIES = "lag", "memory", "bodies"


class Meter(Protocol):
    """The memory of this process."""

    def rss_bytes(self) -> int | None:
        """Memory in use; None = unknown."""
        return None

    def limit_bytes(self) -> int | None:
        """Memory that may be used; None = unknown."""
        return None


class Unmetered(Meter):
    """A meter without information."""


class Lag:
    """Whether the event loop is late for so long, by its own work, that new requests are refused."""

    def __init__(self) -> None:
        self.is_late = False
        self._late_since: float | None = None
        self._in_time_since: float | None = None

    def judge(self, lag_s: float, busy: float, *, now: float) -> bool:
        """Judge one observation. Returns whether `is_late` changed. A single long stop does not count: by the next tick
        it has ended.

        `busy`: the share of the time since the last observation in which this thread computed.
        """
        if lag_s > LATE_S and (busy >= BUSY or self.is_late):
            self._in_time_since = None
            if self._late_since is None:
                self._late_since = now
            elif not self.is_late and now - self._late_since >= LAG_FOR_S:
                self.is_late = True
                return True
        elif not self.is_late:
            self._late_since = None
        elif lag_s > IN_TIME_S or self._in_time_since is None:
            self._in_time_since = None if lag_s > IN_TIME_S else now
        elif now - self._in_time_since >= LAG_FOR_S:
            self.is_late, self._late_since, self._in_time_since = False, None, None
            return True
        return False


class Relief:
    """When free memory is returned to the system."""

    __slots__ = ("_at", "_growth", "_held_at", "_least_rss")

    def __init__(self) -> None:
        self._at = float("-inf")
        """The last time."""
        self._held_at = time.monotonic()
        """When a body was last seen to be held."""
        self._least_rss = float("inf")
        self._growth = 0.0
        """Both since the last time."""

    def is_due(self, rss: int, share: float, held_bytes: int, *, now: float) -> bool:
        """Judge one observation. `share`: of the memory that may be used."""
        self._least_rss = min(self._least_rss, rss)
        self._growth = max(self._growth, rss - self._least_rss)
        if held_bytes:
            self._held_at = now
        has_left = self._growth >= RELIEVE_BYTES and now - self._held_at >= REST_S
        if share >= RELIEVE_MARK:
            is_due = now - self._at >= RELIEVE_EVERY_S
        else:
            is_due = has_left and now - self._at >= REST_EVERY_S
        if is_due:
            self._at, self._least_rss, self._growth = now, rss, 0.0
        return is_due


class Overload:
    """The overload state: the pulse calls `tick`, and requests read it."""

    def __init__(self, limits: LimitSettings, meter: Meter, arrivals: Arrivals | None = None) -> None:
        self._meter = meter
        self.arrivals = Arrivals() if arrivals is None else arrivals
        """Held bodies that are not complete."""
        self.refuses: str | None = None
        """Why new requests are refused; None = they are not."""
        self.memory_is_short = False
        """Connections are not kept alive."""
        self.held_bytes = 0
        """Bytes of all held bodies."""
        self.refused = {LAG: 0, MEMORY: 0, BODIES: 0}
        """Refused requests, by reason."""
        self.ended = 0
        """Requests that were ended for their memory."""
        self.rss_bytes: int | None = None
        self.end_largest: Callable[[], bool] = lambda: False
        """Ends the request that holds most memory; False if there is none."""
        self.relieve: Callable[[], None] = lambda: None
        """Returns free memory to the system: see `Relief`."""
        self._level = 0
        """How many of the marks memory use exceeds."""
        self._read_at = float("-inf")
        self._relief = Relief()
        self._lag = Lag()
        self._ticked_at, self._computed_s = time.monotonic(), time.thread_time()
        self.reconfigure(limits)

    def reconfigure(self, limits: LimitSettings) -> None:
        self.limit_bytes = limits.memory or self._meter.limit_bytes()
        """How much memory may be used."""
        self.max_held_bytes = limits.buffered_bodies or default_bodies(self.limit_bytes)

    # Requests

    def refusal(self) -> LbError:
        """The error for a new request while `refuses`."""
        assert self.refuses is not None
        self.refused[self.refuses] += 1
        return LbError(Outcome.OVERLOADED)

    def hold(self, holder: Holder, size: int, claim: int = 0) -> None:
        """Count more bytes of a held body, or less. `claim`: how many it will hold, if that is known to be more. Raises
        LbError OVERLOADED if there is no room for them.
        """
        fits = holder.held_bytes + size <= self.max_held_bytes
        while size > 0 and self.held_bytes + size > self.max_held_bytes:
            self.refused[BODIES] += 1
            loser = self.arrivals.make_room(holder, claim or size) if fits else None
            if loser is None:
                self.arrivals.end(holder)
                raise LbError(Outcome.OVERLOADED)
            self.release(loser)
        self.held_bytes += size
        holder.held_bytes += size

    def release(self, holder: Holder) -> None:
        """Release the holder's body. A repeated call has no effect."""
        self.arrivals.end(holder)
        self.held_bytes -= holder.held_bytes
        holder.held_bytes = 0

    # Ticks

    def tick(self, lag_s: float) -> None:
        """Note how late the event loop is. Called about every 50 ms; reads memory at every fifth call."""
        now, computed_s = time.monotonic(), time.thread_time()
        self.judge_lag(lag_s, (computed_s - self._computed_s) / max(0.001, now - self._ticked_at), now=now)
        self._ticked_at, self._computed_s = now, computed_s
        if now >= self._read_at:
            self._read_at = now + MEMORY_EVERY_S
            self.judge_memory(now=now)

    def judge_lag(self, lag_s: float, busy: float, *, now: float) -> None:
        """Judge one observation: see `Lag`."""
        if self._lag.judge(lag_s, busy, now=now):
            if self._lag.is_late:
                self._changed("new requests are refused: the event loop is %.2f s late", lag_s, began=True)
            else:
                self._changed("the event loop keeps up again", began=False)

    def judge_memory(self, *, now: float) -> None:
        """Read the memory in use, and act on it."""
        rss = self.rss_bytes = self._meter.rss_bytes()
        if rss is None or self.limit_bytes is None:
            return
        share, level = rss / self.limit_bytes, self._level
        while level < len(MEMORY_MARKS) and share >= MEMORY_MARKS[level]:
            level += 1
        while level and share < MEMORY_MARKS[level - 1] - MEMORY_MARGIN:
            level -= 1
        if level != self._level:
            self._level, before = level, self._level
            self._changed("%.0f %% of memory are in use: %s", 100 * share, _CONSEQUENCES[level], began=level > before)
        if share >= MEMORY_MARKS[-1] and self.end_largest():
            self.ended += 1
        if self._relief.is_due(rss, share, self.held_bytes, now=now):
            self.relieve()

    def _changed(self, text: str, *arguments: object, began: bool) -> None:
        self.memory_is_short = self._level > 0
        self.refuses = MEMORY if self._level > 1 else LAG if self._lag.is_late else None
        logger.log(logging.WARNING if began else logging.INFO, text, *arguments, extra={"event": "overload"})


def default_bodies(memory: int | None) -> int:
    """The limit of the bytes of held bodies with this limit of memory, unless the settings have one."""
    return MAX_BODIES_BYTES if memory is None else min(MAX_BODIES_BYTES, memory // BODIES_SHARE)


_CONSEQUENCES = (
    "all is well again",
    "connections are not kept alive",
    "new requests are refused",
    "the largest requests are ended",
)
