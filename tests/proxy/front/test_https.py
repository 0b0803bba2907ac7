# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients: handshakes that stall or never begin, certificates that change, and the data path over it.

What ends, breaks, waits and fills up is tested elsewhere without TLS; the tests that are named here run again with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from pathlib import Path

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.net.listening import listener
from lbproxy.proxy.front import linger, server
from tests.proxy.exchange.test_exchange import (
    test_a_body_that_only_closing_ends_is_reset_where_it_is_visibly_not_whole,
    test_a_client_that_leaves_ends_the_work_at_once,
    test_a_client_that_leaves_the_queue_is_forgotten,
    test_a_slow_reader_stops_the_endpoint_and_memory_stays_bounded,
    test_a_stream_that_breaks_never_looks_whole,
    test_an_old_client_gets_chunks_unwrapped_and_a_reset_if_they_break,
    test_keep_alive_on_both_sides_and_pipelined_requests_in_order,
    test_stream_bytes_arrive_as_they_were_sent_each_before_the_next,
)
from tests.proxy.exchange.test_opened import (
    test_the_stream_of_another_goes_on_after_the_head,
    test_what_cannot_go_on_is_told_as_an_event,
)
from tests.proxy.front.test_deadlines import (
    test_half_a_head_gets_408_also_on_a_kept_connection,
    test_who_takes_nothing_is_cut_off_and_its_endpoint_freed,
)
from tests.proxy.front.test_stop import test_an_answer_that_is_written_reaches_a_slow_client_though_we_stop
from tests.proxy.request.test_keys import test_nothing_of_a_body_is_waited_for
from tests.proxy.sockets.test_socket_relay import (
    test_a_client_that_dies_ends_the_servers_work,
    test_a_close_that_is_not_answered_is_not_waited_for_for_ever,
    test_a_peer_that_reads_nothing_pauses_the_other_one,
    test_a_server_that_dies_is_told_to_the_client_by_1011,
    test_frames_pass_as_they_are_in_both_directions,
)
from tests.support.aio import run, until
from tests.support.endpoint import OK, Received, ScriptedEndpoint, Wire, answer
from tests.support.rig import RawClient, Rig, post, rig
from tests.support.tls import Authority

__all__ = [
    "test_half_a_head_gets_408_also_on_a_kept_connection",
    "test_who_takes_nothing_is_cut_off_and_its_endpoint_freed",
    "test_a_body_that_only_closing_ends_is_reset_where_it_is_visibly_not_whole",
    "test_a_client_that_leaves_ends_the_work_at_once",
    "test_a_client_that_leaves_the_queue_is_forgotten",
    "test_a_slow_reader_stops_the_endpoint_and_memory_stays_bounded",
    "test_a_stream_that_breaks_never_looks_whole",
    "test_an_old_client_gets_chunks_unwrapped_and_a_reset_if_they_break",
    "test_keep_alive_on_both_sides_and_pipelined_requests_in_order",
    "test_stream_bytes_arrive_as_they_were_sent_each_before_the_next",
    "test_nothing_of_a_body_is_waited_for",
    "test_the_stream_of_another_goes_on_after_the_head",
    "test_what_cannot_go_on_is_told_as_an_event",
    "test_an_answer_that_is_written_reaches_a_slow_client_though_we_stop",
    "test_a_client_that_dies_ends_the_servers_work",
    "test_a_close_that_is_not_answered_is_not_waited_for_for_ever",
    "test_a_peer_that_reads_nothing_pauses_the_other_one",
    "test_a_server_that_dies_is_told_to_the_client_by_1011",
    "test_frames_pass_as_they_are_in_both_directions",
]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(autouse=True)
def over_tls(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "tls", (authority.server(tmp_path), authority.client()))


