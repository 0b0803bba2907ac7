"""A small HTTP server that answers exactly what a test says, byte for byte, and remembers what it was asked.

    async with Scripted() as server:
        server.script("/health", answer(200, b"ok"))
        server.script("/metrics", hang)
        ...
        assert server.asked("/health") == 3

A script is bytes, written as they are, or an async function of the `Exchange`, which may write in steps, wait, close or
abort. Paths without a script get 404. Scripts can be replaced at any time. It keeps connections alive unless a script
closes them; bodies are read if they have a Content-Length.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    method: str
    target: str
    head: bytes
    """From the request line to the empty line."""
    body: bytes
    connection: int
    """Which connection it came on, counted from 1."""
    at: float
    """Monotonic seconds."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(slots=True)
class Exchange:
    """One request and the way to answer it."""

    received: Received
    _writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """FIN, after what was sent."""
        self._writer.close()

    def abort(self) -> None:
        """RST: what was sent and not read is lost."""
        self._writer.transport.abort()


Script: TypeAlias = bytes | Callable[[Exchange], Awaitable[None]]


def answer(
    status: int, body: bytes = b"", content_type: str = "text/plain", *, fields: bytes = b"", close: bool = False
) -> bytes:
    """A whole answer with a Content-Length. `fields`: more field lines, each with its CRLF."""
    connection = b"Connection: close\r\n" if close else b""
    head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n".encode()
    return head + connection + fields + b"\r\n" + body


def model_list(*ids: str, parent: str | None = None) -> bytes:
    """A whole answer to GET /v1/models."""
    base = f',"parent":"{parent}"' if parent else ""
    entries = ",".join(f'{{"id":"{name}","object":"model"{base if name != parent else ""}}}' for name in ids)
    return answer(200, f'{{"object":"list","data":[{entries}]}}'.encode(), "application/json")


async def hang(_: Exchange) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def abort(exchange: Exchange) -> None:
    """Reset the connection instead of answering."""
    exchange.abort()


@dataclass(slots=True)
class Scripted:
    """The server, on a free port of 127.0.0.1."""

    received: list[Received] = field(default_factory=list)
    connections: int = 0
    """Accepted so far."""
    open_connections: int = 0
    port: int = 0
    _scripts: dict[str, Script] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Scripted:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def listen(self) -> None:
        """Accept connections; after `stop`, on the same port again."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and reset those that are open."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, path: str, script: Script) -> None:
        """How `path` is answered from now on."""
        self._scripts[path] = script

    def asked(self, path: str) -> int:
        """How often `path` was asked for."""
        return sum(one.path == path for one in self.received)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        self.open_connections += 1
        try:
            await self._serve(reader, writer, self.connections)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open_connections -= 1
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while not writer.is_closing():
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)
            fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:-2])
            body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
            received = Received(method, target, head, body, connection, time.monotonic())
            self.received.append(received)
            script = self._scripts.get(received.path, _NOT_FOUND)
            exchange = Exchange(received, writer)
            if isinstance(script, bytes):
                await exchange.send(script)
                if b"Connection: close" in script:
                    writer.close()
                    await writer.wait_closed()
            else:
                await script(exchange)


_NOT_FOUND = answer(404)


async def eventually(condition: Callable[[], object], *, within_s: float = 15.0) -> None:
    """Wait until `condition()` is true; AssertionError if that takes too long."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)
