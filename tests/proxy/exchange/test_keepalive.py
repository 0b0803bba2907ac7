# SPDX-License-Identifier: Apache-2.0
"""Clients of event streams that hear nothing for long: in the queue, in a prefill, between attempts, within a stream.

Most tests shorten the interval below what settings allow, so that it passes soon. Then streams that flow get comments
too, as `PROGRESS_S` is longer; those about a flowing stream have an interval of 1 s.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.exchange.keepalive import COMMENT, PING
from tests.support.aio import run, until
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    chunk,
    hang,
)
from tests.support.rig import RawClient, Rig, post, rig

SOON_S = 0.1
STREAM = b'{"model":"m","stream":true}'
EVENTS = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n' + b"data: [DONE]\n\n"
WHOLE = STREAM_HEAD + chunk(EVENTS) + LAST
SIGN = chunk(COMMENT)
ASKED = "x-lbproxy-keepalive: 1\r\n"


@asynccontextmanager
async def kept(
    *scripts: Script | bytes, every_s: float = SOON_S, more: str = "", own: Sequence[str] = ()
) -> AsyncIterator[tuple[Rig, RawClient, list[ScriptedEndpoint]]]:
    """A client of endpoints e1, ..., that answer by these scripts and have settings of their `own`."""
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(ScriptedEndpoint(one)) for one in scripts]
        entries = [(one.url, "".join(own[index : index + 1])) for index, one in enumerate(ends)]
        it = await stack.enter_async_context(rig(*entries, more=f"routing: {{policy: round-robin}}\n{more}"))
        if every_s:
            it.front.requests.reading._keepalive_s = every_s
            it.front.requests.reading._has_keepalive = True
        yield it, await it.connect(), ends


def after(release: asyncio.Event, response: bytes = WHOLE) -> Script:
    """Answer when it may."""

    async def script(wire: Wire, _: Received) -> None:
        await release.wait()
        await wire.send(response)

    return script


async def record_of(it: Rig) -> tuple[Outcome, int, int]:
    await until(lambda: it.records.requests)
    (record,) = it.records.requests
    return record.outcome, record.status, record.attempts


async def signs(client: RawClient, count: int = 2, sign: bytes = SIGN) -> bytes:
    """The head that comes first, and `count` signs of life after it."""
    async with asyncio.timeout(10.0):
        head = await client.head()
        assert await client.reader.readexactly(count * len(sign)) == count * sign
    return head


async def payload(client: RawClient, sign: bytes = COMMENT) -> bytes:
    """What comes up to the last chunk, without signs of life."""
    return (await client._chunks()).replace(sign, b"")


async def told(client: RawClient, name: bytes = b"", sign: bytes = SIGN) -> dict[str, object]:
    """The error in the only event that comes, up to the end of the connection, which has no last chunk."""
    rest = (await client.reader.read(-1)).replace(sign, b"")
    size, _, data = rest.partition(b"\r\n")
    assert len(data) == int(size, 16) + 2
    said: dict[str, object] = json.loads(data.removeprefix(name).removeprefix(b"data: "))
    assert isinstance(said["error"], dict)
    return said


def test_a_client_that_waits_in_the_queue_hears_of_it_and_gets_its_stream() -> None:
    """The head has what lbproxy decides, and nothing of what only an endpoint does."""
    release = asyncio.Event()

    async def main() -> None:
        limit = "cors: {origins: [https://chat.example]}"
        async with kept(after(release), more=limit, own=["max_in_flight: 1"]) as (it, client, (one,)):
            other = await it.connect()
            other.send(post())
            await until(lambda: one.requests)
            client.send(post(STREAM, more="x-request-id: mine\r\nOrigin: https://chat.example\r\n"))
            head = await signs(client)
            lines = set(head.lower().split(b"\r\n"))
            assert {
                *(b"http/1.1 200 ok", b"content-type: text/event-stream", b"cache-control: no-cache"),
                *(b"x-accel-buffering: no", b"transfer-encoding: chunked", b"x-request-id: mine"),
                b"access-control-allow-origin: https://chat.example",
            } <= lines
            absent = (b"x-lbproxy-", b"server:", b"via:", b"connection:")
            assert not [line for line in lines if line.startswith(absent)]
            assert len(one.requests) == 1
            release.set()
            assert await payload(client) == EVENTS
            await other.reply()
            client.send(post(STREAM))
            assert b"x-lbproxy-endpoint: e1" in await client.head(), "its connection serves another request"
            await client._chunks()
            first = next(one for one in it.records.requests if one.id.startswith("mine-"))
            assert (first.outcome, first.status, first.attempts) == (Outcome.COMPLETED, 200, 1)
            assert first.events == 2
            assert first.first_byte_at is not None
            assert first.response_bytes >= len(head) + 2 * len(SIGN) + len(chunk(EVENTS) + LAST)

    run(main())


def test_nothing_is_sent_before_the_interval() -> None:
    """So a refusal that comes earlier keeps its status, and a stream its own head."""

    async def main() -> None:
        async with kept(WHOLE, answer(status=422), every_s=1.0) as (_, client, __):
            client.send(post(STREAM))
            assert b"x-lbproxy-endpoint: e1" in await client.head()
            assert await client._chunks() == EVENTS
            client.send(post(STREAM))
            assert (await client.reply()).status == 422

    run(main())


def test_without_the_setting_nothing_is_sent() -> None:
    """And no timer runs."""
    release = asyncio.Event()

    async def main() -> None:
        async with kept(after(release), every_s=0.0) as (it, client, (one,)):
            client.send(post(STREAM))
            await until(lambda: one.requests)
            (turn,) = [one.turn for one in it.front._clients()]
            assert cast("Any", turn)._keepalive is None
            release.set()
            assert b"x-lbproxy-endpoint: e1" in await client.head()

    run(main())


def test_a_request_can_ask_for_it() -> None:
    async def main() -> None:
        async with kept(hang, every_s=0.0) as (_, client, __):
            client.send(post(STREAM, more=ASKED))
            await signs(client)

    run(main())


def test_a_client_of_messages_gets_the_ping_of_its_api() -> None:
    release = asyncio.Event()
    sign = chunk(PING)
    body = b'event: message_start\ndata: {"type":"message_start"}\n\nevent: message_stop\ndata: {}\n\n'

    async def main() -> None:
        async with kept(after(release, STREAM_HEAD + chunk(body) + LAST)) as (_, client, __):
            client.send(post(STREAM, "/v1/messages"))
            await signs(client, sign=sign)
            release.set()
            assert await payload(client, PING) == body

    run(main())


def test_in_a_prefill_comments_follow_the_head_of_the_server() -> None:
    """Which came at once, as vLLM's does."""
    release = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await release.wait()
        await wire.send(chunk(EVENTS) + LAST)

    async def main() -> None:
        async with kept(script) as (it, client, __):
            client.send(post(STREAM))
            head = await client.head()
            if b"x-lbproxy-endpoint: e1" not in head:  # a busy machine: the interval had passed
                assert b"x-accel-buffering" in head
            assert await client.reader.readexactly(2 * len(SIGN)) == 2 * SIGN
            release.set()
            assert await payload(client) == EVENTS
            assert await record_of(it) == (Outcome.COMPLETED, 200, 1)

    run(main())


