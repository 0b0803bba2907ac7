# SPDX-License-Identifier: Apache-2.0
"""One request through real sockets: what the endpoint sees, what the client sees, and what happens when either leaves,
lies or stalls.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from lbproxy.net.connections import pool as pool_module
from tests.support.aio import run, until
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk, event
from tests.support.rig import RawClient, Reply, Rig, post, rig


def last(it: Rig) -> Outcome:
    return it.records.requests[-1].outcome


def code(reply: Reply) -> str:
    found = str(json.loads(reply.body)["error"]["code"])
    assert reply.field("x-lbproxy-reason") == found
    return found


async def ends(client: RawClient) -> tuple[bytes, bool]:
    """Everything until the connection ends, and whether it ended by reset."""
    data = b""
    try:
        while piece := await client.reader.read(65536):
            data += piece
    except ConnectionError:
        return data, True
    finally:
        await client.settle()
    return data, False


@pytest.mark.parametrize("plain", [False, True])
def test_a_request_and_its_answer_pass_unchanged(plain: bool) -> None:
    body = b'{ "model" : "m", "x": [1, 2.50, "\\u00e9"] }'
    reply_body = b'{"a":  "spaces kept"}'

    theirs = answer(reply_body, more="X-Theirs: yes\r\nServer: uvicorn\r\n")

    async def main() -> None:
        async with ScriptedEndpoint(theirs) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(
                post(body, "/v1/chat/completions?api-version=1", "X-Mine: 1\r\nAuthorization: Bearer k\r\n")
            )
            assert (reply.status, reply.body) == (200, reply_body)
            assert reply.field("x-theirs") == "yes"
            assert reply.field("x-lbproxy-endpoint") == "e1"
            assert reply.field("x-lbproxy-attempts") == "1"
            (got,) = endpoint.requests
            assert got.body == body
            assert got.line == "POST /v1/chat/completions?api-version=1 HTTP/1.1"
            assert got.field("host") == f"127.0.0.1:{endpoint.port}"
            assert got.field("x-mine") == "1"
            assert got.field("authorization") == "Bearer k"
            assert got.field("x-gateway-destination-endpoint") == f"127.0.0.1:{endpoint.port}"
            assert got.field("x-request-id") == reply.field("x-request-id")
            assert (got.head.lower().count(b"content-length"), got.field("transfer-encoding")) == (1, None)
            record = it.records.requests[0]
            assert (record.outcome, record.status, record.endpoint, record.model) == (Outcome.COMPLETED, 200, "e1", "m")

    run(main(), plain=plain)


def test_a_chunked_request_goes_on_with_one_length() -> None:
    data = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b'{"mod')
        + chunk(b'el":"m"}')
        + LAST
    )

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(data)).status == 200
            assert endpoint.requests[0].body == b'{"model":"m"}'
            assert endpoint.requests[0].field("content-length") == "13"

    run(main())


def test_headers_that_are_ours_or_hop_by_hop_stay_here() -> None:
    more = (
        "x-gateway-destination-endpoint: evil:1\r\nConnection: keep-alive, x-private\r\n"
        "x-private: 1\r\nKeep-Alive: 5\r\n"
        "TE: trailers\r\nProxy-Authorization: secret\r\nUpgrade: h2c\r\nx-request-id: mine-1\r\n"
    )

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(more=more))
            assert reply.field("x-request-id") == "mine-1"
            head = endpoint.requests[0].head.lower()
            assert head.count(b"x-gateway-destination-endpoint") == 1
            for word in (b"evil", b"x-private", b"keep-alive", b"te:", b"secret", b"h2c"):
                assert word not in head, word

    run(main())


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "\u00e9", 'a"b'])
def test_a_request_id_that_could_do_harm_is_replaced(bad: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(more=f"x-request-id: {bad}\r\n"))
            assert reply.field("x-request-id") not in {None, bad}

    run(main())


def test_stream_bytes_arrive_as_they_were_sent_each_before_the_next() -> None:
    """No buffering: the endpoint sends the next piece only when the test has seen the last one at the client."""
    pieces = [event('{"n":1}'), event('{"n":2}')[:7], event('{"n":2}')[7:], b": keep-alive\n\n", event("[DONE]"), LAST]
    pieces[3] = chunk(pieces[3])
    go = asyncio.Queue[bytes]()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        while piece := await go.get():
            await wire.send(piece)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            head = await client.head()
            assert b"text/event-stream; charset=utf-8" in head
            for piece in pieces:
                go.put_nowait(piece)
                assert await client.reader.readexactly(len(piece)) == piece
            go.put_nowait(b"")
            client.send(post())
            go.put_nowait(b"")
            client.writer.close()
            await client.settle()
            record = it.records.requests[0]
            assert (record.outcome, record.events, record.stream) == (Outcome.COMPLETED, 3, True), (
                "a comment is no event"
            )

    run(main())


def test_keep_alive_on_both_sides_and_pipelined_requests_in_order() -> None:
    async def script(wire: Wire, request: Received) -> None:
        await wire.send(answer(request.body))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            bodies = [b'{"model":"m","n":%d}' % n for n in range(5)]
            client.send(b"".join(map(post, bodies)))
            assert [(await client.reply()).body for _ in bodies] == bodies
            assert len(endpoint.wires) == 1
            client.writer.close()

    run(main())


def test_a_kept_connection_that_the_server_closed_costs_the_client_nothing() -> None:
    """The keep-alive race: the request is sent again on a new connection, to the same endpoint, for free."""

    async def script(wire: Wire, request: Received) -> None:
        if request is endpoint.requests[0]:
            await wire.send(OK)
            assert await wire.read_request() is not None
            wire.reset()
        else:
            await wire.send(OK)

    async def main() -> None:
        async with endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for _ in range(2):
                client.send(post())
                assert (await client.reply()).status == 200
            assert [r.attempts for r in it.records.requests] == [1, 1]
            assert len(endpoint.wires) == 2
            client.writer.close()

    endpoint = ScriptedEndpoint(script)
    run(main())


@pytest.mark.parametrize("reused", [True, False])
def test_a_request_that_servers_die_on_does_not_tour_the_fleet(reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more server is asked, since the first may have died for its own reasons. Then the request is the suspect."""
    monkeypatch.setattr(pool_module, "STALE_S", 0.05)

    async def script(wire: Wire, request: Received) -> None:
        if b"poison" in request.body:
            await asyncio.sleep(0.2)  # the keep-alive race is over
            wire.reset()
        else:
            await wire.send(answer())

    async def main() -> None:
        async with AsyncExitStack() as stack:
            fleet = [await stack.enter_async_context(ScriptedEndpoint(script)) for _ in range(3)]
            in_turn = "routing: {policy: round-robin}"
            it = await stack.enter_async_context(rig(*(one.url for one in fleet), more=in_turn))
            if reused:
                replies = [await it.ask(post()) for _ in range(3)]
                assert {reply.status for reply in replies} == {200}
                assert it.connections.open_connections == 3, "all have a kept connection"
            before = sum(len(one.requests) for one in fleet)
            reply = await it.ask(post(b'{"model":"m","x":"poison"}'))
            assert (reply.status, code(reply)) == (502, "upstream_reset")
            assert sum(len(one.requests) for one in fleet) == before + 2
            assert it.records.requests[-1].attempts == 2
            assert len({name for name, _ in it.records.requests[-1].failed}) == 2

    run(main())


