# SPDX-License-Identifier: Apache-2.0
"""Streams that are left, circuit breakers, keys, and bodies that are passed on, as other routers' tests have them."""

from __future__ import annotations

import asyncio
import gzip
from hashlib import sha256

import pytest

from lbproxy.proxy.request.keys import KeyRing
from tests.conformance.peers.restated import BREAKER, CANCEL, GAUGE, MANY_KEYS, PROVIDERS, QUEUE, SPEECH, restates
from tests.support.aio import run, until
from tests.support.endpoint import OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event
from tests.support.rig import post, rig

STREAMED = b'{"model":"m","stream":true}'
FAILS = answer(status=500)


class Endless:
    """A stream that goes on until its connection is closed."""

    def __init__(self) -> None:
        self.stopped = 0

    async def __call__(self, wire: Wire, _: Received) -> None:
        watched = asyncio.ensure_future(wire.watch())
        await wire.send(STREAM_HEAD)
        while not wire.gone.is_set():
            await wire.send(event('{"choices":[{"delta":{"content":"a"}}]}'))
            await asyncio.sleep(0.001)
        self.stopped += 1
        await watched


@restates(CANCEL, "test_streaming_cancel_on_client_disconnect")
@restates(SPEECH, "test_streaming_closes_upstream_on_consumer_abort")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"])
def test_a_server_stops_when_its_client_leaves(path: str) -> None:
    """The client leaves in the middle of a stream: the server's connection is closed, and it stops."""

    async def main() -> None:
        script = Endless()
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(STREAMED, path=path))
            for _ in range(3):
                await client.reader.readuntil(b"\n\n")
            client.writer.close()
            await until(lambda: script.stopped == 1)

    run(main())


@restates(CANCEL, "test_streaming_cancel_before_first_chunk")
def test_a_client_that_leaves_before_the_first_event_is_noticed() -> None:
    """The client leaves after the head, before the first event: the server's connection is closed."""

    async def main() -> None:
        async def silent(wire: Wire, _: Received) -> None:
            await wire.send(STREAM_HEAD)
            await wire.watch()

        async with ScriptedEndpoint(silent) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(STREAMED))
            await client.head()
            client.writer.close()
            await endpoint.wires[0].gone.wait()

    run(main())


@restates(CANCEL, "test_cancel_one_request_does_not_affect_concurrent", "test_streaming_cancel_after_done_is_noop")
@restates(CANCEL, "test_streaming_completes_when_client_consumes_all", "test_non_streaming_request_unaffected")
@restates(GAUGE, "test_gauge_*")
def test_who_leaves_disturbs_nobody_and_is_not_counted_any_more() -> None:
    """Of twenty streams ten are left and ten are read to their end: those are whole, and afterwards none is counted
    as running.
    """

    async def main() -> None:
        more = asyncio.Event()

        async def steps(wire: Wire, _: Received) -> None:
            await wire.send(STREAM_HEAD, event('{"n":1}'))
            await more.wait()
            await wire.send(event("[DONE]"), b"0\r\n\r\n")

        async with ScriptedEndpoint(steps) as one, ScriptedEndpoint(steps) as two, rig(one.url, two.url) as it:
            clients = [await it.connect() for _ in range(20)]
            for client in clients:
                client.send(post(STREAMED))
            for client in clients:
                await client.head()
            assert it.in_flight() == 20
            for client in clients[:10]:
                client.writer.close()
            await until(lambda: it.in_flight() == 10)
            more.set()
            for client in clients[10:]:
                assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                client.writer.close()
            await until(lambda: it.in_flight() == 0 and it.front.running == 0)

    run(main())


@restates(BREAKER, "test_circuit_breaker_opens_after_failures")
def test_a_server_that_only_fails_is_left_alone() -> None:
    """The only server fails all requests: 500, then 503 without asking it, once the breaker is open."""

    async def main() -> None:
        more = "breaker: {panic: false}"
        async with ScriptedEndpoint(FAILS) as endpoint, rig(endpoint.url, more=more) as it:
            statuses = [(await it.ask(post())).status for _ in range(20)]
            assert statuses[0] == 500
            assert set(statuses) <= {500, 503}
            assert statuses.count(503) == 20 - len(endpoint.requests)

    run(main())


@restates(BREAKER, "test_circuit_breaker_disabled")
def test_the_breaker_can_be_turned_off() -> None:
    """The breaker is turned off: the server's 500 each time."""

    async def main() -> None:
        more = "breaker: {consecutive_failures: null, success_rate: 0, panic: false}\nretry: {attempts: 1}"
        async with ScriptedEndpoint(FAILS) as endpoint, rig(endpoint.url, more=more) as it:
            assert {(await it.ask(post())).status for _ in range(20)} == {500}
            assert len(endpoint.requests) == 20

    run(main())


