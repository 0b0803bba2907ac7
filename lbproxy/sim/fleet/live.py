# SPDX-License-Identifier: Apache-2.0
"""What a simulated fleet keeps while it runs: of a job, of a server, of a balancer, and of requests that are split
between two servers. `cluster.py` changes them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import NOTHING_SAID, EndpointSpec, EndpointUid
from lbproxy.core.engines.handover import Role
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest
from lbproxy.core.requests.retry import FailureKind
from lbproxy.sim.engine.engine import SimRequest
from lbproxy.sim.engine.link import KvLink
from lbproxy.sim.engine.model_server import ModelServer, make_server
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.sequence import EngineGauges, Hold
from lbproxy.sim.fleet.fleet import BASE_MODEL, CONNECTOR, FleetOptions, Reported, Served, SimulatedServer

OLLAMA = "ollama"
"""The engine that servers which load models on demand are taken for."""


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job that has not ended."""

    served: Served
    work: SimRequest
    request: InferenceRequest
    ticket: Ticket | None = None
    server: LiveServer | None = None
    told: int = 0
    """Tokens reported as progress, and those that nobody sees."""
    begun: bool = False
    """Its client has bytes of a stream."""
    failed: tuple[FailureKind, ...] = ()
    """Why its attempts failed."""
    suspect: EndpointUid | None = None
    """Who answered it 500."""
    hold: Hold | None = None
    """If it is split: its prompt's KV at the server of the first leg."""
    prefilled_at: EndpointUid | None = None
    """That server, while this is held and no server has the second leg."""


@dataclass(slots=True, eq=False)
class LiveServer:
    """A simulated server and what the driver keeps of it."""

    number: int
    spec: SimulatedServer
    engine: ModelServer
    uids: list[EndpointUid]
    """What each balancer calls it."""
    alive: bool = True
    failing: bool = False
    started_at: float | None = 0.0
    """What its metrics say of that; None = nothing."""
    page: LoadMetrics | None = None
    """What its metrics show instead of what is; None = what is."""
    wakes_at: float = float("inf")
    """When the engine's next event is that an event of ours is asked for; it arrives a network delay later."""
    flights: dict[str, LiveJob] = field(default_factory=dict)
    """In the engine, by job."""
    progress: deque[tuple[float, LiveJob]] = field(default_factory=deque)
    """Streams by when their progress is due; as each is due again equally long after, in order."""
    thinking: dict[str, int] = field(default_factory=dict)
    """By job, how many tokens its client does not see; of those that have none that it sees."""


@dataclass(slots=True, eq=False)
class LiveBalancer:
    """One balancer and what the driver keeps of it."""

    number: int
    balancer: Balancer
    waiting: dict[int, LiveJob] = field(default_factory=dict)
    """By the identity of the ticket, which the flight holds."""
    timer_at: float = float("inf")
    alive: bool = True
    died_at: float = float("-inf")
    """When a balancer before this one died."""


def introduce(front: LiveBalancer, servers: Sequence[LiveServer], options: FleetOptions, *, now: float) -> None:
    """Tell a new balancer which servers there are, and each server what the balancer calls it. After the balancers with
    lower numbers: all of them number the same list in the same order.
    """
    balancer = front.balancer
    specs = [
        EndpointSpec(
            name=f"s{server.number}",
            base_url=f"http://s{server.number}:80",
            weight=server.spec.weight,
            tier=server.spec.tier,
            metrics="auto" if server.spec.tier == 1 else None,
            kv_cache_tokens=server.spec.preset.kv_tokens if options.sizes_declared else None,
            role=server.spec.role,
            connector=None if server.spec.role is Role.BOTH else CONNECTOR,
            loading=options.loading[server.number] if options.loading else NOTHING_SAID,
        )
        for server in servers
    ]
    parent = BASE_MODEL if options.adapters_known else None
    base = ModelCard(BASE_MODEL, b"{}")
    cards = [base, *(ModelCard(adapter, b"{}", parent=parent) for adapter in options.adapters)]
    for server, endpoint in zip(servers, balancer.set_endpoints(specs, now=now).added, strict=True):
        if front.number == len(server.uids):
            server.uids.append(endpoint.uid)
        assert server.uids[front.number] == endpoint.uid
        balancer.report_health(endpoint.uid, True, "simulated", now=now)
        if server.spec.loading is not None:
            names = server.spec.loading.load_s
            balancer.report_models(
                endpoint.uid,
                [ModelCard(name, b"{}", engine=OLLAMA if options.follows_loads else None) for name in names],
            )
        else:
            balancer.report_models(endpoint.uid, cards if server.spec.preset.max_loras else cards[:1])


