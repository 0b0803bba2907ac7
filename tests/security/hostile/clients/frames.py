# SPDX-License-Identifier: Apache-2.0
"""Kinds that speak WebSocket, or nearly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.fuzz.mutate import mutate
from tests.security.hostile.clients.material import MIB, get, upgrade_fields
from tests.security.hostile.clients.wire import Attacker, Connection, Kind
from tests.support.sockets import BINARY, CLOSE, CONT, PING, PONG, TEXT, frame

SEEDS = [
    frame(TEXT, b"hello", masked=True),
    frame(BINARY, b"\x00" * 200, masked=True),
    frame(TEXT, b"hel", fin=False, masked=True) + frame(CONT, b"lo", masked=True),
    frame(PING, b"p", masked=True) + frame(PONG, b"p", masked=True),
    frame(CLOSE, b"\x03\xe8", masked=True),
    frame(TEXT, b"x" * 70_000, masked=True),
]
TOKENS = (b"\x81", b"\x82", b"\x88", b"\x89", b"\xff", b"\x7f", b"\xfe", b"\x00" * 8, b"\x80\x80", b"\xc1")
HUGE_HEAD = b"\x82\xff" + (60 * MIB).to_bytes(8, "big") + b"\x01\x02\x03\x04"


@asynccontextmanager
async def _open(a: Attacker, *, tiny: bool = False, query: str = "") -> AsyncIterator[Connection]:
    """A socket that was answered 101; else the answer is read to its end."""
    async with a.connect(tiny=tiny) as it:
        await it.send(get(a.prey, f"/v1/realtime?model={a.prey.model}{query}", upgrade_fields()))
        answer = await it.read()
        if not answer.startswith(b"HTTP/1.1 101"):
            raise EOFError
        yield it


async def socket_half_frame(a: Attacker) -> None:
    """Most of a huge frame, then nothing (A3)."""
    async with _open(a) as it:
        await it.send(HUGE_HEAD)
        await it.fill(b"\x00", a.rng.choice((1, 20, 59)) * MIB)
        await it.read_to_end()


async def socket_huge(a: Attacker) -> None:
    """Huge frames, one after the other (A11)."""
    async with _open(a) as it:
        for _ in range(3):
            await it.send(HUGE_HEAD)
            await it.fill(b"\x00", 60 * MIB)
        await it.read_some(5)


async def socket_fragments(a: Attacker) -> None:
    """A message in fragments of a byte, or of none."""
    async with _open(a) as it, asyncio.TaskGroup() as both:
        both.create_task(it.read_to_end())
        await it.send(frame(TEXT, b"x", fin=False, masked=True))
        await it.fill(frame(CONT, a.rng.choice((b"", b"x")), fin=False, masked=True), MIB)
        await it.send(frame(CONT, b"x", masked=True))


async def socket_pings(a: Attacker) -> None:
    """Pings without end; pongs unread or read."""
    reading = a.rng.random() < 0.5
    async with _open(a, tiny=not reading) as it, asyncio.TaskGroup() as both:
        if reading:
            both.create_task(it.read_to_end())
        await it.fill(frame(PING, b"p" * 125, masked=True), 6 * MIB)


async def socket_unread(a: Attacker) -> None:
    """The server sends as fast as it can, and nobody reads."""
    async with _open(a, tiny=True, query="&flood=1") as it:
        await asyncio.sleep(30)
        it.reset()


async def socket_malformed(a: Attacker) -> None:
    """Nearly valid frames."""
    async with _open(a) as it:
        await it.send(b"".join(mutate(a.rng, SEEDS, TOKENS) for _ in range(20)))
        await it.read_some(a.often(0.01, 3))
        if a.rng.random() < 0.3:
            it.reset()


async def socket_idle(a: Attacker) -> None:
    """Opens a socket, answers no ping, and stays."""
    async with _open(a) as it:
        await it.read_to_end()


KINDS: tuple[Kind, ...] = (
    *(socket_half_frame, socket_huge, socket_fragments, socket_pings, socket_unread, socket_malformed, socket_idle),
)
