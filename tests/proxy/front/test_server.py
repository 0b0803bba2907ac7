# SPDX-License-Identifier: Apache-2.0
"""What clients send wrong, and what they get for it: a clear answer in OpenAI's shape, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.driver.runtime import Runtime
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import LAST, OK, Received, Script, ScriptedEndpoint, Wire, answer, reset
from tests.support.pool import card
from tests.support.rig import Reply, post, rig, settings_for


def code(reply: Reply) -> str:
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reply.field("content-type") == "application/json; charset=utf-8"
    assert reply.field("x-request-id")
    assert reply.field("x-lbproxy-reason") == error["code"]
    return str(error["code"])


def get(path: str, method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: lb\r\n{more}\r\n".encode()


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

BAD = {
    "garbage head": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_request"),
    "no HTTP at all": (b"hello\r\n\r\n", 400, "bad_request"),
    "HTTP/2.0": (b"GET /v1/models HTTP/2.0\r\nHost: x\r\n\r\n", 400, "bad_request"),
    "bad header": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400, "bad_request"),
    "two lengths": (post(more="Content-Length: 5\r\n"), 400, "bad_request"),
    "length and chunks": (post(more="Transfer-Encoding: chunked\r\n"), 400, "bad_request"),
    "TE gzip": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        400,
        "bad_request",
    ),
    "bad chunk": (CHUNKED + b"zz\r\n", 400, "bad_request"),
    "huge header": (get("/v1/models", more="X: " + "y" * 20_000 + "\r\n"), 431, "head_too_large"),
    "websocket": (
        get("/v1/realtime", more="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        426,
        "unsupported_websocket_version",
    ),
    "encoded body": (post(more="Content-Encoding: gzip\r\n"), 415, "unsupported_content_encoding"),
    "not JSON": (post(b"{"), 400, "invalid_json"),
    "not an object": (post(b"[]"), 400, "invalid_json"),
    "model is a number": (post(b'{"model":1}'), 400, "missing_model"),
    "model is empty": (post(b'{"model":""}'), 400, "missing_model"),
    "unknown model": (post(b'{"model":"nope"}'), 404, "model_not_found"),
    "announced too large": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n",
        413,
        "request_too_large",
    ),
    "grows too large": (CHUNKED + b"%x\r\n" % 2_000_000 + b"x" * 2_000_000 + b"\r\n" + LAST, 413, "request_too_large"),
    "not ours": (get("/metrics"), 404, "unknown_url"),
    "root": (get("/"), 404, "unknown_url"),
    "dot segments": (get("/v1/../metrics"), 404, "unknown_url"),
    "hidden dot segments": (get("/v1/%2e%2E/metrics"), 404, "unknown_url"),
    "adapter loading": (post(path="/v1/load_lora_adapter"), 403, "forbidden"),
    "adapter loading in disguise": (post(path="/v1//%6coad_lora_adapter;x/"), 403, "forbidden"),
    "a fragment": (post(path="/v1/load_lora_adapter#x"), 400, "bad_request"),
    "disguised dot segments": (get("/v1/..;/metrics"), 404, "unknown_url"),
    "upgrade": (get("/v1/files", more="Connection: upgrade\r\nUpgrade: tcp\r\n"), 400, "bad_request"),
    "wrong method": (get("/v1/chat/completions"), 405, "method_not_allowed"),
    "CONNECT": (b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad_request"),
    "TRACE": (get("/v1/models", "TRACE"), 405, "method_not_allowed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_clear_answer_and_harms_nobody(name: str) -> None:
    data, status, expected = BAD[name]

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {json_body: 1MiB}") as it:
            reply = await it.ask(data)
            assert (reply.status, code(reply)) == (status, expected)
            assert not endpoint.requests, "nothing of it went on"
            assert len(it.records.requests) == 1
            assert it.records.requests[0].status == status
            assert (await it.ask(post())).status == 200

    run(main())


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models", "/v1/completions"])
def test_http_1_0_is_told_that_the_connection_ends_and_it_does(path: str) -> None:
    """Without the word such a client takes it for ended, while we would wait for more."""

    async def main() -> None:
        async with ScriptedEndpoint(answer(status=400)) as endpoint, rig(endpoint.url) as it:
            data = f"GET {path} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode()
            if path == "/v1/completions":
                data = post(b"{}", path, "Connection: keep-alive\r\n", version="1.0")
            client = await it.connect()
            client.send(data)
            raw = await client.reader.read()
            assert b"\r\nconnection: close\r\n" in raw.lower()

    run(main())


@pytest.mark.parametrize("levels", [901, 1020, 100_000])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize"),
        *("/v1/audio/speech", "/v1/batches", "/v1/load_lora_adapter"),
    ],
)
def test_json_nested_too_deep_is_refused_wherever_a_body_is_read(path: str, levels: int) -> None:
    """Python's json, and so most servers, would fail over it."""
    body = b'{"model":"m","messages":[],"tools":%s1%s}' % (b'{"a":' * levels, b"}" * levels)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="lora_management: true") as it:
            reply = await it.ask(post(body, path))
            too_large = "lora" in path and levels == 100_000
            assert (reply.status, code(reply)) == ((413, "request_too_large") if too_large else (400, "invalid_json"))
            assert not endpoint.requests
            assert (await it.ask(post())).status == 200

    run(main())


