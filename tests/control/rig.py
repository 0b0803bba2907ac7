# SPDX-License-Identifier: Apache-2.0
"""A pool on a real event loop, with the loops that look after its endpoints, against scripted servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import httpx

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.health import HealthSettings
from lbproxy.control.admin.server import Admin
from lbproxy.control.probing.prober import Prober
from lbproxy.control.probing.scraper import Scraper, Scraping
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec
from lbproxy.core.engines.dialects import Engines
from tests.support.endpoint import ScriptedEndpoint, answer
from tests.support.pool import Pool, make_balancer

FAST_HEALTH = HealthSettings(interval=0.01, down_interval=0.01, timeout=5.0)
FAST_SCRAPE = ScrapeSettings(interval=0.01, timeout=5.0)


def spec(
    server: ScriptedEndpoint,
    name: str = "e1",
    *,
    metrics: str | None = "auto",
    health: str | None = "/health",
    engine: str = "auto",
) -> EndpointSpec:
    return EndpointSpec(name=name, base_url=server.url, engine=engine, metrics=metrics, health=health)


def model_list(*ids: str, parent: str | None = None) -> bytes:
    """A whole answer to GET /v1/models."""
    base = f',"parent":"{parent}"' if parent else ""
    entries = ",".join(f'{{"id":"{name}","object":"model"{base if name != parent else ""}}}' for name in ids)
    return answer(f'{{"object":"list","data":[{entries}]}}'.encode())


def page(text: bytes) -> bytes:
    """A whole answer to GET /metrics."""
    return answer(text, kind="text/plain; version=0.0.4; charset=utf-8")


class Rig(Pool):
    def __init__(self, health: HealthSettings, scrape: ScrapeSettings, policy: str, *specs: EndpointSpec) -> None:
        super().__init__(make_balancer(policy=policy, health=health, scrape=scrape), specs)
        self.health = health
        self.scrape = scrape
        self.rng = random.Random(1)
        self.scraping = Scraping(self.connections, scrape, Engines(), self.rng)

    def in_memory(self) -> list[str]:
        """The models that the first endpoint has loaded, or is loading."""
        shown = self.balancer.snapshot(now=self.runtime.now()).in_memory
        return [one.model or "" for one in shown.get(self.endpoints[0].uid, [])]

    def take_down(self, endpoint: Endpoint) -> None:
        for _ in range(self.health.fall):
            self.runtime.report_health(endpoint.uid, False, "test")

    def prober(self, endpoint: Endpoint) -> Prober:
        return Prober(endpoint, self.runtime, self.connections, self.health, self.rng)

    def scraper(self, endpoint: Endpoint) -> Scraper:
        return Scraper(endpoint, self.runtime, self.scraping)


@asynccontextmanager
async def rig(
    *specs: EndpointSpec,
    health: HealthSettings = FAST_HEALTH,
    scrape: ScrapeSettings = FAST_SCRAPE,
    policy: str = "least-request",
) -> AsyncIterator[Rig]:
    made = Rig(health, scrape, policy, *specs)
    try:
        yield made
    finally:
        made.connections.close()


@asynccontextmanager
async def running(*loops: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Run loops until the block ends; what one raises fails the test."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop()) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def scraped(r: Rig) -> AsyncIterator[Scraper]:
    """Every endpoint is up, and the first one is scraped until the block ends."""
    r.bring_up()
    scraper = r.scraper(r.endpoints[0])
    async with running(scraper.run):
        yield scraper


ADMIN_TOKEN = "correct-horse-battery-staple"
"""What changes need on every listener of `admin_site`."""
BEARER = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


class HasAdmin(Protocol):
    admin: Admin


S = TypeVar("S", bound=HasAdmin)


@asynccontextmanager
async def admin_site(make: Callable[[Rig], S]) -> AsyncIterator[tuple[S, httpx.AsyncClient]]:
    """What `make` makes of a pool of two endpoints that are not there, and a client of its admin server, which runs."""
    specs = [EndpointSpec(name=f"e{n}", base_url=f"http://10.0.0.{n}:8000") for n in (1, 2)]
    async with rig(*specs) as pool:
        made = make(pool)
        made.admin.access.made.text, made.admin.access.made.path = ADMIN_TOKEN, "/nowhere"
        port = await made.admin.start("127.0.0.1", 0)
        assert port == made.admin.port > 0
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                yield made, client
        finally:
            await made.admin.close()
