"""Reads one endpoint's own metrics page, several times a second, for ever.

It turns pages into `LoadMetrics` reports and keeps a `ScrapeStatus` of how that goes, which telemetry shows. A scrape
that fails reports nothing: the last gauges age, and the Balancer stops believing them. Invariants:

- One scrape at a time per endpoint; one that takes longer than the interval delays the next.
- Gauges are dated by when the scrape was sent, and the Balancer hears of that moment too: what of the load is ours is
  counted there and then.
- An endpoint that is not up is not scraped: it gets no requests, and the prober alone looks after it.
- What goes wrong is logged when it begins and when it ends, never once per scrape.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lbproxy.config import ScrapeSettings
from lbproxy.control.prober import JITTER
from lbproxy.core.engines import ENGINES, Reading, detect, read_metrics
from lbproxy.core.retry import UpstreamError
from lbproxy.core.types import Endpoint, EndpointSpec, Health, LoadMetrics
from lbproxy.net.fetch import fetch
from lbproxy.net.pool import ConnectionPool, Origin
from lbproxy.runtime import Runtime

logger = logging.getLogger("lbproxy")

DEFAULT_PATH = "/metrics"
"""Where the page of an engine that is not known yet is looked for."""
SLOW_INTERVAL_S = 5.0
"""Between scrapes that are not expected to succeed."""
FAILURES_UNTIL_SLOW = 10
"""In a row. At the default interval that is 2 s: a server that restarts or is overloaded is not slowed down for."""

OK = "ok"


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
    """Scrapes by result: `ok`, a `FailureKind`'s value, `status`, `not_metrics`, `unknown_engine` or `no_load`."""
    last_duration_s: float | None = None
    missing: dict[str, bool] = field(default_factory=dict)
    """For each signal that the engine should have: whether the last readable page lacked it."""


def metrics_place(endpoint: EndpointSpec) -> tuple[Origin, str] | None:
    """Where an endpoint's metrics stand: origin and path (with query); None if it is not to be scraped."""
    place = endpoint.metrics
    if place is None:
        return None
    if place == "auto":
        table = ENGINES.get(endpoint.engine)
        place = DEFAULT_PATH if table is None else table.metrics_path
    if place.startswith("/"):
        return Origin.parse(endpoint.base_url), place
    url = urlsplit(place)
    return Origin.parse(place), (url.path or "/") + (f"?{url.query}" if url.query else "")


async def fetch_page(
    place: tuple[Origin, str], connections: ConnectionPool, *, timeout_s: float, max_bytes: int
) -> bytes:
    """One metrics page. Raises ScrapeError also if the answer is no such page."""
    origin, path = place
    try:
        answer = await fetch(connections, origin, path, timeout_s=timeout_s, max_bytes=max_bytes)
    except UpstreamError as error:
        raise ScrapeError(error.kind.value, error.detail, answered=False) from error
    if answer.status != 200:
        raise ScrapeError("status", f"{origin}: GET {path} answered {answer.status}")
    kind = answer.content_type.partition(";")[0].strip()
    if kind == "text/html" or "json" in kind:
        raise ScrapeError("not_metrics", f"{origin}: GET {path} is {kind}, not Prometheus text")
    return answer.body


