# SPDX-License-Identifier: Apache-2.0
"""Streams that wait longer than a proxy in front is patient: in lbproxy's queue, for a server to wake, in a prefill.
With `stream_keepalive` clients' SDKs get them, without it they are cut.

With the times that proxies have, of about two minutes: `python -m tests.e2e.test_long_waits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from tests.support.aio import run
from tests.support.ports import free_port
from tests.support.process import Program, lbproxy_beside
from tests.support.tcp_server import TcpServer


class Times(NamedTuple):
    """Seconds."""

    patience: float
    """After so much silence of a server the proxy in front cuts its client's connection."""
    keepalive: float
    wait: float
    """How long requests wait."""


SHORT = Times(4.0, 1.0, 6.0)
LONG = Times(5.0, 3.0, 40.0)


class Impatient(TcpServer):
    """A proxy that relays bytes, until its server is silent for too long."""

    def __init__(self, server: str, patience_s: float) -> None:
        super().__init__()
        self._server_url, self._patience_s = httpx.URL(server), patience_s

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url = self._server_url
        above, out = await asyncio.open_connection(url.host, url.port)
        asking = asyncio.create_task(self._ask(reader, out))
        try:
            while True:
                async with asyncio.timeout(self._patience_s):
                    data = await above.read(1 << 16)
                if not data:
                    break
                writer.write(data)
        except (TimeoutError, OSError, asyncio.CancelledError):
            pass
        finally:
            asking.cancel()
            out.close()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            out.write(data)


@asynccontextmanager
async def impatient(server: str, times: Times, _: Path) -> AsyncIterator[str]:
    async with Impatient(server, times.patience) as front:
        yield front.url


@asynccontextmanager
async def nginx(server: str, times: Times, folder: Path) -> AsyncIterator[str]:
    port, file = free_port(), folder / "nginx.conf"
    places = "".join(f"{name}_temp_path {folder}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    file.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log stderr; events {{}} http {{ access_log off; {places} server {{ "
        f"listen 127.0.0.1:{port}; location / {{ proxy_pass {server}; proxy_http_version 1.1; proxy_buffering off; "
        f'proxy_set_header Connection ""; proxy_read_timeout {times.patience:g}s; }} }} }}\n'
    )
    async with front_at(port, [find("nginx") or "", "-c", str(file), "-p", str(folder)]) as url:
        yield url


@asynccontextmanager
async def haproxy(server: str, times: Times, folder: Path) -> AsyncIterator[str]:
    port, file = free_port(), folder / "haproxy.cfg"
    file.write_text(
        f"defaults\n mode http\n timeout connect 1s\n timeout client 10m\n timeout server {times.patience:g}s\n"
        f"listen front\n bind 127.0.0.1:{port}\n server lb {server.removeprefix('http://')}\n"
    )
    async with front_at(port, [find("haproxy") or "", "-db", "-f", str(file)]) as url:
        yield url


@asynccontextmanager
async def front_at(port: int, command: list[str]) -> AsyncIterator[str]:
    with Program(command):
        for _ in range(400):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.025)
        yield f"http://127.0.0.1:{port}"


def find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(f"/usr/sbin/{name}")


FRONTS: dict[str, Callable[[str, Times, Path], Any]] = {"impatient": impatient, "nginx": nginx, "haproxy": haproxy}


