# SPDX-License-Identifier: Apache-2.0
"""Kinds that never come to a body: connecting, heads, empty lines, pipelines, nonsense."""

from __future__ import annotations

import asyncio

from tests.security.hostile.clients.material import MIB, chat, get, head, long_head, mutated, post, stream
from tests.security.hostile.clients.wire import Attacker, Connection, Kind

RUNNING = 3000
"""Events of a stream that runs while something is sent behind it, 20 ms apart: a minute."""


async def connect_silent(a: Attacker) -> None:
    """Connects, and sends nothing."""
    async with a.connect() as it:
        await it.read_to_end()


async def connect_reset(a: Attacker) -> None:
    """Connects, and resets at once or soon."""
    async with a.connect() as it:
        await asyncio.sleep(a.rng.choice((0.0, 0.0, 0.01)))
        it.reset()


async def head_half(a: Attacker) -> None:
    """Half a head, then nothing; after another request or as the first."""
    async with a.connect() as it:
        if a.rng.random() < 0.5:
            await it.send(get(a.prey, "/health"))
        whole = head(a.prey)
        await it.send(whole[: a.rng.randrange(1, len(whole) - 2)])
        await it.read_to_end()


async def head_trickle(a: Attacker) -> None:
    """A head of which a byte comes every now and then."""
    async with a.connect() as it:
        whole = long_head(a.prey, 2000, 20)
        async with asyncio.TaskGroup() as both:
            both.create_task(it.read_to_end())
            both.create_task(it.send_pieces((whole[n : n + 1] for n in range(len(whole))), 0.3))


async def head_bytes(a: Attacker) -> None:
    """Whole requests, each byte in a packet."""
    async with a.connect() as it:
        while True:
            whole = a.rng.choice((get(a.prey, "/health"), post(a.prey, chat(a.prey))))
            await it.send_pieces(whole[n : n + 1] for n in range(len(whole)))
            if not await it.read():
                return


async def head_fields(a: Attacker) -> None:
    """Heads as large and with as many fields as may be, one after the other."""
    async with a.connect() as it:
        while True:
            await it.send(long_head(a.prey, 60 << 10, a.rng.choice((4, 30, 120))))
            if not await it.read():
                return


async def head_endless(a: Attacker) -> None:
    """A head that never ends, in one field or in many."""
    async with a.connect() as it:
        line = a.rng.choice((b"a" * 4096, b"X-A: b\r\n" * 512, b" folded\r\n" * 512))
        await it.send(b"GET /health HTTP/1.1\r\nX-First: ")
        await it.fill(line, 16 * MIB)
        await it.read_to_end()


async def empty_lines(a: Attacker) -> None:
    """Megabytes of CRLFs (A1), before anything."""
    async with a.connect() as it:
        await it.fill(a.rng.choice((b"\r\n", b"\r\n", b"\n")), 4 * MIB)
        await it.read_to_end()


async def empty_lines_behind(a: Attacker) -> None:
    """The same behind a request that runs, or unread ones that need no key."""
    async with a.connect() as it:
        await it.send(_before(a))
        await it.fill(b"\r\n", 4 * MIB)
        await it.read_to_end()


async def heads_behind(a: Attacker) -> None:
    """Large heads behind a request that runs (A2)."""
    async with a.connect(tiny=True) as it:
        await it.send(_before(a))
        await it.fill(long_head(a.prey, 60 << 10, a.rng.choice((4, 30, 120))), 8 * MIB)
        await asyncio.sleep(20)


async def garbage_behind(a: Attacker) -> None:
    """Nonsense behind a request that runs; then its answer is read."""
    async with a.connect() as it:
        await it.send(_before(a))
        await it.fill(a.rng.choice((a.rng.randbytes(1000), b"\x00", b"GET ", b":")), MIB)
        await it.read_to_end()


async def pipeline_read(a: Attacker) -> None:
    """Thousands of small requests in one packet, whose answers are read."""
    async with a.connect() as it:
        await _pipeline(a, it, reading=True)


async def pipeline_unread(a: Attacker) -> None:
    """The same, unread."""
    async with a.connect(tiny=True) as it:
        await _pipeline(a, it, reading=False)


async def _pipeline(a: Attacker, it: Connection, *, reading: bool) -> None:
    one = a.rng.choice((get(a.prey, "/health"), get(a.prey, "/nowhere"), post(a.prey, chat(a.prey))))
    async with asyncio.TaskGroup() as both:
        if reading:
            both.create_task(it.read_to_end())
        await it.fill(one, 5000 * len(one))
        await asyncio.sleep(10)


async def lanes(a: Attacker) -> None:
    """Requests that go to either lane in turn, in one packet or in two."""
    async with a.connect() as it:
        quick, slow = post(a.prey, chat(a.prey)), post(a.prey, chat(a.prey), more="Expect: 100-continue\r\nX_Y: z\r\n")
        for _ in range(200):
            mixed = b"".join(a.rng.choice((quick, slow)) for _ in range(a.rng.randrange(1, 6)))
            at = a.rng.randrange(len(mixed))
            await it.send_pieces((mixed[:at], mixed[at:]))
            if not await it.read():
                return


async def random_bytes(a: Attacker) -> None:
    """Noise."""
    async with a.connect() as it:
        await it.send(a.rng.randbytes(int(a.often(1, MIB))))
        await it.read_some(5)


async def malformed(a: Attacker) -> None:
    """Nearly valid requests one behind the other, in pieces."""
    async with a.connect() as it:
        for _ in range(a.rng.randrange(1, 8)):
            data = mutated(a.prey, a.rng)
            at = a.rng.randrange(len(data) + 1)
            await it.send_pieces((data[:at], data[at:]))
        how = a.rng.randrange(4)
        if how == 0:
            it.half_close()
        await it.read_some(a.often(0.01, 3))
        if how == 1:
            it.reset()


def _before(a: Attacker) -> bytes:
    """What runs, or is unread, while more comes."""
    if a.prey.key is None:
        return get(a.prey, "/health")
    return stream(a.prey, RUNNING, 20)


KINDS: tuple[Kind, ...] = (
    *(connect_silent, connect_reset, head_half, head_trickle, head_bytes, head_fields, head_endless, empty_lines),
    *(empty_lines_behind, heads_behind, garbage_behind, pipeline_read, pipeline_unread, lanes, random_bytes, malformed),
)
