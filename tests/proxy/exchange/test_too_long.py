# SPDX-License-Identifier: Apache-2.0
"""A prompt that is too long where it was sent, through real sockets: an endpoint with a longer context gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.aio import run, until
from tests.support.endpoint import LAST, Received, Script, ScriptedEndpoint, Wire, answer, chunk
from tests.support.pool import card
from tests.support.rig import Reply, Rig, post, rig

RECORDED = Path(__file__).parents[2] / "fixtures" / "http"
REFUSALS = sorted(one.relative_to(RECORDED).as_posix() for one in RECORDED.glob("*/*too-long*.response.http"))
SERVED = b'{"from":"the long one"}'
NO_BUDGET = "retry: {budget_ratio: 0, budget_per_second: 0}\n"
OTHER = answer(b'{"error":{"message":"temperature must be at most 2","code":400}}', status=400)
TOO_LONG = answer(b'{"error":{"message":"This model\'s maximum context length is 8192 tokens."}}', status=400)
BODY = b'{"model":"m","messages":[]}'


def in_pieces(response: bytes, at: int) -> Script:
    """The head, and `at` bytes of the body after it; the rest a moment later."""

    async def script(wire: Wire, _: Received) -> None:
        cut = response.index(b"\r\n\r\n") + 4 + at
        await wire.send(response[:cut])
        await asyncio.sleep(0.02)
        await wire.send(response[cut:])

    return script


@asynccontextmanager
async def fleet(
    *scripts: Script, lengths: tuple[int | None, ...] = (8192, 32_768), more: str = NO_BUDGET
) -> AsyncIterator[tuple[Rig, list[ScriptedEndpoint]]]:
    """An endpoint for each script, which lists `m` with a context of that length."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedEndpoint(one)) for one in scripts]
        it = await stack.enter_async_context(rig(*(one.url for one in servers), more=more))
        for endpoint, length in zip(it.endpoints, lengths, strict=True):
            it.runtime.report_models(endpoint.uid, [replace(card("m"), context_tokens=length)])
        yield it, servers


async def ask(it: Rig, body: bytes = BODY, path: str = "/v1/chat/completions") -> Reply:
    reply = await it.ask(post(body, path))
    await it.settle()
    return reply


@pytest.mark.parametrize("at", [None, 0, 40])
@pytest.mark.parametrize("name", REFUSALS)
def test_what_engines_say_is_asked_of_a_longer_one_free_of_the_budget(name: str, at: int | None) -> None:
    refusal = (RECORDED / name).read_bytes()

    async def main() -> None:
        script = refusal if at is None else in_pieces(refusal, at)
        async with fleet(script, answer(SERVED)) as (it, servers):
            reply = await ask(it)
            assert (reply.status, reply.body, reply.field("x-lbproxy-attempts")) == (200, SERVED, "2")
            assert [len(one.requests) for one in servers] == [1, 1]
            assert servers[0].requests[0].body == servers[1].requests[0].body
            (record,) = it.records.requests
            assert record.attempts == 2
            assert {one.health.value for one in it.snapshots()} == {"up"}

    assert len(REFUSALS) >= 11
    run(main())


def test_it_goes_on_to_the_longest_and_never_to_one_as_short() -> None:
    async def main() -> None:
        scripts = TOO_LONG, TOO_LONG, TOO_LONG, answer(SERVED)
        async with fleet(*scripts, lengths=(8192, 8192, 32_768, 131_072)) as (it, servers):
            reply = await ask(it)
            assert (reply.status, reply.body) == (200, SERVED)
            short, other, middle, long = (len(one.requests) for one in servers)
            assert short + other <= 1
            assert middle <= 1
            assert long == 1

    run(main())


@pytest.mark.parametrize("at", [None, 0, 10])
@pytest.mark.parametrize(
    ("refusal", "lengths"),
    [(OTHER, (8192, 32_768)), (TOO_LONG, (8192, 8192)), (TOO_LONG, (8192, None)), (TOO_LONG, (None, 32_768))],
    ids=["another error", "none longer", "another unknown", "unknown"],
)
def test_every_other_400_is_the_clients(refusal: bytes, lengths: tuple[int | None, ...], at: int | None) -> None:
    async def main() -> None:
        script = refusal if at is None else in_pieces(refusal, at)
        async with fleet(script, answer(SERVED), lengths=lengths) as (it, servers):
            reply = await ask(it)
            assert (reply.status, reply.body) == (400, refusal.partition(b"\r\n\r\n")[2])
            assert reply.field("x-lbproxy-attempts") == "1"
            assert [len(one.requests) for one in servers] == [1, 0]

    run(main())


def test_a_long_or_chunked_error_passes_as_it_comes() -> None:
    body = b'{"error":"maximum context length, and the prompt: %s"}' % (b"x" * 70_000)
    head = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def main() -> None:
        for script in (answer(body, status=400), head + chunk(body) + LAST):
            async with fleet(script, answer(SERVED)) as (it, _):
                reply = await ask(it)
                assert (reply.status, reply.body) == (400, body)

    run(main())


def test_a_connection_that_ends_inside_the_error_is_a_failed_attempt() -> None:
    async def broken(wire: Wire, _: Received) -> None:
        await wire.send(TOO_LONG[:-10])
        await asyncio.sleep(0.02)
        wire.close()

    async def main() -> None:
        async with fleet(broken, answer(SERVED), more="") as (it, _):
            reply = await ask(it)
            assert (reply.status, reply.body, reply.field("x-lbproxy-attempts")) == (200, SERVED, "2")

    run(main())


def test_a_client_that_leaves_while_the_error_arrives_releases_everything() -> None:
    async def slow(wire: Wire, _: Received) -> None:
        await wire.send(TOO_LONG[:-10])
        await wire.watch()

    async def main() -> None:
        async with fleet(slow, answer(SERVED)) as (it, servers):
            client = await it.connect()
            client.writer.write(post(BODY, "/v1/chat/completions"))
            await until(lambda: bool(servers[0].requests))
            await asyncio.sleep(0.05)
            client.writer.transport.abort()
            await it.settle()
            assert len(servers[1].requests) == 0

    run(main())


def test_it_goes_on_after_the_head_of_a_stream_that_was_kept_alive() -> None:
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n"

    async def late(wire: Wire, _: Received) -> None:
        await asyncio.sleep(1.3)
        await wire.send(TOO_LONG)

    async def main() -> None:
        more = f"{NO_BUDGET}stream_keepalive: 1s\n"
        async with fleet(late, stream, more=more) as (it, servers):
            reply = await ask(it, BODY.replace(b"[]", b'[],"stream":true'))
            assert reply.status == 200
            assert reply.body.startswith(b":")
            assert reply.body.endswith(b"data: [DONE]\n\n")
            assert [len(one.requests) for one in servers] == [1, 1]

    run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_token_ids_are_counted(path: str) -> None:
    """The bytes of ids say nothing: 9,000 of them have two digits."""

    async def main() -> None:
        async with fleet(answer(b'{"from":"short"}'), answer(SERVED)) as (it, servers):
            for count in (9000, 100, 8193, 8192):
                ids = ",".join("17" for _ in range(count))
                await ask(it, b'{"model":"m","prompt":[%s]}' % ids.encode(), path)
            counts = [[one.body.count(b"17") for one in server.requests] for server in servers]
            assert not any(count > 8192 for count in counts[0])
            assert {9000, 8193} <= set(counts[1])

    run(main())
