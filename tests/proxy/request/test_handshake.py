# SPDX-License-Identifier: Apache-2.0
"""What a request for a WebSocket must say, what of it an endpoint gets, and where it goes."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.handshake import query_model, with_query_model
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, Wire
from tests.support.pool import card
from tests.support.rig import Reply, rig
from tests.support.sockets import KEY, TEXT, after_switch, frame, raw_socket, read_frame, upgrade


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


async def hello(wire: Wire) -> None:
    await wire.send(frame(TEXT, b"hello"))
    await wire.watch()


REFUSED = {
    "POST": (upgrade().replace(b"GET", b"POST"), 400, "bad_request"),
    "HTTP/1.0": (upgrade().replace(b"HTTP/1.1", b"HTTP/1.0"), 400, "bad_request"),
    "a body": (upgrade(more="Content-Length: 3\r\n") + b"abc", 400, "bad_request"),
    "chunks": (upgrade(more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n", 400, "bad_request"),
    "version 8": (upgrade(version="8"), 426, "unsupported_websocket_version"),
    "no version": (upgrade().replace(b"Sec-WebSocket-Version", b"X"), 426, "unsupported_websocket_version"),
    "two versions": (upgrade(more="Sec-WebSocket-Version: 13\r\n"), 426, "unsupported_websocket_version"),
    "no key": (upgrade().replace(b"Sec-WebSocket-Key", b"X"), 400, "bad_request"),
    "a short key": (upgrade(key="c2hvcnQ="), 400, "bad_request"),
    "two keys": (upgrade(more=f"Sec-WebSocket-Key: {KEY}\r\n"), 400, "bad_request"),
    "bad protocols": (upgrade(more="Sec-WebSocket-Protocol: a b\r\n"), 400, "bad_request"),
    "empty protocols": (upgrade(more="Sec-WebSocket-Protocol: a,,b\r\n"), 400, "bad_request"),
    "not in Connection": (upgrade().replace(b"keep-alive, Upgrade", b"keep-alive"), 400, "bad_request"),
    "another protocol first": (upgrade().replace(b"Upgrade: w", b"Upgrade: h2c\r\nUpgrade: w"), 400, "bad_request"),
    "two protocols": (upgrade(more="Upgrade: tcp\r\n"), 400, "bad_request"),
    "tcp": (upgrade().replace(b"websocket", b"tcp"), 400, "bad_request"),
    "outside of /v1": (upgrade("/socket"), 404, "unknown_url"),
    "two models": (upgrade("/v1/realtime?model=m&model=n"), 400, "missing_model"),
    "an empty model": (upgrade("/v1/realtime?model="), 400, "missing_model"),
    "an unknown model": (upgrade("/v1/realtime?model=nope"), 404, "model_not_found"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_for_a_websocket_is_refused(name: str) -> None:
    data, status, code = REFUSED[name]

    async def main() -> Reply:
        async with ScriptedEndpoint(after_switch(hello)) as server, rig(server.url) as it:
            reply = await it.ask(data)
            assert server.requests == []
            assert await it.clients[0].reader.read() == b"", "aiohttp reads no HTTP there any more"
            return reply

    reply = run(main())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (status, code)
    if status == 426:
        assert reply.field("sec-websocket-version") == "13"
        assert reply.field("upgrade") == "websocket"


def test_a_get_without_an_upgrade_is_a_request_like_any_other() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server, rig(server.url) as it:
            for more in ("", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"):
                reply = await it.ask(f"GET /v1/realtime HTTP/1.1\r\nHost: lb\r\n{more}\r\n".encode())
                assert reply.status == 200

    run(main())


async def asked(more: str, path: str = "/v1/realtime?model=m", settings: str = "", *, keyed: bool = False) -> str:
    """The head that the endpoint got."""
    async with ScriptedEndpoint(after_switch(hello)) as server, rig(server.url, more=settings) as it:
        if keyed:
            it.front.requests.keys = KeyRing({sha256(b"secret").digest(): "team"})
        client = await raw_socket(it, upgrade(path, more))
        await read_frame(client.reader)
        client.writer.transport.abort()
        await until(lambda: it.records.requests)
        assert it.records.requests[0].key == ("team" if keyed else None)
        return server.requests[0].head.decode()


def test_what_the_endpoint_gets() -> None:
    head = run(
        asked(
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"
            "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.abc\r\n"
            "Sec-WebSocket-Protocol: openai-beta.realtime-v1\r\n"
            "Authorization: Bearer mine\r\nx-lbproxy-flow: f\r\nOrigin: https://page\r\n",
            "/v1/realtime?model=m&x=%20y",
        )
    )
    lines = head.lower().split("\r\n")
    assert lines[0] == "get /v1/realtime?model=m&x=%20y http/1.1"
    for line in (
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        f"sec-websocket-key: {KEY}".lower(),
        "sec-websocket-protocol: realtime, openai-beta.realtime-v1",
        "sec-websocket-protocol: openai-insecure-api-key.abc",
        "authorization: bearer mine",
        "origin: https://page",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
    ):
        assert lines.count(line) == 1, line
    assert any(line.startswith("via: 1.1 lbproxy") for line in lines)
    assert any(line.startswith("x-request-id: ") for line in lines)
    assert "extensions" not in head.lower()
    assert "x-lbproxy" not in head


def test_a_browsers_key_counts_and_goes_no_further() -> None:
    """lbproxy's own keys are nobody else's business, wherever they stand."""
    more = "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret\r\n"
    head = run(asked(more, keyed=True))
    assert "secret" not in head
    assert "Sec-WebSocket-Protocol: realtime\r\n" in head
    head = run(asked("Authorization: Bearer secret\r\n", keyed=True))
    assert "secret" not in head


@pytest.mark.parametrize(
    "more",
    [
        "",
        "Sec-WebSocket-Protocol: openai-insecure-api-key.wrong\r\n",
        "Sec-WebSocket-Protocol: openai-insecure-api-key.secret\r\nAuthorization: Bearer wrong\r\n",
        "Sec-WebSocket-Protocol: openai-insecure-api-key.secret, openai-insecure-api-key.wrong\r\n",
    ],
)
def test_without_one_good_key_there_is_no_websocket(more: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(after_switch(hello)) as server, rig(server.url) as it:
            it.front.requests.keys = KeyRing({sha256(b"secret").digest(): "team"})
            assert (await it.ask(upgrade(more=more))).status == 401
            assert not server.requests

    run(main())


def test_a_key_among_subprotocols_is_no_credential_of_an_ordinary_request() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server, rig(server.url) as it:
            it.front.requests.keys = KeyRing({sha256(b"secret").digest(): "team"})
            more = "Sec-WebSocket-Protocol: openai-insecure-api-key.secret\r\n"
            assert (await it.ask(f"GET /v1/files HTTP/1.1\r\nHost: lb\r\n{more}\r\n".encode())).status == 401

    run(main())


def test_the_model_of_the_query_is_renamed_or_filled_in() -> None:
    alias = "models: {mine: {to: m}}"
    assert "/v1/realtime?a=1&model=m&b=%2F " in run(asked("", "/v1/realtime?a=1&model=mine&b=%2F", alias))
    assert "GET /v1/realtime?intent=transcription&model=m " in run(asked("", "/v1/realtime?intent=transcription"))
    assert "GET /v1/realtime?model=m " in run(asked("", "/v1/realtime"))
    assert "GET /v1/other " in run(asked("", "/v1/other")), "where no model is demanded none is made up"


def test_without_a_model_there_must_be_one_that_is_served() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(after_switch(hello)) as one, ScriptedEndpoint() as two, rig(one.url, two.url) as it:
            it.runtime.report_models(it.endpoints[1].uid, [card("n")])
            reply = await it.ask(upgrade("/v1/realtime"))
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "missing_model")

    run(main())


def test_the_decision_is_explained_to_who_asks() -> None:
    async def main() -> None:
        more = "explain: {header: true}\nexpose_endpoint: true"
        async with ScriptedEndpoint(after_switch(hello)) as server, rig(server.url, more=more) as it:
            it.runtime.reconfigure(None, it.front.exchanger.settings)
            client = await it.connect()
            client.send(upgrade(more="x-lbproxy-explain: 1\r\nSec-WebSocket-Protocol: realtime\r\n"))
            head = (await client.head()).decode()
            assert head.startswith("HTTP/1.1 101 Switching Protocols\r\n")
            for name in ("x-lbproxy-explain", "x-lbproxy-endpoint", "x-request-id", "Via", "Sec-WebSocket-Accept"):
                assert f"\r\n{name}: " in head, name

    run(main())


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("/p", None),
        ("/p?", None),
        ("/p?model=a%2Fb", "a/b"),
        ("/p?x=model=1&mod%65l=b+c", "b c"),
        ("/p?models=a", None),
    ],
)
def test_models_in_a_query(target: str, model: str | None) -> None:
    assert query_model(target) == model
    assert query_model(with_query_model(target, "é/&=x")) == "é/&=x"


@pytest.mark.parametrize("target", ["/p?model", "/p?model=a&model=a", "/p?model=%00", "/p?model=" + "x" * 257])
def test_no_model_in_a_query(target: str) -> None:
    with pytest.raises(LbError) as caught:
        query_model(target)
    assert caught.value.outcome is Outcome.MISSING_MODEL
