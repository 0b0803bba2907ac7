# SPDX-License-Identifier: Apache-2.0
"""Faults on the wire: what `faults.py` says goes wrong, done to the simulated server's connections.

A fault's response is written to the connection itself, past aiohttp, and the connection ends with it; the handler then
waits for that end, which cancels it, so that aiohttp never writes a response of its own behind. Work that was begun in
the engine is taken back as if the client had left.

`Saboteur` is a middleware, the responses of /faults, and what changes the server as a whole: refusing, standing still
and slowing down go through the two callables that it is given. It owns one task, which waits for the next change.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import orjson
from aiohttp import web

from lbproxy.sim.mock.faults import MAX_TEXT_BYTES, Fault, FaultBook, FaultError, parse_faults

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHOSEN = web.RequestKey("_CHOSEN", Fault)
_EVENT_END = b"\n\n"
_PLACES = {
    "/health": "health",
    "/metrics": "metrics",
    "/wake_up": "wake",
    "/sleep": "sleep",
    "/is_sleeping": "state",
}


class Saboteur:
    """The faults of one server."""

    def __init__(
        self,
        faults: Sequence[Fault],
        seed: int,
        refuse: Callable[[bool], Awaitable[None]],
        pace: Callable[[float | None], None],
        prefix: str,
    ) -> None:
        """`refuse(True)` closes the port and `refuse(False)` opens it.

        `pace` takes how many times as slow the engine is to be; None = it stands still. `prefix`: of the API's paths.
        """
        self._api = f"{prefix}/"
        self._first = faults
        self._book = FaultBook(seed)
        self._refuse = refuse
        self._pace = pace
        self._changes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thaw = asyncio.Event()
        self._refusing = False

    def start(self) -> None:
        """Put into force what is to be from the start."""
        loop = asyncio.get_running_loop()
        self._book.replace(self._first, now=loop.time())
        self._task = loop.create_task(self._follow())

    async def close(self) -> None:
        """Do nothing wrong any more. May be called twice, and without `start`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        """Let the server as a whole be as the faults in force want it, whenever they change or end."""
        loop = asyncio.get_running_loop()
        while True:
            self._changes.clear()
            now = loop.time()
            slow_down = self._book.find("slow-down", now=now)
            factor = 1.0 if slow_down is None else slow_down.numbers["factor"]
            freeze = self._book.find("freeze", now=now)
            self._pace(None if freeze is not None and freeze.on == "all" and freeze.share == 1.0 else factor)
            if freeze is None:
                self._thaw.set()
                self._thaw = asyncio.Event()
            refusing = self._book.find("refuse", now=now) is not None
            if refusing != self._refusing:
                self._refusing = refusing
                await self._refuse(refusing)
            end = self._book.next_end(now=now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._changes.wait()

    # /faults

    def routes(self) -> list[web.RouteDef]:
        """GET shows those in force, POST replaces them, DELETE ends them."""
        return [
            web.get("/faults", self._show, allow_head=False),
            web.post("/faults", self._replace),
            web.delete("/faults", self._replace),
        ]

    async def _show(self, _request: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        shown = [
            {"fault": fault.text, "ends_in_s": None if end is None else round(end - now, 3)}
            for fault, end in self._book.in_force(now=now)
        ]
        return web.Response(body=orjson.dumps(shown), content_type="application/json")

    async def _replace(self, request: web.Request) -> web.StreamResponse:
        try:
            text = (await request.content.read(MAX_TEXT_BYTES + 1)).decode()
            faults = parse_faults(text) if request.method == "POST" else []
        except (FaultError, UnicodeDecodeError) as error:
            return web.Response(status=400, text=f"{error}\n")
        self._book.replace(faults, now=asyncio.get_running_loop().time())
        self._changes.set()
        return await self._show(request)

    # Requests

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request meet what is in force."""
        if request.path == "/faults":
            return await handler(request)
        now = asyncio.get_running_loop().time()
        body = await request.read() if self._book.reads_bodies(now=now) else b""
        fault = self._book.chosen(self._place(request), body, now=now)
        if fault is None:
            return await handler(request)
        await request.read()
        return await self._carry_out(fault, request, handler)

    def _place(self, request: web.Request) -> str:
        if request.method == "POST" and request.path.startswith(self._api):
            return "requests"
        return _PLACES.get(request.path, "other")

    async def _carry_out(self, fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        if fault.kind == "freeze":
            thaw = self._thaw
            await thaw.wait()
            return await handler(request)
        if fault.kind == "status":
            return _refusal(int(fault.numbers["code"]), int(fault.numbers["retry-after"]))
        if fault.kind == "garbage":
            wire = Wire(request)
            wire.write(self._book.garbage(fault))
            await wire.end("fin")
        request[_CHOSEN] = fault
        response = await handler(request)
        if isinstance(response, web.Response):
            await _send_whole(Wire(request), response, fault)
        return response


def stream_response(request: web.Request, kind: str = "text/event-stream; charset=utf-8") -> web.StreamResponse:
    """What a handler streams into: aiohttp's own, or one with the fault that was chosen for this request."""
    headers = {"Content-Type": kind}
    fault = request.get(_CHOSEN)
    return web.StreamResponse(headers=headers) if fault is None else SpoiledStream(request, fault, headers)


class Wire:
    """A connection that aiohttp has accepted and is not to write to any more."""

    def __init__(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None:  # the client has just left, which is about to cancel this handler
            raise asyncio.CancelledError
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Write as it is. Bounded by what a response is: nobody reads slowly here."""
        self._transport.write(data)

    async def drip(self, data: bytes, every_s: float) -> None:
        for n in range(len(data)):
            self._transport.write(data[n : n + 1])
            await asyncio.sleep(every_s)

    async def end(self, how: str) -> NoReturn:
        """Close (`fin`) or reset (`rst`); being closed then cancels the handler, so this never returns."""
        if how == "rst":
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")


class SpoiledStream(web.StreamResponse):
    """A stream of events that `break`, `slow-head` or `slow-stream` spoils; written past aiohttp from head to end."""

    def __init__(self, request: web.Request, fault: Fault, headers: dict[str, str]) -> None:
        super().__init__(headers=headers)
        self._wire = Wire(request)
        self._fault = fault
        self._framing = fault.words.get("framing", "chunked")
        self._left = int(fault.numbers["events"]) if fault.kind == "break" else None
        self._pause_s = fault.numbers["every"] if fault.kind == "slow-stream" else 0.0

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write the head."""
        head = _head(self._framing, 200, self.headers["Content-Type"])
        await self._wire.drip(head, self._fault.numbers["every"] if self._fault.kind == "slow-head" else 0.0)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write whole events, each in a chunk of its own."""
        *events, rest = bytes(data).split(_EVENT_END)
        assert not rest, "handlers write whole events"
        for event in events:
            if self._left is not None:
                if not self._left:
                    await self._break(event + _EVENT_END)
                self._left -= 1
            self._wire.write(self._framed(event + _EVENT_END))
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    async def write_eof(self, data: bytes = b"") -> None:
        """End it well, if it has not broken yet: a stream too short for its fault breaks just before its end."""
        if self._left is not None:
            await self._break(b"data: [DONE]\n\n")
        self._wire.write(b"0\r\n\r\n" if self._framing == "chunked" else b"")
        await self._wire.end("fin")

    async def _break(self, event: bytes) -> NoReturn:
        where = self._fault.words["at"]
        if where == "line":
            self._wire.write(self._framed(event[: len(event) // 2]))
        elif where == "chunk":
            framed = self._framed(event)
            self._wire.write(framed[: len(framed) // 2])
        await self._wire.end(self._fault.words["how"])

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data) if self._framing == "chunked" else data


async def _send_whole(wire: Wire, response: web.Response, fault: Fault) -> NoReturn:
    """A response that is not streamed, with the same faults."""
    body = bytes(response.body) if isinstance(response.body, bytes | bytearray) else b""
    framing = fault.words.get("framing", "chunked")
    length = len(body) if framing == "chunked" else None
    head = _head(framing, response.status, response.content_type, length)
    await wire.drip(head, fault.numbers["every"] if fault.kind == "slow-head" else 0.0)
    if fault.kind == "break":
        wire.write(body[: len(body) // 2])
        await wire.end(fault.words["how"])
    wire.write(body)
    await wire.end("fin")


def _head(framing: str, status: int, kind: str, length: int | None = None) -> bytes:
    """The head of a last response on its connection."""
    version = "1.0" if framing == "http/1.0" else "1.1"
    lines = [f"HTTP/{version} {status} Simulated", f"Content-Type: {kind}", "Connection: close"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    elif framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode()


def _refusal(status: int, retry_after_s: int) -> web.Response:
    """An error as vLLM words it."""
    message = f"a simulated fault: status {status}"
    error = {"message": message, "type": "SimulatedFault", "param": None, "code": status}
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    return web.Response(
        body=orjson.dumps({"error": error}), status=status, content_type="application/json", headers=headers
    )
