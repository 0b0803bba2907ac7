# SPDX-License-Identifier: Apache-2.0
"""The client's process: replays a cell's arrivals at a router, open loop, and times every token.

    python -m benchmarks.http_routing.client < REQUEST > ANSWER

`Request` and `Answer` are JSON. A request is sent when it is due, whatever became of those before, on a connection of
its own (so no answer can fail for want of a kept one, and none waits for another). Times count from when it was due,
not from when it was sent: a client that is late must not make a router look fast. How late it was is in the answer.

Only what the wire shows is believed: an answer is whole if it came with 200, its usage counts as many tokens as were
asked for, and it ended in `[DONE]`. Meanwhile the servers' /metrics are read, whose figure of lateness is of a minute.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import aiohttp
import httptools
import orjson
import uvloop

from benchmarks.http_routing.apis import CHAT, Api
from benchmarks.http_routing.cells import CELLS, arrivals, body, digest
from lbproxy.sim.figures.report import percentile
from lbproxy.sim.workloads.traces import read_mooncake
from lbproxy.sim.workloads.workload import Arrival, Job

TIMEOUT_S = 300.0
"""For one answer, from when its request was due; later ones have failed."""
TICK_S = 0.01
"""How often the client looks at its own lateness."""
WATCH_S = 15.0
"""How often the servers are asked how late they were: well within the minute that their figure is of."""
LEAD_S = 0.5
"""From building a phase to its first arrival."""


class Request(TypedDict):
    """What to do."""

    cell: str
    seed: int
    short: bool
    trace: str | None
    port: int
    """Of the router."""
    servers: list[str]
    """Their URLs."""


class Call(TypedDict):
    """One request. Times in seconds since it was due."""

    id: str
    due: float
    """On the client's clock."""
    sent: float
    first: float | None
    ended: float
    cached_tokens: int
    failure: str | None


class Counters(TypedDict):
    """Of one server, since its start."""

    prompt_tokens: float
    hit_tokens: float
    finished: float
    preemptions: float


class Answer(TypedDict):
    """What came of it."""

    digest: str
    """Of all that was asked."""
    phases: list[list[Call]]
    """In the order of arrival."""
    asked: NotRequired[list[list[tuple[int, int]]]]
    """Of a closed loop, for each of these: tokens of the prompt and of the response."""
    gaps_s: dict[str, float]
    """Between tokens of one answer: mean, p50, p99; without the warm-up."""
    counters: list[list[Counters]]
    """By phase, the servers' counters at its end; before them, those at the begin."""
    server_lag_s: float
    """The servers' 99th percentile of any minute, at its worst."""
    client_lag_s: float
    """99th percentile of how late the client's clock ticked."""
    client_cpu_s: float


_METRICS = {
    "prompt_tokens": rb"^vllm:prefix_cache_queries_total\{.*\} (.*)$",
    "hit_tokens": rb"^vllm:prefix_cache_hits_total\{.*\} (.*)$",
    "finished": rb"^vllm:request_success_total\{.*\} (.*)$",
    "preemptions": rb"^vllm:num_preemptions_total\{.*\} (.*)$",
}
_LAG = re.compile(rb'^lbproxy_mock_step_lag_seconds\{stat="p99"\} (.*)$', re.MULTILINE)


def counters(page: bytes) -> Counters:
    """What a server's /metrics says; a family of several samples is their sum."""
    found = {name: sum(map(float, re.findall(text, page, re.MULTILINE))) for name, text in _METRICS.items()}
    return Counters(
        prompt_tokens=found["prompt_tokens"],
        hit_tokens=found["hit_tokens"],
        finished=found["finished"],
        preemptions=found["preemptions"],
    )


class Reading:
    """What has come of one streamed answer. `feed` it what was read, in whatever pieces."""

    def __init__(self, api: Api = CHAT) -> None:
        self._api = api
        self._ended = False
        self.first_at: float | None = None
        self.last_at = 0.0
        self.gaps_s: list[float] = []
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        """Note the events that this completes the beginning of; events read together came together."""
        # The last 2 KB hold the usage, and whatever an event's beginning was cut off from.
        token = self._api.token
        events = (self._tail[-len(token) + 1 :] + data).count(token)
        last = self._tail[-64:] + data
        self._ended = self._ended or any(end in last for end in self._api.ends)
        self._tail = (self._tail + data)[-2048:]
        if not events:
            return
        if self.first_at is None:
            self.first_at = now
        else:
            self.gaps_s.append(now - self.last_at)
            self.gaps_s += [0.0] * (events - 1)
        self.last_at = now

    def failure(self, job: Job) -> str | None:
        """What is wrong with it, now that it has ended; None = nothing."""
        count = self._api.output.findall(self._tail)
        if not self._ended or not count:
            return "cut off"
        return None if int(count[-1]) == job.answer.tokens else f"{int(count[-1])} of {job.answer.tokens} tokens"

    def cached_tokens(self) -> int:
        """Of the prompt, as the server says."""
        found = self._api.cached.findall(self._tail)
        return int(found[-1]) if found else 0


