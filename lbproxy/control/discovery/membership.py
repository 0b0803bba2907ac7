# SPDX-License-Identifier: Apache-2.0
"""Hands the set of endpoints to the balancer, and what changed in it to the loops that look after endpoints.

An endpoint that joins takes the balancer some 25 µs. A name that suddenly has a thousand addresses would hold up the
event loop, which requests share: so of many new endpoints the last join in later turns of the loop.

A server with data-parallel ranks is an endpoint for each rank, here and from here on: `ranks` of its settings, or what
its metrics show. Each change of that ends and begins endpoints with all that is known of them, so a server gets few:
the first at once, the next after `REST_S`, each further one after twice as long.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Final, TypeAlias

from lbproxy.control.loops import supervise
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges
from lbproxy.driver.runtime import Runtime

logger = logging.getLogger("lbproxy")
REST_S: Final = 1.0
"""A server that is restarted with other ranks a few times in a minute is followed at once, or nearly."""
MAX_REST_S: Final = 600.0
"""A server that goes on to show other numbers of ranks gets a change so rarely; after twice as long without one, it is
believed again."""
JOINED_AT_ONCE: Final = 100
"""Endpoints that join in the same turn of the loop."""
MANY: Final = 100
PAUSE_S: Final = 0.0025
"""Of a set of more than `MANY` endpoints, between two changes, for each endpoint: a change takes 4 to 5 µs for each, so
all together take 2 ms of a second."""
AT_ONCE = 4
"""Endpoints whose loops begin in the same turn: dialling takes up to 1 ms each."""
ENDED_AT_ONCE = 50
"""Loops that are cancelled in the same turn: each takes about 30 µs to end."""
APART_S = 0.01


class Membership:
    """Who is in the set of one runtime."""

    def __init__(self, runtime: Runtime, watches: Watches) -> None:
        self.watches = watches
        """Follow each change of the set."""
        self._runtime = runtime
        self._rest: asyncio.Handle | None = None
        self._soon: asyncio.Handle | None = None
        """The next `adopt`."""
        self._adopted = asyncio.Event()
        """There is none."""
        self._changed_at = -inf
        self._servers: Sequence[EndpointSpec] = ()
        self._ranks: dict[str, int] = {}
        """How many ranks the metrics of a server show, by its URL, if that was ever more than one."""
        self._rests: dict[str, tuple[float, float]] = {}
        """Until when such a server gets no further change, and how long that rest is in total."""

    def __len__(self) -> int:
        """How many servers there are, of those that join in later turns too."""
        return len(self._servers)

    def begin(self, servers: Sequence[EndpointSpec]) -> None:
        """Make the set equal to `servers`, however many, as nothing else goes on yet."""
        self._servers = servers
        self.watches.follow(self._runtime.set_endpoints(list(self._endpoints(servers))))

    def found_ranks(self, endpoint: Endpoint, ranks: int) -> None:
        """The metrics of a server show so many ranks. See `Scraping.found_ranks`."""
        now = self._runtime.now()
        until, rest_s = self._rests.get(endpoint.url_key, (now, 0.0))
        if now < until or ranks == self._ranks.get(endpoint.url_key, 1):
            return
        rest_s = REST_S if now > until + 2 * MAX_REST_S or not rest_s else min(2 * rest_s, MAX_REST_S)
        self._rests[endpoint.url_key] = now + rest_s, rest_s
        self._ranks[endpoint.url_key] = ranks
        what = f"{ranks} data-parallel ranks, an endpoint each" if ranks > 1 else "no data-parallel ranks any more"
        logger.info("%s has %s", endpoint.server, what, extra={"event": "ranks", "endpoint": endpoint.server})
        if self._soon is None:
            self.adopt(self._servers)

    def _endpoints(self, servers: Sequence[EndpointSpec]) -> Iterator[EndpointSpec]:
        for server in servers:
            ranks = self._ranks.get(server.url_key, 1) if server.ranks is None else server.ranks
            if ranks == 1:
                yield server
            else:
                yield from (replace(server, name=f"{server.name}#{n}", rank=n) for n in range(ranks))

    def adopt_soon(self, servers: Callable[[], Sequence[EndpointSpec]]) -> None:
        """`adopt` what this returns: at once, or if the last change of a large set was just now, together with what
        changes meanwhile.
        """
        if self._soon is None:
            wait_s = self._changed_at + PAUSE_S * len(self._servers) - self._runtime.now()
            if len(self._servers) > MANY and wait_s > 0.0:
                self._soon = self._runtime.loop.call_later(wait_s, lambda: self.adopt(servers()))
                self._adopted.clear()
            else:
                self.adopt(servers())

    async def settled(self) -> None:
        """Wait until what `adopt_soon` was given counts."""
        if self._soon is not None:
            await self._adopted.wait()

    def adopt(self, servers: Sequence[EndpointSpec]) -> None:
        """Make the set equal to `servers`: at once, or if more than `JOINED_AT_ONCE` are new, in later turns of the
        loop. What an earlier call has left for later turns does not count any more.
        """
        if self._soon is not None:
            self._soon.cancel()
        self._servers, self._soon, self._changed_at = servers, None, self._runtime.now()
        self._adopted.set()
        if self._ranks:
            urls = {one.url_key for one in servers}
            self._ranks = {url: ranks for url, ranks in self._ranks.items() if url in urls}
            self._rests = {url: rest for url, rest in self._rests.items() if url in urls}
        specs = list(self._endpoints(servers))
        if self._rest is not None:
            self._rest.cancel()
        later = self._later(specs)
        if later:  # to find them, and to make so many specs, took long enough
            self._rest = self._runtime.loop.call_soon(self._adopt_some, specs)
        else:
            self._rest = None
            self.watches.follow(self._runtime.set_endpoints(specs))

    def _adopt_some(self, specs: Sequence[EndpointSpec]) -> None:
        later = self._later(specs)
        self.watches.follow(self._runtime.set_endpoints([one for one in specs if one.key not in later]))
        self._rest = self._runtime.loop.call_later(APART_S, self._adopt_some, specs) if later else None

    def _later(self, specs: Sequence[EndpointSpec]) -> set[str]:
        """The keys of new endpoints beyond the first `JOINED_AT_ONCE`."""
        known = self._runtime.balancer.endpoints.by_key
        return set(islice((one.key for one in specs if one.key not in known), JOINED_AT_ONCE, None))


Loops: TypeAlias = Iterable[tuple[str, Callable[[], Awaitable[None]]]]
"""Loops for `supervise`, each after what it is called in the log."""


class Watches:
    """The loops that look after the endpoints: started when an endpoint joins the set, cancelled when it leaves.

    Every loop is a task of the group it is given, which therefore outlives it and awaits it, also after its
    cancellation.

    Those of many endpoints that join or leave together do not all begin or end in one turn of the event loop, which
    requests share: a thousand addresses of a name, dialled at once, would hold it up for 0.15 s.

    One set of loops for each endpoint.
    """

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
