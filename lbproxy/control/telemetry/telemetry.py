# SPDX-License-Identifier: Apache-2.0
"""What lbproxy tells of itself: every Prometheus family.

`Telemetry.ended` has each request counted (`families.requests`); all else happens in `page`, when somebody scrapes.
What belongs to an endpoint or to the queue is not counted here at all but read from the Balancer's snapshot at that
moment. Invariants:

- Names and labels are an interface: dashboards depend on them.
- Labels are bounded: endpoints by design, flows to the 100 that got most, flows with models to those that the Ledger
  counts; those of requests in `families.requests`.
- What an engine did not say, or said too long ago, has no sample. It is never 0.
- Series of an endpoint or model that is gone vanish.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from lbproxy import __version__
from lbproxy.control.discovery.discovery import Discovery
from lbproxy.control.families.common import (
    Loads,
    RequestTotals,
    Workers,
    add_to,
    counter,
    counters,
    flow_families,
    gauge,
    gauges,
    histogram,
    keep,
    load_families,
    render,
    source_families,
    state_families,
    token_families,
    worker_families,
)
from lbproxy.control.families.endpoints import one_per_name, render_endpoints
from lbproxy.control.families.features import Sleeping, kv_families, replica_families, scaling_families, sleep_families
from lbproxy.control.families.histogram import Histogram
from lbproxy.control.families.requests import RequestCounts
from lbproxy.control.probing.scraper import Scraper
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.engines.kv_events import KvStats
from lbproxy.core.observed.learned import EndpointLearned
from lbproxy.core.observed.ledger import Pair
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.replicas.shown import ReplicationFacts
from lbproxy.core.requests.request import Tokens
from lbproxy.driver.own_load import OwnLoad

logger = logging.getLogger("lbproxy")

MAX_TRANSITION_COUNTS: Final = 4096
"""About what 1,024 endpoints with the states that most know can have: then those that left are forgotten."""
SAMPLES_A_TURN: Final = 1000
"""Samples of a page that are written in one turn of the loop: it takes about 5 ms."""
LEARNED_A_TURN: Final = 250
"""Endpoints of which what was learned is read in one turn: about 3 ms."""
ENDPOINTS_A_TURN: Final = 50
"""With more endpoints than these the page is written in a thread."""

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Snapshots(Protocol):
    """Where the state of the pool is read: the Runtime."""

    def snapshot(self) -> PoolSnapshot:
        """Everything, now."""

    def used(self) -> Mapping[Pair, Tokens]:
        """Tokens since the start, by flow and model."""

    def learned_of(self, uids: Iterable[EndpointUid]) -> dict[EndpointUid, EndpointLearned]:
        """What was learned of these endpoints; empty under policies that learn nothing."""


@dataclass
class TelemetrySources:
    """Sources of families that are shown only where their feature is in use. Set by the owner."""

    sources: Discovery | None = None
    """How finding endpoints gets on."""
    load: Callable[[], OwnLoad] | None = None
    """What is open, what is refused and why."""
    workers: Callable[[], Workers | None] | None = None
    replicas: Callable[[], ReplicationFacts] | None = None
    kv_events: Mapping[str, KvStats] = field(default_factory=dict)
    """How the KV events of endpoints arrive, while any are read."""
    sleeping: Sleeping | None = None
    """Which endpoints sleep, while any may."""


class Telemetry:
    """A sink of the Runtime. Make it first, then tell it by `watch` what to read."""

    def __init__(self, log: ProcessLog) -> None:
        """`log`: of this process, of which some families are."""
        self.log = log
        self._pool: Snapshots | None = None
        self._scrapers: dict[EndpointUid, Scraper] = {}
        self.watched = TelemetrySources()
        self._requests = RequestCounts(lambda: self._forget_the_gone(self._snapshot()))
        self._transitions: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._ejections: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.lag = Histogram(LAG_BUCKETS)
        """How late the event loops are. The owner has it observe each tick."""
        self.models: Sequence[str] = ()
        """Those that the settings name, whoever serves them. Kept by who loads the settings."""
        self.loads = Loads()
        """How the settings were loaded. Kept by who loads them."""
        self._process = ProcessCollector(registry=None)

    def watch(self, pool: Snapshots) -> None:
        """What the gauges are read from."""
        self._pool = pool

    def watch_scrapes(self, scraper: Scraper) -> None:
        """Show how this scraper gets on, until its endpoint leaves the pool."""
        self._scrapers[scraper.endpoint.uid] = scraper

    # Sink

    def ended(self, records: list[RequestRecord]) -> None:
        """See runtime.Sink. 2 us each."""
        for record in records:
            self._requests.count(record)

    def totals(self) -> RequestTotals:
        """What was counted since the start."""
        return self._requests.totals()

    def transition(self, transition: Transition) -> None:
        """See runtime.Sink. One log line, and a count."""
        name, before, after = transition.endpoint.name, transition.before.value, transition.after.value
        self._transitions[name, after] += 1
        if transition.cause is not None:
            self._ejections[name, transition.cause.value] += 1
        if len(self._transitions) > MAX_TRANSITION_COUNTS:
            self._forget_the_gone(self._snapshot())
        level = logging.WARNING if transition.after in {Health.DOWN, Health.EJECTED} else logging.INFO
        extra = {"event": "transition", "endpoint": name, "from": before, "to": after, "reason": transition.reason}
        logger.log(level, "%s is %s: %s", name, after.replace("_", " "), transition.reason, extra=extra)

    # Page

    async def page(self) -> tuple[bytes, str]:
        """Everything in Prometheus text format, and its content type. About 0.1 ms for each endpoint.

        A page of a small fleet is made in one turn of the loop: under load each further turn may take long. What is
        large about a large one is written in a thread, and the loop gets a turn in between.
        """
        snapshot = self._snapshot()
        self._forget_the_gone(snapshot)
        endpoints, ejections = one_per_name(snapshot.endpoints), dict(self._ejections)
        learned = await self._learned([one.endpoint.uid for one in endpoints])
        if len(endpoints) > ENDPOINTS_A_TURN:
            pieces = await asyncio.to_thread(render_endpoints, endpoints, learned, ejections)
        else:
            pieces = render_endpoints(endpoints, learned, ejections)
        written = 0
        for family in self._families(snapshot):
            written += len(family.samples)
            if written > SAMPLES_A_TURN:
                written = 0
                await asyncio.sleep(0)
            pieces.append(render(family))
        pieces += await self._tokens()
        return b"".join(pieces), CONTENT_TYPE_PLAIN_0_0_4

    async def _tokens(self) -> list[bytes]:
        """Of many flows and models, written in a thread."""
        families = token_families({} if self._pool is None else self._pool.used())
        if sum(len(one.samples) for one in families) > SAMPLES_A_TURN:
            return await asyncio.to_thread(lambda: [render(one) for one in families])
        return [render(one) for one in families]

    async def _learned(self, uids: Sequence[EndpointUid]) -> dict[EndpointUid, EndpointLearned]:
        """What was learned of these endpoints; of many, in several turns of the loop."""
        learned: dict[EndpointUid, EndpointLearned] = {}
        if self._pool is not None:
            for first in range(0, len(uids), LEARNED_A_TURN):
                if len(uids) > ENDPOINTS_A_TURN:
                    await asyncio.sleep(0)
                learned |= self._pool.learned_of(uids[first : first + LEARNED_A_TURN])
        return learned

    def _families(self, snapshot: PoolSnapshot) -> Iterator[Metric]:
        # None of these iterates over live state while it is suspended.
        yield from self._requests.families()
        yield from self._requests.by_endpoint()
        text = "Transitions of an endpoint's state, by the new state"
        yield counters("endpoint_transitions", text, ("endpoint", "to"), self._transitions.items())
        yield from scaling_families(snapshot.models)
        yield from self._requests.special(snapshot)
        yield from self._scrape_families()
        watched = self.watched
        workers = None if watched.workers is None else watched.workers()
        if watched.sources is not None:
            yield from source_families(watched.sources.names, watched.sources.files)
        yield from self._process_families(snapshot, workers)
        if watched.load is not None:
            yield from load_families(watched.load())
        if workers is not None:
            yield from worker_families(workers)
        if watched.replicas is not None:
            yield from replica_families(watched.replicas())
        yield from kv_families(dict(watched.kv_events))
        if watched.sleeping is not None:
            yield from sleep_families(watched.sleeping, snapshot)
        yield from self._process.collect()

    def _snapshot(self) -> PoolSnapshot:
        return PoolSnapshot() if self._pool is None else self._pool.snapshot()

    def _forget_the_gone(self, snapshot: PoolSnapshot) -> None:
        """Drop the series of endpoints and models that are no more, and learn the models that are."""
        uids = {one.endpoint.uid for one in snapshot.endpoints}
        names = {one.endpoint.name for one in snapshot.endpoints}
        keep(self._scrapers, lambda uid: uid in uids)
        keep(self._transitions, lambda key: key[0] in names)
        keep(self._ejections, lambda key: key[0] in names)
        served = [model for one in snapshot.endpoints for model in one.models or ()]
        self._requests.forget_the_gone(names, [*served, *self.models])

    def _scrape_families(self) -> Iterator[Metric]:
        scrapes = {one.endpoint.server: one.status for one in self._scrapers.values()}
        results = [((name, word), n) for name, status in scrapes.items() for word, n in status.results.items()]
        yield counters("scrapes", "Scrapes of an endpoint's own metrics, by result", ("endpoint", "result"), results)
        missing = [((name, s), float(gone)) for name, one in scrapes.items() for s, gone in one.missing.items()]
        text = "1 while the endpoint's metrics lack a signal that its engine should export"
        yield gauges("scrape_missing_metrics", text, ("endpoint", "signal"), missing)
        times = [((name,), one.last_duration_s) for name, one in scrapes.items()]
        yield gauges("scrape_duration_seconds", "How long the last scrape took", ("endpoint",), times)

    def _process_families(self, snapshot: PoolSnapshot, workers: Workers | None) -> Iterator[Metric]:
        yield gauge("waiting_requests", "Requests in the queue because no endpoint has room", snapshot.waiting)
        yield gauge("waiting_bytes", "Bytes of the bodies of requests in the queue", snapshot.waiting_bytes)
        yield from flow_families(snapshot.flows)
        text = "Internal errors, logged with a traceback: please report them"
        more, dropped = (0, 0) if workers is None else (workers.internal_errors, workers.dropped_lines)
        yield counter("internal_errors", text, self.log.internal_errors + more)
        text = "Log lines dropped because standard output was too slow or closed"
        yield counter("log_lines_dropped", text, self.log.dropped_lines + dropped)
        lag = histogram("loop_lag_seconds", "Delay of the event loop, measured 20 times a second", ())
        add_to(lag, [], self.lag)
        yield lag
        text = "1 if the last reload of the settings succeeded, 0 if it was refused"
        yield gauge("config_reload_success", text, float(self.loads.succeeded and not self.loads.stale))
        text = "Time of the last successful load of settings, in seconds since 1970"
        yield gauge("config_last_reload_success_timestamp_seconds", text, self.loads.succeeded_at)
        yield from state_families(self.loads.state)
        yield gauges("build_info", "Always 1", ("version",), [((__version__,), 1.0)])
