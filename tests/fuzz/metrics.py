# SPDX-License-Identifier: Apache-2.0
"""Metrics pages: `core.engines.exposition.Scanner` against prometheus_client's parser, line by line.

Its parser gives a page up at the first bad line; ours skips the line. So each line is given to it by itself.
"""

from __future__ import annotations

import random

from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.engines.exposition import KnownLabels, Scanner
from tests.fuzz.oracle import DifferenceError
from tests.fuzz.strictness import explain

NAME = "metrics"
_PAGE = b"""\
# HELP vllm:num_requests_running n
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""
SEEDS = [
    _PAGE,
    b'm 1\nm{a="b"} 2 1700000000123\nm{a="q\\"b\\\\n\\n}",b="x=y"} +Inf\nmm 9\n',
    b'm{} NaN\nm{a="1",} 1e5\n m 5\nm_by{a="1"} 7\nm\t-.5\n',
    b'm { a = "b" , c="d" } 1e-7 -5\nm 1\r\nm 0x10\nm 1_000\n',
    b'sglang:token_usage{model_name="x/y"} 0.25\nm 12',
]
TOKENS = [
    *(
        b"m",
        b"m ",
        b"m{",
        b"{",
        b"}",
        b'"',
        b'\\"',
        b"\\n",
        b"\\",
        b",",
        b"=",
        b" ",
        b"\t",
        b"\n",
        b"\r\n",
        b"#",
        b"# ",
    ),
    *(
        b'a="b"',
        b'a="',
        b"NaN",
        b"+Inf",
        b"-Inf",
        b"1e400",
        b"1_0",
        b"0x1",
        b"1.",
        b".5",
        b" 1700000000000",
        b"infinity",
    ),
    *("\u0661".encode(), "\u00a0".encode(), "\u2028".encode(), b"\xff", b"\x00", b"\x0b", b"\x0c", b"\x85", b"nan"),
]
FAMILIES = frozenset({"m", "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:token_usage"})
SCANNER = Scanner(FAMILIES)
Seen = tuple[dict[str, str], str, str]


def as_they_read(line: bytes) -> tuple[str, Seen] | None:
    """Name and sample of a line that begins with a wanted name; None: none, or refused."""
    try:
        families = list(text_string_to_metric_families(line.decode() + "\n"))
    except Exception:  # noqa: BLE001 - it raises ValueError, KeyError, IndexError and others, by the input
        return None
    for family in families:
        for sample in family.samples:
            seconds = None if sample.timestamp is None else float(sample.timestamp)
            return sample.name, (dict(sample.labels), repr(float(sample.value) + 0.0), shown(seconds))
    return None


def shown(seconds: float | None) -> str:
    """As precise as both are: they divide by 1,000 at different moments."""
    return "" if seconds is None else f"{seconds + 0.0:.12g}"


def as_we_read(page: bytes, known: KnownLabels) -> list[tuple[str, Seen]]:
    """The same of ours."""
    return [
        (
            name,
            (dict(one.labels), repr(one.value + 0.0), shown(None if one.timestamp is None else one.timestamp / 1000)),
        )
        for name, samples in SCANNER.scan(page, known).items()
        for one in samples
    ]


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    known = KnownLabels()
    ours = as_we_read(data, known)
    if ours != as_we_read(data, known):
        raise DifferenceError("read otherwise the second time")
    if rng.random() < 0.1 and ours != as_we_read(data, KnownLabels()):
        raise DifferenceError("read otherwise without memory")
    by_line: list[tuple[str, Seen]] = []
    label = "read alike"
    for line in data.split(b"\n")[:-1]:
        if not line.startswith(tuple(name.encode() for name in FAMILIES)):
            continue
        own = as_we_read(line + b"\n", KnownLabels())
        by_line += own
        theirs = as_they_read(line)
        if theirs is not None and theirs[0] not in FAMILIES:
            theirs = None
        if (own[0] if own else None) == theirs:
            continue
        rule = explain(NAME, line, laxer=bool(own))
        if rule is None or (own and theirs and theirs != own[0]):
            raise DifferenceError(f"{line!r}: we {own}, they {theirs}")
        label = rule
    if sorted(map(repr, by_line)) != sorted(map(repr, ours)):
        raise DifferenceError("a line is read otherwise by itself")
    return label