@pytest.mark.parametrize("status", [500, 502, 503, 409, 429, 520, 529])
def test_an_answer_that_another_endpoint_may_do_better_is_asked_for_there(status: int) -> None:
    async def main() -> None:
        bad, good = answer(b'{"error":"theirs"}', status=status), answer(b'{"fine":1}')
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(ScriptedEndpoint(bad))
            two = await stack.enter_async_context(ScriptedEndpoint(good))
            it = await stack.enter_async_context(rig(one.url, two.url, more="routing: {policy: round-robin}"))
            replies = [await it.ask(post()) for _ in range(6)]
            assert {(reply.status, reply.body) for reply in replies} == {(200, b'{"fine":1}')}
            assert {reply.field("x-lbproxy-endpoint") for reply in replies} == {"e2"}
            assert {(body.body, body.head.partition(b"\r\n")[0]) for body in one.requests} <= {
                (body.body, body.head.partition(b"\r\n")[0]) for body in two.requests
            }, "the same bytes"
            failed = [record.failed for record in it.records.requests if record.attempts == 2]
            assert failed
            assert set(failed) == {(("e1", f"upstream_{status}"),)}
            assert all(one.health is not Health.DOWN for one in it.snapshots()), "answers are no lack of health"

    run(main())


REFUSAL = (
    b'data: {"error": {"message": "The server is overloaded", "type": "overloaded", "param": null, "code": 503}}\n\n'
)


