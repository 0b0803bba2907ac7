# SPDX-License-Identifier: Apache-2.0
"""lbproxy's own responses to clients that do not read them: they hold little memory, and who is in the way is ended."""

from __future__ import annotations

import asyncio
import json

import pytest

from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.front.connection import WRITE_HIGH_WATER_BYTES, ClientConnection
from lbproxy.proxy.front.turn import PIECE_BYTES
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, first_event_or_nothing
from tests.support.rig import RawClient, Rig, post, rig

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: lb\r\n%b\r\n"
LIST_BYTES = 6 << 20
MOST_BYTES = WRITE_HIGH_WATER_BYTES + PIECE_BYTES + 1024


def show_many(it: Rig) -> None:
    """The endpoint lists models whose list has `LIST_BYTES`."""
    cards = [ModelCard("m", b'{"id":"m"}')]
    cards += [ModelCard(f"m{n}", b'{"id":"m%d","x":"%s"}' % (n, b"x" * (LIST_BYTES // 64))) for n in range(64)]
    it.runtime.report_models(it.runtime.snapshot().endpoints[0].endpoint.uid, cards)
    it.tell()


async def asks_and_reads_nothing(it: Rig, more: bytes = b"") -> tuple[RawClient, ClientConnection]:
    before = set(it.front._clients())
    client = await it.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(MODELS % more)
    await until(lambda: len(it.front._clients()) > len(before), "accepted")
    (one,) = set(it.front._clients()) - before
    await until(lambda: one.writing_paused, "it is full")
    return client, one


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_a_list_of_models_goes_out_as_its_client_reads(more: bytes) -> None:
    """3.4 MB of it were held for each client that did not read."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show_many(it)
            asked = [await asks_and_reads_nothing(it, more) for _ in range(10)]
            assert all(one.held_bytes <= MOST_BYTES for _, one in asked)
            assert len({id(one.turn._rest) for _, one in asked}) == 1, "all have the same bytes"  # type: ignore[union-attr]
            for client, _ in asked:
                client.writer.transport.resume_reading()  # type: ignore[attr-defined]
                reply = await client.reply()
                assert len(json.loads(reply.body)["data"]) == 65
                assert len(reply.body) > LIST_BYTES
            assert {record.outcome for record in it.records.requests} == {Outcome.COMPLETED}
            if not more:
                client.send(post())
                assert (await client.reply()).status == 200

    run(main())


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_who_does_not_read_is_ended_for_lack_of_memory_before_a_stream_is(more: bytes) -> None:
    """Responses of lbproxy itself were not counted: the streams of others were ended for them."""

    async def main() -> None:
        async with ScriptedEndpoint(first_event_or_nothing) as endpoint, rig(endpoint.url) as it:
            show_many(it)
            stream = await it.connect()
            stream.send(post(b'{"model":"m","stream":true}'))
            await stream.head()
            _, unread = await asks_and_reads_nothing(it, more)
            assert it.front.overload.end_largest()
            await until(lambda: it.front.open_connections == 1, "the one that does not read is gone")
            assert unread.transport is None
            assert it.records.requests[-1].outcome is Outcome.OVERLOADED
            assert not it.front.overload.end_largest(), "the stream holds nothing"

    run(main())


def test_a_last_response_that_is_not_read_counts_until_it_is_gone() -> None:
    """Nothing of its request was left then, and so it was not found."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show_many(it)
            client = await it.connect()
            await until(lambda: it.front.open_connections == 1, "accepted")
            (one,) = it.front._clients()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(MODELS % b"")
            await until(lambda: one.writing_paused, "it is full")
            assert one.turn is not None
            one.turn.finish(False)  # type: ignore[attr-defined] # as if this had been all
            await until(lambda: one.transport is None, "it lingers")
            assert one.held_bytes > 0
            assert it.front.overload.end_largest()
            await until(lambda: it.front.open_connections == 0, "it is gone")

    run(main())


def test_a_drain_breaks_off_what_is_not_read() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            show_many(it)
            client, _ = await asks_and_reads_nothing(it)
            async with asyncio.timeout(20.0):
                assert await it.front.stop(0.1) == 1
            assert it.records.requests[-1].outcome is Outcome.CUT
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reply()

    run(main())
