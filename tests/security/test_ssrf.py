# SPDX-License-Identifier: Apache-2.0
"""No header, target, redirect, list or page leads lbproxy to an address that its settings do not name.

A canary listens where each of them points, on every loopback address that is named; it must never be connected to.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.support.aio import run, until
from tests.support.endpoint import OK, ScriptedEndpoint, answer
from tests.support.process import lbproxy
from tests.support.rig import RawClient, Reply

HOSTS = ("127.0.0.1", "127.0.0.2", "::1")


class Canary:
    """Listens on one port of every host, and counts who comes."""

    def __init__(self) -> None:
        self.met: list[object] = []
        self.port = 0
        self.hosts: list[str] = []

    def _meet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met.append(writer.get_extra_info("sockname"))
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Canary]:
        servers = []
        for host in HOSTS:
            try:
                servers.append(await asyncio.start_server(self._meet, host, self.port))
            except OSError:  # no IPv6 here
                continue
            self.port = servers[0].sockets[0].getsockname()[1]
            self.hosts.append(f"[{host}]" if ":" in host else host)
        try:
            yield self
        finally:
            for server in servers:
                server.close()

    @property
    def authorities(self) -> list[str]:
        """Where it is."""
        return [f"{host}:{self.port}" for host in (*self.hosts, "localhost", "2130706433", "0x7f.1")]


def asks(authority: str) -> Iterator[bytes]:
    """Requests that name the canary, in each way that some proxy somewhere believes."""
    body = b'{"model":"m","prompt":"x"}'
    tail = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    usual = f"POST /v1/completions HTTP/1.1\r\nHost: lb\r\n{tail}"
    for name in (
        *("X-Gateway-Destination-Endpoint", "X-Forwarded-Host", "X-Forwarded-Server", "X-Host", "X-Original-Host"),
        *("X-Lbproxy-Endpoint", "X-Backend", "X-Upstream", "X-Original-URL", "X-Rewrite-URL", "Destination", "Referer"),
        *("Origin", "X-Http-Host-Override", "X-Session-Id", "Via", "Link", "Alt-Svc", "X-Envoy-Original-Dst-Host"),
    ):
        for value in (authority, f"http://{authority}", f"http://{authority}/v1/completions"):
            yield f"{usual}{name}: {value}\r\n\r\n".encode() + body
    yield f"{usual}Forwarded: host={authority};proto=http\r\n\r\n".encode() + body
    yield usual.replace("Host: lb", f"Host: {authority}").encode() + b"\r\n" + body
    yield usual.replace("Host: lb", f"Host: lb@{authority}").encode() + b"\r\n" + body
    for target in (
        *(f"http://{authority}/v1/completions", f"https://{authority}/v1/completions", f"//{authority}/v1/completions"),
        *(f"http://lb@{authority}/v1/completions", f"/v1/completions@{authority}", f"/v1//{authority}/completions"),
        *(f"/v1/completions?url=http://{authority}", f"/v1/http://{authority}/", f"/v1/..//{authority}/", authority),
    ):
        yield usual.replace("/v1/completions", target).encode() + b"\r\n" + body
        yield f"GET {target} HTTP/1.1\r\nHost: lb\r\n\r\n".encode()
    yield f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()
    for model in (f"http://{authority}", authority, f"m@{authority}"):
        named = json.dumps(
            {"model": model, "base_url": f"http://{authority}", "prompt": f"http://{authority}"}
        ).encode()
        yield f"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: {len(named)}\r\n\r\n".encode() + named


def redirects(authority: str) -> Iterator[bytes]:
    """Answers that lead there."""
    there = f"http://{authority}/v1/models"
    for status in (301, 302, 303, 307, 308):
        yield answer(status=status, more=f"Location: {there}\r\n")
    for line in (
        "Refresh: 0; url=",
        "Content-Location: ",
        "Alt-Svc: h2=",
        "Link: ",
        "X-Accel-Redirect: ",
        "Location: ",
    ):
        yield answer(more=f"{line}{there}\r\n")
    yield b"HTTP/1.1 103 Early Hints\r\nLink: <%s>\r\n\r\n" % there.encode() + OK
    yield answer(status=305, more=f"Location: {there}\r\n")


async def ask(port: int, data: bytes) -> Reply | None:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    try:
        client.send(data)
        reply = await client.reply()
        while reply.status == 103:
            reply = await client.reply()
        return reply
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        client.writer.close()


def models(*names: str) -> bytes:
    data = [{"id": name, "object": "model", "root": name, "parent": None, "permission": name} for name in names]
    return answer(json.dumps({"object": "list", "data": data, "next": names[-1]}).encode())


def test_clients_and_servers_lead_it_nowhere(tmp_path: Path) -> None:
    """Every request with every answer kind; then probes, model lists and scrapes are led astray, each by each kind."""

    async def main() -> None:
        async with Canary().listening() as canary, ScriptedEndpoint({"/health": OK}) as endpoint:
            scripts = endpoint.scripts
            scripts["/v1/models"] = models("m")
            scripts["/metrics"] = answer(b"vllm:num_requests_waiting 0\n", kind="text/plain")
            scripts["/v1/completions"] = OK
            health = "health: {interval: 50ms, down_interval: 50ms, models_interval: 1s}"
            more = f"{health}\nscrape: {{interval: 50ms, stale_after: 1s}}"
            with lbproxy(tmp_path, [endpoint.url], more) as (process, url, admin):
                port = int(url.rpartition(":")[2])
                await until(lambda: '"to":"up"' in process.read(), "it is up")
                statuses = []
                for n, authority in enumerate(canary.authorities):
                    for data in [*asks(authority)][:: 4 if n else 1]:
                        reply = await ask(port, data)
                        statuses.append(0 if reply is None else reply.status)
                assert statuses.count(200) > 80, "most of them are served, by the endpoint"
                assert max(statuses) < 500
                for authority in canary.authorities[:3]:
                    for redirect in redirects(authority):
                        scripts["/v1/completions"] = redirect
                        reply = await ask(port, next(asks(authority)))
                        assert reply is not None
                        assert reply.status in {200, 301, 302, 303, 305, 307, 308}
                scripts["/v1/completions"] = OK
                await astray(endpoint, canary)
                await asyncio.to_thread(lambda: httpx.get(f"{admin}/metrics"))
                assert canary.met == []
                with socket.create_connection(("127.0.0.1", canary.port)):  # it does see who comes
                    await until(lambda: canary.met, "the canary lives")
                assert "Traceback" not in process.read()
                process.stop()

    run(main(), timeout_s=110)


async def astray(endpoint: ScriptedEndpoint, canary: Canary) -> None:
    """What lbproxy asks by itself is answered with redirects, and with pages full of addresses."""
    scripts = endpoint.scripts
    lines = "".join(f'vllm:x{{url="http://{one}/metrics"}} 1\n' for one in canary.authorities)
    page = answer(lines.encode(), kind="text/plain")
    listed = models(*canary.authorities, *(f"http://{one}/" for one in canary.authorities))
    for path in ("/health", "/v1/models", "/metrics"):
        usual = scripts[path]
        for script in (*[*redirects(canary.authorities[0])][:: 1 if path == "/health" else 4], page, listed):
            scripts[path] = script
            asked = sum(one.path == path for one in endpoint.requests)

            def again(path: str = path, asked: int = asked) -> bool:
                return sum(one.path == path for one in endpoint.requests) > asked

            await until(again, f"{path} is asked")
        scripts[path] = usual
