# SPDX-License-Identifier: Apache-2.0
"""The client's process: the recorded sessions of a cell, through a router.

    python -m benchmarks.routing_real.client < REQUEST > ANSWER

What `http_routing.sessions` does, with other sessions, before servers that do not say how late they are.
"""

from __future__ import annotations

import aiohttp
import uvloop

from benchmarks.http_routing.apis import CHAT
from benchmarks.http_routing.client import Call, Counters, Request, counters, main
from benchmarks.http_routing.sessions import Loop, SessionClient
from benchmarks.routing_real.cells import CELLS, Recorded, chat_body
from lbproxy.sim.workloads.workload import Job


class RecordedClient(SessionClient):
    """One run."""

    def __init__(self, request: Request, http: aiohttp.ClientSession) -> None:
        cell = CELLS[request["cell"]]
        super().__init__(request, http, Loop(CHAT, lambda: Recorded(cell, request["seed"]), cell.warm_up_s))

    def _body(self, job: Job) -> bytes:
        return chat_body(job)

    def _learn(self, job: Job, call: Call, stream: bytes) -> None:
        """What the server said stands in no later prompt."""

    async def _counters(self) -> list[Counters]:
        found = []
        for port in self._request["servers"]:
            async with self._http.get(f"http://127.0.0.1:{port}/metrics") as response:
                found.append(counters(await response.read()))
        return found


if __name__ == "__main__":
    uvloop.run(main(RecordedClient))
