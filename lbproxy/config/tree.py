# SPDX-License-Identifier: Apache-2.0
"""The settings tree: which keys there are, in the order of config.example.yaml, with unit, default and reason.

Invariants of a `Settings`, however it was made: it is frozen, every number lies in its range, endpoint names and
addresses are unique, and no two keys contradict each other. A check between keys runs once each of them is right by
itself. Names are not resolved and endpoints are not dialled here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, RootModel, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.publishers import Publisher, overlap, read_publisher
from lbproxy.config.section import Section
from lbproxy.config.sections.access import AdminSettings, AuthSettings, ListenSettings
from lbproxy.config.sections.clients import MAX_PATHS, Address, LimitSettings, TimeoutSettings, path_pattern
from lbproxy.config.sections.cors import CorsSettings
from lbproxy.config.sections.endpoints import DnsSettings, EndpointSettings, ScrapeSettings
from lbproxy.config.sections.engines import MAX_ENGINES, EngineSettings, check_engine_names, check_own_engines
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.models import MAX_NAMES, ModelSettings, check_models
from lbproxy.config.sections.observing import AutoscalingSettings, ExplainSettings, TraceSettings
from lbproxy.config.sections.proxies import LOOPBACK, MAX_TRUSTED, ForwardedMode, Network, read_networks
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.config.sections.routing import (
    AdmissionSettings,
    OverflowSettings,
    RetrySettings,
    RoutingSettings,
    StateSettings,
)
from lbproxy.config.sleep import MAX_HOSTS, HostSettings, check_host_name
from lbproxy.config.values import CountOrAuto, Keepalive, Timeout, duration, expected, hosts_overlap

MAX_ENDPOINTS = 1024
"""Also of all addresses that names lead to, together."""


class DrainSettings(Section):
    """Shutdown."""

    deadline: Timeout = 120.0
    """For running requests after SIGTERM. Must be below the supervisor's own kill timeout."""
    lame_duck: Annotated[float, duration("0s", "1h")] = 5.0
    """The first part of it, in which all requests are still served, until the load balancer in front has seen that
    /readyz fails."""
    restart_deadline: Timeout = 3600.0
    """For running requests after SIGUSR2, in the old process; a SIGTERM to it sets `deadline` instead."""


class LogSettings(Section):
    """JSON lines on standard output."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The minimum level of lines."""
    access: bool = True
    """One line for each request: never bodies, prompts or keys."""


class UsageSettings(Section):
    """Tokens of streams whose clients do not ask how many they used."""

    ask: Literal["auto", "always", "never"] = "auto"
    """Streams of chat and completions are sent with `stream_options.include_usage`, unseen by clients. auto = where a
    limit of tokens or `continue` applies."""


