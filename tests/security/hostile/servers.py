# SPDX-License-Identifier: Apache-2.0
"""The kinds of hostile model servers, in a process of their own.

    python -m tests.security.hostile.servers PLAN      PLAN: {"kinds": [names], "core": number or null}

It writes a JSON line of their URLs by name, and ends with its stdin, of which each line has those that change their
pages stand still, or change them again: what lbproxy holds for them would be another at each look. Each server lists
one model of its own name, so that only who asks for it comes to it; what it does to lbproxy's probes it does to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import random
import re
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import uvloop

from tests.security.hostile.clients.crowd import settle
from tests.security.hostile.honest import MARK, listen, models, response
from tests.support.endpoint import LAST, NOT_FOUND, OK, STREAM_HEAD, Received, Script, Wire, answer, chunk, event
from tests.support.sockets import BINARY, CONT, TEXT, frame, switch
from tests.support.tcp_server import TcpServer

MIB = 1 << 20
BIG = 256 << 10
"""Of what is written at once, where a kind writes without end."""


def _data(mark: bytes) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": mark.decode()}, "finish_reason": None}]})


def _mark(request: Received) -> bytes:
    found = MARK.search(request.body)
    return found[0] if found else b"none"


async def _flood(wire: Wire, piece: bytes, size: int) -> None:
    """`size` bytes of a piece again and again."""
    block = piece * max(1, BIG // len(piece))
    for _ in range(-(-size // len(block))):
        await wire.send(block)


async def honestly(wire: Wire, request: Received) -> None:
    """A short stream, or a whole answer."""
    if b'"stream": true' in request.body:
        await wire.send(STREAM_HEAD + event(_data(_mark(request))) * 3 + event("[DONE]") + LAST)
    else:
        await wire.send(answer(b'{"choices":[{"message":{"content":"%s"}}]}' % _mark(request)))


async def byte_chunks(wire: Wire, _: Received) -> None:
    """A stream in chunks of a byte (A6)."""
    await wire.send(STREAM_HEAD)
    await _flood(wire, b"".join(chunk(bytes([one])) for one in b'data: {"choices":[]}\n\n'), 20 * MIB)
    await wire.send(LAST)


async def tiny_events(wire: Wire, _: Received) -> None:
    """Events and comments as small as can be, each in a chunk, in one write."""
    await wire.send(STREAM_HEAD)
    await _flood(wire, chunk(b":\n\n") + chunk(b"\n") + chunk(b"data:\n\n"), 20 * MIB)
    await wire.send(LAST)


async def endless_event(wire: Wire, _: Received) -> None:
    """One event, or comment, that does not end."""
    await wire.send(STREAM_HEAD + chunk(b"data: "))
    await _flood(wire, chunk(b"x" * 1000), 100 * MIB)
    await wire.send(LAST)


async def endless_head(wire: Wire, _: Received) -> None:
    """A head that does not end."""
    await wire.send(b"HTTP/1.1 200 OK\r\n")
    await _flood(wire, b"X-A: b\r\n", 20 * MIB)


async def informational(wire: Wire, request: Received) -> None:
    """1xx responses without end, then an answer."""
    await _flood(wire, b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 8 * MIB)
    await honestly(wire, request)


async def endless_trailers(wire: Wire, request: Received) -> None:
    """Trailers without end."""
    await wire.send(STREAM_HEAD + event(_data(_mark(request))) + b"0\r\n")
    await _flood(wire, b"X-A: b\r\n", 20 * MIB)


async def endless_answer(wire: Wire, _: Received) -> None:
    """An answer that is not streamed, of a gigabyte."""
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1073741824\r\n\r\n")
    await _flood(wire, b" ", 1 << 30)


async def slow(wire: Wire, request: Received) -> None:
    """A byte of an honest answer every now and then."""
    whole = answer(b'{"choices":[{"message":{"content":"%s"}}]}' % _mark(request))
    for at in range(len(whole)):
        await wire.send(whole[at : at + 1])
        await asyncio.sleep(0.1)


async def forged(wire: Wire, request: Received) -> None:
    """Fields that only lbproxy may set, and its own address (A15, E5)."""
    more = "".join(
        f"{name}: forged\r\n"
        for name in ("x-lbproxy-endpoint", "x-lbproxy-reason", "x-lbproxy-tier", "x-lbproxy-explain", "x-request-id")
    )
    address = f"http://{request.field('host')}/elsewhere"
    fields = f"{more}Location: {address}\r\nContent-Location: {address}\r\n"
    status = random.choice((200, 201, 307, 402, 429, 503, 529))
    await wire.send(answer(b'{"content": "%s"}' % _mark(request), status=status, more=fields))


async def breaking(wire: Wire, request: Received) -> None:
    """RST, FIN or FIN of one direction somewhere in an honest stream."""
    whole = STREAM_HEAD + event(_data(_mark(request))) * 20 + event("[DONE]") + LAST
    await wire.send(whole[: random.randrange(len(whole))])
    how = random.randrange(3)
    if how == 0:
        wire.reset()
    elif how == 1:
        wire.close()
    else:
        wire.writer.write_eof()
        await wire.watch()


async def late(wire: Wire, request: Received) -> None:
    """An honest answer, and soon another, unless the next request is there (A16).

    To send it after lbproxy has sent the next request is what no proxy could notice; that happens now and then, as a
    look and a write are two steps. So this is the end of the connection: one request at most gets another's answer.
    """
    await honestly(wire, request)
    await asyncio.sleep(random.choice((0.0, 0.0001, 0.001, 0.05, 0.5)))
    if wire.reader._buffer:  # type: ignore[attr-defined]
        return
    own = wire.writer.get_extra_info("socket")
    if own is None:
        return  # lbproxy has closed it
    sock = socket.socket(fileno=os.dup(own.fileno()))
    with sock, contextlib.suppress(BlockingIOError):
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return
    await wire.send(answer(b'{"choices":[{"message":{"content":"%s"}}]}' % _mark(request)))
    await wire.watch()
    wire.close()


async def bomb(wire: Wire, _: Received) -> None:
    """A compressed answer that would be a thousand times as large."""
    await wire.send(answer(_BOMB, more="Content-Encoding: gzip\r\n"))


_BOMB = gzip.compress(b'data: {"usage": {"total_tokens": 1}}\n\n' * (MIB // 2))


async def noise(wire: Wire, request: Received) -> None:
    """Bytes at random, also in the middle."""
    head = random.choice((b"", STREAM_HEAD, STREAM_HEAD + event(_data(_mark(request)))))
    await wire.send(head + random.randbytes(random.choice((1, 100, 100_000))))
    wire.close()


async def socket_flood(wire: Wire, request: Received) -> None:
    """A WebSocket with tiny fragments and huge frames; other requests are answered honestly."""
    if request.field("upgrade") is None:
        await honestly(wire, request)
        return
    await wire.send(switch(request) if request.field("sec-websocket-key") else NOT_FOUND)
    await wire.send(frame(TEXT, b"x", fin=False))
    await _flood(wire, frame(CONT, b"", fin=False) + frame(CONT, b"x", fin=False), 4 * MIB)
    await wire.send(frame(CONT, b"x") + frame(BINARY, b"y" * 60 * MIB))
    await wire.send(b"\x82\x7f" + struct.pack("!Q", 60 * MIB))
    await _flood(wire, b"z", 30 * MIB)
    await wire.watch()


def _page(lines: Iterable[str]) -> bytes:
    return response("".join(f"{line}\n" for line in lines).encode(), "text/plain; version=0.0.4")


def _ranks(count: int, load: float) -> bytes:
    return _page(
        f'vllm:{name}{{engine="{rank}",model_name="m"}} {load}'
        for rank in range(count)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


_calm = asyncio.Event()


def flips(pages: Sequence[bytes]) -> Script:
    """One after the other, again and again; the first one while `_calm`."""
    turns = itertools.cycle(pages)

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(pages[0] if _calm.is_set() else next(turns))

    return script


async def page_slow(wire: Wire, _: Received) -> None:
    """A page or list of which a byte comes now and then."""
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n")
    while not wire.gone.is_set():
        await wire.send(b"#")
        await asyncio.sleep(0.05)


async def page_endless(wire: Wire, _: Received) -> None:
    """A page without an end."""
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    await _flood(wire, b'vllm:num_requests_running{a="b"} 1.0\n', 100 * MIB)


async def page_noise(wire: Wire, _: Received) -> None:
    """A page of nonsense."""
    await wire.send(response(random.randbytes(50_000), "text/plain"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """What a server does, and to whom."""

    generation: Script = honestly
    page: Script = NOT_FOUND
    """Its metrics."""
    listing: Script | None = None
    """Its models; None: honestly."""
    health: Script = OK


_WIDE = [_page(f'vllm:a_{n}{{x="{"y" * 100}"}} {n}' for n in range(15_000))]
_LISTS = [response(models("lists", 0)), response(models("lists", 20_000)), response(b"[" * 100_000), NOT_FOUND]

SERVERS: dict[str, ServerKind] = {
    **{
        script.__name__.replace("_", ""): ServerKind(generation=script)
        for script in (
            *(byte_chunks, tiny_events, endless_event, endless_head, informational, endless_trailers, endless_answer),
            *(slow, forged, breaking, late, bomb, noise, socket_flood),
        )
    },
    "ranks": ServerKind(page=flips([_ranks(1, 0.0), _ranks(64, 1.0)])),
    "loads": ServerKind(page=flips([_ranks(2, 0.0), _ranks(2, 1e308), _ranks(2, float("nan")), _ranks(2, -1.0)])),
    "widepages": ServerKind(page=flips(_WIDE)),
    "lists": ServerKind(listing=flips(_LISTS)),
    "slowpages": ServerKind(page=page_slow, listing=page_slow, health=page_slow),
    "endlesspages": ServerKind(page=page_endless, listing=page_endless, health=page_endless),
    "noisepages": ServerKind(page=page_noise, listing=page_noise),
    "ups": ServerKind(health=flips([OK, answer(status=503), OK, OK, b"HTTP/1.1 999 x\r\n\r\n"])),
}
"""By name, which is its model's too."""
OPEN = "open"
"""A server that is honest, for hostile clients: what it takes to serve them is not what friends shall wait for."""


