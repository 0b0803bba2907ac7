"""The access log's line of a request. Pure but for the wall clock.

Not in log.py, as this is compiled, and a compiled class cannot inherit from one of the standard library's.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Final

import orjson

from lbproxy.core.flows import ANONYMOUS
from lbproxy.core.record import MAX_PATH_CHARS, RequestRecord
from lbproxy.core.types import Outcome

MAX_FIELD_CHARS: Final = 256
MAX_ERROR_CHARS: Final = 512


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


OUTCOMES: Final[dict[Outcome, tuple[str, int]]] = {one: (one.label, one.value.status) for one in Outcome}
"""Label and status: an enum's `value` costs more than all the rest of a field."""


_WARNINGS: Final = {
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
LEVELS: Final[dict[Outcome, int]] = {
    one: logging.ERROR if one is Outcome.INTERNAL_ERROR else logging.WARNING if one in _WARNINGS else logging.INFO
    for one in Outcome
}
"""The level of a request's line: warnings are what an operator may have to act on."""
_LEVEL_NAMES: Final = {one: logging.getLevelName(level).lower() for one, level in LEVELS.items()}


_WORDS: Final = {one: (*OUTCOMES[one], _LEVEL_NAMES[one]) for one in Outcome}
_DECIMALS: Final = [f".{n:03d}" for n in range(1000)]


def _milliseconds(seconds: float) -> str:
    """With three decimals. Python's own takes four times as long, for any number of them."""
    micros = int(1e6 * seconds + 0.5)
    return str(micros // 1000) + _DECIMALS[micros % 1000]


def _is_harmless(text: str) -> bool:
    """It needs no escapes: as every request id that is ours, or that we took from a client."""
    return len(text) <= 128 and text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


def now() -> str:
    """What `access_line` wants of the wall clock."""
    return _millisecond(int(time.time() * 1000))


def access_line(record: RequestRecord, at: str) -> str:
    """The access log's line of a request, line feed included; ASCII. 1 µs: most of it is as in a line before.

    `at`: when it is written, by `now`; the same for all lines of a turn of the loop.
    """
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
    queue = "null" if placed_at is None else _milliseconds(queue_s) if queue_s > 0.0 else "0.000"
    ttfb = "null" if first_byte_at is None else _milliseconds(first_byte_at - started_at)
    more = "" if record.key is None else f',"key":{_quoted(record.key, MAX_FIELD_CHARS)}'
    if record.flow is not None and record.flow not in (record.key, ANONYMOUS):
        more += f',"flow":{_quoted(record.flow, MAX_FIELD_CHARS)}'
    if record.alias is not None:
        more += f',"alias":{_quoted(record.alias, MAX_FIELD_CHARS)}'
    if record.trace is not None:
        more += f',"trace_id":"{record.trace.trace_id:032x}"'
    if record.error is not None:
        more += f',"error":{_quoted(record.error, MAX_ERROR_CHARS)}'
    request_id = record.id if _is_harmless(record.id) else _quoted(record.id, MAX_FIELD_CHARS)[1:-1]
    duration = _milliseconds(record.ended_at - started_at)
    return (
        f'{{"time":"{at}","level":"{level}","event":"request","id":"{request_id}",{facts},'
        f'"request_bytes":{record.request_bytes},"response_bytes":{record.response_bytes},"events":{record.events},'
        f'"queue_ms":{queue},"ttfb_ms":{ttfb},"duration_ms":{duration}{more}}}\n'
    )


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
    return f'"{text}"' if _is_harmless(text) else orjson.dumps(plain(text, limit)).decode("ascii")
