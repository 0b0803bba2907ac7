# SPDX-License-Identifier: Apache-2.0
"""Connections: when one is reused, when never, and that silence and strangers' bytes end it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from lbproxy.core.endpoints.credentials import Tls
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.driver.pulse import Pulse
from lbproxy.net.connections import pool as pool_module
from lbproxy.net.connections import upload
from lbproxy.net.connections.corked import Corked
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.h1 import ResponseHead, request_head
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.names import Address, Names
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run, stand_still, until
from tests.support.certificates import CA, server_context
from tests.support.compiled import interpreted
from tests.support.endpoint import OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, event
from tests.support.limits import descriptors_left


@asynccontextmanager
async def connections() -> AsyncIterator[ConnectionPool]:
    """A pool that is closed when the block ends."""
    pool = ConnectionPool()
    try:
        yield pool
    finally:
        pool.close()


async def get(pool: ConnectionPool, endpoint: ScriptedEndpoint, timeout_s: float = 5.0) -> bytes:
    origin = Origin.parse(endpoint.url)
    return (await fetch(pool, origin, "/x", timeout_s=timeout_s, max_bytes=1000)).body


def test_a_connection_is_used_again_and_the_last_one_first() -> None:
    """Last in, first out: the idle ones at the bottom grow old and are closed, instead of all staying half used."""
    gate = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await gate.wait()
        await wire.send(answer(str(endpoint.wires.index(wire)).encode()))

    async def main() -> None:
        async with endpoint:
            pool = ConnectionPool()
            both = [asyncio.create_task(get(pool, endpoint)) for _ in range(2)]
            await until(lambda: len(endpoint.requests) == 2, "two at once")
            gate.set()
            assert sorted([await task for task in both]) == [b"0", b"1"]
            assert len({await get(pool, endpoint) for _ in range(5)}) == 1, "not each in its turn"
            assert (len(endpoint.wires), pool.open_connections) == (2, 2)
            pool.close()
            assert pool.open_connections == 0

    endpoint = ScriptedEndpoint(script)
    run(main())


def test_kept_connections_are_closed_before_the_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE_S", 0.3)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            await get(pool, endpoint)
            assert pool.open_connections == 1
            await until(lambda: pool.open_connections == 0, "closed for age")
            await until(endpoint.wires[0].gone.is_set, "the server sees it")

    run(main())


@pytest.mark.parametrize("stray", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"x"])
def test_a_kept_connection_that_speaks_is_never_used(stray: bytes) -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            await get(pool, endpoint)
            await endpoint.wires[0].send(stray)
            await until(lambda: pool.open_connections == 0, "closed")
            assert await get(pool, endpoint) == b'{"ok":true}'
            assert len(endpoint.wires) == 2

    run(main())


@pytest.mark.parametrize("tls", [None, Tls(CA.read_text())], ids=["plain", "tls"])
@pytest.mark.parametrize("plain", [True, False], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("late", [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nothers", b"strays", b""])
def test_what_waits_unread_forbids_the_reuse(late: bytes, plain: bool, tls: Tls | None) -> None:
    """Within one turn of the loop nobody has told us of it: it would be the response to the next client's request. So
    its connection gets no request, and the client's goes to another one.
    """

    async def main() -> None:
        context = None if tls is None else server_context()
        async with ScriptedEndpoint(tls=context) as endpoint, connections() as pool:
            origin = Origin(("127.0.0.1", endpoint.port), tls)
            for _ in range(2):
                await fetch(pool, origin, "/x", timeout_s=5.0, max_bytes=1000)
            assert len(endpoint.wires) == 1, "silent"
            asked = asyncio.create_task(fetch(pool, origin, "/y", timeout_s=5.0, max_bytes=1000))
            await asyncio.sleep(0)  # it holds the connection, and sends at the end of the turn
            descriptor = endpoint.wires[0].writer.get_extra_info("socket").fileno()
            if late:
                os.write(descriptor, late)  # with TLS it is no record
            else:
                with socket.socket(fileno=os.dup(descriptor)) as sock:
                    sock.shutdown(socket.SHUT_WR)
            assert (await asked).body == b'{"ok":true}'
            assert len(endpoint.wires) == 2
            assert [one.path for one in endpoint.requests] == ["/x", "/x", "/y"], "sent once"
            assert pool.open_connections == 1

    run(main(), plain=plain)


@pytest.mark.parametrize(
    "reply",
    [
        answer(more="Connection: close\r\n"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"more",
    ],
)
def test_what_speaks_against_reuse_is_heeded(reply: bytes) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(reply) as endpoint, connections() as pool:
            for _ in range(2):
                await get(pool, endpoint)
                assert pool.open_connections == 0
            assert len(endpoint.wires) == 2

    run(main())


@pytest.mark.parametrize("port", [0, 9])
def test_nobody_there_is_a_connect_failure(port: int) -> None:
    async def main() -> None:
        pool = ConnectionPool()
        with pytest.raises(UpstreamError) as caught:
            await pool.connect(Origin(("127.0.0.1", port or 1)), 1.0)
        assert caught.value.kind is FailureKind.CONNECT
        pool.close()

    run(main())


def test_a_server_that_accepts_nothing_is_a_connect_failure_in_time() -> None:
    """A full backlog drops our SYN: only the deadline ends that."""

    async def main() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            pool = ConnectionPool()
            with pytest.raises(UpstreamError) as caught:
                await pool.connect(Origin(listener.getsockname()), 0.3)
            assert caught.value.kind is FailureKind.CONNECT
            pool.close()
            for filler in fillers:
                filler.close()

    run(main())


def test_our_own_lack_of_descriptors_is_not_the_endpoints_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exhausted(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    async def main() -> None:
        pool = ConnectionPool()
        monkeypatch.setattr(pool_module, "open_socket", exhausted)
        with pytest.raises(UpstreamError) as caught:
            await pool.connect(Origin(("127.0.0.1", 1)), 1.0)
        assert caught.value.kind is FailureKind.EXHAUSTED
        pool.close()

    run(main())


def test_a_name_with_several_addresses_is_tried_in_order() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            loop = asyncio.get_running_loop()

            async def two(*_: object) -> Sequence[Address]:
                kinds = await loop.getaddrinfo("127.0.0.1", endpoint.port, type=socket.SOCK_STREAM)
                dead = [(*kind[:4], ("127.0.0.2", 9)) for kind in kinds]
                return [*dead, *kinds]

            pool.names = Names(loop, two)
            connection = await pool.connect(Origin(("two.example", 1)), 5.0)
            connection.abort()

    run(main())


class Receiver:
    """Takes what comes on `connection`, and keeps it."""

    switches = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.data = b""
        self.end: str | UpstreamError | None = None

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        self.data = body
        self.end = "ended"

    def hints(self, head: ResponseHead) -> None:
        raise AssertionError("there was no 103")

    def head(self, head: ResponseHead) -> None:
        self.connection.relay(head, self, None)

    def body(self, data: bytes) -> None:
        if not self.data:
            self.connection.began()
        self.data += data

    def ended(self) -> None:
        self.end = "ended"

    def broke(self, error: UpstreamError) -> None:
        self.end = error


async def begin(pool: ConnectionPool, endpoint: ScriptedEndpoint, idle_s: float = 5.0) -> Receiver:
    connection = await pool.connect(Origin.parse(endpoint.url), 5.0)
    receiver = Receiver(connection)
    connection.send("GET", request_head("GET", "/", "x", b"", 0), b"", receiver, ClockLimits(5.0, 5.0, idle_s))
    return receiver


def test_silence_in_mid_body_breaks_it_but_a_pause_of_ours_does_not() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1"))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, connections() as pool:
            paused = await begin(pool, endpoint, idle_s=0.3)
            await until(lambda: paused.data, "it began")
            paused.connection.pause()
            silent = await begin(pool, endpoint, idle_s=0.3)
            await until(lambda: silent.end is not None, "silence is noticed")
            assert isinstance(silent.end, UpstreamError)
            assert silent.end.kind is FailureKind.TIMEOUT
            assert paused.end is None
            paused.connection.resume()
            await until(lambda: paused.end is not None, "it counts again")

    run(main())


def test_after_abort_nobody_is_called() -> None:
    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event("1"))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, connections() as pool:
            receiver = await begin(pool, endpoint)
            await until(lambda: receiver.data, "something came")
            receiver.connection.abort()
            receiver.connection.abort()
            await until(endpoint.wires[0].gone.is_set, "the server sees it")
            assert receiver.end is None
            assert pool.open_connections == 0

    run(main())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\nhalf"])
def test_a_reset_breaks_what_a_close_would_end(sent: bytes) -> None:
    """Without this a body that closing ends would pass for whole though the connection was reset."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(sent)
        wire.reset()

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, connections() as pool:
            receiver = await begin(pool, endpoint)
            await until(lambda: receiver.end is not None, "the reset arrived")
            assert isinstance(receiver.end, UpstreamError)
            assert receiver.end.kind is FailureKind.RESET
            assert pool.open_connections == 0

    run(main())


