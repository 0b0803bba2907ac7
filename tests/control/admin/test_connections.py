# SPDX-License-Identifier: Apache-2.0
"""Connections to the admin listener: whatever others do with theirs, an operator gets in, and clients keep their
descriptors and memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web

from lbproxy.control.admin import connections, server
from lbproxy.control.admin.connections import MAX_HEAD_BYTES, MAX_UNSENT_BYTES
from lbproxy.net.listening import deadlines
from lbproxy.net.listening.listener import admin_connections, connections_within
from tests.control.admin.test_admin_server import Site
from tests.control.rig import admin_site
from tests.support.aio import run, until, virtually
from tests.support.limits import descriptors_left

PAGE_BYTES = 4 << 20
"""More than the kernel holds for a client that does not read and has a small buffer."""
GET = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Pages:
    """Large ones, and only once they may be read."""

    def __init__(self) -> None:
        self.may_be_read = asyncio.Event()
        self.may_be_read.set()
        self.asked = self.given_up = 0
        self.size = PAGE_BYTES

    async def page(self) -> tuple[bytes, str]:
        self.asked += 1
        try:
            await self.may_be_read.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return b"x" * self.size, "text/plain"


class Large(Site):
    def __init__(self, pool: object) -> None:
        super().__init__(pool)  # type: ignore[arg-type]
        self.large = self.admin._page._metrics = Pages()


class Clients:
    """Connections that do what the test does and no more."""

    def __init__(self, site: Large) -> None:
        self.site = site
        self.all: list[socket.socket] = []

    async def connect(self, sent: bytes = b"") -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        client.setblocking(False)
        self.all.append(client)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.site.admin.port))
        client.send(sent)
        return client

    @property
    def open(self) -> int:
        return len(self.site.admin.connections)


@asynccontextmanager
async def site() -> AsyncIterator[Clients]:
    async with admin_site(Large) as (made, _):
        clients = Clients(made)
        try:
            yield clients
        finally:
            for one in clients.all:
                one.close()


async def read(client: socket.socket, size: int = 1 << 16) -> bytes:
    """What comes next; nothing if it is closed. TimeoutError if neither comes."""
    try:
        async with asyncio.timeout(20.0):
            return await asyncio.get_running_loop().sock_recv(client, size)
    except ConnectionError:
        return b""


async def read_all(client: socket.socket) -> bytes:
    return b"".join([part async for part in parts(client)])


async def parts(client: socket.socket) -> AsyncIterator[bytes]:
    while part := await read(client):
        yield part


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SWEEP_S", 0.05)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "STALL_S", 0.5)


def few(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(connections, "admin_connections", lambda: limit)


# How many


@pytest.mark.parametrize("descriptors", [160, 1024, 65_536, 1 << 20])
def test_clients_keep_their_descriptors(descriptors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each another one to an endpoint; but an operator gets in on any machine."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert 8 <= admin_connections() <= 128
    assert 2 * connections_within(1 << 30) + admin_connections() <= descriptors


def test_an_operator_gets_in_whoever_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 silent connections took all descriptors of a process, and its clients got 503."""
    few(monkeypatch, 8)

    async def main() -> None:
        async with site() as clients:
            silent = [await clients.connect() for _ in range(40)]
            operator = await clients.connect(GET % b"/healthz")
            assert (await read(operator)).startswith(b"HTTP/1.1 200 ")
            assert clients.open == 8
            assert await read(silent[0]) == b"", "who was idle longest has gone"

    run(main())


def test_who_is_at_work_is_not_closed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus gets its page, however many connect meanwhile."""
    few(monkeypatch, 8)

    async def main() -> None:
        async with site() as clients:
            clients.site.large.may_be_read.clear()
            prometheus = await clients.connect(GET % b"/metrics")
            await until(lambda: clients.site.large.asked)
            for _ in range(40):
                await clients.connect()
            operator = await clients.connect(GET % b"/healthz")
            assert (await read(operator)).startswith(b"HTTP/1.1 200 ")
            clients.site.large.may_be_read.set()
            assert (await read(prometheus)).startswith(b"HTTP/1.1 200 ")

    run(main())


def test_if_all_are_at_work_the_one_that_has_been_longest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are never that many: 20 viewers, and a response takes milliseconds."""
    few(monkeypatch, 8)

    async def main() -> None:
        async with site() as clients:
            clients.site.large.may_be_read.clear()
            at_work = []
            for count in range(1, 9):
                at_work.append(await clients.connect(GET % b"/metrics"))
                await until(lambda: sum(one.at_work for one in clients.site.admin.connections._open) == count)  # noqa: B023
            operator = await clients.connect(GET % b"/healthz")
            assert (await read(operator)).startswith(b"HTTP/1.1 200 ")
            assert await read(at_work[0]) == b""

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_an_operator_gets_in_where_no_descriptor_is_left(plain: bool) -> None:
    """And others hold the spare ones, silently."""

    async def main() -> None:
        async with site() as clients:
            await clients.connect(GET % b"/healthz")
            waiting = [socket.socket() for _ in range(server.SPARE_DESCRIPTORS + 2)]
            clients.all += waiting
            with descriptors_left(0):
                for one in waiting:
                    one.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", clients.site.admin.port))
                operator = waiting[-1]
                operator.send(GET % b"/healthz")
                async with asyncio.timeout(5.0):
                    assert (await read(operator)).startswith(b"HTTP/1.1 200 ")

    run(main(), plain=plain)


