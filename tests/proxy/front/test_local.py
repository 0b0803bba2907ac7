# SPDX-License-Identifier: Apache-2.0
"""On loopback without keys: what a web page from elsewhere can have a browser send is refused, in both lanes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.listening.bind import bind, bind_unix
from lbproxy.net.listening.sites import is_loopback
from lbproxy.proxy.front.requests import MAX_KNOWN, LocalRequests
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint
from tests.support.rig import Rig, rig

BODY = json.dumps({"model": "m", "prompt": "x"}).encode()


def verdict(
    host: str, origin: str | None = None, *, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()
) -> bool:
    """Twice: what was let in once is remembered."""
    rule = LocalRequests()
    rule.reconfigure(hosts, origins)
    one, two = (_said(rule, host, origin) for _ in range(2))
    assert one == two
    return not one


def _said(rule: LocalRequests, host: str, origin: str | None) -> str:
    try:
        rule.require(host.encode(), origin)
    except LbError as error:
        found = [name for name in ("listen.allowed_hosts", "cors.origins") if name in error.message]
        return found[0] if error.outcome is Outcome.FORBIDDEN else ""
    return ""


OWN = ("localhost", "LOCALHOST:8080", "a.localhost", "localhost.:1", "127.0.0.1:8080", "127.9.9.9", "[::1]:80", "")


def test_which_host_and_origin_are_served() -> None:
    for host in (
        "localhost",
        "LOCALHOST:8080",
        "a.localhost",
        "localhost.:1",
        "127.0.0.1:8080",
        "127.9.9.9",
        "[::1]:80",
        "",
    ):
        assert verdict(host), host
        assert not verdict(host, "http://evil.example"), host
        assert not verdict(host, "null"), host
        assert verdict(host, "http://evil.example", origins=("http://evil.example",))
        assert verdict(host, "null", origins=("*",))
    for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost"):
        assert not verdict(host), host
        assert not verdict(host, f"http://{host}"), "rebound: of one site, as far as the browser knows"
        assert not verdict(host, origins=("*",)), host
    for host in ("10.0.0.1", "[fe80::1]", "0.0.0.0", "lb"):
        assert not verdict(host), host
    assert verdict("llm.example:8080", hosts=("llm.example",))
    assert verdict("LLM.example", "http://llm.example", hosts=("llm.example",))
    assert verdict("localhost:8080", "http://localhost:8080")
    assert not verdict("localhost:8080", "http://localhost:3000"), "another program's page"
    assert verdict("localhost:8080", "http://localhost:3000", origins=("http://localhost:3000",))


def test_what_is_remembered_is_bounded() -> None:
    rule = LocalRequests()
    for number in range(2 * MAX_KNOWN):
        rule.require(b"%d.localhost" % number, None)
    assert len(rule._known) == MAX_KNOWN


def plain(more: str, kind: str = "application/json") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {len(BODY)}\r\n"
    return f"{head}{more}\r\n".encode() + BODY


def by_aiohttp(more: str) -> bytes:
    return plain(f"Connection: close\r\n{more}", "text/plain")


def models(more: str) -> bytes:
    return f"GET /v1/models HTTP/1.1\r\n{more}\r\n".encode()


def socket(more: str) -> bytes:
    fields = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    fields += f"Sec-WebSocket-Key: {'A' * 22}==\r\n"
    return f"GET /v1/realtime?model=m HTTP/1.1\r\n{fields}{more}\r\n".encode()


def preflight(more: str) -> bytes:
    return f"OPTIONS /v1/completions HTTP/1.1\r\nAccess-Control-Request-Method: POST\r\n{more}\r\n".encode()


EVIL = "Host: evil.example\r\n"
FOREIGN = (EVIL, f"{EVIL}Origin: http://evil.example\r\n", "Host: localhost\r\nOrigin: null\r\n")


@pytest.mark.parametrize("made", [plain, by_aiohttp, models, socket, preflight])
def test_pages_from_elsewhere_get_nothing_in_either_lane(made: object) -> None:
    assert callable(made)

    async def main() -> None:
        async with ScriptedEndpoint({}) as endpoint, rig(endpoint.url) as it:
            it.front.requests.local.applies = True
            for fields in FOREIGN:
                reply = await asked(it, made(fields))
                assert (reply[:13], b"x-lbproxy-reason: forbidden" in reply) == (b"HTTP/1.1 403 ", True), (
                    fields,
                    reply,
                )
            it.front.requests.keys = KeyRing({})  # then the key decides
            assert b" 401 " in await asked(it, made(EVIL))
            it.front.requests.keys = None
            assert not endpoint.asked("/v1/completions")
            reply = await asked(it, b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n")
            assert b" 403 " not in reply, "for load balancers in front"

    run(main())


async def asked(it: Rig, data: bytes) -> bytes:
    return (await it.ask(data)).head


def test_listening_says_whether_only_this_machine_connects(tmp_path: Path) -> None:
    async def main() -> None:
        for host, expected in (("127.0.0.1", True), ("0.0.0.0", False), ("localhost", True), ("127.0.0.2", True)):
            sockets = await bind(host, 0)
            assert is_loopback(sockets) is expected, host
            for sock in sockets:
                sock.close()
        sock = bind_unix(str(tmp_path / "s"), 0o600)
        assert not is_loopback([sock]), "no browser connects to it"
        sock.close()

    run(main())
