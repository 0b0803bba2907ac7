# SPDX-License-Identifier: Apache-2.0
"""The short form of `python -m tests.security.hostile`: what a busy machine is no excuse for. Latency is by hand."""

from __future__ import annotations

import asyncio

import pytest

from tests.security.hostile.clients.wire import Prey
from tests.security.hostile.friends import Friends
from tests.security.hostile.honest import listen
from tests.support.aio import until
from tests.support.endpoint import Received, ScriptedEndpoint, Wire, answer


async def _befriended(port: int, count: int = 20) -> Friends:
    """Friends of whatever listens there, after so many answers."""
    friends = Friends(Prey(port=port, admin_port=0, key=None), count=4, rate=50.0, seed=1)
    task = asyncio.create_task(friends.run())
    seen = friends.seen
    await until(lambda: len(seen.waits_ms) + len(seen.mixed) + seen.failures.total() >= count, "they have answers")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.1)  # their connections end a little later
    return friends


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        (answer(b'{"content": "mark-sim99-1"}'), "mixed"),
        (answer(b'{"content": ""}'), "mixed"),
        (answer(b'{"error": {"code": "lb_overloaded"}}', status=503), "503 lb_overloaded"),
        (answer(b"{}")[:-1], "IncompleteReadError"),
    ],
)
def test_friends_notice(script: bytes, seen: str) -> None:
    """An answer of somebody else, of nobody, a refusal, and one that is cut: else the figures would say nothing."""

    async def run() -> None:
        async def once(wire: Wire, _: Received) -> None:
            await wire.send(script)
            wire.close()
            await wire.watch()

        async with ScriptedEndpoint(once) as server:
            friends = await _befriended(server.port)
        assert friends.seen.waits_ms == []
        assert friends.seen.mixed if seen == "mixed" else friends.seen.failures[seen] == friends.seen.failures.total()

    asyncio.run(run())


def test_an_honest_server_gives_each_friend_its_own() -> None:
    async def run() -> None:
        server, url = await listen("sim", adapters=3)
        friends = await _befriended(int(url.rpartition(":")[2]))
        server.close()
        assert friends.seen.mixed == []
        assert not friends.seen.failures

    asyncio.run(run())