class HostileServer(TcpServer):
    """One of them. It keeps nothing of what it was asked."""

    limit_bytes = MIB

    def __init__(self, name: str) -> None:
        super().__init__()
        self._kind = SERVERS[name]
        self._listing = self._kind.listing or response(models(name, 0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            while (request := await wire.read_request()) is not None:
                script = self._script(request.path)
                await (wire.send(script) if isinstance(script, bytes) else script(wire, request))
        except (OSError, ValueError, RuntimeError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def _script(self, path: str) -> Script:
        known = {"/health": self._kind.health, "/metrics": self._kind.page, "/v1/models": self._listing}
        return known.get(path) or (self._kind.generation if re.match("/v1/", path) else NOT_FOUND)


async def run(kinds: Iterable[str]) -> None:
    """Until the end of stdin."""
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: (await stack.enter_async_context(HostileServer(name))).url for name in kinds if name != OPEN}
        if OPEN in kinds:
            server, urls[OPEN] = await listen(OPEN, adapters=0)
            stack.callback(server.close)
        print(json.dumps(urls), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            (_calm.clear if _calm.is_set() else _calm.set)()


def main(argument: str) -> None:
    plan = json.loads(argument)
    settle(plan["core"])
    uvloop.run(run(plan["kinds"]))


if __name__ == "__main__":
    main(sys.argv[1])
