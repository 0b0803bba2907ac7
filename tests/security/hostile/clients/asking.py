# SPDX-License-Identifier: Apache-2.0
"""Clients who do nothing wrong themselves: those of hostile servers, and the crowd that friends are compared with."""

from __future__ import annotations

import asyncio

from tests.security.hostile.clients.material import chat, get, post, upgrade_fields
from tests.security.hostile.clients.wire import Attacker, Kind

LARGE = 32 << 10
"""What an agent sends in a request."""
EVENT = 100
"""About what an event of the honest server takes, with its chunk."""


async def asking(a: Attacker) -> None:
    """Asks the model for streams and whole answers, and reads what comes."""
    async with a.connect() as it:
        for _ in range(20):
            await it.send(post(a.prey, chat(a.prey, stream=a.rng.random() < 0.7)))
            await it.read_some(a.often(0.05, 5))


async def asking_sockets(a: Attacker) -> None:
    """Opens a WebSocket, and reads what comes."""
    async with a.connect() as it:
        await it.send(get(a.prey, f"/v1/realtime?model={a.prey.model}", upgrade_fields()))
        await it.read_some(10)


async def ballast(a: Attacker) -> None:
    """As many bytes as hostile ones sent and got, in requests and answers as large as they may be, evenly."""
    a_second = max(0.5, min(10.0, a.prey.send_rate / LARGE, a.prey.receive_rate / LARGE))
    body = min(4 << 20, int(a.prey.send_rate / a_second))
    answer = min(4 << 20, int(a.prey.receive_rate / a_second))
    more: dict[str, object] = {"answer_bytes": answer}
    if answer > EVENT:
        more = {"stream": True, "answer_events": answer // EVENT}
    request = post(a.prey, chat(a.prey, "word " * (body // 5), **more))
    loop = asyncio.get_running_loop()
    async with a.connect() as it:
        due = loop.time() + a.rng.random() / a_second
        while True:
            await asyncio.sleep(due - loop.time())
            due = max(loop.time(), due + 1 / a_second)
            await it.send(request)
            answered = await it.read_until(b"data: [DONE]\n\n\r\n0\r\n\r\n" if answer > EVENT else b"}}")
            if b"\r\nconnection: close" in answered.lower():
                return


KINDS: tuple[Kind, ...] = (asking, asking_sockets, ballast)
