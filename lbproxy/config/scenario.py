"""What `lbproxy sim` simulates: a fleet of simulated servers, a workload, and the policies to compare on it.

Read like the settings and by the same rules: frozen, no unknown keys, every number in its range, all problems told at
once. Which workloads there are and which parameters they have is the simulation's to say (`sim.workloads.catalogue`),
as config may not import it; so their names are text here and checked where they are used.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.section import Section
from lbproxy.config.sections.flows import FlowsSettings, Priority
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.config.values import Quantity, count, duration, expected

MAX_SERVERS = 1024
MAX_COPIES = 256
MAX_WORKLOADS = 32
PresetName: TypeAlias = Literal["llama-8b-h100", "qwen-32b-2xh100", "qwen-32b-4xh100", "llama-70b-fp8-4xh100"]
"""Keys of `sim.engine.presets.PRESETS` (a test holds the two together)."""
Servers: TypeAlias = Annotated[int, count("1", "1024")]
Tokens: TypeAlias = Annotated[int, count("128", "100000000")]
Ranks: TypeAlias = Annotated[int, count("1", "64")]
Sequences: TypeAlias = Annotated[int, count("1", "8192")]
Adapters: TypeAlias = Annotated[int, count("0", "64")]
Factor: TypeAlias = Annotated[float, Quantity("0.001", "1000", "a factor", whole=False)]
Share: TypeAlias = Annotated[float, Quantity("0", "1", "a share", whole=False)]
Moment: TypeAlias = Annotated[float, duration("0s", "24h")]
Span: TypeAlias = Annotated[float, duration("1ms", "10m")]


class ServerSettings(Section):
    """Some servers that are alike."""

    count: Servers = 1
    """How many."""
    preset: PresetName = "qwen-32b-2xh100"
    """Which model on which GPUs."""
    speed: Factor = 1.0
    """2 = twice as fast as the preset."""
    kv_tokens: Tokens | None = None
    """Size of the KV cache; null = the preset's."""
    max_model_len: Tokens | None = None
    """Prompt and answer together, in tokens; null = the preset's. May exceed it, as with YaRN."""
    max_loras: Adapters = 0
    """LoRA adapters that run together; 0 = none are served."""
    max_sequences: Sequences | None = None
    """Requests that run together; null = the preset's."""
    ranks: Ranks = 1
    """Data-parallel engines behind one address, each with the whole of the preset; a request goes to the one with the
    fewest."""
    ttft: Span | None = None
    """Seconds that each request with a slot takes to its first token, whatever the prompt and the other requests: no
    engine is simulated then, only slots. null = an engine."""
    ttft_spread: Share = 0.0
    """Evenly within plus or minus this share of `ttft`."""
    token_time: Span = 0.02
    """With `ttft`: seconds from each token to the next."""
    jitter: Annotated[float, Quantity("0", "2", "a number", whole=False)] = 0.03
    """Spread of the times of an engine's steps: the sigma of a lognormal."""
    metrics: bool = True
    """Whether they can be scraped."""
    waiting: bool = True
    """Whether their metrics say how many requests wait."""
    weight: Annotated[float, Quantity("0.001", "100000", "a number", whole=False)] = 1.0
    """What the balancer is told of their capacity beside the others': `weight` of an endpoint in the settings."""

    @field_validator("ttft", mode="after")
    @classmethod
    def _no_ranks(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("ranks", 1) != 1:
            raise expected("no `ranks` beside it")
        return value


class OthersSettings(Section):
    """Requests that somebody else sends straight to one server: the balancer sees them in its metrics alone, and they
    are in no figures. Poisson arrivals of one size that share nothing."""

    server: Annotated[int, count("0", "1023")]
    """Its number, from 0, in the order of `fleet`."""
    rate: Annotated[float, Quantity("0.001", "100000", "a rate", whole=False)]
    """Requests a second."""
    prompt_tokens: Annotated[int, count("1", "1000000")] = 1000
    output_tokens: Annotated[int, count("1", "1000000")] = 200
    at: Moment = 0.0
    """When they begin, since the begin of the simulation."""
    lasts: Annotated[float, duration("1ms", "24h")] = 86_400.0
    """For how long."""


class FaultSettings(Section):
    """What happens to one server for a while."""

    server: Annotated[int, count("0", "1023")]
    """Its number, from 0, in the order of `fleet`."""
    at: Moment
    """When, since the begin of the simulation."""
    lasts: Annotated[float, duration("1ms", "24h")]
    """For how long."""
    speed: Factor | None = None
    """Times its own speed, meanwhile. null = it fails, as `kind` says."""
    kind: Literal["dead", "hung", "failing"] = "dead"
    """dead: refuses connections, comes back with an empty cache. hung: takes requests and computes nothing until it is
    restarted. failing: answers 500 to everything at once. The health of the last two looks good all the while."""


OfServer: TypeAlias = FaultSettings | OthersSettings


class WorkloadSettings(Section):
    """What clients send."""

    name: str
    """`lbproxy sim --list` says which there are."""
    parameters: dict[str, Annotated[float, Quantity("0", "1000000000", "a number", whole=False)]] = Field(
        default_factory=dict
    )
    """Those that shall differ from the workload's defaults."""
    trace: str | None = None
    """The file of the trace that a workload replays; null = a stand-in with its statistics."""
    flow: Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,48}$")] = "anonymous"
    """Whose requests these are, as an API key or `x-lbproxy-flow` would say."""
    copies: Annotated[int, count("1", "256")] = 1
    """So many clients that each send such a workload; with more than one, flows of their own: light-1, light-2."""
    priority: Priority | None = None
    """What they ask for by `x-lbproxy-priority`. null = nothing: the flow's own."""
    slo_ttft: Annotated[float, duration("1ms", "1h")] | None = None
    """When the first token must be there, as by `x-lbproxy-slo-ttft-ms`; null = nobody says."""
    patience: Annotated[float, duration("1ms", "1h")] | None = None
    """When a client leaves that has no first token yet, or without streaming no answer; null = never."""


