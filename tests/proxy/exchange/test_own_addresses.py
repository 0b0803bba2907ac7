# SPDX-License-Identifier: Apache-2.0
"""What a response may say of lbproxy and of its endpoint's address: nothing, in whichever kind of response it is."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.aio import run
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, event
from tests.support.rig import post, rig

FORGED = (
    "x-lbproxy-reason: no_endpoints\r\nX-LBProxy-Tier: 9\r\nx-lbproxy-explain: lies\r\nx_lbproxy_endpoint: other\r\n"
    'x-lbproxy-anything: 1\r\nAlt-Svc: h3=":443"\r\nX-Accel-Redirect: /internal\r\nx_request_id: other\r\n'
)
GET = b"GET /v1/files/7 HTTP/1.1\r\nHost: lb\r\n\r\n"


@pytest.mark.parametrize("request_", [post(), GET], ids=["fast lane", "other lane"])
@pytest.mark.parametrize("status", [200, 400, 404, 307])
@pytest.mark.parametrize("form", ["whole", "streamed", "closed"])
def test_an_endpoint_cannot_speak_for_lbproxy(form: str, status: int, request_: bytes) -> None:
    streamed = STREAM_HEAD.replace(b"200", b"%d" % status)[:-2] + FORGED.encode() + b"\r\n" + event("1") + LAST
    whole = answer(status=status, more=FORGED)

    async def closed(wire: Wire, _: Received) -> None:
        await wire.send(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{FORGED}\r\n{{}}".encode())
        wire.close()

    script: Script = {"whole": whole, "streamed": streamed}.get(form, closed)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            got = await it.ask(request_)
            assert got.status == status
            head = got.head.lower().replace(b"_", b"-")
            for word in (b"reason", b"tier", b"explain", b"anything", b"alt-svc", b"x-accel", b"other"):
                assert word not in head, word
            assert got.field("x-lbproxy-endpoint") == "e1"
            assert head.count(b"x-request-id:") == 1

    run(main())


@pytest.mark.parametrize("engine", ["lbproxy", "vllm", "auto"])
def test_the_reason_of_another_lbproxy_passes_where_the_settings_name_it(engine: str) -> None:
    more = "x-lbproxy-reason: queue_full\r\nx-lbproxy-tier: 2\r\nx-lbproxy-reason: second\r\n"

    async def main() -> None:
        reply = answer(status=400, more=more)
        async with ScriptedEndpoint(reply) as endpoint, rig((endpoint.url, f"engine: {engine}")) as it:
            got = await it.ask(post())
            assert got.status == 400
            assert got.field("x-lbproxy-reason") == ("queue_full" if engine == "lbproxy" else None)
            assert got.head.lower().count(b"x-lbproxy-reason") == (engine == "lbproxy")
            assert got.field("x-lbproxy-tier") is None

    run(main())


@pytest.mark.parametrize("name", ["x-lbproxy-reason", "X_Lbproxy_Tier", "Content-Length", "Location", "alt-svc"])
def test_no_trailer_says_what_no_field_may(name: str) -> None:
    """Trailers are relayed as they are: such a response breaks off instead."""

    begun = asyncio.Event()

    async def broken(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await begun.wait()
        await wire.send(b"0\r\n" + name.encode() + b": x\r\n\r\n")

    async def main() -> None:
        async with ScriptedEndpoint(broken) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            data = await client.reader.readuntil(b"1\n\n\r\n")
            begun.set()
            data += await client.reader.read(-1)
            assert name.encode() + b": x" not in data
            assert not data.endswith(LAST)

    run(main())


@pytest.mark.parametrize("status", [201, 301, 302, 303, 307, 308])
@pytest.mark.parametrize("request_", [post(), GET], ids=["fast lane", "other lane"])
@pytest.mark.parametrize("expose", [True, False])
def test_no_response_names_its_endpoints_address(status: int, request_: bytes, expose: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            there = f"{endpoint.url}/v1/files/7?x=1"
            fields = f"Location: {there}\r\nContent-Location: {there}\r\nLink: <{there}>; rel=next\r\n"
            fields += f"Server: {endpoint.url}\r\n"
            endpoint.scripts = {request_.split()[1].decode(): answer(status=status, more=fields)}
            async with rig(endpoint.url, more="" if expose else "expose_endpoint: false") as it:
                got = await it.ask(request_)
                assert got.status == status
                assert got.field("location") == got.field("content-location") == "/v1/files/7?x=1"
                assert got.field("link") == "</v1/files/7?x=1>; rel=next"
                assert b"127.0.0.1" not in got.head
                assert str(endpoint.port).encode() not in got.head

    run(main())


def test_it_may_spell_its_name_as_it_likes() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            more = f"X-Backend: LocalHost:{endpoint.port}\r\n"
            endpoint.scripts = {"/v1/chat/completions": answer(more=more)}
            async with rig(f"http://localhost:{endpoint.port}") as it:
                assert (await it.ask(post())).field("x-backend") is None

    run(main())


def test_neither_does_a_103_or_a_stream() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            link = f"Link: <{endpoint.url}/v1/x>; rel=preload\r\nx-lbproxy-reason: x\r\n\r\n".encode()
            reply = b"HTTP/1.1 103 Early Hints\r\n" + link + STREAM_HEAD[:-2] + link + event("1") + LAST
            endpoint.scripts = {"/v1/chat/completions": reply}
            async with rig(endpoint.url) as it:
                client = await it.connect()
                client.send(post())
                hints, got = await client.reply(), await client.reply()
                assert (hints.status, got.status) == (103, 200)
                for one in (hints, got):
                    assert one.field("link") == "</v1/x>; rel=preload"
                    assert one.field("x-lbproxy-reason") is None
                    assert str(endpoint.port).encode() not in one.head

    run(main())


def test_what_is_not_about_the_endpoint_passes_as_it_came() -> None:
    more = (
        "Location: https://files.example.com/7?sig=a%2Fb\r\nAccess-Control-Allow-Origin: http://127.0.0.1:3000\r\n"
        "X-Accel-Buffering: no\r\n"
    )

    async def main() -> None:
        async with ScriptedEndpoint(answer(status=302, more=more)) as endpoint, rig(endpoint.url) as it:
            got = await it.ask(post())
            assert got.field("location") == "https://files.example.com/7?sig=a%2Fb"
            assert got.field("access-control-allow-origin") == "http://127.0.0.1:3000"
            assert got.field("x-accel-buffering") == "no"
            assert got.body == OK.partition(b"\r\n\r\n")[2]

    run(main())


def test_neither_does_the_101_of_a_websocket() -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    asks = (
        f"GET /v1/realtime?model=m HTTP/1.1\r\nHost: lb\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    ).encode()

    async def switch(wire: Wire, request: Received) -> None:
        link = f"Link: <http://127.0.0.1:{endpoint.port}/v1/x>; rel=next\r\nServer: 127.0.0.1:{endpoint.port}\r\n"
        fields = f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n{link}{FORGED}"
        await wire.send(f"HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n".encode())
        await wire.watch()

    async def main() -> None:
        async with endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(asks)
            got = await client.head()
            assert got.startswith(b"HTTP/1.1 101 ")
            assert b"link: </v1/x>; rel=next" in got.lower()
            head = got.lower().replace(b"_", b"-")
            for word in (b"reason", b"tier", b"explain", b"anything", b"alt-svc", b"127.0.0.1"):
                assert word not in head, word

    endpoint = ScriptedEndpoint(switch)
    run(main())
