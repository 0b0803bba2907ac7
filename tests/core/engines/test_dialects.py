# SPDX-License-Identifier: Apache-2.0
"""Requests go where an engine's own page says that others leave room, whatever the page calls it, in pools of one
engine and of all; and they follow when the pages change. Scrapes come when the test says so.
"""

from __future__ import annotations

from collections import Counter

import pytest

from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.readings import PageReader
from lbproxy.core.requests.outcome import Outcome
from tests.support.dialects import BUSY, ENGINES, FREE, PAGES, page_of
from tests.support.pool import bring_up, make_balancer, request

INTERVAL_S = 0.2
REQUESTS = 100
"""Of each phase, over one second."""


POOLS = {**{name: [name] * 4 for name in PAGES}, "all engines": [*PAGES]}
POLICIES = {
    "adaptive": ("adaptive", None),
    "least-request": ("least-request", None),
    "gie": ("gie", None),
    "gie-tree": ("gie-tree", None),
    "queue alone": ("weighted", {"queue": 1.0}),
    "queue and in-flight": ("weighted", {"queue": 2.0, "in-flight": 1.0}),
}


class Fleet:
    """Servers whose pages are read when the test says so, and a client that asks for one thing after the other."""

    def __init__(self, dialects: list[str], policy: str, scorers: dict[str, float] | None) -> None:
        self.balancer = make_balancer(policy=policy, scorers=scorers)
        specs = [EndpointSpec(name=f"e{n}", base_url=f"http://10.0.0.{n}:8000") for n in range(len(dialects))]
        self.endpoints = self.balancer.set_endpoints(specs, now=0.0).added
        bring_up(self.balancer, self.endpoints)
        self.dialects = dialects
        self.loads = [BUSY] * len(dialects)
        engines = [ENGINES.detect(page_of(dialect, BUSY)) for dialect in dialects]
        assert engines == [dialect.partition(",")[0] for dialect in dialects]
        self.readers = [PageReader(ENGINES.tables[engine], keep_s=2.0) for engine in engines if engine is not None]
        self.now = 100.0
        self.due_at = 100.0

    def favour(self, best: int) -> None:
        self.loads = [FREE if n == best else BUSY for n in range(len(self.loads))]

    def scrape(self) -> None:
        """All pages, at the next time that they are due."""
        self.now = max(self.now, self.due_at)
        self.due_at = self.now + INTERVAL_S
        for endpoint, dialect, load, reader in zip(
            self.endpoints, self.dialects, self.loads, self.readers, strict=True
        ):
            self.balancer.scrape_sent(endpoint.uid)
            reading = reader.read(page_of(dialect, load), scraped_at=self.now, wall_time=1e9)
            assert reading.metrics is not None
            self.balancer.report_scrape(endpoint.uid, reading.metrics)

    def ask(self, count: int) -> Counter[str]:
        """So many requests, one after the other; scrapes go on meanwhile. Who got them."""
        got: Counter[str] = Counter()
        for _ in range(count):
            self.now += 1.0 / REQUESTS
            if self.now >= self.due_at:
                self.scrape()
            ticket = self.balancer.submit(request(), now=self.now)
            assert ticket.placed_on is not None, "nobody is so busy that a request has to wait"
            got[ticket.placed_on.endpoint.name] += 1
            self.balancer.first_byte(ticket, now=self.now)
            self.balancer.close(ticket, Outcome.COMPLETED, now=self.now)
        return got


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pool", POOLS)
def test_requests_go_to_whom_its_gauges_show_free_and_follow_within_two_scrapes(pool: str, policy: str) -> None:
    fleet = Fleet(POOLS[pool], *POLICIES[policy])
    for best in range(len(fleet.endpoints)):
        fleet.favour(best)
        fleet.scrape()
        fleet.scrape()
        got = fleet.ask(REQUESTS)
        assert got[f"e{best}"] >= 0.95 * REQUESTS, got


@pytest.mark.parametrize("policy", POLICIES)
def test_without_gauges_nobody_is_favoured(policy: str) -> None:
    """So it is the gauges that move requests above, and no accident of the policy."""
    fleet = Fleet(POOLS["vllm"], *POLICIES[policy])
    fleet.due_at = float("inf")
    got = fleet.ask(REQUESTS)
    assert max(got.values()) < 0.5 * REQUESTS, got
