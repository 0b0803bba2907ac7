# SPDX-License-Identifier: Apache-2.0
"""WebSockets that another model serves: the query names it, and after the 101 nothing is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lbproxy.core.requests.outcome import Outcome
from tests.support.aio import run, until
from tests.support.endpoint import Script, ScriptedEndpoint, Wire, answer, reset
from tests.support.pool import card
from tests.support.rig import Rig, rig
from tests.support.sockets import CLOSE, TEXT, after_switch, close, frame, raw_socket, read_frame, upgrade

FALLBACK = "models: {big: {fallback: [small]}, fast: {to: big}}\n"
WAITING = "models: {big: {fallback: [small], fallback_after: 100ms}}\nadmission: {max_in_flight_per_endpoint: 1}\n"
BIG = upgrade("/v1/realtime?intent=a%20b&mod%65l=big&x=1")


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


async def echo(wire: Wire) -> None:
    """One message, then the end."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        _, _, said = await read_frame(wire.reader)
        await wire.send(frame(TEXT, said.upper()))
        await read_frame(wire.reader)
        await wire.send(close(1000))
        await wire.watch()


async def breaks(wire: Wire) -> None:
    wire.reset()


@asynccontextmanager
async def two(big: Script, more: str = FALLBACK) -> AsyncIterator[tuple[Rig, ScriptedEndpoint, ScriptedEndpoint]]:
    """Endpoint e1 serves `big`, e2 `small`."""
    one, other = ScriptedEndpoint(big), ScriptedEndpoint(after_switch(echo))
    async with one, other, rig(one.url, other.url, more=more) as it:
        for endpoint, name in zip(it.endpoints, ("big", "small"), strict=True):
            it.runtime.report_models(endpoint.uid, [card(name)])
        yield it, one, other


async def talk(it: Rig, request: bytes) -> bytes:
    """From the first message to the last; returns the head of the 101."""
    client = await it.connect()
    client.send(request)
    head = await client.head()
    assert head.startswith(b"HTTP/1.1 101 "), head
    client.send(frame(TEXT, b"hello", masked=True))
    assert await read_frame(client.reader) == (TEXT, True, b"HELLO")
    client.send(close(1000, masked=True))
    assert (await read_frame(client.reader))[0] == CLOSE
    await until(lambda: it.records.requests)
    await it.settle()
    return head


@pytest.mark.parametrize("how", ["refuses", "breaks", "down", "unlisted", "waits"])
def test_a_socket_whose_model_does_not_serve_it_is_opened_for_another(how: str) -> None:
    script = {"breaks": reset, "waits": after_switch(lambda wire: wire.watch())}.get(how, answer(status=503))

    async def main() -> None:
        async with two(script, WAITING if how == "waits" else FALLBACK) as (it, big, small):
            if how == "waits":
                await raw_socket(it, BIG)
            elif how == "down":
                it.take_down("e1")
            elif how == "unlisted":
                it.runtime.report_models(it.endpoints[0].uid, [card("another")])
            head = await talk(it, BIG)
            assert b"\r\nx-lbproxy-model: small\r\n" in head
            (got,) = small.requests
            assert got.line == "GET /v1/realtime?intent=a%20b&model=small&x=1 HTTP/1.1"
            assert len(big.requests) == (how not in {"down", "unlisted"})
            record = it.records.requests[-1]
            assert (record.model, record.fallback_from, record.status) == ("small", "big", 101)
            assert (record.outcome, record.endpoint) == (Outcome.COMPLETED, "e2")

    run(main())


def test_an_aliass_socket_is_opened_for_its_targets_other_model() -> None:
    async def main() -> None:
        async with two(answer(status=503)) as (it, _, small):
            await talk(it, upgrade("/v1/realtime?model=fast"))
            assert small.requests[0].line == "GET /v1/realtime?model=small HTTP/1.1"
            record = it.records.requests[-1]
            assert (record.alias, record.model, record.fallback_from) == ("fast", "small", "big")

    run(main())


def test_a_socket_that_was_opened_is_not_opened_again() -> None:
    async def main() -> None:
        async with two(after_switch(breaks)) as (it, big, small):
            client = await raw_socket(it, BIG)
            assert (await read_frame(client.reader))[0] == CLOSE
            await until(lambda: it.records.requests)
            assert (len(big.requests), small.requests) == (1, [])
            assert it.records.requests[0].model == "big"

    run(main())


NOT = {
    "by its header": (FALLBACK, "x-lbproxy-fallback: 0\r\n"),
    "by its flow": (FALLBACK + "flows: {default: {fallback: false}}\n", ""),
    "as it may not name it": (FALLBACK + "flows: {default: {models: [big]}}\n", ""),
}


@pytest.mark.parametrize("why", NOT)
def test_a_socket_may_be_for_its_own_model_alone(why: str) -> None:
    more, field = NOT[why]

    async def main() -> None:
        async with two(answer(b'{"error":"theirs"}', status=503), more) as (it, _, small):
            reply = await it.ask(upgrade("/v1/realtime?model=big", field))
            assert (reply.status, reply.body, reply.field("x-lbproxy-model")) == (503, b'{"error":"theirs"}', None)
            assert small.requests == []

    run(main())


def test_messages_of_who_may_name_both_are_passed_on_and_others_are_not() -> None:
    """Which model serves it is not what its messages are judged by, but which its client may name."""
    more = FALLBACK + "flows: {default: {models: [big, small]}}\n"

    async def main() -> None:
        async with two(answer(status=503), more) as (it, _, _):
            for name, passes in (("big", True), ("small", True), ("other", False)):
                client = await raw_socket(it, upgrade("/v1/realtime?model=big"))
                said = json.dumps({"type": "session.update", "model": name}).encode()
                client.send(frame(TEXT, said, masked=True))
                kind, _, heard = await read_frame(client.reader)
                assert (kind == TEXT and heard == said.upper()) == passes
                client.writer.close()

    run(main())
