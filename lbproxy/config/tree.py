"""The settings tree: which keys there are, in the order of config.example.yaml, with unit, default and reason.

Invariants of a `Settings`, however it was made: it is frozen, every number lies in its range, endpoint names and
addresses are unique, and no two keys contradict each other. A check between keys runs once each of them is right by
itself. Names are not resolved and endpoints are not dialled here.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.engines import BUILT_IN_ENGINES, MAX_ENGINES, EngineSettings, check_engine_names, check_own_engines
from lbproxy.config.health import BreakerSettings, HealthSettings
from lbproxy.config.section import Section, ShortSection
from lbproxy.config.values import (
    PATH,
    Interval,
    Quantity,
    Timeout,
    count,
    duration,
    expected,
    hosts_overlap,
    read_authority,
    read_dns_authority,
    read_host,
    read_nameserver,
    size,
)

MAX_ENDPOINTS = 1024
"""Also of all addresses that names lead to, together."""
MAX_NAMESERVERS = 8
DNS_SCHEME = "dns+http://"
OWN_ENGINES = "own engines"
"""Key of the validation context: the names in `engines`, which the endpoints' engines are among."""

Port: TypeAlias = Annotated[int, count("0", "65535")]


class Address(ShortSection):
    """Where lbproxy listens: `host:port`, `[ipv6]:port`, or a mapping of the two."""

    host: str
    """An IP address or a name. 0.0.0.0 = every IPv4 address of this machine; it has to be said, never assumed."""
    port: Port
    """0 = any free port; the log says which."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, dict | Address):
            return value
        match = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):([0-9]{1,5})", value) if isinstance(value, str) else None
        if match is None or read_host(match[1]) is None or int(match[2]) > 65535:
            raise expected("host:port, such as 127.0.0.1:8080 or [::1]:8080")
        return {"host": match[1], "port": match[2]}

    @field_validator("host", mode="after")
    @classmethod
    def _check_host(cls, value: str) -> str:
        host = read_host(value) or read_host(f"[{value}]")
        if host is None:
            raise expected("an IP address or a host name")
        return host.strip("[]")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EndpointSettings(ShortSection):
    """One model server, or all that a DNS name leads to: a URL, or a mapping."""

    url: str
    """`http://host:port`, or `dns+http://name:port` = every address of the name. No path, plain HTTP only. Port 80 if
    none is said."""
    name: str = ""
    """What logs, metrics and clients call it: 1 to 64 of letters, digits and `._:[]-`. Default: the URL's host:port."""
    engine: str = "auto"
    """Which software it runs, so which metrics it has: a built-in one or one of `engines`. `auto` = recognised from its
    metrics."""
    metrics: str | None = "auto"
    """Where its load stands: `auto` (the engine's usual place), a path, an absolute http URL, or null = not scraped."""
    health: str | None = "/health"
    """Path that answers below 500 while the server lives. null = not probed: up until requests fail."""

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url", mode="before")
    @classmethod
    def _normalise_url(cls, value: object) -> str:
        if isinstance(value, str):
            if (authority := read_authority(value, root_only=True)) is not None:
                return f"http://{authority}"
            if (authority := read_dns_authority(value)) is not None:
                return DNS_SCHEME + authority
        raise expected("http://host:port or dns+http://name:port (no path; https is not supported in this version)")

    @field_validator("name", mode="before")
    @classmethod
    def _default_name(cls, value: object, info: ValidationInfo) -> object:
        url = info.data.get("url")
        name = (url.rpartition("/")[2] if url else "unnamed") if value in (None, "") else value
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,64}", name):
            raise expected("1 to 64 letters, digits or any of ._:[]-")
        return name

    @field_validator("engine", mode="after")
    @classmethod
    def _check_engine(cls, value: str, info: ValidationInfo) -> str:
        own = (info.context or {}).get(OWN_ENGINES, ())
        known = dict.fromkeys(("auto", *BUILT_IN_ENGINES, *own))
        if value not in known:
            raise expected(f"one of {', '.join(known)}")
        return value

    @field_validator("metrics", mode="after")
    @classmethod
    def _check_metrics(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or value == "auto" or PATH.fullmatch(value):
            return value
        if not info.data.get("url", "").startswith(DNS_SCHEME):
            if read_authority(value):
                return value
            raise expected("auto, an absolute path, an http:// URL or null")
        raise expected("auto, an absolute path or null (each address of a name has metrics of its own)")

    @field_validator("health", mode="after")
    @classmethod
    def _check_health(cls, value: str | None) -> str | None:
        if value is None or PATH.fullmatch(value):
            return value
        raise expected("an absolute path or null")

    @property
    def authority(self) -> str:
        """The URL's `host:port`."""
        return self.url.rpartition("/")[2]

    @property
    def is_name(self) -> bool:
        """Whether this stands for every address of a DNS name."""
        return self.url.startswith(DNS_SCHEME)


Policy: TypeAlias = Literal[
    "adaptive",
    "least-request",
    "round-robin",
    "random",
    "p2c",
    "gie",
    "gie-tree",
    "llm-d",
    "cache-aware",
    "prefix-hash",
    "preble",
    "dynamo",
    "lmetric",
    "min-ttft",
    "weighted",
]
ScorerName: TypeAlias = Literal["queue", "kv-utilization", "in-flight", "prefix"]
Weight: TypeAlias = Annotated[float, Quantity("0.000001", "1000000", "a weight", whole=False)]


class RoutingSettings(Section):
    """Which endpoint a request goes to."""

    policy: Policy = "adaptive"
    """How endpoints are compared. adaptive predicts what a request costs on each; least-request counts requests."""
    scorers: dict[ScorerName, Weight] | None = None
    """With policy `weighted`, and only then: scorer -> weight above 0. Only the weights' proportions matter."""
    prefix_memory: Annotated[int, size("1MiB", "1024GiB")] = 600 * 1024**2
    """What may be remembered of the endpoints' prefix caches, for policies that go by them: about 140 bytes for each
    block of 1 KiB of prompts. When it is full, the oldest is forgotten."""

    @field_validator("scorers", mode="after")
    @classmethod
    def _belong_to_weighted(cls, value: object, info: ValidationInfo) -> object:
        policy = info.data.get("policy")
        if policy == "weighted" and not value:
            raise expected("scorer names with weights, because policy is weighted")
        if policy not in (None, "weighted") and value is not None:
            raise expected("nothing: scorers are for policy weighted only")
        return value


class AdmissionSettings(Section):
    """The queue of requests that no endpoint has room for."""

    queue_requests: Annotated[int, count("0", "1000000")] = 1024
    """Requests that may wait; one more is answered 429. 0 = nobody waits."""
    queue_bytes: Annotated[int, size("0", "1024GiB")] = 256 * 1024**2
    """Bytes of the bodies that wait, all together: long prompts fill memory before they fill the count."""
    queue_timeout: Timeout = 30.0
    """Seconds a request may wait before it is answered 429: by then most callers have given up."""
    max_in_flight_per_endpoint: Annotated[int, count("1", "1000000")] | None = None
    """Requests that one endpoint gets at a time; more wait here. null = no limit: engines queue by themselves."""
    hold: bool | None = None
    """Keep requests here while the endpoint that is best for them has a second of prefill queued, and place them when
    it has not. For policy adaptive. null = true, but false with order fcfs."""
    order: Literal["shortest", "fcfs"] = "shortest"
    """Who goes first among those that wait: the least prefill work, less with age (if the policy knows it), or first
    come, first served. A higher priority goes before both."""


class RetrySettings(Section):
    """What happens when an endpoint fails a request before the first byte of the answer."""

    attempts: Annotated[int, count("1", "10")] = 3
    """Tries in all, each on another endpoint. Client libraries multiply this by their own three."""
    budget_ratio: Annotated[float, Quantity("0", "10", "a ratio", whole=False)] = 0.2
    """Retries per request of the last 10 s, over the whole pool. Retries after a failed connect are free."""
    budget_per_second: Annotated[float, Quantity("0", "100000", "a rate", whole=False)] = 10.0
    """And so many a second besides, so that a quiet pool can retry too."""


class ScrapeSettings(Section):
    """Reading the endpoints' own metrics."""

    interval: Interval = 0.2
    """Seconds between two scrapes of an endpoint. A burst is judged by gauges at most this old, plus our own count. 2.5
    times that for one without requests, longer with more than 100 endpoints; at most half of stale_after."""
    timeout: Timeout = 0.5
    """Seconds a scrape may take."""
    stale_after: Timeout = 2.0
    """Seconds after which gauges are not believed any more and our own in-flight count decides alone."""
    page: Annotated[int, size("1KiB", "64MiB")] = 2 * 1024**2
    """Bytes of one page of metrics at most; vLLM's has 48 to 64 KB. A longer one is a failed scrape."""

    @field_validator("stale_after", mode="after")
    @classmethod
    def _outlives_interval(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("interval", 0.0):
            raise expected("at least scrape.interval (else stale before the next scrape)")
        return value


class TimeoutSettings(Section):
    """How long each phase of a request may take. There is no limit on the whole: generations run for minutes."""

    connect: Timeout = 1.0
    """Seconds for one TCP connection to an endpoint; then the next endpoint is tried."""
    first_byte: Timeout = 600.0
    """Seconds until an endpoint's answer begins; a long prompt may queue. 600 s is the OpenAI client's own limit."""
    stream_idle: Timeout = 300.0
    """Seconds without a byte from the endpoint in mid-answer."""
    client_head: Timeout = 10.0
    """Seconds for a request's head, from its first byte; for the first one from the connection (HAProxy's advice)."""
    client_body: Timeout = 120.0
    """Seconds for a request's whole body to arrive."""
    client_stall: Timeout = 60.0
    """Seconds in which a client must take some of what waits for it, else it is cut off (nginx's default)."""
    client_idle: Timeout = 75.0
    """Seconds that a client's idle connection is kept (nginx's default)."""


class LimitSettings(Section):
    """What one client can make lbproxy hold."""

    json_body: Annotated[int, size("1KiB", "1GiB")] = 32 * 1024**2
    """Bytes of a JSON request body; more is answered 413."""
    body: Annotated[int, size("1KiB", "1GiB")] = 64 * 1024**2
    """Bytes of any other request body (audio, images); at least json_body."""
    body_rate: Annotated[int, size("1", "1GiB")] = 16 * 1024
    """Bytes a second of a request body, at least, after its first 10 s: slower ones only hold memory; 408."""
    connections: Annotated[int, count("1", "1000000")] = 10_000
    """Client connections at a time; also at most 45 % of the file descriptors that the process may open."""
    buffered_bodies: Annotated[int, size("1MiB", "1024GiB")] | None = None
    """Bytes of all request bodies held at a time; what would exceed it is answered 503. null = a quarter of memory, at
    most 512 MiB."""
    memory: Annotated[int, size("16MiB", "1024GiB")] | None = None
    """Bytes that lbproxy may take: at 92 % of it requests are answered 503. null = what its cgroup, else the machine,
    has."""

    @field_validator("body", mode="after")
    @classmethod
    def _holds_json_body(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("json_body", 0):
            raise expected("at least limits.json_body")
        return value


class DnsSettings(Section):
    """Resolving the names of `dns+http://` endpoints. Requests never wait for it."""

    nameservers: tuple[str, ...] | None = None
    """A list of `ip` or `ip:port` to ask, at most 8. null = as this machine does: hosts file, then resolv.conf."""
    interval: Interval = 5.0
    """Seconds between two resolutions of a name, whatever its TTL. A failed one changes nothing."""
    timeout: Timeout = 2.0
    """Seconds for one resolution in all; each nameserver is asked about twice in that time."""

    @field_validator("nameservers", mode="before")
    @classmethod
    def _some(cls, value: object) -> object:
        if isinstance(value, list | tuple) and not 1 <= len(value) <= MAX_NAMESERVERS:
            raise expected(f"1 to {MAX_NAMESERVERS} nameservers, or null")
        return value

    @field_validator("nameservers", mode="after")
    @classmethod
    def _normalise(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        read = [read_nameserver(text) for text in value]
        wrong = [
            InitErrorDetails(type=expected("ip or ip:port, such as 10.0.0.2 or [fd00::2]:53"), loc=(n,), input=value[n])
            for n, one in enumerate(read)
            if one is None
        ]
        if wrong:
            raise ValidationError.from_exception_data("nameservers", wrong)
        return tuple(dict.fromkeys(one for one in read if one))


class DrainSettings(Section):
    """Stopping."""

    deadline: Timeout = 120.0
    """Seconds that running requests get to finish after SIGTERM. Must be below the supervisor's own kill timeout."""
    lame_duck: Annotated[float, duration("0s", "1h")] = 5.0
    """Seconds of these in which everybody is still served, but no connection is kept: until whoever sends clients here
    has seen /readyz say no. SIGINT skips them."""


class LogSettings(Section):
    """JSON lines on standard output."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines that are written."""
    access: bool = True
    """One line for each request: never bodies, prompts or keys."""


class Settings(Section):
    """Everything that a user can set."""

    listen: Address = Address(host="127.0.0.1", port=8080)
    """Where clients connect. The default reaches nobody else's machine: there is no authentication."""
    admin: Address | None = Address(host="127.0.0.1", port=9901)
    """Listener for /healthz, /readyz, /metrics: its own port, so that it answers under load. null = off."""
    endpoints: tuple[EndpointSettings, ...] = Field(json_schema_extra={"minItems": 1, "maxItems": MAX_ENDPOINTS})
    """The model servers, at least one. Names and addresses are unique."""
    engines: dict[str, EngineSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_ENGINES})
    """Software that lbproxy does not know, or knows by other names, by the name that `engine` says."""
    routing: RoutingSettings = RoutingSettings()
    """Which endpoint a request goes to."""
    admission: AdmissionSettings = AdmissionSettings()
    """The queue of requests that no endpoint has room for."""
    retry: RetrySettings = RetrySettings()
    """What happens when an endpoint fails before the first byte of its answer."""
    health: HealthSettings = HealthSettings()
    """Probing endpoints."""
    breaker: BreakerSettings = BreakerSettings()
    """Taking out endpoints that fail requests."""
    scrape: ScrapeSettings = ScrapeSettings()
    """Reading the endpoints' own metrics."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """How long each phase of a request may take."""
    limits: LimitSettings = LimitSettings()
    """What one client can make lbproxy hold."""
    dns: DnsSettings = DnsSettings()
    """Resolving the names of `dns+http://` endpoints."""
    expose_endpoint: bool = True
    """Answers carry x-lbproxy-endpoint, the endpoint's name. false hides the fleet from clients."""
    drain: DrainSettings = DrainSettings()
    """Stopping."""
    log: LogSettings = LogSettings()
    """JSON lines on standard output."""

    @field_validator("admin", mode="after")
    @classmethod
    def _own_address(cls, value: Address | None, info: ValidationInfo) -> Address | None:
        listen = info.data.get("listen")
        if value and listen and value.port == listen.port != 0 and hosts_overlap(value.host, listen.host):
            raise expected(f"another port: {listen} is taken by listen")
        return value

    @field_validator("engines", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return check_engine_names(value)

    @field_validator("engines", mode="after")
    @classmethod
    def _show_load(cls, value: dict[str, EngineSettings]) -> dict[str, EngineSettings]:
        return check_own_engines(value)

    @field_validator("endpoints", mode="before")
    @classmethod
    def _some(cls, value: object) -> object:
        if isinstance(value, list | tuple) and not 1 <= len(value) <= MAX_ENDPOINTS:
            raise expected(f"1 to {MAX_ENDPOINTS} endpoints")
        return value

    @field_validator("endpoints", mode="after")
    @classmethod
    def _distinct(cls, value: tuple[EndpointSettings, ...], info: ValidationInfo) -> tuple[EndpointSettings, ...]:
        own = [(key, info.data[key]) for key in ("listen", "admin") if info.data.get(key)]
        urls: dict[str, int] = {}
        names: dict[str, int] = {}
        clashes: list[InitErrorDetails] = []
        for index, endpoint in enumerate(value):
            for key, address in own:
                if leads_to(endpoint.authority, address):
                    clashes.append(_clash(index, "url", f"another server than lbproxy's own {key}", endpoint.url))
            same_url = urls.setdefault(endpoint.url, index)
            same_name = names.setdefault(endpoint.name, index)
            if same_url != index:
                clashes.append(_clash(index, "url", f"another url than endpoints[{same_url}] has", endpoint.url))
            elif same_name != index:
                clashes.append(_clash(index, "name", f"another name than endpoints[{same_name}] has", endpoint.name))
        if clashes:
            raise ValidationError.from_exception_data("endpoints", clashes)
        return value


def leads_to(authority: str, address: Address) -> bool:
    """Whether an endpoint's `host:port` leads back to a listener of ours: such a request would go round for ever."""
    host, _, port = authority.rpartition(":")
    host = host.strip("[]")
    if int(port) != address.port:
        return False
    # A wildcard takes whatever this machine is called; of those names only these are known without resolving.
    return host == address.host or (host in ("127.0.0.1", "::1", "localhost") and hosts_overlap(host, address.host))


def _clash(index: int, key: str, what: str, value: str) -> InitErrorDetails:
    return InitErrorDetails(type=expected(what), loc=(index, key), input=value)
