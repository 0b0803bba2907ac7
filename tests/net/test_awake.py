"""While we stand still nobody is late; and who is late all the same is found late in the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from lbproxy.core.retry import FailureKind, UpstreamError
from lbproxy.net.awake import AwakeClock
from lbproxy.net.fetch import fetch
from lbproxy.net.pool import Connection, ConnectionPool, Origin
from tests.support.aio import run
from tests.support.endpoint import OK, ScriptedEndpoint, hang

LIMIT_S = 0.3
STALL_S = 1.0

both_loops = pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])


def stall() -> None:
    """The loop is blocked, as by a SIGSTOP: for longer than any limit here."""
    time.sleep(STALL_S)


@both_loops
def test_a_question_that_we_slept_over_is_still_answered(plain: bool) -> None:
    """Its answer lies in the socket when the limit ends."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK}) as endpoint:
            pool = ConnectionPool()
            for _ in range(3):
                asyncio.get_running_loop().call_later(0.002, stall)
                answer = await fetch(pool, Origin.parse(endpoint.url), "/health", timeout_s=LIMIT_S, max_bytes=100)
                assert answer.status == 200
            pool.close()

    run(main(), plain=plain)


@both_loops
def test_who_never_answers_is_late_though_we_slept(plain: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": hang}) as endpoint:
            pool = ConnectionPool()
            asyncio.get_running_loop().call_later(0.05, stall)
            began = time.monotonic()
            with pytest.raises(UpstreamError) as caught:
                await fetch(pool, Origin.parse(endpoint.url), "/health", timeout_s=LIMIT_S, max_bytes=100)
            assert caught.value.kind is FailureKind.TIMEOUT
            assert time.monotonic() - began >= STALL_S, "it had its time after we woke"
            pool.close()

    run(main(), plain=plain)


@both_loops
def test_a_limit_without_a_stall_is_kept(plain: bool) -> None:
    async def main() -> None:
        pool = ConnectionPool()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with pool.awake.timeout(0.05):
                await asyncio.Event().wait()
        assert time.monotonic() - began >= 0.05
        async with pool.awake.timeout(0.0001):
            pass  # nothing was awaited, so nothing was late
        pool.close()

    run(main(), plain=plain)


@both_loops
def test_connections_get_back_the_time_that_we_slept(plain: bool) -> None:
    """The sweep that comes late must not break what is to be read after it."""

    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint:
            pool = ConnectionPool()
            connection: Connection = await pool.connect(Origin.parse(endpoint.url), 1.0)
            loop = asyncio.get_running_loop()
            connection.deadline = loop.time() + 0.5 * STALL_S
            stall()
            woke_at = loop.time() if plain else time.monotonic()
            await asyncio.sleep(0.1)
            assert pool.open_connections == 1, "not broken"
            assert connection.deadline >= woke_at
            pool.close()

    run(main(), plain=plain)


def test_only_what_is_more_than_jitter_counts() -> None:
    clock = AwakeClock(0.05)
    assert clock.beat() == 0.0
    time.sleep(0.3)
    during = clock.stalled_s()
    assert during >= 0.2, "also before the beat that is late"
    assert clock.beat() >= during
    assert clock.stalled_s() >= during
    assert clock.beat() == 0.0
