# SPDX-License-Identifier: Apache-2.0
"""WebSockets that go to a provider get its path, model name and key; what may not leave is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run, until
from tests.support.endpoint import Received, ScriptedEndpoint, Wire, answer
from tests.support.rig import Rig, rig
from tests.support.sockets import CLOSE, TEXT, after_switch, close, frame, raw_socket, read_frame, upgrade

ITS = "tier: 2, model: its-m, models: [m], health: null, metrics: null, api_key: sk-provider"
KEY = "0123456789abcdef"
PRIVATE_KEY = (
    f"auth: {{keys: [{{name: private, key: {KEY}}}]}}\n"
    "flows: {header: true, named: {private: {max_tier: 1}, public: {max_tier: 9}}}\n"
)


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


async def echo(wire: Wire) -> None:
    """One message, then the end."""
    _, _, said = await read_frame(wire.reader)
    await wire.send(frame(TEXT, said.upper()))
    await read_frame(wire.reader)
    await wire.send(close(1000))
    await wire.watch()


@asynccontextmanager
async def fleet(there: ScriptedEndpoint, here: ScriptedEndpoint, more: str = "", path: str = "") -> AsyncIterator[Rig]:
    """A server of one's own that is down, and the provider."""
    async with here, there, rig(here.url, (there.url + path, ITS), more=more) as it:
        it.take_down("e1")
        await it.settle()
        yield it


async def talk(it: Rig, request: bytes) -> None:
    """From the first message to the last."""
    client = await raw_socket(it, request)
    client.send(frame(TEXT, b"hello", masked=True))
    assert await read_frame(client.reader) == (TEXT, True, b"HELLO")
    client.send(close(1000, masked=True))
    assert (await read_frame(client.reader))[0] == CLOSE
    await until(lambda: it.records.requests)
    await it.settle()


def only(endpoint: ScriptedEndpoint) -> Received:
    (request,) = endpoint.requests
    return request


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        ("/openai/v1", "/v1/realtime?model=m", "/openai/v1/realtime?model=its-m"),
        ("/api/paas/v4", "/v1/realtime?intent=a%20b&model=m&x=1", "/api/paas/v4/realtime?intent=a%20b&model=its-m&x=1"),
        ("/behind", "/v1/realtime?mod%65l=m", "/behind/v1/realtime?model=its-m"),
        ("", "/v1/realtime?model=m", "/v1/realtime?model=its-m"),
    ],
)
def test_a_socket_that_overflows_is_what_the_provider_expects(path: str, asked: str, expected: str) -> None:
    fields = (
        "Authorization: Bearer client-key\r\nCookie: session=1\r\nX-Forwarded-For: 10.0.0.1\r\n"
        "Forwarded: for=10.0.0.1\r\nX-Real-IP: 10.0.0.1\r\nx-api-key: client-key\r\nx-lbproxy-session: s\r\n"
        "OpenAI-Beta: realtime=v1\r\n"
        "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.client-key\r\n"
    )

    async def main() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(after_switch(echo))
        async with fleet(there, here, path=path) as it:
            await talk(it, upgrade(asked, fields))
            (record,) = it.records.requests
            assert (record.status, record.outcome, record.attempts) == (101, Outcome.COMPLETED, 1)
            assert (record.tier, record.overflow, record.model, record.endpoint) == (2, "down", "m", "e2")
        got = only(there)
        assert got.line == f"GET {expected} HTTP/1.1"
        assert got.field("authorization") == "Bearer sk-provider"
        assert got.field("sec-websocket-protocol") == "realtime"
        assert got.field("openai-beta") == "realtime=v1"
        assert got.field("upgrade") == "websocket"
        for name in ("cookie", "x-forwarded-for", "forwarded", "x-real-ip", "x-api-key", "x-lbproxy-session"):
            assert got.field(name) is None, name
        for secret in (b"client-key", b"10.0.0.1", b"127.0.0.1", b"session=1"):
            assert secret not in got.head.replace(f"127.0.0.1:{there.url.rpartition(':')[2]}".encode(), b"")
        assert here.requests == []

    run(main())


@pytest.mark.parametrize("bound", ["header", "flow", "key"])
def test_a_socket_that_may_not_leave_is_refused_instead(bound: str) -> None:
    more, fields = {
        "header": ("", "x-lbproxy-tier: 1\r\n"),
        "flow": ("flows: {default: {max_tier: 1}}\n", "x-lbproxy-tier: 9\r\n"),
        "key": (
            PRIVATE_KEY,
            f"Authorization: Bearer {KEY}\r\nx-lbproxy-flow: public\r\nx-lbproxy-tier: 9\r\n",
        ),
    }[bound]

    async def main() -> None:
        here, there = ScriptedEndpoint(), ScriptedEndpoint(after_switch(echo))
        async with fleet(there, here, more) as it:
            if bound == "key":
                it.front.requests.keys = KeyRing({sha256(KEY.encode()).digest(): "private"})
            reply = await it.ask(upgrade(more=fields))
            assert reply.status == 503
            await it.settle()
            assert it.records.requests[0].tier == 1
        assert there.requests == []
        assert not there.wires

    run(main())


def test_a_socket_that_the_first_tier_refuses_is_opened_by_the_provider() -> None:
    """Before the 101 it is retried like any request, and each gets a head of its own."""

    async def main() -> None:
        here, there = ScriptedEndpoint(answer(status=503)), ScriptedEndpoint(after_switch(echo))
        async with here, there, rig(here.url, (f"{there.url}/openai/v1", ITS)) as it:
            await talk(it, upgrade(more="Authorization: Bearer client\r\nCookie: a=b\r\n"))
            (record,) = it.records.requests
            assert (record.attempts, record.tier, record.overflow) == (2, 2, "failed")
        assert only(here).line == "GET /v1/realtime?model=m HTTP/1.1"
        assert only(here).field("authorization") == "Bearer client"
        assert only(there).line == "GET /openai/v1/realtime?model=its-m HTTP/1.1"
        assert (only(there).field("authorization"), only(there).field("cookie")) == ("Bearer sk-provider", None)

    run(main())
