# SPDX-License-Identifier: Apache-2.0
"""What it costs that replicas tell each other of every request: bytes, batches, CPU and memory, over an hour.

Part of `benchmarks.replicas`. CPU is `process_time` of `Journal.take` and `encode`, and of `decode` and `Peers.hear`,
as Python and not compiled.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.flow import Flow
from lbproxy.core.replicas.batches import decode, encode
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.replicas.peers import Peers
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import ExchangeRules, FleetOptions, SimulatedServer
from lbproxy.sim.fleet.replicas import ReplicaExchange
from lbproxy.sim.workloads.catalogue import make_workload

HOUR_S = 3600.0
RATE, REPLICAS, SERVERS = 10, 4, 8
RUNS: Mapping[str, ExchangeRules] = {
    "50 ms": ExchangeRules(),
    "50 ms; 1 % lost, 2 % twice, 2 % late": ExchangeRules(lost=0.01, repeated=0.02, late=0.02),
}
ABOUT = f"""b2b at {RATE} requests/s for an hour, {REPLICAS} replicas, prompts of 28.8 KB (28 keys), not compiled. Per
1,000 requests: batches and KB that all replicas send; CPU milliseconds of the sender and of one receiver. *Others in
flight*: requests that one replica knows of the others, at most and at the end. *KB of Peers*: the records of these, in
the middle and at the end."""
BUSY_BATCH = 50
"""At 1,000 requests a second and 50 ms."""
BUSY_ROUNDS = 60
BUSY_ABOUT = f"""At 1,000 requests a second, {BUSY_BATCH} of them a batch, two replicas before {SERVERS} endpoints: per
request, {{how}}. *Noted*: what a decision takes longer because of the journal."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one run."""

    name: str
    requests: int
    batches_per_1000: float
    bytes_per_1000: float
    sent_ms_per_1000: float
    heard_ms_per_1000: float
    largest_batch: int
    lost: int
    most_in_flight: int
    """Requests of others, as one replica knows them."""
    peers_at_end: int
    peers_bytes_half: int
    peers_bytes_end: int
    """When the last request arrives."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Bytes, and microseconds of CPU, for a request of many in one batch."""

    keys: int
    bytes: float
    alone_us: float
    """A decision without other replicas."""
    shared_us: float
    """With them."""
    tell_us: float
    hear_us: float


