# SPDX-License-Identifier: Apache-2.0
"""Clients that do next to nothing, many of them, in a process of their own.

    python -m tests.chaos.idle KIND COUNT URL

`idle` asks for the models once and keeps the connection. `heads` sends a head byte by byte, one a second, without end;
`bodies` a body. `readers` asks for a stream and reads nothing, with the smallest receive buffer. `vanish-rst` and
`vanish-fin` ask for streams, and go on a line of input. Each connection that ends adds a line: seconds since it began.
First line: `ready`, when all are connected. It ends with its input; the connections do in groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import time
from urllib.parse import urlsplit

import uvloop

BODY = b'{"model":"%s","prompt":"x","max_tokens":%d,"ignore_eos":true,"stream":true}'
KINDS = ("idle", "heads", "bodies", "readers", "vanish-rst", "vanish-fin")
AT_A_TIME = 200
"""Connections that are being made, for the listening queue is finite; and that end in one moment."""


def post(model: bytes, tokens: int) -> bytes:
    body = BODY % (model, tokens)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


class Client:
    """One connection. Plain sockets: a stream's buffers would read ahead."""

    def __init__(self, kind: str, address: tuple[str, int]) -> None:
        self._kind = kind
        self._address = address
        self.sock = socket.socket()
        self.sock.setblocking(False)
        if kind == "readers":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, self._address)
        if self._kind == "idle":
            await loop.sock_sendall(self.sock, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await loop.sock_recv(self.sock, 4096)
        elif self._kind == "readers":
            await loop.sock_sendall(self.sock, post(b"hose", 1))
        elif self._kind.startswith("vanish"):
            await loop.sock_sendall(self.sock, post(b"sim", 20_000))
            await loop.sock_recv(self.sock, 16)

    async def go_on(self) -> None:
        """Do what it does until the connection ends."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            if self._kind == "heads":
                await self._drip(b"POST /v1/completions HTTP/1.1\r\nX: ")
            elif self._kind == "bodies":
                await self._drip(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
            elif self._kind == "idle":
                await asyncio.get_running_loop().sock_recv(self.sock, 4096)
            else:
                await asyncio.get_running_loop().create_future()
        print(f"{time.monotonic() - began:.3f}", flush=True)

    async def _drip(self, first: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.sock, first)
        ended = loop.create_task(loop.sock_recv(self.sock, 4096))
        while not ended.done():
            await loop.sock_sendall(self.sock, b"x")
            await asyncio.wait([ended], timeout=1.0)

    def vanish(self) -> None:
        if self._kind == "vanish-rst":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


async def main(kind: str, count: int, url: str) -> None:
    parts = urlsplit(url)
    clients = [Client(kind, (parts.hostname or "", parts.port or 80)) for _ in range(count)]
    for start in range(0, count, AT_A_TIME):
        await asyncio.gather(*(one.begin() for one in clients[start : start + AT_A_TIME]))
    print("ready", flush=True)
    going = [asyncio.ensure_future(one.go_on()) for one in clients]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)
    await ended.wait()
    for task in going:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    for start in range(0, count, AT_A_TIME):
        for one in clients[start : start + AT_A_TIME]:
            one.vanish()
        await asyncio.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    assert sys.argv[1] in KINDS, sys.argv
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
