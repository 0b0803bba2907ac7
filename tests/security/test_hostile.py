# SPDX-License-Identifier: Apache-2.0
"""The short form of `python -m tests.security.hostile`: what a busy machine is no excuse for. Latency is by hand."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.security.hostile.clients.wire import Prey
from tests.security.hostile.friends import Friends
from tests.security.hostile.honest import listen
from tests.security.hostile.kinds import MIX, setup_of
from tests.security.hostile.measure import measured
from tests.support.aio import until
from tests.support.endpoint import Received, ScriptedEndpoint, Wire, answer

SECONDS = 40.0


@pytest.mark.timeout(240)
def test_everything_hostile_at_once_hurts_nobody_else(tmp_path: Path) -> None:
    """All kinds mixed, in the limits of the Kubernetes manifest: others are served, with their own answers, lbproxy
    keeps its memory and lives on without a traceback, and nothing is left of anybody.
    """
    setup = setup_of(MIX, form="kubernetes", connections=40, seed=random.randrange(1 << 30), pin=False)
    setup = replace(setup, friends=8, rate=5.0)
    it = asyncio.run(measured(setup, tmp_path, seconds=SECONDS, rounds=1, compare=False))
    assert not it.faults(), f"seed {setup.seed}: {it.faults()}\n{it.figures()}"
    assert len(it.hostile.waits_ms) > setup.friends
    assert it.crowd.connections > setup.connections


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
