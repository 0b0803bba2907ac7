"""JSON lines on standard output: the access log, and everything that goes through the standard library's loggers.

Theory of operation. The event loop must never wait for whoever reads our log, so a line is only appended to a bounded
queue; a thread takes what has gathered every 50 ms and writes it in one piece. Invariants:

- Every line is one JSON object in ASCII, whatever the strings in it: a client's bytes can neither forge a line nor
  break the reader's decoder.
- A reader that is slow, gone, or a full disk costs lines, which are counted, and nothing else.
- Bodies, prompts, keys and query strings (which can carry keys) are never written.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import threading
import time
from collections import deque

import orjson

from lbproxy.core.flows import ANONYMOUS
from lbproxy.core.record import RequestRecord
from lbproxy.core.types import Outcome

MAX_LINES = 16_384
"""Lines that may wait for the thread: 1.6 s of 10,000 requests a second, in about 8 MB."""
BATCH_S = 0.05
BATCH_LINES = 256
RETRY_S = 0.01
MAX_PATH_CHARS = 512
MAX_FIELD_CHARS = 256
MAX_ERROR_CHARS = 512
MAX_TRACEBACK_CHARS = 8192
AIOHTTP_LINE_EVERY_S = 1.0


class LineWriter:
    """Writes lines to a file descriptor (1 = standard output) from a thread of its own."""

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._closed = False
        """The same, for a look that costs nothing."""
        # Two counts, since += is not atomic: the first is written by the loop, the second by the thread.
        self._refused = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name="lbproxy-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: the queue was full, or writing failed."""
        return self._refused + self._failed

    def write(self, line: bytes) -> None:
        """Queue a line, which ends with a line feed. Never blocks; drops the line if the queue is full."""
        lines = self._lines
        if len(lines) >= MAX_LINES or self._closed:
            self._refused += 1
            return
        lines.append(line)
        if len(lines) == 1:  # else the thread, which looks again after each batch, has not come to those before it
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, but wait no longer than this for a reader that takes nothing. The descriptor stays."""
        self._closed = True
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(BATCH_S)
            self._wake.clear()  # before the queue is emptied: a line that comes now sets it again
            while self._lines:
                batch = [self._lines.popleft() for _ in range(min(len(self._lines), BATCH_LINES))]
                self._write_all(batch)

    def _write_all(self, batch: list[bytes]) -> None:
        left = memoryview(b"".join(batch))
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # somebody made it non-blocking, and the reader is slow
                time.sleep(RETRY_S)
            except OSError:  # the reader is gone, the disk is full: the next batch may go better
                self._failed += len(batch)
                return


@functools.lru_cache(maxsize=4)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


@functools.lru_cache(maxsize=4)
def _millisecond(at: int) -> str:
    """Of 10,000 requests in a second ten have the same."""
    return f"{_second(at // 1000)}.{at % 1000:03d}Z"


def stamp(at: float) -> str:
    """Wall time (seconds since the epoch) by RFC 3339: UTC, milliseconds."""
    return _millisecond(int(at * 1000))


def plain(text: str, limit: int) -> str:
    """At most `limit` ASCII characters: others, and surrogates that stand for undecodable bytes, as escapes."""
    if len(text) > limit:
        text = text[:limit]
    if not text.isascii():
        text = text.encode("ascii", "backslashreplace").decode()[:limit]
    return text


OUTCOMES: dict[Outcome, tuple[str, int]] = {one: (one.label, one.value.status) for one in Outcome}
"""Label and status: an enum's `value` costs more than all the rest of a field."""


_WARNINGS = {
    Outcome.UPSTREAM_BROKE,
    Outcome.CUT,
    Outcome.SATURATED,
    Outcome.EXPIRED,
    Outcome.NO_ENDPOINTS,
    Outcome.OVERLOADED,
    Outcome.CONNECT_FAILED,
    Outcome.UPSTREAM_RESET,
    Outcome.UPSTREAM_PROTOCOL,
    Outcome.UPSTREAM_TIMEOUT,
}
LEVELS: dict[Outcome, int] = {
    one: logging.ERROR if one is Outcome.INTERNAL_ERROR else logging.WARNING if one in _WARNINGS else logging.INFO
    for one in Outcome
}
"""The level of a request's line: warnings are what an operator may have to act on."""
_LEVEL_NAMES = {one: logging.getLevelName(level).lower() for one, level in LEVELS.items()}


