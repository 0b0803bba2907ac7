# SPDX-License-Identifier: Apache-2.0
"""Pools with everything at its default but what a test is about: balancers, and `Pool` for those that need a loop."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings, RetrySettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid
from lbproxy.core.endpoints.health import Transition
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.sink import Sink
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.pool import ConnectionPool

MODEL = "m"


def spec(n: int) -> EndpointSpec:
    return EndpointSpec(name=f"e{n}", base_url=f"http://10.0.0.{n}:8000")


def card(model: str, parent: str | None = None) -> ModelCard:
    return ModelCard(model, b'{"id":"%s"}' % model.encode(), parent)


def request(model: str | None = MODEL, *, size: int = 100) -> InferenceRequest:
    return InferenceRequest("r", model, False, size)


def submit(runtime: Runtime, request: InferenceRequest, avoid: frozenset[EndpointUid] = frozenset()) -> Ticket:
    """Without a callback: for tests that read the ticket."""
    record = RequestRecord(request.id, "POST", "/v1/completions", "127.0.0.1", runtime.now())
    return runtime.submit(request, record, avoid, lambda _: None)


def make_balancer(
    *,
    policy: str = "least-request",
    admission: AdmissionSettings | None = None,
    health: HealthSettings | None = None,
    scrape: ScrapeSettings | None = None,
    retry: RetrySettings | None = None,
    breaker: BreakerSettings | None = None,
    scorers: dict[str, float] | None = None,
    flows: FlowsSettings | None = None,
    overflow: OverflowSettings | None = None,
    seed: int = 0,
) -> Balancer:
    routing = RoutingSettings.model_validate({"policy": policy, "scorers": scorers})
    return Balancer(
        make_policy(routing),
        BalancingSettings(
            admission=admission or AdmissionSettings(),
            health=health or HealthSettings(),
            scrape=scrape or ScrapeSettings(),
            retry=retry or RetrySettings(),
            breaker=breaker or BreakerSettings(),
            flows=flows or FlowsSettings(),
            overflow=overflow or OverflowSettings(),
        ),
        rng=random.Random(seed),
    )


def bring_up(balancer: Balancer, endpoints: Sequence[Endpoint], model: str = MODEL) -> None:
    """Every endpoint is up and serves `model`."""
    for endpoint in endpoints:
        balancer.report_models(endpoint.uid, [card(model)])
        balancer.report_health(endpoint.uid, True, "test", now=0.0)
    balancer.transitions.clear()


def pool_of(count: int, **options: object) -> tuple[Balancer, list[Endpoint]]:
    """A balancer over `count` endpoints that are up and serve MODEL."""
    balancer = make_balancer(**options)  # type: ignore[arg-type]
    endpoints = balancer.set_endpoints([spec(n) for n in range(1, count + 1)], now=0.0).added
    bring_up(balancer, endpoints)
    return balancer, endpoints


def show_gauges(
    balancer: Balancer,
    uid: EndpointUid,
    *,
    now: float,
    waiting: float | None = 0.0,
    running: float | None = 0.0,
    kv: float | None = 0.0,
) -> None:
    """A scrape that was sent and answered at `now`."""
    balancer.scrape_sent(uid)
    balancer.report_scrape(uid, LoadMetrics(scraped_at=now, waiting=waiting, running=running, kv_utilization=kv))


def taken(balancer: Balancer) -> list[Transition]:
    """What endpoints became since this was last asked."""
    transitions = balancer.transitions[:]
    balancer.transitions.clear()
    return transitions


def seen(balancer: Balancer, now: float = 0.0) -> dict[str, EndpointSnapshot]:
    """The snapshot's endpoints by name; of one that leaves, the member that has its name, if any does."""
    return {one.endpoint.name: one for one in reversed(balancer.snapshot(now=now).endpoints)}


def believed_size(balancer: Balancer, endpoint: Endpoint) -> float | None:
    """How many tokens an endpoint's cache is taken to hold; None: the policy does not care."""
    learned = balancer.learned(now=time.monotonic())  # as runtimes count: rates grow without bound before what they saw
    return None if learned is None else learned[1][endpoint.uid].capacity_tokens


def answer_unfound(balancer: Balancer, model: str = MODEL) -> None:
    """Prompts of 16,384 tokens that come back after nine others, and are never found in a cache."""
    for first in (*range(0, 640, 64), *range(0, 640, 64)):
        request = InferenceRequest("r", model, True, 65_536, 65_536, tuple(range(first, first + 64)))
        ticket = balancer.submit(request, now=1.0)
        balancer.first_byte(ticket, now=1.1)
        balancer.close(ticket, Outcome.COMPLETED, now=1.2, usage=Usage(256 * 64, 0, 1))


class Records:
    """A sink that keeps everything."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.requests: list[RequestRecord] = []
        self.transitions: list[Transition] = []
        self.models_then: list[tuple[str, ...] | None] = []
        """What the endpoint was known to serve at the moment of each transition."""
        self.sizes_then: list[float | None] = []
        """And how many tokens its cache was believed to hold; None: the policy does not care."""

    def ended(self, records: list[RequestRecord]) -> None:
        self.requests += records

    def transition(self, transition: Transition) -> None:
        self.transitions.append(transition)
        self.models_then.append(seen(self._balancer)[transition.endpoint.name].models)
        self.sizes_then.append(believed_size(self._balancer, transition.endpoint))


class Pool:
    """A pool on the running loop, with all that is observed of it."""

    def __init__(self, balancer: Balancer, specs: Sequence[EndpointSpec]) -> None:
        self.balancer = balancer
        self.records = Records(balancer)
        self.sinks: list[Sink] = [self.records]
        self.runtime = Runtime(balancer, self.sinks)
        self.runtime.pulse.start()
        self.connections = ConnectionPool(self.runtime.pulse)
        self.endpoints = self.runtime.set_endpoints(specs).added

    def bring_up(self) -> None:
        """Declare every endpoint up and serving MODEL; that makes no transition."""
        bring_up(self.balancer, self.endpoints)

    def snapshots(self) -> list[EndpointSnapshot]:
        return self.runtime.snapshot().endpoints

    def seen(self, name: str = "e1") -> EndpointSnapshot:
        return next(one for one in self.snapshots() if one.endpoint.name == name)
