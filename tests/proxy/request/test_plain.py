# SPDX-License-Identifier: Apache-2.0
"""The fast lane: it takes what it can read, nothing that aiohttp would refuse or read otherwise, and it gives way."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import SINGLETON_HEADERS, HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.front import connection
from lbproxy.proxy.front.connection import State
from lbproxy.proxy.request.headers import RequestFields, asking_as_it_is, read_request_fields
from lbproxy.proxy.request.plain import read_plain
from tests.proxy.conftest import States
from tests.support.aio import run, until
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, echo_after, event
from tests.support.rig import post, rig
from tests.support.state_tables import STATES

LIMIT = 1 << 20


def as_aiohttp_reads(data: bytes) -> tuple[str, RequestFields, bytes] | None:
    """Path, fields and body of exactly one whole request, or None if aiohttp finds anything else."""

    async def parse() -> tuple[str, RequestFields, bytes] | None:
        loop = asyncio.get_running_loop()
        parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16, max_field_size=16 << 10, auto_decompress=False)
        try:
            messages, _, tail = parser.feed_data(data)
        except HttpProcessingError:
            return None
        if len(messages) != 1 or tail:
            return None
        message, payload = messages[0]
        if not payload.is_eof() or message.should_close or message.version != (1, 1):
            return None
        body = payload.read_nowait() if payload.total_bytes else b""
        fields = read_request_fields(message.raw_headers)
        fields.forward = asking_as_it_is(fields.forward)
        return message.path, fields, body

    return asyncio.run(parse())


def same_lines(block: bytes) -> list[tuple[bytes, bytes]]:
    """Field lines without what white space round the colon and at the end may differ in."""
    parts = [line.partition(b":") for line in block.split(b"\r\n") if line]
    return [(name, value.strip(b" \t")) for name, _, value in parts]


NAMES = [
    "Accept-Encoding",
    "X-Lbproxy-Priority",
    "X-Session-Id",
    "Host",
    "content-length",
    "Content-Type",
    "X-Request-Id",
    "Connection",
    "X-A",
    "Authorization",
    "x-api-key",
    "TE",
    "Expect",
    "x y",
    "",
    "Sec-WebSocket-Key1",
    "Via",
    "X-Forwarded-For",
    *sorted(SINGLETON_HEADERS),
]
VALUES = [
    "-5",
    "lb",
    "13",
    "13 ",
    "+13",
    "application/json",
    "keep-alive",
    "close",
    "a\tb",
    "é",
    "\x00",
    "trailers",
    "",
    "application/json; charset=utf-16",
]
COLONS = [":", ": ", " :"]
FIELD = st.tuples(*map(st.sampled_from, (NAMES, COLONS, VALUES))).map("".join)
LINE = st.sampled_from(
    [
        "POST /v1/completions HTTP/1.1",
        "POST /v1/chat/completions HTTP/1.1",
        "POST /v1/messages?beta=true HTTP/1.1",
        "POST /v1/responses HTTP/1.1",
        "POST /v1/completions HTTP/1.0",
    ]
)
LINES = st.lists(FIELD, max_size=4)
ENDS = st.sampled_from(["", "x", "GET / HTTP/1.1\r\n\r\n"])
BODY = '{"model":"m"}'


@settings(max_examples=600)
@given(
    line=LINE,
    lines=LINES,
    usual=st.booleans(),
    end=ENDS,
    eol=st.sampled_from(["\r\n", "\n"]),
)
@example(line="POST /v1/completions HTTP/1.1", lines=["X-A: a\tb"], usual=True, end="", eol="\r\n")
@example(line="POST /v1/completions HTTP/1.1", lines=["User-Agent: a", "USER-agent: b"], usual=True, end="", eol="\r\n")
def test_what_the_lane_takes_aiohttp_would_read_alike(
    line: str, lines: list[str], usual: bool, end: str, eol: str
) -> None:
    head = [line, *(["Host: lb", "Content-Length: 13", "Content-Type: application/json"] if usual else []), *lines]
    data = (eol.join([*head, "", ""]) + BODY + end).encode("latin-1")
    plain = read_plain(data, LIMIT)
    if plain is None:
        return
    read = as_aiohttp_reads(data)
    assert read is not None
    path, fields, body = read
    assert (plain.target, plain.body) == (path, body)
    assert same_lines(plain.fields.forward) == same_lines(fields.forward)
    assert same_lines(plain.credentials) == same_lines(fields.credentials)
    assert plain.fields.request_id == fields.request_id
    assert (plain.fields.priority, plain.fields.session) == (fields.priority, fields.session)
    assert plain.fields.content_type.strip() == fields.content_type.strip()


@pytest.mark.parametrize(
    "data",
    [
        post()[:-1],
        post() + b"x",
        post() + post(),
        post(version="1.0"),
        post(path="/v1/embeddings"),
        post(path="/v1/completions?x=%31"),
        post(more="Connection: close\r\n"),
        post(more="Connection: keep-alive, x\r\n"),
        post(more="Expect: 100-continue\r\n"),
        post(more="Transfer-Encoding: chunked\r\n"),
        post(more="Upgrade: websocket\r\n"),
        post(more="Content-Encoding: gzip\r\n"),
        post(more="TE: trailers\r\n"),
        post(more="Host: two\r\n"),
        post(more="Content-Length: 13\r\n"),
        *(post(more=f"{name}: 1\r\n{name.title()}: 1\r\n") for name in sorted(SINGLETON_HEADERS)),
        post(more="Sec-WebSocket-Key1: 1\r\n"),
        post(more="Content-Type: application/json; charset=utf-16\r\n"),
        post(more="X: \x00\r\n"),
        post(more="X: \u00e9\r\n"),
        post(more="X:" + "y" * 10_000 + "\r\n"),
        post(more="X: y\r\n" * 70),
        post().replace(b"Host: lb\r\n", b""),
        post().replace(b"Content-Length: 13\r\n", b""),
        post().replace(b"\r\n", b"\n"),
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_aiohttp(data: bytes) -> None:
    assert read_plain(data, LIMIT) is None


def test_a_usual_request_of_the_sdk_is_plain() -> None:
    more = "x-stainless-lang: python\r\nAuthorization: Bearer k\r\nconnection: keep-alive\r\nx-request-id: a-1\r\n"
    plain = read_plain(post(more=more), LIMIT)
    assert plain is not None
    assert plain.fields.request_id == "a-1"
    assert plain.fields.forward == b"Content-Type: application/json\r\nx-stainless-lang: python\r\n"
    assert plain.fields.credentials == plain.credentials == b"Authorization: Bearer k\r\n"
    assert read_plain(post(b"x" * 20), 19) is None


def count_plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests took the lane, as a list that grows."""
    taken: list[int] = []
    real = read_plain

    def counting(data: bytes, limit: int) -> object:
        plain = real(data, limit)
        if plain is not None:
            taken.append(1)
        return plain

    monkeypatch.setattr(connection, "read_plain", counting)
    return taken


