# SPDX-License-Identifier: Apache-2.0
"""WebSockets through the data path: what one peer says the other one hears, and every end is told to the other side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.requests.outcome import Outcome
from lbproxy.net.connections.backlog import Backlog
from lbproxy.net.listening import deadlines
from lbproxy.proxy.front.socket_turn import SocketTurn
from lbproxy.proxy.sockets import frames
from lbproxy.proxy.sockets import socket_relay as relay_module
from tests.support.aio import run, until
from tests.support.certificates import CA, server_context
from tests.support.connect_proxy import ConnectProxy
from tests.support.endpoint import Received, Script, ScriptedEndpoint, Wire, answer, hang, reset
from tests.support.rig import Rig, post, rig
from tests.support.sockets import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    after_switch,
    close,
    close_of,
    echo_server,
    frame,
    raw_socket,
    read_frame,
    read_message,
    switch,
    upgrade,
)

PORTION = relay_module.PORTION_BYTES // relay_module.FRAME_BYTES
"""Frames that are passed on in a turn."""
READ_BYTES = 256 << 10
"""At most."""


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


class Slow(ScriptedEndpoint):
    """It does not read ahead."""

    limit_bytes = 1 << 16


def url_of(it: Rig, query: str = "?model=m") -> str:
    return f"ws://127.0.0.1:{it.port}/v1/realtime{query}"


async def fragments(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def test_messages_of_every_size_come_back_and_the_end_is_counted_once() -> None:
    """With `websockets` as the client and aiohttp as the server, over one connection."""

    async def main() -> None:
        async with echo_server() as server, rig(server.url) as it, connect(url_of(it), max_size=None) as client:
            assert await client.recv() == "hello"
            assert it.in_flight() == 1
            for size in (0, 1, 125, 126, 65_535, 65_536, 300_000, 3_000_000):
                data = os.urandom(size)
                await client.send(data)
                assert await client.recv() == data
                await client.send("ä" * size)
                assert await client.recv() == "ä" * size
            pieces = [os.urandom(size) for size in (1, 0, 70_000, 5)]
            await client.send(fragments(*pieces))
            assert await client.recv() == b"".join(pieces)
            await (await client.ping(b"are you there"))
            await client.close(code=4002, reason="enough")
            await until(lambda: server.closed == [4002])
            await until(lambda: it.records.requests)
            (record,) = it.records.requests
            assert (record.status, record.outcome, record.route) == (101, Outcome.COMPLETED, "realtime")
            assert (record.model, record.attempts, record.error) == ("m", 1, None)
            assert record.request_bytes > 10_000_000 < record.response_bytes
            assert record.first_byte_at is not None
            assert it.in_flight() == 0
            assert it.front.running == 0

    run(main())


def test_a_server_closes_with_a_code_and_a_reason_of_its_own() -> None:
    async def main() -> None:
        async with echo_server() as server, rig(server.url) as it, connect(url_of(it)) as client:
            await client.recv()
            await client.send("close 4001 that is all")
            with pytest.raises(ConnectionClosed) as caught:
                await client.recv()
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4001, "that is all")
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.COMPLETED
            assert it.records.requests[0].error == "the endpoint closed the WebSocket with code 4001"

    run(main())


def test_frames_pass_as_they_are_in_both_directions() -> None:
    """Fragments stay fragments, control frames stay between them, and a text that is cut within a character does."""
    said = [
        (TEXT, False, "€".encode()[:2]),
        (PING, True, b"between"),
        (CONT, False, "€".encode()[2:]),
        (CONT, True, b""),
        (PONG, True, b"unasked"),
        (BINARY, True, bytes(200)),
        (BINARY, False, bytes(60_000)),
        (CONT, True, b"end"),
        (CLOSE, True, b"\x0f\xa1because"),
    ]

    async def script(wire: Wire) -> None:
        for one in said:
            assert await read_frame(wire.reader) == one
        await wire.send(*(frame(opcode, data, fin=fin) for opcode, fin, data in said))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            for opcode, fin, data in said:
                client.send(frame(opcode, data, fin=fin, masked=True))
            for one in said:
                assert await read_frame(client.reader) == one
            assert await client.reader.read() == b"", "and then the connection ends"
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.COMPLETED

    run(main())


def test_bytes_that_come_one_by_one_or_with_the_head_are_not_lost() -> None:
    """The client's first frames come with its request, the server's with its 101."""

    async def script(wire: Wire, request: Received) -> None:
        await wire.send(switch(request) + frame(TEXT, b"early") + frame(TEXT, b"half")[:3])
        await wire.send(frame(TEXT, b"half")[3:])
        while (got := await read_frame(wire.reader))[0] != CLOSE:
            await wire.send(frame(got[0], got[2]))
        await wire.send(close(1000))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(script) as server, rig(server.url) as it:
            client = await raw_socket(it, upgrade() + frame(TEXT, b"first", masked=True))
            for byte in frame(BINARY, bytes(300), masked=True) + close(1000, masked=True):
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            got = [await read_frame(client.reader) for _ in range(5)]
            assert [data for _, _, data in got] == [b"early", b"half", b"first", bytes(300), b"\x03\xe8"]

    run(main())


def test_a_server_that_dies_is_told_to_the_client_by_1011() -> None:
    """Also in the middle of a message, and of a frame: no half of one went out."""

    async def dies(wire: Wire) -> None:
        await wire.send(frame(TEXT, b"whole"), frame(TEXT, b"begun", fin=False), frame(CONT, bytes(90_000))[:50_000])
        await read_frame(wire.reader)
        wire.reset()

    async def leaves(wire: Wire) -> None:
        await read_frame(wire.reader)
        wire.close()

    async def main() -> None:
        scripts = {"/v1/realtime": after_switch(dies), "/v1/other": after_switch(leaves)}
        async with ScriptedEndpoint({**scripts}) as server, rig(server.url) as it:
            for path in scripts:
                client = await raw_socket(it, upgrade(f"{path}?model=m"))
                client.send(frame(TEXT, b"die", masked=True))
                got = await read_frame(client.reader)
                while got[0] != CLOSE:
                    got = await read_frame(client.reader)
                assert close_of(got[2]) == (1011, "the connection to the model server was lost")
                assert await client.reader.read() == b""
            await until(lambda: len(it.records.requests) == 2)
            assert {one.outcome for one in it.records.requests} == {Outcome.UPSTREAM_BROKE}
            assert len(server.requests) == 2, "nothing is tried again after a 101"

    run(main())


def test_a_client_that_dies_ends_the_servers_work() -> None:
    seen: list[tuple[int, str]] = []

    async def script(wire: Wire) -> None:
        await wire.send(frame(TEXT, b"hello"))
        seen.append(close_of((await read_frame(wire.reader))[2]))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            await read_frame(client.reader)
            client.writer.transport.abort()
            await until(lambda: seen)
            assert seen == [(1001, "the client left")]
            await server.wires[0].gone.wait()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED

    run(main())


def test_a_close_that_is_not_answered_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "CLOSE_S", 0.05)

    async def mute(wire: Wire) -> None:
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(mute)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            client.send(close(1000, "bye", masked=True))
            assert close_of((await read_frame(client.reader))[2]) == (1000, "")
            assert await client.reader.read() == b""
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.COMPLETED
            await server.wires[0].gone.wait()

    run(main())


BAD_FRAMES = {
    "unmasked": (frame(TEXT, b"x"), 1002),
    "a reserved bit": (frame(TEXT, b"x", masked=True, bits=0x40), 1002),
    "an unknown opcode": (frame(3, b"x", masked=True), 1002),
    "a long ping": (frame(PING, bytes(126), masked=True), 1002),
    "a fragmented ping": (frame(PING, b"x", fin=False, masked=True), 1002),
    "too large": (frame(TEXT, bytes(2000), masked=True), 1009),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_client_that_breaks_the_protocol_is_told_so_and_the_server_let_go(name: str) -> None:
    data, code = BAD_FRAMES[name]
    seen: list[int] = []

    async def script(wire: Wire) -> None:
        assert await read_frame(wire.reader) == (TEXT, True, b"before")
        seen.append(close_of((await read_frame(wire.reader))[2])[0])

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url, more="limits: {body: 1KiB}") as it:
            client = await raw_socket(it)
            client.send(frame(TEXT, b"before", masked=True) + data)
            assert close_of((await read_frame(client.reader))[2])[0] == code
            await until(lambda: seen == [1001])
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.BAD_REQUEST

    run(main())


def test_a_server_that_breaks_the_protocol_is_let_go() -> None:
    seen: list[int] = []

    async def script(wire: Wire) -> None:
        await wire.send(frame(TEXT, b"x", masked=True))
        seen.append(close_of((await read_frame(wire.reader))[2])[0])

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            assert close_of((await read_frame(client.reader))[2]) == (1011, "the model server broke the protocol")
            await until(lambda: seen == [1002])
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.UPSTREAM_BROKE

    run(main())


def test_a_peer_that_reads_nothing_pauses_the_other_one() -> None:
    """In both directions, with a bound on what lbproxy holds meanwhile, and everything arrives in the end."""
    total, size = 60, 1 << 20
    reads = asyncio.Event()
    sent = 0

    async def script(wire: Wire) -> None:
        nonlocal sent
        for n in range(total):
            await wire.send(frame(BINARY, bytes([n]) * size))
            sent += 1
        await reads.wait()
        for n in range(total):
            assert await read_message(wire.reader) == (BINARY, b"\0" * size), n
        await wire.send(frame(TEXT, b"all of them"))
        await wire.watch()

    async def main() -> None:
        async with Slow(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            client.reader._limit = 1 << 16  # type: ignore[attr-defined] # it shall not read ahead
            (connection,) = it.front._clients()
            await until(lambda: connection.turn._socket.server.is_paused)  # type: ignore[union-attr]
            assert sent < total
            assert connection.held_bytes < 1 << 20
            for n in range(total):
                assert await read_message(client.reader) == (BINARY, bytes([n]) * size), n
            one = frame(BINARY, bytes(size), masked=True)
            for _ in range(total):
                client.send(one)
            await until(lambda: connection.turn._socket.client.is_paused)  # type: ignore[union-attr]
            reads.set()
            assert await read_frame(client.reader) == (TEXT, True, b"all of them")

    run(main())


def test_many_tiny_frames_in_one_read_do_not_hold_the_loop() -> None:
    """They are passed on in portions, and none is lost though the sender closes behind them."""
    count = 20 * PORTION

    async def script(wire: Wire) -> None:
        await wire.send(frame(TEXT, b"x") * count + close(1000))
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            for _ in range(count):
                assert await read_frame(client.reader) == (TEXT, True, b"x")
            assert (await read_frame(client.reader))[0] == CLOSE

    run(main())


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a client that is not read has gone is asked soon, and often."""
    monkeypatch.setattr(deadlines, "SWEEP_S", 0.05)
    monkeypatch.setattr(deadlines, "UNREAD_S", 0.05)
    monkeypatch.setattr(relay_module, "PONG_S", 0.05)


