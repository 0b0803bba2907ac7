# SPDX-License-Identifier: Apache-2.0
"""Where lbproxy is stricter than an oracle, or laxer, on purpose: the written list.

A fuzzer that finds a difference asks here whether one of its rules explains it. What no rule explains is a
disagreement, and fails. README.md shows the list; each rule says why it is no gap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple


class Rule(NamedTuple):
    """One difference that is meant."""

    fuzzer: str
    name: str
    why: str
    applies: Callable[[bytes], object]
    """To this input."""
    laxer: bool = False
    """lbproxy takes what the oracle refuses."""


_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|(?<!\r)\n")
_LENGTHS = re.compile(rb"(?im)^content-length[ \t]*:")
_TE = re.compile(rb"(?im)^transfer-encoding[ \t]*:")
_JSON_KEYS_TOO_DEEP = 900


def _fields(data: bytes) -> int:
    return data.count(b"\n") - 2


def _model_in_other_case(data: bytes) -> bool:
    value = json.loads(data)
    return isinstance(value, dict) and any(key != "model" and key.lower() == "model" for key in value)


def _deep(data: bytes) -> bool:
    depth = deepest = 0
    for byte in re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data, flags=re.DOTALL):
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return deepest > _JSON_KEYS_TOO_DEEP


_QUOTED = re.compile(rb'"(?:[^"\\\\]|\\\\.)*"')
_TERM = re.compile(rb'[ \t]*[A-Za-z_][A-Za-z0-9_]*[ \t]*=[ \t]*""[ \t]*')


def _odd_labels(line: bytes) -> bool:
    """Braces with a term that is no name="value", but for an empty one at the end."""
    braces = re.search(rb"\{([^}]*)\}", _QUOTED.sub(b'""', line))
    if braces is None:
        return b"{" in line or b"}" in line
    terms = braces[1].split(b",")
    if not terms[-1].strip(b" \t"):
        terms.pop()
    return any(_TERM.fullmatch(term) is None for term in terms)


def _odd_stamp(line: bytes) -> bool:
    """More behind the value than one whole number."""
    plain = _QUOTED.sub(b'""', line)
    words = plain.partition(b"}")[2].split() if b"}" in plain else plain.split()[1:]
    return len(words) > 2 or (len(words) == 2 and re.fullmatch(rb"-?[0-9]{1,18}", words[1]) is None)


RULES = [
    Rule(
        "heads", "control characters", "RFC 9110, 5.5: a bare CR, LF or NUL is not to be let through", _CONTROL.search
    ),
    Rule("heads", "line folding", "RFC 9112, 5.2: obsolete; a gateway may respond 502", re.compile(rb"\n[ \t]").search),
    Rule(
        "heads",
        "more than one Content-Length",
        "RFC 9110, 8.6: equal ones may be merged, or refused",
        lambda data: len(_LENGTHS.findall(data)) > 1 or re.search(rb"(?i)content-length:[^\r\n]*,", data),
    ),
    Rule(
        "heads",
        "Content-Length over 15 digits",
        "no body has a petabyte",
        re.compile(rb"(?i)content-length:[ \t]*[0-9]{16}").search,
    ),
    Rule(
        "heads",
        "Content-Length and Transfer-Encoding",
        "RFC 9112, 6.3: ought to be handled as an error",
        lambda data: _LENGTHS.search(data) and _TE.search(data),
    ),
    Rule(
        "heads",
        "Transfer-Encoding in HTTP/1.0",
        "RFC 9112, 6.1: to be treated as faulty",
        lambda data: data.startswith(b"HTTP/1.0") and _TE.search(data),
    ),
    Rule("heads", "more than 128 fields", "a bound", lambda data: _fields(data) > 128),
    Rule(
        "heads",
        "version other than 1.0 and 1.1",
        "nothing else is spoken",
        lambda data: not data.startswith((b"HTTP/1.0 ", b"HTTP/1.1 ")),
    ),
    Rule(
        "heads",
        "a tab behind `chunked`",
        "RFC 9110, 5.6.3: blanks round a value may be tabs; llhttp reads another coding",
        re.compile(rb"(?i)transfer-encoding:[ \t]*chunked[ \t]*\t").search,
        laxer=True,
    ),
    Rule("heads", "status over 599", "RFC 9110, 15: invalid", re.compile(rb"HTTP/1\.[01] [6-9]").match),
    Rule(
        "chunks",
        "control characters in a chunk line or trailer",
        "RFC 9112, 7.1.1: an extension is made of tokens and quoted text",
        _CONTROL.search,
    ),
    Rule("chunks", "size over 15 digits", "no chunk has a petabyte", re.compile(rb"(?m)^[0-9A-Fa-f]{16}").search),
    Rule("chunks", "a line over 4 KiB", "a bound", re.compile(rb"[^\n]{4096}").search),
    Rule("chunks", "line folding in a trailer", "RFC 9112, 5.2: obsolete", re.compile(rb"\n[ \t]").search),
    Rule("chunks", "trailers over 16 KiB", "a bound", lambda data: len(data) > 16 << 10),
    Rule(
        "chunks",
        "blanks before the semicolon of an extension",
        "RFC 9112, 7.1.1: such blanks must be understood; h11 does not",
        re.compile(rb"[0-9A-Fa-f][ \t]+;").search,
        laxer=True,
    ),
    Rule(
        "metrics",
        "other than printable ASCII outside of quotes",
        "prometheus_client strips what Unicode calls white space; Prometheus itself refuses it",
        lambda line: re.search(rb"[^\x20-\x7e\t]", _QUOTED.sub(b"", line)),
    ),
    Rule("metrics", "a timestamp that is no whole number", "the format has whole milliseconds, and one", _odd_stamp),
    Rule("metrics", "labels that are no names with values", "prometheus_client skips empty terms", _odd_labels),
    Rule(
        "bodies",
        "UTF-16 and UTF-32",
        "RFC 8259, 8.1: JSON between systems is UTF-8",
        lambda data: not json.detect_encoding(data).startswith("utf-8"),
    ),
    Rule("bodies", "`model` in other case", "some servers read it as `model`, others do not", _model_in_other_case),
    Rule("bodies", "nested deeper than 900", "a bound, where Python's own depends on its stack", _deep),
]


def explain(fuzzer: str, data: bytes, *, laxer: bool = False) -> str | None:
    """The name of the rule that explains a difference on this input; None: nothing does."""
    for rule in RULES:
        if rule.fuzzer == fuzzer and rule.laxer == laxer and rule.applies(data):
            return rule.name
    return None