async def raw(it: Rig) -> RawClient:
    """A client without TLS."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", it.port))
    it.clients.append(client)
    return client


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_request_passes(plain: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for _ in range(3):
                client.send(post())
                assert (await client.reply()).body == b'{"ok":true}'
            made = client.writer.get_extra_info("ssl_object")
            assert made.version() == "TLSv1.3"
            assert made.selected_alpn_protocol() is None
            assert it.records.requests[-1].client == "127.0.0.1"
            large = b'{"model":"m","x":"%s"}' % (b"y" * 1_000_000)
            client.send(post(large))
            assert (await client.reply()).status == 200
            assert endpoint.requests[-1].body == large
            assert it.front.listener.failed_handshakes == 0

    run(main(), plain=plain)


def test_endpoints_are_told_that_a_client_came_by_https() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            client = await it.connect()
            for _ in range(2):
                client.send(post())
                assert (await client.reply()).status == 200
            assert [request.field("x-forwarded-proto") for request in endpoint.requests] == ["https"] * 2

    run(main())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize(("version", "spoken"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
def test_old_versions_are_not_spoken(version: str, spoken: bool, authority: Authority) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            context = authority.client()
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.maximum_version = ssl.TLSVersion[version]
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", it.port, ssl=context)
            except (ssl.SSLError, ConnectionError):
                assert not spoken
                await until(lambda: it.front.listener.failed_handshakes == 1, "it is counted")
            else:
                assert spoken
                writer.transport.abort()

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("data", [post(), b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00"])
def test_plain_http_is_told_so_and_closed(data: bytes, plain: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            client = await raw(it)
            client.send(data)
            reply = await client.reply()
            assert (reply.status, reply.field("connection")) == (400, "close")
            error = json.loads(reply.body)["error"]
            assert "https://" in error["message"]
            assert reply.field("x-lbproxy-reason") == error["code"] == "bad_request"
            assert await client.reader.read() == b""
            assert endpoint.requests == []
            assert it.front.listener.failed_handshakes == 1
            assert it.front.listener.handshaking == 0

    run(main(), plain=plain)


GARBAGE = [b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x16" * 20_000, b"\x16\x03\x01\xff\xff" + b"\x00" * 70_000]


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_handshakes_that_stall_are_closed_and_harm_nobody(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that say nothing, or begin and stop, or send what is no handshake; requests pass all the while."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 1.0)

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            clients = [await raw(it) for _ in range(100)]
            for n, client in enumerate(clients):
                if n % 5:
                    client.send(GARBAGE[n % 5 - 1])
            busy = await it.connect()
            ended = asyncio.gather(*(client.reader.read() for client in clients), return_exceptions=True)
            while not ended.done():
                busy.send(post())
                assert (await busy.reply()).status == 200
            assert all(isinstance(one, BaseException) or len(one) < 100 for one in await ended)
            assert it.front.listener.failed_handshakes == 100
            assert it.front.listener.handshaking == 0
            assert it.front.open_connections == 1

    run(main(), plain=plain)


def test_who_connects_and_leaves_is_no_failure() -> None:
    """A balancer's TCP check does that all day."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            for _ in range(5):
                (await raw(it)).writer.close()
            await until(lambda: not it.front.listener.handshaking, "they are gone")
            assert (await it.ask(post())).status == 200
            assert it.front.listener.failed_handshakes == 0

    run(main())


def test_handshakes_count_as_connections() -> None:
    """Else a flood of them would take the descriptors that connections are bounded by."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url, more="limits: {connections: 3}") as it:
            held = [await raw(it) for _ in range(2)]
            await until(lambda: it.front.listener.handshaking == 2, "both wait")
            last = await it.connect()
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await it.connect()
            assert it.front.listener.refused["connections"] == 1
            for one in held:
                one.writer.close()
            await until(lambda: not it.front.listener.handshaking, "there is room")
            assert (await it.ask(post())).status == 200
            last.send(post())
            assert (await last.reply()).status == 200

    run(main())


def test_another_certificate_is_for_who_connects_after_it(authority: Authority, tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            before = await it.connect()
            other = Authority()
            (tmp_path / "other").mkdir()
            it.front.listener.use_tls(other.server(tmp_path / "other"))
            with pytest.raises(ssl.SSLCertVerificationError):
                await it.connect()
            assert it.tls is not None
            it.tls = (it.tls[0], other.client())
            assert (await it.ask(post())).status == 200
            before.send(post())
            assert (await before.reply()).status == 200

    run(main())


def test_twenty_certificates_under_load_fail_nobody(authority: Authority, tmp_path: Path) -> None:
    """Each request on a connection of its own; in each moment some handshake is under way."""

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            stopping = False
            done = 0

            async def ask() -> None:
                nonlocal done
                while not stopping:
                    assert (await it.ask(post())).status == 200
                    done += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(ask())
                for _ in range(20):
                    context = await asyncio.to_thread(authority.server, tmp_path)
                    it.front.listener.use_tls(context)
                    now = done
                    await until(lambda: done >= now + 4, "requests pass")  # noqa: B023
                stopping = True
            assert it.front.listener.failed_handshakes == 0

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("lame_duck", [False, True])
def test_a_stop_serves_those_that_connected_before_it(
    lame_duck: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client in its handshake has no way to know that the proxy stops: its first request follows."""
    monkeypatch.setattr(server, "LAST_IDLE_S", 30.0)

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            client, front = await raw(it), it.front
            await until(lambda: front.listener.handshaking == 1, "it is accepted")
            stop = front.lame_duck(20.0, accepting=False) if lame_duck else front.stop(20.0)
            stopping = asyncio.ensure_future(stop)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not stopping.done()
            assert it.tls is not None
            await client.writer.start_tls(it.tls[1])
            client.send(post())
            reply = await client.reply()
            assert (reply.status, reply.field("connection")) == (200, "close")
            client.writer.close()
            await stopping

    run(main(), plain=plain)


