# SPDX-License-Identifier: Apache-2.0
"""Who may use the admin listener: each rule through a real listener, and the peers that a test cannot be by hand."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from lbproxy.config.sections.access import Secret
from lbproxy.control.admin.access import OPEN, AdminAccess, require
from lbproxy.control.admin.server import Admin
from lbproxy.core.requests.outcome import LbError, Outcome
from tests.control.rig import rig
from tests.support.aio import run

TOKEN = "correct-horse-battery-staple"
SECRET = Secret.read(TOKEN)
NONE: Mapping[str, str] = {}
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


class Peer:
    """A transport that says where it is from."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    def get_extra_info(self, name: str) -> object:
        if name == "socket" and self.address == "unix":
            return SimpleNamespace(family=socket.AF_UNIX)
        return (self.address, 50_000) if name == "peername" and self.address else None


def verdict(
    fields: Mapping[str, str] = NONE,
    *,
    token: Secret | None = None,
    peer: str | None = "127.0.0.1",
    made: Secret | None = None,
    method: str = "GET",
) -> Outcome | None:
    headers = {"Host": "127.0.0.1:9901", **fields}
    request = make_mocked_request(method, "/admin/drain", headers=headers, transport=Peer(peer))
    try:
        require(request, token, made)
    except LbError as error:
        return error.outcome
    return None


CHANGING = ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "X"]


@pytest.mark.parametrize("method", CHANGING)
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1"])
def test_this_machine_may_read_and_needs_the_token_for_more(method: str, peer: str) -> None:
    """What comes from here by a proxy on this machine looks the same if the proxy does not say so."""
    assert verdict(peer=peer, made=SECRET) is None
    assert verdict(peer=peer, made=SECRET, method=method) is Outcome.UNAUTHORIZED
    assert verdict({"Authorization": "Bearer x"}, peer=peer, made=SECRET, method=method) is Outcome.UNAUTHORIZED
    assert verdict(RIGHT, peer=peer, made=SECRET, method=method) is None
    assert verdict(RIGHT, peer=peer, method=method) is Outcome.FORBIDDEN, "none was made, so none can be right"


@pytest.mark.parametrize("method", CHANGING)
def test_who_can_connect_to_a_unix_socket_may_change_things(method: str) -> None:
    """The file's mode says who."""
    assert verdict(peer="unix", method=method) is None
    assert verdict({"X-Forwarded-For": "10.0.0.1"}, peer="unix", method=method) is Outcome.FORBIDDEN
    assert verdict({"Host": "evil.example"}, peer="unix", method=method) is Outcome.FORBIDDEN
    assert verdict(peer="unix", method=method, token=SECRET) is Outcome.UNAUTHORIZED


def test_the_token_that_was_made_lets_in_from_elsewhere_and_only_while_none_is_set() -> None:
    other = Secret.read("another-token-of-ours")
    assert verdict(RIGHT, peer="10.0.0.1", made=SECRET, method="POST") is None
    assert verdict(RIGHT, peer="10.0.0.1", made=SECRET, token=other, method="POST") is Outcome.UNAUTHORIZED
    assert verdict(peer="10.0.0.1", made=SECRET) is Outcome.FORBIDDEN
    evil = {"Origin": "http://evil.example"}
    assert verdict({**RIGHT, **evil}, made=SECRET, method="POST") is Outcome.FORBIDDEN


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_without_a_token_this_machine_is_let_in(peer: str) -> None:
    assert verdict(peer=peer) is None


