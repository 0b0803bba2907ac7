# SPDX-License-Identifier: Apache-2.0
"""Two lbproxies behind HAProxy, by the files of docker-compose.yml's profile `ha`: one is replaced, one is killed."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from tests.support.aio import run, until
from tests.support.compose import HA_SETTINGS, HAPROXY
from tests.support.process import Process, mock
from tests.support.redis_server import needs_redis, redis_server
from tests.support.workers import one_process

PROGRAM = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
pytestmark = [
    needs_redis,
    one_process("which process relays makes no difference to the front"),
    pytest.mark.skipif(PROGRAM is None, reason="no haproxy: the front NOT tested; `make test-tools`"),
    pytest.mark.timeout(180),
]


class Site(NamedTuple):
    front: str
    """The URL for clients."""
    settings: dict[str, Path]
    replicas: dict[str, Process]
    """By name, as settings."""
    processes: ExitStack

    def start(self, name: str) -> Process:
        """Start a replica, and wait until it serves."""
        process = self.processes.enter_context(Process("--config", str(self.settings[name])))
        process.wait_for("serves sim")
        self.replicas[name] = process
        return process


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """The settings of the files, with a loopback address in place of each container's."""
    network = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        _, server = stack.enter_context(mock())
        config = folder / "haproxy.cfg"
        text = re.sub(r" resolvers docker\n", "\n", HAPROXY.read_text()).replace("bind :", f"bind {network}.9:")
        text = text.replace("maxconn 20000", "maxconn 500")
        found = {}
        for number, name in enumerate(("lbproxy-1", "lbproxy-2"), 1):
            address = f"{network}.{number}"
            text = text.replace(f"server {name} {name}:", f"server {name} {address}:")
            tree = yaml.safe_load(HA_SETTINGS.read_text())
            tree |= {one: tree[one].replace("0.0.0.0", address) for one in ("listen", "admin")}
            tree |= {"endpoints": [server], "replicas": {"url": redis.url, "name": name}}
            del tree["dns"]
            found[name] = folder / f"{name}.yaml"
            found[name].write_text(yaml.safe_dump(tree))
        config.write_text(text)
        it = Site(f"http://{network}.9:8080", found, {}, stack)
        for name in found:
            it.start(name)
        front = subprocess.Popen([PROGRAM or "", "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
        try:
            run(until(lambda: ready(it), "the front has a server"))
            yield it
        finally:
            front.kill()
            front.wait()


def ready(it: Site) -> bool:
    try:
        return httpx.get(f"{it.front}/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def ask(it: Site, tokens: int = 2) -> str:
    """A stream on a connection of its own: its last line, or how it ended."""
    body = {"model": "sim", "prompt": "x", "max_tokens": tokens, "stream": True}
    seen = ""
    try:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{it.front}/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                seen = line or seen
    except httpx.TransportError as error:
        return type(error).__name__
    return seen


def test_a_replica_is_replaced_without_a_failed_request(tmp_path: Path) -> None:
    """It says on /readyz that it stops, for longer than the front needs to notice."""

    async def main(it: Site) -> None:
        stopped = asyncio.create_task(asyncio.to_thread(it.replicas["lbproxy-1"].stop))
        ended = []
        while not stopped.done():
            ended += await asyncio.gather(*(ask(it) for _ in range(4)))
        assert await stopped == 0
        await asyncio.to_thread(it.start, "lbproxy-1")
        ended += [await ask(it) for _ in range(4)]
        assert {*ended} == {"data: [DONE]"}
        assert len(ended) > 8
        assert "lbproxy-2" in it.replicas["lbproxy-1"].wait_for("told what it knows|others: lbproxy-2").string

    with site(tmp_path) as it:
        run(main(it), timeout_s=120)


def test_of_a_replica_that_is_killed_only_its_own_streams_break(tmp_path: Path) -> None:
    async def main(it: Site) -> None:
        streams = [asyncio.create_task(ask(it, 400)) for _ in range(8)]
        admin = [yaml.safe_load(one.read_text())["admin"] for one in it.settings.values()]

        def running(number: int) -> int:
            return int(httpx.get(f"http://{admin[number]}/admin/state").json()["running"])

        await until(lambda: running(0) + running(1) == 8, "all run")
        own = running(0)
        assert 0 < own < 8
        it.replicas["lbproxy-1"].process.kill()
        ended = await asyncio.gather(*streams)
        assert ended.count("data: [DONE]") == 8 - own, ended
        assert await asyncio.gather(*(ask(it) for _ in range(4))) == ["data: [DONE]"] * 4

    with site(tmp_path) as it:
        run(main(it), timeout_s=120)
