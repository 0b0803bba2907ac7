"""Time limits for others that do not run while we ourselves stand still.

A process that was stopped, or whose loop was blocked, finds every limit over at once, though the answers lie unread in
its sockets; to call the endpoints late would eject a whole healthy fleet. So a limit that ends prolongs itself by as
long as the loop stood still while it ran: everybody gets the full time in which somebody listened, no more. (A bare
asyncio timer will not do: uvloop runs timers before it reads, and asyncio's time-out beats a result that has come.)

The owner is the connection pool, whose sweep is the beat by which standing still is noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STALL_S = 0.2
"""A beat that comes later than this was no mere jitter."""


class AwakeClock:
    """How long we stood still. To be told a `beat` every `beat_s` seconds."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._stalled_s = 0.0
        self._due_at = time.monotonic() + beat_s

    def beat(self) -> float:
        """Returns how many seconds we stood still since the last one; mostly 0."""
        now = time.monotonic()
        stalled_s = self._overdue_s(now)
        self._stalled_s += stalled_s
        self._due_at = now + self._beat_s
        return stalled_s

    def stalled_s(self) -> float:
        """Seconds that we ever stood still, the time since an overdue beat included. Never falls."""
        return self._stalled_s + self._overdue_s(time.monotonic())

    def _overdue_s(self, now: float) -> float:
        late_s = now - self._due_at
        return late_s if late_s > STALL_S else 0.0

    @asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncIterator[None]:
        """Like `asyncio.timeout`, raising TimeoutError, but for what is said above."""
        loop = asyncio.get_running_loop()
        stalled_before_s = self.stalled_s()
        ends_at = time.monotonic() + limit_s

        timer: asyncio.TimerHandle | None = None

        def ended() -> None:
            nonlocal timer
            left_s = ends_at + self.stalled_s() - stalled_before_s - time.monotonic()
            if left_s > 0.0:
                timer = loop.call_later(left_s, ended)
            else:
                timeout.reschedule(loop.time())

        async with asyncio.timeout(None) as timeout:
            timer = loop.call_later(limit_s, ended)
            try:
                yield
            finally:
                timer.cancel()