_WORDS = {one: (*OUTCOMES[one], _LEVEL_NAMES[one]) for one in Outcome}
_LINE = (
    '{"time":"%s","level":"%s","event":"request","id":"%s",%s,"request_bytes":%d,"response_bytes":%d,"events":%d,'
    '"queue_ms":%s,"ttfb_ms":%s,"duration_ms":%.3f%s}\n'
)
_HARMLESS = re.compile(r"[A-Za-z0-9._:/+=@-]{0,128}").fullmatch
"""What needs no escapes: every request id that is ours, or that we took from a client."""


def access_line(record: RequestRecord) -> bytes:
    """The access log's line of a request, line feed included. 2 µs: most of it is as in a line before."""
    placed_at, first_byte_at, started_at = record.placed_at, record.first_byte_at, record.started_at
    outcome, status, level = _WORDS[record.outcome]
    facts = _facts(
        record.client,
        record.method,
        record.path,
        record.model,
        record.stream,
        record.endpoint,
        record.status or status,
        outcome,
        record.attempts,
    )
    queue_s = record.queue_s
    queue = "null" if placed_at is None else f"{1e3 * queue_s:.3f}" if queue_s else "0.000"
    ttfb = "null" if first_byte_at is None else f"{1e3 * (first_byte_at - started_at):.3f}"
    more = "" if record.key is None else f',"key":{_quoted(record.key, MAX_FIELD_CHARS)}'
    if record.flow is not None and record.flow not in (record.key, ANONYMOUS):
        more += f',"flow":{_quoted(record.flow, MAX_FIELD_CHARS)}'
    if record.alias is not None:
        more += f',"alias":{_quoted(record.alias, MAX_FIELD_CHARS)}'
    if record.trace is not None:
        more += f',"trace_id":"{record.trace.trace_id:032x}"'
    if record.error is not None:
        more += f',"error":{_quoted(record.error, MAX_ERROR_CHARS)}'
    request_id = record.id if _HARMLESS(record.id) else _quoted(record.id, MAX_FIELD_CHARS)[1:-1]
    # By %, which takes two thirds of what an f-string of so many pieces does.
    line = _LINE % (
        _millisecond(int(time.time() * 1000)),
        level,
        request_id,
        facts,
        record.request_bytes,
        record.response_bytes,
        record.events,
        queue,
        ttfb,
        1e3 * (record.ended_at - started_at),
        more,
    )
    return line.encode("ascii")


@functools.lru_cache(maxsize=1024)
def _facts(  # noqa: PLR0913, PLR0917 - the cache's key
    client: str,
    method: str,
    path: str,
    model: str | None,
    stream: bool,
    endpoint: str | None,
    status: int,
    outcome: str,
    attempts: int,
) -> str:
    """Those fields of a line that many requests have in common. At most 16 KB each."""
    fields = {
        "client": plain(client, MAX_FIELD_CHARS),
        "method": plain(method, MAX_FIELD_CHARS),
        "path": plain(path.partition("?")[0], MAX_PATH_CHARS),
        "model": None if model is None else plain(model, MAX_FIELD_CHARS),
        "stream": stream,
        "endpoint": endpoint,
        "status": status,
        "outcome": outcome,
        "attempts": attempts,
    }
    return orjson.dumps(fields)[1:-1].decode("ascii")


def _quoted(text: str, limit: int) -> str:
    return f'"{text}"' if _HARMLESS(text) else orjson.dumps(plain(text, limit)).decode("ascii")


_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "event"}


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object: time, level, event, message, then whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
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
        self._aiohttp_next_at = 0.0
        self._aiohttp_suppressed = 0
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.levelno >= logging.ERROR and not _is_clients_fault(error):
            self.internal_errors += 1
        if record.name.startswith("aiohttp.") and not self._let_through(record):
            return
        try:
            self._writer.write(self.format(record).encode() + b"\n")
        except Exception:  # noqa: BLE001 - logging's own way: a bad format string must not fail the request
            self.handleError(record)

    def _let_through(self, record: logging.LogRecord) -> bool:
        """Whether this line of aiohttp's is written: whoever sends garbage must not fill the disk."""
        now = time.monotonic()
        if now < self._aiohttp_next_at:
            self._aiohttp_suppressed += 1
            return False
        self._aiohttp_next_at = now + AIOHTTP_LINE_EVERY_S
        record.suppressed = self._aiohttp_suppressed
        self._aiohttp_suppressed = 0
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
