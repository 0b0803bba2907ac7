# SPDX-License-Identifier: Apache-2.0
"""The process that takes the place of the next one that dies.

Python and the imports take most of what a process needs to begin. While the balancer process is missing, workers place
requests without knowing of each other's; while a worker is missing, the others have its share.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lbproxy.processes.control import STANDBY, Child, ToSupervisor

logger = logging.getLogger("lbproxy")

BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
"""After a standby that could not be started, or ended by itself: nobody misses it, and a start takes CPU."""


class Standby:
    """A child that waits for `Child.begin`, or none yet."""

    def __init__(self, received: Callable[[ToSupervisor], None]) -> None:
        """`received`: see Child."""
        self._received = received
        self._child: Child | None = None
        self._has_ended = False
        self._backoff_s = BACKOFF_FIRST_S
        self._due_at = 0.0

    async def refresh(self, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Start one, unless there is one, or one failed a moment ago."""
        child, now = self._child, asyncio.get_running_loop().time()
        if self._has_ended or now < self._due_at or (child is not None and child.is_alive):
            return
        if child is not None:
            self._failed("it ended by itself", now)
            return
        child = Child(STANDBY, self._received)
        try:
            await child.launch(STANDBY, sockets)
        except OSError as error:
            self._failed(str(error), now)
            return
        self._child = child
        self._kill_if_over()

    def _failed(self, why: str, now: float) -> None:
        extra = {"event": "workers"}
        logger.warning("no standby: %s; another one starts in %.2g s", why, self._backoff_s, extra=extra)
        self._child = None
        self._due_at = now + self._backoff_s
        self._backoff_s = min(BACKOFF_MAX_S, 2.0 * self._backoff_s)

    def take(self) -> Child | None:
        """Give it away, if it is alive: it takes another place."""
        child = self._child
        if child is None or not child.is_alive:
            return None
        self._child, self._backoff_s = None, BACKOFF_FIRST_S
        return child

    def end(self) -> None:
        """End it, and start no other."""
        self._has_ended = True
        self._kill_if_over()

    def _kill_if_over(self) -> None:
        if self._has_ended and self._child is not None:
            self._child.kill()
