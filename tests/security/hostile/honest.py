# SPDX-License-Identifier: Apache-2.0
"""A model server without a model, as fast as Python can be, which repeats the mark of whoever asks.

What an answer is, the body says, in fields that lbproxy passes on: `stream`,
`answer_events`, `pace_ms`, `answer_bytes`.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

from tests.support.sockets import BINARY, accept_of, frame

MARK = re.compile(rb"mark-[0-9a-z]+-[0-9]+\b")
"""Whose request it is: the friend's name and the request's number."""
KEPT = 4096
"""Bytes of a body that are looked at."""
_NUMBER = {name: re.compile(rb'"%s": ?(\d+)' % name.encode()) for name in ("answer_events", "pace_ms", "answer_bytes")}
_FLOOD = frame(BINARY, b"f" * (32 << 10))
_PAGE = b"".join(
    b'%s{model_name="sim",engine="0"} %s\n' % (name, value)
    for name, value in (
        (b"vllm:num_requests_running", b"1.0"),
        (b"vllm:num_requests_waiting", b"0.0"),
        (b"vllm:kv_cache_usage_perc", b"0.1"),
    )
)


def models(name: str, more: int) -> bytes:
    """A list of the model and so many adapters: lbproxy's own list is as long."""
    ids = [name, *(f"adapter-{n}-{'of-a-long-name' * 5}" for n in range(more))]
    return json.dumps({"object": "list", "data": [{"id": one, "object": "model"} for one in ids]}).encode()


def response(body: bytes, kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (kind.encode(), len(body), body)


_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(text: bytes) -> bytes:
    data = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text
    return b"%x\r\n%s\r\n" % (len(data), data)


class Honest(asyncio.Protocol):
    """One connection of lbproxy's. Requests come one after the other."""

    def __init__(self, listing: bytes) -> None:
        self._listing = response(listing)
        self._buffer = b""
        self._head = b""
        self._body = b""
        self._left = 0
        self._socket = False
        self._transport: asyncio.Transport | None = None
        self._writing: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        if self._writing is not None:
            self._writing.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        if self._socket:
            return
        if self._left:
            self._take(data)
            return
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if end:
            self._head, self._body, self._buffer = head, b"", b""
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self._left = int(length[1]) if length else 0
            self._take(rest)

    def _take(self, data: bytes) -> None:
        self._left -= len(data)
        if len(self._body) < KEPT:
            self._body += data[:KEPT]
        if self._left <= 0:
            self._left = 0
            self._answer()

    def _answer(self) -> None:
        path = self._head.split(b" ", 2)[1]
        if path == b"/v1/models":
            self._write(self._listing)
        elif path == b"/metrics":
            self._write(response(_PAGE, "text/plain; version=0.0.4"))
        elif b"websocket" in self._head:
            self._open_socket(b"flood=1" in path)
        elif b'"stream": true' in self._body:
            self._writing = asyncio.create_task(self._stream())
        else:
            text = self._mark() + b"." * self._number("answer_bytes")
            usage = b'"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}'
            self._write(response(b'{"choices":[{"index":0,"message":{"content":"%s"}}],%s}' % (text, usage)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _mark(self) -> bytes:
        found = MARK.search(self._body)
        return found[0] if found else b"none"

    def _number(self, name: str) -> int:
        found = _NUMBER[name].search(self._body)
        return int(found[1]) if found else 0

    async def _stream(self) -> None:
        event, pace_s = _event(self._mark()), self._number("pace_ms") / 1000
        left = self._number("answer_events") or 3
        head = _STREAM
        while left:
            count = 1 if pace_s else min(left, 50)
            await self._may_write.wait()
            self._write(head + event * count)
            head = b""
            left -= count
            await asyncio.sleep(pace_s)
        done = b"data: [DONE]\n\n"
        self._write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))

    def _open_socket(self, flood: bool) -> None:
        self._socket = True
        key = re.search(rb"(?i)\r\nsec-websocket-key: *(\S+)", self._head)
        accept = accept_of(key[1].decode() if key else "")
        self._write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %s\r\n\r\n" % accept.encode()
        )
        if flood:
            self._writing = asyncio.create_task(self._flood())

    async def _flood(self) -> None:
        while self._transport is not None:
            await self._may_write.wait()
            self._write(_FLOOD)
            await asyncio.sleep(0)


async def listen(name: str, *, adapters: int, port: int = 0) -> tuple[asyncio.Server, str]:
    """A server that lists the model `name` and so many adapters, and its URL."""
    listing = models(name, adapters)
    server = await asyncio.get_running_loop().create_server(lambda: Honest(listing), "127.0.0.1", port, backlog=1024)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
