# SPDX-License-Identifier: Apache-2.0
"""What a client sends at once, or ahead, costs a bounded amount of work in each turn of the loop, and a bounded number
of bytes, in every state of its connection. Counted, not timed.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from lbproxy.proxy.front.connection import MAX_BUFFERED_BYTES, ClientConnection
from lbproxy.proxy.request.walk import DENSE_PIECE_BYTES, RequestWalk
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, echo_after
from tests.support.rig import Rig, post, rig

HEALTH = b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n"
ONE_READ = 256 << 10
FLOODS = {
    "empty lines": b"\r\n" * (1 << 20),
    "bare line feeds": b"\n" * (2 << 20),
    "tiny requests": HEALTH * 60_000,
    "heads without an end": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 350_000,
}


class Work:
    """What connections gave to aiohttp and to the walk, by turns of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: Counter[tuple[object, int]] = Counter()
        """By connection and turn."""
        self.lines = 0
        """The most that went to aiohttp in a turn."""
        self.most_buffered = self.most_messages = 0
        self._turn = 0
        feed, step, received = ClientConnection._feed, RequestWalk.step, web.RequestHandler.data_received

        def feeding(client: ClientConnection, data: bytes, at: int) -> None:
            feed(client, data, at)
            self.most_buffered = max(self.most_buffered, len(client._buffered) - client._at)
            self.most_messages = max(self.most_messages, len(client._messages))

        def stepping(walk: RequestWalk, data: bytes, at: int) -> int:
            self.steps[walk, self._turn] += 1
            return step(walk, data, at)

        def receiving(handler: web.RequestHandler, data: bytes) -> None:
            self.lines = max(self.lines, data.count(b"\n"))
            received(handler, data)

        monkeypatch.setattr(ClientConnection, "_feed", feeding)
        monkeypatch.setattr(RequestWalk, "step", stepping)
        monkeypatch.setattr(web.RequestHandler, "data_received", receiving)

    async def count_turns(self) -> None:
        """Run beside the rest."""
        while True:
            await asyncio.sleep(0)
            self._turn += 1

    @property
    def most_steps(self) -> int:
        """Of a connection in a turn."""
        return max(self.steps.values(), default=0)


@pytest.fixture(name="work")
def _work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def held(it: Rig) -> int:
    """Bytes that all connections hold of requests that do not run yet."""
    return sum(len(one._buffered) + len(one._walk._head) for one in it.front._clients())


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("behind", ["nothing", "a request that runs", "unread responses"])
def test_a_flood_costs_one_step_a_turn_and_little_memory(work: Work, name: str, behind: str) -> None:
    """2 MB of empty lines held the loop for seconds, each of them a head; 2 MB of heads were all parsed, and kept."""
    release = asyncio.Event()

    async def main() -> None:
        async with ScriptedEndpoint(echo_after(release)) as endpoint, rig(endpoint.url) as it:
            counting = asyncio.create_task(work.count_turns())
            client, other = await it.connect(), await it.connect()
            if behind == "a request that runs":
                client.send(post())
                await until(lambda: endpoint.requests, "running")
            elif behind == "unread responses":
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.send(HEALTH * 1000)
            client.send(FLOODS[name])
            for _ in range(20):
                other.send(HEALTH)
                assert (await other.reply()).status == 200
                assert held(it) <= MAX_BUFFERED_BYTES + ONE_READ
            assert work.most_steps <= 2, "of what was buffered, and of what was read after it"
            assert work.most_messages <= 1, "aiohttp has one message at a time"
            assert work.most_buffered <= MAX_BUFFERED_BYTES + ONE_READ
            release.set()
            client.writer.transport.abort()
            await until(lambda: it.front.open_connections == 1, "it is gone")
            counting.cancel()

    run(main())


def test_heads_behind_a_running_request_are_not_read_on_and_on(work: Work) -> None:
    """32 of 2 MiB each were parsed and kept: 120 MiB for a connection, twice what was sent."""
    release = asyncio.Event()
    fields = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 400) for n in range(100))
    head = b"GET /health HTTP/1.1\r\nHost: lb\r\n%s\r\n" % fields

    async def main() -> None:
        async with ScriptedEndpoint(echo_after(release)) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            client.send(head * 200)
            await until(lambda: held(it) > MAX_BUFFERED_BYTES, "it backs up to the client")
            await asyncio.sleep(0.05)
            assert held(it) <= MAX_BUFFERED_BYTES + ONE_READ
            (connected,) = it.front._clients()
            assert len(connected._messages) == 0
            assert connected.held_bytes > MAX_BUFFERED_BYTES, "it counts where memory is short"
            release.set()
            replies = [await client.reply() for _ in range(201)]
            assert {reply.status for reply in replies} == {200}
            assert work.most_messages <= 1

    run(main())


def test_a_body_of_tiny_chunks_is_read_a_piece_a_turn(work: Work) -> None:
    """43,000 chunks in one read are 0.1 s of work for its parsers."""
    body = b'{"model":"m","prompt":"%s"}' % (b"x" * 60_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            counting = asyncio.create_task(work.count_turns())
            client.send(head + chunks + post())
            assert [(await client.reply()).status for _ in range(2)] == [200, 200]
            counting.cancel()
            assert endpoint.requests[0].body == body
            assert work.lines <= DENSE_PIECE_BYTES // 2
            assert work.most_steps <= 2, "of what was buffered, and of what was read after it"

    run(main())


def test_a_few_empty_lines_before_a_request_are_skipped_and_more_are_refused() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for lines in (b"\r\n", b"\r\n\r\n", b"\n\n"):
                client.send(lines + HEALTH)
                assert (await client.reply()).status == 200
            for pieces in ([b"\r\n" * 9], [b"\r\n"] * 9):
                client = await it.connect()
                for piece in pieces:
                    client.send(piece)
                    await asyncio.sleep(0.005)
                refused = await client.reply()
                assert (refused.status, refused.field("connection")) == (400, "close")

    run(main())


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nope"])
@pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_a_response_before_the_body_ends_says_that_the_connection_does(path: str, framing: str) -> None:
    """It promised to keep it, and lost the next request of a client that believed it."""
    head = f"GET {path} HTTP/1.1\r\nHost: lb\r\n{framing}\r\n\r\n".encode()

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(head)
            assert (await client.reply()).field("connection") == "close"
            assert await client.reader.read() == b""

    run(main())


def test_a_head_whose_end_only_one_of_the_parsers_sees_is_refused() -> None:
    """There is none known; one would wait for ever, with all that follows it."""

    class Deaf:
        def feed_data(self, data: bytes) -> tuple[list[object], bool, bytes]:
            return [], False, b""

        def message_consumed(self) -> None:
            raise AssertionError("no message")

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            await until(lambda: it.front.open_connections == 1)
            (connected,) = it.front._clients()
            connected._parser = Deaf()  # type: ignore[assignment]
            client.send(HEALTH)
            assert (await client.reply()).status == 400

    run(main())