def test_a_stream_that_falls_silent_gets_comments_between_its_events() -> None:
    """Each 1 s, and not after a part of an event, whether in a chunk or between two."""
    going = asyncio.Event()
    parts = [b"data: 1\n\n", b"data: 2", b"2\n\n", b"data: 3\n\n"]

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + chunk(parts[0]))
        for part in parts[1:]:
            await going.wait()
            going.clear()
            await wire.send(chunk(part))
        await wire.send(LAST)

    async def main() -> None:
        async with kept(script, every_s=1.0) as (it, client, __):
            client.send(post(STREAM))
            await client.head()
            assert await client.reader.readexactly(len(chunk(parts[0]))) == chunk(parts[0])
            began = asyncio.get_running_loop().time()
            assert await client.reader.readexactly(len(SIGN)) == SIGN
            assert asyncio.get_running_loop().time() - began > 0.7
            going.set()
            assert await client.reader.readexactly(len(chunk(parts[1]))) == chunk(parts[1])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.3):
                    await client.reader.readexactly(1)
            going.set()
            assert await client.reader.readexactly(len(chunk(parts[2]))) == chunk(parts[2])
            going.set()
            assert (await client.reader.readuntil(LAST)).replace(SIGN, b"") == chunk(parts[3]) + LAST
            assert await record_of(it) == (Outcome.COMPLETED, 200, 1)

    run(main())


