# SPDX-License-Identifier: Apache-2.0
"""The loops that look after the endpoints: started when an endpoint joins the set, cancelled when it leaves.

Every loop is a task of the group it is given, which therefore outlives it and awaits it, also after its cancellation.

Those of many endpoints that join or leave together do not all begin or end in one turn of the event loop, which
requests share: a thousand addresses of a name, dialled at once, would hold it up for 0.15 s.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from lbproxy.control.loops import supervise
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges

Loops: TypeAlias = Iterable[tuple[str, Callable[[], Awaitable[None]]]]
"""Loops for `supervise`, each after what it is called in the log."""

AT_ONCE = 4
"""Endpoints whose loops begin in the same turn: dialling takes up to 1 ms each."""
ENDED_AT_ONCE = 50
"""Loops that are cancelled in the same turn: each takes about 30 µs to end."""
APART_S = 0.01


class Watches:
    """One set of loops for each endpoint."""

    def __init__(self, tasks: asyncio.TaskGroup, loops_of: Callable[[Endpoint], Loops], rng: random.Random) -> None:
        self._group = tasks
        self._loops_of = loops_of
        self._rng = rng
        self._tasks: dict[EndpointUid, list[asyncio.Task[None]]] = {}
        self._watched: dict[EndpointUid, Endpoint] = {}
        self._due: deque[Endpoint] = deque()
        """Watched from soon on."""
        self._ending: deque[asyncio.Task[None]] = deque()
        """To be cancelled soon."""
        self._beginner: asyncio.Task[None] | None = None

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
        for endpoint in endpoints:
            self._watched[endpoint.uid] = endpoint
            self._tasks[endpoint.uid] = []
        self._due.extend(endpoints)
        if self._beginner is None or self._beginner.done():
            if len(self._due) <= AT_ONCE:
                self._do_some()  # else in later turns only: to join that many took long enough
            if self._due or self._ending:
                self._beginner = self._group.create_task(self._do_rest())

    async def _do_rest(self) -> None:
        while self._due or self._ending:
            await asyncio.sleep(APART_S)
            self._do_some()

    def _do_some(self) -> None:
        for _ in range(min(ENDED_AT_ONCE, len(self._ending))):
            self._ending.popleft().cancel()
        for _ in range(min(AT_ONCE, len(self._due))):
            endpoint = self._due.popleft()
            if self._watched.get(endpoint.uid) is endpoint and not self._tasks[endpoint.uid]:
                self._tasks[endpoint.uid] = [
                    self._group.create_task(supervise(name, run, self._rng)) for name, run in self._loops_of(endpoint)
                ]

    def close(self) -> None:
        """Watch nothing any more."""
        if self._beginner is not None:
            self._beginner.cancel()
        for uid in list(self._tasks):
            self._cancel(uid)
        for task in self._ending:
            task.cancel()

    def _cancel(self, uid: EndpointUid) -> None:
        del self._watched[uid]
        self._ending += self._tasks.pop(uid)
