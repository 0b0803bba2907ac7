# SPDX-License-Identifier: Apache-2.0
"""The client's process: the recorded sessions of a cell, through a router.

    python -m benchmarks.routing_real.client < REQUEST > ANSWER

What `http_routing.sessions` does, with other sessions, before servers that do not say how late they are.
"""

from __future__ import annotations

from typing import cast
from urllib.parse import urlsplit

import aiohttp
import uvloop

from benchmarks.http_routing.apis import CHAT
from benchmarks.http_routing.client import Call, Counters, Request, counters, main
from benchmarks.http_routing.sessions import Loop, SessionClient
from benchmarks.routing_real.cells import CellFields, Recorded, cell_of, chat_body
from lbproxy.sim.workloads.workload import Job


class RecordedRequest(Request):
    """What to do. `port` 0: without a router, each user at one server."""

    asks: CellFields
    """The cell itself."""
    model: str
    words: int
    """As `cells.chat_body` has it."""


class RecordedClient(SessionClient):
    """One run."""

    def __init__(self, request: Request, http: aiohttp.ClientSession) -> None:
        self._asked = cast(RecordedRequest, request)
        cell = cell_of(self._asked["asks"])
        super().__init__(request, http, Loop(CHAT, lambda: Recorded(cell, request["seed"]), cell.warm_up_s))

    def _body(self, job: Job) -> bytes:
        return chat_body(job, self._asked["model"], self._asked["words"])

    def _address(self, job: Job) -> tuple[str, int]:
        if self._request["port"]:
            return super()._address(job)
        servers = self._request["servers"]
        parts = urlsplit(servers[int(job.id.partition("-")[0]) % len(servers)])
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def _learn(self, job: Job, call: Call, stream: bytes) -> None:
        """What the server said stands in no later prompt."""

    async def _counters(self) -> list[Counters]:
        found = []
        for url in self._request["servers"]:
            async with self._http.get(f"{url}/metrics") as response:
                found.append(counters(await response.read()))
        return found


if __name__ == "__main__":
    uvloop.run(main(RecordedClient))
