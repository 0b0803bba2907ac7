# SPDX-License-Identifier: Apache-2.0
"""Load reports that come with responses (ORCA), in the header `endpoint-load-metrics`.

On demand (request header `endpoint-load-metrics-format: TEXT` or `JSON`) an engine reports its load with each
non-streaming response: fresh, and without a scrape. vLLM 0.11 and later does so, with its queue and its cache, but not
with the number of running requests. Forms, by gRPC's proposal A51 and Envoy's parser:

    endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=1
    endpoint-load-metrics: JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 1}}
    endpoint-load-metrics-bin: (base64 of an xds.data.orca.v3.OrcaLoadReport)

Invariants: nothing is raised whatever the bytes; the work is linear in at most `MAX_REPORT_BYTES`; a value that is
missing or out of range is None and never 0; unknown metrics are ignored. A malformed report is None as a whole: it is
counted, and its endpoint is scraped again.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import orjson

REQUEST_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
RESPONSE_HEADERS = (REPORT_HEADER.encode(), b"endpoint-load-metrics-bin")
MAX_REPORT_BYTES = 2048
"""vLLM's have about 80 bytes. The longest that is accepted takes about 0.2 ms."""
MAX_VALUE = 1e9
"""As in `core.engines.readings`: no server has so many requests."""

WAITING, RUNNING, KV_UTILIZATION = "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"
"""Named metrics: vLLM's families without their prefix. vLLM 0.32 reports the first and the last of them."""

Named: TypeAlias = Mapping[str, float]


class LoadReport(NamedTuple):
    """What one response reported of its engine's load. The fields are those of `LoadMetrics`."""

    waiting: float | None = None
    running: float | None = None
    kv_utilization: float | None = None


def read_field(line: bytes) -> LoadReport | None:
    """Read the report in a field line, name and value; None if it is malformed."""
    name, _, value = line.partition(b":")
    return read_report(value, binary=name.lower() == RESPONSE_HEADERS[1])


def read_report(value: bytes, *, binary: bool = False) -> LoadReport | None:
    """Read the report in the value of a header; None if it is malformed. `binary`: it is the header for protobuf.

    A report without any known metric is an empty LoadReport.
    """
    if len(value) > MAX_REPORT_BYTES:
        return None
    form, _, rest = (b"BIN", b"", value) if binary else value.strip().partition(b" ")
    try:
        named = _FORMS[form.rstrip(b":").upper()](rest.strip())
    except (KeyError, ValueError):  # UnicodeDecodeError and the errors of orjson and binascii are ValueErrors
        return None
    return LoadReport(_count(named, WAITING), _count(named, RUNNING), _share(named, KV_UTILIZATION))


def _count(named: Named, name: str) -> float | None:
    value = named.get(name, math.nan)
    return value if 0.0 <= value <= MAX_VALUE else None


def _share(named: Named, name: str) -> float | None:
    value = _count(named, name)
    return None if value is None else min(value, 1.0)


# --- The forms: each function returns the report's named metrics, or raises ValueError --------------------------------

_NUMBER = re.compile(
    r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,4})?|[+-]?(?:inf|nan)", re.IGNORECASE
)
_NAMED = "named_metrics."


def _read_text(text: bytes) -> Named:
    """`key=value, key=value`, or nothing. A key that occurs twice is malformed, as it is ambiguous."""
    pairs: dict[str, float] = {}
    for pair in text.decode().split(",") if text else ():
        key, _, number = pair.partition("=")
        key, number = key.strip(), number.strip()
        if not key or key in pairs or not _NUMBER.fullmatch(number):
            raise ValueError(pair)
        pairs[key] = float(number)
    return {key.removeprefix(_NAMED): value for key, value in pairs.items() if key.startswith(_NAMED)}


def _read_json(text: bytes) -> Named:
    """JSON, also with protobuf's own spelling of keys."""
    report = orjson.loads(text)
    if not isinstance(report, dict):
        raise ValueError("not an object")
    named = report.get("named_metrics", report.get("namedMetrics", {}))
    if not isinstance(named, dict) or not all(_is_number(value) for value in named.values()):
        raise ValueError("named_metrics are not numbers")
    return {name: float(value) for name, value in named.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


NAMED_METRICS_FIELD = 8
"""`map<string, double> named_metrics = 8` in cncf/xds: xds/data/orca/v3/orca_load_report.proto. A map is on the wire a
repeated message of key = 1 and value = 2."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _read_binary(text: bytes) -> Named:
    named: dict[str, float] = {}
    for number, entry in _fields(binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)):
        if number == NAMED_METRICS_FIELD and isinstance(entry, bytes):
            fields = dict(_fields(entry))
            key, value = fields.get(1, b""), fields.get(2, 0.0)
            if not isinstance(key, bytes) or not isinstance(value, float):
                raise ValueError("a named metric is not a string and a double")
            named[key.decode()] = value
    return named


def _fields(message: bytes) -> Iterator[tuple[int, bytes | float | None]]:
    """The fields of a protobuf message: their numbers, and their values if these are bytes or doubles."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            yield tag >> 3, None
            continue
        size, at = _varint(message, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}.get(kind, -1), at)
        piece = message[at : at + size]
        if size < 0 or len(piece) < size:
            raise ValueError("cut off, or of an unknown type")
        at += size
        yield tag >> 3, piece if kind == _BYTES else struct.unpack("<d", piece)[0] if kind == _FIXED64 else None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of at most 10 bytes, and where it ends."""
    value = 0
    for shift, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a number without end")


_FORMS = {b"TEXT": _read_text, b"JSON": _read_json, b"BIN": _read_binary}
