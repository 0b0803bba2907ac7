# SPDX-License-Identifier: Apache-2.0
"""What a client must do in time, and that slow but honest ones are left alone."""

from __future__ import annotations

import asyncio
import json
import socket
import traceback
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.driver.pulse import Pulse
from lbproxy.net.listening import deadlines
from lbproxy.net.listening.deadlines import LEAST_READ_RATE
from lbproxy.proxy.front import arrivals, bodies
from lbproxy.proxy.front.arrivals import Arrivals
from lbproxy.proxy.front.overload import Overload, Unmetered
from tests.support.aio import run, until, virtually
from tests.support.endpoint import (
    LAST,
    STREAM_HEAD,
    Received,
    ScriptedEndpoint,
    Wire,
    chunk,
    echo_after,
    event,
    hang,
)
from tests.support.rig import post, rig, settings_for

HEAD = "timeouts: {client_head: 1s}"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SWEEP_S", 0.05)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("sent", [b"P", b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\n", b"\x00"])
def test_half_a_head_gets_408_also_on_a_kept_connection(before: int, sent: bytes) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=HEAD) as it:
            client = await it.connect()
            for _ in range(before):
                client.send(post())
                assert (await client.reply()).status == 200
            client.send(sent)
            reply = await client.reply()
            assert reply.status == (400 if sent == b"\x00" else 408)
            assert reply.field("connection") == "close"
            assert await client.reader.read() == b""
            reason = "bad_request" if sent == b"\x00" else "request_timeout"
            assert reply.field("x-lbproxy-reason") == json.loads(reply.body)["error"]["code"] == reason
            if reply.status == 408:
                assert it.records.requests[-1].outcome is Outcome.BODY_TIMEOUT

    run(main())


def test_who_says_nothing_is_told_nothing() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=HEAD) as it:
            client = await it.connect()
            assert await client.reader.read() == b""
            assert it.records.requests == []

    run(main())


def test_a_kept_connection_may_be_idle_for_longer_than_a_head_may_take() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=HEAD) as it:
            client = await it.connect()
            client.send(post())
            assert (await client.reply()).status == 200
            silent = await it.connect()
            assert await silent.reader.read() == b"", "the limit has passed since"
            client.send(post())
            assert (await client.reply()).status == 200

    run(main())


def test_the_idle_time_of_a_connection_counts_from_its_last_response() -> None:
    """And not from when it was opened: a connection that was just used would be closed as the client uses it again."""

    async def main() -> None:
        more = "timeouts: {client_idle: 1h}"
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=more) as it:
            client = await it.connect()
            for _ in range(2):
                since = asyncio.get_running_loop().time()
                client.send(post())
                assert (await client.reply()).status == 200
                (connection,) = it.front.connections
                await until(lambda: connection._next_keepalive_close_time >= since + 3600.0)  # noqa: B023

    run(main())


def test_a_body_that_comes_before_its_handler_has_started_is_no_head() -> None:
    """aiohttp starts it in a later turn; a stream that runs longer than a head may take was cut for that."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1"))
        await asyncio.sleep(1.5)
        await wire.send(event("2"), LAST)

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=HEAD) as it:
            client = await it.connect()
            await until(lambda: it.front.open_connections == 1, "accepted")
            (connection,) = it.front.connections
            whole = post()
            cut = whole.index(b"\r\n\r\n") + 4
            connection.data_received(whole[:cut])
            await asyncio.sleep(0)  # aiohttp has taken the request, and starts its handler in the next turn
            connection.data_received(whole[cut:])
            assert (await client.reply()).body == b"data: 1\n\ndata: 2\n\n"

    run(main())


def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "GRACE_S", 0.2)
    monkeypatch.setattr(arrivals, "STOCK_S", 0.5)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {body_rate: 1KiB}") as it:
            client = await it.connect()
            whole = post(b'{"model":"m","x":"' + b"y" * 100_000 + b'"}')
            client.send(whole[:1000])

            async def trickle() -> None:
                for at in range(1000, 3000):
                    client.send(whole[at : at + 1])
                    await asyncio.sleep(0.01)

            sending = asyncio.create_task(trickle())
            reply = await client.reply()
            sending.cancel()
            assert reply.status == 408
            assert reply.field("x-lbproxy-reason") == "request_timeout"
            assert endpoint.requests == []

    run(main())


def test_a_body_at_the_least_rate_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace has long passed when its last byte comes."""
    monkeypatch.setattr(arrivals, "GRACE_S", 0.2)
    monkeypatch.setattr(arrivals, "STOCK_S", 0.5)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more="limits: {body_rate: 100}") as it:
            client = await it.connect()
            whole = post(b'{"model":"m","x":"' + b"y" * 2000 + b'"}')
            for at in range(0, len(whole), 100):
                client.send(whole[at : at + 100])
                await asyncio.sleep(0.03)
            assert (await client.reply()).status == 200

    run(main())


