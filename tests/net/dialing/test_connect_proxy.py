# SPDX-License-Identifier: Apache-2.0
"""Endpoints behind a forward proxy: tunnels by CONNECT, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import base64
import socket

import pytest

from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run, until
from tests.support.certificates import CA, server_context
from tests.support.connect_proxy import ConnectProxy
from tests.support.endpoint import OK, ScriptedEndpoint

CREDENTIALS = ApiKey("Basic " + base64.b64encode(b"me:s3cret").decode())


def through(server: str, port: int, credentials: ApiKey | None = None) -> Origin:
    tls = Tls(CA.read_text()) if server.startswith("https") else None
    return Origin.parse(server, tls, ForwardProxy("127.0.0.1", port, credentials))


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_requests_go_through_a_kept_tunnel_in_origin_form(plain: bool, encrypted: bool) -> None:
    async def main() -> None:
        pool = ConnectionPool()
        tls = server_context() if encrypted else None
        async with ScriptedEndpoint(OK, tls=tls) as server, ConnectProxy(user="me:s3cret") as proxy:
            origin = through(server.url, proxy.port, CREDENTIALS)
            for _ in range(2):
                assert (await fetch(pool, origin, "/x", timeout_s=10.0, max_bytes=100)).status == 200
            (asked,) = proxy.asked
            at = f"127.0.0.1:{server.port}"
            assert asked.head.startswith(f"CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n".encode())
            assert [(one.line, one.field("host")) for one in server.requests] == [("GET /x HTTP/1.1", at)] * 2
            assert server.requests[0].field("proxy-authorization") is None
            # Without the proxy it is another place: their connections are never mixed up.
            assert pool.take(Origin.parse(server.url, origin[2])) is None
            pool.close()
            await asyncio.sleep(0.01)

    run(main(), plain=plain)


NOT_SAID = b"HTTP/1.1 200 OK\r\n"
TOO_LARGE = NOT_SAID + b"x: " + b"y" * (16 << 10)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (b"HTTP/1.1 407 Whatever\r\n\r\n", "returned 407 Proxy Authentication Required to CONNECT"),
        (b"HTTP/1.0 403 \x1b[31mno\r\nContent-Length: 3\r\n\r\nno!", "returned 403 Forbidden to CONNECT"),
        (b"HTTP/1.1 502 x\r\n\r\n", "returned 502 Bad Gateway to CONNECT"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "returned 100 Continue to CONNECT"),
        (b"HTTP/1.1 599 x\r\n\r\n", "returned 599 to CONNECT"),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "does not speak HTTP/1.x"),
        (TOO_LARGE, "the head of its response is larger than 16 KiB"),
        (b"HTTP/1.1 200 OK\r\n\r\nsurprise", "sent more than the head of its response"),
        (NOT_SAID, "no response to CONNECT within 0.3 s"),
        (b"", "no response to CONNECT within 0.3 s"),
    ],
    ids=["407", "403", "502", "100", "599", "no HTTP", "too large", "too much", "half a head", "silent"],
)
def test_a_tunnel_that_does_not_come_is_a_failed_connection_that_names_the_proxy(script: bytes, why: str) -> None:
    async def main() -> None:
        pool = ConnectionPool()
        async with ConnectProxy(script=script) as proxy:
            with pytest.raises(UpstreamError) as raised:
                await pool.connect(through("http://gpu.test:8000", proxy.port, CREDENTIALS), 0.3)
            assert raised.value.kind is FailureKind.CONNECT
            assert not raised.value.refused
            assert raised.value.detail == f"gpu.test:8000: proxy 127.0.0.1:{proxy.port}: {why}"
            assert "s3cret" not in repr(raised.value)
            assert CREDENTIALS.reveal() not in repr(raised.value)
        assert pool.open_connections == 0
        pool.close()

    run(main())


async def dialling(pool: ConnectionPool, proxy: ConnectProxy) -> asyncio.Task[Connection]:
    """A connection to an endpoint that the proxy was asked for."""
    dialled = asyncio.create_task(pool.connect(through("http://gpu.test:8000", proxy.port), 5.0))
    await until(lambda: proxy.asked, "the proxy is asked")
    return dialled


def test_a_proxy_that_closes_instead_of_answering() -> None:
    async def main() -> None:
        pool = ConnectionPool()
        async with ConnectProxy(script=b"") as proxy:
            dialled = await dialling(pool, proxy)
            await proxy.stop()
            with pytest.raises(UpstreamError) as raised:
                await dialled
        assert raised.value.detail.startswith(f"gpu.test:8000: proxy 127.0.0.1:{proxy.port}: ")
        assert raised.value.detail.endswith(("closed the connection", "Connection reset by peer"))
        pool.close()

    run(main())


def test_a_proxy_that_is_not_there_does_not_mean_that_nothing_listens_at_the_endpoint() -> None:
    """A refused connection to an endpoint says that its process is gone; of a proxy it says nothing about that."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pool = ConnectionPool()
        with pytest.raises(UpstreamError) as raised:
            await pool.connect(through("http://gpu.test:8000", port), 1.0)
        assert raised.value.detail == f"gpu.test:8000: proxy 127.0.0.1:{port}: Connection refused"
        assert raised.value.kind is FailureKind.CONNECT
        assert not raised.value.refused
        pool.close()

    run(main())


def test_a_cancelled_dial_leaves_no_connection_open() -> None:
    async def main() -> None:
        pool = ConnectionPool()
        async with ConnectProxy(script=b"") as proxy:
            dialled = await dialling(pool, proxy)
            dialled.cancel()
            await asyncio.wait([dialled])
            await until(lambda: not proxy._tasks, "it reads until we close")
        pool.close()

    run(main())
