# SPDX-License-Identifier: Apache-2.0
"""Settings of what several lbproxies before the same endpoints tell each other."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import duration, expected, read_host

_NAME = "^[A-Za-z0-9._-]{1,64}$"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,64}")
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
"""With valkey in place of redis too."""


class ReplicasSettings(Section):
    """Other lbproxies before the same endpoints, which tell each other over Redis or Valkey what they placed: needs the
    extra `replicas`."""

    url: SecretStr | None = None
    """The Redis or Valkey server: redis://host:6379/0, rediss:// with TLS, unix:///path, redis+sentinel://host:26379,
    host:26379/service, redis+cluster://host:6379; options of redis-py after a `?`."""
    name: Annotated[str, Field(pattern=_NAME)] | None = None
    """Of this one, in logs and on pages. null = the host name."""
    pool: Annotated[str, Field(pattern=_NAME)] = "default"
    """Those with the same pool know of each other, and should have the same endpoints, models, flows and policy."""
    interval: Annotated[float, duration("5ms", "10s")] = 0.05
    """Between two batches under load."""

    @field_validator("url", mode="after")
    @classmethod
    def _check_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        if not _is_url(value.get_secret_value()):
            example = (
                "redis://redis:6379/0, rediss://user:${PASSWORD}@redis:6379, redis+sentinel://a:26379,b:26379/service"
            )
            raise expected(f"the URL of a Redis or Valkey server, such as {example}")
        return value


def _is_url(text: str) -> bool:
    scheme, _, rest = text.partition("://")
    kind = scheme.lower().replace("valkey", "redis")
    if kind not in SCHEMES or not rest or len(text) > 4096 or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(f"redis://{rest}")
        hosts = parts.netloc.rpartition("@")[2].split(",")
        path = unquote(parts.path)
    except ValueError:
        return False
    if kind == "unix":
        return parts.path.startswith("/") and len(parts.path) > 1
    if not all(_is_host(one) for one in hosts) or (len(hosts) > 1 and "+" not in kind):
        return False
    if kind.endswith("sentinel"):
        service, _, number = path.strip("/").partition("/")
        return bool(_SERVICE.fullmatch(service)) and (not number or number.isdecimal())
    return not path.strip("/") or (path.strip("/").isdecimal() and not kind.endswith("cluster"))


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    return match is not None and read_host(match[1]) is not None and 0 < int(match[2] or 1) < 65536
