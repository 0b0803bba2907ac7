# SPDX-License-Identifier: Apache-2.0
"""Settings of what decides whether an endpoint gets requests: probes, the breaker, the slow start."""

from __future__ import annotations

from typing import Annotated

from lbproxy.config.section import Section
from lbproxy.config.values import Interval, Quantity, Timeout, count, duration, rule


class HealthSettings(Section):
    """Health checks of endpoints."""

    interval: Interval = 2.0
    """Between two probes of an endpoint."""
    timeout: Timeout = 3.0
    """Of a probe. SGLang's idle /health takes 1.0 s; below 3 s it may be reported as down."""
    fall: Annotated[int, count("1", "100")] = 3
    """Failed probes in a row until it is down."""
    rise: Annotated[int, count("1", "100")] = 2
    """Successful ones until it is up again."""
    down_interval: Interval = 0.5
    """Between two probes of an endpoint that is down."""
    models_interval: Annotated[float, duration("1s", "24h")] = 30.0
    """Between two reads of its /v1/models."""
    slow_start: Timeout | None = 30.0
    """Time in which the share of an endpoint that returned, or is new, grows from a tenth to full. null = full at
    once."""


class BreakerSettings(Section):
    """Circuit breaker: ejects endpoints that fail requests, whatever their health check returns."""

    consecutive_failures: Annotated[int, count("1", "1000")] | None = 5
    """Failures in a row that eject an endpoint. null = never."""
    success_rate: Annotated[float, Quantity("0", "1", "a ratio", whole=False)] = 0.8
    """A smaller share of successes within 30 s, of at least 5 requests, ejects it too. 0 = never."""
    ejection: Timeout = 1.0
    """The first one, plus or minus half at random; each further one is twice as long."""
    max_ejection: Timeout = 60.0
    """The longest. After this time without one, the next has the first length again."""
    no_progress: Timeout | None = 10.0
    """Time without progress of 3 or more requests that ejects it; longer with long prompts. null = never."""
    panic: bool = True
    """Use ejected endpoints if less than half of those that could serve a request are left. false = 503 instead."""

    _outlasts_first = rule(
        "max_ejection", "at least breaker.ejection", lambda longest, other: longest < other("ejection", 0.0)
    )
