# SPDX-License-Identifier: Apache-2.0
"""The log of one process: what goes through the standard library's loggers, and a line for each request.

Where several processes serve clients, each logs the requests that it served, to the standard output that all share.
"""

from __future__ import annotations

import logging

from lbproxy.config.tree import LogSettings
from lbproxy.control.telemetry import access_line as line
from lbproxy.control.telemetry.access_line import LEVELS, access_line
from lbproxy.control.telemetry.log import configure_logging
from lbproxy.control.telemetry.writer import LineWriter
from lbproxy.core.endpoints.health import Transition
from lbproxy.core.observed.record import RequestRecord


class ProcessLog:
    """A sink of the Runtime. Takes over the process's logging; `close` it last."""

    def __init__(self, settings: LogSettings, writer: LineWriter | None = None, *, shared: bool = False) -> None:
        """`writer` is standard output unless given, and closed by `close`. `shared`: see LineWriter."""
        self._writer = writer or LineWriter(shared=shared)
        self._handler = configure_logging(settings.level, self._writer)
        self._access = settings.access
        self._level: int = logging.getLevelNamesMapping()[settings.level.upper()]

    def reconfigure(self, settings: LogSettings) -> None:
        logging.getLogger("lbproxy").setLevel(settings.level.upper())
        self._access = settings.access
        self._level = logging.getLevelNamesMapping()[settings.level.upper()]

    def ended(self, records: list[RequestRecord]) -> None:
        """See runtime.Sink. 3 us each."""
        if self._access:
            at, level = line.now(), self._level
            self._writer.write([access_line(one, at) for one in records if LEVELS[one.outcome] >= level])

    def transition(self, transition: Transition) -> None:
        """See runtime.Sink. Who counts it logs it."""

    @property
    def internal_errors(self) -> int:
        """Logged with a traceback."""
        return self._handler.internal_errors

    @property
    def dropped_lines(self) -> int:
        """How many lines were not written."""
        return self._writer.dropped

    def close(self) -> None:
        """Write what is left, and let go of the process's logging."""
        logging.getLogger().removeHandler(self._handler)
        self._writer.close()
