# SPDX-License-Identifier: Apache-2.0
"""Streams whose head went out, and nothing of their body: between vLLM's 200 and the first token lies the prefill.

Another endpoint may bring the body; a second head must never follow, and what cannot go on is told as an event.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.trace import Sampling
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.core.responses.sse import EventScanner
from lbproxy.proxy.exchange.exchanger import LARGE_BODY_BYTES
from lbproxy.proxy.exchange.opening import MAX_HELD_BYTES, Opening
from lbproxy.proxy.exchange.relay import HOLD_HEAD_S, HeadSender, end_after_head
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    chunk,
    event,
    hang,
)
from tests.support.rig import RawClient, Rig, post, rig

STREAM = b'{"model":"m","stream":true}'
BODY = event('{"choices":[{"finish_reason":"stop"}]}') + event("[DONE]") + LAST
NO_BUDGET = "retry: {budget_ratio: 0, budget_per_second: 0}"


class Begun:
    """A request that has the head of e1's stream; e2, if there is one, answers by `script`."""

    def __init__(self, it: Rig, client: RawClient, first: ScriptedEndpoint, second: ScriptedEndpoint) -> None:
        self.it, self.client, self.first, self.second = it, client, first, second

    @property
    def wire(self) -> Wire:
        return self.first.wires[0]

    def take_down(self) -> None:
        """e1."""
        self.it.take_down("e1")

    async def rest(self) -> bytes:
        """What the client gets after the head, until its connection ends."""
        return await self.client.reader.read(-1)

    async def told(self, code: str | int) -> str:
        """The only thing that follows is an event with this error; its message."""
        rest = await self.rest()
        size, _, after = rest.partition(b"\r\n")
        assert len(after) == int(size, 16) + 2, "one chunk, and no last one"
        error = json.loads(after.removeprefix(b"data: "))["error"]
        assert error["code"] == code
        return str(error["message"])

    async def record(self) -> tuple[Outcome, str | None, int, int]:
        await until(lambda: self.it.records.requests)
        (record, *more) = self.it.records.requests
        assert not more, f"one request is recorded once: {[(r.method, r.path, r.outcome, r.id) for r in more]}"
        return record.outcome, record.endpoint, record.attempts, record.status


@asynccontextmanager
async def begun(
    script: Script | bytes, *, body: bytes = STREAM, first: bytes = STREAM_HEAD, more: str = ""
) -> AsyncIterator[Begun]:
    """With e1 waiting for what its test does; its answers begin with `first`."""

    async def silent(wire: Wire, _: Received) -> None:
        await wire.send(first)
        await wire.watch()

    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(ScriptedEndpoint(silent))
        two = await stack.enter_async_context(ScriptedEndpoint(script))
        settings = f"routing: {{policy: round-robin}}\n{more}"
        it = await stack.enter_async_context(rig(one.url, two.url, more=settings))
        client = await it.connect()
        client.send(post(body))
        async with asyncio.timeout(20.0):
            head = await client.head()
        assert b"200 OK" in head
        assert b"x-lbproxy-endpoint: e1" in head
        yield Begun(it, client, one, two)


async def stream(wire: Wire, _: Received) -> None:
    await wire.send(STREAM_HEAD, BODY)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_the_stream_of_another_goes_on_after_the_head(how: str) -> None:
    """What kill -9 does while the engine reads the prompt. The client has one head, and a whole body."""

    async def main() -> None:
        async with begun(stream) as it:
            getattr(it.wire, how)()
            got = await it.client.reader.readexactly(len(BODY))
            assert got == BODY
            assert it.second.requests[0].body == it.first.requests[0].body
            assert await it.record() == (Outcome.COMPLETED, "e2", 2, 200)
            assert it.it.records.requests[0].failed == (("e1", "upstream_reset"),)
            it.client.send(post(STREAM))
            assert b"200 OK" in await it.client.head(), "its connection serves another request"

    run(main())


