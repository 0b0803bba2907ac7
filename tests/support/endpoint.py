# SPDX-License-Identifier: Apache-2.0
"""A model server of which a test writes every byte: what it answers, in which pieces, and how it ends.

    async with ScriptedEndpoint({"/health": OK, "/metrics": hang}) as server:
        ...
        server.scripts["/health"] = answer(status=503)

A script is bytes, written as they are, or an async function of the wire and the request, which may write in steps,
wait, close or reset. One script alone serves every path. Connections are kept alive unless a script ends them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from tests.support.tcp_server import TcpServer


@dataclass
class Message:
    """A request or a response as it came."""

    head: bytes
    """Up to and with the empty line."""
    body: bytes

    def field(self, name: str) -> str | None:
        """The first value of a field."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return None


@dataclass
class Received(Message):
    at: float
    """Monotonic seconds."""

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n")[0].decode()

    @property
    def path(self) -> str:
        return self.line.split(" ")[1].partition("?")[0]


class Wire:
    """One connection that the endpoint accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()
        """The proxy closed or reset the connection."""

    async def send(self, *pieces: bytes) -> None:
        """Write pieces, each in a packet of its own as far as the kernel allows."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def close(self) -> None:
        """FIN."""
        self.writer.close()

    def reset(self) -> None:
        """RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def read_request(self) -> Received | None:
        """The next request; None when the connection ended."""
        try:
            request = Received(await self.reader.readuntil(b"\r\n\r\n"), b"", time.monotonic())
            request.body = await self.reader.readexactly(int(request.field("content-length") or 0))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return request

    async def watch(self) -> None:
        """Set `gone` when the proxy closes. A script that awaits it must not read."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionError:
            pass
        self.gone.set()


Script: TypeAlias = bytes | Callable[[Wire, Received], Awaitable[None]]


def answer(body: bytes = b'{"ok":true}', *, status: int = 200, kind: str = "application/json", more: str = "") -> bytes:
    """A whole response with a Content-Length. `more`: further field lines, each with its CRLF."""
    head = f"HTTP/1.1 {status} As scripted\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


OK = answer()
NOT_FOUND = answer(status=404)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One SSE event, as a chunk."""
    return chunk(f"data: {text}\n\n".encode())


LAST = b"0\r\n\r\n"


async def hang(wire: Wire, _: Received) -> None:
    """Never answer."""
    await wire.watch()


async def first_event_or_nothing(wire: Wire, request: Received) -> None:
    """Begin what was asked for as a stream with one event, and send no more; never answer anything else."""
    if b"true" in request.body:
        await wire.send(STREAM_HEAD + event("1"))
    await wire.watch()


def echo_after(release: asyncio.Event) -> Script:
    """Send every body back, once it may."""

    async def script(wire: Wire, request: Received) -> None:
        await release.wait()
        await wire.send(answer(request.body))

    return script


async def reset(wire: Wire, _: Received) -> None:
    """Reset the connection instead of answering."""
    wire.reset()


class ScriptedEndpoint(TcpServer):
    """Listens on a free port of 127.0.0.1 (or `host`), and entered again on the same one; or on a Unix socket
    at `path`.

    `scripts`: one for every path, or by path (which a test may change at any time), and 404 elsewhere.
    """

    limit_bytes = 1 << 26

    def __init__(
        self,
        scripts: Script | dict[str, Script] = OK,
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | None = None,
    ) -> None:
        super().__init__(port)
        self.scripts, self._otherwise = (scripts, NOT_FOUND) if isinstance(scripts, dict) else ({}, scripts)
        self.requests: list[Received] = []
        self.wires: list[Wire] = []
        self.host = host
        self.socket_path = path
        self._tls = tls

    @property
    def url(self) -> str:
        if self.socket_path is not None:
            return f"unix:{self.socket_path}"
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    def asked(self, path: str) -> int:
        """How often `path` was asked for."""
        return sum(one.path == path for one in self.requests)

    async def stop(self) -> None:
        """Refuse connections, reset those that are open."""
        self._refuse()
        for wire in self.wires:
            wire.writer.transport.abort()
        await super().stop()

    async def _listen(self) -> asyncio.Server:
        if self.socket_path is not None:
            return await asyncio.start_unix_server(self._connected, self.socket_path, limit=self.limit_bytes)
        server = await asyncio.start_server(
            self._connected, self.host, self.port, limit=self.limit_bytes, backlog=1024, ssl=self._tls
        )
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.wires.append(wire)
        try:
            while (request := await wire.read_request()) is not None:
                self.requests.append(request)
                script = self.scripts.get(request.path, self._otherwise)
                await (wire.send(script) if isinstance(script, bytes) else script(wire, request))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            wire.gone.set()
            if not writer.transport.is_closing():
                writer.close()
