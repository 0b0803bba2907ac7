# SPDX-License-Identifier: Apache-2.0
"""WebSockets for tests. Two libraries speak here: aiohttp, and `websockets`, of which lbproxy uses the frames; and raw
connections of which a test writes every byte.
"""

from __future__ import annotations

import asyncio
import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha1

import aiohttp
from aiohttp import web

from tests.support.endpoint import Received, Script, Wire
from tests.support.rig import RawClient, Rig

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
"""Of RFC 6455, section 1.3, as is the accept below."""
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
MASK = b"\x37\xfa\x21\x3d"


def accept_of(key: str) -> str:
    return b64encode(sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()).decode()


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = False, bits: int = 0) -> bytes:
    """A frame, written by hand."""
    size = len(payload)
    first = bytes([(0x80 if fin else 0) | bits | opcode])
    flag = 0x80 if masked else 0
    if size < 126:
        head = first + bytes([flag | size])
    elif size < 1 << 16:
        head = first + bytes([flag | 126]) + struct.pack("!H", size)
    else:
        head = first + bytes([flag | 127]) + struct.pack("!Q", size)
    if not masked:
        return head + payload
    return head + MASK + _masked(payload, MASK)


def _masked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")


def close(code: int, reason: str = "", *, masked: bool = False) -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason.encode(), masked=masked)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    """Opcode, FIN and payload of the next one; IncompleteReadError at the end."""
    first, second = await reader.readexactly(2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack("!Q", await reader.readexactly(8))
    mask = await reader.readexactly(4) if second & 0x80 else b""
    payload = await reader.readexactly(size)
    if mask:
        payload = _masked(payload, mask)
    return first & 0x0F, bool(first & 0x80), payload


async def read_message(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Opcode and payload of the next one, in however many fragments it comes."""
    opcode, fin, payload = await read_frame(reader)
    while not fin:
        kind, fin, more = await read_frame(reader)
        assert kind == CONT
        payload += more
    return opcode, payload


def close_of(payload: bytes) -> tuple[int, str]:
    """Code and reason."""
    return struct.unpack("!H", payload[:2])[0], payload[2:].decode()


def upgrade(path: str = "/v1/realtime?model=m", more: str = "", *, version: str = "13", key: str = KEY) -> bytes:
    """A client's request."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: lb\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: {version}\r\nSec-WebSocket-Key: {key}\r\n{more}\r\n"
    ).encode()


def switch(request: Received, more: str = "") -> bytes:
    """The 101 to it."""
    accept = accept_of(request.field("sec-websocket-key") or "")
    return (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n{more}\r\n"
    ).encode()


def after_switch(script: Callable[[Wire], Awaitable[None]], more: str = "") -> Script:
    """A scripted endpoint that says yes, and then does as `script`."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.send(switch(request, more))
        await script(wire)

    return run


async def raw_socket(rig: Rig, request: bytes | None = None) -> RawClient:
    """A client whose request was answered 101."""
    client = await rig.connect()
    client.send(upgrade() if request is None else request)
    head = await client.head()
    assert head.startswith(b"HTTP/1.1 101 "), head
    return client


class EchoServer:
    """aiohttp's server: it greets, and sends each message back. `closed` has what its clients closed with."""

    def __init__(self) -> None:
        self.closed: list[int | None] = []
        self.open: set[web.WebSocketResponse] = set()
        self.requests: list[web.Request] = []
        self.pongs = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0, protocols=("realtime",), autoping=True)
        await socket.prepare(request)
        self.requests.append(request)
        self.open.add(socket)
        try:
            await socket.send_str("hello")
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    if message.data.startswith("close "):
                        _, code, reason = message.data.split(" ", 2)
                        await socket.close(code=int(code), message=reason.encode())
                    else:
                        await socket.send_str(message.data)
                elif message.type is aiohttp.WSMsgType.BINARY:
                    await socket.send_bytes(message.data)
        finally:
            self.open.discard(socket)
            self.closed.append(socket.close_code)
        return socket

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/realtime", self.handle)
        app.router.add_get("/health", _ok)
        app.router.add_get("/v1/models", _ok)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def kill(self) -> None:
        """As if its process died: every connection is reset."""
        for socket in self.open:
            request = socket._req
            assert request is not None
            assert request.transport is not None
            request.transport.abort()


async def _ok(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


@asynccontextmanager
async def echo_server() -> AsyncIterator[EchoServer]:
    server = EchoServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