@pytest.mark.usefixtures("_impatient")
def test_what_a_client_that_has_gone_has_left_is_not_passed_on_for_minutes() -> None:
    """Nothing is read while frames wait, so that its end is not noticed, and a megabyte of tiny ones takes seconds."""
    count = 1_000_000

    async def script(wire: Wire) -> None:
        await wire.watch()

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(script)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            client.send(frame(TEXT, b"x", masked=True) * count)
            await until(lambda: it.front._clients()[0].turn._socket.client.has_backlog)  # type: ignore[union-attr]
            client.writer.transport.abort()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            assert it.records.requests[0].request_bytes < 1 << 20
            await until(lambda: it.front.open_connections == 0)

    run(main())


@pytest.mark.usefixtures("_impatient")
def test_a_client_that_has_gone_is_noticed_though_its_server_reads_nothing() -> None:
    """Its end waited behind what it had sent, until both had been silent for `timeouts.stream_idle`."""

    async def deaf(wire: Wire) -> None:
        await wire.gone.wait()

    async def main() -> None:
        async with Slow(after_switch(deaf)) as server, rig(server.url) as it:
            client = await raw_socket(it)
            await client.fill(frame(TEXT, b"x" * 60_000, masked=True))
            client.writer.transport.abort()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED
            await until(lambda: it.front.open_connections == 0)

    run(main())


