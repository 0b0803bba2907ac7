# SPDX-License-Identifier: Apache-2.0
"""Large JSON: what `core.requests.outline` reads in segments, cut wherever it can be, against its parser in one
piece.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

from lbproxy.core.requests import outline
from lbproxy.core.requests.openai import find_names
from lbproxy.core.requests.outcome import LbError
from lbproxy.core.requests.outline import LargeJson, load_json
from tests.fuzz.oracle import DifferenceError

NAME = "segments"
SEEDS = [
    b'{"model":"m","messages":[{"role":"user","content":"a,b"},{"role":"user","content":[{"type":"text","text":"]"}]}]}',
    b'{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10],"stream":true}',
    b'{"a":[1,2,3],"b":[4,5],"a":[6,7,8],"c":{"d":[9,10,11]},"":[[1,2],[3,4]]}',
    b'{"input":["caf\xc3\xa9","\\u4e2d\\"","\\\\",""], "n": 1e5 , "x" : [ true , null , {} , [ ] ] }',
    b'{}{"a":[NaN,1,2]}',
    b'[{"a":[1,2,3]}]',
    b'{"x":"\\"model\\":1","y":[{"model":"b"}],"mod\\u0065l" : "c\\"d","model":"a"}',
    b'{"input":[{"role":"a","content":[{"role":1},{"role":2}]}, {"type":"message"},{"role":"},{"}],"messages":[1]}',
]
TOKENS = [
    *(
        b",",
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b":",
        b"\\",
        b" ",
        b"0",
        b"NaN",
        b"-",
        b'"a":[1,2',
        b"],",
        b'"a":',
        b'""',
        b'"model":"a",',
        b'},{"role":1',
        b'},{"type":"message',
        b'"messages":[{"role":1},{"role":[2]},',
    ),
    *(b"\xef\xbb\xbf", b"\xff", b"\x00", b"\n", b'\\"', b"\\\\", b"\\ud800", b"1,2,3,4"),
]
_PAST_64_BITS = re.compile(rb"[0-9]{19}")


@contextmanager
def all_cut(*, outlined: bool = True) -> Iterator[None]:
    """Slices of a few bytes, segments as short as can be, and nothing parsed at once; all of it outlined, or as little
    as can be.
    """
    short = {"SLICE_BYTES": 24, "SEGMENT_COST": 0, "UNCOUNTED_BYTES": 0}
    if outlined:
        short["LITTLE_COST"] = 0
    before = {name: getattr(outline, name) for name in short}
    vars(outline).update(short)
    try:
        yield
    finally:
        vars(outline).update(before)


def read(data: bytes) -> str:
    """What a large body says. NaN equals NaN in this text."""
    try:
        large = LargeJson(data)
        while large.step():
            pass
    except LbError:
        return "refused"
    return "refused" if isinstance(large.value, list) else repr(large.value)  # no list is a body


def check(data: bytes, _: random.Random) -> str:
    """See the module."""
    whole = read(data)
    with all_cut(outlined=False):
        quick = read(data)
    with all_cut():
        segments = read(data)
    if quick != segments and not _PAST_64_BITS.search(data):
        raise DifferenceError(f"without an outline {quick:.200}, with one {segments:.200}")
    if whole != segments and _PAST_64_BITS.search(data) and "refused" not in {whole, segments}:
        return "a number past 64 bits"  # an int to the parser that takes what the first one refuses, of any segment
    if whole != segments:
        raise DifferenceError(f"whole {whole:.200}, in segments {segments:.200}")
    if whole == "refused":
        return "refused"
    compare_renamed(data)
    return "read alike"


def compare_renamed(data: bytes) -> None:
    """A name is replaced by the outline as it is without one."""
    value = load_json(data)
    if not isinstance(value, dict) or not isinstance(value.get("model"), str):
        return
    with all_cut():
        found = outline.outline(data)
    ours, plain = (b"".join(find_names(data, one).named(data, "another")) for one in (found, None))
    if ours != plain:
        raise DifferenceError(f"renamed {ours[:200]!r}, without an outline {plain[:200]!r}")