def test_a_stop_does_not_wait_for_a_handshake_that_does_not_begin() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            await raw(it)
            await until(lambda: it.front.listener.handshaking == 1, "it waits")
            assert await it.front.stop(5.0) == 0
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", it.port), 1.0):
                pass

    run(main())


def test_a_stop_does_not_wait_for_a_goodbye_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps its connection for later reads nothing from it until then."""
    monkeypatch.setattr(linger, "TLS_LINGER_S", 3600.0)

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            with await asyncio.to_thread(blocking, it):
                await until(lambda: it.front.open_connections == 1, "it is there")
                await it.front.stop(3600.0)
                assert it.front.open_connections == 0

    run(main())


def blocking(it: Rig, receive_bytes: int | None = None) -> ssl.SSLSocket:
    """A client that reads when it is told to, and never says goodbye. For a thread."""
    assert it.tls is not None
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect(("127.0.0.1", it.port))
    return it.tls[1].wrap_socket(sock, server_hostname="127.0.0.1")


LAST_RESPONSE = post(more="Connection: close\r\n")


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_slow_reader_gets_the_last_response_whole(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes. What TLS wrote when we closed was thrown away 10 s later, and logged as completed."""
    monkeypatch.setattr(linger, "TLS_LINGER_S", 0.1)
    monkeypatch.setattr(linger, "LOOK_S", 0.02)
    size = 3 << 20

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer(b"x" * size))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:

            def read(client: ssl.SSLSocket, pause_s: float) -> int:
                time.sleep(pause_s)
                return len(client.recv(16 << 10))

            with await asyncio.to_thread(blocking, it, 16 << 10) as client:
                client.sendall(LAST_RESPONSE)
                got, looks = 0, 0
                while data := await asyncio.to_thread(read, client, 0.1 if it.records.requests and looks < 10 else 0.0):
                    got += data
                    looks += bool(it.records.requests)
                assert looks > 10, "some was left when the request was over"
                assert got > size
                assert it.records.requests[-1].outcome is Outcome.COMPLETED
                await until(lambda: not it.front.open_connections, "it is closed")

    run(main(), plain=plain)


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_who_has_everything_and_says_no_goodbye_keeps_no_descriptor(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linger, "TLS_LINGER_S", 0.1)
    monkeypatch.setattr(linger, "LOOK_S", 0.02)

    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            with await asyncio.to_thread(blocking, it) as client:
                client.sendall(LAST_RESPONSE)
                await until(lambda: it.records.requests, "it was answered")
                await until(lambda: not it.front.open_connections, "it is closed")

    run(main(), plain=plain)


def test_who_takes_nothing_of_the_last_response_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel does not know TCP_USER_TIMEOUT."""
    monkeypatch.setattr(linger, "LOOK_S", 0.02)

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(answer(b"x" * 300_000))

    async def main() -> None:
        async with (
            ScriptedEndpoint(script) as endpoint,
            rig(endpoint.url, more="timeouts: {client_stall: 500ms}") as it,
        ):
            with await asyncio.to_thread(blocking, it, 16 << 10) as client:
                client.sendall(LAST_RESPONSE)
                await until(lambda: it.records.requests, "it was answered")
                await until(lambda: not it.front.open_connections, "it is closed")

    run(main())