@pytest.mark.parametrize("data", [data for data, *_ in BAD.values()], ids=BAD)
def test_bad_input_in_pieces_gets_the_same_answer(data: bytes) -> None:
    """A parser may treat what comes in one packet and what comes in two differently."""
    cut = max(data.find(b"\r\n\r\n") + 4, 4)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {json_body: 1MiB}") as it:
            whole = await it.ask(data)
            client = await it.connect()
            reply = asyncio.create_task(client.reply())
            for piece in (data[: cut // 2], data[cut // 2 : cut - 1], data[cut - 1 : cut], data[cut:]):
                if not reply.done():  # else it was refused already, and the connection is closed
                    client.send(piece)
                await asyncio.sleep(0.01)
            pieces = await reply
            assert (pieces.status, code(pieces)) == (whole.status, code(whole))

    run(main())


@pytest.mark.parametrize("after", [b"\r\nzz\r\n", b"\r\n1\nx", b"zz", b"\r\n;\r\n"])
def test_bad_chunks_are_refused_at_once_wherever_a_read_ends(after: bytes) -> None:
    """Behind the end of a chunk they were noticed, but whoever read the body was not told: 408 after 10 s."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(CHUNKED + b"1\r\nx")
            await until(lambda: it.front.overload.arrivals, "the body is read")
            client.send(after)
            async with asyncio.timeout(5.0):
                assert (await client.reply()).status == 400

    run(main())


def test_a_body_that_stops_coming_is_given_up() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="timeouts: {client_body: 300ms}") as it:
            reply = await it.ask(post()[:-3])
            assert (reply.status, code(reply)) == (408, "request_timeout")
            assert reply.field("connection") == "close"
            assert not endpoint.requests

    run(main())


def test_half_a_body_and_gone_leaves_nothing() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post()[:-3])
            await asyncio.sleep(0.02)
            client.writer.close()
            await until(lambda: it.records.requests, "a record")
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            assert not endpoint.requests

    run(main())


def test_a_client_that_waits_for_100_gets_it_only_when_the_head_is_acceptable() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            data = post(more="Expect: 100-continue\r\n")
            head, body = data[: -len(b'{"model":"m"}')], data[-len(b'{"model":"m"}') :]
            client.send(head)
            assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(body)
            assert (await client.reply()).status == 200
            assert endpoint.requests[0].field("expect") is None
            refused = await it.connect()
            refused.send(head.replace(b"Content-Length: 13", b"Content-Length: 99999999999"))
            assert (await refused.reply()).status == 413

    run(main())


def test_no_model_means_the_only_one_and_the_endpoint_is_told() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(post(b'{"prompt":"x"}'))).status == 200
            assert json.loads(endpoint.requests[0].body) == {"model": "m", "prompt": "x"}
            show(it.runtime, ["m", "n"])
            reply = await it.ask(post(b'{"prompt":"x"}'))
            assert (reply.status, code(reply)) == (400, "missing_model")

    run(main())


def show(runtime: Runtime, models: list[str]) -> None:
    """The first endpoint now serves `models`."""
    runtime.report_models(runtime.snapshot().endpoints[0].endpoint.uid, [card(model) for model in models])


def test_models_are_merged_and_found_one_by_one() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show(it.runtime, ["m", "org/n"])
            listing = json.loads((await it.ask(get("/v1/models"))).body)
            assert [entry["id"] for entry in listing["data"]] == ["m", "org/n"]
            assert json.loads((await it.ask(get("/v1/models/org/n"))).body) == {"id": "org/n"}
            missing = await it.ask(get("/v1/models/x"))
            assert (missing.status, code(missing)) == (404, "model_not_found")
            client = await it.connect()
            client.send(get("/v1/models", "HEAD") + get("/v1/models"))
            assert (await client.reply(bodiless=True)).status == 200
            assert (await client.reply()).status == 200
            assert not endpoint.requests

    run(main())


def test_the_model_list_of_a_dead_pool_is_an_error_not_empty() -> None:
    async def main() -> None:
        async with rig("http://127.0.0.1:9", up=False) as it:
            it.runtime.report_health(it.runtime.snapshot().endpoints[0].endpoint.uid, False, "nothing there")
            reply = await it.ask(get("/v1/models"))
            assert (reply.status, code(reply)) == (503, "no_endpoints")

    run(main())


def test_the_model_list_waits_for_the_first_probe() -> None:
    async def main() -> None:
        async with rig("http://127.0.0.1:9", up=False) as it:
            client = await it.connect()
            client.send(get("/v1/models"))
            await asyncio.sleep(0.2)
            show(it.runtime, ["m"])
            it.bring_up()
            reply = await client.reply()
            assert [entry["id"] for entry in json.loads(reply.body)["data"]] == ["m"]

    run(main())


@pytest.mark.parametrize(
    ("request_bytes", "line"),
    [
        (get("/v1/files/abc?x=1"), "GET /v1/files/abc?x=1 HTTP/1.1"),
        (get("/v1/files/abc", "DELETE"), "DELETE /v1/files/abc HTTP/1.1"),
        (get("/v1/chat/completions", "OPTIONS"), "OPTIONS /v1/chat/completions HTTP/1.1"),
        (post(path="/tokenize"), "POST /tokenize HTTP/1.1"),
        (post(path="/generate"), "POST /generate HTTP/1.1"),
        (post(path="/v1/something/new"), "POST /v1/something/new HTTP/1.1"),
        (b"GET http://other.example/v1/files HTTP/1.1\r\nHost: other.example\r\n\r\n", "GET /v1/files HTTP/1.1"),
        (
            b"POST /v1/audio HTTP/1.1\r\nHost: x\r\nContent-Type: audio/wav\r\nContent-Length: 2\r\n\r\nhi",
            "POST /v1/audio HTTP/1.1",
        ),
    ],
)
def test_everything_else_that_model_servers_offer_is_passed_on(request_bytes: bytes, line: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(request_bytes)).status == 200
            assert endpoint.requests[0].line == line
            assert endpoint.requests[0].field("host") == f"127.0.0.1:{endpoint.port}"

    run(main())


def test_a_form_is_placed_by_its_model() -> None:
    form = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n'

    def upload(body: bytes) -> bytes:
        return (
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=B\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await it.ask(upload(form))).status == 200
            assert endpoint.requests[0].body == form
            assert (await it.ask(upload(form.replace(b"\r\nm\r\n", b"\r\nnope\r\n")))).status == 404

    run(main())


@pytest.mark.parametrize("models", [["m"], ["m", "n"]], ids=["one model", "two"])
@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("/v1/responses/resp_1/cancel", b"application/json", b""),
        ("/v1/batches", b"application/json", b'{"input_file_id":"file-1","endpoint":"/v1/chat/completions"}'),
        ("/v1/conversations", b"application/json", b"{}"),
        (
            "/v1/files",
            b"multipart/form-data; boundary=B",
            b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nx\r\n--B--',
        ),
    ],
)
def test_what_names_no_model_and_need_not_is_passed_on_as_it_is(
    path: str, content_type: bytes, body: bytes, models: list[str]
) -> None:
    """As the SDKs send it. A model was demanded of these, or put into them."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show(it.runtime, models)
            assert (await it.ask(head % (path.encode(), content_type, len(body)) + body)).status == 200
            assert endpoint.requests[0].body == body

    run(main())


def test_only_what_changes_nothing_is_sent_again_to_another_endpoint() -> None:
    """An upload that was begun may have been stored; one that nobody took may go elsewhere."""
    batch = post(b'{"input_file_id":"f"}', path="/v1/batches")

    async def asked(script: Script, request: bytes) -> tuple[int, int]:
        async with ScriptedEndpoint(script) as bad, ScriptedEndpoint() as good, rig(bad.url, good.url) as it:
            statuses = [(await it.ask(request)).status for _ in range(4)]
            return sum(status == 200 for status in statuses), len(bad.requests)

    async def main() -> None:
        good, tried = await asked(reset, post())
        assert (good, tried > 0) == (4, True), "a completion"
        good, tried = await asked(reset, batch)
        assert (good + tried, tried > 0) == (4, True), "each that was reset is told so"
        good, tried = await asked(answer(b"busy", status=503), batch)
        assert (good, tried > 0) == (4, True)

    run(main())


def test_more_connections_than_allowed_are_refused_and_the_others_live_on() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {connections: 2}") as it:
            clients = [await it.connect() for _ in range(2)]
            for client in clients:
                client.send(post())
                assert (await client.reply()).status == 200
            extra = await it.connect()
            refused = await extra.reply()
            assert (refused.status, code(refused)) == (503, "lb_overloaded")
            assert refused.field("connection") == "close"
            clients[0].send(post())
            assert (await clients[0].reply()).status == 200

    run(main())


def test_stopping_lets_running_requests_finish() -> None:
    async def script(wire: Wire, _: Received) -> None:
        started.set()
        await finish.wait()
        await wire.send(OK)

    started, finish = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            idle, busy = await it.connect(), await it.connect()
            busy.send(post())
            await started.wait()
            stopping = asyncio.create_task(it.front.stop(20.0))
            assert await idle.reader.read() == b"", "an idle connection is closed soon"
            with pytest.raises(OSError):  # noqa: PT012 - either may show it
                late = await it.connect()
                await late.reply()
            finish.set()
            assert (await busy.reply()).status == 200
            await stopping

    run(main())


def test_a_client_that_asks_again_at_once_is_served_though_we_stop() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            silent, client = await it.connect(), await it.connect()
            client.send(post())
            assert b"close" not in (await client.reply()).head
            async with asyncio.timeout(20.0):  # and not after the 75 s that clients may be idle
                stopping = asyncio.create_task(it.front.stop(60.0))
                await asyncio.sleep(0)
                client.send(post())
                last = await client.reply()
                assert last.status == 200
                assert b"\r\nConnection: close\r\n" in last.head
                assert await client.reader.read() == await silent.reader.read() == b""
                await stopping

    run(main())


@interpreted
def test_a_defect_of_ours_becomes_a_500_and_a_record(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            it.runtime.submit = None  # type: ignore[assignment, method-assign]
            reply = await it.ask(post())
            assert (reply.status, code(reply)) == (500, "internal_error")
            assert it.records.requests[0].outcome is Outcome.INTERNAL_ERROR
            assert "Traceback" not in reply.body.decode()

    run(main())
    assert "TypeError" in caplog.text, "the log has what the client must not see"


def test_a_burst_over_idle_endpoints_spreads_evenly() -> None:
    """64 simultaneous requests over four endpoints whose gauges stand still: 16 each."""

    async def script(wire: Wire, _: Received) -> None:
        await everybody.wait()
        await wire.send(OK)

    everybody = asyncio.Event()

    async def main() -> None:
        async with (
            ScriptedEndpoint(script) as a,
            ScriptedEndpoint(script) as b,
            ScriptedEndpoint(script) as c,
            ScriptedEndpoint(script) as d,
            rig(a.url, b.url, c.url, d.url) as it,
        ):
            replies = [asyncio.create_task(it.ask(post())) for _ in range(64)]
            await until(lambda: it.in_flight() == 64, "all placed")
            everybody.set()
            assert {(await reply).status for reply in replies} == {200}
            assert [len(endpoint.requests) for endpoint in (a, b, c, d)] == [16] * 4

    run(main())


SMUGGLED = post(b'{"model":"m","smuggled":true}')


@pytest.mark.parametrize(
    "carrier",
    [
        get("/v1/models", more=f"Content-Length: {len(SMUGGLED)}\r\n"),
        get("/nope", more=f"Content-Length: {len(SMUGGLED)}\r\n"),
        get("/v1/models", "HEAD", f"Content-Length: {len(SMUGGLED)}\r\n"),
        post(path="/nope", more="Expect: 100-continue\r\n")[:-13].replace(b": 13", b": %d" % len(SMUGGLED)),
    ],
)
def test_the_body_of_a_request_that_was_answered_unread_is_never_a_request(carrier: bytes) -> None:
    """Or a front proxy's users could speak for one another."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(carrier)
            await client.head()
            client.send(SMUGGLED)
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(client.reader.read(-1), 0.5)
            assert not endpoint.requests

    run(main())


def test_a_client_that_sends_ahead_and_reads_nothing_is_not_served_for_ever() -> None:
    """Its answers would pile up in our memory."""

    async def main() -> None:
        async with ScriptedEndpoint(answer(b"x" * 60_000)) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(post() * 2000)
            served = -1
            while served != len(endpoint.requests):  # until it stalls
                served = len(endpoint.requests)
                await asyncio.sleep(0.3)
            assert served < 1000
            client.writer.transport.abort()
            await until(lambda: it.front.open_connections == 0, "it is let go")

    run(main())


def test_a_model_whose_name_has_a_slash_is_found_as_the_sdk_asks_for_it() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show(it.runtime, ["org/n"])
            assert json.loads((await it.ask(get("/v1/models/org%2Fn"))).body) == {"id": "org/n"}

    run(main())


def test_a_request_is_served_to_its_end_under_the_settings_that_it_began_with() -> None:
    """A reload in its midst: its time limits, what of its head is shown, how large its body may be."""
    finish = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await finish.wait()
        await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            before, after = await it.connect(), await it.connect()
            before.send(post())
            await until(lambda: len(endpoint.requests) == 1, "running")
            more = "expose_endpoint: false\ntimeouts: {first_byte: 200ms}\nlimits: {json_body: 1KiB}"
            it.front.reconfigure(settings_for([endpoint.url], more))
            after.send(post())
            assert (await after.reply()).status == 504
            finish.set()
            answered = await before.reply()
            assert (answered.status, answered.field("x-lbproxy-endpoint")) == (200, "e1")
            assert (await it.ask(post())).field("x-lbproxy-endpoint") is None
            assert (await it.ask(post(b'{"model":"m","x":"%s"}' % (b"x" * 2000)))).status == 413

    run(main())


def test_of_a_long_path_the_record_keeps_the_beginning() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            await it.ask(b"GET /v1/models/%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 2000))
            assert it.records.requests[0].path == "/v1/models/" + "x" * 501

    run(main())