@pytest.mark.parametrize("peer", ["10.0.0.1", "0.0.0.0", "fe80::1", "::ffff:10.0.0.1", "fe80::1%eth0", "", None])
def test_without_a_token_nobody_else_is(peer: str | None) -> None:
    assert verdict(peer=peer) is Outcome.FORBIDDEN


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Real-IP"])
def test_what_a_proxy_on_this_machine_passes_on_is_not_from_here(name: str) -> None:
    assert verdict({name: "10.0.0.1"}) is Outcome.FORBIDDEN
    assert verdict({name: "10.0.0.1", **RIGHT}, token=SECRET) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9901", "127.0.0.1.evil.example", "", "[", "[x]"])
def test_a_foreign_name_that_leads_here_is_refused(host: str) -> None:
    """DNS rebinding: the browser thinks that the page and the admin listener are one site."""
    assert verdict({"Host": host}) is Outcome.FORBIDDEN


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9901", "127.0.0.1", "[::1]:9901", "192.0.2.1:80"])
def test_addresses_and_localhost_are_our_names(host: str) -> None:
    assert verdict({"Host": host}) is None


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8080", "https://127.0.0.1"])
@pytest.mark.parametrize("token", [None, SECRET])
def test_a_web_page_from_elsewhere_is_refused_even_with_the_token(origin: str, token: Secret | None) -> None:
    assert verdict({"Origin": origin, **RIGHT}, token=token) is Outcome.FORBIDDEN


def test_our_own_pages_are_let_in() -> None:
    assert verdict({"Origin": "http://127.0.0.1:9901"}) is None


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", None])
def test_with_a_token_it_alone_counts(peer: str | None) -> None:
    """Also on this machine, where other users are too."""
    assert verdict(token=SECRET, peer=peer) is Outcome.UNAUTHORIZED
    assert verdict({"Host": "lb.example", **RIGHT}, token=SECRET, peer=peer) is None


@pytest.mark.parametrize(
    "value",
    [
        *("", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", f"Bearer {TOKEN[:-1]}"),
        *(f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN},{TOKEN}", f"Bearer {SECRET.digest.hex()}"),
        *(f"Bearer sha256:{SECRET.digest.hex()}", "Bearer é", f"Bearer {TOKEN} {TOKEN}"),
    ],
)
def test_what_is_not_the_token_is_refused(value: str) -> None:
    assert verdict({"Authorization": value}, token=SECRET) is Outcome.UNAUTHORIZED


@asynccontextmanager
async def site(token: Secret | None) -> AsyncIterator[tuple[Admin, httpx.AsyncClient]]:
    class Front:
        draining = False
        url: str | None = "http://127.0.0.1:8080"

    class Pages:
        async def page(self) -> tuple[bytes, str]:
            return b"", "text/plain"

    async with rig() as pool:
        admin = Admin(pool.runtime, Front(), Pages(), token)
        port = await admin.start("127.0.0.1", 0)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                yield admin, client
        finally:
            await admin.close()


def test_health_and_metrics_ask_for_nothing() -> None:
    async def main() -> None:
        async with site(SECRET) as (_, client):
            foreign = {"Host": "evil.example", "Origin": "http://evil.example", "Forwarded": "for=10.0.0.1"}
            for path in OPEN:
                assert (await client.get(path, headers=foreign)).status_code in {200, 503}, path

    run(main())


def test_all_else_is_closed_whether_it_exists_or_not() -> None:
    """So that a path which is added later is closed too."""

    async def main() -> None:
        async with site(SECRET) as (_, client):
            for path in ("/", "/admin/drain", "/metrics/", "//metrics", "/healthz/../admin", "/metrics%2f", "/METRICS"):
                answer = await client.post(path)
                assert (path, answer.status_code) == (path, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert (path, (await client.get(path, headers=RIGHT)).status_code) == (path, 404)
            assert (await client.get("/admin", headers=[(b"Authorization", b"Bearer \xff")])).status_code == 401
            twice = [("Authorization", f"Bearer {TOKEN}")] * 2
            assert (await client.get("/admin", headers=twice)).status_code == 401

    run(main())


def test_a_refusal_comes_before_the_body_is_read() -> None:
    async def main() -> None:
        async with site(None) as (_, client):

            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield b"x" * 1000

            try:
                answer = await client.post("/admin/drain", headers={"Origin": "http://evil.example"}, content=endless())
            except httpx.HTTPError:  # it was still writing when we closed
                return
            assert answer.status_code == 403

    run(main())


def test_another_token_holds_for_the_next_request() -> None:
    async def main() -> None:
        async with site(SECRET) as (admin, client):
            assert (await client.get("/admin", headers=RIGHT)).status_code == 404
            admin.access.token = Secret.read("another-token-of-ours")
            assert (await client.get("/admin", headers=RIGHT)).status_code == 401
            admin.access.token = None
            assert (await client.get("/admin")).status_code == 404

    run(main())


def test_a_handler_that_is_added_is_guarded() -> None:
    """The middleware by itself, as other applications use it."""

    async def main() -> None:
        async def drained(_: web.Request) -> web.Response:
            return web.Response(text="drained")

        request = make_mocked_request("POST", "/admin/drain", headers={"Host": "localhost"}, transport=Peer("10.0.0.1"))
        with pytest.raises(LbError):
            await AdminAccess(None).middleware(request, drained)
        request = make_mocked_request("GET", "/admin/drain", headers={"Host": "localhost"}, transport=Peer("::1"))
        assert (await AdminAccess(None).middleware(request, drained)).status == 200

    run(main())