FRAMINGS = {
    "only closing ends it": STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b""),
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    "it says how long it is": answer(b"", kind="text/event-stream").replace(b": 0\r\n", b": %d\r\n" % len(EVENTS)),
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_stream_in_another_framing_gets_comments_as_well(framing: str) -> None:
    """The client has it in chunks."""
    going = asyncio.Event()
    half = EVENTS.index(b"\n\n") + 2

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(FRAMINGS[framing] + EVENTS[:half])
        await going.wait()
        await wire.send(EVENTS[half:])
        wire.close()

    async def main() -> None:
        async with kept(script) as (it, client, __):
            client.send(post(STREAM))
            assert b"transfer-encoding: chunked" in (await client.head()).lower()
            await client.reader.readuntil(chunk(EVENTS[:half]))
            assert await client.reader.readexactly(len(SIGN)) == SIGN
            going.set()
            assert await payload(client) == EVENTS[half:]
            assert await record_of(it) == (Outcome.COMPLETED, 200, 1)
            client.send(post(STREAM))
            await client.head()

    run(main())


OTHERS: dict[str, tuple[bytes, bytes]] = {
    "a whole response": (b'{"model":"m"}', answer()),
    "lines of JSON": (STREAM, answer(b'{"done":true}\n', kind="application/x-ndjson")),
    "a compressed stream": (STREAM, answer(b"xx", kind="text/event-stream", more="Content-Encoding: gzip\r\n")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_readable_stream_stays_as_it_is(what: str) -> None:
    """On a path of which nobody knows that its streams are events, no head is sent ahead of the server's."""
    body, response = OTHERS[what]

    async def script(wire: Wire, _: Received) -> None:
        await asyncio.sleep(3 * SOON_S)
        begins = response.index(b"\r\n\r\n") + 5
        await wire.send(response[:begins])
        await asyncio.sleep(3 * SOON_S)
        await wire.send(response[begins:])

    async def main() -> None:
        async with kept(script) as (_, client, __):
            client.send(post(body, "/v1/unknown"))
            reply = await client.reply()
            assert reply.body == response.partition(b"\r\n\r\n")[2]
            assert reply.field("content-length") == str(len(reply.body))

    run(main())


def test_http_1_0_has_no_chunks_for_it() -> None:
    release = asyncio.Event()

    async def main() -> None:
        async with kept(after(release)) as (_, client, (one,)):
            client.send(post(STREAM, version="1.0", more="x-lbproxy-keepalive: 1\r\n"))
            await until(lambda: one.requests)
            await asyncio.sleep(3 * SOON_S)
            release.set()
            assert b"x-lbproxy-endpoint: e1" in await client.head()
            assert await client.reader.read(-1) == EVENTS

    run(main())


def test_retries_go_on_after_the_head() -> None:
    """Nothing of a response was sent: comments are none."""
    release = asyncio.Event()

    async def first(wire: Wire, _: Received) -> None:
        await release.wait()
        wire.reset()

    async def main() -> None:
        async with kept(first, WHOLE) as (it, client, __):
            client.send(post(STREAM))
            await signs(client)
            release.set()
            assert await payload(client) == EVENTS
            assert await record_of(it) == (Outcome.COMPLETED, 200, 2)
            assert it.records.requests[0].failed == (("e1", "upstream_reset"),)

    run(main())


def test_a_client_hears_between_two_attempts() -> None:
    """After the head of the first server, before that of the second."""
    release = asyncio.Event()

    async def first(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await wire.watch()

    async def main() -> None:
        async with kept(first, after(release)) as (it, client, ends):
            client.send(post(STREAM))
            await client.head()
            await until(lambda: ends[0].requests)
            ends[0].wires[0].reset()
            await until(lambda: ends[1].requests)
            assert (await client.reader.readexactly(9 * len(SIGN))).endswith(3 * SIGN)
            release.set()
            assert await payload(client) == EVENTS
            assert await record_of(it) == (Outcome.COMPLETED, 200, 2)

    run(main())


REFUSALS: dict[str, tuple[Script, str, str | int, Outcome]] = {
    "the queue": (hang, "admission: {queue_timeout: 500ms}", "rejected_ttl_expired", Outcome.EXPIRED),
    "no connection": (lambda wire, _: _reset(wire), "", "upstream_reset", Outcome.UPSTREAM_RESET),
    "time": (hang, "timeouts: {first_byte: 300ms}", "upstream_timeout", Outcome.UPSTREAM_TIMEOUT),
    "a 400": (
        lambda wire, _: _late(wire, answer(b'{"error":{"message":"too long","code":400}}', status=400)),
        *("", 400, Outcome.COMPLETED),
    ),
    "JSON": (lambda wire, _: _late(wire, answer()), "", 200, Outcome.UPSTREAM_BROKE),
}


async def _late(wire: Wire, response: bytes) -> None:
    await asyncio.sleep(3 * SOON_S)
    await wire.send(response)


async def _reset(wire: Wire) -> None:
    await asyncio.sleep(3 * SOON_S)
    wire.reset()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("why", REFUSALS)
def test_what_refuses_it_then_is_told_as_an_event(why: str, path: str) -> None:
    """In the form of the API, and the log has what happened, with the status that the client got."""
    script, more, code, outcome = REFUSALS[why]
    is_messages = path == "/v1/messages"
    sign = chunk(PING if is_messages else COMMENT)

    async def main() -> None:
        own = ["max_in_flight: 1"] if why == "the queue" else []
        async with kept(script, more=more, own=own) as (it, client, (one,)):
            if why == "the queue":
                other = await it.connect()
                other.send(post())
                await until(lambda: one.requests)
            client.send(post(STREAM, path))
            await signs(client, 1, sign)
            said = await told(client, b"event: error\n" if is_messages else b"", sign)
            assert isinstance(said["error"], dict)
            assert said["error"]["code"] == code
            assert said["error"]["message"]
            assert said.get("type") == ("error" if is_messages else None)
            await until(lambda: it.records.requests)
            record = it.records.requests[0]
            assert (record.outcome, record.status) == (outcome, 200)

    run(main())


def test_a_client_that_leaves_while_it_hears_is_gone() -> None:
    async def main() -> None:
        async with kept(hang) as (it, client, (one,)):
            client.send(post(STREAM))
            await signs(client)
            await until(lambda: one.requests)
            client.writer.transport.abort()
            await until(one.wires[0].gone.is_set)
            assert await record_of(it) == (Outcome.CLIENT_CLOSED, 200, 1)

    run(main())


def test_one_that_does_not_read_gets_no_more() -> None:
    """Comments would pile up for it."""

    async def main() -> None:
        async with kept(hang) as (it, client, __):
            client.send(post(STREAM))
            await signs(client)
            (connection,) = it.front._clients()
            connection.pause_writing()
            await asyncio.sleep(3 * SOON_S)
            written = await client.reader.read(1 << 16) if client.reader._buffer else b""  # type: ignore[attr-defined]
            assert len(written) <= 2 * len(SIGN)
            connection.resume_writing()
            assert await client.reader.readexactly(len(SIGN)) == SIGN

    run(main())


def test_a_stop_is_told_to_who_waits() -> None:
    """And a stream that begins after it ends the connection as its head said: not."""

    async def main() -> None:
        async with kept(hang) as (it, client, __):
            client.send(post(STREAM))
            await signs(client)
            (connection,) = it.front._clients()
            connection.cut(Outcome.DRAINING)
            said = await told(client)
            assert isinstance(said["error"], dict)
            assert said["error"]["code"] == "lb_shutdown"
            assert await record_of(it) == (Outcome.CUT, 200, 1)

    run(main())


def test_a_short_stream_that_comes_in_one_piece_follows_the_head() -> None:
    async def main() -> None:
        whole = answer(EVENTS, kind="text/event-stream")
        async with kept(lambda wire, _: _late(wire, whole)) as (it, client, __):
            client.send(post(STREAM))
            await signs(client)
            assert await payload(client) == EVENTS
            assert await record_of(it) == (Outcome.COMPLETED, 200, 1)
            client.send(post(STREAM))
            await client.head()

    run(main())