@restates(BREAKER, "test_circuit_breaker_per_worker_isolation", "test_circuit_breaker_with_retries")
def test_a_breaker_is_about_one_server() -> None:
    """One of two servers always fails: the other one goes on serving, and with retries nothing fails."""

    async def main() -> None:
        more = "routing: {policy: round-robin}"
        async with (
            ScriptedEndpoint(FAILS) as bad,
            ScriptedEndpoint(OK) as good,
            rig(bad.url, good.url, more=more) as it,
        ):
            assert {(await it.ask(post())).status for _ in range(20)} == {200}
            assert len(good.requests) == 20

    run(main())


@restates(QUEUE, "queued_http_requests_survive_more_than_one_refill_wait")
def test_what_waits_is_admitted_one_after_the_other() -> None:
    """One request may run: two that wait are admitted one after the other, and succeed."""

    async def main() -> None:
        free = asyncio.Semaphore(0)

        async def slow(wire: Wire, _: Received) -> None:
            await free.acquire()
            await wire.send(OK)

        more = "admission: {max_in_flight_per_endpoint: 1}"
        async with ScriptedEndpoint(slow) as endpoint, rig(endpoint.url, more=more) as it:
            asked = [asyncio.ensure_future(it.ask(post(path="/v1/responses"))) for _ in range(3)]
            for n in range(1, 4):
                await until(lambda n=n: len(endpoint.requests) == n)  # type: ignore[misc]
                assert it.in_flight() == 1
                free.release()
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * 3

    run(main())


SECRETS = ("sk-one-0123456789ab", "sk-two-0123456789ab", "sk-three-0123456789")


@restates(MANY_KEYS, "test_verify_*")
def test_each_of_the_keys_opens_and_nothing_else() -> None:
    """Each of several keys is accepted as a bearer token; another key, none, or another scheme is 401."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            it.front.requests.keys = KeyRing({sha256(key.encode()).digest(): key[3:6] for key in SECRETS})
            for key in SECRETS:
                assert (await it.ask(post(more=f"Authorization: Bearer {key}\r\n"))).status == 200
            for line in ("", "Authorization: Bearer wrong-key\r\n", f"Authorization: Basic {SECRETS[0]}\r\n"):
                assert (await it.ask(post(more=line))).status == 401
            assert len(endpoint.requests) == 3

    run(main())


@restates(SPEECH, "test_transcription_streaming_*", "test_streaming_preserves_content_type", "test_streaming_calls_*")
@restates(SPEECH, "test_streaming_closes_upstream_on_full_consumption", "test_transcription_non_streaming_*")
@pytest.mark.parametrize("kind", ["text/event-stream", "application/x-ndjson", "application/json"])
def test_a_transcription_is_relayed_in_its_type(kind: str) -> None:
    """A transcription comes as the server sends it: events, lines or JSON, with its content type, and counts once."""

    async def main() -> None:
        response = answer(b'data: {"text":"Hello"}\n\ndata: {"text":" World"}\n\n', kind=kind)
        async with ScriptedEndpoint(response) as endpoint, rig(endpoint.url) as it:
            form = b'--B\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--B--\r\n'
            head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(form)}\r\n"
            reply = await it.ask(head.encode() + b"Content-Type: multipart/form-data; boundary=B\r\n\r\n" + form)
            assert (reply.status, reply.field("content-type")) == (200, kind)
            assert reply.body.count(b"text") == 2
            assert [record.outcome.label for record in it.records.requests] == ["completed"]

    run(main())


@restates(SPEECH, "test_streaming_stats_on_connection_failure")
def test_a_server_that_cannot_be_reached_is_an_error_of_the_router() -> None:
    """The only server cannot be reached: an error of the router, and the request is counted once."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as closed:
            pass
        async with rig(closed.url) as it:
            assert (await it.ask(post(STREAMED))).status in {502, 503}
            assert len(it.records.requests) == 1

    run(main())


@restates(
    PROVIDERS,
    "test_external_provider_response_headers_match_forwarded_body",
    differs="a compressed body is passed on compressed, with its content-encoding, instead of being unpacked",
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_compressed_body_and_its_fields_belong_together(compressed: bool) -> None:
    """The body and its fields fit together, whether the server compresses or not; other fields are passed on."""

    async def main() -> None:
        body = b'{"choices":[]}'
        more = "X-Provider-Trace: t-1\r\n" + ("Content-Encoding: gzip\r\n" if compressed else "")
        script = answer(gzip.compress(body) if compressed else body, more=more)
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(more="Accept-Encoding: gzip\r\nx-request-id: r-1\r\n"))
        assert (gzip.decompress(reply.body) if compressed else reply.body) == body
        assert reply.field("content-encoding") == ("gzip" if compressed else None)
        assert (reply.field("x-provider-trace"), reply.field("x-request-id")) == ("t-1", "r-1")
        assert reply.field("content-length") == str(len(reply.body))

    run(main())
