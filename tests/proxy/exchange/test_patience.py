# SPDX-License-Identifier: Apache-2.0
"""Which clock of an attempt runs (`net.connections.patience`), as a client sees it; and the steps of an exchange."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from lbproxy.driver import model_look
from lbproxy.net.connections import corked
from lbproxy.net.connections.pool import Connection
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.steps import Step
from lbproxy.proxy.front.connection import ClientConnection
from tests.proxy.conftest import Steps
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, event
from tests.support.rig import Rig, post, rig
from tests.support.state_tables import STEPS
from tests.support.workers import WORKERS

STREAM = post(b'{"model":"m","stream":true}')
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n"
COMMENT = b"b\r\n: waiting\n\n\r\n"
SHORT, LONG = "timeouts: {first_byte: 600ms, stream_idle: 60s}", "timeouts: {first_byte: 60s, stream_idle: 600ms}"
"""The clock that a test does not want to run is the one that would outlast it, or end it early."""


def saying(*parts: bytes, every_s: float = 0.0) -> Script:
    """Sends these, one after the other, and then nothing more."""

    async def script(wire: Wire, _: Received) -> None:
        for part in parts:
            await wire.send(part)
            await asyncio.sleep(every_s)
        await wire.watch()

    return script


async def read_all(it: Rig, request: bytes) -> bytes:
    client = await it.connect()
    client.send(request)
    return await client.reader.read(-1)


@pytest.mark.parametrize(
    "parts",
    [(), (STREAM_HEAD,), (STREAM_HEAD + COMMENT,), (STREAM_HEAD, COMMENT, COMMENT)],
    ids=["nothing", "the head", "the head with a comment", "comments after the head"],
)
def test_until_the_first_event_the_clock_of_the_response_runs_whatever_else_came(parts: tuple[bytes, ...]) -> None:
    """vLLM sends the head when it takes a stream; others send comments while it waits."""

    async def main() -> None:
        script = saying(*parts, every_s=0.05)
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=SHORT) as it:
            client = await it.connect()
            client.send(STREAM)
            await client.reader.readuntil(b'"code":"upstream_timeout"')
            await until(lambda: it.records.requests)
            assert str(it.records.requests[0].error).endswith("no response within 0.6 s")

    run(main())


def test_a_stream_that_waits_for_its_first_event_is_not_cut_by_the_clock_of_silence() -> None:
    """It had 300 s for queue and prefill where a whole response had 600."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        await asyncio.sleep(1.5)
        await wire.send(event("1"), event("[DONE]") + LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LONG) as it:
            client = await it.connect()
            client.send(STREAM)
            assert (await client.reply()).body == b"data: 1\n\ndata: [DONE]\n\n"

    run(main())


def test_after_the_first_event_silence_counts_and_is_said_to_be_a_time_out() -> None:
    async def main() -> None:
        script = saying(STREAM_HEAD + event("1"), event("2"), every_s=0.05)
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LONG) as it:
            got = await read_all(it, STREAM)
            assert b'"code":"upstream_timeout"' in got
            assert b"sent nothing for too long, after 2 events" in got
            await until(lambda: it.records.requests)
            (record,) = it.records.requests
            assert record.outcome is Outcome.UPSTREAM_BROKE
            state = it.balancer._endpoints.get(it.endpoints[0].uid)
            assert state is not None
            assert state.standing.progress.last_at < it.runtime.now() - 0.5, "that it was cut is no sign of life"
            assert str(record.error).endswith("silent for 0.6 s in the middle of its response after 2 events")

    run(main())


def test_a_stream_that_goes_on_is_never_cut() -> None:
    """For three times as long as each clock."""
    parts = (STREAM_HEAD, *(event(str(n)) for n in range(18)), LAST)
    limits = "timeouts: {first_byte: 600ms, stream_idle: 600ms}"

    async def main() -> None:
        async with ScriptedEndpoint(saying(*parts, every_s=0.1)) as endpoint, rig(endpoint.url, more=limits) as it:
            client = await it.connect()
            client.send(STREAM)
            assert (await client.reply()).body.count(b"data: ") == 18

    run(main())


@pytest.mark.parametrize(("sent", "limits"), [(WHOLE_HEAD, SHORT), (WHOLE_HEAD + b'{"ok"', LONG)])
def test_a_whole_response_that_stops_is_cut_before_its_end(sent: bytes, limits: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(saying(sent)) as endpoint, rig(endpoint.url, more=limits) as it:
            got = await read_all(it, post())
            assert not got.endswith(b'{"ok":true}')
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome in {Outcome.UPSTREAM_BROKE, Outcome.UPSTREAM_TIMEOUT}

    run(main())


def test_five_time_outs_side_by_side_leave_an_endpoint_up_that_goes_on_with_other_work() -> None:
    """Whole responses that take longer than `first_byte`: it is slow, or the limit is too short."""

    async def script(wire: Wire, request: Received) -> None:
        if b"true" not in request.body:
            await wire.watch()
            return
        await wire.send(STREAM_HEAD)
        for n in range(1000):
            if wire.gone.is_set():
                return
            await wire.send(event(str(n)))
            await asyncio.sleep(0.05)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=SHORT) as it:
            stream = await it.connect()
            stream.send(STREAM)
            await stream.reader.readuntil(event("1"))
            replies = await asyncio.gather(*(it.ask(post()) for _ in range(6)))
            assert [reply.status for reply in replies] == [504] * 6
            assert [one.health for one in it.snapshots()] == [Health.UP]
            assert not stream.reader.at_eof()

    run(main())


