# SPDX-License-Identifier: Apache-2.0
"""Models that sleep, as users run them: lbproxy in a process, simulated servers, OpenAI's SDK.

The servers share a simulated GPU, which refuses a second one: `refused_wakes` counts what must never happen.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from tests.support.aio import run, until
from tests.support.process import Process, changing, lbproxy_beside

WAKE_S = 0.6
SLEEP_S = 0.1


@dataclass
class Fleet:
    """What was started."""

    process: Process
    url: str
    admin: str
    servers: list[MockServer]
    client: openai.AsyncOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    async def ask(self, model: str, tokens: int = 2) -> str:
        got = await self.client.completions.create(model=model, prompt="x", max_tokens=tokens)
        assert got.usage is not None
        assert got.usage.completion_tokens == tokens
        return got.choices[0].text

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.admin}{path}")).json()

    async def phases(self) -> list[str]:
        return [one["sleep"]["state"] for one in (await self.get("/admin/state"))["endpoints"]]

    async def become(self, *phases: str) -> None:
        for _ in range(400):
            if await self.phases() == list(phases):
                return
            await asyncio.sleep(0.025)
        raise AssertionError(f"{await self.phases()} instead of {phases}")

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.admin}/metrics")).text
        return sum(float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(name))


def options(model: str, *, asleep: bool = True, gpu: str | None = None, **more: Any) -> MockOptions:
    times = {"wake_time": WAKE_S, "sleep_time": SLEEP_S, "speed": 1.0} | more
    return MockOptions(model=model, sleep_mode=True, asleep=asleep, gpu=gpu, ttft=0.005, token_time=0.001, **times)


@asynccontextmanager
async def fleet(folder: Path, *servers: MockOptions, keys: str = "", more: str = "") -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        mocks = [await stack.enter_async_context(MockServer(one)) for one in servers]
        entries = [f"{{url: {one.url}, wake: true{keys}}}" for one in mocks]
        process, url, admin = await stack.enter_async_context(lbproxy_beside(folder, entries, more))
        it = Fleet(process, url, admin, mocks)
        await stack.enter_async_context(it.client)
        yield it


def test_the_first_request_wakes_a_sleeping_model_and_fifty_wake_it_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, options("m"), options("m")) as it:
            await it.become("asleep", "asleep")
            listed = await it.client.models.list()
            assert [one.id for one in listed.data] == ["m"]
            began = time.monotonic()
            await it.ask("m")
            print(f"first request after sleep: {time.monotonic() - began:.2f} s, of which the wake {WAKE_S} s")
            assert await it.phases() == ["awake", "asleep"]
            assert [one.sleep.wakes for one in it.servers] == [1, 0]
            async with httpx.AsyncClient() as http:
                await http.post(f"{it.servers[0].url}/sleep")  # somebody else
            await it.become("asleep", "asleep")
            began = time.monotonic()
            await asyncio.gather(*(it.ask("m") for _ in range(50)))
            print(f"50 at the same time: {time.monotonic() - began:.2f} s")
            assert sum(one.sleep.wakes for one in it.servers) == 2
            assert await it.metric("lbproxy_wakes_total{") == 2
            assert await it.metric("lbproxy_waited_for_wake_total") == 51
            decisions = (await it.get("/admin/decisions"))["decisions"]
            assert {one["waited_because"] for one in decisions} == {"waking"}

    run(main())


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_a_prompt_that_is_too_long_for_those_that_are_awake_wakes_one_that_takes_it(
    tmp_path: Path, workers: str
) -> None:
    """Whether there is one short server or several; one that sleeps and is as short is left alone."""

    async def main() -> None:
        short = [options("m", asleep=asleep, max_model_len=64) for asleep in (False, True, False)]
        async with fleet(tmp_path, *short, options("m", max_model_len=2048), more=workers) as it:
            await it.become("awake", "asleep", "awake", "asleep")
            assert len(await it.ask("m")) > 0
            assert await it.phases() == ["awake", "asleep", "awake", "asleep"]
            got = await it.client.completions.with_raw_response.create(model="m", prompt=[7] * 500, max_tokens=2)
            assert got.headers["x-lbproxy-attempts"] == "2"
            assert [one.sleep.wakes for one in it.servers] == [0, 0, 0, 1]
            with pytest.raises(openai.BadRequestError) as refused:
                await it.client.completions.create(model="m", prompt=[7] * 5000, max_tokens=2)
            assert "maximum context length" in refused.value.message

    run(main())


def test_a_wake_is_explained_while_a_request_waits_for_it_and_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, options("m", wake_time=1.0)) as it, httpx.AsyncClient() as http:
            await it.become("asleep")
            await it.ask("m")
            (first,) = (await it.get("/admin/decisions"))["decisions"]
            waited = (await it.get(f"/admin/decisions/{first['id']}"))["waited"]
            assert waited["wake"]["predicted_ms"] is None
            assert waited["wake"]["took_ms"] >= 1000.0
            assert "it was not known how long the wake takes, and it took" in waited["meaning"]
            await http.post(f"{it.servers[0].url}/sleep")
            await it.become("asleep")
            named = {"x-request-id": "it-waits"}
            waiting = asyncio.create_task(it.client.completions.create(model="m", prompt="x", extra_headers=named))
            shown: dict[str, Any] = {}
            while not shown.get("running"):
                assert not waiting.done(), "it waits for a second"
                shown = await it.get("/admin/decisions/it-waits")
            assert shown["waited"]["wake"]["predicted_ms"] >= 1000.0
            assert shown["waited"]["wake"]["took_ms"] is None
            assert (shown["endpoint"], shown["decisions"]) == (None, [])
            await waiting
            command = [sys.executable, "-P", "-m", "lbproxy", "explain", "it-waits", "--admin", it.admin]
            text = (await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)).stdout.decode()
            assert re.search(
                r"the wake was predicted to take [1-9].\d s, and it took [1-9].\d s", " ".join(text.split())
            )

    run(main())


def test_two_models_on_one_gpu_are_never_both_awake_and_no_request_is_lost(tmp_path: Path) -> None:
    """Twenty swaps and more, under traffic for both."""

    async def main() -> None:
        gpu = f"g{uuid.uuid4().hex}"
        servers = options("a", asleep=False, gpu=gpu, wake_time=0.1, sleep_time=0.05), options("b", gpu=gpu)
        servers = servers[0], options("b", gpu=gpu, wake_time=0.1, sleep_time=0.05)
        more = "hosts: {box: {min_awake: 1s}}\nadmission: {queue_timeout: 60s}\n"
        async with fleet(tmp_path, *servers, keys=", host: box", more=more) as it:
            await it.become("awake", "asleep")
            a, b = (one.sleep for one in it.servers)
            done = {"a": 0, "b": 0}

            async def traffic(model: str) -> None:
                while a.sleeps + b.sleeps < 21:
                    await it.ask(model, tokens=20)
                    done[model] += 1

            began = time.monotonic()
            async with asyncio.timeout(55), asyncio.TaskGroup() as tasks:
                for model in ("a", "b"):
                    for _ in range(4):
                        tasks.create_task(traffic(model))
            swaps, seconds = a.sleeps + b.sleeps, time.monotonic() - began
            print(f"{swaps} swaps in {seconds:.1f} s, {done} requests, 0 failed")
            assert (a.refused_wakes, b.refused_wakes) == (0, 0)
            assert min(done.values()) > 20
            codes = await it.metric("lbproxy_requests_total{")
            assert codes == sum(done.values())

    run(main())


def test_an_idle_model_is_put_to_sleep_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, options("m", asleep=False), keys=", sleep_after: 1s") as it:
            await it.become("asleep")
            assert it.servers[0].sleep.sleeps == 1
            await it.ask("m")
            assert it.servers[0].sleep.wakes == 1

    run(main())


def test_a_wake_that_fails_goes_to_another_server_and_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, options("m", faults=("status code=500 on=wake",)), options("m")) as it:
            await it.become("asleep", "asleep")
            await it.ask("m")
            assert [one.sleep.wakes for one in it.servers] == [0, 1]
            assert await it.metric('lbproxy_wakes_total{endpoint="' + it.servers[0].url[7:]) == 1
            state = (await it.get("/admin/state"))["endpoints"]
            assert [one["sleep"]["failures"] for one in state] == [1, 0]

    run(main())


def test_level_two_reads_the_weights_again(tmp_path: Path) -> None:
    async def main() -> None:
        one = options("m", sleep_level=2)
        async with fleet(tmp_path, one, keys=", sleep_level: 2") as it:
            await it.become("asleep")
            await it.ask("m")
            assert it.servers[0].sleep.wakes == 1

    run(main())


def test_a_server_without_a_sleep_mode_is_used_as_any_other(tmp_path: Path) -> None:
    """`wake: true` by mistake: /is_sleeping returns 404, and a warning says so."""

    async def main() -> None:
        async with fleet(tmp_path, MockOptions(model="m", speed=50.0)) as it:
            await it.ask("m")
            await until(lambda: "does not say whether it sleeps" in it.process.read())

    run(main())


def test_a_restart_of_lbproxy_leaves_servers_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            mocks = [await stack.enter_async_context(MockServer(options("m", asleep=n > 0))) for n in range(2)]
            entries = [f"{{url: {one.url}, wake: true, sleep_after: 1h}}" for one in mocks]
            for _ in range(2):
                async with lbproxy_beside(tmp_path, entries) as (process, url, admin):
                    it = Fleet(process, url, admin, mocks)
                    async with it.client:
                        await it.become("awake", "asleep")
                        await it.ask("m")
            assert [(one.sleep.sleeps, one.sleep.wakes) for one in mocks] == [(0, 0), (0, 0)]

    run(main())


@pytest.mark.parametrize("status", [200, 500])
def test_a_webhook_starts_a_server_that_is_not_there(tmp_path: Path, status: int) -> None:
    """It is called once for any number of requests; if it fails, they wait, and it is called again later."""

    async def main() -> None:
        calls: list[Any] = []
        server = MockServer(MockOptions(model="m", speed=50.0))
        await server.start()
        port = server.port
        await server.close()
        started: list[MockServer] = []

        async def hook(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(next(x for x in head.splitlines() if x.lower().startswith("content-length")).split()[1])
            calls.append((head.split()[:2], await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            writer.close()
            if status == 200:
                started.append(MockServer(MockOptions(model="m", speed=50.0, port=port)))
                await started[0].start()

        listener = await asyncio.start_server(hook, "127.0.0.1", 0)
        address = listener.sockets[0].getsockname()
        entry = f"{{url: 'http://127.0.0.1:{port}', name: e, models: [m], cold_start: 'http://127.0.0.1:{address[1]}/s?a=1'}}"
        try:
            async with lbproxy_beside(tmp_path, [entry], "admission: {queue_timeout: 3s}\n") as (process, url, admin):
                it = Fleet(process, url, admin, [])
                async with it.client:
                    await it.become("off")
                    if status == 200:
                        await asyncio.gather(*(it.ask("m") for _ in range(20)))
                    else:
                        with pytest.raises(openai.RateLimitError):
                            await it.ask("m")
                assert len(calls) == 1
                assert calls[0][0] == ["POST", "/s?a=1"]
                assert b'"endpoint":"e"' in calls[0][1]
                assert b'"model":"m"' in calls[0][1]
        finally:
            listener.close()
            for one in started:
                await one.close()

    run(main())


def test_commands_wake_and_put_to_sleep(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, options("m")) as it, httpx.AsyncClient() as http:
            name = it.servers[0].url[7:]
            await it.become("asleep")
            json = changing(it.admin)
            answer = await http.post(f"{it.admin}/admin/endpoints/{name}/wake", headers=json)
            assert answer.status_code == 200, answer.text
            await it.become("awake")
            await http.post(f"{it.admin}/admin/endpoints/{name}/sleep", headers=json)
            await it.become("asleep")
            assert (it.servers[0].sleep.wakes, it.servers[0].sleep.sleeps) == (1, 1)

    run(main())