@pytest.mark.parametrize("status", [503, 529, 520])
@pytest.mark.parametrize("together", [True, False])
def test_a_stream_that_begins_with_a_refusal_is_asked_for_elsewhere(together: bool, status: int) -> None:
    """vLLM over its cap lets a burst of streams in and refuses some a moment later, inside a 200."""

    async def refusing(wire: Wire, _: Received) -> None:
        first = chunk(REFUSAL.replace(b"503", b"%d" % status)) + chunk(b"data: [DONE]\n\n") + LAST
        await wire.send(*([STREAM_HEAD + first] if together else [STREAM_HEAD, first]))

    async def serving(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1"), LAST)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(ScriptedEndpoint(refusing))
            two = await stack.enter_async_context(ScriptedEndpoint(serving))
            it = await stack.enter_async_context(rig(one.url, two.url, more="routing: {policy: round-robin}"))
            replies = [await it.ask(post()) for _ in range(4)]
            assert {(reply.status, reply.body) for reply in replies} == {(200, b"data: 1\n\n")}
            assert {reply.field("x-lbproxy-endpoint") for reply in replies} == {"e2"}
            assert any(record.failed == (("e1", f"upstream_{status}"),) for record in it.records.requests)
            assert all(record.status == 200 for record in it.records.requests)

    run(main())


def test_a_refused_stream_that_nobody_takes_and_errors_after_a_token_pass_unchanged() -> None:
    later = event("1") + chunk(REFUSAL) + LAST

    async def refusing(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, chunk(REFUSAL) + LAST)

    async def breaking(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, later)

    async def main() -> None:
        for script, body in ((refusing, REFUSAL), (breaking, b"data: 1\n\n" + REFUSAL)):
            async with ScriptedEndpoint(script) as one, ScriptedEndpoint(script) as two, rig(one.url, two.url) as it:
                reply = await it.ask(post())
                assert (reply.status, reply.body) == (200, body)
                assert last(it) is Outcome.COMPLETED

    run(main())


STATUSES = [
    (500, 2),
    (522, 2),
    (429, 2),
    (409, 3),
    (503, 3),
    (529, 3),
    (502, 3),
    (504, 1),
    (598, 1),
    (501, 1),
    (400, 1),
]


@pytest.mark.parametrize(("status", "asked"), STATUSES)
def test_when_nobody_does_better_the_client_gets_an_endpoints_own_words(status: int, asked: int) -> None:
    """A request that fails everywhere must not tour the fleet; "not now" may be asked of everybody there is."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            bad = answer(b'{"error":"theirs"}', status=status, more="Retry-After: 7\r\n")
            fleet = [await stack.enter_async_context(ScriptedEndpoint(bad)) for _ in range(4)]
            it = await stack.enter_async_context(rig(*(one.url for one in fleet)))
            reply = await it.ask(post())
            assert (reply.status, reply.body) == (status, b'{"error":"theirs"}')
            assert reply.field("retry-after") == "7"
            assert [len(one.requests) for one in fleet].count(1) == asked
            assert (last(it), it.records.requests[-1].attempts) == (Outcome.COMPLETED, asked)

    run(main())


def test_a_client_that_leaves_between_two_attempts_ends_it() -> None:
    async def main() -> None:
        busy = answer(status=503)
        async with ScriptedEndpoint(busy) as one, ScriptedEndpoint(busy) as two, rig(one.url, two.url) as it:
            it.runtime.loop = Slow(it.runtime.loop)  # type: ignore[assignment]
            client = await it.connect()
            client.send(post())
            await until(lambda: len(one.requests) + len(two.requests) == 1, "asked once")
            await until(lambda: it.in_flight() == 0, "and the next attempt waits")
            client.writer.close()
            await until(lambda: bool(it.records.requests), "it is over")
            assert last(it) is Outcome.CLIENT_CLOSED
            assert it.records.requests[0].attempts == 1

    run(main())


class Slow:
    """A loop on which every delay is long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call_later(self, _: float, *arguments: object) -> asyncio.TimerHandle:
        return self._loop.call_later(100.0, *arguments)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)


