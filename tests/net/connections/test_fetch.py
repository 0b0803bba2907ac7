# SPDX-License-Identifier: Apache-2.0
"""One small answer, whole: bounded in size, in time and in what it may cost us."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc

import pytest

from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event


def test_a_fetch_is_bounded_in_size_and_time() -> None:
    async def script(wire: Wire, request: Received) -> None:
        if b"/big" in request.head:
            await wire.send(answer(b"x" * 2000))
        else:
            await wire.send(STREAM_HEAD, event("1"))
            await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint:
            pool = ConnectionPool()
            for path, kind in (("/big", FailureKind.PROTOCOL), ("/slow", FailureKind.TIMEOUT)):
                with pytest.raises(UpstreamError) as caught:
                    await fetch(pool, Origin.parse(endpoint.url), path, timeout_s=0.3, max_bytes=1000)
                assert caught.value.kind is kind
            await until(lambda: pool.open_connections == 0, "neither is kept")
            pool.close()

    run(main())


def test_a_chunked_answer_can_be_fetched() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1")[:3], event("1")[3:], LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint:
            pool = ConnectionPool()
            fetched = await fetch(pool, Origin.parse(endpoint.url), "/x", timeout_s=5.0, max_bytes=1000)
            assert fetched.body == b"data: 1\n\n"
            assert pool.open_connections == 1
            pool.close()

    run(main())


LIMIT = 2**15
CHUNKED = {size: STREAM_HEAD + b"2\r\nxx\r\n" * (size // 2) + LAST for size in (LIMIT, LIMIT + 2)}
PLAIN = {size: answer(b"x" * size) for size in (LIMIT, LIMIT + 2)}


@pytest.mark.parametrize("answers", [CHUNKED, PLAIN], ids=["tiny chunks", "a length"])
@pytest.mark.parametrize("size", [LIMIT, LIMIT + 2], ids=["whole", "too large"])
def test_an_answer_costs_its_size_while_it_comes_and_nothing_after_it(answers: dict[int, bytes], size: int) -> None:
    """As a list of pieces, chunks of two bytes were 20 times what they hold. And an error's traceback holds what its
    frames hold until garbage is collected: pages that are too large, one a second, piled up until then.
    """

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answers[size])

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint:
            pool, origin = ConnectionPool(), Origin.parse(endpoint.url)

            async def ask() -> int | None:
                with contextlib.suppress(UpstreamError):
                    return len((await fetch(pool, origin, "/x", timeout_s=30, max_bytes=LIMIT)).body)
                return None

            wanted = size if size <= LIMIT else None
            assert await ask() == wanted
            gc.collect()
            gc.disable()
            tracemalloc.start(1)
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(4):
                    assert await ask() == wanted
                    await asyncio.sleep(0)  # what woke us holds the answer while we run
                after, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
                gc.enable()
            assert after - before < LIMIT  # of four answers
            assert peak - before < 12 * LIMIT  # the endpoint's own copies are among it
            pool.close()

    run(main())
