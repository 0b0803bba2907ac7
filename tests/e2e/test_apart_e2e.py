# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart, as users run it: lbproxy in a process, simulated servers, OpenAI's SDK."""

from __future__ import annotations

import asyncio
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
from tests.support.process import Process, lbproxy_beside

CONNECTORS = ["nixl", "shared-storage", "sglang", "mooncake"]
CONCURRENT = {"sglang", "mooncake"}
FAULTS = [
    "status code=503 for=0.3",
    "status code=500 share=0.5 for=0.3",
    "break events=0 how=rst share=0.5 for=0.3",
    "garbage share=0.5 for=0.3",
]
WORDS = "All work and no play makes a dull story. "


@dataclass
class Apart:
    """What was started."""

    process: Process
    url: str
    admin: str
    prefill: list[MockServer] = field(default_factory=list)
    decode: list[MockServer] = field(default_factory=list)
    whole: MockServer | None = None
    client: openai.AsyncOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def state(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as http:
            return dict((await http.get(f"{self.admin}/admin/state")).json())

    async def failed(self) -> list[dict[str, Any]]:
        """The failed requests among the latest, with their attempts."""
        async with httpx.AsyncClient() as http:
            latest = (await http.get(f"{self.admin}/admin/decisions")).json()["decisions"]
            failed = [one["id"] for one in latest if one["status"] not in {None, 200}]
            return [(await http.get(f"{self.admin}/admin/decisions/{one}")).json() for one in failed]

    async def idle(self) -> None:
        """Nothing is in flight anywhere."""

        async def rest() -> bool:
            return not any(one["in_flight"] for one in (await self.state())["endpoints"])

        for _ in range(200):
            if await rest():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(await self.state())


@asynccontextmanager
async def apart(
    folder: Path, connector: str, *, prefill: int = 1, decode: int = 1, more: str = "routing: {split: always}"
) -> AsyncIterator[Apart]:
    engine = "sglang" if connector == "sglang" else "vllm"
    async with AsyncExitStack() as stack:

        async def server(role: str) -> MockServer:
            options = MockOptions(
                model="m",
                engine=engine,  # type: ignore[arg-type]
                role=role,  # type: ignore[arg-type]
                connector=None if role == "both" else connector,  # type: ignore[arg-type]
                shared_storage_path=str(folder / "kv") if connector == "shared-storage" and role != "both" else None,
                bootstrap_port=0 if role == "prefill" and connector in CONCURRENT else None,
                speed=10.0,
            )
            return await stack.enter_async_context(MockServer(options))

        first = [await server("prefill") for _ in range(prefill)]
        second = [await server("decode") for _ in range(decode)]
        whole = await server("both")
        listed = []
        for role, servers in (("prefill", first), ("decode", second)):
            for n, one in enumerate(servers, 1):
                port = ""
                if role == "prefill" and connector in CONCURRENT:
                    assert one.connector.address is not None
                    port = f", bootstrap_port: {one.connector.address[1]}"
                listed.append(f"{{url: {one.url}, name: {role}-{n}, role: {role}, connector: {connector}{port}}}")
        process, url, admin = await stack.enter_async_context(lbproxy_beside(folder, listed, more))
        it = Apart(process, url, admin, first, second, whole)
        await stack.enter_async_context(it.client)
        await until_ready(it, prefill + decode)
        yield it


async def until_ready(it: Apart, count: int) -> None:
    for _ in range(600):
        up = [one for one in (await it.state())["endpoints"] if one["health"] == "up" and one["models"]]
        if len(up) == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not every endpoint came up")


async def said(client: openai.AsyncOpenAI, text: str, *, stream: bool, max_tokens: int = 12) -> tuple[str, Any]:
    """The response's text, and its usage."""
    if not stream:
        done = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], max_tokens=max_tokens, temperature=0
        )
        return done.choices[0].message.content or "", done.usage
    parts, usage = [], None
    async for chunk in await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    return "".join(parts), usage


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_split_request_gets_the_response_of_one_whole_server(connector: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path, connector) as it:
            assert it.whole is not None
            direct = openai.AsyncOpenAI(base_url=f"{it.whole.url}/v1", api_key="none", http_client=it.client._client)
            texts = [f"{n}: {WORDS * (n * n)}" for n in range(1, 9)]
            for stream in (True, False):
                through = await asyncio.gather(*(said(it.client, text, stream=stream) for text in texts))
                asked = [await said(direct, text, stream=stream) for text in texts]
                assert [one for one, _ in through] == [one for one, _ in asked]
                for (_, got), (_, wanted) in zip(through, asked, strict=True):
                    assert (got.prompt_tokens, got.completion_tokens) == (
                        wanted.prompt_tokens,
                        wanted.completion_tokens,
                    )
            await it.idle()
            done = {one["name"]: one["placed"] for one in (await it.state())["endpoints"]}
            assert done == {"prefill-1": 16, "decode-1": 16}

    run(main())