class Scenario(Section):
    """All of a comparison."""

    fleet: tuple[ServerSettings, ...] = (ServerSettings(count=8),)
    """The servers."""
    faults: tuple[FaultSettings, ...] = ()
    """What happens to them."""
    others: tuple[OthersSettings, ...] = ()
    """What they get besides, past the balancer."""
    workload: WorkloadSettings | None = None
    """What clients send."""
    workloads: tuple[WorkloadSettings, ...] = ()
    """The same as a list, of clients that send at the same time."""
    policies: tuple[RoutingSettings, ...]
    """The policies to compare, each a name or a mapping as `routing` in the settings. Others are compared with the
    first."""
    seeds: Annotated[int, count("1", "100")] = 3
    """How often, each time with other arrivals, the same for every policy."""
    stream_share: Share = 1.0
    """Share of requests whose answers are streamed."""
    size_error: Share = 0.15
    """By how much the balancer misjudges the tokens of a prompt: evenly within plus or minus this share."""
    adapters_known: bool = True
    """Whether the servers' model lists say which models are LoRA adapters. false = the balancer takes them for
    models of their own."""
    sizes_declared: bool = False
    """Whether the endpoints' settings say how large their KV caches are (`kv_cache_tokens`), and say it right."""
    scrape_interval: Annotated[float, duration("10ms", "1h")] | None = 0.2
    """Seconds between two scrapes of a server; null = nobody scrapes."""
    scrape_delay: Annotated[float, duration("0s", "1m")] = 0.005
    """How old a scrape's figures are when they arrive."""
    network_delay: Annotated[float, duration("0s", "10s")] = 0.0005
    """One way, between balancer and server."""
    balancers: Annotated[int, count("1", "64")] = 1
    """How many balancers share the fleet, each seeing a part of the requests."""
    exchange_delay: Annotated[float, duration("0s", "1m")] | None = None
    """How late balancers hear of each other's requests; null = they tell each other nothing."""
    admission: AdmissionSettings = AdmissionSettings(
        queue_requests=1_000_000, queue_bytes=1024 * 1024**3, queue_timeout=86_400
    )
    """The balancer's queue. Unlike in the settings nobody is refused unless you say so: what is refused is not slow."""
    flows: FlowsSettings = FlowsSettings()
    """Weights, priorities and limits of the flows, as in the settings."""
    fair: bool = True
    """false = all requests are of one flow for the balancer, whatever the workloads say: to see what flows change."""

    @property
    def sources(self) -> tuple[WorkloadSettings, ...]:
        """All that clients send: at least one, of which at most one replays a trace."""
        return self.workloads if self.workload is None else (self.workload,)

    @field_validator("workloads", mode="after")
    @classmethod
    def _one_or_many(cls, value: tuple[WorkloadSettings, ...], info: ValidationInfo) -> tuple[WorkloadSettings, ...]:
        if "workload" in info.data and (info.data["workload"] is None) != bool(value):
            raise expected("a list of at least one, unless there is `workload`")
        if len(value) > MAX_WORKLOADS or sum(one.copies for one in value) > MAX_COPIES:
            raise expected(f"at most {MAX_WORKLOADS} workloads and {MAX_COPIES} copies")
        if sum(one.trace is not None for one in value) > 1:
            raise expected("at most one trace")
        return value

    @field_validator("policies", mode="before")
    @classmethod
    def _names_too(cls, value: object) -> object:
        if not isinstance(value, list | tuple) or not value:
            raise expected("at least one policy")
        return tuple({"policy": one} if isinstance(one, str) else one for one in value)

    @field_validator("policies", mode="after")
    @classmethod
    def _distinct(cls, value: tuple[RoutingSettings, ...]) -> tuple[RoutingSettings, ...]:
        again = [n for n, one in enumerate(value) if one in value[:n]]
        if again:
            wrong = InitErrorDetails(type=expected("another policy than those before"), loc=(again[0],), input="twice")
            raise ValidationError.from_exception_data("policies", [wrong])
        return value

    @field_validator("fleet", mode="after")
    @classmethod
    def _some_servers(cls, value: tuple[ServerSettings, ...]) -> tuple[ServerSettings, ...]:
        if not 1 <= sum(group.count for group in value) <= MAX_SERVERS:
            raise expected(f"1 to {MAX_SERVERS} servers")
        return value

    @field_validator("faults", "others", mode="after")
    @classmethod
    def _of_servers(cls, value: tuple[OfServer, ...], info: ValidationInfo) -> tuple[OfServer, ...]:
        servers = sum(group.count for group in info.data.get("fleet", ()))
        if servers and any(one.server >= servers for one in value):
            raise expected(f"servers from 0 to {servers - 1}")
        return value
