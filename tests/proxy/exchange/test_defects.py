# SPDX-License-Identifier: Apache-2.0
"""T43: whatever of ours raises, no client gets a second status line or waits for ever, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.sse import EventScanner
from lbproxy.core.responses.usage import StreamUsage
from lbproxy.net.connections.h1 import ChunkedFraming
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.proxy.exchange.exchange import Exchange
from lbproxy.proxy.exchange.relay import Relay
from tests.support.aio import until
from tests.support.compiled import interpreted
from tests.support.endpoint import LAST, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, event, reset
from tests.support.rig import RUNTIME, post, rig

POINTS = [
    *((Relay, name) for name in ("body", "feed", "_write", "_report_progress", "ended", "_finish", "_count")),
    *((Relay, name) for name in ("pause", "_write_first", "_is_refusal", "_release_head")),
    *((EventScanner, "feed"), (StreamUsage, "feed"), (ChunkedFraming, "feed"), (ConnectionPool, "keep")),
    *((Exchange, name) for name in ("relayed", "committed", "_enter", "finish")),
    (Usage, "resolved"),
    *((RUNTIME, name) for name in ("progress", "first_byte", "close", "emit")),
]


@interpreted
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize(("kind", "name"), POINTS, ids=[f"{kind.__name__}.{name}" for kind, name in POINTS])
def test_a_defect_after_the_first_byte_never_makes_a_second_answer(
    kind: type, name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[int] = []
    real = getattr(kind, name)

    def raising(self: object, *arguments: object, **options: object) -> object:
        if armed:
            armed[0] -= 1
            if armed[0] == 0:
                raise RuntimeError("a defect")
        return real(self, *arguments, **options)

    monkeypatch.setattr(kind, name, raising)

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await go.wait()
        await wire.send(event("2"), event("3"), event('{"usage":{"prompt_tokens":1}}'), event("[DONE]") + LAST)

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the defect itself may land there
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}'))
            got = await client.reader.readuntil(event("1"))
            armed.append(call)
            go.set()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(5.0):
                    while not got.endswith(LAST) and (more := await client.reader.read(4096)):
                        got += more
            armed.clear()
            client.writer.transport.abort()
            await until(lambda: it.in_flight() == 0, "nothing is left in flight")
            await until(lambda: it.front.running == 0, "no request is left")
        return got

    go = asyncio.Event()
    got = uvloop.run(main())
    assert got.count(b"HTTP/1.1 ") == 1
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    if not got.endswith(event("[DONE]") + LAST):
        assert not got.endswith(LAST), "a broken answer looks whole"


BROKEN = [(RUNTIME, "after_failure"), (RUNTIME, "close"), (Exchange, "_note_failure")]
USED = b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}'
WHOLE = [(Exchange, "_own_fields"), (Usage, "resolved"), (RUNTIME, "answered")]


@interpreted
@pytest.mark.parametrize(
    ("kind", "name", "script"),
    [*((*point, reset) for point in BROKEN), *((*point, answer(USED)) for point in WHOLE)],
    ids=[name for _, name in (*BROKEN, *WHOLE)],
)
def test_a_defect_before_an_answer_leaves_nobody_waiting(
    kind: type, name: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing above us would tell the client: the endpoint's connection is over, and it is nobody's any more."""
    real = getattr(kind, name)
    raised: list[int] = []

    def raising(self: object, *arguments: object, **options: object) -> object:
        if not raised:
            raised.append(1)
            raise RuntimeError("a defect")
        return real(self, *arguments, **options)

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more="retry: {attempts: 1}") as it:
            client = await it.connect()
            monkeypatch.setattr(kind, name, raising)
            client.send(post(b'{"model":"m"}'))
            async with asyncio.timeout(10.0):
                got = await client.reader.read(1 << 16)
            await until(lambda: it.in_flight() == 0, "nothing is left in flight")
            await until(lambda: it.front.running == 0, "no request is left")
        return got

    got = uvloop.run(main())
    assert raised
    assert got.count(b"HTTP/1.1 ") == 1


async def in_its_first_event(wire: Wire, _: Received) -> None:
    await wire.send(STREAM_HEAD, event('{"error":{"code":503,"message":"full"}}'), LAST)


@interpreted
@pytest.mark.parametrize("script", [answer(status=503), in_its_first_event, reset], ids=["whole", "event", "reset"])
def test_a_defect_of_a_further_attempt_is_not_one_of_the_attempt_before(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made in the callback in which the response of another endpoint arrived."""
    real, calls = Exchange._send, []

    def raising(self: Exchange, *arguments: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a defect")
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Exchange, "_send", raising)

    async def main() -> None:
        one, two = ScriptedEndpoint(script), ScriptedEndpoint(answer())
        more = "models: {big: {fallback: [small]}}\n"
        async with one, two, rig((one.url, "models: [big]"), (two.url, "models: [small]"), more=more) as it:
            assert (await it.ask(post(b'{"model":"small"}'))).status == 200, "its connection is kept"
            async with asyncio.timeout(60.0):
                assert (await it.ask(post(b'{"model":"big","stream":true}'))).status == 500
            assert (len(calls), it.in_flight(), it.front.running) == (3, 0, 0)

    uvloop.run(main())
