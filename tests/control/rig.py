"""A pool on a real event loop, with the loops that look after its endpoints, against scripted servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from lbproxy.config import AdmissionSettings, HealthSettings, ScrapeSettings
from lbproxy.control.prober import Prober
from lbproxy.control.scraper import Scraper
from lbproxy.core.balancer import Balancer
from lbproxy.core.policy import LeastRequest
from lbproxy.core.types import (
    Endpoint,
    EndpointSnapshot,
    EndpointSpec,
    EndpointUid,
    RequestRecord,
    Transition,
)
from lbproxy.net.pool import ConnectionPool
from lbproxy.runtime import Runtime
from tests.support.scripted import Scripted

FAST_HEALTH = HealthSettings(interval=0.01, down_interval=0.01, timeout=5.0)
FAST_SCRAPE = ScrapeSettings(interval=0.01, timeout=5.0)


def spec(
    server: Scripted, name: str = "e1", *, metrics: str | None = "auto", health: str | None = "/health"
) -> EndpointSpec:
    return EndpointSpec(name=name, base_url=server.url, metrics=metrics, health=health)


class Watched:
    """A sink that remembers transitions, each with the models that were known at that moment."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.models_then: list[tuple[str, ...] | None] = []
        self.rig: Rig | None = None

    def request(self, record: RequestRecord) -> None:
        raise AssertionError("no requests here")

    def transition(self, transition: Transition) -> None:
        assert self.rig is not None
        self.transitions.append(transition)
        self.models_then.append(self.rig.seen(transition.endpoint.name).models)


class SpyRuntime(Runtime):
    """Remembers when scrapes were announced."""

    scrapes_sent: list[EndpointUid]

    def scrape_sent(self, uid: EndpointUid) -> None:
        self.scrapes_sent.append(uid)
        super().scrape_sent(uid)


class Rig:
    def __init__(self, health: HealthSettings, scrape: ScrapeSettings) -> None:
        self.health = health
        self.scrape = scrape
        self.sink = Watched()
        self.sink.rig = self
        self.rng = random.Random(1)
        balancer = Balancer(
            LeastRequest(), admission=AdmissionSettings(), health=health, scrape=scrape, rng=random.Random(2)
        )
        self.runtime = SpyRuntime(balancer, [self.sink])
        self.runtime.scrapes_sent = []
        self.connections = ConnectionPool()
        self.endpoints: list[Endpoint] = []

    def add(self, *specs: EndpointSpec) -> list[Endpoint]:
        self.endpoints = self.runtime.set_endpoints(specs).added
        return self.endpoints

    def bring_up(self) -> None:
        for endpoint in self.endpoints:
            self.runtime.report_health(endpoint.uid, True, "test")

    def take_down(self, endpoint: Endpoint) -> None:
        for _ in range(self.health.fall):
            self.runtime.report_health(endpoint.uid, False, "test")

    def prober(self, endpoint: Endpoint) -> Prober:
        return Prober(endpoint, self.runtime, self.connections, self.health, self.rng)

    def scraper(self, endpoint: Endpoint) -> Scraper:
        return Scraper(endpoint, self.runtime, self.connections, self.scrape, self.rng)

    def seen(self, name: str = "e1") -> EndpointSnapshot:
        return next(one for one in self.runtime.snapshot().endpoints if one.endpoint.name == name)


@asynccontextmanager
async def rig(
    *specs: EndpointSpec, health: HealthSettings = FAST_HEALTH, scrape: ScrapeSettings = FAST_SCRAPE
) -> AsyncIterator[Rig]:
    made = Rig(health, scrape)
    made.add(*specs)
    try:
        yield made
    finally:
        made.connections.close()


@asynccontextmanager
async def running(*loops: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run loops until the block ends; what one raises fails the test."""

    async def run(loop: Callable[[], Awaitable[None]]) -> None:
        await loop()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(loop)) for loop in loops]
        yield
        for task in tasks:
            task.cancel()
