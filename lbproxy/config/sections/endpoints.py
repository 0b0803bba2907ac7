# SPDX-License-Identifier: Apache-2.0
"""Settings of the model servers, and of how their names are resolved and their metrics read."""

from __future__ import annotations

import posixpath
import re
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.publishers import FORMS, FORMS_OF_MANY, REPLAY_FORMS, Publisher, overlap, read_publisher
from lbproxy.config.section import Section, ShortSection
from lbproxy.config.sections.clients import Address, leads_to
from lbproxy.config.sections.engines import BUILT_IN_ENGINES
from lbproxy.config.sections.proxies import ProxyUrl
from lbproxy.config.sleep import ColdStartSettings, check_host_name
from lbproxy.config.values import (
    PATH,
    CountOrAuto,
    Interval,
    Quantity,
    ShownUrl,
    Timeout,
    check_model_name,
    check_token,
    count,
    duration,
    expected,
    if_given,
    read_base_url,
    read_dns_url,
    read_host,
    read_nameserver,
    read_origin,
    read_srv_url,
    read_unix_url,
    rule,
    size,
)

MAX_NAMESERVERS = 8
MAX_MODELS = 1000
MAX_FORWARD_HEADERS = 64
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]{1,256}")
_KEYS = frozenset({"authorization", "x-api-key"})
Tier: TypeAlias = Annotated[int, count("1", "9")]
Limit: TypeAlias = Annotated[int, count("1", "1000000000")] | None
OWN_ENGINES = "own engines"
"""Key of the validation context: the names in `engines`, which the endpoints' engines are among."""
FOLDER = "folder"
"""Key of the validation context: where relative paths begin, the folder of the settings file."""


def _absolute(path: str, info: ValidationInfo) -> str:
    """A path that a file of settings names: relative to that file. Raises the error to show if it can be none."""
    if not 0 < len(path) <= 1024 or not path.isprintable():
        raise expected("a path")
    return posixpath.join((info.context or {}).get(FOLDER, ""), path)


