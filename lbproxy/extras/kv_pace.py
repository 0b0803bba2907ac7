# SPDX-License-Identifier: Apache-2.0
"""Shares the event loop between the readers of KV events and the requests: however much is published, all readers
together work for `TURN_S` at a time, and for `SHARE` of the time at most. What comes faster waits in the sockets, whose
limits make publishers drop messages; lost messages are noticed by their sequence numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

TURN_S: Final = 0.002
SHARE: Final = 0.2


class Pace:
    """One for all readers of a process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = asyncio.Lock()
        self._worked_s = 0.0
        """Since the last pause, less what was idle time since."""
        self._at = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Work on one message: one reader at a time, in the order in which they came."""
        async with self._lock:
            now = self._now()
            self._worked_s = max(0.0, self._worked_s - SHARE * (now - self._at))
            self._at = now
            try:
                yield
            finally:
                self._count()

    async def spend(self) -> None:
        """To be called often within a turn, between steps that take less than a millisecond: pauses when it is time."""
        if self._count() > TURN_S:
            await asyncio.sleep(self._worked_s * (1.0 / SHARE - 1.0))
            self._worked_s, self._at = 0.0, self._now()

    def _count(self) -> float:
        now = self._now()
        self._worked_s += now - self._at
        self._at = now
        return self._worked_s
