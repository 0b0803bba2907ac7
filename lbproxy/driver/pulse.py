# SPDX-License-Identifier: Apache-2.0
"""Our own event loop's pulse: how late it is, and whether it stood still.

One owner of one fact, which everybody who waits for others needs: *was it us?* When the loop stands still for two
seconds (a large body, a stopped process, a machine that was asleep), timers of those two seconds fire before the
answers that came in the meantime are read; an endpoint that was judged by such a time-out would be blamed for our own
sleep. So a limit for others does not run while we stand still: `timeout` and `stalled_s` prolong it by as long, so that
everybody gets the full time in which somebody listened, no more. Who cannot prolong asks `stood_still_since` the moment
at which it began to wait, and if so says nothing, and waits again.

A ticker measures it: it should wake every `TICK_S`, and how late it does is the lag. Between ticks the clock itself is
asked, so that the answer is right also in the turn in which the loop wakes, whichever timer comes first. Invariants:

- It never blames: it only says that a measurement made across that time is worth nothing.
- A tick costs a few microseconds, 20 times a second, and a request nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from math import inf
from types import TracebackType

TICK_S = 0.05
STILL_S = 0.1
"""A tick that is later than this means a standstill: below it, what is overdue is overdue."""


class Pulse:
    """Ticks once it is started. Belongs to the running loop; before the start it knows of no standstill."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = inf
        self._still_until = -inf
        self._stalled_s = 0.0
        self._listeners: list[Callable[[float], None]] = []
        self.lag_s = 0.0
        """How late the last tick was."""

    def listen(self, listener: Callable[[float], None]) -> None:
        """Have `listener` called with the lag, in seconds, at each tick. It must be quick and must not raise."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._arm()

    def close(self) -> None:
        """Stop ticking. Legal also if it was never started."""
        self._due_at = inf
        if self._timer is not None:
            self._timer.cancel()

    def stood_still_since(self, began_at: float) -> bool:
        """Whether our loop stood still at some moment after `began_at` (time.monotonic), or does until this call.

        If so, what is overdue now may be our own doing: its bytes may lie unread in the kernel.
        """
        return self._still_until > began_at or time.monotonic() - self._due_at > STILL_S

    def stalled_s(self) -> float:
        """Seconds that we ever stood still, the time since an overdue tick included. Never falls."""
        late_s = time.monotonic() - self._due_at
        return self._stalled_s + (late_s if late_s > STILL_S else 0.0)

    def timeout(self, limit_s: float) -> AbstractAsyncContextManager[None]:
        """Like `asyncio.timeout`, raising TimeoutError, but the time in which we stood still does not count.

        A bare asyncio timer will not do: uvloop runs timers before it reads, and asyncio's time-out beats a result that
        has come.
        """
        return _Timeout(self, self._loop, limit_s)

    def _arm(self) -> None:
        self._due_at = time.monotonic() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self.lag_s = max(0.0, now - self._due_at)
        if self.lag_s > STILL_S:
            self._still_until = now
            self._stalled_s += self.lag_s
        self._arm()
        for listener in self._listeners:
            listener(self.lag_s)


class _Timeout(AbstractAsyncContextManager[None]):
    """See `Pulse.timeout`. No reference cycle is left when it ends: each probe uses three, and what only the garbage
    collector frees costs the event loop a pause.
    """

    __slots__ = ("_ends_at", "_limit_s", "_loop", "_pulse", "_stalled_before_s", "_timeout", "_timer")

    def __init__(self, pulse: Pulse, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._pulse, self._loop, self._limit_s = pulse, loop, limit_s
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._stalled_before_s = self._pulse.stalled_s()
        self._ends_at = time.monotonic() + self._limit_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._limit_s, self._ended)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._timeout.__aexit__(kind, error, traceback)

    def _ended(self) -> None:
        left_s = self._ends_at + self._pulse.stalled_s() - self._stalled_before_s - time.monotonic()
        if left_s > 0.0:
            self._timer = self._loop.call_later(left_s, self._ended)
        else:
            self._timer = None
            self._timeout.reschedule(self._loop.time())
