# SPDX-License-Identifier: Apache-2.0
"""The client's process for cells of coding agents: a closed loop of conversations through one of the APIs (`apis.py`).

    python -m benchmarks.http_routing.sessions < REQUEST > ANSWER

The workload says what follows a response, as in virtual time; here a response is real, and what the server said stands
in the next prompt, as the client programs do it. So the same is asked of every router as far as a closed loop allows:
sizes, order and pauses within a conversation depend on the seed alone; when each request is sent depends on when the
response before it came; and the words of a response on the server.

With state (`responses-id`) a request names the response before it and brings the new items only. If the server does not
know it (404: the router chose another one), that request has failed, and the conversation is sent in full next time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import aiohttp
import orjson
import uvloop

from benchmarks.http_routing.apis import APIS, Api, Prompt, prompt_of, response_id, text_of, written
from benchmarks.http_routing.cells import CELLS, digest
from benchmarks.http_routing.client import Answer, Call, Client, Counters, Reading, Request, figures_of_gaps, main
from lbproxy.sim.figures.report import percentile
from lbproxy.sim.workloads.catalogue import make_workload
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Arrival, Job, Workload


@dataclass(frozen=True, slots=True)
class Stored:
    """A response that the server keeps."""

    id: str
    prompt: tuple[Piece, ...]
    """All that it stands for, the response included."""


class KeptReading(Reading):
    """Keeps the stream, as its text is needed for the next prompt."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.parts: list[bytes] = []

    def feed(self, data: bytes, now: float) -> None:
        """See Reading."""
        super().feed(data, now)
        self.parts.append(data)


def workload_of(cell: str, seed: int, *, short: bool) -> Workload:
    """What the clients of a cell of agents send."""
    return make_workload("coding-agents", CELLS[cell].named(short=short), seed=seed)


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop."""

    api: Api
    workload: Callable[[], Workload]
    """Each time the same, from its begin."""
    warm_up_s: float


def loop_of(request: Request) -> Loop:
    """That of a cell of agents."""
    cell = CELLS[request["cell"]]
    assert cell.api is not None
    workload = partial(workload_of, request["cell"], request["seed"], short=request["short"])
    return Loop(APIS[cell.api], workload, cell.named(short=request["short"])["warm_up_s"])


class SessionClient(Client):
    """One run of a closed loop. `phases` of its Answer are two: what counts not, and what counts."""

    def __init__(self, request: Request, http: aiohttp.ClientSession, loop: Loop | None = None) -> None:
        """`http`: for the servers' metrics. `loop`: by default that of the cell."""
        self._loop = loop or loop_of(request)
        super().__init__(request, http, self._loop.api)
        self._workload = self._loop.workload()
        self._warm_up_s = self._loop.warm_up_s
        self._said: dict[int, str] = {}
        """By the id of a response's piece: what the server said."""
        self._stored: dict[str, Stored] = {}
        """By conversation."""
        self._sent: list[tuple[Job, Call]] = []
        self._marks: list[list[Counters]] = []

    async def run(self) -> Answer:
        """All conversations, until the workload's duration is over and every response has ended."""
        gc.collect()
        gc.freeze()
        first = self._workload.begin(0.0) or ()
        self._marks.append(await self._counters())
        begin = time.monotonic()
        async with asyncio.TaskGroup() as watching:
            tasks = [watching.create_task(one) for one in (self._tick(), self._watch(), self._mark_warm_up(begin))]
            async with asyncio.TaskGroup() as group:
                for arrival in first:
                    group.create_task(self._converse(arrival, begin, group))
            for task in tasks:
                task.cancel()
        self._marks.append(await self._counters())
        return self._answer()

    async def _converse(self, arrival: Arrival, begin: float, group: asyncio.TaskGroup) -> None:
        """One request, and whatever follows it."""
        at, job = arrival
        while (early := begin + at - time.monotonic()) > 0.0:  # noqa: ASYNC110 - uvloop wakes up to 1 ms early
            await asyncio.sleep(early)
        reading = KeptReading(self._api)
        call = await self._call(job, self._body(job), begin + at, reading)
        self._learn(job, call, b"".join(reading.parts))
        self._sent.append((job, call))
        for following in self._workload.ended(job, time.monotonic() - begin):
            group.create_task(self._converse(following, begin, group))

    # Requests

    def _text(self, piece: Piece) -> str:
        return self._said.get(piece.id) or written(piece)

    def _body(self, job: Job) -> bytes:
        prompt = prompt_of(job, self._text)
        stored = self._stored.get(_conversation(job))
        seed = self._request["seed"]
        if stored is None or job.prompt[: len(stored.prompt)] != stored.prompt:
            return orjson.dumps(self._api.body(prompt, job, seed))
        new = Prompt(prompt.tools, prompt.system, prompt.items[len(stored.prompt) - 2 :])
        return orjson.dumps({**self._api.body(new, job, seed), "previous_response_id": stored.id})

    def _learn(self, job: Job, call: Call, stream: bytes) -> None:
        """What the server said, and what it keeps."""
        self._stored.pop(_conversation(job), None)
        if call["failure"] is not None:
            return
        self._said[job.answer.id] = text_of(self._api, stream)
        found = response_id(stream) if self._api.stateful else None
        if found is not None:
            self._stored[_conversation(job)] = Stored(found, (*job.prompt, job.answer))

    # What came of it

    async def _mark_warm_up(self, begin: float) -> None:
        """Note the counters when the warm-up ends; what was late before does not count."""
        await asyncio.sleep(begin + self._warm_up_s - time.monotonic())
        self._marks.append(await self._counters())
        self._forget_lateness()
        await asyncio.Event().wait()

    def _answer(self) -> Answer:
        warm = [one for one in self._sent if one[0].phase]
        counted = [one for one in self._sent if not one[0].phase]
        return Answer(
            digest=self._digest(),
            phases=[[call for _, call in part] for part in (warm, counted)],
            asked=[[(job.prompt_tokens, job.answer.tokens) for job, _ in part] for part in (warm, counted)],
            gaps_s=figures_of_gaps(self._gaps_s),
            counters=self._marks,
            server_lag_s=self._server_lag_s,
            client_lag_s=percentile(sorted(self._ticks_s), 99),
            client_cpu_s=time.process_time(),
        )

    def _digest(self) -> str:
        """Of the first requests, which do not depend on any response."""
        return digest([self._loop.workload().begin(0.0) or ()])


def _conversation(job: Job) -> str:
    return job.id.rpartition("-")[0]


if __name__ == "__main__":
    uvloop.run(main(SessionClient))