def test_the_frames_of_many_take_no_more_of_a_turn_than_those_of_one() -> None:
    """128 of each took 2 ms: 200 who sent empty fragments held the loop for half a second in each turn."""
    sockets, count = 8, 10 * PORTION

    async def main() -> None:
        async with ScriptedEndpoint(after_switch(Wire.watch)) as server, rig(server.url) as it:
            clients = [await raw_socket(it) for _ in range(sockets)]
            it.connections.backlog = Backlog(asyncio.get_running_loop(), itertools.count().__next__)
            relays = [one.turn._socket for one in it.front._clients()]  # type: ignore[union-attr]
            for relay in relays:
                assert relay is not None
                relay.from_client(frame(PING, masked=True) * count)
            for _ in range(20):
                before = sum(one.client.reader.held_bytes for one in relays if one is not None)
                await asyncio.sleep(0)
                after = sum(one.client.reader.held_bytes for one in relays if one is not None)
                assert before - after <= PORTION * len(frame(PING, masked=True))
            assert after < sockets * (count - 2 * PORTION) * len(frame(PING, masked=True)), "each in its turn"
            await until(lambda: sum(one.client.reader.held_bytes for one in relays if one is not None) == 0)
            for client in clients:
                client.writer.close()

    run(main())


def test_silence_of_both_is_asked_about_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that answers the ping lives; the other side never sees that answer."""
    monkeypatch.setattr(relay_module, "PONG_S", 0.3)

    async def silent(wire: Wire) -> None:
        await wire.watch()

    async def lively(wire: Wire) -> None:
        while (got := await read_frame(wire.reader))[0] == PING:
            await wire.send(frame(PONG, got[2]))

    async def main() -> None:
        scripts = {"/v1/realtime": after_switch(silent), "/v1/lively": after_switch(lively)}
        async with ScriptedEndpoint({**scripts}) as server, rig(server.url, more="timeouts: {stream_idle: 0.2}") as it:
            client = await raw_socket(it)
            ping = await read_frame(client.reader)
            assert ping[0] == PING
            client.send(frame(PONG, ping[2], masked=True))
            got = await read_frame(client.reader)
            assert close_of(got[2]) == (1011, "the model server does not answer")
            mute = await raw_socket(it, upgrade("/v1/lively?model=m"))
            assert (await read_frame(mute.reader))[0] == PING
            assert await mute.reader.read() == b"", "it is closed"
            await until(lambda: len(it.records.requests) == 2)
            assert [one.outcome for one in it.records.requests] == [Outcome.UPSTREAM_BROKE, Outcome.CLIENT_CLOSED]

    run(main())


def test_a_stop_tells_every_client_1001_at_its_deadline() -> None:
    async def main() -> None:
        async with echo_server() as server, rig(server.url) as it, aiohttp.ClientSession() as session:
            clients = [await session.ws_connect(url_of(it), autoclose=False) for _ in range(5)]
            for client in clients:
                assert await client.receive_str() == "hello"
            sending = asyncio.create_task(send_on(clients[0]))
            heard = [asyncio.create_task(last_of(client)) for client in clients]
            assert await it.front.stop(0.2) == 5
            for one in heard:
                assert await one == (1001, "the load balancer is stopping")
            sending.cancel()
            await until(lambda: len(server.closed) == 5)
            assert server.closed.count(1001) >= 4, "that of the client which floods it may be reset"
            assert {one.outcome for one in it.records.requests} == {Outcome.CUT}

    async def send_on(client: aiohttp.ClientWebSocketResponse) -> None:
        """A client that goes on to send must be told all the same: a close with bytes unread would be a reset."""
        with contextlib.suppress(ConnectionError):
            while not client.closed:
                await client.send_str("x" * 1000)
                await asyncio.sleep(0)

    async def last_of(client: aiohttp.ClientWebSocketResponse) -> tuple[int, str | None]:
        while (message := await client.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
        assert message.type is aiohttp.WSMsgType.CLOSE, message
        return message.data, message.extra

    run(main())


def test_a_client_is_cut_by_1013_when_memory_is_short() -> None:
    async def main() -> None:
        async with echo_server() as server, rig(server.url) as it:
            client = await raw_socket(it)
            assert (await read_frame(client.reader))[2] == b"hello"
            it.front._clients()[0].cut(Outcome.OVERLOADED)
            assert close_of((await read_frame(client.reader))[2])[0] == 1013
            await until(lambda: server.closed == [1001])
            assert it.records.requests[0].outcome is Outcome.OVERLOADED

    run(main())


def test_of_frames_that_are_not_complete_nearly_nothing_is_held() -> None:
    """200 of 60 MiB took all memory for bodies. What arrived is passed on, or not read."""
    size, reads = 16 << 20, asyncio.Event()
    got = 0

    async def script(wire: Wire) -> None:
        nonlocal got
        await reads.wait()
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                got += len((await read_frame(wire.reader))[2])

    async def main() -> None:
        async with Slow(after_switch(script)) as server, rig(server.url, more="limits: {buffered_bodies: 1MiB}") as it:
            client = await raw_socket(it)
            (connection,) = it.front._clients()
            turn = connection.turn
            assert isinstance(turn, SocketTurn)
            relay = turn._socket
            assert relay is not None
            client.send(frame(BINARY, bytes(size), masked=True)[:-1])
            await until(lambda: relay.client.is_paused and relay.server.is_full)
            there = relay.server._transport()
            assert there is not None
            assert relay.client.reader.held_bytes < frames.PIECE_BYTES + READ_BYTES
            assert there.get_write_buffer_size() < frames.PIECE_BYTES + READ_BYTES
            reads.set()
            await until(lambda: got == size - frames.PIECE_BYTES)
            assert relay.client.reader.held_bytes < frames.PIECE_BYTES
            assert it.front.overload.held_bytes == 0
            client.writer.transport.abort()
            await until(lambda: it.records.requests)
            assert relay.client.reader.held_bytes == 0, "freed, though something may refer to it still"

    run(main())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 200])
def test_another_status_than_101_goes_to_the_client_as_it_is(status: int) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(answer(b"no", status=status)) as server, rig(server.url) as it:
            client = await it.connect()
            client.send(upgrade())
            reply = await client.reply()
            assert (reply.status, reply.body) == (status, b"no")
            assert reply.field("connection") == "close"
            assert await client.reader.read() == b""
            assert it.records.requests[0].status == status

    run(main())


async def wrong_accept(wire: Wire, request: Received) -> None:
    request.head = request.head.replace(b"=\r\n", b"\r\n")
    await wire.send(switch(request))
    await wire.watch()


async def with_extension(wire: Wire, request: Received) -> None:
    await wire.send(switch(request, "Sec-WebSocket-Extensions: permessage-deflate\r\n"))
    await wire.watch()


FAILURES: dict[str, tuple[Script, str]] = {
    "503": (answer(status=503), "upstream_503"),
    "429": (answer(status=429), "upstream_429"),
    "reset": (reset, "upstream_reset"),
    "no WebSocket": (wrong_accept, "upstream_protocol_error"),
    "an extension": (with_extension, "upstream_protocol_error"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_handshake_that_fails_is_tried_elsewhere(name: str) -> None:
    script, label = FAILURES[name]

    async def main() -> None:
        async with ScriptedEndpoint(script) as bad, echo_server() as good, rig(bad.url, good.url) as it:
            for _ in range(2):
                client = await raw_socket(it)
                assert (await read_frame(client.reader))[2] == b"hello"
                client.send(close(1000, masked=True))
                await read_frame(client.reader)
            await until(lambda: len(it.records.requests) == 2)
            assert any(one.failed == (("e1", label),) for one in it.records.requests)
            assert all((one.endpoint, one.status) == ("e2", 101) for one in it.records.requests)

    run(main())


def test_a_handshake_without_an_answer_ends_by_its_time_limit() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(hang) as server, rig(server.url, more="timeouts: {first_byte: 0.3}") as it:
            assert (await it.ask(upgrade())).status == 504

    run(main())


def test_a_101_that_nobody_asked_for_is_an_error_still() -> None:
    async def main() -> None:
        async def script(wire: Wire, request: Received) -> None:
            await wire.send(switch(request))

        async with ScriptedEndpoint(script) as server, rig(server.url) as it:
            assert (await it.ask(post())).status == 502

    run(main())


def test_a_client_that_leaves_before_the_101_is_let_go() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(hang) as server, rig(server.url) as it:
            client = await it.connect()
            client.send(upgrade() + frame(TEXT, b"early", masked=True))
            await until(lambda: server.requests)
            client.writer.transport.abort()
            await server.wires[0].gone.wait()
            await until(lambda: it.records.requests)
            assert it.records.requests[0].outcome is Outcome.CLIENT_CLOSED

    run(main())


async def echoes(wire: Wire) -> None:
    while (got := await read_frame(wire.reader))[0] != CLOSE:
        await wire.send(frame(got[0], got[2], fin=got[1]))
    await wire.send(close(1000))
    await wire.watch()


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("way_there", ["tls", "unix", "proxy", "tls through a proxy"])
def test_every_way_to_an_endpoint_takes_websockets(way_there: str, plain: bool, tmp_path: Path) -> None:
    """With the endpoint's own key in place of the client's, wherever that stands."""

    async def main() -> None:
        tls = "tls" in way_there
        path = str(tmp_path / "socket") if way_there == "unix" else None
        script = after_switch(echoes)
        async with (
            ScriptedEndpoint(script, tls=server_context() if tls else None, path=path) as server,
            ConnectProxy() as proxy,
            rig("http://127.0.0.1:9") as it,
        ):
            spec = EndpointSpec(
                name="e1",
                base_url=server.url,
                api_key=ApiKey("its-own"),
                tls=Tls(CA.read_text()) if tls else None,
                proxy=ForwardProxy("127.0.0.1", proxy.port) if "proxy" in way_there else None,
            )
            it.endpoints = it.runtime.set_endpoints([spec]).added
            it.bring_up()
            more = "Sec-WebSocket-Protocol: openai-insecure-api-key.mine\r\nAuthorization: Bearer mine\r\n"
            client = await raw_socket(it, upgrade(more=more))
            data = os.urandom(300_000)
            client.send(frame(BINARY, data, masked=True))
            assert await read_message(client.reader) == (BINARY, data)
            client.send(close(1000, masked=True))
            assert (await read_frame(client.reader))[0] == CLOSE
            assert await client.reader.read() == b""
            head = server.requests[0].head
            assert b"Authorization: Bearer its-own\r\n" in head
            assert b"mine" not in head
            await until(lambda: it.connections.open_connections == 0)

    run(main(), plain=plain)
