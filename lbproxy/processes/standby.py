# SPDX-License-Identifier: Apache-2.0
"""The process that takes the place of the next one that dies.

Python and the imports take most of what a process needs to begin. All that time, if it is the balancer process, workers
place requests without knowing of each other's; if it is a worker, the others have its share.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence

from lbproxy.processes.control import STANDBY, Child, ToSupervisor

logger = logging.getLogger("lbproxy")


class Standby:
    """A child that waits for `Child.begin`, or none yet."""

    def __init__(self, received: Callable[[ToSupervisor], None]) -> None:
        """`received`: see Child."""
        self._received = received
        self._child: Child | None = None
        self._is_over = False

    async def refresh(self, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Have one, if the machine can."""
        if self._child is not None and self._child.is_running:
            return
        child = Child(self._received)
        try:
            await child.launch(STANDBY, sockets)
        except OSError as error:
            logger.warning("no standby: %s", error, extra={"event": "workers"})
        self._child = child
        if self._is_over:
            child.kill()

    def take(self) -> Child | None:
        """It has another place from now on."""
        child, self._child = self._child, None
        return child if child is not None and child.is_running else None

    def end(self) -> None:
        """End it, and have no other."""
        self._is_over = True
        if self._child is not None:
            self._child.kill()