def test_what_the_head_said_of_the_connection_holds_when_another_goes_on() -> None:
    """We stop between two endpoints: the head did not say that the connection ends, so one more request is served."""

    async def waiting(wire: Wire, _: Received) -> None:
        await stopping.wait()
        await wire.send(STREAM_HEAD, BODY)

    async def main() -> None:
        async with begun(waiting) as it:
            it.wire.reset()
            await until(lambda: it.second.requests)
            stop = asyncio.ensure_future(it.it.front.stop(5.0))
            await until(lambda: it.it.front.draining)
            stopping.set()
            it.first.scripts["/v1/chat/completions"] = STREAM_HEAD + BODY
            assert await it.client.reader.readexactly(len(BODY)) == BODY
            it.client.send(post(STREAM))
            assert b"Connection: close" in await it.client.head()
            assert await it.rest() == BODY
            assert await stop == 0

    stopping = asyncio.Event()
    run(main())


def test_who_has_the_head_alone_leaves_an_endpoint_that_goes_down() -> None:
    """A vLLM that took a request in the moment of its SIGTERM answers 200 and nothing more, and does not close."""

    async def main() -> None:
        async with begun(stream) as it:
            it.take_down()
            it.it.runtime.check()
            assert await it.client.reader.readexactly(len(BODY)) == BODY
            await until(it.wire.gone.is_set, "the old connection is closed")
            assert it.it.records.requests[0].failed == (("e1", "upstream_stranded"),)

    run(main())


def test_a_refusal_that_comes_late_is_asked_of_another() -> None:
    """vLLM refuses inside a 200: as good as a 503, also after the head went out."""

    async def main() -> None:
        async with begun(stream) as it:
            await it.wire.send(event('{"error": {"message": "busy", "code": 503}}') + event("[DONE]") + LAST)
            assert await it.client.reader.readexactly(len(BODY)) == BODY
            assert await it.record() == (Outcome.COMPLETED, "e2", 2, 200)

    run(main())


PINGS = {
    "a comment": [b": ping\n\n"],
    "llama.cpp's": [b":\n\n", b":\n\n"],
    "a comment in pieces": [b": pi", b"ng\r\n", b"\r\n"],
    "an event without data": [b"event: ping\nid: 7\nretry: 100\n\n"],
    "half a comment": [b": ping\n\n", b": pi"],
    "half an event": [b": ping\n\n", b'event: a\ndata: {"choices":[{"index":0,"del'],
}


@pytest.mark.parametrize("how", PINGS)
def test_comments_promise_nothing(how: str) -> None:
    """A llama.cpp that pings, and dies in the prefill. The client has its comments, and a whole stream after them."""
    parts = PINGS[how]
    whole = b"".join(parts)
    sent = b"".join(map(chunk, parts if whole.endswith(b"\n\n") or b"\r" in whole else parts[:-1]))

    async def main() -> None:
        async with begun(stream) as it:
            for part in parts:
                await it.wire.send(chunk(part))
                await asyncio.sleep(0.02)
            assert await it.client.reader.readexactly(len(sent)) == sent, "at once"
            it.wire.reset()
            assert await it.client.reader.readexactly(len(BODY)) == BODY
            assert await it.record() == (Outcome.COMPLETED, "e2", 2, 200)
            record = it.it.records.requests[0]
            assert record.first_byte_at is not None
            assert (record.failed, record.events) == ((("e1", "upstream_reset"),), 2)

    run(main())


def test_comments_with_the_head_promise_nothing() -> None:
    """They wait with it, and where nobody takes the request the client is told after them."""

    async def main() -> None:
        async with begun(hang, first=STREAM_HEAD + chunk(b": ping\n\n"), more=NO_BUDGET) as it:
            assert await it.client.reader.readexactly(13) == chunk(b": ping\n\n")
            it.wire.reset()
            assert "after 0 events" in await it.told("upstream_reset")
            assert await it.record() == (Outcome.UPSTREAM_BROKE, "e1", 1, 200)

    run(main())


def test_a_comment_that_is_cut_within_its_chunk_is_not_continued_by_another() -> None:
    async def main() -> None:
        async with begun(stream) as it:
            await it.wire.send(chunk(b": one\n\n") + b"9\r\n: t")
            await asyncio.sleep(0.05)
            it.wire.reset()
            assert await it.client.reader.readuntil(LAST) == BODY

    run(main())


