# SPDX-License-Identifier: Apache-2.0
"""Kinds that abuse the response: they do not read it, read it too slowly, leave, or stay and ask nothing."""

from __future__ import annotations

import asyncio

from tests.security.hostile.clients.material import chat, get, post, stream
from tests.security.hostile.clients.wire import Attacker, Kind

LONG = 1_000_000
"""Events; nobody reads so many."""


async def stream_unread(a: Attacker) -> None:
    """A stream as fast as the server can, of which nothing is read."""
    async with a.connect(tiny=True) as it:
        await it.send(stream(a.prey, LONG))
        await asyncio.sleep(30)


async def stream_sipped(a: Attacker) -> None:
    """A stream of which some bytes are read now and then."""
    async with a.connect(tiny=True) as it:
        await it.send(stream(a.prey, LONG))
        while await it.read(a.rng.choice((1, 100, 2000))):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def stream_left(a: Attacker) -> None:
    """A stream that is left soon after it began: RST, FIN or half-closed."""
    async with a.connect() as it:
        await it.send(stream(a.prey, 500, 20))
        await it.read_some(a.often(0.001, 1))
        how = a.rng.randrange(3)
        if how == 0:
            it.reset()
        elif how == 1:
            it.half_close()
            await it.read_some(5)


async def half_closed(a: Attacker) -> None:
    """Whole requests, and FIN before the answer."""
    async with a.connect() as it:
        await it.send(post(a.prey, chat(a.prey)) * a.rng.choice((1, 3)))
        it.half_close()
        await it.read_some(5)


async def models_unread(a: Attacker) -> None:
    """Long lists of lbproxy's own that nobody reads (A4)."""
    async with a.connect(tiny=True) as it:
        await it.fill(get(a.prey, "/v1/models"), 8 << 10)
        await asyncio.sleep(30)


async def errors_unread(a: Attacker) -> None:
    """Refusals that nobody reads, behind each other."""
    async with a.connect(tiny=True) as it:
        one = a.rng.choice((get(a.prey, "/nowhere"), post(a.prey, b"{"), post(a.prey, b'{"model": "none"}')))
        await it.fill(one, 2 << 20)
        await asyncio.sleep(30)


async def idle(a: Attacker) -> None:
    """Asks once, and keeps the connection."""
    async with a.connect() as it:
        await it.send(post(a.prey, chat(a.prey)))
        await it.read_to_end()


KINDS: tuple[Kind, ...] = (stream_unread, stream_sipped, stream_left, half_closed, models_unread, errors_unread, idle)