async def upload(*pieces: int, body_rate: int, more: str = "") -> int:
    """Read a body of which each second brings that many bytes, in virtual time. Returns how many were read; raises
    LbError if it is given up.
    """
    settings = settings_for(["http://10.0.0.1:8000"], f"limits: {{body_rate: {body_rate}}}\n{more}")
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    content = StreamReader(protocol, 1 << 26, loop=loop)
    overload = Overload(settings.limits, Unmetered(), Arrivals(loop.time))
    reader = BodyReader(settings)
    reading = loop.create_task(bodies._read_up_to(settings.limits.body, content, reader, overload, 0))
    for size in pieces:
        content.feed_data(b"x" * size)
        await asyncio.sleep(1.0)
        overload.arrivals.end_overdue()
        if reading.done():
            break
    content.feed_eof()
    return len(await reading)


class BodyReader:
    """A request whose body is read (bodies.BodyReader)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.record = RequestRecord("r", "POST", "/v1/files", "127.0.0.1", 0.0)
        self.held_bytes = 0


@pytest.mark.parametrize("minutes", [3, 50])
def test_a_body_at_the_least_rate_may_take_most_of_an_hour(minutes: int) -> None:
    """The rate decides: a total of two minutes cut large uploads over slow lines that kept to it."""
    assert virtually(upload(*[1000] * 60 * minutes, body_rate=1000)) == 60_000 * minutes


def test_a_slow_line_may_stand_still_for_a_while() -> None:
    """A phone in a lift: what it sent before counts, for some seconds."""
    assert virtually(upload(*[3000] * 30, *[0] * 15, *[1000] * 60, *[0] * 2, 1, body_rate=1000)) == 150_001


def test_a_body_is_in_memory_once_while_it_is_read() -> None:
    """It was there in pieces and joined: twice of what `limits.buffered_bodies` says, and holes of that size."""
    tracemalloc.start()
    try:
        assert virtually(upload(*[1 << 16] * 256, body_rate=1000)) == 1 << 24
        assert tracemalloc.get_traced_memory()[1] < 1.25 * (1 << 24)
    finally:
        tracemalloc.stop()


def given_up(*pieces: int, more: str = "") -> Outcome:
    with pytest.raises(LbError) as error:
        virtually(upload(*pieces, body_rate=1000, more=more))
    frames = [frame for frame, _ in traceback.walk_tb(error.value.__traceback__)]
    (reading,) = [frame for frame in frames if frame.f_code.co_name == "_read_up_to"]
    held = [one for one in reading.f_locals.values() if isinstance(one, bytes) and one]
    assert not held, "the error keeps nothing of it"
    with pytest.raises(ValueError, match="closed"):
        reading.f_locals["body"].take()
    return error.value.outcome


def test_a_body_that_came_fast_and_stops_is_given_up_soon() -> None:
    """By the average since its start, 60 MiB of the first second paid for an hour of holding them."""
    assert given_up(60 << 20, *[0] * 21) is Outcome.BODY_TIMEOUT
    assert given_up(*[900_000] * 10, *[500] * 45) is Outcome.BODY_TIMEOUT, "half of the rate is too slow, too"
    assert given_up(*[0] * 11) is Outcome.BODY_TIMEOUT, "nothing at all"


def test_a_total_limit_ends_a_body_that_keeps_to_the_rate() -> None:
    assert given_up(*[1000] * 121, more="timeouts: {client_body: 120s}") is Outcome.BODY_TIMEOUT


def test_who_takes_nothing_is_cut_off_and_its_endpoint_freed() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD)
        while not wire.gone.is_set():
            await wire.send(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more="timeouts: {client_stall: 1s}") as it:
            client = await it.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(post())
            await until(lambda: bool(it.records.requests), "it is over", within_s=30)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            await until(lambda: it.connections.open_connections == 0, "the endpoint is let go")

    run(main())


def test_who_closes_its_side_counts_as_gone() -> None:
    """As in nginx and Envoy: most that do have left, and an endpoint would work for nobody."""

    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            client.writer.write_eof()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            await until(lambda: it.front.open_connections == it.connections.open_connections == 0)

    run(main())


def test_who_has_gone_is_noticed_behind_all_that_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is buffered was sent behind a request that runs, so that nothing was read: its end waited for the
    response, up to `timeouts.first_byte` or `stream_idle`.
    """
    monkeypatch.setattr(deadlines, "UNREAD_S", 0.5)

    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            await client.fill(post(b" " * 60_000))
            client.writer.transport.abort()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            await until(lambda: it.front.open_connections == it.connections.open_connections == 0)

    run(main())


