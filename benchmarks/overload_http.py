# SPDX-License-Identifier: Apache-2.0
"""Six cells of `benchmarks.overload` through real sockets: `python -m benchmarks.overload_http`.

lbproxy as installed before four servers as `lbproxy mock` runs one, in a process each, and clients that send at their
rate whatever happens. The servers are slower and smaller than the simulation's, so that two cores carry it all: eight
slots, a KV cache of 4,000 tokens, or prompts of 6,000 tokens. What they can answer is measured first, as there. Prints
a table, and writes the last part of `OVERLOAD.md`; twelve minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean

import aiohttp
import orjson
import uvloop

from benchmarks.overhead.process import free_port
from benchmarks.overload import ENOUGH, GOOD_TTFT_S, PAGE, SMALL_QUEUE, SOCKETS, Conditions
from lbproxy.sim.figures.report import as_table, percentile

SERVERS = 4
WARM_UP_S, SECONDS = 20.0, 60.0
CAPACITY_S = 40.0
CLIENT_S = 60.0
"""A client waits for so long."""
ABOUT = """`python -m benchmarks.overload_http`: four servers of `lbproxy mock`, slower and smaller, {seconds:.0f} s
after {warm_up:.0f} s. *≤ 5 s* of whole responses: within 5 s and the time that one takes at full load.
"""
WAITING = re.compile(rb"^vllm:num_requests_waiting\{[^}]*\} ([0-9.]+)$", re.MULTILINE)
SPEED = "0.25"
KINDS = {
    "slots": (["--max-num-seqs", "8", "--speed", SPEED], 100, 120),
    "space": (["--kv-tokens", "4000", "--speed", SPEED], 200, 150),
    "prefill": (["--speed", SPEED], 6000, 10),
}
"""Options of the servers; tokens of a prompt and of a response."""


class Cell(Conditions):
    """One row of the last part of the page."""

    def __str__(self) -> str:
        how = "streams" if self.streams else "whole"
        return f"{self.kind} {self.load:g}x, {how}, {'gauges' if self.gauges else 'no-gauges'}, {self.flows} flows"


CELLS = [
    Cell("slots", 2, True, True, 1),
    Cell("slots", 3, False, True, 2),
    Cell("slots", 2, True, False, 1),
    Cell("slots", 10, True, True, 10),
    Cell("space", 2, True, True, 2),
    Cell("prefill", 2, True, True, 2),
]


@dataclass(slots=True)
class Request:
    """How one went. Seconds of the loop's clock."""

    sent_at: float
    first_at: float | None = None
    ended_at: float | None = None
    status: int = 0


@dataclass(frozen=True)
class Figures:
    """Of the time after the warm-up; rates a second."""

    capacity: float
    throughput: float
    good: float
    """Whose first byte came within 5 s; of whole responses: all of it within 5 s and what one takes at full load."""
    refused: float
    failed: float
    engines: float
    starts: float

    @property
    def passes(self) -> bool:
        return self.good >= ENOUGH * self.capacity and self.engines <= max(SMALL_QUEUE, self.starts)


@asynccontextmanager
async def process(*arguments: str, ready: str) -> AsyncIterator[None]:
    """lbproxy with these arguments, as soon as `ready` answers 200."""
    quiet = asyncio.subprocess.DEVNULL
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lbproxy", *arguments, stdout=quiet, stderr=quiet
    )
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(30.0):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await http.get(ready)).status == 200:
                        break
                await asyncio.sleep(0.1)
        yield
    finally:
        running.terminate()
        await asyncio.wait_for(running.wait(), 10)


class Load:
    """Requests at a rate, from now on."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._cell, self._rng = cell, random.Random(seed)
        self._options, self._prompt, self._output = KINDS[cell.kind]
        self.requests: list[Request] = []
        self.queues: list[float] = []

    def _body(self) -> bytes:
        words = " ".join(f"{self._rng.random():.6f}"[2:] for _ in range(round(self._prompt * 4 / 7)))
        tokens = max(1, round(self._output * self._rng.lognormvariate(-0.1, 0.45)))
        return orjson.dumps(
            {"model": "sim", "prompt": words, "max_tokens": tokens, "ignore_eos": True, "stream": self._cell.streams}
        )

    async def _ask(self, http: aiohttp.ClientSession, url: str, flow: int) -> None:
        loop = asyncio.get_running_loop()
        one = Request(loop.time())
        self.requests.append(one)
        headers = {"content-type": "application/json", "x-lbproxy-flow": f"flow-{flow}"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.post(f"{url}/v1/completions", data=self._body(), headers=headers) as answer:
                one.status = answer.status
                async for _ in answer.content.iter_any():
                    one.first_at = one.first_at or loop.time()
                one.ended_at = loop.time()

    async def _watch(self, http: aiohttp.ClientSession, servers: Sequence[str]) -> None:
        while True:
            for server in servers:
                text = await (await http.get(f"{server}/metrics")).read()
                self.queues.append(sum(float(value) for value in WAITING.findall(text)))
            await asyncio.sleep(0.25)

    async def run(self, urls: Sequence[str], servers: Sequence[str], rate: float, seconds: float) -> None:
        """Send to `urls` in turn for so long, and look at the engines' queues after the warm-up."""
        timeout = aiohttp.ClientTimeout(total=CLIENT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            tasks: set[asyncio.Task[None]] = set()
            loop = asyncio.get_running_loop()
            began = at = loop.time()
            watch: asyncio.Task[None] | None = None
            number = 0
            while at < began + seconds:
                at += self._rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - loop.time()))
                if watch is None and loop.time() > began + WARM_UP_S:
                    watch = loop.create_task(self._watch(http, servers))
                number += 1
                flow = number % self._cell.flows
                task = loop.create_task(self._ask(http, urls[number % len(urls)], flow))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            for task in [*tasks, *([watch] if watch else [])]:
                task.cancel()
            await asyncio.gather(*tasks, *([watch] if watch else []), return_exceptions=True)