GET = b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n\r\n"


def test_a_connection_changes_lanes_from_request_to_request(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "aiohttp":
        pytest.skip("about the lane")
    taken = count_plain(monkeypatch)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for data, lane in ((post(), 1), (GET, 1), (post(), 2), (GET, 2), (post(), 3)):
                client.send(data)
                assert (await client.reply()).status == 200
                assert len(taken) == lane
            client.send(post()[:-2])
            await asyncio.sleep(0.02)
            client.send(post()[-2:])
            assert (await client.reply()).status == 200
            client.send(post())
            assert (await client.reply()).status == 200
            assert len(taken) == 4, "aiohttp has read its request to the end"

    run(main())


def test_requests_behind_a_running_one_wait_and_are_answered_in_order() -> None:
    """Plain ones, one in two pieces, one for aiohttp, and one that is no HTTP: that one ends it."""
    release = asyncio.Event()

    async def main() -> None:
        async with ScriptedEndpoint(echo_after(release)) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            bodies = [b'{"model":"m","n":%d}' % n for n in range(4)]
            client.send(post(bodies[0]))
            await until(lambda: endpoint.requests, "running")
            client.send(post(bodies[1]) + post(bodies[2])[:20])
            await asyncio.sleep(0.02)
            client.send(post(bodies[2])[20:] + GET + post(bodies[3]))
            await asyncio.sleep(0.02)
            assert len(endpoint.requests) == 1
            release.set()
            replies = [await client.reply() for _ in range(5)]
            assert {reply.status for reply in replies} == {200}
            assert [reply.body for reply in (*replies[:3], replies[4])] == bodies
            client.send(b"garbage\r\n\r\n")
            assert (await client.reply()).status == 400
            assert await client.reader.read() == b""

    run(main())


def test_a_flood_behind_a_running_request_is_not_read(way: str) -> None:
    if way == "aiohttp":
        pytest.skip("aiohttp has bounds of its own")
    release = asyncio.Event()

    async def main() -> None:
        async with ScriptedEndpoint(echo_after(release)) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            body = b'{"model":"m","x":"%s"}' % (b"y" * 30_000)
            client.send(post(body) * 300)
            await until(lambda: client.writer.transport.get_write_buffer_size() > 0, "it backs up to the client")
            (one,) = it.front.connections
            assert isinstance(one, connection.ClientConnection)
            assert len(one._buffered) < 1 << 20
            release.set()
            replies = [await client.reply() for _ in range(301)]
            assert {reply.status for reply in replies} == {200}

    run(main())


def test_a_client_that_goes_while_requests_wait_behind_leaves_nothing() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post() + post())
            await client.head()
            client.writer.transport.abort()
            await until(endpoint.wires[0].gone.is_set, "the endpoint's connection is closed")
            await until(lambda: it.in_flight() == 0, "nothing in flight")
            assert len(endpoint.requests) == 1
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED

    run(main())


