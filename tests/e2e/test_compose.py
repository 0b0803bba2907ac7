# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml as processes: the services' own commands, settings and health checks, without Docker.

Each container is a process on a loopback address of its own, on the ports that the files say; Docker's nameserver is
ours. Only what names an address differs: `0.0.0.0` is the process's own, and lbproxy's settings name the nameserver.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import yaml
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.config.parse import parse
from tests.support.aio import run, until
from tests.support.compose import (
    BASE,
    SETTINGS,
    Service,
    image_healthcheck,
    project,
    prometheus_targets,
)
from tests.support.dns import DnsServer, Says
from tests.support.process import Process

SERVICES = project(BASE).services
NAME = "vllm"
MODEL = SERVICES[NAME].command[SERVICES[NAME].command.index("--model") + 1]


class Up:
    """What `docker compose up` starts, but for Prometheus. `scale` first; every process ends with the `with` block."""

    def __init__(self, folder: Path, dns: DnsServer, processes: ExitStack) -> None:
        rng = random.Random()  # elsewhere on the loopback network each time: the ports are those of the files
        self._network = f"127.{rng.randrange(1, 255)}.{rng.randrange(1, 255)}"
        self._dns = dns
        self._processes = processes
        self.servers: list[Process] = []
        self.address = f"{self._network}.1"
        tree = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
        for listener in ("listen", "admin"):
            assert tree[listener].startswith("0.0.0.0:")
            tree[listener] = self._at(tree[listener], self.address)
        tree["dns"]["nameservers"] = [dns.address]
        self._config = folder / "lbproxy.yaml"
        self._config.write_text(yaml.safe_dump(tree))
        settings = parse(self._config.read_text(), environ={})
        self.url = f"http://{settings.listen}"
        read = SERVICES["lbproxy"].command
        assert SERVICES["lbproxy"].mounts[read[-1]].endswith("/lbproxy.yaml")
        self.lbproxy = processes.enter_context(Process(*read[:-1], str(self._config)))

    @staticmethod
    def _at(text: str, address: str) -> str:
        return text.replace("0.0.0.0", address)

    @property
    def addresses(self) -> list[str]:
        """Of the servers."""
        return [f"{self._network}.{number}" for number in range(2, 2 + len(self.servers))]

    @property
    def endpoints(self) -> set[str]:
        """As lbproxy calls the servers."""
        (endpoint,) = parse(SETTINGS.read_text(encoding="utf-8"), environ={}).endpoints
        return {f"{one}:{endpoint.url.rpartition(':')[2]}" for one in self.addresses}

    async def scale(self, count: int) -> None:
        """`docker compose up -d --scale vllm=COUNT`, upwards."""
        while len(self.servers) < count:
            command = SERVICES[NAME].command
            address = f"{self._network}.{2 + len(self.servers)}"
            server = self._processes.enter_context(Process(*(self._at(word, address) for word in command)))
            await asyncio.to_thread(server.wait_for, "at http://")
            self.servers.append(server)
        self._dns.zone[NAME] = Says(a=self.addresses)

    def targets(self, name: str) -> list[str]:
        """The addresses that a service's name has."""
        return {NAME: self.addresses, "lbproxy": [self.address]}[name]


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[Up]:
    async with DnsServer() as dns:
        with ExitStack() as processes:
            yield Up(folder, dns, processes)


async def healthy(command: Sequence[str], address: str) -> bool:
    """What a health check says, which in a container asks that container."""
    words = [word.replace("127.0.0.1", address) for word in command]
    assert words[0] == "python"
    done = await asyncio.to_thread(subprocess.run, [sys.executable, *words[1:]], capture_output=True, check=False)
    return done.returncode == 0


async def until_healthy(service: Service, address: str) -> None:
    assert service.healthcheck is not None
    async with asyncio.timeout(60):
        while not await healthy(service.healthcheck.command, address):
            pass


async def chat(client: AsyncOpenAI) -> str:
    """One answer, and which endpoint gave it."""
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "Hello, who are you?"}]
    )
    assert raw.parse().choices[0].message.content
    return str(raw.headers["x-lbproxy-endpoint"])


async def until_served_by(client: AsyncOpenAI, endpoints: set[str]) -> None:
    """Chat, four at a time, until each of these endpoints has answered, and none but these."""
    seen: set[str] = set()
    async with asyncio.timeout(60):
        while not endpoints <= seen:
            seen |= set(await asyncio.gather(*(chat(client) for _ in range(4))))
    assert seen == endpoints


def client_of(it: Up) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_up_then_scale(tmp_path: Path) -> None:
    """All containers of the service are used, one that is added later too; nothing is restarted."""

    async def main() -> None:
        async with up(tmp_path) as it, client_of(it) as client:
            check = SERVICES["lbproxy"].healthcheck
            assert check is not None
            await asyncio.to_thread(it.lbproxy.wait_for, "listens on")
            assert await healthy(image_healthcheck(), it.address), "it lives"
            assert not await healthy(check.command, it.address), "and is not ready without a server"

            await it.scale(SERVICES[NAME].deploy.replicas)
            for address in it.addresses:
                await until_healthy(SERVICES[NAME], address)
            await until_healthy(SERVICES["lbproxy"], it.address)
            assert len(it.endpoints) == 3
            await until_served_by(client, it.endpoints)

            await it.scale(4)
            await until_served_by(client, it.endpoints)

            assert it.lbproxy.stop() == 0
            assert not await healthy(image_healthcheck(), it.address), "it lives no more"
            assert "Traceback" not in it.lbproxy.output

    run(main(), timeout_s=110)


def test_prometheus_finds_its_targets(tmp_path: Path) -> None:
    """Each job, where prometheus.yml says that it is: a page that parses and shows what the job is for."""
    shows = {"lbproxy": "lbproxy_endpoint_up", NAME: "vllm:num_requests_running"}

    async def main() -> None:
        async with up(tmp_path) as it, httpx.AsyncClient() as http:
            await it.scale(2)
            await until_healthy(SERVICES["lbproxy"], it.address)
            scraped = []
            for target in prometheus_targets():
                if target.name not in SERVICES:
                    continue  # of a profile
                for address in it.targets(target.name):
                    page = await http.get(f"http://{address}:{target.port}{target.path}")
                    assert page.status_code == 200
                    families = [family.name for family in text_string_to_metric_families(page.text)]
                    assert shows[target.job] in families
                    scraped.append(target.job)
            assert sorted(scraped) == ["lbproxy", NAME, NAME]

    run(main(), timeout_s=110)


def test_down_in_the_order_of_depends_on_lets_a_stream_finish(tmp_path: Path) -> None:
    """`docker compose down`: lbproxy first, its servers when it has ended."""
    assert NAME in SERVICES["lbproxy"].depends_on

    async def main() -> None:
        async with up(tmp_path) as it, client_of(it) as client:
            await it.scale(1)
            await until_healthy(SERVICES["lbproxy"], it.address)
            tokens, events, reason = 600, 0, None
            stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=tokens, stream=True)
            async for event in stream:
                events += 1
                reason = event.choices[0].finish_reason
                if events == 1:
                    stopping = asyncio.create_task(asyncio.to_thread(it.lbproxy.stop))
                    await until(
                        lambda: "stopping: 1 running requests" in it.lbproxy.read(), "it was told while it streams"
                    )
            assert (events, reason) == (tokens, "length")
            assert await stopping == 0
            assert '"message":"stopped: 0 requests were ended before they were complete"' in it.lbproxy.output
            assert it.servers[0].stop() == 0

    run(main(), timeout_s=110)