@asynccontextmanager
async def servers_of(kind: str) -> AsyncIterator[list[str]]:
    """Four, and their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for number in range(SERVERS):
            url = f"http://127.0.0.1:{free_port()}"
            port = url.rpartition(":")[2]
            arguments = ["mock", "--port", port, "--seed", str(number), *KINDS[kind][0]]
            await stack.enter_async_context(process(*arguments, ready=f"{url}/health"))
            urls.append(url)
        yield urls


async def capacity_of(kind: str) -> tuple[float, float]:
    """Responses a second, and how long one takes, of servers that get twice as many in turn as they take."""
    rate = {"slots": 18.0, "space": 20.0, "prefill": 8.0}[kind]
    async with servers_of(kind) as urls:
        load = Load(Cell(kind, 0, True, True, 1), seed=1)
        began = time.monotonic()
        await load.run(urls, urls, rate, CAPACITY_S)
        took = time.monotonic() - began
    ended = [one for one in load.requests if one.ended_at and one.status == 200]
    last = max(one.ended_at or 0.0 for one in ended)
    first = load.requests[0].sent_at + took / 3
    served = [one for one in ended if (one.ended_at or 0.0) > first]
    alone = fmean([(one.ended_at or 0.0) - (one.first_at or 0.0) for one in served])
    return len(served) / (last - first), alone


async def run_cell(cell: Cell, capacity: float, takes_s: float) -> Figures:
    """lbproxy before the servers of a cell, and its load."""
    port, admin = free_port(), free_port()
    async with servers_of(cell.kind) as urls:
        endpoints = [{"url": url} if cell.gauges else {"url": url, "metrics": None} for url in urls]
        with tempfile.NamedTemporaryFile("wb", suffix=".yaml") as file:
            settings = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}", "endpoints": endpoints}
            file.write(orjson.dumps({**settings, "log": {"access": False}, "drain": {"lame_duck": 0, "deadline": 1}}))
            file.flush()
            async with process("--config", file.name, ready=f"http://127.0.0.1:{admin}/readyz"):
                load = Load(cell, seed=2)
                await load.run([f"http://127.0.0.1:{port}"], urls, capacity * cell.load, WARM_UP_S + SECONDS)
    begin = load.requests[0].sent_at + WARM_UP_S
    end = begin + SECONDS
    came = [one for one in load.requests if begin <= one.sent_at and one.status]
    ended = [one for one in load.requests if one.status == 200 and one.ended_at and begin <= one.ended_at < end]
    if cell.streams:
        first = [one for one in load.requests if one.status == 200 and one.first_at and begin <= one.first_at < end]
        good = sum((one.first_at or 0.0) - one.sent_at <= GOOD_TTFT_S for one in first)
    else:
        first = ended
        good = sum((one.ended_at or 0.0) - one.sent_at <= GOOD_TTFT_S + takes_s for one in ended)
    return Figures(
        capacity=capacity,
        throughput=len(ended) / SECONDS,
        good=good / SECONDS,
        refused=sum(one.status == 429 for one in came) / max(1, len(came)),
        failed=sum(one.status not in {200, 429} for one in came) / max(1, len(came)),
        engines=percentile(sorted(load.queues), 95),
        starts=len(first) / SECONDS / SERVERS / 2,
    )


def table(found: dict[str, Figures]) -> str:
    """For people."""
    heads = ["cell", "capacity", "throughput", "≤ 5 s", "refused", "failed", "engines", "starts", "verdict"]
    rows = []
    for name, one in found.items():
        shares = [f"{one.capacity:.1f}", f"{one.throughput / one.capacity:.2f}", f"{one.good / one.capacity:.2f}"]
        rates = [f"{one.refused:.0%}", f"{one.failed:.1%}", f"{one.engines:.1f}", f"{one.starts:.1f}"]
        rows.append([name, *shares, *rates, "pass" if one.passes else "FAIL"])
    return as_table(heads, rows)


async def measure(cells: Sequence[Cell]) -> dict[str, Figures]:
    capacities: dict[str, tuple[float, float]] = {}
    found = {}
    for cell in cells:
        if cell.kind not in capacities:
            capacities[cell.kind] = await capacity_of(cell.kind)
        found[str(cell)] = figures = await run_cell(cell, *capacities[cell.kind])
        print(f"{cell}: {figures}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload_http", description="Overload through sockets.")
    parser.add_argument("--cells", type=int, nargs="+", metavar="N", help=f"of 0 to {len(CELLS) - 1}; writes nothing")
    args = parser.parse_args()
    chosen = CELLS if args.cells is None else [CELLS[number] for number in args.cells]
    found = uvloop.run(measure(chosen))
    print(table(found))
    if args.cells is None:
        page = PAGE.read_text().partition(SOCKETS)[0]
        told = ABOUT.format(seconds=SECONDS, warm_up=WARM_UP_S)
        PAGE.write_text(f"{page}{SOCKETS}\n{told}\n{table(found)}")


if __name__ == "__main__":
    main()