class Settings(Section):
    """Everything that a user can set."""

    listen: ListenSettings = ListenSettings(host="127.0.0.1", port=8080)
    """Where clients connect. By default this machine only, as clients need no key without `auth`."""
    admin: AdminSettings | None = AdminSettings(host="127.0.0.1", port=9901)
    """The listener of health, metrics and the admin API. null = off."""
    workers: CountOrAuto = 1
    """Processes that relay requests: docs/scale.md. 1 = one process for all; auto = one less than the cores."""
    endpoints: tuple[EndpointSettings, ...] = Field(json_schema_extra={"maxItems": MAX_ENDPOINTS})
    """The model servers. Names and addresses are unique. None (`[]`) only with `admin`, where they register."""
    engines: dict[str, EngineSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_ENGINES})
    """Engines that lbproxy does not know, or changes to known ones, by name."""
    hosts: dict[str, HostSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_HOSTS})
    """Groups of endpoints that share GPUs, by name."""
    models: dict[str, ModelSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_NAMES})
    """Names of your own for the endpoints' models."""
    routing: RoutingSettings = RoutingSettings()
    """How an endpoint is chosen for a request."""
    state: StateSettings = StateSettings()
    """What was learned, kept in a file over a restart of lbproxy."""
    replicas: ReplicasSettings = ReplicasSettings()
    """Other lbproxies before the same endpoints."""
    admission: AdmissionSettings = AdmissionSettings()
    """The queue of requests that no endpoint has room for."""
    overflow: OverflowSettings = OverflowSettings()
    """When requests go to endpoints of a higher tier."""
    flows: FlowsSettings = FlowsSettings()
    """Fair shares of capacity between the flows of different clients."""
    retry: RetrySettings = RetrySettings()
    """Retries after an endpoint fails a request before the first byte of the response."""
    health: HealthSettings = HealthSettings()
    """Health checks of endpoints."""
    breaker: BreakerSettings = BreakerSettings()
    """Circuit breaker: ejects endpoints that fail requests."""
    scrape: ScrapeSettings = ScrapeSettings()
    """Reading the endpoints' own metrics."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """How long each phase of a request may take."""
    stream_keepalive: Keepalive = 0.0
    """Clients of event streams that heard nothing for so long get a comment: docs/failures.md. 0 = none."""
    usage: UsageSettings = UsageSettings()
    """Tokens of streams whose clients do not ask how many they used."""
    limits: LimitSettings = LimitSettings()
    """Limits of what lbproxy holds in memory for clients."""
    dns: DnsSettings = DnsSettings()
    """Resolution of the names of `dns+http://` endpoints."""
    expose_endpoint: bool = True
    """Responses have x-lbproxy-endpoint. false hides the fleet from clients."""
    forwarded: ForwardedMode = "append"
    """X-Forwarded-For, -Proto and -Host towards endpoints: docs/failures.md."""
    trusted_proxies: tuple[Network, ...] = Field(default=LOOPBACK, json_schema_extra={"maxItems": MAX_TRUSTED})
    """Networks of the proxies in front, in CIDR notation, whose X-Forwarded-* count."""
    auth: AuthSettings = AuthSettings()
    """Who may send requests."""
    cors: CorsSettings = CorsSettings()
    """Web pages of other origins that may call lbproxy from a browser."""
    inference_paths: tuple[str, ...] = Field(default=(), json_schema_extra={"maxItems": MAX_PATHS})
    """Further paths of inference, such as `/predict` and `/v2/models/{model}/*`: docs/routing.md."""
    lora_management: bool = False
    """Every client may load and unload LoRA adapters, on every endpoint of the base model."""
    drain: DrainSettings = DrainSettings()
    """Shutdown."""
    log: LogSettings = LogSettings()
    """JSON lines on standard output."""
    explain: ExplainSettings = ExplainSettings()
    """Why requests went where they went."""
    traces: TraceSettings = TraceSettings()
    """Spans of each request, sent to an OpenTelemetry collector."""
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    """How many endpoints are recommended for each model."""

    @property
    def balancing(self) -> BalancingSettings:
        """Those that the Balancer reads."""
        return BalancingSettings(
            self.admission,
            self.flows,
            self.retry,
            self.health,
            self.breaker,
            self.scrape,
            self.overflow,
            self.hosts,
            self.autoscaling,
        )

    @field_validator("forwarded", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML's own word for it

    _networks = field_validator("trusted_proxies", mode="before")(read_networks)

    @field_validator("admin", mode="after")
    @classmethod
    def _own_address(cls, value: AdminSettings | None, info: ValidationInfo) -> AdminSettings | None:
        listen = info.data.get("listen")
        if value and listen and value.unix is not None and value.unix == listen.unix:
            raise expected(f"another path: {listen} is taken by listen")
        if value and listen and value.port == listen.port != 0 and hosts_overlap(value.host, listen.host):
            raise expected(f"another port: {listen} is taken by listen")
        return value

    _named = field_validator("engines", mode="before")(check_engine_names)
    _show_load = field_validator("engines", mode="after")(check_own_engines)

    @field_validator("hosts", mode="after")
    @classmethod
    def _hosts(cls, value: dict[str, HostSettings]) -> dict[str, HostSettings]:
        if len(value) > MAX_HOSTS:
            raise expected(f"at most {MAX_HOSTS} hosts")
        for name in value:
            check_host_name(name)
        return value

    _lead_to_models = field_validator("models", mode="after")(check_models)

    @field_validator("inference_paths", mode="after")
    @classmethod
    def _are_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_PATHS:
            raise expected(f"at most {MAX_PATHS} paths")
        for one in value:
            path_pattern(one)
        return value

    @field_validator("endpoints", mode="before")
    @classmethod
    def _some(cls, value: object, info: ValidationInfo) -> object:
        least = 0 if info.data.get("admin") is not None else 1
        if isinstance(value, list | tuple) and not least <= len(value) <= MAX_ENDPOINTS:
            without = " (none only with `admin`)" if not value else ""
            raise expected(f"1 to {MAX_ENDPOINTS} endpoints{without}")
        return value

    @field_validator("endpoints", mode="after")
    @classmethod
    def _distinct(cls, value: tuple[EndpointSettings, ...], info: ValidationInfo) -> tuple[EndpointSettings, ...]:
        return _check_distinct(value, {key: info.data[key] for key in ("listen", "admin") if info.data.get(key)})


OWN_ADDRESSES = "own addresses"
"""Key of the validation context of an `EndpointList`: the addresses that lbproxy listens on, by the settings' keys."""


