# SPDX-License-Identifier: Apache-2.0
"""JSON lines on standard output: how they are written, and everything that goes through the standard library's loggers.

Theory of operation. The event loop must never wait for whoever reads our log, so a line is only appended to a bounded
queue (`control.telemetry.writer`); a thread takes what has gathered every 50 ms and writes it in one piece. Invariants:

- Every line is one JSON object in ASCII, whatever the strings in it: a client's bytes can neither forge a line nor
  break the reader's decoder.
- A reader that is slow, gone, or a full disk costs lines, which are counted, and nothing else.
- What others could cause without end is limited: lines of aiohttp about what clients send, and those of an event of an
  endpoint, whose metrics, models or health may be others each time. The next line says how many were left out.
- Bodies, prompts, keys and query strings (which can carry keys) are never written.
"""

from __future__ import annotations

import json
import logging
import time

from lbproxy.control.telemetry.access_line import stamp
from lbproxy.control.telemetry.writer import LineWriter

MAX_TRACEBACK_CHARS = 8192
AIOHTTP_LINE_EVERY_S = 1.0
ENDPOINT_LINES = 20
"""Lines of one event of one endpoint that are written at once; further ones every `ENDPOINT_LINE_EVERY_S`."""
ENDPOINT_LINE_EVERY_S = 5.0
MAX_QUOTAS = 4096
"""Kinds of lines whose rate is known."""


_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "event"}


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object: time, level, event, message, then whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage()[:MAX_TRACEBACK_CHARS],
        }
        if not record.name.startswith("lbproxy"):
            fields["logger"] = record.name
        fields.update((name, value) for name, value in record.__dict__.items() if name not in _STANDARD)
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if _is_clients_fault(error):
                fields["error"] = type(error).__name__  # its text repeats the client's bytes
            else:
                fields["traceback"] = self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARS:]
        return json.dumps(fields, default=str, separators=(",", ":"))


def _is_clients_fault(error: BaseException) -> bool:
    """aiohttp logs with a traceback what it could not parse."""
    return type(error).__module__.startswith("aiohttp.")


class LineHandler(logging.Handler):
    """Hands log records, as JSON lines, to a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.internal_errors = 0
        """Failures logged with their traceback: defects of ours."""
        self._writer = writer
        self._quotas: dict[tuple[str, str], _Quota] = {}
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.levelno >= logging.ERROR and not _is_clients_fault(error):
            self.internal_errors += 1
        if not self._let_through(record):
            return
        try:
            self._writer.write([self.format(record).encode("ascii") + b"\n"])
        except Exception:  # noqa: BLE001 - logging's own way: a bad format string must not fail the request
            self.handleError(record)

    def _let_through(self, record: logging.LogRecord) -> bool:
        """Whether this line is written: whoever sends garbage must not fill the disk."""
        if record.name.startswith("aiohttp."):
            key, lines, every_s = ("aiohttp", ""), 1, AIOHTTP_LINE_EVERY_S
        elif "endpoint" in record.__dict__ and record.levelno < logging.ERROR:
            fields = record.__dict__
            key = str(fields.get("event")), str(fields["endpoint"])
            lines, every_s = ENDPOINT_LINES, ENDPOINT_LINE_EVERY_S
        else:
            return True
        now = time.monotonic()
        quota = self._quotas.pop(key, None) or _Quota(lines, now)
        self._quotas[key] = quota  # the last one
        if len(self._quotas) > MAX_QUOTAS:
            del self._quotas[next(iter(self._quotas))]
        return quota.let_through(record, lines, every_s, now)


class _Quota:
    """How many lines of one kind may be written now."""

    __slots__ = ("_at", "_left", "_suppressed")

    def __init__(self, lines: int, now: float) -> None:
        self._left, self._at = float(lines), now
        self._suppressed = 0

    def let_through(self, record: logging.LogRecord, lines: int, every_s: float, now: float) -> bool:
        """Count a line. It says how many were left out before it."""
        self._left = min(float(lines), self._left + (now - self._at) / every_s)
        self._at = now
        if self._left < 1.0:
            self._suppressed += 1
            return False
        self._left -= 1.0
        if self._suppressed or lines == 1:
            record.suppressed = self._suppressed
            self._suppressed = 0
        return True


def configure_logging(level: str, writer: LineWriter) -> LineHandler:
    """Send all loggers' lines to `writer`: ours from `level` on, others' warnings and errors.

    Called again, it replaces what it did before. `logging.getLogger().removeHandler(...)` undoes it.
    """
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, LineHandler)]:
        root.removeHandler(handler)
    handler = LineHandler(writer)
    root.addHandler(handler)
    logging.getLogger("lbproxy").setLevel(level.upper())
    return handler
