# SPDX-License-Identifier: Apache-2.0
"""Both ends of a gateway, byte by byte: a client that writes a case in some pace, and an endpoint that records."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.support.tcp_server import TcpServer

PACES = ("whole", "bytes", "paused")
"""In one write; byte by byte; in parts, each taken in before the next comes."""
BYTEWISE = 1500
"""So much of a long message goes byte by byte."""
OK_BODY = b'{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x"}]}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(OK_BODY), OK_BODY)
_CONTROL = re.compile(
    rb"GET /(?:health|health_generate|get_server_info|get_model_info|v1/models|metrics|server_info)\b"
)
"""What gateways ask by themselves."""


def parts(data: bytes, pace: str) -> list[bytes]:
    """The data in the pieces of a pace."""
    if pace == "whole":
        return [data]
    if pace == "bytes":
        first = [data[at : at + 1] for at in range(min(len(data), BYTEWISE))]
        return first + [data[at : at + 4096] for at in range(BYTEWISE, len(data), 4096)]
    lines = data[:20_000].splitlines(keepends=True)
    halves = [half for line in lines for half in (line[: len(line) // 2], line[len(line) // 2 :]) if half]
    return [*halves, data[20_000:]] if len(data) > 20_000 else halves


async def turns(pace: str) -> None:
    """Let the loop run, so that what was written arrives."""
    for _ in range({"whole": 1, "bytes": 2, "paused": 6}[pace]):
        await asyncio.sleep(0)


@dataclass
class Answer:
    """One final answer, as far as it came."""

    status: int
    head: bytes
    body: bytes
    whole: bool


@dataclass
class Heard:
    """What a client got."""

    raw: bytes = b""
    ended: bool = False
    """The gateway closed or reset the connection."""
    reset: bool = False
    method: str = "POST"
    """Of the first request: an answer to HEAD has no body."""
    answers: list[Answer] = field(default_factory=list)
    interim: list[bytes] = field(default_factory=list)
    """Heads of 1xx answers."""

    def parse(self) -> None:
        """Fill `answers` from `raw`."""
        self.answers.clear()
        self.interim.clear()
        rest = self.raw
        while rest:
            head, found, rest = rest.partition(b"\r\n\r\n")
            match = re.match(rb"HTTP/1\.[01] ([0-9]{3})", head)
            if not found or match is None:
                self.answers.append(Answer(0, head, b"", False))
                return
            status = int(match[1])
            if status < 200:
                self.interim.append(head)
                continue
            body, rest, whole = self._body(head.lower(), status, rest)
            self.answers.append(Answer(status, head, body, whole))

    def _body(self, head: bytes, status: int, rest: bytes) -> tuple[bytes, bytes, bool]:
        if status in {204, 304} or self.method == "HEAD":
            return b"", rest, True
        if re.search(rb"\r\ntransfer-encoding:\s*chunked", head):
            return _unchunk(rest)
        length = re.search(rb"\r\ncontent-length:\s*([0-9]+)", head)
        if length is None:
            return rest, b"", self.ended and not self.reset
        size = int(length[1])
        return rest[:size], rest[size:], len(rest) >= size


def _unchunk(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        line, found, rest = data.partition(b"\r\n")
        match = re.match(rb"[0-9A-Fa-f]+", line)
        if not found or match is None:
            return body, b"", False
        size = int(match[0], 16)
        if not size:
            trailers = b"\r\n" + rest
            _, end, rest = trailers.partition(b"\r\n\r\n")
            return body, rest, bool(end)
        if len(rest) < size + 2:
            return body + rest[:size], b"", False
        body, data = body + rest[:size], rest[size + 2 :]


class Talk:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.heard = Heard()

    @classmethod
    async def open(cls, port: int) -> Talk:
        """To a gateway on this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))

    async def say(self, data: bytes, pace: str, pause_s: float = 0.0) -> None:
        """Write, as long as anybody listens. `pause_s`: between pieces, for a gateway in another process."""
        for piece in parts(data, pace):
            if self.writer.transport.is_closing():
                return
            self.writer.write(piece)
            await turns(pace)
            if pause_s and pace != "whole":
                await asyncio.sleep(pause_s)

    async def hear(self, enough: Callable[[Heard], bool], within_s: float) -> Heard:
        """Read until it is enough, or the end, or the time is over."""
        heard = self.heard
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not heard.ended and not enough(heard):
                    try:
                        data = await self.reader.read(1 << 16)
                    except ConnectionError:
                        data, heard.reset = b"", True
                    heard.ended = not data
                    heard.raw += data
                    heard.parse()
        return heard

    def close(self) -> None:
        """At once."""
        self.writer.transport.abort()


@dataclass
class Seen:
    """A request as the endpoint got it."""

    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n")[0].decode("latin-1")

    def values(self, name: str) -> list[str]:
        """Of a field, as they came."""
        pairs = (line.partition(":") for line in self.head.decode("latin-1").split("\r\n")[1:])
        return [value.strip(" \t") for key, _, value in pairs if key.lower() == name.lower()]

    @property
    def names(self) -> list[str]:
        """Of all fields, in lower case."""
        return [line.partition(":")[0].lower() for line in self.head.decode("latin-1").split("\r\n")[1:] if line]


Reply = Callable[["Endpoint", asyncio.StreamWriter, Seen], Awaitable[None]]


class Endpoint(TcpServer):
    """Records every request, and answers OK, or as `script` does. `async with`."""

    limit_bytes = 1 << 26

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.connections = 0
        self.script: Reply | None = None
        self.greeting: tuple[bytes, bool] | None = None
        """Said to whoever connects, unasked; and whether the connection ends then."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            if self.greeting is not None:
                writer.write(self.greeting[0])
                if self.greeting[1]:
                    writer.close()
                    return
            while (request := await _read_request(reader)) is not None:
                if _CONTROL.match(request.head):
                    writer.write(OK)
                    continue
                self.seen.append(request)
                if self.script is None:
                    writer.write(OK)
                else:
                    await self.script(self, writer, request)
                if writer.transport.is_closing():
                    return
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    """What comes next, however odd; None at the end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except asyncio.IncompleteReadError as error:
        return Seen(error.partial, b"") if error.partial else None
    request = Seen(head, b"")
    try:
        if "chunked" in "".join(request.values("transfer-encoding")).lower():
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                request.body += (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        elif lengths := request.values("content-length"):
            request.body = await reader.readexactly(int(lengths[0]))
    except (asyncio.IncompleteReadError, ValueError):
        return None
    return request
