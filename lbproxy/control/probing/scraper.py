# SPDX-License-Identifier: Apache-2.0
"""Reads one endpoint's own metrics page, several times a second, for ever.

It turns pages into `LoadMetrics` reports and keeps a `ScrapeStatus` of how that goes, which telemetry shows. A scrape
that fails reports nothing: the last gauges age, and the Balancer stops believing them. Invariants:

- One scrape at a time per endpoint; one that takes longer than the interval delays the next.
- Gauges are dated by when the scrape was sent, and the Balancer hears of that moment too: what of the load is ours is
  counted there and then.
- An endpoint that is not up is not scraped: it gets no requests, and the prober alone looks after it.
- Where load reports come with answers, a scrape is left out as long as nothing grows too old for it.
- All scrapers together stay below a rate, so that a large fleet does not cost a core.
- What goes wrong is logged when it begins and when it ends, never once per scrape.
- A page costs a bounded share of the processor, whatever is on it, and another number of ranks counts once several
  pages in a row show it.

Which engine it is and where its page stands is found out with the first scrape, unless the settings say it, and again
when another server seems to have taken its place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.shown import without_values
from lbproxy.control.probing.prober import JITTER
from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec
from lbproxy.core.engines.dialects import Engines, MetricsLocation
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.readings import MAX_LORA, PageReader, PageReading
from lbproxy.core.engines.server_info import connector_of
from lbproxy.core.requests.retry import UpstreamError
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.above import below
from lbproxy.net.dialing.origin import Origin

logger = logging.getLogger("lbproxy")

SLOW_INTERVAL_S = 5.0
"""The interval of scrapes that are not expected to succeed."""
FAILURES_UNTIL_SLOW = 10
"""Failed scrapes in a row. At the default interval that is 2 s: a restart or an overload is not slowed down for."""
MAX_SCRAPES_PER_S = 500.0
"""Of all endpoints together, as long as gauges do not grow stale over it: 100 endpoints every 200 ms, about an eighth
of a core (benchmarks/scrape.py)."""
IDLE_FACTOR = 2.5
"""An endpoint that showed no request at all is asked so many times less often."""

READING_SHARE = 0.02
"""Share of a processor for one endpoint's pages: one that takes 10 ms is read every half second; vLLM's takes .1."""
PAGES_AGREE = 3
"""Pages in a row that show another number of ranks before it is believed; the first page of all is at once."""

RANKS = "ranks"
"""Stands among the signals that were logged as missing."""
OK = "ok"
LEFT_OUT = "left_out"


class ScrapeError(Exception):
    """There is no page, or it says nothing about load. `result` is a metric label: one of few words.

    `answered`: something that speaks HTTP is there, so the same scrape will go no better next time.
    """

    def __init__(self, result: str, detail: str, *, answered: bool = True) -> None:
        super().__init__(detail)
        self.result = result
        self.detail = detail
        self.answered = answered


@dataclass(slots=True)
class ScrapeStatus:
    """How scraping one endpoint goes. Written by its Scraper, read by telemetry."""

    engine: str | None = None
    """From the settings, or recognised; None = not yet, or no more."""
    results: dict[str, int] = field(default_factory=dict)
    """Scrapes by result: `ok`, a `FailureKind`'s value, `status`, `not_metrics`, `unknown_engine` or `no_load`; and
    `left_out`, because load reports came."""
    last_duration_s: float | None = None
    read_s: float = 0.0
    """How long the last page took to read, once it was there."""
    missing: dict[str, bool] = field(default_factory=dict)
    """For each signal that the engine should have: whether the last readable page lacked it."""


# --- Where the page is ------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A page that may be an endpoint's metrics."""

    origin: Origin
    path: str
    """With the query."""
    place: MetricsLocation | None
    """The usual place that this is; None = the settings say that the page is here."""
    key: ApiKey | None = None
    """What the server there is shown: the endpoint's key, if it is the endpoint itself."""

    def __str__(self) -> str:
        return f"{self.origin.url}{self.path}"


