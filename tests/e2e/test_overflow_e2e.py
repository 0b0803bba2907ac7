# SPDX-License-Identifier: Apache-2.0
"""Overflow as users run it: lbproxy in a process, simulated servers, a simulated provider, OpenAI's SDK."""

from __future__ import annotations

import asyncio
from collections import Counter
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
from tests.support.aio import run
from tests.support.process import Process, lbproxy_beside

KEY = "sk-simulated-provider"
PREFIX = "/openai/v1"
SLOTS = "admission: {max_in_flight_per_endpoint: 2}"
PRIVATE = {"x-lbproxy-tier": "1"}


@dataclass
class Pool:
    """One server of ours with two slots, and a provider that calls the model by another name."""

    process: Process
    url: str
    admin: str
    own: MockServer
    client: openai.AsyncOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="of the client", max_retries=0)

    async def ask(self, *, stream: bool = False, tokens: int = 20, private: bool = False) -> str:
        """The tier that served it, or the status of its error."""
        create: Any = self.client.chat.completions.with_raw_response.create
        headers = PRIVATE if private else {}
        messages = [{"role": "user", "content": "x"}]
        try:
            got = await create(
                model="m", messages=messages, max_tokens=tokens, stream=stream, timeout=60.0, extra_headers=headers
            )
            if stream:
                parts = [choice.delta.content or "" async for chunk in got.parse() for choice in chunk.choices]
                assert "".join(parts)
            else:
                assert got.parse().choices[0].message.content
        except openai.APIStatusError as e:
            return str(e.status_code)
        return str(got.headers.get("x-lbproxy-tier", "1"))

    async def metrics(self) -> str:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.admin}/metrics")).text


@asynccontextmanager
async def pool(folder: Path, more: str, **provider: Any) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(MockServer(MockOptions(model="m", max_num_seqs=2)))
        options = MockOptions(model="its-m", path_prefix=PREFIX, require_key=KEY, speed=20.0, **provider)
        other = await stack.enter_async_context(MockServer(options))
        origin = "/".join(other.url.split("/", 3)[:3])
        facts = "name: provider, tier: 2, models: [m], model: its-m, health: null, metrics: null, max_in_flight: 100"
        listed = [f"{{url: {own.url}, name: own}}", f"{{url: {origin}{PREFIX}, api_key: {KEY}, {facts}}}"]
        process, url, admin = await stack.enter_async_context(lbproxy_beside(folder, listed, more))
        it = Pool(process, url, admin, own)
        await stack.enter_async_context(it.client)
        await up(it)
        yield it


async def up(it: Pool) -> None:
    async with httpx.AsyncClient() as http:
        for _ in range(400):
            found = (await http.get(f"{it.admin}/admin/state")).json()["endpoints"]
            if all(one["health"] == "up" and one["models"] for one in found):
                return
            if any(one["health"] == "half_open" for one in found):
                await it.ask(private=True)  # its trial
            await asyncio.sleep(0.05)
    raise AssertionError("not every endpoint came up")


async def inject(server: MockServer, fault: str) -> None:
    async with httpx.AsyncClient() as http:
        (await http.post(f"{server.url}/faults", content=fault)).raise_for_status()


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_the_first_tier_takes_in_time_goes_to_the_provider(stream: bool, tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, f"overflow: {{after: 100ms}}\n{SLOTS}") as it:
            alone = [await it.ask(stream=stream) for _ in range(3)]
            assert alone == ["1"] * 3
            tiers = Counter(await asyncio.gather(*(it.ask(stream=stream, tokens=100) for _ in range(24))))
            assert tiers["2"] > 0
            assert tiers["1"] > 0
            assert sum(tiers.values()) == tiers["1"] + tiers["2"], tiers
            assert await it.ask(stream=stream) == "1", "nothing sticks to the second tier"
            page = await it.metrics()
            counted = [line for line in page.splitlines() if line.startswith("lbproxy_overflow_requests_total{")]
            assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == tiers["2"]
            told = [one for one in it.process.lines("request") if one.get("tier") == 2]
            assert len(told) == tiers["2"]

    run(main())


def test_while_the_first_tier_fails_in_every_way_no_request_fails_and_private_ones_never_leave(tmp_path: Path) -> None:
    async def main() -> None:
        limits = "{max_in_flight_per_endpoint: 2, queue_timeout: 2s}"
        more = f"overflow: {{after: 100ms}}\nretry: {{budget_per_second: 1000}}\nadmission: {limits}"
        async with pool(tmp_path, more) as it:
            open_ones, private = Counter[str](), Counter[str]()
            for fault in (
                "status code=503",
                "status code=500 share=0.5",
                "refuse",
                "garbage",
                "status code=429",
            ):
                await inject(it.own, f"{fault} for=0.5")
                asked = [it.ask(private=n % 2 == 1) for n in range(12)]
                got = await asyncio.gather(*asked)
                open_ones.update(got[::2])
                private.update(got[1::2])
                await up(it)
            assert set(open_ones) <= {"1", "2"}, open_ones
            assert open_ones["2"]
            assert "2" not in private

    run(main())


def test_a_provider_whose_limit_is_reached_leaves_requests_to_the_first_tier(tmp_path: Path) -> None:
    """It says 429 with Retry-After; requests wait for the server of ours again, and none fails."""

    async def main() -> None:
        async with pool(tmp_path, f"overflow: {{after: 50ms}}\n{SLOTS}", requests_per_minute=3) as it:
            tiers = Counter(await asyncio.gather(*(it.ask(tokens=30) for _ in range(20))))
            assert tiers["2"] <= 3
            assert tiers["1"] == 20 - tiers["2"], tiers

    run(main())