class EndpointTls(Section):
    """How an https endpoint's certificate is verified."""

    ca: str | None = None
    """PEM file of trusted CA certificates, relative to the settings file. null = those that this machine trusts."""
    verify: bool = True
    """false = any certificate is accepted: an attacker in between can read and change everything. A warning is
    logged."""
    server_name: str | None = None
    """The name that the certificate must have, also sent as SNI and `Host`. null = the URL's."""

    @field_validator("ca", mode="after")
    @classmethod
    def _locate(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else _absolute(value, info)

    _not_both = rule(
        "verify",
        "true with tls.ca (which has no effect without verification)",
        lambda verify, other: not verify and other("ca") is not None,
    )

    @field_validator("server_name", mode="after")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        host = None if value is None else read_host(value)
        if value is not None and host is None:
            raise expected("a host name")
        return host and host.rstrip(".")


class EndpointSettings(ShortSection):
    """One model server, or all servers of a DNS name or a file: a URL, or a mapping."""

    url: str
    """`http://host:port` = one server; `dns+http://name:port` = every address of the name; `srv+http://name` = every
    server of its SRV records; or these with https. One server may have a path: `https://host/openai/v1`. `unix:/path` =
    a Unix socket of this machine. `file:path` = the endpoints that a file lists."""
    name: str = ""
    """In logs, metrics and responses: 1 to 64 letters, digits and `._:[]-`. Default: host:port, or the name of socket
    or file."""
    engine: str = "auto"
    """The server's software: a built-in engine or one of `engines`. `auto` = detected from its metrics, `ollama` and
    `lmstudio` by their API. `lbproxy` = another lbproxy, whose `x-lbproxy-reason` is believed; never detected."""
    metrics: ShownUrl | None = "auto"
    """A path, `:port/path`, an absolute URL (of a single server), `auto` (the engine's usual place), or null = not
    scraped: the default with `engine: lbproxy`, `ollama` and `lmstudio`."""
    health: ShownUrl | None = "/health"
    """Path of the health check: a status below 500 means alive. null = not probed: up until requests fail."""
    models: tuple[str, ...] | None = None
    """It serves exactly these. null = those of its /v1/models."""
    model: str | None = None
    """Its own name of the model, sent in place of those in `models`, which is required then."""
    tier: Tier = 1
    """It is used only if no endpoint of a lower tier can take the request: docs/overflow.md."""
    max_in_flight: Limit = None
    """Requests in flight there. null = `admission.max_in_flight_per_endpoint`."""
    requests_per_minute: Limit = None
    """More go elsewhere, or wait. null = no limit."""
    tokens_per_minute: Limit = None
    """Of prompts and responses, likewise."""
    tokens_per_day: Annotated[int, count("1", "1000000000000")] | None = None
    """Of prompts and responses in any 24 hours; with `state.file` also those before a restart."""
    weight: Annotated[float, Quantity("0.001", "100000", "a number", whole=False)] = 1.0
    """Relative capacity, for least-request, p2c and random; for adaptive and min-ttft the speed until it is
    measured."""
    kv_cache_tokens: Annotated[int, count("1000", "1000000000")] | None = None
    """Size of its KV cache, as vLLM prints it: `GPU KV cache size: 307,200 tokens`. Precedes what the server reports.
    null = reported, else learned."""
    ranks: CountOrAuto = "auto"  # type: ignore[assignment]  # read like what a file says
    """Data-parallel ranks behind the URL, each an endpoint `name#0` and so on, to which weight and kv_cache_tokens
    apply. `auto` = as its metrics show (vLLM, SGLang). 1 = the server distributes the requests itself."""
    role: Literal["auto", "both", "prefill", "decode"] = "auto"
    """Where prefill and decode are apart (docs/disaggregation.md). `auto` = as the engine says (SGLang), else both."""
    connector: Literal["auto", "nixl", "shared-storage", "mooncake", "sglang"] = "auto"
    """How prefill hands the KV cache to decode, the same at both ends. `auto` = as the engine shows (vLLM with NIXL or
    Mooncake, SGLang)."""
    bootstrap_port: Annotated[int, count("1", "65535")] | None = None
    """Where decode finds a prefill endpoint with connector mooncake or sglang. null = as SGLang says, else 8998."""
    kv_events: str | None = None
    """Where it publishes KV events over ZMQ (vLLM, SGLang): `tcp://host:port`, `:port`, or `bind tcp://*:port` for a
    server that connects; rank n at the port above it by n. Needs the extra kv-events."""
    kv_events_replay: str | None = None
    """Where it replays lost events: `tcp://host:port`, or `:port`. null = they are not asked for."""
    wake: bool = False
    """It may be asleep (vLLM's sleep mode, docs/sleep.md), and is woken when requests wait for its models."""
    sleep_after: Annotated[float, duration("1s", "168h")] | None = None
    """It is put to sleep after this time without a request. Needs wake. null = only if another of its `host` is
    wanted."""
    sleep_level: Literal[1, 2] = 1
    """1: its weights stay in its memory, outside the GPU. 2: it reads them again when it wakes."""
    host: str | None = None
    """Name of a group that shares GPUs, of which only as many are awake as `hosts` says. Needs wake or cold_start."""
    cold_start: ColdStartSettings | None = None
    """A webhook that starts it when requests wait for it. Needs models."""
    max_loaded_models: Annotated[int, count("1", "1024")] | None = None
    """Models in memory at a time, of one that loads them on demand: docs/sleep.md. null = as many as it shows."""
    memory: Annotated[int, size("1MiB", "1024GiB")] | None = None
    """Instead: as many as fit."""
    model_memory: dict[str, Annotated[int, size("1", "1024GiB")]] = Field(default={})
    """By model; others take all."""
    keep_loaded: tuple[str, ...] = ()
    """Models that stay in memory there: no other is loaded in their place."""
    never_load: tuple[str, ...] = ()
    """Models that are not loaded there; used while somebody else has them loaded."""
    api_key: SecretStr | None = None
    """Sent to it as `Authorization: Bearer`, instead of the client's. Write ${NAME} rather than the key."""
    forward_headers: tuple[str, ...] = ()
    """Further header fields of clients that it gets above tier 1: docs/overflow.md."""
    client_keep_alive: bool = False
    """Ollama: clients' `keep_alive` is passed on. false = how long models stay loaded is the server's to say."""
    proxy: ProxyUrl | None = None
    """Forward proxy: `http://[user:password@]host:port`, URL-encoded."""
    tls: EndpointTls = EndpointTls()
    """Certificate verification, for https."""

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url", mode="before")
    @classmethod
    def _normalise_url(cls, value: object, info: ValidationInfo) -> str:
        if isinstance(value, str):
            if value.startswith("file:"):
                return "file:" + _absolute(re.sub("^//+", "/", value[5:]), info)
            url = read_base_url(value) or read_dns_url(value) or read_srv_url(value)
            url = url or read_unix_url(value)
            if url is not None:
                return url
        forms = "http://host:port, dns+http://name:port, srv+http://name (or https), unix:/path or file:path"
        raise expected(forms)

    @field_validator("name", mode="before")
    @classmethod
    def _default_name(cls, value: object, info: ValidationInfo) -> object:
        url = info.data.get("url")
        name = (_last_part(url) if url else "unnamed") if value in (None, "") else value
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
        port, slash, path = value.removeprefix(":").partition("/")
        url = info.data.get("url", "")
        if (
            value.startswith(":")
            and slash
            and not url.startswith("unix:")
            and re.fullmatch("[0-9]{1,5}", port)
            and PATH.fullmatch(f"/{path}")
        ):
            if 1 <= int(port) <= 65535:
                return f":{int(port)}/{path}"
        elif not _is_name(url) and read_origin(value):
            return value
        one = "" if _is_name(url) else "an absolute URL "
        other_port = "" if url.startswith("unix:") else ":port/path, "
        raise expected(f"auto, an absolute path, {other_port}{one}or null")

    _check_health = rule(
        "health", "an absolute path or null", lambda path, _: path is not None and not PATH.fullmatch(path)
    )

    @field_validator("models", mode="after")
    @classmethod
    def _check_models(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not 1 <= len(value) <= MAX_MODELS:
            raise expected(f"1 to {MAX_MODELS} models, or null")
        return tuple(dict.fromkeys(map(check_model_name, value)))

    @field_validator("model", mode="after")
    @classmethod
    def _check_own_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("models", ()) is None:
            raise expected("nothing here without models (the names that clients use for it)")
        return None if value is None else check_model_name(value)

    @field_validator("kv_events", mode="after")
    @classmethod
    def _check_events(cls, value: str | None, info: ValidationInfo) -> str | None:
        read, url = None if value is None else read_publisher(value), info.data.get("url", "")
        if value is not None and (read is None or (read.host and _is_name(url))):
            raise expected(f"{FORMS_OF_MANY if _is_name(url) else FORMS}; or null")
        return _on_a_host(read, info)

    @field_validator("kv_events_replay", mode="after")
    @classmethod
    def _check_replay(cls, value: str | None, info: ValidationInfo) -> str | None:
        read, url = None if value is None else read_publisher(value), info.data.get("url", "")
        if value is not None and (read is None or read.bind or (read.host and _is_name(url))):
            raise expected(f"{FORMS_OF_MANY if _is_name(url) else REPLAY_FORMS}; or null")
        events = read_publisher(info.data.get("kv_events") or "")
        if read is not None and events is None:
            raise expected("nothing here without kv_events")
        ranks = info.data.get("ranks") or 1
        if read is not None and events is not None and overlap(read, ranks, events, ranks):
            how = f"{ranks} ports beside the {ranks} of kv_events" if ranks > 1 else "another port than kv_events"
            raise expected(f"{how} (a rank has the port above it by its number)")
        return _on_a_host(read, info)

    _may_wake = rule(
        "wake", "false with role prefill or decode", lambda wake, other: wake and other("role") in {"prefill", "decode"}
    )
    _can_sleep = rule(
        "sleep_after", "null, unless wake is true", lambda after, other: after is not None and not other("wake", True)
    )
    _check_host = field_validator("host", mode="after")(if_given(check_host_name))
    _may_share = rule(
        "cold_start",
        "a webhook, or wake: true, with host",
        lambda start, other: start is None and other("host") is not None and not other("wake", True),
    )
    _says_models = rule(
        "cold_start",
        "null, unless models names what it serves",
        lambda start, other: start is not None and other("models", ()) is None,
    )
    _is_one = rule(
        "cold_start",
        "null, unless the endpoint is one server that is probed (health)",
        lambda start, other: start is not None and (other("health", "/") is None or _is_name(other("url", ""))),
    )
    _counts_models_once = rule(
        "memory",
        "nothing here beside max_loaded_models",
        lambda memory, other: memory is not None and other("max_loaded_models") is not None,
    )
    _has_memory = rule(
        "model_memory", "nothing here without memory", lambda sizes, other: sizes and other("memory", 0) is None
    )
    _few_sizes = rule("model_memory", f"up to {MAX_MODELS} models", lambda sizes, _: len(sizes) > MAX_MODELS)
    _check_key = field_validator("api_key", mode="after")(if_given(check_token))

    @field_validator("forward_headers", mode="after")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(one.lower() for one in value))
        if len(names) > MAX_FORWARD_HEADERS or any(_FIELD_NAME.fullmatch(one) is None for one in names):
            raise expected(f"up to {MAX_FORWARD_HEADERS} names of header fields")
        if not _KEYS.isdisjoint(names):
            raise expected("no authorization or x-api-key (api_key decides about those)")
        return names

    _is_far = rule(
        "proxy",
        "nothing here, since the url is a Unix socket",
        lambda proxy, other: proxy is not None and other("url", "").startswith("unix:"),
    )
    _has_tls = rule(
        "tls",
        "nothing here, since the url is not https",
        lambda tls, other: tls != EndpointTls() and "https://" not in other("url", "https://"),
    )
    _has_no_own_name = rule(
        "role",
        "both, beside `model` (the two legs of a request name the model alike)",
        lambda role, other: role in {"prefill", "decode"} and other("model") is not None,
    )

    @field_validator("connector", mode="after")
    @classmethod
    def _suits_engine(cls, value: str, info: ValidationInfo) -> str:
        role, engine = info.data.get("role"), info.data.get("engine")
        if value != "auto" and role not in {"prefill", "decode", None}:
            raise expected("auto, unless role is prefill or decode")
        if value != "auto" and engine in {"sglang", "vllm"} and (value == "sglang") != (engine == "sglang"):
            raise expected(f"a connector of {engine}")
        return value

    @model_validator(mode="after")
    def _nothing_beside_a_file(self) -> EndpointSettings:
        if self.is_file and self.model_fields_set - {"url", "name"}:
            raise expected("only url and name with a file (its entries have keys of their own)")
        return self

    @cached_property
    def authority(self) -> str:
        """The URL's `host:port`. Of an SRV name the name, of a Unix socket the whole URL."""
        if self.is_unix or self.is_file:
            return self.url if self.is_unix else self.url.rpartition("/")[2]
        return self.url.partition("://")[2].partition("/")[0]

    @cached_property
    def place(self) -> str:
        """What no two endpoints have in common: the authority, with the URL's path and `model` if there are any."""
        if self.is_file:
            return self.authority
        place = self.url if self.is_unix else self.url.partition("://")[2]
        return place if self.model is None else f"{place} {self.model}"

    @cached_property
    def identity(self) -> str:
        """What no two entries have in common: URL and `model`. One port speaks either HTTP or HTTPS."""
        return f"{self.url.replace('https:', 'http:')} {self.model or ''}"

    @cached_property
    def port(self) -> int | None:
        """Of a URL of a host; None: of a Unix socket, an SRV name or a file."""
        return None if self.is_unix or self.is_srv or self.is_file else int(self.authority.rpartition(":")[2])

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def path(self) -> str:
        """Of a file."""
        return self.url.removeprefix("file:")

    @property
    def base_url(self) -> str:
        """Where requests go: `http[s]://host:port[/prefix]` or `unix:/path`. Of an endpoint, not of a name."""
        return self.url

    @property
    def scheme(self) -> str:
        """`http`, `https` or `unix`."""
        return self.url.partition(":")[0].rpartition("+")[2]

    @cached_property
    def is_name(self) -> bool:
        """Whether this stands for what DNS says of a name."""
        return _is_name(self.url)

    @property
    def is_unix(self) -> bool:
        """Whether it listens on a Unix socket."""
        return self.url.startswith("unix:")

    @property
    def is_srv(self) -> bool:
        """Whether its SRV records."""
        return self.url.startswith("srv+")

    @cached_property
    def is_file(self) -> bool:
        """Whether this stands for the endpoints that a file lists."""
        return self.url.startswith("file:")

    @property
    def names_files(self) -> bool:
        """Whether lbproxy reads a file of this machine for it."""
        return self.is_file or (self.tls is not None and self.tls.ca is not None)

    def leads_to(self, address: Address) -> bool:
        """Whether it is known to be a listener of ours: of SRV names and files that is seen later."""
        if self.is_unix or address.unix is not None:
            return self.is_unix and self.url == str(address)
        return self.port is not None and leads_to(self.authority, address)


def _on_a_host(read: Publisher | None, info: ValidationInfo) -> str | None:
    """The normalised address of a publisher, if there is such a host and a port for each rank."""
    if read is None:
        return None
    if not read.host and info.data.get("url", "").startswith("unix:"):
        raise expected("a host before the port, since the url is a Unix socket")
    if read.port + (info.data.get("ranks") or 1) - 1 > 65535:
        raise expected("a port that leaves one to each rank")
    return str(read)


def _last_part(url: str) -> str:
    """What an endpoint without a name is called."""
    scheme, _, rest = url.partition("://")
    return (
        rest.partition("/")[0] if scheme.endswith(("http", "https")) else url.rpartition("/")[2].removeprefix("file:")
    )


def _is_name(url: str) -> bool:
    return url.startswith(("dns+", "srv+"))


class DnsSettings(Section):
    """Resolution of the names of `dns+` and `srv+` endpoints. Requests never wait for it."""

    nameservers: tuple[str, ...] | None = None
    """`ip` or `ip:port`, at most 8. null = the system's: hosts file, then resolv.conf."""
    interval: Interval = 5.0
    """Between two resolutions of a name, whatever its TTL. A failed one changes nothing."""
    timeout: Timeout = 2.0
    """For one resolution; each nameserver is queried twice in that time."""

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


class ScrapeSettings(Section):
    """Reading the endpoints' own metrics."""

    interval: Interval = 0.2
    """Between two scrapes. 2.5 times as long for an idle endpoint, longer with more than 100 endpoints."""
    timeout: Timeout = 0.5
    """Of a scrape."""
    stale_after: Timeout = 2.0
    """Gauges that are older are not used, only our own count of requests."""
    page: Annotated[int, size("1KiB", "64MiB")] = 2 * 1024**2
    """Longest metrics page (vLLM's: 64 KB)."""

    _outlives_interval = rule(
        "stale_after",
        "at least scrape.interval (else stale before the next scrape)",
        lambda stale_after, other: stale_after < other("interval", 0.0),
    )
