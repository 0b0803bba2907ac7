# SPDX-License-Identifier: Apache-2.0
"""SIGTERM in the middle of responses: all are finished, then the process ends, whatever connections clients keep.

By hand, with figures, and of another build: as tests/e2e/test_slow_engines.py.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from pathlib import Path

from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event
from tests.support.process import Process, lbproxy
from tests.support.rig import RawClient, post

CLIENTS = 24
PATH = "/v1/chat/completions"
PATIENT = "drain: {lame_duck: 0s, deadline: 1h}\ntimeouts: {client_head: 1h, client_idle: 1h}"
"""A stop that waits for something else than responses would take an hour, also if that is the idle time-out of the
clients' connections: with the default of 75 s, a fraction of it would not be noticed here."""


async def stop_in_the_middle(folder: Path) -> tuple[float, int, list[bytes]]:
    """Twelve streams and twelve whole responses, each of a client that keeps its connection open after it. Returns by
    how many seconds the last response came before the process was found to have ended, its exit code, and the bodies.
    """
    go_on = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        stream = b"true" in request.body
        if stream:
            await wire.send(STREAM_HEAD + event("1"))
        await go_on.wait()
        await wire.send(event("2") + LAST if stream else answer())

    async with ScriptedEndpoint({PATH: script}) as server:
        with lbproxy(folder, [f"{{url: {server.url}, health: null, models: [m]}}"], PATIENT) as (process, url, _):
            port = int(url.rpartition(":")[2])
            clients = [RawClient(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(CLIENTS)]
            for number, client in enumerate(clients):
                client.send(post(b'{"model":"m","stream":%b}' % (b"true" if number % 2 else b"false")))
            await until(lambda: server.asked(PATH) == CLIENTS, "all run")
            process.process.send_signal(signal.SIGTERM)
            await until(lambda: process.lines("stop"), "it heard of it")
            assert process.process.poll() is None
            go_on.set()
            replies = await asyncio.gather(*(client.reply() for client in clients))
            last_at = time.monotonic()
            await ends(process)
            took_s = time.monotonic() - last_at
            for client in clients:
                client.writer.close()
            return took_s, process.process.returncode, [reply.body for reply in replies]


async def ends(process: Process) -> None:
    await until(lambda: process.process.poll() is not None, "it ended", within_s=30.0)


def test_a_stop_ends_after_the_last_response_though_clients_keep_their_connections(tmp_path: Path) -> None:
    _, code, bodies = run(stop_in_the_middle(tmp_path))
    assert code == 0
    assert bodies == [b'{"ok":true}', b"data: 1\n\ndata: 2\n\n"] * (CLIENTS // 2)


if __name__ == "__main__":
    for _ in range(5):
        with tempfile.TemporaryDirectory() as made:
            print(f"{asyncio.run(stop_in_the_middle(Path(made)))[0]:.2f} s after the last response", flush=True)
