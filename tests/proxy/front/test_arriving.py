# SPDX-License-Identifier: Apache-2.0
"""Bodies that come in several reads, as large ones do, in either lane: nothing of them is lost, held for long, or
read as something else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from hashlib import sha256

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.front.connection import State
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint
from tests.support.rig import Rig, post, rig

KIB = 1 << 10


def body(size: int) -> bytes:
    """JSON of this size, of which no two parts are alike."""
    text = "".join(f"{number:x} " for number in range(size // 4))[: size - 40]
    return json.dumps({"model": "m", "prompt": text}).encode()


@pytest.mark.parametrize("size", [64 * KIB, 300 * KIB, 2 << 20])
@pytest.mark.parametrize("cuts", [(1,), (7, 50_000), (200, 201, 60_000)])
def test_a_body_arrives_as_it_was_sent(size: int, cuts: tuple[int, ...]) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for _ in range(2):
                sent = post(body(size))
                head = sent.index(b"\r\n\r\n") + 4
                for begin, end in itertools.pairwise((0, *(head + cut for cut in cuts), len(sent))):
                    client.send(sent[begin:end])
                    await client.writer.drain()
                    await asyncio.sleep(0.01)
                assert (await client.reply()).status == 200
                assert endpoint.requests[-1].body == body(size)
            assert it.front.overload.held_bytes == 0
            assert it.records.requests[-1].request_bytes == len(body(size))
            assert it.records.requests[-1].outcome is Outcome.COMPLETED

    run(main())


def test_what_follows_the_body_is_the_next_request(way: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            first, second = post(body(100 * KIB)), post(b'{"model":"m","prompt":"second"}')
            client.send(first[: 50 * KIB])
            (connected,) = it.front._clients()
            await until(lambda: connected.state is (State.ARRIVING if way == "lane" else State.AIOHTTP), "it began")
            client.send(first[50 * KIB :] + second + second)
            assert [(await client.reply()).status for _ in range(3)] == [200, 200, 200]
            assert [len(one.body) for one in endpoint.requests] == [len(body(100 * KIB)), 31, 31]

    run(main())


def test_a_fast_client_leaves_turns_of_the_loop_to_others(way: str) -> None:
    """uvloop goes on reading as long as there is something, up to 32 times: the peer chose how long a turn is."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            sent = post(body(8 << 20))
            at = 1000
            client.send(sent[:at])
            (connected,) = it.front._clients()
            await until(lambda: connected.state is (State.ARRIVING if way == "lane" else State.AIOHTTP), "it began")
            transport = connected.transport
            assert transport is not None
            while at < len(sent):
                begun = at
                while transport.is_reading() and at < len(sent):
                    connected.data_received(sent[at : at + 256 * KIB])
                    at += 256 * KIB
                assert at - begun <= 1 << 20
                await asyncio.sleep(0)
            assert (await client.reply()).status == 200
            assert endpoint.requests[-1].body == body(8 << 20)

    run(main())


@pytest.mark.parametrize("arrived", [0, 1000, 3 << 20])
def test_a_client_that_leaves_leaves_nothing(arrived: int) -> None:
    """Before any of the body came, in the middle, and while a large one is read in turns of the loop."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            sent = post(body(3 << 20))
            head = sent.index(b"\r\n\r\n") + 4
            client.send(sent[: head + arrived] if arrived < 3 << 20 else sent)
            await until(lambda: it.front.running, "it began")
            client.writer.transport.abort()
            await until(lambda: not it.front.running and not it.front.open_connections, "it left")
            await until(lambda: it.records.requests, "it is recorded")
            assert it.front.overload.held_bytes == 0
            assert len(it.front.overload.arrivals) == 0
            assert [one.outcome for one in it.records.requests] == [Outcome.CLIENT_CLOSED]
            assert not endpoint.requests or arrived == 3 << 20

    run(main())


async def answered_early(it: Rig, more: str = "") -> int:
    """The status of the response to a request of which only a part was sent, if its connection ends with it."""
    client = await it.connect()
    client.send(post(body(100 * KIB), more=more)[: 50 * KIB])
    reply = await client.reply()
    assert await client.reader.read(1) == b"", "the rest of the body would be read as a request"
    return reply.status


def test_a_refusal_does_not_wait_for_the_body() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            async with rig(endpoint.url) as it:
                it.front.requests.keys = KeyRing({sha256(b"key").digest(): "name"})
                assert await answered_early(it, "Authorization: Bearer none\r\n") == 401
            async with rig(endpoint.url, more="limits: {json_body: 64KiB}") as it:
                assert await answered_early(it) == 413
            async with rig(endpoint.url) as it:
                it.front.requests.draining = True
                assert await answered_early(it) == 503
            assert not endpoint.requests

    run(main())
