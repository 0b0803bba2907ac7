# SPDX-License-Identifier: Apache-2.0
"""Settings of what is shown of requests and models: decisions, to be explained, traces and who gets these, and how many
endpoints are recommended.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, SecretStr, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import PATH, Quantity, Timeout, count, duration, expected, read_origin, rule

DEFAULT_PATH = "/v1/traces"
MAX_HEADERS = 32
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_NOT_OURS = frozenset({"content-encoding", "content-length", "content-type", "host", "transfer-encoding"})
_URL = re.compile(r"(https?://[^/?#]+)(/[^?#]*)?", re.IGNORECASE)


class TraceSettings(Section):
    """OpenTelemetry traces: need the extra `otel`."""

    endpoint: str | None = None
    """A collector of OTLP over HTTP: `http://collector:4318`, without a path `/v1/traces`. null = no traces; clients'
    trace headers pass."""
    sample_ratio: Annotated[float, Quantity("0", "1", "a number", whole=False)] = 1.0
    """Share of requests traced, of those without a client's sampling decision."""
    follow_clients: bool = True
    """A client's `traceparent` decides whether its request is traced. false = sample_ratio decides for all; the context
    is still propagated."""
    service_name: str | None = None
    """null = OTEL_SERVICE_NAME, else `lbproxy`."""
    headers: dict[str, SecretStr] = Field(default={}, json_schema_extra={"maxProperties": MAX_HEADERS})
    """For the collector. Write ${NAME} rather than a secret."""
    timeout: Timeout = 10.0
    """For one export, with its retries; then its spans are lost."""
    queue_requests: Annotated[int, count("1", "100000")] = 2048
    """Requests whose spans wait for the collector; further ones are lost, and counted."""

    @field_validator("endpoint", mode="after")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = _URL.fullmatch(value)
        origin = read_origin(match[1]) if match is not None else None
        path = DEFAULT_PATH if match is None or match[2] in {None, "/"} else match[2]
        if origin is None or not PATH.fullmatch(path):
            raise expected("the URL of a collector, such as http://collector:4318 (no user, query or fragment)")
        return origin + path

    _check_service_name = rule(
        "service_name",
        "a name of 1 to 255 printable characters",
        lambda name, _: name is not None and not (0 < len(name) <= 255 and name.isprintable()),
    )

    @field_validator("headers", mode="after")
    @classmethod
    def _check_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if len(value) > MAX_HEADERS:
            raise expected(f"at most {MAX_HEADERS} headers")
        for name, text in value.items():
            if not _HEADER.fullmatch(name) or name.lower() in _NOT_OURS:
                raise expected(f"names of header fields, and none of {', '.join(sorted(_NOT_OURS))}")
            if not _HEADER_VALUE.fullmatch(text.get_secret_value()):
                raise expected("values of 1 to 4096 visible ASCII characters, with spaces between")
        if len({name.lower() for name in value}) < len(value):
            raise expected("each header once")
        return value


class ExplainSettings(Section):
    """Why requests went where they went: `lbproxy explain`, /admin/decisions."""

    requests: Annotated[int, count("0", "100000")] = 1000
    """Recent requests remembered with their decisions, 1 to 6 KB each."""
    header: bool = False
    """`x-lbproxy-explain: 1` on a request puts the decision into a response header of that name, if expose_endpoint is
    true. It reveals the names and load of endpoints."""

    @property
    def wanted(self) -> bool:
        """Whether decisions have to say why."""
        return self.header or self.requests > 0


class AutoscalingSettings(Section):
    """How many endpoints lbproxy recommends for each model (docs/autoscaling.md)."""

    ttft: Timeout = 2.0
    """The time to the first token that 95 % of requests are to have."""
    window: Annotated[float, duration("10s", "24h")] = 300.0
    """Fewer endpoints are recommended when they have been enough for this long; more at once."""
