"""Settings of the model servers, and of how their names are resolved and their metrics read."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.engines import BUILT_IN_ENGINES
from lbproxy.config.section import Section, ShortSection
from lbproxy.config.values import (
    PATH,
    Interval,
    Timeout,
    expected,
    read_authority,
    read_dns_authority,
    read_nameserver,
    size,
)

MAX_NAMESERVERS = 8
DNS_SCHEME = "dns+http://"
OWN_ENGINES = "own engines"
"""Key of the validation context: the names in `engines`, which the endpoints' engines are among."""


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
