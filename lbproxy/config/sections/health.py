# SPDX-License-Identifier: Apache-2.0
"""Settings of what decides whether an endpoint gets requests: probes, the breaker, the slow start."""

from __future__ import annotations

from typing import Annotated

from pydantic import ValidationInfo, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Interval, Quantity, Timeout, count, duration, expected


class HealthSettings(Section):
    """Health checks of endpoints."""

    interval: Interval = 2.0
    """Seconds between two probes of an endpoint."""
    timeout: Timeout = 3.0
    """Seconds a probe may take. SGLang's /health takes 1.0 s when idle; a timeout below 3 s may report it as down."""
    fall: Annotated[int, count("1", "100")] = 3
    """Failed probes in a row until an endpoint is down."""
    rise: Annotated[int, count("1", "100")] = 2
    """Successful probes in a row until it is up again."""
    down_interval: Interval = 0.5
    """Seconds between two probes of an endpoint that is down: shorter, so that its return is detected soon."""
    models_interval: Annotated[float, duration("1s", "24h")] = 30.0
    """Seconds between two reads of the endpoint's /v1/models."""
    slow_start: Timeout | None = 30.0
    """Seconds in which the share of an endpoint that returned, or is new, grows from a tenth to a full share. Not when
    lbproxy itself starts. null = a full share at once."""


class BreakerSettings(Section):
    """Circuit breaker: ejects endpoints that fail requests, whatever their health check returns."""

    consecutive_failures: Annotated[int, count("1", "1000")] | None = 5
    """This many failures in a row eject an endpoint: no connection, a reset, an invalid response, 502, 504, a timeout,
    a response that broke off. Never 429 or 503, nor a client that disconnected. null = never."""
    success_rate: Annotated[float, Quantity("0", "1", "a ratio", whole=False)] = 0.8
    """A smaller share of successful responses within 30 s, of at least 5, ejects it too. Here a 500 counts, unless
    another endpoint returns 500 to the same request as well. 0 = never."""
    ejection: Timeout = 1.0
    """Seconds of the first ejection, plus or minus half at random; each further one is twice as long."""
    max_ejection: Timeout = 60.0
    """Seconds of the longest ejection. After this time without an ejection, the next one has the first length again."""
    no_progress: Timeout | None = 10.0
    """Seconds without a byte for any of 3 or more requests and without a change in its metrics, while others make
    progress: the endpoint is ejected, and requests that wait there are retried elsewhere. Longer while long prompts are
    expected. null = never."""
    panic: bool = True
    """If ejections leave less than half of the endpoints that could serve a request, use the ejected ones too. false =
    return 503 instead."""

    @field_validator("max_ejection", mode="after")
    @classmethod
    def _outlasts_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("ejection", 0.0):
            raise expected("at least breaker.ejection")
        return value