def test_who_sends_that_much_ahead_and_stays_gets_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says that the connection ends: what is behind gets none."""
    monkeypatch.setattr(deadlines, "UNREAD_S", 0.5)
    release = asyncio.Event()

    async def main() -> None:
        async with ScriptedEndpoint(echo_after(release)) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            client.send(post(b" " * 60_000) * 400)
            await until(lambda: not client.writer.transport.get_write_buffer_size(), "it is read")
            assert it.front._clients()[0].held_bytes == 0
            release.set()
            reply = await client.reply()
            assert (reply.status, reply.field("connection")) == (200, "close")
            assert await client.reader.read() == b""
            assert len(endpoint.requests) == 1

    run(main())


class Reads:
    """A client that does not read all that it is sent (deadlines.WatchedClient)."""

    def __init__(self, unsent: Callable[[float], float]) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_at = self.loop.time()
        self.unsent = unsent
        self.aborted_after_s: float | None = None
        self.transport: asyncio.Transport | None = cast(asyncio.Transport, self)

    def get_write_buffer_size(self) -> int:
        return int(self.unsent(self.loop.time() - self.began_at))

    def abort(self) -> None:
        self.aborted_after_s = self.loop.time() - self.began_at

    def head_is_late(self) -> None:
        raise AssertionError("it has no head")


async def cut_after_s(unsent: Callable[[float], float], within_s: float) -> float | None:
    loop = asyncio.get_running_loop()
    pulse = SimpleNamespace(stood_still_since=lambda _: False)
    limits = settings_for(["http://10.0.0.1:8000"]).timeouts
    watching = deadlines.Deadlines(
        loop, cast(Pulse, pulse), head_s=limits.client_head, stall_s=limits.client_stall, arrivals=Arrivals(loop.time)
    )
    client = Reads(unsent)
    watching.write_stalled(client)
    await asyncio.sleep(within_s)
    watching.close()
    return client.aborted_after_s


def test_who_sips_is_cut_off_and_who_reads_slowly_is_not() -> None:
    """A byte in each minute kept a connection, its request and its place at an endpoint for ever."""
    size, stall_s = 100_000, 60.0
    sipped = virtually(cut_after_s(lambda t: size - t, 300.0))
    assert sipped is not None
    assert sipped <= stall_s + 2.0
    nothing = virtually(cut_after_s(lambda _: size, 300.0))
    assert nothing == pytest.approx(stall_s, abs=1.0)
    assert virtually(cut_after_s(lambda t: size - t * 1.1 * LEAST_READ_RATE, 80.0)) is None
    assert virtually(cut_after_s(lambda t: size - size / 2 * (t // 55.0), 100.0)) is None, "the kernel takes steps"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not a Linux")
def test_the_kernel_is_told_to_find_clients_that_vanished() -> None:
    """Nothing can be sent from here as somebody who is gone: that the options reach accepted sockets has to do."""

    async def main() -> None:
        async with ScriptedEndpoint(hang) as endpoint, rig(endpoint.url, more="timeouts: {client_stall: 7s}") as it:
            client = await it.connect()
            client.send(post())
            await until(lambda: endpoint.requests, "running")
            (accepted,) = it.front.connections
            assert accepted.transport is not None
            sock = accepted.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000

    run(main())
