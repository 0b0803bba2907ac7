# SPDX-License-Identifier: Apache-2.0
"""Has requests traced as the settings ask, with packages that lbproxy itself does without, and only then."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Protocol

from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.core.observed.sink import Sink
from lbproxy.core.observed.trace import Sampling
from lbproxy.extras.installing import needs

if TYPE_CHECKING:
    from lbproxy.extras.traces import Traces


class Sampled(Protocol):
    """Whose requests are traced: the front end."""

    sampling: Sampling | None


class Tracing:
    """Has requests traced as the settings say. `under`, then `adopt`, at the start and at each reload."""

    traces: Traces | None = None
    _settings: Settings | None = None

    def __init__(self, front: Sampled, sinks: list[Sink], rng: random.Random) -> None:
        """`sinks`: those of the Runtime, which traces become one of."""
        self._front = front
        self._sinks = sinks
        self._rng = rng

    async def under(self, settings: Settings) -> Traces | None:
        """What sends them under these settings: that of now, if nothing changed. Raises ConfigError."""
        if self._settings is not None and settings.traces == self._settings.traces:
            return self.traces
        return await asyncio.to_thread(make_traces, settings)

    def adopt(self, settings: Settings, traces: Traces | None) -> None:
        """It holds from now on, for requests to come. What waited to be sent still is."""
        old, self.traces, self._settings = self.traces, traces, settings
        if traces is old:
            return
        if old is not None:
            self._sinks.remove(old)
            old.retire()
        self._front.sampling = None
        if traces is not None:
            self._sinks.append(traces)
            wanted = settings.traces
            self._front.sampling = Sampling(wanted.sample_ratio, follow_clients=wanted.follow_clients, rng=self._rng)

    async def close(self) -> None:
        """Send what is left, for a few seconds at most. When no request runs any more."""
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)


def make_traces(settings: Settings) -> Traces | None:
    """The sink that sends traces, or None if nobody wants any. Blocks for the import, and starts a thread.

    Raises ConfigError if the packages are not there.
    """
    kind, endpoint = find_traces(settings), settings.traces.endpoint
    return None if kind is None or endpoint is None else kind.to_collector(settings.traces, endpoint)


def find_traces(settings: Settings) -> type[Traces] | None:
    """What it is made of. Blocks. Raises ConfigError."""
    if settings.traces.endpoint is None:
        return None
    try:
        from lbproxy.extras.traces import Traces  # noqa: PLC0415 - 0.1 s and 7 MiB, for those who want it
    except ImportError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        problem = f"traces.endpoint: {needs('otel')}"
        raise ConfigError("settings", [problem]) from None
    return Traces
