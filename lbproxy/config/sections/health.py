"""Settings of what decides whether an endpoint gets requests: probes, the breaker, the slow start."""

from __future__ import annotations

from typing import Annotated

from pydantic import ValidationInfo, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Interval, Quantity, Timeout, count, duration, expected


class HealthSettings(Section):
    """Probing endpoints."""

    interval: Interval = 2.0
    """Seconds between two probes of an endpoint."""
    timeout: Timeout = 3.0
    """Seconds a probe may take. SGLang's /health takes 1.0 s when idle; below 3 s it may look dead."""
    fall: Annotated[int, count("1", "100")] = 3
    """Failed probes in a row until an endpoint is down."""
    rise: Annotated[int, count("1", "100")] = 2
    """Good probes in a row until it is up again."""
    down_interval: Interval = 0.5
    """Seconds between two probes of an endpoint that is down: shorter, so that it comes back soon."""
    models_interval: Annotated[float, duration("1s", "24h")] = 30.0
    """Seconds between two questions for the endpoint's /v1/models."""
    slow_start: Timeout | None = 30.0
    """Seconds in which the share of an endpoint that came back, or is new, grows from a tenth to all of it. Not at our
    own start. null = it gets all at once."""


class BreakerSettings(Section):
    """Taking out endpoints that fail requests, whatever their health path says."""

    consecutive_failures: Annotated[int, count("1", "1000")] | None = 5
    """So many in a row eject an endpoint: no connection, a reset, garbage, 502, 504, no answer in time, a broken
    answer. Never 429 or 503, nor a client that left. null = never."""
    success_rate: Annotated[float, Quantity("0", "1", "a ratio", whole=False)] = 0.8
    """A smaller share of good answers within 30 s, of at least 5, ejects it too. Here a 500 counts, unless the request
    gets one from another endpoint as well. 0 = never."""
    ejection: Timeout = 1.0
    """Seconds of the first ejection, more or less by half at random; twice as long each time after that."""
    max_ejection: Timeout = 60.0
    """Seconds of the longest ejection; one that behaved for so long begins anew with the first."""
    no_progress: Timeout | None = 10.0
    """Seconds without a byte from any of 3 or more requests, nor a change in its metrics, while others go on: ejected,
    and what waits there is sent elsewhere. Longer while long prompts are due. null = never."""
    panic: bool = True
    """When ejections leave less than half of those that could serve a request, use the ejected ones too. false = then
    503 rather than an endpoint that fails."""

    @field_validator("max_ejection", mode="after")
    @classmethod
    def _outlasts_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("ejection", 0.0):
            raise expected("at least breaker.ejection")
        return value
