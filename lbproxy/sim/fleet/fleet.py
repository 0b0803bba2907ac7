# SPDX-License-Identifier: Apache-2.0
"""What a simulated fleet is made of, and what becomes of a job in it: values only. What happens is `cluster.py`'s.

Most of it is made of a scenario, whose settings say what they mean (`config.scenario`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lbproxy.core.endpoints.endpoint import LoadSpec
from lbproxy.core.engines.handover import Role
from lbproxy.core.queue.flows import FlowRules
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.engine.engine import JITTER_SIGMA
from lbproxy.sim.engine.fixed import FixedTimes
from lbproxy.sim.engine.on_demand import Loading
from lbproxy.sim.engine.presets import Preset
from lbproxy.sim.engine.sequence import EngineGauges
from lbproxy.sim.workloads.workload import Job

TOKEN_BYTES = 4
BASE_MODEL = "sim"
CONNECTOR = "nixl"
"""The connector of servers of which some prefill and others decode."""


class Reported(Enum):
    """What a server's metrics say of its requests."""

    TRUE = "true"
    IN_FLIGHT = "in-flight"
    """All as waiting, none as running."""
    NOTHING = "zero"
    """None, no use of the KV cache, and no work."""
    TWICE = "doubled"
    """Each twice."""


class ToldUsage(Enum):
    """What a server's responses say of tokens."""

    ALL = "all"
    NO_CACHED = "no-cached"
    """Nothing of those that were cached."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """One simulated server."""

    preset: Preset
    speed: float = 1.0
    ranks: int = 1
    times: FixedTimes | None = None
    """It takes so long for everything, whatever the preset says; None = it is an engine."""
    loading: Loading | None = None
    """It loads models on demand, which it lists instead of adapters."""
    jitter: float = JITTER_SIGMA
    """Spread of the times of its steps: sigma of a lognormal."""
    metrics: bool = True
    shows_waiting: bool = True
    reported: Reported = Reported.TRUE
    usage: ToldUsage = ToldUsage.ALL
    hidden_share: float = 0.0
    """Of a response's tokens, so many are generated before its client gets the first: reasoning that is not shown."""
    role_chunk: bool = False
    """A stream begins with a chunk without a token, as soon as the server has the request."""
    weight: float = 1.0
    role: Role = Role.BOTH
    """What it does of a request. None but engines hand over KV."""
    tier: int = 1
    """Above 1 it is a provider: nobody probes or scrapes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTraffic:
    """Requests that somebody else sends straight to one server: Poisson arrivals of one size, nothing shared. Times are
    virtual, from the begin of the simulation."""

    server: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    from_s: float = 0.0
    until_s: float = float("inf")


class FaultKind(Enum):
    """How a server fails."""

    DEAD = "dead"
    """It refuses connections, and comes back empty."""
    HUNG = "hung"
    """It takes requests and computes nothing, while its /health is fine, until it is restarted."""
    FAILING = "failing"
    """It answers 500 to everything at once, while its /health is fine."""
    RESTARTED = "restarted"
    """It loses its requests and its cache, and is there again before anybody asks; its metrics do not show it."""
    CLEARED = "cleared"
    """It loses its cache and nothing else."""
    STALE = "stale"
    """Something in between shows its page of metrics as it was at the begin, until the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFault:
    """What happens to one server for a while. Times are virtual, from the begin of the simulation."""

    server: int
    from_s: float
    until_s: float
    speed: float | None = None
    """Times its own speed, meanwhile; None: it fails, as `kind` says."""
    kind: FaultKind = FaultKind.DEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRules:
    """How balancers tell each other what they do."""

    interval_s: float = 0.05
    delay_s: float = 0.002
    """A batch is on its way for half of this to one and a half times it."""
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    """Share that arrives three intervals later, after batches that were sent later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerFault:
    """One balancer dies; what it had breaks. A new one takes its place later. Times are virtual."""

    balancer: int
    from_s: float
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Everything about a simulated fleet but the policy and the workload."""

    servers: tuple[SimulatedServer, ...]
    faults: tuple[ServerFault, ...] = ()
    others: tuple[OtherTraffic, ...] = ()
    """Traffic that balancers see in the servers' gauges alone, and that is in nobody's figures."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that every server with `max_loras` serves."""
    adapters_known: bool = True
    follows_loads: bool = True
    """Balancers are told that servers load models on demand, and which are loaded."""
    loading: tuple[LoadSpec, ...] = ()
    """What balancers are told of the models that each server loads on demand; empty = nothing."""
    sizes_declared: bool = False
    scrape_interval_s: float | None = 0.2
    scrape_delay_s: float = 0.005
    """From the moment that the gauges are of until the Balancer has them."""
    network_s: float = 0.0005
    stream_share: float = 1.0
    size_error: float = 0.15
    """The bytes of a prompt are wrong by a factor, uniform within 1 ± this."""
    block_tokens: int = 256
    """Granularity of the prompt's keys that the Balancer gets; a multiple of 16. 0 = it gets none."""
    balancers: int = 1
    """Each request comes to one of so many, at random."""
    exchange: ExchangeRules | None = None
    """How balancers hear of the others' requests; None = not at all."""
    balancer_faults: tuple[BalancerFault, ...] = ()
    flow_rules: FlowRules | None = None
    """What becomes of the priorities that clients ask for; None = as they say."""
    fair: bool = True
    """The balancers are told of which flow a request is."""
    jitter: bool = True
    """Whether steps vary, each server's by its own spread."""


@dataclass(slots=True, eq=False)
class Served:
    """What became of one job. Times are virtual seconds; None = it did not come to that."""

    job: Job
    submitted_at: float
    balancer: int
    streamed: bool
    placed_at: float | None = None
    """The last attempt's; of a split request that of its first leg."""
    first_at: float | None = None
    """When the client had the first token, or would have had it if the response had been streamed."""
    ended_at: float = 0.0
    server: int | None = None
    """The last; of a split request that of its second leg, in the end."""
    cached_tokens: int = 0
    """Cached tokens of the prompt, where it was computed."""
    attempts: int = 0
    outcome: Outcome | None = None
    """None = not ended."""
    loaded_adapter: bool = False
    """The server had to load the adapter for it."""
    prefill: int | None = None
    """The server of its first leg, if it was split in the last attempt."""
    prefilled_at: float | None = None
    """When the last first leg was over."""


class QueueSample(NamedTuple):
    """How long the queues were at a moment."""

    at: float
    gauges: tuple[EngineGauges, ...]
    """Gauges of each server, in the order of the fleet."""
    waiting: int
    """Requests in the balancers' queues."""


def decisions(served: Sequence[Served]) -> list[tuple[float | None, str, int | None]]:
    """The decision log: (placed at, job, server), in the order of arrival. Equal for equal seeds."""
    return [(one.placed_at, one.job.id, one.server) for one in served]
