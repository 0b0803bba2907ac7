"""The loops that look after the endpoints: started when an endpoint joins the set, cancelled when it leaves.

Every loop is a task of the group it is given, which therefore outlives it and awaits it, also after its cancellation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from lbproxy.core.endpoints import EndpointChanges
from lbproxy.core.types import Endpoint, EndpointUid
from lbproxy.runtime import supervise

Loops: TypeAlias = Iterable[tuple[str, Callable[[], Awaitable[None]]]]
"""Loops for `supervise`, each after what it is called in the log."""


class Watches:
    """One set of loops for each endpoint."""

    def __init__(self, tasks: asyncio.TaskGroup, loops_of: Callable[[Endpoint], Loops], rng: random.Random) -> None:
        self._group = tasks
        self._loops_of = loops_of
        self._rng = rng
        self._tasks: dict[EndpointUid, list[asyncio.Task[None]]] = {}
        self._watched: dict[EndpointUid, Endpoint] = {}

    def follow(self, changes: EndpointChanges) -> None:
        """Make it so that exactly the members of the set are watched; to be told every change, in order."""
        for endpoint in changes.removed:
            self._cancel(endpoint.uid)
        for endpoint in changes.added:
            self._start(endpoint)
        for endpoint in changes.changed:
            self._cancel(endpoint.uid)
            self._start(endpoint)

    def restart(self) -> None:
        """Make all loops anew: `loops_of` makes others now."""
        for endpoint in list(self._watched.values()):
            self._cancel(endpoint.uid)
            self._start(endpoint)

    def _start(self, endpoint: Endpoint) -> None:
        self._watched[endpoint.uid] = endpoint
        self._tasks[endpoint.uid] = [
            self._group.create_task(supervise(name, run, self._rng)) for name, run in self._loops_of(endpoint)
        ]

    def close(self) -> None:
        """Watch nothing any more."""
        for uid in list(self._tasks):
            self._cancel(uid)

    def _cancel(self, uid: EndpointUid) -> None:
        del self._watched[uid]
        for task in self._tasks.pop(uid):
            task.cancel()