# How long


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("before", [0, 1])
def test_half_a_head_gets_408(before: int) -> None:
    async def main() -> None:
        async with site() as clients:
            client = await clients.connect()
            for _ in range(before):
                client.send(GET % b"/healthz")
                assert (await read(client)).startswith(b"HTTP/1.1 200 ")
            client.send(b"GET / HTTP/1.1\r\nHost: 127.")
            head, _, body = (await read_all(client)).partition(b"\r\n\r\n")
            assert b" 408 " in head.partition(b"\r\n")[0]
            assert json.loads(body)["error"]["code"] == "request_timeout"

    run(main())


@pytest.mark.usefixtures("hurried")
def test_who_says_nothing_is_told_nothing() -> None:
    async def main() -> None:
        async with site() as clients:
            assert await read_all(await clients.connect()) == b""
            assert clients.open == 0

    run(main())


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("path", ["/admin/endpoints", "/metrics", "/nowhere"])
def test_a_body_that_does_not_arrive_is_given_up(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with site() as clients:
            client = await clients.connect(
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            await read_all(client)
            assert clients.open == 0

    run(main())
    assert not caplog.records


@pytest.mark.usefixtures("hurried")
def test_an_idle_connection_that_was_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus and browsers come again on it."""

    async def main() -> None:
        async with site() as clients:
            client = await clients.connect(GET % b"/healthz")
            assert (await read(client)).startswith(b"HTTP/1.1 200 ")
            await read_all(await clients.connect())  # the limit has passed since
            client.send(GET % b"/healthz")
            assert (await read(client)).startswith(b"HTTP/1.1 200 ")

    run(main())


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["kept", "closed by us"])
@pytest.mark.parametrize("size", [60_000, PAGE_BYTES])
def test_who_does_not_read_is_cut_off(size: int, version: bytes, plain: bool) -> None:
    """Also where aiohttp has closed the connection, and only a small rest is unsent: that kept it open for ever."""

    async def main() -> None:
        async with site() as clients:
            clients.site.large.size = size
            client = await clients.connect()
            await until(lambda: clients.open)
            (connection,) = clients.site.admin.connections._open
            assert connection.transport is not None
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
            client.send((GET % b"/metrics").replace(b"1.1", version))
            await until(lambda: connection.unsent)
            await until(lambda: clients.open == 0, within_s=5.0)

    run(main(), plain=plain)


def test_a_page_is_not_made_for_who_is_gone() -> None:
    async def main() -> None:
        async with site() as clients:
            pages = clients.site.large
            pages.may_be_read.clear()
            client = await clients.connect(GET % b"/metrics")
            await until(lambda: pages.asked)
            client.close()
            await until(lambda: pages.given_up)
            pages.may_be_read.set()
            assert (await read(await clients.connect(GET % b"/metrics"))).startswith(b"HTTP/1.1 200 ")

    run(main())


@pytest.mark.usefixtures("hurried")
def test_what_is_unsent_when_half_a_head_ends_the_connection_keeps_it_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiohttp has no transport any more then."""
    monkeypatch.setattr(connections, "STALL_S", 2.0)

    async def main() -> None:
        async with site() as clients:
            await clients.connect(GET % b"/metrics")
            await until(lambda: clients.site.large.asked)
            clients.all[0].send(b"GET / HT")
            await until(lambda: clients.open)
            await until(lambda: clients.open == 0, within_s=10.0)

    run(main())


# How much


def test_many_who_ask_at_once_have_one_page_made() -> None:
    """Begun after they asked: a page is never older than its request."""

    async def main() -> None:
        async with site() as clients:
            pages = clients.site.large
            pages.may_be_read.clear()
            first = await clients.connect(GET % b"/metrics")
            await until(lambda: pages.asked == 1)
            others = [await clients.connect(GET % b"/metrics") for _ in range(20)]
            await until(lambda: sum(one.at_work for one in clients.site.admin.connections._open) == 21)
            pages.may_be_read.set()
            for one in (first, others[-1]):
                assert (await read(one)).startswith(b"HTTP/1.1 200 ")
            assert pages.asked == 2
            assert clients.site.admin._page._made == (b"", "")

    run(main())


def test_pages_take_a_quarter_of_the_time_however_many_ask() -> None:
    """Of 600 connections that asked for 8 each, clients waited .5 s, and operators in vain."""

    async def page() -> tuple[bytes, str]:
        await asyncio.sleep(10.0)
        return b"", ""

    async def main() -> list[float]:
        loop, made = asyncio.get_running_loop(), server._Page(cast(server.Pages, SimpleNamespace(page=page)))
        ended: list[float] = []
        for _ in range(5):
            await made.fresh()
            ended.append(loop.time())
        return ended

    assert virtually(main()) == [10.0, 50.0, 90.0, 130.0, 170.0]


def test_pages_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 of them held a page each."""

    async def main() -> None:
        async with site() as clients:
            for count in range(1, 41):
                await clients.connect(GET % b"/metrics")
                await until(lambda: clients.site.large.asked == count)  # noqa: B023
            await asyncio.sleep(0.05)
            unsent = sum(one.unsent for one in clients.site.admin.connections._open)
            assert unsent <= MAX_UNSENT_BYTES + PAGE_BYTES
            reader = await clients.connect((GET % b"/metrics").replace(b"1.1", b"1.0"))
            assert len(await read_all(reader)) > PAGE_BYTES, "who reads gets all of it"

    run(main())


def test_of_pipelined_requests_one_waits_and_no_more_is_read() -> None:
    """Heads of up to 1 MiB, 32 of them, were held without a token behind each request."""
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"a: %b\r\n" % (b"x" * 8000) * 7 + b"\r\n"

    async def main() -> None:
        async with site() as clients:
            clients.site.large.may_be_read.clear()
            client = await clients.connect(GET % b"/metrics")
            await until(lambda: clients.site.large.asked)
            sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, head * 40))
            (connection,) = clients.site.admin.connections._open
            transport = connection.transport
            assert transport is not None
            await until(lambda: not transport.is_reading())
            assert len(connection._messages) == 1
            clients.site.large.may_be_read.set()
            received = b""
            while received.count(b"HTTP/1.1 200 ") < 41:
                received += await read(client, 1 << 20)
            await sending

    run(main())


def test_of_many_small_requests_in_one_read_one_waits() -> None:
    """Parsed, a request of 30 bytes holds some kilobytes."""

    async def main() -> None:
        async with site() as clients:
            clients.site.large.may_be_read.clear()
            client = await clients.connect(GET % b"/metrics" + GET % b"/healthz" * 30)
            await until(lambda: clients.site.large.asked)
            (connection,) = clients.site.admin.connections._open
            assert len(connection._messages) <= 1
            clients.site.large.may_be_read.set()
            received = b""
            while received.count(b"HTTP/1.1 200 ") < 31:
                received += await read(client, 1 << 20)

    run(main())


@pytest.mark.parametrize("behind", [b"", GET % b"/metrics"], ids=["alone", "behind a request"])
def test_a_head_has_a_limit(behind: bytes) -> None:
    async def main() -> None:
        async with site() as clients:
            clients.site.large.may_be_read.clear()
            client = await clients.connect(behind)
            loop = asyncio.get_running_loop()
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\n" + b"a: %b\r\n" % (b"x" * 8000) * 20)
            (connection,) = clients.site.admin.connections._open
            clients.site.large.may_be_read.set()
            response = await read_all(client)
            assert b" 431 " in response or behind
            assert connection._head_bytes < MAX_HEAD_BYTES + (1 << 18)
            await until(lambda: clients.open == 0)

    run(main())


@pytest.mark.parametrize("plain", [True, False], ids=["asyncio", "uvloop"])
def test_a_request_that_is_read_as_its_connection_is_lost_is_not_begun(plain: bool) -> None:
    """aiohttp's handler would find nothing to make a request with: a traceback, found by hostile clients."""

    async def main() -> None:
        async with site() as clients:
            await clients.connect(b"GET /metr")
            await until(lambda: any(one._head_bytes for one in clients.site.admin.connections._open), "its head begins")
            (one,) = clients.site.admin.connections._open
            assert one._wire is not None
            one._wire.abort()  # its protocol is told in the next turn
            one.head_is_late()
            await until(lambda: not clients.open, "it is gone")
            await asyncio.sleep(0.01)
            assert clients.site.large.asked == 0

    run(main(), plain=plain)


def test_a_client_that_has_gone_is_no_failure_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """It was logged as an error for each that left while its response was written."""

    async def main() -> None:
        async with site() as clients:
            await clients.connect()
            await until(lambda: len(clients.site.admin.connections) == 1, "it is there")
            (one,) = clients.site.admin.connections._open
            request = cast(web.BaseRequest, None)
            one.handle_error(request, 500, ConnectionResetError())
            assert not caplog.records
            one.handle_error(request, 500, ValueError())
            assert [record.message for record in caplog.records] == ["aiohttp failed"]

    run(main())