class Scraper:
    """Scrapes one endpoint. `run` is a loop for `runtime.supervise`."""

    def __init__(
        self,
        endpoint: Endpoint,
        runtime: Runtime,
        connections: ConnectionPool,
        settings: ScrapeSettings,
        rng: random.Random,
    ) -> None:
        self.endpoint = endpoint
        self.status = ScrapeStatus(engine=None if endpoint.engine == "auto" else endpoint.engine)
        self._runtime = runtime
        self._connections = connections
        self._settings = settings
        self._rng = rng
        self._previous: LoadMetrics | None = None
        self._failures = 0
        """In a row."""
        self._in_vain = False
        """The last scrape was answered, but by nothing that a known engine would say."""
        self._good_at: float | None = None
        """When the last good scrape was sent, or scraping began."""
        self._complained = False
        self._missing_logged: set[str] = set()

    async def run(self) -> None:
        """Until cancelled; returns at once if the endpoint is not to be scraped."""
        place = metrics_place(self.endpoint)
        if place is None:
            return
        while True:
            began_at = self._runtime.now()
            interval_s = self._settings.interval
            if self._runtime.health(self.endpoint.uid) is Health.UP:
                await self._scrape(place)
                if self._in_vain or self._failures >= FAILURES_UNTIL_SLOW:
                    interval_s = max(interval_s, SLOW_INTERVAL_S)
            else:
                self._failures, self._good_at = 0, None
            due_at = began_at + interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(max(0.0, due_at - self._runtime.now()))

    async def _scrape(self, place: tuple[Origin, str]) -> None:
        sent_at = self._runtime.now()
        if self._good_at is None:
            self._good_at = sent_at
        self._runtime.scrape_sent(self.endpoint.uid)
        try:
            timeout_s, max_bytes = self._settings.timeout, self._settings.page
            page = await fetch_page(place, self._connections, timeout_s=timeout_s, max_bytes=max_bytes)
            metrics = self._read(page, sent_at)
        except ScrapeError as error:
            self._failed(error, sent_at)
        else:
            self._succeeded(metrics)
        self.status.last_duration_s = self._runtime.now() - sent_at

    def _read(self, page: bytes, sent_at: float) -> LoadMetrics:
        """What the page says. Raises ScrapeError if that is nothing about load."""
        reading = self._read_as(self.status.engine, page, sent_at)
        if reading.metrics is None and self.endpoint.engine == "auto":
            # The first page, or another server now stands at this address: what the old one said is void.
            self._previous = None
            self._missing_logged.clear()
            self.status.engine = detect(page)
            reading = self._read_as(self.status.engine, page, sent_at)
        if self.status.engine is None:
            self.status.missing = {}
            raise ScrapeError("unknown_engine", "no known engine's metrics are on the page")
        signals = ENGINES[self.status.engine].signals()
        self.status.missing = {name: name in reading.missing for name, specs in signals.items() if specs}
        if reading.metrics is None:
            raise ScrapeError("no_load", f"none of {self.status.engine}'s metrics is on the page")
        self._log_missing(reading)
        return reading.metrics

    def _read_as(self, engine: str | None, page: bytes, sent_at: float) -> Reading:
        if engine is None:
            return Reading(None, ())
        return read_metrics(page, ENGINES[engine], scraped_at=sent_at, previous=self._previous)

    def _succeeded(self, metrics: LoadMetrics) -> None:
        self._count(OK)
        self._previous = metrics
        self._good_at = metrics.scraped_at
        self._failures, self._in_vain = 0, False
        self._runtime.report_scrape(self.endpoint.uid, metrics)
        if self._complained:
            self._complained = False
            logger.info("the metrics of %s can be read again", self.endpoint.name, extra=self._extra())

    def _failed(self, error: ScrapeError, sent_at: float) -> None:
        self._count(error.result)
        self._failures += 1
        self._in_vain = error.answered and self.status.engine is None
        assert self._good_at is not None
        hopeless = error.answered and OK not in self.status.results
        if not self._complained and (hopeless or sent_at - self._good_at > self._settings.stale_after):
            self._complained = True
            text = "the metrics of %s cannot be read, so only our own requests there count: %s"
            logger.warning(text, self.endpoint.name, error.detail, extra=self._extra())

    def _log_missing(self, reading: Reading) -> None:
        new = [name for name in reading.missing if name not in self._missing_logged]
        for name in new:
            self._missing_logged.add(name)
            text = "the metrics of %s lack %s, which %s should show"
            extra = {**self._extra(), "signal": name}
            logger.warning(text, self.endpoint.name, name, self.status.engine, extra=extra)

    def _extra(self) -> dict[str, object]:
        return {"event": "scrape", "endpoint": self.endpoint.name}

    def _count(self, result: str) -> None:
        self.status.results[result] = self.status.results.get(result, 0) + 1