class Clients(NamedTuple):
    """Of one front."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def chat(self, model: str, tokens: int = 3) -> int:
        """The chunks that came with text."""
        messages: Any = [{"role": "user", "content": "x"}]
        stream = await self.openai.chat.completions.create(
            model=model, messages=messages, max_tokens=tokens, stream=True
        )
        return len([one async for one in stream if one.choices and one.choices[0].delta.content])

    async def message(self, model: str) -> int:
        messages: Any = [{"role": "user", "content": "x"}]
        stream = await self.anthropic.messages.create(model=model, messages=messages, max_tokens=3, stream=True)
        return len([one async for one in stream if one.type == "content_block_delta"])

    async def response(self, model: str) -> int:
        stream = await self.openai.responses.create(model=model, input="x", max_output_tokens=3, stream=True)
        return len([one async for one in stream if one.type == "response.output_text.delta"])


@asynccontextmanager
async def site(folder: Path, kind: str, times: Times, more: str) -> AsyncIterator[Clients]:
    """Clients of a front, lbproxy behind it, and servers: `queue` has one slot, `wake` sleeps, `prefill` is slow."""
    async with AsyncExitStack() as stack:
        made = (
            MockOptions(model="queue", ttft=0.01, token_time=times.wait / 20),
            MockOptions(model="wake", sleep_mode=True, asleep=True, wake_time=times.wait, ttft=0.01, token_time=0.01),
            MockOptions(model="prefill", ttft=times.wait, token_time=0.01),
        )
        servers = [await stack.enter_async_context(MockServer(one)) for one in made]
        own = ("max_in_flight: 1", "wake: true", "")
        entries = [f"{{url: {one.url}, {two}}}" for one, two in zip(servers, own, strict=True)]
        limits = f"admission: {{queue_timeout: {3 * times.wait:g}s}}\n{more}"
        _, url, _ = await stack.enter_async_context(lbproxy_beside(folder, entries, limits))
        front = await stack.enter_async_context(FRONTS[kind](url, times, folder))
        settings: dict[str, Any] = {"max_retries": 0, "timeout": 10 * times.wait, "api_key": "none"}
        clients = Clients(
            await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{front}/v1", **settings)),
            await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=front, **settings)),
        )
        async with httpx.AsyncClient() as http:
            for model in ("queue", "prefill"):
                await until_served(http, url, model)
        yield clients


async def until_served(http: httpx.AsyncClient, url: str, model: str) -> None:
    for _ in range(400):
        if (await http.get(f"{url}/v1/models/{model}")).status_code == 200:
            return
        await asyncio.sleep(0.025)
    raise AssertionError(f"{model} is not served")


async def waits(clients: Clients, times: Times) -> list[object]:
    """What streams that wait come to: text, or an error."""
    holding = asyncio.create_task(clients.chat("queue", 22))  # with a token all 2 / 40 of the wait
    await asyncio.sleep(0.3)
    began = time.monotonic()
    asked = (clients.chat("queue"), clients.chat("wake"), clients.chat("prefill"), clients.message("prefill"))
    ended = await asyncio.gather(*asked, clients.response("prefill"), return_exceptions=True)
    assert time.monotonic() - began > times.patience
    assert await holding == 22
    return list(ended)


def skip_unless(kind: str) -> None:
    if kind != "impatient" and find(kind) is None:
        pytest.skip(f"no {kind}: NOT tested before lbproxy; `make test-tools`")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", FRONTS)
def test_streams_that_wait_long_are_served_through_a_proxy_that_is_not_patient(kind: str, tmp_path: Path) -> None:
    skip_unless(kind)

    async def main() -> None:
        more = f"stream_keepalive: {SHORT.keepalive:g}s"
        async with site(tmp_path, kind, SHORT, more) as clients:
            assert await waits(clients, SHORT) == [3, 3, 3, 3, 3]

    run(main())


@pytest.mark.timeout(120)
def test_without_the_setting_they_are_cut(tmp_path: Path) -> None:
    async def main() -> None:
        async with site(tmp_path, "impatient", SHORT, "") as clients:
            ended = await waits(clients, SHORT)
            assert [one for one in ended if not isinstance(one, Exception)] == []

    run(main())


if __name__ == "__main__":

    async def by_hand(kind: str, more: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with site(Path(folder), kind, LONG, more) as clients:
                print(kind, more or "without the setting", await waits(clients, LONG), flush=True)

    for named in sys.argv[1:] or FRONTS:
        if named == "impatient" or find(named):
            run(by_hand(named, ""))
            run(by_hand(named, f"stream_keepalive: {LONG.keepalive:g}s"))