class Exchange(asyncio.Protocol):
    """One request on a connection of its own, and its answer.

    With no client library in between: each of thousands of events a second would cost it 50 us of the core that the
    servers need, too. httptools parses.
    """

    def __init__(self, asked: bytes, reading: Reading) -> None:
        self._asked = asked
        self._reading = reading
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """What went wrong; None: the answer came, to the end of its framing."""

    def close(self) -> None:
        """Leave, whatever is still to come."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class is no subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._asked)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc or 'closed'}")

    def on_body(self, data: bytes) -> None:
        """For the parser: some of the body."""
        if self._parser.get_status_code() == 200:
            self._reading.feed(data, self._now)
        else:
            self._end(f"status {self._parser.get_status_code()}: {data[:200]!r}")

    def on_message_complete(self) -> None:
        """For the parser: the end of the body."""
        status = self._parser.get_status_code()
        self._end(None if status == 200 else f"status {status}")

    def _end(self, failure: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(failure)


class Client:
    """One replay."""

    def __init__(self, request: Request, http: aiohttp.ClientSession, api: Api = CHAT) -> None:
        """`http`: for the servers' metrics."""
        self._request = request
        self._http = http
        self._api = api
        self._gaps_s: list[float] = []
        self._ticks_s: list[float] = []
        self._server_lag_s = 0.0

    async def run(self) -> Answer:
        """All phases, each after the one before has drained."""
        phases = self.phases()
        asked = [[(at, job, body(job)) for at, job in phase] for phase in phases]
        gc.collect()
        gc.freeze()
        marks = [await self._counters()]
        calls: list[list[Call]] = []
        async with asyncio.TaskGroup() as watching:
            tasks = [watching.create_task(self._tick()), watching.create_task(self._watch())]
            for phase in asked:
                calls.append(await self._replay(phase))
                marks.append(await self._counters())
                if all(job.phase.startswith("warm-up") for _, job, _ in phase):
                    # Neither does lateness count that nothing was measured in.
                    self._forget_lateness()
            for task in tasks:
                task.cancel()
        return Answer(
            digest=digest(phases),
            phases=calls,
            gaps_s=figures_of_gaps(self._gaps_s),
            counters=marks,
            server_lag_s=self._server_lag_s,
            client_lag_s=percentile(sorted(self._ticks_s), 99),
            client_cpu_s=time.process_time(),
        )

    def _forget_lateness(self) -> None:
        self._server_lag_s = 0.0
        self._ticks_s.clear()

    def phases(self) -> list[list[Arrival]]:
        """What to ask, each phase with times from its begin."""
        trace = self._request["trace"]
        rows = None if trace is None else read_mooncake(Path(trace).read_text("utf-8").splitlines())
        return arrivals(CELLS[self._request["cell"]], self._request["seed"], rows, short=self._request["short"])

    def headers(self, job: Job) -> str:
        """A request's own, each with its line's end."""
        return f"X-Session-ID: {job.session}\r\n{self._api.headers}"

    async def _replay(self, phase: Sequence[tuple[float, Job, bytes]]) -> list[Call]:
        begin = time.monotonic() + LEAD_S
        tasks: list[asyncio.Task[Call]] = []
        async with asyncio.TaskGroup() as group:
            for at, job, asked in phase:
                while (early := begin + at - time.monotonic()) > 0.0:  # noqa: ASYNC110 - uvloop wakes up to 1 ms early
                    await asyncio.sleep(early)
                tasks.append(group.create_task(self._call(job, asked, begin + at, Reading(self._api))))
        return [task.result() for task in tasks]

    async def _call(self, job: Job, asked: bytes, due: float, reading: Reading) -> Call:
        sent = time.monotonic()
        exchange = Exchange(self._head(job, asked) + asked, reading)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: exchange, *self._address(job))
                failure = await exchange.ended or reading.failure(job)
        except (OSError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            exchange.close()
        if failure is None and not job.phase.startswith("warm-up"):
            self._gaps_s += reading.gaps_s
        first = reading.first_at
        return Call(
            id=job.id,
            due=due,
            sent=sent - due,
            first=None if first is None else first - due,
            ended=time.monotonic() - due,
            cached_tokens=reading.cached_tokens(),
            failure=failure,
        )

    def _address(self, job: Job) -> tuple[str, int]:
        """Where to ask: the router."""
        return "127.0.0.1", self._request["port"]

    def _head(self, job: Job, asked: bytes) -> bytes:
        host, port = self._address(job)
        return (
            f"POST {self._api.path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n{self.headers(job)}"
            "Connection: close\r\n\r\n"
        ).encode()

    async def _tick(self) -> None:
        """How late this process's own event loop is."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._ticks_s.append(max(0.0, time.monotonic() - due))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._counters()

    async def _counters(self) -> list[Counters]:
        """Of each server; notes how late it was."""
        found = []
        for url in self._request["servers"]:
            async with self._http.get(f"{url}/metrics") as response:
                page = await response.read()
            found.append(counters(page))
            late = _LAG.search(page)
            assert late is not None, "a simulated server says how late it was"
            self._server_lag_s = max(self._server_lag_s, float(late[1]))
        return found


def figures_of_gaps(gaps_s: Sequence[float]) -> dict[str, float]:
    """Of times between tokens."""
    gaps = sorted(gaps_s)
    return {"mean": sum(gaps) / max(1, len(gaps)), "p50": percentile(gaps, 50), "p99": percentile(gaps, 99)}


async def main(kind: type[Client] = Client) -> None:
    request: Request = orjson.loads(sys.stdin.buffer.read())
    async with aiohttp.ClientSession() as http:
        answer = await kind(request, http).run()
    sys.stdout.buffer.write(orjson.dumps(answer))


if __name__ == "__main__":
    uvloop.run(main())
