# SPDX-License-Identifier: Apache-2.0
"""Kinds that attack the admin listener, all without a token."""

from __future__ import annotations

import asyncio

from tests.security.hostile.clients.material import MIB, get, long_head, mutated
from tests.security.hostile.clients.wire import Attacker, Kind


async def admin_silent(a: Attacker) -> None:
    """Connects, and sends nothing (A5)."""
    async with a.connect(admin=True) as it:
        await it.read_to_end()


async def admin_unread(a: Attacker) -> None:
    """Pages that nobody reads (A5)."""
    async with a.connect(admin=True, tiny=True) as it:
        await it.send(get(a.prey, a.rng.choice(("/metrics", "/metrics", "/admin/state", "/dashboard"))) * 20)
        await asyncio.sleep(30)


async def admin_trickle(a: Attacker) -> None:
    """A head of which a byte comes now and then."""
    async with a.connect(admin=True) as it:
        whole = long_head(a.prey, 2000, 20)
        async with asyncio.TaskGroup() as both:
            both.create_task(it.read_to_end())
            both.create_task(it.send_pieces((whole[n : n + 1] for n in range(len(whole))), 0.3))


async def admin_heads(a: Attacker) -> None:
    """Large heads behind each other (A2)."""
    async with a.connect(admin=True, tiny=True) as it:
        await it.fill(long_head(a.prey, 60 << 10, a.rng.choice((4, 30, 120)), "GET /metrics HTTP/1.1"), 8 * MIB)
        await asyncio.sleep(20)


async def admin_empty_lines(a: Attacker) -> None:
    """Megabytes of CRLFs (A1)."""
    async with a.connect(admin=True) as it:
        await it.send(a.rng.choice((b"", get(a.prey, "/metrics"))))
        await it.fill(b"\r\n", 4 * MIB)
        await it.read_to_end()


async def admin_bodies(a: Attacker) -> None:
    """A large body for what needs a token, or none."""
    async with a.connect(admin=True) as it:
        path = a.rng.choice(("/admin/endpoints", "/metrics", "/admin/reload", "/nowhere"))
        await it.send(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {60 * MIB}\r\n\r\n".encode())
        await it.fill(b" ", 59 * MIB)
        await it.read_to_end()


async def admin_malformed(a: Attacker) -> None:
    """Nearly valid requests."""
    async with a.connect(admin=True) as it:
        for _ in range(a.rng.randrange(1, 5)):
            await it.send(mutated(a.prey, a.rng).replace(b"/v1/models", b"/admin/state"))
        await it.read_some(a.often(0.01, 3))


KINDS: tuple[Kind, ...] = (
    *(admin_silent, admin_unread, admin_trickle, admin_heads, admin_empty_lines, admin_bodies, admin_malformed),
)
