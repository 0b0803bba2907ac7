"""The loops that look after the endpoints: started when an endpoint joins the set, cancelled when it leaves.

Every loop is a task of the group it is given, which therefore outlives it and awaits it, also after its cancellation.

Those of many endpoints that join together do not all begin in one turn of the event loop, which requests share: a
thousand addresses of a name, dialled at once, would hold it up for 0.15 s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from lbproxy.core.endpoints import EndpointChanges
from lbproxy.core.types import Endpoint, EndpointUid
from lbproxy.runtime import supervise

Loops: TypeAlias = Iterable[tuple[str, Callable[[], Awaitable[None]]]]
"""Loops for `supervise`, each after what it is called in the log."""

AT_ONCE = 32
"""Endpoints whose loops begin in the same turn: dialling so many takes about 5 ms."""
APART_S = 0.02


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
        for endpoint in changes.changed:
            self._cancel(endpoint.uid)
        self._start([*changes.added, *changes.changed])

    def restart(self) -> None:
        """Make all loops anew: `loops_of` makes others now."""
        endpoints = list(self._watched.values())
        for endpoint in endpoints:
            self._cancel(endpoint.uid)
        self._start(endpoints)

    def _start(self, endpoints: Sequence[Endpoint]) -> None:
        for number, endpoint in enumerate(endpoints):
            delay_s = number // AT_ONCE * APART_S
            self._watched[endpoint.uid] = endpoint
            self._tasks[endpoint.uid] = [
                self._group.create_task(self._watch(name, run, delay_s)) for name, run in self._loops_of(endpoint)
            ]

    async def _watch(self, name: str, run: Callable[[], Awaitable[None]], delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        await supervise(name, run, self._rng)

    def close(self) -> None:
        """Watch nothing any more."""
        for uid in list(self._tasks):
            self._cancel(uid)

    def _cancel(self, uid: EndpointUid) -> None:
        del self._watched[uid]
        for task in self._tasks.pop(uid):
            task.cancel()