def test_a_request_on_a_connection_that_was_just_lost_breaks() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            connection = await pool.connect(Origin.parse(endpoint.url), 5.0)
            connection.connection_lost(None)
            receiver = Receiver(connection)
            connection.send("GET", request_head("GET", "/", "x", b"", 0), b"", receiver, ClockLimits(5.0, 5.0, 5.0))
            assert receiver.end is None, "not within the call"
            await until(lambda: receiver.end is not None, "told")

    run(main())


@interpreted
@pytest.mark.parametrize("plain", [False, True])
def test_a_large_body_leaves_in_slices_one_a_turn(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(256)) * (8 << 12)
    writes: list[int] = []
    write = Corked.write

    def recorded(transport: Corked, data: bytes | bytearray | memoryview) -> None:
        writes.append(len(data))
        write(transport, data)

    monkeypatch.setattr(Corked, "write", recorded)

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            for _ in range(2):
                origin = Origin.parse(endpoint.url)
                connection = pool.take(origin) or await pool.connect(origin, 5.0)
                receiver = Receiver(connection)
                head = request_head("POST", "/", "x", b"", len(body))
                connection.send("POST", head, body, receiver, ClockLimits(5.0, 5.0, 5.0))
                await until(lambda: receiver.end is not None, "answered")  # noqa: B023 - called before the next one
                assert receiver.end == "ended"
                assert endpoint.requests[-1].body == body
            assert len(endpoint.wires) == 1, "the connection is used again"

    run(main(), plain=plain)
    assert max(writes) == upload.SLICE_BYTES
    assert sum(writes) > 2 * len(body)


