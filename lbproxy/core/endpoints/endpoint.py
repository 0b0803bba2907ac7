# SPDX-License-Identifier: Apache-2.0
"""The identity and configuration of an endpoint, without its state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, NewType

from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.engines.handover import BOOTSTRAP_PORT, Handover, Role

if TYPE_CHECKING:
    from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls


EndpointUid = NewType("EndpointUid", int)
"""Identifies one endpoint for the life of the process. Never reused, unlike addresses."""


class ColdStart(NamedTuple):
    """A webhook that has an endpoint started which is not there at all."""

    url: str
    timeout_s: float
    """In which it must be up, from the call on."""
    token: ApiKey | None = None
    """Sent to it as a bearer token."""


class SleepSpec(NamedTuple):
    """What the settings say of an endpoint that may sleep, or may not be there."""

    wake: bool = True
    """It may be woken, and put to sleep."""
    after_s: float | None = None
    """It is put to sleep after so many seconds without a request; None = never for that reason."""
    level: int = 1
    """1: the engine keeps its weights in host memory; 2: it discards them, and reads them again when it wakes."""
    host: str | None = None
    """The group of endpoints that share GPUs; None = it shares them with no other."""
    cold_start: ColdStart | None = None


class LoadSpec(NamedTuple):
    """What the settings say of the models of an endpoint that loads them on demand."""

    most: int | None = None
    """Models in memory at a time, or bytes of these if there are `sizes`; None = as many as it shows."""
    keep: frozenset[str] = frozenset()
    """Models whose place no other takes."""
    never: frozenset[str] = frozenset()
    """Models that no request has loaded."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Models, and the bytes of memory that each takes. Others take all there is."""


NOTHING_SAID: Final = LoadSpec()


@dataclass(frozen=True, kw_only=True)
class EndpointSpec:
    """What discovery knows of one model server, or of one data-parallel rank of it. `key` is unique in a set."""

    name: str
    """Unique in a set; the only property of an endpoint that clients see."""
    base_url: str
    """`http[s]://host:port[/prefix]`, or `unix:/path/of/socket`."""
    engine: str = "auto"
    """A built-in engine, one of the settings, or `auto`: recognised from the first scrape."""
    metrics: str | None = "auto"
    """`auto` (the engine's usual places), a path, `:port/path`, an absolute URL, or None: not scraped."""
    health: str | None = "/health"
    """The path that the prober requests, or None: not probed, and up until connections fail."""
    models: tuple[str, ...] | None = None
    """All models that it serves; None = read from the endpoint."""
    model: str | None = None
    """Its own name of these, in requests to it; None = it knows them by these names."""
    tier: int = 1
    """1 to MAX_TIER: it is used only if no endpoint of a lower tier can take the request."""
    bounds: Bounds | None = None
    """Its own limits; None = none."""
    weight: float = 1.0
    """Its capacity relative to the others'."""
    kv_cache_tokens: int | None = None
    """The size of its KV cache; None = reported by the endpoint, or learned."""
    api_key: ApiKey | None = None
    """Sent instead of the client's own credentials."""
    forward_headers: tuple[str, ...] = ()
    """Further fields of clients that it gets above tier 1; in lower case."""
    client_keep_alive: bool = False
    """Ollama's: clients may say how long it keeps a model loaded."""
    tls: Tls | None = None
    """Always set with https, else None."""
    proxy: ForwardProxy | None = None
    """The proxy for all connections to it; None = no proxy."""
    ranks: int | None = None
    """Data-parallel ranks behind the address that are endpoints of their own; None = as many as its metrics show."""
    kv_events: str | None = None
    """Where it publishes KV events (`config.publishers`); None = they are not read."""
    kv_events_replay: str | None = None
    """Where it replays them; None = nowhere."""
    rank: int | None = None
    """Which of them this is, from 0, in the order of the labels in its metrics; None = all of the server."""
    role: Role | None = None
    """What it does of a request; None = as the engine says, or all of it."""
    connector: str | None = None
    """How KV caches are handed over, of `CONNECTORS`; None = as the engine says."""
    bootstrap_port: int | None = None
    """See `Handover`; None = as the engine says, or its default."""
    sleep: SleepSpec | None = None
    """It may be asleep, or not be there: see `core.sleeping`. None = neither."""
    loading: LoadSpec = NOTHING_SAID
    """Likewise, of its models."""

    @property
    def server(self) -> str:
        """The name of the server that it is, or of which it is a rank."""
        return self.name if self.rank is None else self.name.removesuffix(f"#{self.rank}")

    @property
    def key(self) -> str:
        """What identifies it over restarts and between processes: the URL, and the rank if it is one."""
        return self.url_key if self.rank is None else f"{self.url_key}#{self.rank}"

    @property
    def url_key(self) -> str:
        """What all ranks of a server have in common: the URL, and its own name of the model if it has one."""
        return self.base_url if self.model is None else f"{self.base_url} {self.model}"

    @property
    def is_elastic(self) -> bool:
        """Whether it is elsewhere and shows no load: only its limits and its refusals say that it is full."""
        return self.tier > 1 and self.metrics is None


@dataclass(frozen=True, kw_only=True)
class Endpoint(EndpointSpec):
    """An `EndpointSpec` that the Balancer has given an identity."""

    uid: EndpointUid

    @property
    def authority(self) -> str:
        """`host:port` or `unix:/path`, as in `x-gateway-destination-endpoint`."""
        return self.base_url if self.base_url.startswith("unix:") else self.base_url.split("/", 3)[2]

    @property
    def place(self) -> str:
        """See `EndpointSettings.place`."""
        return self.url_key if self.base_url.startswith("unix:") else self.url_key.partition("://")[2]


_FACTS: Final = [one.name for one in fields(EndpointSpec)]
facts_of: Final = attrgetter(*_FACTS)


def with_uid(spec: EndpointSpec, uid: EndpointUid) -> Endpoint:
    return Endpoint(uid=uid, **dict(zip(_FACTS, facts_of(spec), strict=True)))


def handover_of(spec: EndpointSpec, reported: Handover | None) -> Handover:
    """An endpoint's part, as the settings and its engine say. What the engine says is a fact; what it does not say is
    configured.
    """
    if reported is None:
        return Handover(spec.role or Role.BOTH, spec.connector, spec.bootstrap_port or BOOTSTRAP_PORT)
    return Handover(
        reported.role if reported.role is not Role.BOTH or reported.connector is None else (spec.role or Role.BOTH),
        reported.connector or spec.connector,
        spec.bootstrap_port or reported.bootstrap_port,
    )