@pytest.mark.parametrize("connector", CONNECTORS)
def test_servers_that_fail_in_turn_fail_no_request(connector: str, tmp_path: Path) -> None:
    """Each of two prefill and two decode servers refuses or breaks for a while, under steady traffic. Only what runs at
    a decode server that closes its connections could not be saved: that is no fault here.
    """

    async def main() -> None:
        more = "routing: {split: always}\nretry: {budget_per_second: 1000}\ntimeouts: {first_byte: 20s}"
        async with apart(tmp_path, connector, prefill=2, decode=2, more=more) as it:
            done = [0] * 6
            ends = asyncio.Event()

            async def talk(number: int) -> None:
                while not ends.is_set():
                    it.process.read()  # lbproxy drops lines that a full pipe does not take
                    try:
                        text, _ = await said(it.client, f"{number} {done[number]} {WORDS * 30}", stream=True)
                    except openai.APIError as e:  # which attempts it had
                        raise AssertionError(await it.failed()) from e
                    assert text
                    done[number] += 1

            async def next_requests(count: int = 1) -> None:
                """Every client has begun and completed so many from now on: none is under way that began before."""
                wanted = [one + 1 + count for one in done]
                await until(lambda: all(one >= least for one, least in zip(done, wanted, strict=True)))

            async with asyncio.TaskGroup() as tasks:
                for number in range(len(done)):
                    tasks.create_task(talk(number))
                for server in (*it.prefill, *it.decode):
                    for fault in FAULTS if server in it.decode else ["refuse for=0.3", *FAULTS]:
                        await inject(server, fault)
                        await next_requests()
                        await well(server)
                        await until_ready(it, 4)  # or two of a role are out at once
                        await next_requests(0)  # or one request meets two faults, which may fail it
                ends.set()
            await it.idle()

    run(main())


async def inject(server: MockServer, fault: str) -> None:
    async with httpx.AsyncClient() as http:
        (await http.post(f"{server.url}/faults", content=fault)).raise_for_status()


async def well(server: MockServer) -> None:
    """Its last fault has ended, which may have closed the port."""
    async with httpx.AsyncClient() as http:
        for _ in range(200):
            try:
                if (await http.get(f"{server.url}/faults")).json() == []:
                    return
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError("the fault does not end")


def _sglang(role: str) -> MockOptions:
    port = 0 if role == "prefill" else None
    return MockOptions(
        model="m",
        engine="sglang",
        role=role,  # type: ignore[arg-type]
        connector="sglang",
        bootstrap_port=port,
        speed=10.0,
    )


def test_a_role_that_only_the_engine_tells_is_used(tmp_path: Path) -> None:
    """SGLang says it in /server_info: nothing is configured."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(MockServer(_sglang(role))) for role in ("prefill", "decode")
            ]
            process, url, admin = await stack.enter_async_context(
                lbproxy_beside(tmp_path, [first.url, second.url], "routing: {split: always}")
            )
            it = Apart(process, url, admin)
            await stack.enter_async_context(it.client)
            await until_ready(it, 2)
            for _ in range(100):
                try:
                    text, _ = await said(it.client, WORDS * 20, stream=True)
                except openai.APIStatusError:  # the engine has not said it yet
                    await asyncio.sleep(0.05)
                    continue
                assert text
                break
            else:
                raise AssertionError("never split")

    run(main())
