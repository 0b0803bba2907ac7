# SPDX-License-Identifier: Apache-2.0
"""Stopping: nothing that could finish is lost, and what cannot finish does not look finished."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.net.listening.listener import BATCH
from tests.support.aio import run, until
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    ScriptedEndpoint,
    Wire,
    answer,
    event,
    first_event_or_nothing,
)
from tests.support.rig import post, rig


def test_at_the_deadline_streams_are_cut_with_an_error_and_unanswered_requests_get_503() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(first_event_or_nothing) as endpoint, rig(endpoint.url) as it:
            stream, silent = await it.connect(), await it.connect()
            stream.send(post(b'{"model":"m","stream":true}'))
            await stream.head()
            assert await stream.reader.readexactly(len(event("1"))) == event("1")
            silent.send(post())
            await until(lambda: len(endpoint.requests) == 2, "both run")
            began = time.monotonic()
            await it.front.stop(0.5)
            assert time.monotonic() - began >= 0.45  # a loop counts in whole milliseconds
            rest = await stream.reader.read()
            assert b'"code":"lb_shutdown"' in rest
            assert not rest.endswith(LAST)
            refused = await silent.reply()
            assert refused.status == 503
            assert json.loads(refused.body)["error"]["code"] == "lb_draining"
            assert {record.outcome for record in it.records.requests} == {Outcome.CUT, Outcome.DRAINING}

    run(main())


def test_connections_that_were_not_accepted_yet_are_served_though_it_stops() -> None:
    """Closing the socket would reset them. More than one turn accepts: the loop has none between connect and stop."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it, AsyncExitStack() as stack:
            address = it.front.listener.sockets[0].getsockname()
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(3 * BATCH)]
            for client in clients:
                client.sendall(post())
                client.setblocking(False)
            stopping = asyncio.create_task(it.front.stop(30.0))
            loop = asyncio.get_running_loop()
            heads = await asyncio.gather(*(loop.sock_recv(client, 16) for client in clients))
            assert {head[:12] for head in heads} == {b"HTTP/1.1 200"}
            assert await stopping == 0

    run(main())


@pytest.mark.parametrize("stays", [True, False])
def test_a_lame_duck_waits_only_for_clients_that_may_come_back(stays: bool) -> None:
    """An lbproxy that nobody uses stops at once: five seconds at each Ctrl-C of a script are a nuisance."""

    async def main() -> None:
        quick = "timeouts: {client_idle: 300ms}"
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=quick) as it:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await it.front.lame_duck(60.0, accepting=True)
            assert loop.time() - began < 30.0, "nobody ever came"
            client = await it.connect()
            await until(lambda: it.front.open_connections == 1)
            if not stays:
                client.writer.close()
                await until(lambda: it.front.open_connections == 0)
            began = loop.time()
            await it.front.lame_duck(0.2, accepting=True)
            assert loop.time() - began >= 0.19, "it is there, or was a moment ago"
            if not stays:
                await asyncio.sleep(0.3)
                began = loop.time()
                await it.front.lame_duck(60.0, accepting=True)
                assert loop.time() - began < 30.0, "it is long gone"

    run(main())


def test_a_stop_ends_as_soon_as_the_last_request_does() -> None:
    """Not at the deadline: a rolling restart would take as long as its slowest request. And no other limit ends
    what is idle: these are too long for the test.
    """
    patient = "timeouts: {client_head: 1h, client_idle: 1h}"
    finish = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await finish.wait()
        await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=patient) as it:
            client, idle = await it.connect(), await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            stopping = asyncio.create_task(it.front.stop(3600))
            assert await idle.reader.read() == b"", "idle connections are closed at once"
            finish.set()
            assert (await client.reply()).status == 200
            await stopping
            assert it.front.open_connections == 0

    run(main())


def test_a_connection_that_was_not_told_to_end_brings_one_more_request() -> None:
    """The head of a long stream said that the connection stays: who asks again at once must not find it closed."""
    finish = asyncio.Event()

    async def script(wire: Wire, request: Received) -> None:
        if b"true" in request.body:
            await wire.send(STREAM_HEAD + event("1"))
            await finish.wait()
            await wire.send(LAST)
        else:
            await finish.wait()
            await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            stream, silent = await it.connect(), await it.connect()
            stream.send(post(b'{"model":"m","stream":true}'))
            await stream.head()
            silent.send(post())
            await until(lambda: len(endpoint.requests) == 2, "both run")
            stopping = asyncio.create_task(it.front.stop(60.0))
            await asyncio.sleep(0)
            finish.set()
            told = await silent.reply()
            assert (told.status, b"connection: close" in told.head.lower()) == (200, True), (
                "its head was written after that"
            )
            await stream.reader.readuntil(LAST)
            stream.send(post())
            last = await stream.reply()
            assert (last.status, b"connection: close" in last.head.lower()) == (200, True)
            assert await stream.reader.read() == b""
            await stopping
            assert [record.outcome for record in it.records.requests] == [Outcome.COMPLETED] * 3

    run(main())


def test_an_answer_that_is_written_reaches_a_slow_client_though_we_stop() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer(b"x" * 300_000))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: it.records.requests, "it was answered")
            stopping = asyncio.create_task(it.front.stop(5.0))
            await asyncio.sleep(0.1)
            assert len((await client.reply()).body) == 300_000
            await stopping

    run(main())


def test_requests_in_the_queue_are_served_before_the_stop_ends() -> None:
    finish = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await finish.wait()
        await wire.send(answer())

    async def main() -> None:
        more = "admission: {max_in_flight_per_endpoint: 1}"
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=more) as it:
            clients = [await it.connect() for _ in range(3)]
            for client in clients:
                client.send(post())
            await until(lambda: it.runtime.snapshot().waiting == 2, "two wait")
            stopping = asyncio.create_task(it.front.stop(20.0))
            finish.set()
            assert [(await client.reply()).status for client in clients] == [200, 200, 200]
            await stopping

    run(main())
