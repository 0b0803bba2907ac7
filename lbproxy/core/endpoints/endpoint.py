"""What an endpoint is, apart from what happens to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from lbproxy.core.endpoints.credentials import ApiKey, Proxy, Tls


EndpointUid = NewType("EndpointUid", int)
"""Identifies one endpoint for the life of the process. Never reused; addresses are."""


@dataclass(frozen=True, kw_only=True)
class EndpointSpec:
    """What discovery knows of one model server. Two specs of one `base_url` in one set are a settings error."""

    name: str
    """Unique in a set; the only thing about an endpoint that clients are told."""
    base_url: str
    """`http://host:port`, `https://host:port`, both without a path, or `unix:/path/of/socket`."""
    engine: str = "auto"
    """A built-in engine or one of the settings' own, or `auto`: recognised from the first scrape."""
    metrics: str | None = "auto"
    """`auto` (the engine's usual places), a path, `:port/path`, an absolute URL, or None: not scraped."""
    health: str | None = "/health"
    """The path that the prober asks, or None: passive, counted as up until connections fail."""
    models: tuple[str, ...] | None = None
    """What it serves, all of it; None = it is asked."""
    weight: float = 1.0
    """Capacity beside the others'."""
    kv_cache_tokens: int | None = None
    """How much its KV cache holds; None = it says so itself, or it is learned."""
    api_key: ApiKey | None = None
    """Sent instead of the client's own credentials."""
    tls: Tls | None = None
    """With https always, else None."""
    proxy: Proxy | None = None
    """What every connection to it goes through; None = nothing."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(EndpointSpec):
    """An `EndpointSpec` that the Balancer has given an identity."""

    uid: EndpointUid

    @property
    def authority(self) -> str:
        """`host:port` or `unix:/path`, as it stands in `x-gateway-destination-endpoint`."""
        return self.base_url if self.base_url.startswith("unix:") else self.base_url.rpartition("/")[2]