def metrics_targets(endpoint: EndpointSpec, engines: Engines) -> Sequence[Target]:
    """Where an endpoint's metrics may stand, the likeliest first; empty if it is not to be scraped."""
    place = endpoint.metrics
    if place is None:
        return []
    own = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
    if place == "auto":
        found: dict[tuple[Origin, str], Target] = {}
        for one in engines.locations(endpoint.engine):
            target = _target(endpoint, own, one.port, one.path, one)
            found.setdefault((target.origin, target.path), target)
        return list(found.values())
    if place.startswith("/"):
        return [_target(endpoint, own, None, place)]
    if place.startswith(":"):
        port, _, path = place[1:].partition("/")
        return [_target(endpoint, own, int(port), f"/{path}")]
    url = urlsplit(place)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    there = Origin.parse(f"{url.scheme}://{url.netloc}", endpoint.tls, endpoint.proxy)
    return [Target(there, path, None, endpoint.api_key if there == own else None)]


def _target(
    endpoint: EndpointSpec, own: Origin, port: int | None, path: str, place: MetricsLocation | None = None
) -> Target:
    """A page of the endpoint's host. At another port another program may listen: the key is none of its business.

    A Unix socket has no other ports.
    """
    there = own if port is None or own.socket_path is not None else Origin((own[0], port), own[2], own[3])
    if port is None:
        path = below(endpoint.base_url, path)
    return Target(there, path, place, endpoint.api_key if there == own else None)


async def fetch_page(target: Target, connections: ConnectionPool, *, timeout_s: float, max_bytes: int) -> bytes:
    """One metrics page. Raises ScrapeError also if the response is no such page."""
    origin, path = target.origin, target.path
    try:
        answer = await fetch(connections, origin, path, timeout_s=timeout_s, max_bytes=max_bytes, key=target.key)
    except UpstreamError as error:
        raise ScrapeError(error.kind.value, error.detail, answered=False) from error
    path = without_values(path)
    if answer.status != 200:
        raise ScrapeError("status", f"{origin}: GET {path} returned {answer.status}")
    kind = answer.content_type.partition(";")[0].strip()
    if kind == "text/html" or "json" in kind:
        raise ScrapeError("not_metrics", f"{origin}: GET {path} is {kind}, not Prometheus text")
    return answer.body


class FoundPage(NamedTuple):
    """An endpoint's page, and whose it is."""

    target: Target
    engine: str
    page: bytes


async def find_page(endpoint: EndpointSpec, engines: Engines, ask: Callable[[Target], Awaitable[bytes]]) -> FoundPage:
    """The first page that is one of the endpoint's engine; of any, if that is auto.

    Raises the ScrapeError of the likeliest place if there is none. A server that does not answer at all is not asked
    for its other pages.
    """
    first: ScrapeError | None = None
    for target in metrics_targets(endpoint, engines):
        try:
            page = await ask(target)
            engine = engines.detect(page, target.place) if endpoint.engine == "auto" else endpoint.engine
            if engine is not None:
                return FoundPage(target, engine, page)
            raise ScrapeError("unknown_engine", "no known engine's metrics are on the page")
        except ScrapeError as error:
            first = first or error
            if not error.answered and (target.place is None or target.place.port is None):
                break
    assert first is not None, "an endpoint that is not scraped is not asked"
    raise first


# --- Again and again --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scraping:
    """What all scrapers of a process share."""

    connections: ConnectionPool
    settings: ScrapeSettings
    engines: Engines
    rng: random.Random
    found_ranks: Callable[[Endpoint, int], None] = lambda _, __: None
    """Called if the ranks on the page of an endpoint with `ranks: auto` are not those that are its endpoints."""
    running: int = 0
    """Scrapers that run."""

    def interval_s(self, *, idle: bool) -> float:
        """Seconds between two scrapes of an endpoint: at least two while its gauges are believed."""
        wanted = self.settings.interval * (IDLE_FACTOR if idle else 1.0)
        longest = max(self.settings.interval, self.settings.stale_after / 2)
        return min(max(wanted, self.running / MAX_SCRAPES_PER_S), longest)


