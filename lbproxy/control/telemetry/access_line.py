# SPDX-License-Identifier: Apache-2.0
"""The access log's line of a request. Pure but for the wall clock.

Not in log.py, as this is compiled, and a compiled class cannot inherit from one of the standard library's.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Final, TypeAlias

import orjson

from lbproxy.core.observed.record import MAX_PATH_CHARS, RequestRecord
from lbproxy.core.queue.flow import ANONYMOUS
from lbproxy.core.requests.outcome import LABEL_AND_STATUS, Outcome

MAX_FIELD_CHARS: Final = 256
MAX_ERROR_CHARS: Final = 512
MAX_KNOWN: Final = 1024


@functools.lru_cache(maxsize=4)
def _second(at: int) -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)).encode("ascii")


def stamp(at: float) -> str:
    """Wall time (seconds since the epoch) by RFC 3339: UTC, milliseconds."""
    return _stamp(int(at * 1000)).decode("ascii")


def _stamp(at_ms: int) -> bytes:
    return _second(at_ms // 1000) + _DECIMALS[at_ms % 1000] + b"Z"


def plain(text: str, limit: int) -> str:
    """At most `limit` ASCII characters: others, and surrogates that stand for undecodable bytes, as escapes."""
    if len(text) > limit:
        text = text[:limit]
    if not text.isascii():
        text = text.encode("ascii", "backslashreplace").decode()[:limit]
    return text


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


_WORDS: Final[dict[Outcome, tuple[str, int, bytes]]] = {
    one: (*LABEL_AND_STATUS[one], f'","level":"{_LEVEL_NAMES[one]}","event":"request","id":"'.encode())
    for one in Outcome
}
_DECIMALS: Final = [b".%03d" % n for n in range(1000)]
_NUMBERS: Final = [b"%d" % n for n in range(1000)]
"""Most numbers of most lines: a tenth of what it takes to make one."""


def _number(value: int) -> bytes:
    return _NUMBERS[value] if 0 <= value < 1000 else str(value).encode("ascii")


def _milliseconds(seconds: float) -> bytes:
    """With three decimals. Python's own takes four times as long, for any number of them."""
    micros = int(1e6 * seconds + 0.5)
    return _number(micros // 1000) + _DECIMALS[micros % 1000]


def _is_harmless(text: str) -> bool:
    """It needs no escapes."""
    return len(text) <= 128 and text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


def now() -> bytes:
    """What `access_line` wants of the wall clock."""
    return _stamp(int(time.time() * 1000))


def access_line(record: RequestRecord, at: bytes) -> bytes:
    """The access log's line of a request, line feed included; ASCII. Most of it is as in a line before.

    `at`: when it is written, by `now`; the same for all lines of a turn of the loop.
    """
    placed_at, first_byte_at, started_at = record.placed_at, record.first_byte_at, record.started_at
    outcome, status, words = _WORDS[record.outcome]
    method, path, model, endpoint = record.method, record.path, record.model, record.endpoint
    request_id = record.request_id
    key = record.client, method, path, model, record.stream, endpoint, record.status or status, outcome, record.attempts
    facts = _known.get(key)
    if facts is None:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        facts = _known[key] = _facts(*key)
    queue_s = record.queue_s
    queue = b"null" if placed_at is None else _milliseconds(queue_s) if queue_s > 0.0 else b"0.000"
    ttfb = b"null" if first_byte_at is None else _milliseconds(first_byte_at - started_at)
    return b'{"time":"%b%b%b%b%b,"response_bytes":%b,"events":%b%b,"queue_ms":%b,"ttfb_ms":%b,"duration_ms":%b%b' % (
        at,
        words,
        request_id.encode("ascii"),
        facts,
        _number(record.request_bytes),
        _number(record.response_bytes),
        _number(record.events),
        _tokens(record),
        queue,
        ttfb,
        _milliseconds(record.ended_at - started_at),
        _more(record, request_id),
    )


_NO_USAGE: Final = b',"prompt_tokens":null,"cached_tokens":null,"completion_tokens":null'


def _tokens(record: RequestRecord) -> bytes:
    """As the endpoint reported them."""
    usage = record.usage
    if usage is None:
        return _NO_USAGE
    prompt, cached, completion, _, _ = usage  # an attribute costs more
    if record.prefill is not None:
        cached = record.cached_tokens
    return b',"prompt_tokens":%b,"cached_tokens":%b,"completion_tokens":%b' % (
        b"null" if prompt is None else _number(prompt),
        b"null" if cached is None else _number(cached),
        b"null" if completion is None else _number(completion),
    )


def _more(record: RequestRecord, request_id: str) -> bytes:
    """What few lines have, and the line's end."""
    key, flow = record.key, record.flow
    more = "" if key is None else f',"key":{_quoted(key, MAX_FIELD_CHARS)}'
    if record.attempts and record.id != request_id:
        more += f',"engine_id":"{record.id}"'
    if record.prefill is not None:
        took = "null" if record.prefill_s is None else _milliseconds(record.prefill_s).decode("ascii")
        more += f',"prefill":{_quoted(record.prefill, MAX_FIELD_CHARS)},"prefill_ms":{took}'
    if flow is not None and flow not in (key, ANONYMOUS):
        more += f',"flow":{_quoted(flow, MAX_FIELD_CHARS)}'
    if record.tier > 1:
        reason = "null" if record.overflow is None else f'"{record.overflow}"'
        more += f',"tier":{record.tier},"overflow":{reason}'
    if record.alias is not None:
        more += f',"alias":{_quoted(record.alias, MAX_FIELD_CHARS)}'
    if record.failed and record.moves:
        more += f',"moves":{record.moves}'
    if record.fallback_from is not None:
        more += f',"fallback_from":{_quoted(record.fallback_from, MAX_FIELD_CHARS)}'
    if record.trace is not None:
        more += f',"trace_id":"{record.trace.trace_id:032x}"'
    elif record.trace_id is not None:
        more += f',"trace_id":"{record.trace_id}"'
    if record.error is not None:
        more += f',"error":{_quoted(record.error, MAX_ERROR_CHARS)}'
    return more.encode("ascii") + b"}\n" if more else b"}\n"


_Key: TypeAlias = tuple[str, str, str, str | None, bool, str | None, int, str, int]
_known: Final[dict[_Key, bytes]] = {}
"""What `_facts` said. A dict, as functools' caches take twice as long."""


def _facts(  # noqa: PLR0913, PLR0917 - the key of what is known
    client: str,
    method: str,
    path: str,
    model: str | None,
    stream: bool,
    endpoint: str | None,
    status: int,
    outcome: str,
    attempts: int,
) -> bytes:
    """Those fields of a line that many requests have in common, from the id's end on. At most 16 KB each."""
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
    return b'",%b,"request_bytes":' % orjson.dumps(fields)[1:-1]


def _quoted(text: str, limit: int) -> str:
    return f'"{text}"' if _is_harmless(text) else orjson.dumps(plain(text, limit)).decode("ascii")