def test_an_idle_connection_is_closed_but_a_long_answer_is_not() -> None:
    go = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await go.wait()
        await wire.send(event("2") + LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more="timeouts: {client_idle: 300ms}") as it:
            client = await it.connect()
            client.send(post())
            await client.head()
            await asyncio.sleep(0.9)
            go.set()
            rest = await client.reader.readuntil(LAST)
            assert rest.endswith(event("2") + LAST)
            assert await client.reader.read() == b"", "closed for idleness, after the answer"

    run(main())


def test_a_body_that_looks_like_a_request_stays_a_body_where_its_head_came_while_the_client_took_nothing() -> None:
    """Its bytes were run as a request of their own: behind a proxy that shares a connection, anybody's."""
    inner = post(b'{"model":"m","inner":1}')
    outer = f"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    sent = 0

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer(b"x" * 60_000))

    async def main() -> None:
        nonlocal sent
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            transport = cast(asyncio.Transport, client.writer.transport)
            transport.pause_reading()
            (connected,) = it.front._clients()
            while not connected.writing_paused:
                client.send(post())
                sent += 1
                await until(lambda: len(it.records.requests) == sent, "it was answered")  # noqa: B023
            client.send(outer)
            await until(lambda: connected.busy, "its head is there")
            transport.resume_reading()
            for _ in range(sent):
                assert (await client.reply()).status == 200
            await until(lambda: not connected.writing_paused, "it took them")
            client.send(inner)
            await client.reply()
            assert len(endpoint.requests) <= sent + 1
            assert all(b"inner" not in one.body or one.body == inner for one in endpoint.requests)

    run(main())


def test_every_line_of_the_table_of_states_is_taken(way: str, states: States) -> None:
    """So that the table says what happens, no less and no more; `conftest.states` sees to the latter."""
    if way != "lane":
        pytest.skip("about the lane")

    slow = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        if b"slow" in request.body:
            await slow.wait()
        await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await client.reply()
            (connected,) = it.front._clients()
            client.send(post(b'{"model":"m","slow":1}'))
            await until(lambda: endpoint.requests[1:], "running")
            client.send(post())
            await until(lambda: connected._buffered, "it waits behind")
            slow.set()
            assert [(await client.reply()).status for _ in range(2)] == [200, 200]
            client.send(GET + GET)
            assert [(await client.reply()).status for _ in range(2)] == [200, 200]
            client.send(post())
            await client.reply()
            begun = post(b'{"model":"m"}' + b" " * 100_000)
            client.send(begun[:-1])
            await until(lambda: connected.arriving, "its body arrives")
            client.send(begun[-1:])
            assert (await client.reply()).status == 200
            client.send(begun[:-1])
            await until(lambda: connected.arriving, "its body arrives")
            connected.cut(Outcome.DRAINING)
            assert (await client.reply()).status == 503
            assert states.taken == STATES - {(State.AIOHTTP, State.SWITCHED)}, "that one is tests/proxy/sockets's"

    run(main())