class Scraper:
    """Scrapes one endpoint. `run` is a loop for `control.loops.supervise`."""

    def __init__(self, endpoint: Endpoint, runtime: Runtime, shared: Scraping) -> None:
        self.endpoint = endpoint
        self.status = ScrapeStatus(engine=None if endpoint.engine == "auto" else endpoint.engine)
        self._runtime = runtime
        self._shared = shared
        self._target: Target | None = None
        """Where the page was found, with `_reader`. None = to be looked for."""
        self._reader: PageReader | None = None
        self._sent_at = 0.0
        """When the last question for a page was sent."""
        self._idle = False
        """The last good scrape showed no request."""
        self._failures = 0
        """Failed scrapes in a row."""
        self._in_vain = False
        """The last scrape was answered, but by nothing that a known engine would say."""
        self._good_at: float | None = None
        """When the last good scrape was sent, or scraping began."""
        self._asks_load: bool | None = None
        """Its responses are to bring load reports. None = what an earlier scraper of it found out."""
        self._complained = False
        self._missing_logged: set[tuple[str | None, str]] = set()
        """By engine, as a page may be of another one each time."""
        self._shown = 0, 0
        """The number of ranks on the last page, and how many pages in a row showed it."""

    async def run(self) -> None:
        """Until cancelled; returns at once if the endpoint is not to be scraped."""
        if self.endpoint.metrics is None:
            engine = self.status.engine
            self._ask_load(
                engine is not None and self._shared.engines.tables[engine].wants_load_reports(is_single=True)
            )
            return
        self._shared.running += 1
        came_up = asyncio.Event()
        try:
            with self._runtime.wakers.kept(self.endpoint.url_key, came_up.set):
                while True:
                    due_at = await self.turn()
                    due = self._runtime.loop.call_later(due_at - self._runtime.now(), came_up.set)
                    await came_up.wait()
                    due.cancel()
                    came_up.clear()
        finally:
            self._shared.running -= 1

    async def turn(self) -> float:
        """One scrape, if one is needed now. Returns when to look again."""
        began_at = self._runtime.now()
        interval_s = self._shared.settings.interval
        if self._runtime.balancer.wants_scrape(self.endpoint.uid):
            if self._can_wait(began_at):
                self._count(LEFT_OUT)
            else:
                await self._scrape()
            interval_s = self._shared.interval_s(idle=self._idle)
            if self._in_vain or self._failures >= FAILURES_UNTIL_SLOW:
                interval_s = max(interval_s, SLOW_INTERVAL_S)
            interval_s = max(interval_s, self.status.read_s / READING_SHARE)
        else:
            self._failures, self._good_at = 0, None
        return began_at + interval_s * self._shared.rng.uniform(1 - JITTER, 1 + JITTER)

    def _can_wait(self, now: float) -> bool:
        """A load report came since the last turn, and what only a page says will not be too old at the next one."""
        if self._failures or self._target is None or self._good_at is None:
            return False
        interval_s = self._shared.interval_s(idle=self._idle)
        lately = now - self._runtime.balancer.endpoints.reported_at(self.endpoint.uid) <= interval_s
        return lately and now + interval_s - self._good_at <= self._shared.settings.stale_after / 2

    async def _scrape(self) -> None:
        began_at = self._runtime.now()
        if self._good_at is None:
            self._good_at = began_at
        try:
            if self._target is None:
                found = await find_page(self.endpoint, self._shared.engines, self._ask)
                self._adopt(found.target, found.engine)
                page = found.page
            else:
                page = await self._ask(self._target)
            reading_at = time.perf_counter()
            try:
                metrics, ranks = self._read(page)
            finally:
                self.status.read_s = time.perf_counter() - reading_at
        except ScrapeError as error:
            self._failed(error, began_at)
        else:
            self._succeeded(metrics, ranks)
            self._note_connector(page)
        self.status.last_duration_s = self._runtime.now() - began_at

    async def _ask(self, target: Target) -> bytes:
        self._sent_at = self._runtime.now()
        self._runtime.balancer.scrape_sent(self.endpoint.uid)
        timeout_s, max_bytes = self._shared.settings.timeout, self._shared.settings.page
        return await fetch_page(target, self._shared.connections, timeout_s=timeout_s, max_bytes=max_bytes)

    def _adopt(self, target: Target, engine: str) -> None:
        """From now on the endpoint is read so: what a server said that stood here before is void."""
        self._target = target
        self._reader = PageReader(self._shared.engines.tables[engine], keep_s=self._shared.settings.stale_after)
        self.status.engine = engine

    def _note_connector(self, page: bytes) -> None:
        """What vLLM shows of how it hands KV caches over: not its role. It is void once another process answers, which
        the same page may have shown.
        """
        state = self._runtime.balancer.endpoints.get(self.endpoint.uid)
        if (
            self.status.engine != "vllm"
            or self.endpoint.connector is not None
            or state is None
            or state.reported.handover
        ):
            return
        if (connector := connector_of(page)) is not None:
            self._runtime.report_role(self.endpoint.uid, Handover(Role.BOTH, connector))

    def _forget(self) -> None:
        """Look anew, with the next scrape, for what this is and where its page stands."""
        self._target = self._reader = None
        self.status.engine = None if self.endpoint.engine == "auto" else self.endpoint.engine
        self.status.missing = {}

    def _read(self, page: bytes) -> tuple[LoadMetrics, Sequence[LoadMetrics]]:
        """What the page says, of the server and of each of its ranks. Raises ScrapeError if that is nothing about
        load.
        """
        assert self._target is not None
        reading = self._reading(page)
        if reading.metrics is None and self.endpoint.engine == "auto":
            # Perhaps another server now stands at this address.
            engine = self._shared.engines.detect(page, self._target.place)
            if engine is None:
                self._forget()
                raise ScrapeError("unknown_engine", "no known engine's metrics are on the page")
            if engine != self.status.engine:
                self._adopt(self._target, engine)
                reading = self._reading(page)
        if reading.metrics is None:
            raise ScrapeError("no_load", f"none of {self.status.engine}'s metrics is on the page")
        self._log_missing(reading)
        return reading.metrics, reading.ranks

    def _reading(self, page: bytes) -> PageReading:
        assert self._reader is not None
        assert self.status.engine is not None
        reading = self._reader.read(page, scraped_at=self._sent_at, wall_time=time.time())
        signals = self._shared.engines.tables[self.status.engine].signals()
        names = [name for name, signal in signals.items() if signal]
        if MAX_LORA in reading.missing or (reading.metrics is not None and reading.metrics.lora is not None):
            names.append(MAX_LORA)
        self.status.missing = {name: name in reading.missing for name in names}
        return reading

    def _succeeded(self, metrics: LoadMetrics, ranks: Sequence[LoadMetrics]) -> None:
        self._count(OK)
        self._good_at = metrics.scraped_at
        self._failures, self._in_vain = 0, False
        self._idle = metrics.waiting == 0 and metrics.running == 0 and not metrics.deferred
        self._runtime.report_scrape(self.endpoint.uid, metrics, ranks)
        self._compare_ranks(len(ranks) or 1)
        assert self._reader is not None
        assert self.status.engine is not None
        table = self._shared.engines.tables[self.status.engine]
        self._ask_load(table.wants_load_reports(is_single=self._reader.is_single))
        if self._complained:
            self._complained = False
            logger.info("the metrics of %s can be read again", self.endpoint.server, extra=self._extra())

    def _compare_ranks(self, shown: int) -> None:
        known = len(self._runtime.ranks(self.endpoint.uid))
        before, in_row = self._shown
        self._shown = shown, in_row + 1 if shown == before else 1
        if shown == known:
            return
        if self.endpoint.ranks is None:
            if not in_row or self._shown[1] >= PAGES_AGREE:
                self._shared.found_ranks(self.endpoint, shown)
        elif (None, RANKS) not in self._missing_logged:
            self._missing_logged.add((None, RANKS))
            text = "%s: the settings say %d data-parallel ranks, and its metrics show %d"
            logger.warning(text, self.endpoint.server, known, shown, extra=self._extra())

    def _ask_load(self, ask: bool) -> None:
        if ask is not self._asks_load:
            self._asks_load = ask
            self._runtime.balancer.endpoints.ask_load(self.endpoint.uid, ask)

    def _failed(self, error: ScrapeError, sent_at: float) -> None:
        self._count(error.result)
        self._failures += 1
        self._idle = False
        self._shown = 0, 0  # what comes next may be another process, whose first page counts
        if self._failures == FAILURES_UNTIL_SLOW:
            self._forget()
        self._in_vain = error.answered and self.status.engine is None
        assert self._good_at is not None
        hopeless = error.answered and OK not in self.status.results
        if not self._complained and (hopeless or sent_at - self._good_at > self._shared.settings.stale_after):
            self._complained = True
            text = "the metrics of %s cannot be read, so only lbproxy's own requests there count: %s"
            logger.warning(text, self.endpoint.server, error.detail, extra=self._extra())

    def _log_missing(self, reading: PageReading) -> None:
        engine = self.status.engine
        for name in reading.missing:
            if (engine, name) in self._missing_logged:
                continue
            self._missing_logged.add((engine, name))
            text = "the metrics of %s lack %s, which %s should export"
            extra = {**self._extra(), "signal": name}
            logger.warning(text, self.endpoint.server, name, self.status.engine, extra=extra)

    def _extra(self) -> dict[str, object]:
        return {"event": "scrape", "endpoint": self.endpoint.server}

    def _count(self, result: str) -> None:
        self.status.results[result] = self.status.results.get(result, 0) + 1