def engine_of(spec: SimulatedServer, rng: random.Random | None) -> ModelServer:
    """What computes a server's responses. Without `rng` nothing in it is left to chance."""
    return make_server(
        spec.preset,
        ranks=spec.ranks,
        times=spec.times,
        loading=spec.loading,
        speed=spec.speed,
        rng=rng,
        jitter=spec.jitter,
        name_tokens=False,
    )


def page_of(server: LiveServer, now: float) -> LoadMetrics:
    """What a scrape of it says. Of adapters, as with vLLM, only those with live requests, under both labels alike."""
    if server.page is not None:
        return replace(server.page, scraped_at=now)
    engine, spec = server.engine, server.spec
    slots = spec.preset.max_loras
    gauges = _reported(engine.gauges(), spec.reported)
    named = frozenset(gauges.running_adapters)
    return LoadMetrics(
        scraped_at=now,
        waiting=gauges.waiting if spec.shows_waiting else None,
        running=gauges.running,
        kv_utilization=gauges.kv_usage,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=engine.kv_blocks,
        lora=LoraMetrics(named, named, slots) if slots else None,
        work=float(gauges.prompt_tokens + gauges.generation_tokens),
        started_at=server.started_at,
    )


def _reported(true: EngineGauges, how: Reported) -> EngineGauges:
    if how is Reported.IN_FLIGHT:
        return true._replace(waiting=true.waiting + true.running, running=0)
    if how is Reported.TWICE:
        return true._replace(waiting=2 * true.waiting, running=2 * true.running)
    return true if how is Reported.TRUE else EngineGauges()


class Legs:
    """The legs of all requests of one fleet: what goes to which engine, and what is held in between.

    The contract is NIXL's (docs/decisions/0041): the first leg has the prompt computed and held, then the second is
    sent to another server, which reads it. What the second leg reads is freed by that; `drop` frees what none will
    read. A second leg that did not reach its server is placed anew (`LiveJob.prefilled_at` stays); after anything else
    that goes wrong the request begins again. Engines hear of each other when the fleet asks, after each call of one.
    """

    def __init__(self, servers: Sequence[LiveServer]) -> None:
        self._servers = servers
        self._link = KvLink()

    @staticmethod
    def to_place(flight: LiveJob) -> InferenceRequest:
        """What is to be placed next: the second leg, if its prompt is held for it, or the request."""
        if flight.prefilled_at is None:
            return flight.request
        return flight.request.as_leg(DECODE, flight.prefilled_at)

    def add(self, server: LiveServer, flight: LiveJob, ticket: Ticket, *, now: float) -> None:
        """Give a placed request, or a leg of it, to its server. Raises `RequestTooLong`."""
        if ticket.request.leg == PREFILL:
            flight.hold = self._link.prefill(server.engine, flight.work, now=now)
        elif ticket.request.leg == DECODE:
            assert flight.hold is not None
            flight.prefilled_at = None
            self._link.decode(server.engine, flight.work, flight.hold, now=now)
        else:
            server.engine.add(flight.work, now=now)

    def drop(self, flight: LiveJob, *, now: float) -> None:
        """No second leg is going to read what is held: it is freed."""
        flight.prefilled_at = None
        if flight.hold is not None:
            self._link.drop(flight.hold, now=now)
            flight.hold = None

    def settle(self, *, now: float) -> list[LiveServer]:
        """Tell each engine what others have done. Returns the servers that may have something to do now."""
        told = self._link.settle(now=now)
        return [server for server in self._servers if server.engine in told] if told else []
