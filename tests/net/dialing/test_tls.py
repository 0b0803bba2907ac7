# SPDX-License-Identifier: Apache-2.0
"""TLS to endpoints, through real sockets: who is believed, which name is asked for, what stays as it is without."""

from __future__ import annotations

import asyncio

import pytest

from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin
from lbproxy.net.dialing.tls import client_context
from tests.support.aio import run, until
from tests.support.certificates import CA, OTHER_CA, server_context
from tests.support.endpoint import OK, ScriptedEndpoint, answer

TRUSTING = Tls(CA.read_text())


async def get(server: ScriptedEndpoint, tls: Tls, host: str = "127.0.0.1") -> bytes:
    pool = ConnectionPool()
    try:
        origin = Origin((host, server.port), tls)
        return (await fetch(pool, origin, "/x", timeout_s=10.0, max_bytes=1 << 20)).body
    finally:
        pool.close()


@pytest.mark.parametrize("plain", [True, False], ids=["asyncio", "uvloop"])
def test_a_signed_certificate_is_believed_and_the_connection_kept(plain: bool) -> None:
    """Also on asyncio's own loop, whose TLS is other code."""
    body = b'{"long":"' + b"x" * 300_000 + b'"}'

    async def main() -> None:
        async with ScriptedEndpoint(answer(body), tls=server_context()) as server:
            pool = ConnectionPool()
            origin = Origin.parse(f"https://127.0.0.1:{server.port}", TRUSTING)
            for _ in range(3):
                assert (await fetch(pool, origin, "/x", timeout_s=10.0, max_bytes=1 << 20)).body == body
            assert len(server.wires) == 1
            pool.close()

    run(main(), plain=plain)


@pytest.mark.parametrize(
    ("tls", "host", "why"),
    [
        (Tls(), "127.0.0.1", "the certificate is refused: unable to get local issuer certificate"),
        (Tls(OTHER_CA.read_text()), "127.0.0.1", "the certificate is refused: "),
        (TRUSTING._replace(server_name="evil.test"), "127.0.0.1", "the certificate is refused: Hostname mismatch"),
        (TRUSTING, "127.0.0.2", "the certificate is refused: IP address mismatch"),
    ],
    ids=["system's", "another CA", "another name", "another address"],
)
def test_a_certificate_that_does_not_fit_is_a_failed_connection(tls: Tls, host: str, why: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK, tls=server_context(), host=host) as server:
            with pytest.raises(UpstreamError) as error:
                await get(server, tls, host)
            assert error.value.kind is FailureKind.CONNECT
            assert why in error.value.detail
            assert server.requests == [], "nothing was sent to whom we do not know"

    run(main())


def test_verification_can_be_switched_off() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK, tls=server_context()) as server:
            assert await get(server, Tls(verify=False, server_name="evil.test"))

    run(main())


@pytest.mark.parametrize(
    ("tls", "host", "asked", "host_field"),
    [
        (TRUSTING, "localhost", "localhost", "localhost"),
        (TRUSTING, "127.0.0.1", None, "127.0.0.1"),  # an address is no name: RFC 6066, section 3
        (TRUSTING._replace(server_name="vllm.test"), "127.0.0.1", "vllm.test", "vllm.test"),
    ],
)
def test_the_name_that_is_asked_for(tls: Tls, host: str, asked: str | None, host_field: str) -> None:
    """SNI and Host agree: servers with several names refuse a request whose do not (421)."""
    names: list[str | None] = []

    async def main() -> None:
        async with ScriptedEndpoint(OK, tls=server_context(names)) as server:
            await get(server, tls, host)
            assert names == [asked]
            assert server.requests[0].field("host") == f"{host_field}:{server.port}"

    run(main())


def test_a_server_without_tls_is_a_failed_connection_in_time() -> None:
    """It answers the handshake with something else, or never."""

    gone: list[bool] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        gone.append(True)
        writer.close()

    async def rude(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> None:
        for handler, why in ((rude, "no TLS connection: "), (silent, "no connection within 0.3 s")):
            server = await asyncio.start_server(handler, "127.0.0.1", 0)
            pool = ConnectionPool()
            with pytest.raises(UpstreamError) as error:
                await pool.connect(Origin(("127.0.0.1", server.sockets[0].getsockname()[1]), TRUSTING), 0.3)
            assert error.value.kind is FailureKind.CONNECT
            assert why in error.value.detail
            pool.close()
            server.close()
        await until(lambda: gone, "the connection that timed out was closed")

    run(main())


def test_plain_and_tls_connections_of_one_address_are_never_mixed_up() -> None:
    assert Origin.parse("https://a:1", TRUSTING) != Origin.parse("http://a:1")
    assert Origin.parse("https://a:1", TRUSTING) != Origin.parse("https://a:1", Tls())
    assert Origin.parse("https://a")[:2] == ("a", 443)
    assert Origin.parse("https://a") == Origin.parse("https://a", Tls()), "https without further word is verified"


def test_certificates_that_are_none() -> None:
    with pytest.raises(ValueError, match="no certificates in PEM form"):
        client_context("-----BEGIN NOTHING", True)


def test_a_secret_shows_nowhere() -> None:
    key = ApiKey("sk-very-secret")
    assert "very" not in f"{key} {key!r} {[key]} {Tls()!r}"
    assert key == ApiKey("sk-very-secret")
    assert key != ApiKey("sk-other")
    assert key.reveal() == "sk-very-secret"