def test_a_dead_endpoint_is_skipped_and_counted_against() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as alive, ScriptedEndpoint() as dead:
            await dead.stop()
            async with rig(dead.url, alive.url, more="routing: {policy: round-robin}") as it:
                replies = [await it.ask(post()) for _ in range(6)]
                assert {reply.status for reply in replies} == {200}
                assert {reply.field("x-lbproxy-endpoint") for reply in replies} == {"e2"}
                assert max(int(reply.field("x-lbproxy-attempts") or 0) for reply in replies) == 2
                assert [t.endpoint.name for t in it.records.transitions] == ["e1"], "three refusals take it down"
                assert sum(r.attempts for r in it.records.requests) == 9

    run(main())


def test_a_503_of_drained_endpoints_says_so_in_the_log_alone() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as one, rig(one.url) as it:
            it.runtime.drain(it.endpoints[0].uid)
            it.tell()
            reply = await it.ask(post())
            assert (reply.status, code(reply)) == (503, "no_endpoints")
            assert b"draining" not in reply.body
            assert it.records.requests[-1].error == "no endpoint takes this request (1 is draining)"

    run(main())


def test_when_every_attempt_is_refused_the_client_gets_502_while_the_pool_counts_as_up_then_503() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two:
            for endpoint in (one, two):
                await endpoint.stop()
            async with rig(one.url, two.url) as it:
                replies = [await it.ask(post()) for _ in range(4)]
                assert [reply.status for reply in replies] == [502, 502, 503, 503]
                assert [code(reply) for reply in replies] == ["upstream_connect_failed"] * 2 + ["no_endpoints"] * 2
                assert replies[0].field("x-should-retry") == "false"
                assert int(replies[2].field("retry-after") or 0) in range(1, 6)
                assert replies[2].field("x-lbproxy-reason") == "no_endpoints"
                assert b"127.0.0.1" not in replies[0].head + replies[0].body, "addresses stay here"

    run(main())


@pytest.mark.parametrize(
    ("sent", "end", "outcome", "status"),
    [
        (b"", "close", Outcome.UPSTREAM_RESET, 502),
        (b"", "reset", Outcome.UPSTREAM_RESET, 502),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "close", Outcome.UPSTREAM_RESET, 502),
        (b"garbage\r\n\r\n", "open", Outcome.UPSTREAM_PROTOCOL, 502),
        (b"SSH-2.0-OpenSSH", "open", Outcome.UPSTREAM_PROTOCOL, 502),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "open", Outcome.UPSTREAM_PROTOCOL, 502),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "open", Outcome.UPSTREAM_PROTOCOL, 502),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "open", Outcome.UPSTREAM_PROTOCOL, 502),
        (b"", "open", Outcome.UPSTREAM_TIMEOUT, 504),
        (b"HTTP/1.1 200 OK\r\n", "open", Outcome.UPSTREAM_TIMEOUT, 504),
    ],
)
def test_an_endpoint_that_fails_before_its_first_byte_gives_a_clear_error(
    sent: bytes, end: str, outcome: Outcome, status: int
) -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(sent)
        if end == "open":
            await wire.watch()
        else:
            getattr(wire, end)()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more="timeouts: {first_byte: 1s}") as it:
            reply = await it.ask(post())
            assert (reply.status, code(reply), last(it)) == (status, outcome.value.code, outcome)
            assert reply.field("x-should-retry") == "false"
            assert len(endpoint.requests) == 1, "work may have begun: not sent twice"
            await until(endpoint.wires[0].gone.is_set, "the connection is not kept")

    run(main())


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 599])
def test_an_endpoints_own_error_passes_unchanged(status: int) -> None:
    theirs = answer(b'{"detail":"theirs"}', status=status, more="Retry-After: 7\r\n")

    async def main() -> None:
        async with ScriptedEndpoint(theirs) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post())
            assert (reply.status, reply.body) == (status, b'{"detail":"theirs"}')
            assert reply.field("retry-after") == "7"
            assert last(it) is Outcome.COMPLETED

    run(main())


