# SPDX-License-Identifier: Apache-2.0
"""Two simulated servers for one test: one prefills, the other decodes."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.sim.mock.serving.served import idle
from tests.support.aio import run, until

PROMPT = "Once upon a time there was a balancer that knew every prefix. " * 8
"""124 tokens."""


class Pair:
    """The servers, a client, and the words of a split request."""

    def __init__(self, prefill: MockServer, decode: MockServer, client: httpx.AsyncClient) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client

    async def post(self, server: MockServer, body: object, path: str = "/v1/completions") -> httpx.Response:
        """One request."""
        return await self.client.post(server.url + path, json=body)

    def held(self) -> int:
        """Blocks that the prefill holds."""
        return self.prefill.driver.engine.gauges().held_blocks

    async def settled(self) -> None:
        """Nothing runs, waits or is held."""
        await until(lambda: self.held() == 0)
        for server in (self.prefill, self.decode):
            await idle(server)
            assert server.driver.engine.gauges().kv_usage == 0

    async def metrics(self, server: MockServer) -> dict[str, float]:
        """Every sample of the page, summed over its labels."""
        page = (await self.client.get(f"{server.url}/metrics")).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def split(
    test: Callable[[Pair], Awaitable[None]], *, prefill: dict[str, object] | None = None, **options: object
) -> None:
    """The test against two servers, fifty times as fast as their hardware unless told otherwise. `prefill`: what is
    different there.
    """

    async def main() -> None:
        both = {"speed": 50.0, **options}
        first = MockOptions(**{**both, "role": "prefill", **(prefill or {})})  # type: ignore[arg-type]
        second = MockOptions(**{**both, "role": "decode"})  # type: ignore[arg-type]
        async with (
            asyncio.timeout(30),
            MockServer(first) as one,
            MockServer(second) as other,
            httpx.AsyncClient(timeout=30) as client,
        ):
            await test(Pair(one, other, client))

    run(main())


def whole_text(body: dict[str, object], **options: object) -> str:
    """What a server without a connector says to a completion."""

    async def main() -> str:
        async with MockServer(MockOptions(**{"speed": 50.0, **options})) as server, httpx.AsyncClient() as client:  # type: ignore[arg-type]
            response = await client.post(f"{server.url}/v1/completions", json=body)
            return str(response.json()["choices"][0]["text"])

    return run(main())