def test_a_stream_of_comments_alone_passes() -> None:
    async def main() -> None:
        async with begun(stream) as it:
            await it.wire.send(chunk(b": ping\n\n") + LAST)
            assert await it.client.reader.readuntil(LAST) == chunk(b": ping\n\n") + LAST
            assert await it.record() == (Outcome.COMPLETED, "e1", 1, 200)

    run(main())


def test_a_first_event_without_its_end_is_a_first_byte_when_the_stream_ends() -> None:
    async def main() -> None:
        async with begun(stream) as it:
            await it.wire.send(chunk(b"data: 1") + LAST)
            assert await it.client.reader.readuntil(LAST) == chunk(b"data: 1") + LAST
            assert await it.record() == (Outcome.COMPLETED, "e1", 1, 200)
            assert it.it.records.requests[0].first_byte_at is not None

    run(main())


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_a_first_event_goes_when_it_is_complete_whatever_follows_it(size: int) -> None:
    """Not with the next one, of which a part has arrived."""
    opening, scanner = Opening(holds=False, events=0), EventScanner()
    first, more = b'event: a\ndata: {"x":1}\n\n', b"data: 2"
    stream, waits = first + more, []
    for at in range(0, len(stream), size):
        piece = stream[at : at + size]
        scanner.feed(piece, 0, len(piece))
        waits.append(opening.keeps(opening.held + piece, scanner))
        if not waits[-1]:
            break
    assert (len(waits) - 1) * size < len(first) <= len(waits) * size


def test_what_is_held_of_comments_is_bounded() -> None:
    async def main() -> None:
        async with begun(stream) as it:
            line = chunk(b": " + b"x" * (2 * MAX_HELD_BYTES))
            await it.wire.send(line)
            assert await it.client.reader.readexactly(len(line)) == line

    run(main())


def chunked(response: bytes) -> bytes:
    """The same response, in chunks of a few bytes."""
    head, _, body = response.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    chunks = b"".join(chunk(body[at : at + 7]) for at in range(0, len(body), 7))
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""]) + chunks + LAST