class EndpointList(RootModel[tuple[EndpointSettings, ...]]):
    """What a file of endpoints holds: a list of what `endpoints` takes, but no files again. May be empty."""

    @model_validator(mode="after")
    def _usable(self, info: ValidationInfo) -> EndpointList:
        files = [
            _clash(index, "url", "no file in a file", one.url) for index, one in enumerate(self.root) if one.is_file
        ]
        if files:
            raise ValidationError.from_exception_data("endpoints", files)
        if len(self.root) > MAX_ENDPOINTS:
            raise expected(f"at most {MAX_ENDPOINTS} endpoints")
        _check_distinct(self.root, (info.context or {}).get(OWN_ADDRESSES, {}))
        return self


def _check_distinct(value: tuple[EndpointSettings, ...], own: Mapping[str, Address]) -> tuple[EndpointSettings, ...]:
    """Raise all that is wrong with these endpoints together."""
    urls: dict[str, int] = {}
    names: dict[str, int] = {}
    clashes: list[InitErrorDetails] = []
    ports = {None if address.unix else address.port for address in own.values()}
    for index, endpoint in enumerate(value):
        for key, address in own.items() if endpoint.port in ports else ():
            if endpoint.leads_to(address):
                clashes.append(_clash(index, "url", f"another server than lbproxy's own {key}", endpoint.url))
        same_url = urls.setdefault(endpoint.identity, index)
        same_name = names.setdefault(endpoint.name, index)
        if same_url != index:
            clashes.append(_clash(index, "url", f"another url than endpoints[{same_url}] has", endpoint.url))
        elif same_name != index:
            clashes.append(_clash(index, "name", f"another name than endpoints[{same_name}] has", endpoint.name))
    clashes += _same_publishers(value)
    if clashes:
        raise ValidationError.from_exception_data("endpoints", clashes)
    return value


def _same_publishers(value: tuple[EndpointSettings, ...]) -> Iterator[InitErrorDetails]:
    """Those whose `kv_events` are those of an endpoint before."""
    seen: list[tuple[int, int, Publisher]] = []
    for index, endpoint in ((index, one) for index, one in enumerate(value) if one.kv_events):
        read = read_publisher(endpoint.kv_events or "")
        if read is None or not read.host:
            continue
        same = next((first for first, ranks, one in seen if overlap(one, ranks, read, endpoint.ranks or 1)), None)
        if same is None:
            seen.append((index, endpoint.ranks or 1, read))
        else:
            yield _clash(index, "kv_events", f"other ports than endpoints[{same}] has", str(read))


def _clash(index: int, key: str, what: str, value: str) -> InitErrorDetails:
    return InitErrorDetails(type=expected(what), loc=(index, key), input=value)
