# SPDX-License-Identifier: Apache-2.0
"""KV events of simulated servers behind lbproxy, each a process of its own: a conversation no longer goes for its cache
to a server whose cache was cleared.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lbproxy.extras.installing import needs
from tests.support.aio import run, until
from tests.support.docs import ROOT, blocks
from tests.support.ports import free_port
from tests.support.process import LBPROXY, Process, lbproxy, mock

WORDS = "The quick brown fox jumps over the lazy dog. "
LONG = WORDS * 2_000
"""Some 23,000 tokens: to prefill them again costs more than anything else in these tests."""


def metric(admin: str, name: str) -> dict[str, float]:
    """The samples of a family by their labels."""
    lines = httpx.get(f"{admin}/metrics").text.splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(f"lbproxy_{name}{{"))
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in samples}


def endpoints(admin: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in httpx.get(f"{admin}/admin/state").json()["endpoints"]}


class Pair:
    """Two servers behind lbproxy."""

    def __init__(self, url: str, admin: str, servers: list[str], http: httpx.AsyncClient) -> None:
        self.admin = admin
        self.servers = {server.removeprefix("http://"): server for server in servers}
        self._url = url
        self._http = http

    async def turn(self) -> str:
        """One turn of the conversation; returns where it went."""
        body = {"model": "sim", "prompt": LONG, "max_tokens": 4}
        got = await self._http.post(f"{self._url}/v1/completions", json=body)
        assert got.status_code == 200, got.text
        return got.headers["x-lbproxy-endpoint"]

    async def ask(self, name: str, *, tokens: int = 4) -> None:
        """A request of another client to a server itself."""
        body = {"model": "sim", "prompt": f"other {WORDS}", "max_tokens": tokens}
        assert (await self._http.post(f"{self.servers[name]}/v1/completions", json=body)).status_code == 200

    async def clear(self, name: str) -> None:
        assert (await self._http.post(f"{self.servers[name]}/reset_prefix_cache")).status_code == 200

    @asynccontextmanager
    async def busy(self, name: str) -> AsyncIterator[None]:
        """Others' requests run there meanwhile, and lbproxy knows it."""
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self.ask(name, tokens=4_000)) for _ in range(6)]
            await until(lambda: (endpoints(self.admin)[name]["running"] or 0) >= 6)
            yield
            for one in others:
                one.cancel()
        await until(lambda: endpoints(self.admin)[name]["running"] == 0)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        listed, servers = [], []
        for _ in range(2):
            events, replays = free_port(), free_port()
            options = ("--kv-events", f"tcp://*:{events}", "--kv-events-replay", f"tcp://*:{replays}")
            _, server = stack.enter_context(mock(*options))
            servers.append(server)
            listed.append(f"{{url: '{server}', kv_events: ':{events}', kv_events_replay: ':{replays}'}}")
        _, url, admin = stack.enter_context(lbproxy(folder, listed))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0))
        it = Pair(url, admin, servers, http)
        await until(lambda: all(one["health"] == "up" for one in endpoints(admin).values()))
        for name in it.servers:
            await until_heard(it, name)
        yield it


async def until_heard(it: Pair, name: str) -> None:
    """A publisher drops what it sends before lbproxy has connected."""
    async with asyncio.timeout(30):
        number = 0
        while not metric(it.admin, "kv_events_messages_total").get(f'endpoint="{name}"'):
            number += 1
            body = {"model": "sim", "prompt": f"{number} {WORDS * 20}", "max_tokens": 2}
            await it._http.post(f"{it.servers[name]}/v1/completions", json=body)