LINK = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n"
EARLY_HINTS = LINK + b"Connection: close, x-hop\r\nX-Hop: 1\r\n\r\n"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("whole", [True, False])
def test_early_hints_reach_the_client_if_it_may_know_them_and_other_informational_responses_do_not(
    version: str, whole: bool
) -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(EARLY_HINTS, b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 102 Processing\r\n\r\n")
        await wire.send(OK if whole else STREAM_HEAD + event("1") + LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post().replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
            if version == "1.1":
                hints = await client.head()
                assert hints == LINK + b"\r\n"
            reply = await client.reply()
            assert (reply.status, reply.body) == (200, b'{"ok":true}' if whole else event("1")[3:-2])

    run(main())


def test_hints_of_an_attempt_that_failed_are_no_harm() -> None:
    """They may only be hints; the next attempt sends its own."""
    tries = 0

    async def script(wire: Wire, _: Received) -> None:
        nonlocal tries
        tries += 1
        await wire.send(EARLY_HINTS)
        await (wire.send(OK) if tries == 2 else asyncio.sleep(0))
        if tries == 1:
            wire.reset()

    async def main() -> None:
        async with ScriptedEndpoint(script) as one, ScriptedEndpoint(script) as two, rig(one.url, two.url) as it:
            client = await it.connect()
            client.send(post())
            assert b" 103 " in await client.head()
            assert b" 103 " in await client.head()
            assert (await client.reply()).body == b'{"ok":true}'

    run(main())


def test_a_client_that_leaves_amid_hints_leaves_nothing_behind() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(EARLY_HINTS)
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await client.head()
            client.writer.transport.abort()
            await until(lambda: it.in_flight() == 0, "nothing is left in flight")

    run(main())


CUTS = {
    "after an event": (event('{"n":1}'), True),
    "inside an event": (event('{"n":1}') + chunk(b"data: {"), False),
    "inside a chunk": (event('{"n":1}') + event('{"n":1}')[:-9], False),
    "inside a size": (event('{"n":1}') + b"1", False),
    "bad chunk": (event('{"n":1}') + b"zz\r\n", True),
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_that_breaks_never_looks_whole(cut: str, how: str) -> None:
    """An error event where one can stand, no terminator anywhere (failures table, mid-stream)."""
    seen = asyncio.Event()
    got = 0

    sent, tells = CUTS[cut]

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await seen.wait()
        await wire.send(sent)
        await until(lambda: got >= len(sent) or cut == "bad chunk", "relayed")
        getattr(wire, how)()

    async def main() -> None:
        nonlocal got
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            await client.head()
            seen.set()
            data = b""
            if cut != "bad chunk":
                data = await client.reader.readexactly(len(sent))
                got = len(data)
            rest, _ = await ends(client)
            assert not (data + rest).endswith(LAST)
            assert b"[DONE]" not in rest
            assert (b'"code":"upstream_reset"' in rest) is tells
            if tells:  # a read that holds what is malformed is not passed on
                assert b"after %d events" % (cut != "bad chunk") in rest
            assert last(it) is Outcome.UPSTREAM_BROKE
            error = it.records.requests[-1].error
            assert error
            if (cut, how) == ("after an event", "close"):
                assert error.endswith(": the server closed the connection after 1 events")

    run(main())


def test_a_counted_body_that_stays_short_ends_without_its_end() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer(b"x" * 100)[:-50])
        wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            with pytest.raises(asyncio.IncompleteReadError):
                await client.reply()
            assert last(it) is Outcome.UPSTREAM_BROKE

    run(main())


BY_CLOSE = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "body", "whole"),
    [
        ("application/json", b'{"a":1}', True),
        ("application/json", b'{"a":', False),
        ("application/json", b"", False),
        ("text/event-stream", b"data: {}\n\ndata: [DONE]\n\n", True),
        ("text/event-stream", b'data: {"choices":[{"finish_reason": "stop"}]}\n\n', True),
        ("text/event-stream", b"data: {}\n\n", False),
        ("text/event-stream", b"data: [DONE]", False),
        ("text/plain", b"anything", True),
    ],
)
def test_a_body_that_only_closing_ends_is_reset_where_it_is_visibly_not_whole(
    kind: str, body: bytes, whole: bool
) -> None:
    """A close would look like an end to every client: only a reset tells."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(BY_CLOSE.format(kind).encode(), body)
        await relayed.wait()
        wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            head = await client.head()
            assert b"Connection: close" in head
            data = await client.reader.readexactly(len(body))
            relayed.set()
            rest, was_reset = await ends(client)
            assert (data + rest, was_reset) == (body, not whole)
            assert last(it) is (Outcome.COMPLETED if whole else Outcome.UPSTREAM_BROKE)

    relayed = asyncio.Event()
    run(main())


def test_an_old_client_gets_chunks_unwrapped_and_a_reset_if_they_break() -> None:
    async def script(wire: Wire, request: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"), event("2"))
        if b"whole" in request.body:
            await wire.send(LAST)
        else:
            await relayed.wait()
            wire.close()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(b'{"model":"m","x":"whole"}', version="1.0"))
            assert (reply.body, reply.field("transfer-encoding")) == (b"data: 1\n\ndata: 2\n\n", None)
            client = await it.connect()
            client.send(post(version="1.0"))
            await client.head()
            assert await client.reader.readexactly(18) == b"data: 1\n\ndata: 2\n\n"
            relayed.set()
            assert await ends(client) == (b"", True)

    relayed = asyncio.Event()
    run(main())


def test_bytes_after_the_end_of_an_answer_end_that_connection() -> None:
    """They could be taken for the next request's answer."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil") as endpoint,
            rig(endpoint.url) as it,
        ):
            client = await it.connect()
            for _ in range(3):
                client.send(post())
                assert (await client.reply()).body == b'{"ok":true}'
            assert len(endpoint.wires) == 3
            client.writer.close()

    run(main())


