# SPDX-License-Identifier: Apache-2.0
"""kill -9 of each process of an lbproxy with workers, under streams and requests: `python -m benchmarks.kills`.

Four simulated servers, `--streams` streams that begin anew as they end, and `--rate` short requests a second, each on a
connection of its own. Every few seconds a process dies: the balancer process, worker 0, the balancer process, worker 1
and so on. Printed for each: streams and requests that broke, how many the dead worker had, and after how long the
requests in flight by /admin/state are those of the clients again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.process import Process, lbproxy, mock

SETTINGS = """
workers: {workers}
log: {{access: false}}
limits: {{connections: 4000}}
"""
FIRST_S = 10.0
"""Until the first death: by then a standby waits."""
PAUSE_S = 5.0
SETTLED_S = 10.0


class Clients:
    """All clients, and what became of their requests."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.broken_streams = self.whole_streams = self.silent_streams = 0
        self.failed_requests: list[str] = []
        self.done_requests = 0
        self.active = 0
        self.stopped = False

    async def _ask(self, body: dict[str, object]) -> tuple[bytes, bool]:
        """The response as far as it came, and whether the connection ended it by a reset."""
        data = json.dumps({"model": "m", **body, "messages": [{"role": "user", "content": "Hello there"}]}).encode()
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}"
            writer.write(f"{head}\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n".encode() + data)
            got = b""
            try:
                while piece := await reader.read(1 << 16):
                    got = (got + piece)[-4096:] if len(got) > 8192 else got + piece
            except ConnectionError:
                return got, True
            return got, False
        finally:
            writer.close()

    async def stream(self) -> None:
        """Streams, one after the other."""
        while not self.stopped:
            self.active += 1
            try:
                got, reset = await self._ask({"stream": True, "max_tokens": 300, "ignore_eos": True})
            except ConnectionError:
                got, reset = b"", True
            finally:
                self.active -= 1
            if b"data: [DONE]" in got:
                self.whole_streams += 1
            elif not self.stopped:
                self.broken_streams += 1
                # A reset, or an end inside the chunked body: both show that it is not complete.
                self.silent_streams += not reset and got.endswith(b"0\r\n\r\n")
                await asyncio.sleep(0.05)

    async def requests(self, rate: float) -> None:
        """Short requests, at a pace."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not self.stopped:
            due += 1.0 / rate
            task = asyncio.create_task(self._request())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*tasks)

    async def _request(self) -> None:
        self.active += 1
        try:
            got, _ = await self._ask({"max_tokens": 2})
        except ConnectionError as error:
            self.failed_requests.append(type(error).__name__)
            return
        finally:
            self.active -= 1
        if got.startswith(b"HTTP/1.1 200"):
            self.done_requests += 1
        else:
            self.failed_requests.append(got.split(b"\r\n", 1)[0].decode() or "closed without a response")


async def state(session: aiohttp.ClientSession, admin: str) -> dict[str, Any]:
    """GET /admin/state; empty while no balancer process responds."""
    try:
        async with session.get(f"{admin}/admin/state") as reply:
            found: dict[str, Any] = await reply.json()
            return found
    except (aiohttp.ClientError, TimeoutError):
        return {}


async def settled(session: aiohttp.ClientSession, admin: str, clients: Clients) -> float | None:
    """Seconds until lbproxy counts what its clients have; None: not within SETTLED_S."""
    began = time.monotonic()
    while time.monotonic() < began + SETTLED_S:
        found = await state(session, admin)
        if found:
            in_flight = sum(one["in_flight"] for one in found["endpoints"])
            if abs(in_flight + found["queue"]["waiting"] - clients.active) <= max(4, 0.05 * clients.active):
                return time.monotonic() - began
        await asyncio.sleep(0.02)
    return None


async def run(args: argparse.Namespace, process: Process, url: str, admin: str) -> None:
    """The whole run."""
    clients = Clients(url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session, asyncio.TaskGroup() as tasks:
        for _ in range(args.streams):
            tasks.create_task(clients.stream())
        tasks.create_task(clients.requests(args.rate))
        await asyncio.sleep(FIRST_S)
        total = {"balancer": [0, 0], "worker": [0, 0]}
        for number in range(args.kills):
            found = await state(session, admin)
            workers = {one["index"]: one for one in found["workers"]}
            if number % 2 == 0:
                pid, kind, had = found["pid"], "balancer", "-"
            else:
                victim = workers[number // 2 % args.workers]
                pid, kind, had = victim["pid"], "worker", str(victim["running"])
            before = clients.broken_streams, len(clients.failed_requests)
            os.kill(pid, signal.SIGKILL)
            took = await settled(session, admin, clients)
            await asyncio.sleep(PAUSE_S)
            broken, failed = clients.broken_streams - before[0], len(clients.failed_requests) - before[1]
            total[kind][0] += broken
            total[kind][1] += failed
            why = ", ".join(sorted(set(clients.failed_requests[before[1] :])))
            right = "never" if took is None else f"{took:.2f} s"
            print(
                f"{number + 1:2} {kind:8} had {had:>3}: {broken} streams broke, {failed} requests failed {why}; "
                f"counts right after {right}",
                flush=True,
            )
        clients.stopped = True
    print(
        f"streams {clients.whole_streams} complete, {clients.broken_streams} broken ({clients.silent_streams} of them "
        f"look complete); requests {clients.done_requests} done, {len(clients.failed_requests)} failed; "
        f"by deaths of the balancer process: {total['balancer'][0]} streams, {total['balancer'][1]} requests; "
        f"of workers: {total['worker'][0]} streams, {total['worker'][1]} requests"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [
            stack.enter_context(mock("--model", "m", "--ttft", "0.05", "--token-time", "0.02"))[1] for _ in range(4)
        ]
        settings = SETTINGS.format(workers=args.workers)
        process, url, admin = stack.enter_context(lbproxy(folder, urls, settings))
        process.wait_for(f"{args.workers} workers accept connections")
        asyncio.run(run(args, process, url, admin))


if __name__ == "__main__":
    main()