def test_a_conversation_leaves_a_server_whose_cache_was_cleared(tmp_path: Path) -> None:
    """Its home has other work each time: the cache alone keeps the conversation there."""

    async def main() -> None:
        async with pair(tmp_path) as it:
            home = await it.turn()
            async with it.busy(home):
                assert await it.turn() == home, "its prefix is worth more than the work of others"
            shown = endpoints(it.admin)[home]
            assert shown["kv_cached_tokens"] > 20_000
            assert 0.0 < shown["kv_fill"] < 1.0
            assert shown["learned"]["cached_tokens"] > 20_000
            await it.clear(home)
            async with it.busy(home):  # its first step publishes the clear
                await until(lambda: metric(it.admin, "kv_events_clears_total")[f'endpoint="{home}"'] == 1.0)
                assert endpoints(it.admin)[home]["learned"]["cached_tokens"] == 0
                assert await it.turn() != home
            assert sum(metric(it.admin, "kv_events_problems_total").values()) == 0.0
            assert metric(it.admin, "endpoint_kv_cached_tokens")[f'endpoint="{home}"'] < 2_000

    run(main(), timeout_s=120.0)


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    """As it is, with other ports."""
    texts = [block.text for block in blocks(ROOT / "docs" / "kv-events.md")]
    (command,) = (text for text in texts if text.startswith("lbproxy mock"))
    (settings,) = (text for text in texts if text.startswith("endpoints:"))
    for port in ("8001", "5557", "5657"):
        free = str(free_port())
        command, settings = command.replace(port, free), settings.replace(port, free)
    (tmp_path / "cfg.yaml").write_text(f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n{settings}")
    with Process(*command.split()[1:]) as server, Process("--config", str(tmp_path / "cfg.yaml")) as process:
        url = server.wait_for(r"at (http://\S+)")[1]
        admin = process.wait_for(r"admin on (http://[\w.:]+)")[1]

        async def heard() -> None:
            it = Pair("", admin, [url], client)
            await until_heard(it, url.removeprefix("http://"))
            await client.aclose()

        client = httpx.AsyncClient(timeout=30.0)
        run(heard())


def test_a_server_that_is_started_again_is_heard_again(tmp_path: Path) -> None:
    async def main() -> None:
        port, events = free_port(), free_port()
        server = f"http://127.0.0.1:{port}"
        name = f'endpoint="{server.removeprefix("http://")}"'
        options = ("mock", "--port", str(port), "--kv-events", f"tcp://*:{events}")
        async with httpx.AsyncClient(timeout=30.0) as http:

            async def publishes(admin: str, count: float) -> None:
                number = 0
                while metric(admin, "kv_events_messages_total").get(name, 0.0) < count:
                    number += 1
                    body = {"model": "sim", "prompt": f"{number} {WORDS * 20}", "max_tokens": 2}
                    await http.post(f"{server}/v1/completions", json=body)

            with lbproxy(tmp_path, [f"{{url: '{server}', kv_events: ':{events}'}}"]) as (process, _, admin):
                with Process(*options) as first:
                    await asyncio.to_thread(first.wait_for, "at http")
                    await publishes(admin, 5.0)
                    assert metric(admin, "kv_events_restarts_total")[name] == 0.0
                with Process(*options) as second:
                    await asyncio.to_thread(second.wait_for, "at http")
                    await publishes(admin, 8.0)
                    assert metric(admin, "kv_events_problems_total")[f'{name},problem="disconnected"'] >= 1.0
                assert "Traceback" not in process.read()

    run(main(), timeout_s=120.0)


def test_without_the_package_the_simulated_server_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "zmq").mkdir()
    (tmp_path / "zmq" / "__init__.py").write_text("raise ModuleNotFoundError('none', name='zmq')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [*LBPROXY, "mock", "--port", "0", "--kv-events", "tcp://*:1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lbproxy mock: --kv-events {needs('kv-events')}\n"


@pytest.mark.parametrize("options", [("--kv-events-replay", "tcp://*:1"), ("--kv-events", "tcp://*:1", "--ttft", "1")])
def test_what_cannot_publish_is_refused(options: tuple[str, ...]) -> None:
    done = subprocess.run([*LBPROXY, "mock", *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "lbproxy mock: kv_events" in done.stderr
