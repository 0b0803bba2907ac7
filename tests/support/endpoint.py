"""A model server of which a test writes every byte: what it answers, in which pieces, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType


@dataclass
class Received:
    """One request as it came."""

    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n")[0].decode()

    def field(self, name: str) -> str | None:
        """The first value of a field."""
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return None


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
            head = await self.reader.readuntil(b"\r\n\r\n")
            lengths = [
                v for k, _, v in (x.partition(b":") for x in head.split(b"\r\n")) if k.lower() == b"content-length"
            ]
            return Received(head, await self.reader.readexactly(int(lengths[0]) if lengths else 0))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def watch(self) -> None:
        """Set `gone` when the proxy closes. A script that awaits it must not read."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionError:
            pass
        self.gone.set()


Script = Callable[[Wire, Received], Awaitable[None]]


def answer(
    body: bytes = b'{"ok":true}', *, status: str = "200 OK", kind: str = "application/json", more: str = ""
) -> bytes:
    """A whole response with a Content-Length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One SSE event, as a chunk."""
    return chunk(f"data: {text}\n\n".encode())


LAST = b"0\r\n\r\n"


async def whole(wire: Wire, _: Received) -> None:
    """The usual script: a small JSON answer."""
    await wire.send(answer())


class ScriptedEndpoint:
    """Listens on a free port of 127.0.0.1; runs `script` for each request."""

    def __init__(self, script: Script = whole) -> None:
        self.script = script
        self.requests: list[Received] = []
        self.wires: list[Wire] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedEndpoint:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse connections, reset those that are open."""
        if self._server is not None:
            self._server.close()
        for wire in self.wires:
            wire.writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        wire = Wire(reader, writer)
        self.wires.append(wire)
        try:
            while (request := await wire.read_request()) is not None:
                self.requests.append(request)
                await self.script(wire, request)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            wire.gone.set()
            if not writer.transport.is_closing():
                writer.close()
