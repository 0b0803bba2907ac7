# SPDX-License-Identifier: Apache-2.0
"""The process that will be the balancer process if the one that works dies.

Python and the imports take most of what a balancer process needs to begin, and all that time workers place requests
alone, each without knowing of the others' requests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from lbproxy.processes.control import Child

logger = logging.getLogger("lbproxy")


class Standby:
    """A child that has imported what it needs and waits for `Child.begin`, or None yet."""

    def __init__(self, launch: Callable[[], Awaitable[Child]]) -> None:
        """`launch` starts such a child. Raises OSError."""
        self._launch = launch
        self._child: Child | None = None

    async def refresh(self) -> None:
        """Have one, if the machine can."""
        if self._child is not None and self._child.is_running:
            return
        self._child = None
        try:
            self._child = await self._launch()
        except OSError as error:
            logger.warning("no standby of the balancer process: %s", error, extra={"event": "workers"})

    def take(self) -> Child | None:
        """It is the balancer process from now on."""
        child, self._child = self._child, None
        return child if child is not None and child.is_running else None

    def kill(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
