# SPDX-License-Identifier: Apache-2.0
"""A simulated server that sleeps: what vLLM does, as decision 45 has it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from tests.support.aio import run, until

BODY = {"model": "sim", "prompt": "x", "max_tokens": 4}


SLOW = 4.0
"""At this speed 400 tokens take so long that a busy machine sees them run."""


def drive(
    test: Callable[[MockServer, httpx.AsyncClient], Awaitable[None]], speed: float = 100.0, **options: Any
) -> None:
    async def main() -> None:
        async with (
            MockServer(MockOptions(sleep_mode=True, speed=speed, **options)) as server,
            httpx.AsyncClient(base_url=server.url, timeout=30) as client,
        ):
            await test(server, client)

    run(main())


async def sleeps(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/is_sleeping")).json()["is_sleeping"])


def test_requests_wait_in_the_server_while_it_sleeps_and_nothing_else_shows_it() -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        assert await sleeps(client)
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: server.driver._kept)
        for path in ("/health", "/v1/models", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert 'sleep_state="weights_offloaded"} 1.0' in (await client.get("/metrics")).text
        assert not asked.done()
        woken = await client.post("/wake_up")
        assert woken.json() == {"status": "awake", "tags": None}
        assert (await asked).json()["usage"]["completion_tokens"] == 4
        assert 'sleep_state="awake"} 1.0' in (await client.get("/metrics")).text
        assert (await client.post("/wake_up")).status_code == 200  # twice does nothing
        assert server.sleep.wakes == 1

    drive(test, asleep=True)


@pytest.mark.parametrize(("mode", "status"), [("wait", 200), ("abort", 500), ("", 500)])
def test_what_runs_is_finished_or_ended(mode: str, status: int) -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 400}))
        await until(lambda: server.driver._flights)
        said = await client.post("/sleep?level=1" + (f"&mode={mode}" if mode else ""))
        assert said.json() == {"status": "sleeping", "level": 1}
        assert (await asked).status_code == status
        assert await sleeps(client)

    drive(test, SLOW)


def test_it_says_that_it_sleeps_while_it_waits_for_what_runs() -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 400}))
        await until(lambda: server.driver._flights)
        told = asyncio.create_task(client.post("/sleep?mode=wait"))
        await until(lambda: server.driver.paused)
        assert await sleeps(client)
        await asked
        await told
        assert server.sleep.sleeps == 1

    drive(test, SLOW)


def test_level_two_wakes_by_its_parts() -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        await client.post("/sleep?level=2")
        assert (await client.post("/wake_up?tags=weights")).json()["status"] == "sleeping"
        assert (await client.post("/collective_rpc", json={"method": "reload_weights"})).status_code == 200
        assert await sleeps(client)
        assert (await client.post("/wake_up?tags=kv_cache")).json()["status"] == "awake"
        assert not await sleeps(client)

    drive(test)


@pytest.mark.parametrize("query", ["level=3", "level=x", "mode=x", "level=-1"])
def test_what_cannot_be_is_refused(query: str) -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        assert (await client.post(f"/sleep?{query}")).status_code == 400
        assert not await sleeps(client)

    drive(test)


def test_without_sleep_mode_there_are_no_such_routes() -> None:
    async def main() -> None:
        async with MockServer(MockOptions(speed=50.0)) as server, httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/is_sleeping")).status_code == 404
            assert (await client.post("/sleep")).status_code == 404
            assert "sleep_state" not in (await client.get("/metrics")).text

    run(main())


def test_two_servers_cannot_have_one_gpu() -> None:
    async def main() -> None:
        shared = {"sleep_mode": True, "speed": 100.0, "gpu": f"g{uuid.uuid4().hex}"}
        async with MockServer(MockOptions(**shared)) as one:  # type: ignore[arg-type]
            with pytest.raises(OSError, match="another server has the memory"):
                await MockServer(MockOptions(**shared)).start()  # type: ignore[arg-type]
            async with (
                MockServer(MockOptions(**shared, asleep=True)) as two,  # type: ignore[arg-type]
                httpx.AsyncClient() as client,
            ):
                refused = await client.post(f"{two.url}/wake_up")
                assert (refused.status_code, two.sleep.refused_wakes) == (500, 1)
                await client.post(f"{one.url}/sleep")
                assert (await client.post(f"{two.url}/wake_up")).status_code == 200

    run(main())


@pytest.mark.parametrize(("fault", "path"), [("wake", "/wake_up"), ("sleep", "/sleep"), ("state", "/is_sleeping")])
def test_each_call_can_fail(fault: str, path: str) -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        method = "GET" if fault == "state" else "POST"
        assert (await client.request(method, path)).status_code == 503
        assert (await client.get("/health")).status_code == 200

    drive(test, faults=(f"status code=503 on={fault}",))


@pytest.mark.parametrize("options", [{"asleep": True}, {"sleep_level": 3}, {"wake_time": -1.0}, {"gpu": "a b"}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        MockOptions(**options)
