# SPDX-License-Identifier: Apache-2.0
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
from lbproxy.config.values import Quantity, count, duration, expected, rule

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
    """Model and GPUs."""
    speed: Factor = 1.0
    """2 = twice as fast as the preset."""
    kv_tokens: Tokens | None = None
    """Size of the KV cache; null = the preset's."""
    max_model_len: Tokens | None = None
    """Tokens of prompt and response; null = the preset's."""
    max_loras: Adapters = 0
    """LoRA adapters that run together."""
    max_sequences: Sequences | None = None
    """Requests that run together; null = the preset's."""
    ranks: Ranks = 1
    """Data-parallel engines behind one address; a request goes to the one with the fewest."""
    ttft: Span | None = None
    """Fixed time to first token, in seconds: only slots are simulated then. null = an engine."""
    ttft_spread: Share = 0.0
    """Variation of `ttft`, as `ttft_form` says."""
    ttft_form: Literal["uniform", "lognormal", "bimodal", "heavy", "prompt"] = "uniform"
    """uniform: plus or minus `ttft_spread` as a share. lognormal: that sigma. bimodal: ten times `ttft` for that share.
    heavy: a Pareto distribution with the exponent 1 / `ttft_spread`. prompt: as lognormal, equal for prompts that begin
    alike."""
    token_time: Span = 0.02
    """With `ttft`: seconds from token to token."""
    jitter: Annotated[float, Quantity("0", "2", "a number", whole=False)] = 0.03
    """Sigma (lognormal) of the times of an engine's steps."""
    prefix_cache: bool = True
    """Whether they cache prompts."""
    pause: Annotated[float, duration("0s", "10m")] = 0.0
    """Time for which a server stands still, once every `pause_every`, in turns."""
    pause_every: Annotated[float, duration("1ms", "1h")] = 60.0
    """Must exceed `pause`."""
    cold_share: Share = 0.0
    """Share of requests that need experts which are not in GPU memory."""
    cold_load: Annotated[float, duration("0s", "10m")] = 1.0
    """Time that loading these stops all requests."""
    hidden: Share = 0.0
    """Share of a response's tokens that clients do not get, generated before the first."""
    role_chunk: bool = False
    """Whether a stream starts with an event without a token at once."""
    usage: Literal["all", "no-cached", "none"] = "all"
    """no-cached: nothing of cached tokens."""
    metrics: bool = True
    """Whether they can be scraped."""
    waiting: bool = True
    """Whether their metrics report waiting requests."""
    gauges: Literal["true", "in-flight", "zero", "doubled"] = "true"
    """in-flight: all as waiting, none as running. zero: nothing. doubled: twice as many."""
    weight: Annotated[float, Quantity("0.001", "100000", "a number", whole=False)] = 1.0
    """`weight` of an endpoint."""
    role: Literal["both", "prefill", "decode"] = "both"
    """`role` of an endpoint, with vLLM's NIXL connector."""

    _no_ranks = rule("ttft", "no `ranks` beside it", lambda ttft, other: ttft is not None and other("ranks", 1) != 1)
    _longer_than_a_pause = rule("pause_every", "more than `pause`", lambda every, other: every <= other("pause", 0.0))
    _of_engines = rule(
        "role",
        "both, as servers with `ttft` hand nothing over",
        lambda role, other: role != "both" and other("ttft") is not None,
    )


class OthersSettings(Section):
    """Requests of other clients, sent directly to one server: the balancer sees them only in metrics, and they are not
    counted in the figures. Poisson arrivals of one size, without common prefixes."""

    server: Annotated[int, count("0", "1023")]
    """Its number, in the order of `fleet`."""
    rate: Annotated[float, Quantity("0.001", "100000", "a rate", whole=False)]
    """Requests per second."""
    prompt_tokens: Annotated[int, count("1", "1000000")] = 1000
    output_tokens: Annotated[int, count("1", "1000000")] = 200
    at: Moment = 0.0
    """Since the start."""
    lasts: Annotated[float, duration("1ms", "24h")] = 86_400.0
    """Duration."""


class FaultSettings(Section):
    """A fault of one server for a while."""

    server: Annotated[int, count("0", "1023")]
    """Its number, from 0, in the order of `fleet`."""
    at: Moment
    """Since the start."""
    lasts: Annotated[float, duration("1ms", "24h")]
    """Duration."""
    speed: Factor | None = None
    """Factor of its own speed. null = it fails, by `kind`."""
    kind: Literal["dead", "hung", "failing", "restarted", "cleared", "stale"] = "dead"
    """dead: refuses connections, returns with an empty cache. hung: accepts requests and computes nothing. failing:
    returns 500 at once. restarted: loses its requests and cache at `at`, unreported. cleared: loses its cache only.
    stale: its metrics do not change. The health checks of all but the first succeed."""


