# SPDX-License-Identifier: Apache-2.0
"""Connections that are drawn step by step: what no kind that somebody thought of does.

A life is a list of steps, each a number of bytes of something, a pause, a read, or an end; what stands behind what is
chance, so that any state of a connection meets any other's bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.security.hostile.clients import material
from tests.security.hostile.clients.wire import Attacker, Connection, Kind
from tests.support.sockets import CONT, TEXT, frame

Step = Callable[[Attacker, Connection], Awaitable[None]]


async def _valid(a: Attacker, it: Connection) -> None:
    await it.send(a.rng.choice(material.samples(a.prey)) * a.rng.choice((1, 1, 2, 50)))


async def _nearly(a: Attacker, it: Connection) -> None:
    await it.send(material.mutated(a.prey, a.rng))


async def _part(a: Attacker, it: Connection) -> None:
    whole = a.rng.choice(material.samples(a.prey))
    await it.send(whole[: a.rng.randrange(len(whole))])


async def _stream(a: Attacker, it: Connection) -> None:
    await it.send(material.stream(a.prey, int(a.often(1, 100_000)), a.rng.choice((0, 20))))


async def _announced(a: Attacker, it: Connection) -> None:
    size = int(a.often(1, 50 * material.MIB))
    await it.send(material.sized(a.prey, size))
    await it.fill(b" ", a.rng.choice((0, size // 2, size)))


async def _in_chunks(a: Attacker, it: Connection) -> None:
    await it.send(material.chunked(a.prey))
    size = int(a.often(1, 64 << 10))
    await it.fill(material.chunk(b" " * size, b";e" * a.rng.choice((0, 0, 1, 500))), int(a.often(1, 8 * material.MIB)))
    await it.send(a.rng.choice((b"", material.LAST_CHUNK, b"0\r\nA: b\r\n\r\n", b"0\r\nA: b\r\n", b"zz\r\n")))


async def _filler(a: Attacker, it: Connection) -> None:
    piece = a.rng.choice((b"\r\n", b"\n", b"\x00", b"A: b\r\n", b"GET / HTTP/1.1\r\n", b"1\r\n \r\n", b"\x89\x80aaaa"))
    await it.fill(piece, int(a.often(1, 4 * material.MIB)))


async def _long(a: Attacker, it: Connection) -> None:
    size = int(a.often(100, 80 << 10))
    await it.send(material.long_head(a.prey, size, a.rng.choice((1, 4, 60, 130))) * a.rng.choice((1, 1, 20)))


async def _socket(a: Attacker, it: Connection) -> None:
    flood = a.rng.choice(("", "&flood=1"))
    await it.send(material.get(a.prey, f"/v1/realtime?model={a.prey.model}{flood}", material.upgrade_fields()))


async def _frames(a: Attacker, it: Connection) -> None:
    size = int(a.often(1, 256 << 10))
    one = frame(a.rng.choice((TEXT, CONT, 2, 8, 9, 10)), b"x" * size, fin=a.rng.random() < 0.7, masked=True)
    await it.fill(one, a.rng.choice((1, 1, material.MIB)))


async def _noise(a: Attacker, it: Connection) -> None:
    await it.send(a.rng.randbytes(int(a.often(1, 100_000))))


async def _pause(a: Attacker, _: Connection) -> None:
    await asyncio.sleep(a.often(0.001, 5))


async def _read(a: Attacker, it: Connection) -> None:
    await it.read_some(a.often(0.001, 5))


async def _sip(a: Attacker, it: Connection) -> None:
    try:
        async with asyncio.timeout(2):
            await it.read(a.rng.choice((1, 100, 10_000)))
    except TimeoutError:
        pass


async def _half_close(_: Attacker, it: Connection) -> None:
    it.half_close()


STEPS: tuple[Step, ...] = (
    *(_valid, _valid, _nearly, _nearly, _part, _stream, _announced, _in_chunks, _filler, _long, _socket, _frames),
    *(_noise, _pause, _pause, _read, _read, _read, _sip, _half_close),
)


async def drawn(a: Attacker) -> None:
    """Steps at random, with a random end."""
    async with a.connect(tiny=a.rng.random() < 0.3) as it:
        for _ in range(a.rng.randrange(1, 10)):
            await a.rng.choice(STEPS)(a, it)
        if a.rng.random() < 0.3:
            it.reset()


async def admin_drawn(a: Attacker) -> None:
    """The same at the admin listener."""
    async with a.connect(admin=True, tiny=a.rng.random() < 0.3) as it:
        for _ in range(a.rng.randrange(1, 6)):
            await a.rng.choice(STEPS)(a, it)


KINDS: tuple[Kind, ...] = (drawn, admin_drawn)
