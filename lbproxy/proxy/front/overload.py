"""When we ourselves are the bottleneck: what is then refused, and when that ends.

Three things can run out. *Memory*: of what we may have (the cgroup's limit, the machine's, or a setting), from 85 % on
connections are not kept alive, from 92 % on new requests get 503, and from 97 % on the largest request is ended, one
every quarter of a second: being killed would end all. *Time*: if the event loop is more than 250 ms late for a second,
by our own doing, new requests get 503 until it has kept up for a second. *Bodies*: those that are held are
counted, and one that would exceed their limit gets 503. (The shares are those of Envoy's overload manager, as it is
usually configured.)

The state is a few plain attributes that a request looks at; they change on the pulse's ticks. What began goes on, and
the admin listener is not asked. Each state ends at a lower mark than it began at, so that it does not flutter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from lbproxy.config.sections.clients import LimitSettings
from lbproxy.core.requests.outcome import LbError, Outcome

logger = logging.getLogger("lbproxy")

MEMORY_MARKS = (0.85, 0.92, 0.97)
MEMORY_MARGIN = 0.05
"""A state ends this far below its mark."""
MEMORY_EVERY_S = 0.25
RELIEVE_MARK = 0.5
"""From here on what is free is given back now and then: the next crowd of large bodies would not fit beside it."""
RELIEVE_EVERY_S = 5.0
LATE_S, IN_TIME_S = 0.25, 0.125
LAG_FOR_S = 1.0
BUSY = 0.2
"""Who is late and computed less than so much of the time was not given a CPU: another program or machine had it. To
refuse would not bring it back, and a moment later all who wait can be served."""
MAX_BODIES_BYTES = 512 << 20
BODIES_SHARE = 4
"""The bodies that are held may take one such part of memory: each is held two or three times while it is read."""
LAG, MEMORY, BODIES = "lag", "memory", "bodies"


class Meter(Protocol):
    """This process's memory."""

    def rss_bytes(self) -> int | None:
        """What we have; None = unknown."""
        ...

    def limit_bytes(self) -> int | None:
        """What we may have; None = unknown."""
        ...


class Unmetered:
    """Where nothing is known of memory."""

    def rss_bytes(self) -> int | None:
        """Unknown."""
        return None

    def limit_bytes(self) -> int | None:
        """Unknown."""
        return None


class Holder(Protocol):
    """A request that holds a body."""

    held_bytes: int


class Overload:
    """Who listens to the pulse by `tick`, and is asked by requests."""

    def __init__(self, limits: LimitSettings, meter: Meter) -> None:
        self._meter = meter
        self.refuses: str | None = None
        """Why new requests are refused; None = they are not."""
        self.memory_is_short = False
        """Connections are not kept alive."""
        self.held_bytes = 0
        """Of all bodies that are held."""
        self.refused = {LAG: 0, MEMORY: 0, BODIES: 0}
        """Requests, by why."""
        self.ended = 0
        """Requests that were ended for their memory."""
        self.rss_bytes: int | None = None
        self.end_largest: Callable[[], bool] = lambda: False
        """Ends the request that holds most; False if there is none."""
        self.relieve: Callable[[], None] = lambda: None
        """Gives back memory that is free but held. Called now and then while there is little."""
        self._level = 0
        """How many of the marks memory is above of."""
        self._read_at = self._relieve_at = float("-inf")
        self._lagging = False
        self._late_since: float | None = None
        self._ticked_at, self._computed_s = time.monotonic(), time.thread_time()
        self._in_time_since: float | None = None
        self.reconfigure(limits)

    def reconfigure(self, limits: LimitSettings) -> None:
        """Other limits, from now on."""
        self.limit_bytes = limits.memory or self._meter.limit_bytes()
        """Of memory."""
        share = MAX_BODIES_BYTES if self.limit_bytes is None else self.limit_bytes // BODIES_SHARE
        self.max_held_bytes = limits.buffered_bodies or min(MAX_BODIES_BYTES, share)

    # Requests

    def refusal(self) -> LbError:
        """What a new request is told while `refuses`."""
        assert self.refuses is not None
        self.refused[self.refuses] += 1
        return LbError(Outcome.OVERLOADED)

    def hold(self, holder: Holder, size: int) -> None:
        """So much more of a body is held. Raises LbError OVERLOADED if there is no room for it."""
        if self.held_bytes + size > self.max_held_bytes:
            self.refused[BODIES] += 1
            raise LbError(Outcome.OVERLOADED)
        self.held_bytes += size
        holder.held_bytes += size

    def release(self, holder: Holder) -> None:
        """Nothing of its body is held any more. Said again, it changes nothing."""
        self.held_bytes -= holder.held_bytes
        holder.held_bytes = 0

    # Ticks

    def tick(self, lag_s: float) -> None:
        """The event loop was so late. Called about every 50 ms; reads memory at every fifth call."""
        now, computed_s = time.monotonic(), time.thread_time()
        self.judge_lag(lag_s, (computed_s - self._computed_s) / max(0.001, now - self._ticked_at), now=now)
        self._ticked_at, self._computed_s = now, computed_s
        if now >= self._read_at:
            self._read_at = now + MEMORY_EVERY_S
            self.judge_memory(now=now)

    def judge_lag(self, lag_s: float, busy: float, *, now: float) -> None:
        """One observation. A single long standstill is none: by the next tick it is over.

        `busy`: the share of the time since the last one in which our thread computed.
        """
        if lag_s > LATE_S and (busy >= BUSY or self._lagging):
            self._in_time_since = None
            if self._late_since is None:
                self._late_since = now
            elif not self._lagging and now - self._late_since >= LAG_FOR_S:
                self._lagging = True
                self._changed("new requests are refused: the event loop is %.2f s late", lag_s, began=True)
        elif not self._lagging:
            self._late_since = None
        elif lag_s > IN_TIME_S or self._in_time_since is None:
            self._in_time_since = None if lag_s > IN_TIME_S else now
        elif now - self._in_time_since >= LAG_FOR_S:
            self._lagging, self._late_since, self._in_time_since = False, None, None
            self._changed("the event loop keeps up again", began=False)

    def judge_memory(self, *, now: float) -> None:
        """Read it, and act on it."""
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
        if share >= RELIEVE_MARK and now >= self._relieve_at:
            self._relieve_at = now + RELIEVE_EVERY_S
            self.relieve()

    def _changed(self, text: str, *arguments: object, began: bool) -> None:
        self.memory_is_short = self._level > 0
        self.refuses = MEMORY if self._level > 1 else LAG if self._lagging else None
        logger.log(logging.WARNING if began else logging.INFO, text, *arguments, extra={"event": "overload"})


_CONSEQUENCES = (
    "all is well again",
    "connections are not kept alive",
    "new requests are refused",
    "the largest requests are ended",
)