async def end_in_brief_steps(server: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client leaves while the endpoints are asked for their models. A request is stranded while its endpoint is
    dialled, and cut in the same turn of the loop, while it backs off.
    """
    async with rig(server.url) as it:
        monkeypatch.setattr(model_look, "LOOK_S", 3600.0)
        client = await it.connect()
        client.send(post(b'{"model":"nobody has it"}'))
        await until(lambda: it.runtime._model_look._looked, "the endpoints are asked")
        client.writer.transport.abort()
        await until(lambda: it.records.requests)
    async with rig("http://127.0.0.1:1", server.url, more="retry: {budget_per_second: 100}") as it:
        dialled = asyncio.Event()

        async def dial(origin: Origin, timeout_s: float) -> Connection:
            dialled.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(it.connections, "connect", dial)
        client = await it.connect()
        client.send(STREAM)
        await dialled.wait()
        it.take_down(next(one.endpoint.name for one in it.snapshots() if one.in_flight))
        it.runtime.check()
        for connection in it.front.connections:
            cast(ClientConnection, connection).cut(Outcome.DRAINING)
        assert (await client.reply()).status == 503


@interpreted
def test_every_step_of_the_table_is_taken_by_something(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the table says what happens, no less and no more; `conftest.steps` sees to the latter."""
    tries = 0

    async def script(wire: Wire, request: Received) -> None:
        nonlocal tries
        tries += 1
        how = request.body
        if b"silent" in how:
            await wire.watch()
        elif b"reset" in how:
            wire.reset()
        elif b"broken" in how:
            await wire.send(STREAM_HEAD)
            await asyncio.sleep(0.5)
            wire.reset()
        elif b"stream" in how:
            await wire.send(STREAM_HEAD + event("1") + LAST)
        elif b"closed" in how:
            await wire.send(OK)
            wire.close()
        else:
            await wire.send(OK)

    def ask(how: str) -> bytes:
        return post(b'{"model":"m","stream":true,"user":"%b"}' % how.encode())

    async def main() -> None:
        more = "timeouts: {first_byte: 600ms}\nretry: {budget_per_second: 100}\nbreaker: {consecutive_failures: 100}"
        async with ScriptedEndpoint(script) as one, ScriptedEndpoint(script) as two:
            async with rig(one.url, two.url, more=more) as it:
                for how in ("whole", "stream", "closed", "whole", "whole", "whole", "reset", "silent", "broken"):
                    client = await it.connect()
                    client.send(ask(how))
                    await client.reader.read(1)
                for how in ("silent", "broken"):
                    for name in ("e1", "e2"):
                        client = await it.connect()
                        client.send(ask(how))
                        await until(lambda: it.in_flight() > 0)
                        await asyncio.sleep(0.3)
                        it.take_down(name)
                        it.runtime.check()
                        await client.reader.read(1)
                        for _ in range(3):
                            it.runtime.report_health(it.endpoints[name == "e2"].uid, True, "200")
                client = await it.connect()
                client.send(ask("silent"))
                await until(lambda: it.in_flight() > 0)
                client.writer.transport.abort()
                await until(lambda: it.in_flight() == 0)
            async with rig("http://127.0.0.1:1", "http://127.0.0.1:2", one.url, more=more) as it:
                for _ in range(6):
                    assert (await it.ask(post())).status == 200
            async with rig("http://127.0.0.1:1", more=more) as it:
                assert (await it.ask(post())).status >= 500
                assert (await it.ask(post(b"{"))).status == 400
                assert (await it.ask(post(b'{"model":"nobody has it"}'))).status in {404, 503}
            if not WORKERS:
                await end_in_brief_steps(one, monkeypatch)

    run(main())
    elsewhere = {(Step.SENT, Step.SWITCHED), (Step.SWITCHED, Step.FINISHED)}  # tests/proxy/sockets
    elsewhere |= {step for step in STEPS if Step.PREFILLING in step or step[0] is step[1]}  # test_split_requests
    elsewhere |= {(Step.SENT, Step.PLACING), (Step.RELAYING, Step.PLACING)}  # also there
    elsewhere |= {step for step in STEPS if Step.COUNTING in step}  # test_continuation
    if WORKERS:  # the balancer process looks, before it refuses, and strands; and it counts a request before we dial
        elsewhere |= {(Step.DIALLING, Step.BACKING_OFF), (Step.BACKING_OFF, Step.FINISHED)}
        elsewhere |= {(Step.DIALLING, Step.FINISHED), *(step for step in STEPS if Step.LOOKING in step)}
    assert STEPS - steps.taken <= elsewhere, "nothing here takes these steps"


@interpreted
def test_the_clock_of_silence_stands_still_from_the_first_byte_on_if_its_client_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes are sent at once where many connections have some: then the client is full before the write returns."""
    size = 4 << 20
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(head)
        await asyncio.sleep(0.05)
        wire.writer.write(b'"' + b"x" * (size - 2) + b'"')
        await wire.watch()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LONG) as it:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", it.port))
                await until(lambda: len(it.front._clients()) == 1)
                (connection,) = it.front._clients()
                assert connection.transport is not None
                small = connection.transport.get_extra_info("socket")
                small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
                await loop.sock_sendall(client, post(b'{"model":"m","prompt":"x"}', "/v1/completions"))
                await asyncio.sleep(1.2)  # twice the limit
                received = 0
                while received < size:
                    data = await loop.sock_recv(client, 1 << 16)
                    assert data, it.records.requests
                    received += len(data)

    monkeypatch.setattr(corked, "BATCH", 1)
    run(main())
