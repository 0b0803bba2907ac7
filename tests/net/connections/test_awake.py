# SPDX-License-Identifier: Apache-2.0
"""While we stand still nobody is late; and who is late all the same is found late in the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.driver.pulse import Pulse
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run
from tests.support.endpoint import OK, ScriptedEndpoint, hang

LIMIT_S = 0.3
STALL_S = 1.0

both_loops = pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])


def stall() -> None:
    """The loop is blocked, as by a SIGSTOP: for longer than any limit here."""
    time.sleep(STALL_S)


def beating_pool() -> ConnectionPool:
    pulse = Pulse()
    pulse.start()
    return ConnectionPool(pulse)


def close(pool: ConnectionPool) -> None:
    pool.pulse.close()
    pool.close()


@both_loops
def test_a_question_that_we_slept_over_is_still_answered(plain: bool) -> None:
    """Its answer lies in the socket when the limit ends."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK}) as endpoint:
            pool = beating_pool()
            for _ in range(3):
                asyncio.get_running_loop().call_later(0.002, stall)
                answer = await fetch(pool, Origin.parse(endpoint.url), "/health", timeout_s=LIMIT_S, max_bytes=100)
                assert answer.status == 200
            close(pool)

    run(main(), plain=plain)


@both_loops
def test_who_never_answers_is_late_though_we_slept(plain: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": hang}) as endpoint:
            pool = beating_pool()
            asyncio.get_running_loop().call_later(0.05, stall)
            began = time.monotonic()
            with pytest.raises(UpstreamError) as caught:
                await fetch(pool, Origin.parse(endpoint.url), "/health", timeout_s=LIMIT_S, max_bytes=100)
            assert caught.value.kind is FailureKind.TIMEOUT
            assert time.monotonic() - began >= STALL_S, "it had its time after we woke"
            close(pool)

    run(main(), plain=plain)


@both_loops
def test_a_limit_without_a_stall_is_kept(plain: bool) -> None:
    async def main() -> None:
        pool = beating_pool()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with pool.pulse.timeout(0.05):
                await asyncio.Event().wait()
        assert time.monotonic() - began >= 0.05
        async with pool.pulse.timeout(0.0001):
            pass  # nothing was awaited, so nothing was late
        close(pool)

    run(main(), plain=plain)


@both_loops
def test_connections_get_back_the_time_that_we_slept(plain: bool) -> None:
    """The sweep that comes late must not break what is to be read after it."""

    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint:
            pool = beating_pool()
            connection: Connection = await pool.connect(Origin.parse(endpoint.url), 1.0)
            loop = asyncio.get_running_loop()
            connection.patience.deadline = loop.time() + 0.5 * STALL_S
            stall()
            woke_at = loop.time() if plain else time.monotonic()
            await asyncio.sleep(0.1)
            assert pool.open_connections == 1, "not broken"
            assert connection.patience.deadline >= woke_at
            close(pool)

    run(main(), plain=plain)
