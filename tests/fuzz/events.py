# SPDX-License-Identifier: Apache-2.0
"""Event streams: the scanners of `core.responses.sse`, fed in pieces, against a plain look at the whole."""

from __future__ import annotations

import json
import random
import re

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.sse import EventScanner
from lbproxy.core.responses.usage import read_usage
from tests.fuzz.mutate import pieces
from tests.fuzz.oracle import DifferenceError

NAME = "events"
SEEDS = [
    (
        b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":14,"completion_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":5}}}\n\ndata: [DONE]\n\n'
    ),
    b': keep-alive\n\nevent: x\r\ndata: {"finish_reason":"stop"}\r\n\r\n',
    b'data: {"finish_reason" : "length","usage":null}\n\ndata:\ndata: x\n\nid: data: 1\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n{"usage": {"input_tokens":3,"output_tokens":4}}',
    b'{"usage":{"prompt_tokens":1},"x":"\\"usage\\":","usage":{"total_tokens":2}}',
    b"\n\ndata:\n\n\n\r\n\r\n",
]
TOKENS = [
    *(
        b"data:",
        b"\ndata:",
        b"data: ",
        b"\n\n",
        b"\r\n\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b": x\n\n",
        b'"usage"',
        b'"usage":',
    ),
    *(b'"finish_reason":"stop"', b'"finish_reason" \t: "', b"[DONE]", b'"message_stop"', b'"response.completed"', b"d"),
    *(b'"prompt_tokens":5', b'"completion_tokens" : 6', b'"cached_tokens":0', b"9999999999", b"x" * 40, b"x" * 1200),
    *(b'"usage"' + b" " * 1100, b'"us', b"age", b"da", b"ta:", b"null", b"}", b"{"),
]


class _DoubleError(ValueError):
    """A key occurs twice: which one counts is not said."""


def _unique(members: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in members}) < len(members):
        raise _DoubleError
    return dict(members)


def plain_objects(data: bytes) -> list[dict[str, object]]:
    """What the lines of data say that are objects. Raises ValueError if a line is no JSON, or no data but has usage."""
    said = []
    for line in data.split(b"\n"):
        if b'"usage"' in line and not line.startswith(b"data:"):
            raise ValueError
        if line.startswith(b"data:") and line[5:].strip() not in {b"", b"[DONE]"}:
            one = json.loads(line[5:].decode(), object_pairs_hook=_unique)
            said += [one] if isinstance(one, dict) else []
    return said


def plain_usage(said: list[dict[str, object]]) -> Usage | None:
    """Of the last object `usage` in an outermost object."""
    usages = [one["usage"] for one in said if isinstance(one.get("usage"), dict)]
    return read_usage(json.dumps({"usage": usages[-1]}).encode()) if usages else None


def scanned(data: bytes, parts: list[bytes]) -> EventScanner:
    scanner = EventScanner(watch_finish=True)
    for piece in parts:
        framed = b"5\r\n" + piece + b"\r\ndata:"
        scanner.feed(framed, 3, 3 + len(piece))
    return scanner


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    parts = list(pieces(data, rng))
    events, whole = scanned(data, parts), scanned(data, [data])
    count = sum(line.startswith(b"data:") for line in data.split(b"\n"))
    lines = re.split(rb"\r?\n", data)
    boundary = not data or (len(lines) > 1 and lines[-2:] == [b"", b""])
    if (events.events, events.at_boundary) != (count, boundary):
        raise DifferenceError(f"{events.events} events, boundary {events.at_boundary}; plainly {count}, {boundary}")
    if events.is_complete != whole.is_complete:
        raise DifferenceError(f"complete: {events.is_complete}, in one piece {whole.is_complete}")
    try:
        said = plain_objects(data)
    except (ValueError, RecursionError):
        return "a line is no JSON"
    if re.search(rb'"usage"[ \t]{40}', data):
        return "blanks between a key and its colon"
    if any(isinstance(one.get("response", one.get("message")), dict) for one in said):
        return "an object in an object"
    if events.usage != (usage := plain_usage(said)) and not is_merged(said):
        raise DifferenceError(f"usage {events.usage}, plainly {usage}")
    return "read alike"


def is_merged(said: list[dict[str, object]]) -> bool:
    """Whether there are several reports, of which the first may have what the last one lacks."""
    return sum(isinstance(one.get("usage"), dict) for one in said) > 1
