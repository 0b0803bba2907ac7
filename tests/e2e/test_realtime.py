# SPDX-License-Identifier: Apache-2.0
"""WebSockets through lbproxy as a process: many at a time, a server that dies, and a stop.

The long form, with its figures:  .venv/bin/python -m tests.e2e.test_realtime --connections 1000 --messages 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import httpx

from tests.support.aio import run, until
from tests.support.process import Process, lbproxy
from tests.support.sockets import echo_server

Clients = list[aiohttp.ClientWebSocketResponse]
SETTINGS = "drain: {lame_duck: 0s, deadline: 1s}\ntimeouts: {connect: 5s}\n"


def rss_kib(process: Process) -> int:
    text = Path(f"/proc/{process.process.pid}/status").read_text()
    match = re.search(r"VmRSS:\s+([0-9]+) kB", text)
    assert match is not None
    return int(match[1])


def in_flight(admin: str) -> float:
    page = httpx.get(f"{admin}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(r"^lbproxy_endpoint_in_flight\S* (\S+)$", page, re.MULTILINE))


async def read_log(process: Process) -> None:
    """lbproxy drops lines that nobody reads."""
    while True:
        process.read()
        await asyncio.sleep(0.02)


async def open_all(session: aiohttp.ClientSession, url: str, count: int) -> Clients:
    """So many connections, some at a time; each was greeted."""
    slots = asyncio.Semaphore(50)

    async def open_one() -> aiohttp.ClientWebSocketResponse:
        async with slots:
            client = await session.ws_connect(f"{url}/v1/realtime?model=m", max_msg_size=0)
            assert await client.receive_str() == "hello"
            return client

    return list(await asyncio.gather(*(open_one() for _ in range(count))))


async def echo(client: aiohttp.ClientWebSocketResponse, number: int, messages: int) -> None:
    """Messages of many sizes, text and binary; every one must come back as it was."""
    for n in range(messages):
        size = 37 * (n * 131 + number) % 5000
        if n % 2:
            data = bytes([(number + n) % 256]) * size
            await client.send_bytes(data)
            assert await client.receive_bytes() == data
        else:
            text = f"{number}:{n}:" + "ü" * size
            await client.send_str(text)
            assert await client.receive_str() == text
    await client.ping(b"%d" % number)


async def end_of(client: aiohttp.ClientWebSocketResponse) -> int | None:
    """The code that its server closed it with."""
    while (message := await client.receive()).type is not aiohttp.WSMsgType.CLOSED:
        if message.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING}:
            break
        assert message.type is not aiohttp.WSMsgType.ERROR, message
    return client.close_code


async def check(folder: Path, connections: int, messages: int) -> None:
    """All of it: echoes, ends by the client, by a server's death, and by a stop."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(echo_server()) for _ in range(2)]
        running = lbproxy(folder, [server.url for server in servers], SETTINGS)
        process, url, admin = await asyncio.to_thread(running.__enter__)
        stack.callback(running.__exit__, None, None, None)
        reading = asyncio.create_task(read_log(process))
        stack.callback(reading.cancel)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        before = rss_kib(process)
        began = time.monotonic()
        clients = await open_all(session, url, connections)
        print(f"{connections} connections opened in {time.monotonic() - began:.1f} s", flush=True)
        print("on the servers:", [len(server.open) for server in servers])
        print(f"memory per open connection: {(rss_kib(process) - before) / connections:.1f} KiB")
        assert await asyncio.to_thread(in_flight, admin) == connections
        began = time.monotonic()
        await asyncio.gather(*(echo(client, number, messages) for number, client in enumerate(clients)))
        took = time.monotonic() - began
        print(f"{connections * messages} messages echoed, all equal, in {took:.1f} s")
        print(f"memory per connection after that: {(rss_kib(process) - before) / connections:.1f} KiB", flush=True)
        third = connections // 3
        await asyncio.gather(*(client.close(code=4321, message=b"done") for client in clients[:third]))
        await until(lambda: sum(Counter(server.closed)[4321] for server in servers) == third)
        await until(lambda: in_flight(admin) == connections - third, every_s=0.1)
        rest = clients[third:]
        ends = [asyncio.create_task(end_of(client)) for client in rest]
        killed = len(servers[0].open)
        servers[0].kill()
        await until(lambda: sum(end.done() for end in ends) >= killed, within_s=30.0)
        codes = Counter(end.result() for end in ends if end.done())
        print(f"one server killed: {killed} connections, close codes {dict(codes)}")
        assert codes == {1011: killed}
        await until(lambda: in_flight(admin) == len(rest) - killed, every_s=0.1)
        process.process.send_signal(signal.SIGTERM)
        codes = Counter(await asyncio.gather(*ends)) - codes
        print(f"stopped: close codes {dict(codes)}, exit status {await asyncio.to_thread(process.process.wait, 90)}")
        assert codes == {1001: len(rest) - killed}
        statuses = Counter((one["status"], one["outcome"]) for one in process.lines("request"))
        print("log lines:", dict(statuses))
        assert statuses[101, "completed"] == third
        assert statuses[101, "upstream_broke"] == killed
        assert statuses[101, "lb_shutdown"] == len(rest) - killed


def test_many_websockets_through_one_lbproxy(tmp_path: Path) -> None:
    """Every message equal, every end told to the other side, and nothing is left in flight."""
    run(check(tmp_path, 60, 6))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run(check(Path(made), options.connections, options.messages), timeout_s=600.0)
