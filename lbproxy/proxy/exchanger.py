"""What exchanges share."""

from __future__ import annotations

from typing import Final

from lbproxy.config import Settings
from lbproxy.net.patience import Limits
from lbproxy.net.pool import ConnectionPool
from lbproxy.runtime import Runtime

LARGE_BODY_BYTES: Final = 16 << 10
"""A smaller body is neither counted nor let go of before its request ends: what comes with it costs as much, and all of
them are bounded by the number of connections."""


class Exchanger:
    """What all exchanges share that begin under the same settings: a request is served under one tree to its end."""

    def __init__(self, settings: Settings, runtime: Runtime, connections: ConnectionPool) -> None:
        self.runtime = runtime
        self.connections = connections
        self.settings = settings
        limits = settings.timeouts
        self.limits = Limits(limits.connect, limits.first_byte, limits.stream_idle)
        self.expose_endpoint = settings.expose_endpoint
        self.explain_header = settings.explain.header and settings.expose_endpoint

    def under(self, settings: Settings) -> Exchanger:
        """The same under other settings, for exchanges to come."""
        return Exchanger(settings, self.runtime, self.connections)