class MeasuredExchange(ReplicaExchange):
    """Counts the CPU of both sides."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]  # as they are
        self.sent_s = self.heard_s = 0.0
        self.most = 0

    def take(self, journal: Journal) -> bytes | None:
        began_at = time.process_time()
        data = super().take(journal)
        self.sent_s += time.process_time() - began_at
        return data

    def hear(self, peers: Peers, data: bytes) -> None:
        began_at = time.process_time()
        super().hear(peers, data)
        self.heard_s += time.process_time() - began_at
        self.most = max(self.most, in_flight(peers))


class MeasuredFleet(Fleet):
    """Its exchange is measured."""

    exchange_kind = MeasuredExchange

    @property
    def exchange(self) -> MeasuredExchange:
        """As it is made."""
        assert isinstance(self._exchange, MeasuredExchange)
        return self._exchange

    @property
    def heap(self) -> EventHeap:
        """For what is looked at between."""
        return self._heap


def in_flight(peers: Peers) -> int:
    """Requests of others that are known."""
    return sum(len(one.tickets) + len(one.unconfirmed) for one in peers._peers.values())


def peers_bytes(peers: Peers) -> int:
    """The size of what `Peers` itself keeps of other replicas, without endpoints, models, flows and keys."""
    size = sys.getsizeof(peers._peers)
    for peer in peers._peers.values():
        size += sys.getsizeof(peer) + sum(map(sys.getsizeof, (peer.tickets, peer.unconfirmed, peer.flows)))
        for ticket in [*peer.tickets.values(), *peer.unconfirmed.values()]:
            request: InferenceRequest = ticket.request
            attributes = getattr(ticket, "__dict__", ())  # compiled, a ticket has none
            size += sum(map(sys.getsizeof, (ticket, attributes, request, request.id, request.block_keys)))
        size += sum(sys.getsizeof(use) for use in peer.flows.values() if not isinstance(use, Flow))
    return size


def measure(duration_s: float = HOUR_S) -> list[Cost]:
    """All runs, one after the other."""
    return [cost_of(name, options, duration_s) for name, options in RUNS.items()]


def cost_of(name: str, exchanged: ExchangeRules, duration_s: float) -> Cost:
    """One run, with progress on stderr."""
    ladder = {"first_rate": RATE, "last_rate": RATE, "step_s": duration_s, "warm_up_s": 0}
    options = FleetOptions(
        servers=(SimulatedServer(PRESETS["qwen-32b-2xh100"]),) * SERVERS, balancers=REPLICAS, exchange=exchanged
    )
    fleet = MeasuredFleet(options, make_workload("ladder", ladder, seed=1), _balancer, seed=1)
    exchange, sizes = fleet.exchange, []

    def look(_: None) -> None:
        sizes.append(max(map(peers_bytes, exchange.all_peers())))
        print(f"{name}: {fleet.now:.0f} s, {sizes[-1]} bytes", file=sys.stderr, flush=True)

    for at_s in (0.5 * duration_s, duration_s):
        fleet.heap.at(at_s, look, None)
    served = fleet.run()
    fleet.settle(10.0)
    thousands, traffic = len(served) / 1000.0, exchange.traffic
    return Cost(
        name,
        len(served),
        traffic.batches / thousands,
        traffic.bytes / thousands,
        1000.0 * exchange.sent_s / thousands,
        1000.0 * exchange.heard_s / thousands / (REPLICAS - 1),
        traffic.largest,
        traffic.lost,
        exchange.most,
        max(map(in_flight, exchange.all_peers())),
        sizes[0],
        sizes[1],
    )


def measure_busy() -> list[Busy]:
    """For short and long prompts."""
    return [busy(keys) for keys in (1, 28, 128)]


def busy(keys: int, rounds: int = BUSY_ROUNDS) -> Busy:
    """One size of prompts."""
    alone, teller, hearer = (_with_endpoints(n) for n in range(3))
    journal, _ = teller.share("teller")
    _, peers = hearer.share("hearer")
    _take(journal, [], 0.0)  # the reset with which each begins
    rng, now, least, size = random.Random(1), 1.0, [inf] * 4, 0
    for _ in range(rounds):
        now += 0.05
        shared = tuple(rng.getrandbits(64) for _ in range(keys))
        request = InferenceRequest("id", "m", True, 1024 * keys, 1024 * keys, shared, 200)
        batches: list[bytes] = []
        steps = (
            partial(_serve, alone, request, now),
            partial(_serve, teller, request, now),
            partial(_take, journal, batches, now),
            partial(_hear, peers, batches, now),
        )
        for number, step in enumerate(steps):
            began_at = time.process_time_ns()
            step()
            least[number] = min(least[number], (time.process_time_ns() - began_at) / 1000.0 / BUSY_BATCH)
        size = sum(map(len, batches))
    return Busy(keys, size / BUSY_BATCH, *least)


def _serve(balancer: Balancer, request: InferenceRequest, now: float) -> None:
    for _ in range(BUSY_BATCH):
        ticket = balancer.submit(request, now=now)
        balancer.first_byte(ticket, now=now)
        balancer.close(ticket, Outcome.COMPLETED, now=now, usage=Usage(1000, 500, 200))


def _take(journal: Journal, batches: list[bytes], now: float) -> None:
    while (batch := journal.take(now)) is not None:
        batches.append(encode(batch))


def _hear(peers: Peers, batches: list[bytes], now: float) -> None:
    for data in batches:
        peers.hear(decode(data), now)


def _with_endpoints(seed: int) -> Balancer:
    balancer = _balancer(random.Random(seed))
    specs = [EndpointSpec(name=f"s{n}", base_url=f"http://s{n}:80") for n in range(SERVERS)]
    for endpoint in balancer.set_endpoints(specs, now=0.0).added:
        balancer.report_health(endpoint.uid, True, "", now=0.0)
    return balancer


def _balancer(rng: random.Random) -> Balancer:
    patient = AdmissionSettings(queue_requests=100_000, queue_bytes=2**34, queue_timeout=86_400)
    return Balancer(make_policy(RoutingSettings(), rng), BalancingSettings(admission=patient), rng=rng)