def test_a_head_request_has_no_body() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n") as endpoint,
            rig(endpoint.url) as it,
        ):
            client = await it.connect()
            for _ in range(2):
                client.send(b"HEAD /v1/files/x HTTP/1.1\r\nHost: lb\r\n\r\n")
                reply = await client.reply(bodiless=True)
                assert reply.field("content-length") == "10"
            client.writer.close()

    run(main())


# The client leaves


async def leave(it: Rig, endpoint: ScriptedEndpoint, client: RawClient, *, abort: bool) -> None:
    """The client goes; the endpoint must see it, and nothing may stay in flight."""
    assert it.in_flight() == 1
    if abort:
        client.writer.transport.abort()
    else:
        client.writer.close()
    await until(endpoint.wires[0].gone.is_set, "the endpoint's connection is closed")
    await until(lambda: it.in_flight() == 0, "nothing in flight")
    await until(lambda: it.records.requests, "a record")
    assert last(it) is Outcome.CLIENT_CLOSED
    assert it.connections.open_connections == 0


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("phase", ["before the head", "mid-stream", "before a whole answer", "mid-body"])
def test_a_client_that_leaves_ends_the_work_at_once(phase: str, abort: bool) -> None:
    async def script(wire: Wire, _: Received) -> None:
        if phase == "mid-stream":
            await wire.send(STREAM_HEAD + event("1"))
        elif phase == "mid-body":
            await wire.send(answer(b"x" * 1000)[:-500])
        arrived.set()
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":%s}' % (b"false" if "whole" in phase else b"true")))
            await arrived.wait()
            if phase.startswith("mid"):
                await client.head()
            await leave(it, endpoint, client, abort=abort)

    arrived = asyncio.Event()
    run(main())


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await hold.wait()
        await wire.send(OK)

    async def main() -> None:
        more = "admission: {max_in_flight_per_endpoint: 1}"
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=more) as it:
            first, second, third = [await it.connect() for _ in range(3)]
            for client in (first, second, third):
                client.send(post())
                await until(lambda: it.in_flight() == 1, "placed")
            await until(lambda: it.runtime.snapshot().waiting == 2, "two wait")
            second.writer.close()
            await until(lambda: it.runtime.snapshot().waiting == 1, "one waits")
            hold.set()
            assert (await first.reply()).status == 200
            assert (await third.reply()).status == 200
            assert len(endpoint.requests) == 2
            for client in (first, third):
                client.writer.close()

    hold = asyncio.Event()
    run(main())