def test_a_response_before_the_whole_body_was_sent_ends_the_connection() -> None:
    """What was not sent of it would be taken for the next request."""

    async def main() -> None:
        answered = asyncio.Event()

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(status=413))
            await answered.wait()
            writer.close()

        server = await asyncio.start_server(early, "127.0.0.1", 0)
        pool = ConnectionPool()
        body = bytes(32 << 20)
        connection = await pool.connect(Origin(server.sockets[0].getsockname()[:2]), 5.0)
        receiver = Receiver(connection)
        head = request_head("POST", "/", "x", b"", len(body))
        connection.send("POST", head, body, receiver, ClockLimits(5.0, 5.0, 5.0))
        await until(lambda: receiver.end is not None, "answered")
        assert receiver.end == "ended"
        assert pool.open_connections == 0
        answered.set()
        pool.close()
        server.close()

    run(main())


def test_opening_calls_back_unless_it_is_cancelled() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            results: list[Connection | UpstreamError] = []
            origin = Origin.parse(endpoint.url)
            pool.dial(origin, 5.0, results.append).cancel()
            pool.dial(Origin(("127.0.0.1", 1)), 5.0, results.append)
            await until(lambda: len(results) == 1, "refused")
            assert isinstance(results[0], UpstreamError)
            pool.dial(origin, 5.0, results.append)
            await until(lambda: len(results) == 2, "opened")
            assert isinstance(results[1], Connection)

    run(main())


@interpreted
def test_a_fetch_given_up_as_its_answer_comes_leaves_the_connection_to_whoever_has_it_by_then() -> None:
    async def script(wire: Wire, request: Received) -> None:
        if b"/slow" in request.head:
            await asyncio.sleep(0.1)
        await wire.send(answer())

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, connections() as pool:
            origin = Origin.parse(endpoint.url)
            fetching = asyncio.create_task(fetch(pool, origin, "/x", timeout_s=5.0, max_bytes=1000))
            taken: list[Receiver] = []
            keep = pool.keep

            def kept(connection: Connection, *, idle: bool) -> None:
                keep(connection, idle=idle)
                pool.keep = keep  # type: ignore[method-assign]
                fetching.cancel()
                again = pool.take(origin)
                assert again is connection
                taken.append(Receiver(again))
                again.send("GET", request_head("GET", "/slow", "x", b"", 0), b"", taken[0], ClockLimits(5.0, 5.0, 5.0))

            pool.keep = kept  # type: ignore[method-assign]
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await until(lambda: taken[0].end is not None, "it gets its answer")
            assert taken[0].end == "ended"

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_an_answer_that_came_while_we_stood_still_is_no_time_out(plain: bool) -> None:
    """uvloop fires timers before it reads what came while it was reading something else: a proxy that was stopped for a
    minute would break every answer, and blame every endpoint for it.
    """

    def answer_soon(listening: socket.socket) -> None:
        sock, _ = listening.accept()
        with sock:
            sock.recv(4096)
            time.sleep(0.2)  # the loop stands still by now
            sock.sendall(answer(b"soon"))
            sock.recv(4096)

    async def main() -> None:
        pulse = Pulse()
        pulse.start()
        pool = ConnectionPool(pulse)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=answer_soon, args=(listening,))
            thread.start()
            connection = await pool.connect(Origin(listening.getsockname()[:2]), 5.0)
            receiver = Receiver(connection)
            connection.send("GET", request_head("GET", "/", "x", b"", 0), b"", receiver, ClockLimits(0.3, 0.3, 0.3))
            stand_still(1.0)
            await until(lambda: receiver.end is not None, "it ended")
            assert (receiver.end, receiver.data) == ("ended", b"soon")
            pool.close()
            pulse.close()
            await asyncio.to_thread(thread.join)

    run(main(), plain=plain)


def test_descriptors_that_idle_connections_hold_are_given_to_new_ones() -> None:
    """Kept connections are for speed; they must not be the reason for a refusal."""

    async def main() -> None:
        other = socket.create_server(("127.0.0.1", 0))  # never accepts: that would need a descriptor here too
        async with ScriptedEndpoint() as endpoint, connections() as pool:
            await get(pool, endpoint)
            assert pool.open_connections == 1
            with other, descriptors_left(0):
                origin = Origin(other.getsockname()[:2])
                await pool.connect(origin, 5.0)
                assert pool.open_connections == 1, "the kept one had to go"
                with pytest.raises(UpstreamError) as refused, descriptors_left(0):
                    await pool.connect(origin, 5.0)
            assert refused.value.kind is FailureKind.EXHAUSTED

    run(main())