class ExchangeSettings(Section):
    """How balancers tell each other of their requests."""

    interval: Annotated[float, duration("1ms", "1m")] = 0.05
    """Between two batches of one balancer."""
    delay: Annotated[float, duration("0s", "1m")] = 0.002
    """Mean time until a batch arrives."""
    lost: Share = 0.0
    """Share of batches that never arrive."""
    repeated: Share = 0.0
    """Share that arrives twice."""
    late: Share = 0.0
    """Share that arrives three intervals later."""


class BalancerFaultSettings(Section):
    """The death of one balancer, with everything that it has; the others notice it after 3 s."""

    balancer: Annotated[int, count("0", "63")]
    """Its number, from 0."""
    at: Moment
    """Since the start; its requests fail, and others notice after 3 s."""
    lasts: Annotated[float, duration("1ms", "24h")] = 86_400.0
    """Until another takes its place, with what the others know."""


OfServer: TypeAlias = FaultSettings | OthersSettings


class WorkloadSettings(Section):
    """What clients send."""

    name: str
    """The workload; `lbproxy sim --list` lists them."""
    parameters: dict[str, Annotated[float, Quantity("0", "1000000000", "a number", whole=False)]] = Field(
        default_factory=dict
    )
    """Changes of the defaults."""
    trace: str | None = None
    """The file that it replays."""
    flow: Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,48}$")] = "anonymous"
    """As with an API key or `x-lbproxy-flow`."""
    copies: Annotated[int, count("1", "256")] = 1
    """Clients that each send this; each has its own flow: light-1, light-2."""
    priority: Priority | None = None
    """Their `x-lbproxy-priority`."""
    slo_ttft: Annotated[float, duration("1ms", "1h")] | None = None
    """As `x-lbproxy-slo-ttft-ms`."""
    patience: Annotated[float, duration("1ms", "1h")] | None = None
    """A client disconnects if it has no first token by then (without streaming: no response)."""
    stream_share: Share | None = None
    """null = the scenario's."""


class Scenario(Section):
    """One comparison."""

    fleet: tuple[ServerSettings, ...] = (ServerSettings(count=8),)
    """The servers."""
    faults: tuple[FaultSettings, ...] = ()
    """Faults of the servers."""
    others: tuple[OthersSettings, ...] = ()
    """Requests of other clients, which the balancer sees only in metrics; not in the figures."""
    workload: WorkloadSettings | None = None
    """What clients send."""
    workloads: tuple[WorkloadSettings, ...] = ()
    """Several, at the same time."""
    policies: tuple[RoutingSettings, ...]
    """Names, or mappings like `routing` in the settings; all are compared with the first."""
    seeds: Annotated[int, count("1", "100")] = 3
    """Number of runs with other arrivals."""
    stream_share: Share = 1.0
    """Share of requests that stream."""
    size_error: Share = 0.15
    """Of the balancer's estimate of prompt tokens: uniform, plus or minus."""
    adapters_known: bool = True
    """Whether model lists mark LoRA adapters; else they are separate models."""
    sizes_declared: bool = False
    """Whether endpoints have the right `kv_cache_tokens`."""
    scrape_interval: Annotated[float, duration("10ms", "1h")] | None = 0.2
    """Between two scrapes; null = none."""
    scrape_delay: Annotated[float, duration("0s", "1m")] = 0.005
    """Age of a scrape's figures."""
    network_delay: Annotated[float, duration("0s", "10s")] = 0.0005
    """One way, balancer to server."""
    balancers: Annotated[int, count("1", "64")] = 1
    """They share the fleet, each with a part of the requests."""
    exchange: ExchangeSettings | None = None
    """How they tell each other; null = they share nothing."""
    balancer_faults: tuple[BalancerFaultSettings, ...] = ()
    """Deaths of balancers."""
    admission: AdmissionSettings = AdmissionSettings(
        queue_requests=1_000_000, queue_bytes=1024 * 1024**3, queue_timeout=86_400
    )
    """The queue; by default it refuses nothing, because refused requests have no latency."""
    flows: FlowsSettings = FlowsSettings()
    """As in the settings."""
    fair: bool = True
    """false = one flow for all."""

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

    _some_servers = rule(
        "fleet",
        f"1 to {MAX_SERVERS} servers",
        lambda fleet, _: not 1 <= sum(group.count for group in fleet) <= MAX_SERVERS,
    )

    @field_validator("faults", "others", mode="after")
    @classmethod
    def _of_servers(cls, value: tuple[OfServer, ...], info: ValidationInfo) -> tuple[OfServer, ...]:
        servers = sum(group.count for group in info.data.get("fleet", ()))
        if servers and any(one.server >= servers for one in value):
            raise expected(f"servers from 0 to {servers - 1}")
        return value

    @field_validator("balancer_faults", mode="after")
    @classmethod
    def _of_balancers(
        cls, value: tuple[BalancerFaultSettings, ...], info: ValidationInfo
    ) -> tuple[BalancerFaultSettings, ...]:
        balancers = info.data.get("balancers", 1)
        if any(one.balancer >= balancers for one in value):
            raise expected(f"balancers from 0 to {balancers - 1}")
        if value and len({one.balancer for one in value}) == balancers:
            raise expected("at least one balancer that does not die")
        return value