def test_a_full_queue_is_said_at_once_and_a_long_wait_ends() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.watch()

    async def main() -> None:
        more = "admission: {max_in_flight_per_endpoint: 1, queue_requests: 1, queue_timeout: 300ms}"
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=more) as it:
            running = await it.connect()
            running.send(post())
            await until(lambda: it.in_flight() == 1, "placed")
            waits = asyncio.create_task(it.ask(post()))
            await until(lambda: it.runtime.snapshot().waiting == 1, "one waits")
            full = await it.ask(post())
            assert (full.status, code(full)) == (429, "rejected_saturated")
            expired = await waits
            assert (expired.status, code(expired)) == (429, "rejected_ttl_expired")
            assert int(expired.field("retry-after") or 0) in range(1, 6)
            running.writer.close()

    run(main())


def test_a_slow_reader_stops_the_endpoint_and_memory_stays_bounded() -> None:
    """Back-pressure end to end: what the endpoint could send ahead fits into a few buffers, not into our memory."""
    sent = 0

    block = chunk(b"x" * 65_000)
    offered = 64 << 20

    async def script(wire: Wire, _: Received) -> None:
        nonlocal sent
        await wire.send(STREAM_HEAD)
        while sent < offered:
            wire.writer.write(block)
            sent += len(block)
            await wire.writer.drain()
        await wire.send(LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            await client.head()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            before = -1
            while before != sent:  # until it stalls
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 16 << 20
            (connection,) = it.front.connections
            assert connection.transport is not None
            assert connection.transport.get_write_buffer_size() < 1 << 20
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            total = 0
            while total < offered:
                total += len(await client.reader.read(1 << 20))
            client.writer.close()

    run(main())


def test_a_refusal_says_when_there_will_be_room() -> None:
    """One prompt of 16 s is being computed; a request with a deadline of 1 s is told of that, not to come in 1 to 5 s.
    The first of those refused is let through, to see whether that is true.
    """

    async def silent(wire: Wire, _: Received) -> None:
        await asyncio.sleep(60)

    hasty = "x-lbproxy-slo-ttft-ms: 1000\r\n"
    short = b'{"model":"m","prompt":"Hello"}'
    long = b'{"model":"m","prompt":"' + b"word " * 64_000 + b'"}'

    async def main() -> None:
        async with ScriptedEndpoint(silent) as one, rig(one.url, more="routing: {policy: adaptive}") as it:
            waiting = [asyncio.ensure_future(it.ask(post(long, "/v1/completions")))]
            await until(lambda: bool(one.requests))
            waiting.append(asyncio.ensure_future(it.ask(post(short, "/v1/completions", hasty))))
            await asyncio.sleep(0.05)
            refused = await it.ask(post(short, "/v1/completions", hasty))
            assert (refused.status, code(refused)) == (429, "rejected_slo")
            assert 12 <= int(refused.field("retry-after") or 0) <= 17
            for one_of_them in waiting:
                one_of_them.cancel()

    run(main())
