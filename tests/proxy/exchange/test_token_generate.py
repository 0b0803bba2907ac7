# SPDX-License-Identifier: Apache-2.0
"""/inference/v1/generate through real sockets: a prompt of token ids finds the server that has its beginning."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack

from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.support.aio import run
from tests.support.pool import MODEL
from tests.support.rig import Reply, Rig, post, rig

PATH = "/inference/v1/generate"
SERVERS, CONVERSATIONS, AT_ONCE = 4, 40, 4
SYSTEM = list(range(1000, 1512))
"""What all conversations begin with."""


async def turn(it: Rig, ids: list[int], *, stream: bool = False) -> Reply:
    options = {"max_tokens": 40, "ignore_eos": True}
    body = {"model": MODEL, "token_ids": ids, "sampling_params": options, "stream": stream}
    reply = await it.ask(post(json.dumps(body).encode(), PATH))
    assert reply.status == 200
    return reply


def test_a_second_turn_goes_where_the_first_was_computed() -> None:
    """Of 40 conversations over 4 servers, 4 at a time, at least 95 %; and the servers are all used."""

    async def main() -> None:
        rng = random.Random(1)
        homes: list[str | None] = []
        returned = 0

        async def conversation(it: Rig) -> None:
            nonlocal returned
            ids = [*SYSTEM, *(rng.randrange(1, 150_000) for _ in range(8000))]
            first = await turn(it, ids)
            said = json.loads(first.body)["choices"][0]["token_ids"]
            await asyncio.sleep(0)
            ids += [*said, *(rng.randrange(1, 150_000) for _ in range(100))]
            second = await turn(it, ids, stream=True)
            homes.append(first.field("x-lbproxy-endpoint"))
            returned += second.field("x-lbproxy-endpoint") == homes[-1]

        async with AsyncExitStack() as stack:
            options = MockOptions(model=MODEL, speed=1.0)
            servers = [await stack.enter_async_context(MockServer(options)) for _ in range(SERVERS)]
            it = await stack.enter_async_context(rig(*(one.url for one in servers)))
            gate = asyncio.Semaphore(AT_ONCE)

            async def gated() -> None:
                async with gate:
                    await conversation(it)

            await asyncio.gather(*(gated() for _ in range(CONVERSATIONS)))
            assert len(set(homes)) == SERVERS
            assert returned >= 0.95 * CONVERSATIONS
            assert {one.route for one in it.records.requests} == {"token_generate"}
            assert all(one.usage is not None for one in it.records.requests if not one.stream)

    run(main())