NO = answer(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', status=400)
OTHERS: dict[str, tuple[bytes, str | int, str, Outcome]] = {
    "an error": (NO, 400, "no", Outcome.COMPLETED),
    "an error in chunks": (chunked(NO), 400, "no", Outcome.COMPLETED),
    "an error that is cut": (chunked(NO)[:-9], 400, "returned status 400", Outcome.COMPLETED),
    "a page": (answer(b"<p>", status=404, kind="text/html"), 404, "returned status 404", Outcome.COMPLETED),
    "a failure": (answer(b'{"detail":"late"}', status=504), 504, "late", Outcome.UPSTREAM_BROKE),
    "JSON": (answer(b'{"ok":true}'), 200, "returned status 200", Outcome.UPSTREAM_BROKE),
    "large JSON": (answer(b'{"ok":"%s"}' % (b"x" * 300_000)), 200, "returned status 200", Outcome.UPSTREAM_BROKE),
    "a compressed stream": (
        answer(b"x" * 9, kind="text/event-stream", more="Content-Encoding: gzip\r\n"),
        *(200, "returned status 200", Outcome.UPSTREAM_BROKE),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_cannot_go_on_is_told_as_an_event(other: str) -> None:
    """No second head, and of its bytes only what an error says."""
    response, code, message, outcome = OTHERS[other]

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(response)
        wire.close()

    async def main() -> None:
        async with begun(script) as it:
            it.wire.reset()
            assert message in await it.told(code)
            assert await it.record() == (outcome, "e2", 2, 200)
            assert it.it.records.requests[0].error
            await until(lambda: it.it.in_flight() == 0)

    run(main())


EVENTS = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n' + b"data: [DONE]\n\n"
UNCHUNKED = {
    "only closing ends it": STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + EVENTS,
    "it says how long it is": answer(EVENTS, kind="text/event-stream"),
    "it ends before its length": answer(EVENTS + b"more", kind="text/event-stream")[:-4],
    "it is cut": STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + b'data: {"choices":[{"index":0}]}\n\n',
}


@pytest.mark.parametrize("how", UNCHUNKED)
def test_a_stream_that_is_not_in_chunks_goes_on_in_chunks(how: str) -> None:
    """As mlx_lm's server sends it, in HTTP/1.0. Cut, it does not look complete."""

    async def script(wire: Wire, _: Received) -> None:
        begins = UNCHUNKED[how].index(b"\r\n\r\n") + 13
        await wire.send(UNCHUNKED[how][:begins])
        await wire.send(UNCHUNKED[how][begins:])
        wire.close()

    async def main() -> None:
        async with begun(script) as it:
            it.wire.reset()
            if how in {"it is cut", "it ends before its length"}:
                got = await it.rest()
                assert not got.endswith(LAST)
                assert b"upstream connection lost" in got
                assert (await it.record())[0] is Outcome.UPSTREAM_BROKE
            else:
                assert await it.client._chunks() == EVENTS
                assert (await it.record())[0] is Outcome.COMPLETED
                it.first.scripts = {"/v1/chat/completions": STREAM_HEAD + BODY}
                it.client.send(post(STREAM))
                assert b"200 OK" in await it.client.head(), "its connection serves another request"

    run(main())


def test_without_budget_it_is_told() -> None:
    async def main() -> None:
        async with begun(stream, more=NO_BUDGET) as it:
            it.wire.reset()
            assert "after 0 events" in await it.told("upstream_reset")
            assert not it.second.requests
            assert await it.record() == (Outcome.UPSTREAM_BROKE, "e1", 1, 200)

    run(main())


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("outcome", "recorded", "code"),
    [
        (Outcome.EXPIRED, Outcome.EXPIRED, "rejected_ttl_expired"),
        (Outcome.SATURATED, Outcome.SATURATED, "rejected_saturated"),
        (Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_BROKE, "upstream_reset"),
    ],
)
def test_a_retry_that_lbproxy_refuses_keeps_its_code(outcome: Outcome, recorded: Outcome, code: str) -> None:
    """Not that of the connection that was lost before: nothing is wrong with the endpoints any more."""
    record, transport = RequestRecord("id", "POST", "/v1/chat/completions", "client", 0.0), Sent()
    theirs = cast("HeadSender", SimpleNamespace(is_ours=False, has_moved=False))
    end_after_head(cast("Any", SimpleNamespace(transport=transport)), record, LbError(outcome), theirs)
    assert record.outcome is recorded
    assert code.encode() in transport.data
    assert transport.closed


def test_a_large_body_is_kept_as_long_as_it_may_be_needed() -> None:
    body = b'{"model":"m","stream":true,"prompt":"%s"}' % (b"x" * 3 * LARGE_BODY_BYTES)

    async def main() -> None:
        async with begun(stream, body=body) as it:
            assert it.it.front.overload.held_bytes >= len(body)
            it.wire.reset()
            assert await it.client.reader.readexactly(len(BODY)) == BODY
            assert it.second.requests[0].body == body
            await until(lambda: it.it.records.requests)
            assert it.it.front.overload.held_bytes == 0

    run(main())


@pytest.mark.parametrize(("why", "code"), [(Outcome.DRAINING, "lb_shutdown"), (Outcome.OVERLOADED, "lb_overloaded")])
def test_a_cut_between_two_attempts_is_told(why: Outcome, code: str) -> None:
    """lbproxy stops, or has no memory, while nobody has the request."""

    async def main() -> None:
        async with begun(hang) as it:
            it.wire.reset()
            await until(lambda: it.second.requests)
            (client,) = it.it.front._clients()
            client.cut(why)
            assert "after 0 events" in await it.told(code)
            assert (await it.record())[0] in {Outcome.CUT, Outcome.OVERLOADED}

    run(main())


def test_a_client_that_leaves_between_two_attempts_is_gone() -> None:
    async def main() -> None:
        async with begun(hang) as it:
            it.wire.reset()
            await until(lambda: it.second.requests)
            it.client.writer.transport.abort()
            await until(it.second.wires[0].gone.is_set)
            assert await it.record() == (Outcome.CLIENT_CLOSED, "e2", 2, 200)

    run(main())


@interpreted
@pytest.mark.parametrize("how", ["take_down", "reset"])
def test_a_defect_between_two_attempts_is_told_as_an_event(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a second head, and nobody waits for ever."""

    def raising(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def main() -> None:
        async with begun(stream) as it:
            if how == "take_down":
                it.take_down()
                monkeypatch.setattr(it.it.data_runtime, "after_failure", raising)
                it.it.runtime.check()
            else:
                monkeypatch.setattr(it.it.data_runtime, "after_failure", raising)
                it.wire.reset()
            await it.told("internal_error")
            assert (await it.record())[0] is Outcome.INTERNAL_ERROR

    run(main())


@interpreted
def test_without_descriptors_it_is_told_what_we_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object) -> None:
        raise UpstreamError(FailureKind.EXHAUSTED, "too many open files")

    async def main() -> None:
        async with begun(stream) as it:
            monkeypatch.setattr(it.it.connections, "connect", connect)
            it.wire.reset()
            assert await it.told("lb_overloaded") == "the load balancer ran out of resources after 0 events"
            assert (await it.record())[0] is Outcome.OVERLOADED

    run(main())


def test_silence_after_the_head_is_told_and_not_tried_again() -> None:
    """The work may be running: a second copy would double it."""

    async def main() -> None:
        async with begun(stream, more="timeouts: {stream_idle: 50ms, first_byte: 500ms}") as it:
            assert "after 0 events" in await it.told("upstream_timeout")
            assert not it.second.requests
            assert await it.record() == (Outcome.UPSTREAM_BROKE, "e1", 1, 200)
            assert it.it.records.requests[0].failed == (("e1", "upstream_timeout"),)

    run(main())


def test_a_head_that_waits_is_dropped_with_its_answer() -> None:
    """Its timer must not let it go in the middle of the next attempt: that one's may be another."""

    async def first(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        wire.reset()

    async def second(wire: Wire, _: Received) -> None:
        await asyncio.sleep(2 * HOLD_HEAD_S)
        await wire.send(answer(status=400))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(ScriptedEndpoint(first))
            two = await stack.enter_async_context(ScriptedEndpoint(second))
            it = await stack.enter_async_context(rig(one.url, two.url, more="routing: {policy: round-robin}"))
            reply = await it.ask(post(STREAM))
            assert (reply.status, reply.field("x-lbproxy-endpoint")) == (400, "e2")

    run(main())


def test_a_client_that_takes_nothing_stops_the_next_endpoint_too() -> None:
    """Its buffer filled up while no endpoint was there to be stopped."""
    piece = event("x" * 64_000)

    async def second(wire: Wire, _: Received) -> None:
        await full.wait()
        await wire.send(STREAM_HEAD)
        for number in range(500):
            await wire.send(piece)
            sent.append(number)
        await wire.send(BODY)

    async def main() -> None:
        async with begun(second) as it:
            it.wire.reset()
            await until(lambda: it.second.requests)
            (client,) = it.it.front._clients()
            client.pause_writing()
            full.set()
            await until(lambda: sent)
            before = 0
            while before < len(sent):
                before = len(sent)
                await asyncio.sleep(0.2)
            assert before < 500
            client.resume_writing()
            got = await it.client.reader.readexactly(500 * len(piece) + len(BODY))
            assert got.endswith(BODY)
            assert (await it.record())[0] is Outcome.COMPLETED

    full, sent = asyncio.Event(), list[int]()
    run(main())


def test_a_third_goes_on_when_the_second_breaks_after_its_head() -> None:
    """Each ticket is closed once, each failure told, and the times are those of who brought the body."""

    async def silent(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await wire.watch()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            ends = [await stack.enter_async_context(ScriptedEndpoint(one)) for one in (silent, silent, stream)]
            it = await stack.enter_async_context(rig(*(one.url for one in ends), more="routing: {policy: round-robin}"))
            it.front.requests.sampling = Sampling(1.0, follow_clients=True, rng=random.Random(1))
            client = await it.connect()
            client.send(post(STREAM))
            assert b"200 OK" in await client.head()
            ends[0].wires[0].reset()
            await until(lambda: ends[1].requests)
            await ends[1].wires[0].send(b"no size\r\n")
            assert await client.reader.readexactly(len(BODY)) == BODY
            await until(lambda: it.traced)
            (record,) = it.traced
            failed = (("e1", "upstream_reset"), ("e2", "upstream_protocol_error"))
            assert (record.failed, record.attempts, record.endpoint, record.events) == (failed, 3, "e3", 2)
            assert record.trace is not None
            spans = record.trace.attempts
            assert [(one.endpoint.name, one.failure) for one in spans] == [*failed, ("e3", None)]
            assert record.placed_at == spans[2].placed_at
            assert record.first_byte_at is not None
            assert record.first_byte_at >= spans[2].placed_at
            await it.settle()
            assert it.in_flight() == 0

    run(main())


def test_an_answer_that_says_more_than_a_stream_is_committed_with_its_head() -> None:
    """A status other than 200, or an encoding, is a promise about the body that another endpoint does not know."""
    first = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")

    async def main() -> None:
        async with begun(stream, first=first) as it:
            it.wire.reset()
            assert await it.rest() == b"", "an event would be read as gzip"
            assert not it.second.requests
            assert (await it.record())[0] is Outcome.UPSTREAM_BROKE

    run(main())


def test_how_a_stream_begins_is_read_in_a_time_that_its_server_does_not_choose() -> None:
    """A line of 250 KB with an error in each 14 bytes took minutes, 60 KB of it seven seconds."""
    opening, scanner = Opening(holds=True, events=1), EventScanner()
    line = b'data: {"error"' * 4000 + b"\n\n"
    began_at = time.process_time()
    assert opening.refusal(line) is None
    for _ in range(60):
        data = opening.held + b'data: {"error"' * 70
        assert opening.refusal(data) is None
        assert opening.keeps(data, scanner)
    assert time.process_time() - began_at < 1.0


@pytest.mark.parametrize(
    ("kind", "status"), [("overloaded_error", 529), ("internal_error", 500), ("invalid_request_error", None)]
)
def test_an_error_of_anthropics_api_has_the_status_of_its_type(kind: str, status: int | None) -> None:
    data = f'event: error\ndata: {{"type":"error","error":{{"details":null,"type":"{kind}","message":"x"}}}}\n\n'
    assert Opening(holds=False, events=0).refusal(data.encode()) == status


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b'data: {"error": {"code": 503}}\n\n'], 503),
        ([b'2a\r\ndata: {"error":{"message":"x","code":429}}\n\n'], 429),
        ([b'data: {"role"', b":1}\n\nda", b'ta: {"error":{"code":5', b"00}}\n\n"], 500),
        ([b"event: er", b"ror\n"], 500),
        ([b'data: {"text":"data: {\\"error\\" \\"code\\": 500"}\n\n'], None),
        ([b"data: 1\n\n", b"data: 2\n\n"], None),
        ([b'data: {"error":{"code":"529","message":"x"}}\n\n'], 529),
        ([b'data: {"error":{"code":520}}\r\n\r\n'], 520),
        ([b'data: {"error":{"code":400,"type":"server_error"}}\n\n'], None),
        ([b'data: {"error":{"code":null,"type":"server_error"}}\n\n'], 500),
        ([b'data: {"error":"overloaded","code":503}\n\n'], None),
        ([b'data: {"error":{"code":503},"error":5}\n\n'], None),
        ([b'data: {"error":{"code":503}\n\n'], None),
    ],
)
def test_an_error_at_the_beginning_is_found_however_it_is_cut(pieces: list[bytes], status: int | None) -> None:
    opening, scanner = Opening(holds=True, events=9), EventScanner()
    found = None
    for piece in pieces:
        data = opening.held + piece
        found = found or opening.refusal(data)
        opening.keeps(data, scanner)
    assert found == status
