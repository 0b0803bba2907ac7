# SPDX-License-Identifier: Apache-2.0
"""Work that others choose the amount of, and that is done in later turns of the loop: all of it together takes `TURN_S`
of a turn, and the loop serves others in between.

A chunk of one byte costs as much as one of a thousand, and a read has room for 20,000 of them; a frame of a WebSocket
costs more; a large body is read for tens of milliseconds. A portion of each, done in each turn, would be bounded for
one connection, not for two hundred. So those who have more than one portion to do wait here, in one queue. Nothing more
is read from a connection that waits: at most one read is held for each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

TURN_S: Final = 0.001
"""How much of a turn of the loop is used, and one portion more: a request takes about ten turns."""


class Walker(Protocol):
    """What has work to do."""

    def walk_on(self) -> None:
        """Do a portion, of 1 ms at most; if something is left, `add` it again."""


class Backlog:
    """Those who have work to do, in the order in which they are served."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._due: dict[Walker, None] = {}
        self._is_scheduled = False

    def add(self, walker: Walker) -> None:
        """Serve it too, after those that wait already."""
        self._due[walker] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._due and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        ends_at = self._clock() + TURN_S
        try:
            while self._due:
                walker = next(iter(self._due))
                del self._due[walker]
                walker.walk_on()
                if self._clock() >= ends_at:
                    break
        finally:
            self._is_scheduled = False
            self._schedule()
