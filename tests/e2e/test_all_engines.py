# SPDX-License-Identifier: Apache-2.0
"""A pool of all engines that are known, and one of the user's own, before the product: recognised, read, balanced."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run
from tests.support.dialects import BUSY, FREE, OWN, PAGES, page_of
from tests.support.endpoint import OK, Received, ScriptedEndpoint, Wire, answer
from tests.support.process import lbproxy

IN_A_ROW = 20


class Server:
    """A model server of one dialect under a load of others' making."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.load = BUSY
        self.endpoint = ScriptedEndpoint({"/health": OK, "/v1/chat/completions": OK})
        place = "/prometheus/metrics" if dialect == "trtllm-serve" else "/metrics"
        self.endpoint.scripts |= {place: self.metrics}
        self.endpoint.scripts["/v1/models"] = answer(b'{"object":"list","data":[{"id":"m"}]}')

    async def metrics(self, wire: Wire, _: Received) -> None:
        await wire.send(answer(page_of(self.dialect, self.load), kind="text/plain; version=0.0.4"))


@pytest.mark.parametrize("policy", ["adaptive", "gie"])
def test_a_mixed_pool_follows_its_gauges(policy: str, tmp_path: Path) -> None:
    """Each server in turn becomes the only free one, and soon gets every request (how soon: tests/core)."""
    settings = f"routing: {{policy: {policy}}}\nscrape: {{interval: 50ms}}\nengines: {OWN}"

    async def main() -> None:
        servers = [Server(dialect) for dialect in PAGES]
        async with AsyncExitStack() as stack:
            urls: list[str] = []
            for server in servers:
                await stack.enter_async_context(server.endpoint)
                engine = server.dialect.partition(",")[0]
                # Triton is recognised by itself on port 8002 only.
                fixed = f", engine: {engine}, metrics: /metrics" if engine == "triton-tensorrt-llm" else ""
                urls.append(f"{{url: '{server.endpoint.url}', name: {engine}-{len(urls)}{fixed}}}")
            proxy = await asyncio.to_thread(stack.enter_context, lbproxy(tmp_path, urls, settings))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy[1], timeout=30))
            for n, server in enumerate(servers):
                for one in servers:
                    one.load = FREE if one is server else BUSY
                await all_to(client, f"{server.dialect.partition(',')[0]}-{n}")

    async def all_to(client: httpx.AsyncClient, name: str) -> None:
        row = 0
        async with asyncio.timeout(20):
            while row < IN_A_ROW:
                reply = await client.post("/v1/chat/completions", content=json.dumps({"model": "m"}))
                row = row + 1 if reply.headers.get("x-lbproxy-endpoint") == name else 0
                await asyncio.sleep(0.002)

    run(main(), timeout_s=240)
