# SPDX-License-Identifier: Apache-2.0
"""Event streams: the scanners of `core.requests.sse`, fed in pieces, against a plain look at the whole."""

from __future__ import annotations

import json
import random
import re

from lbproxy.core.requests.request import Usage
from lbproxy.core.requests.sse import EventScanner, UsageScanner
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
_FINISHED = re.compile(
    rb'\[DONE\]|"finish_reason"[ \t]*:[ \t]*"|"message_stop"|"response\.(completed|failed|incomplete)"'
)
_NAMES = (
    (b"prompt_tokens", b"input_tokens"),
    (b"cached_tokens", b"cache_read_input_tokens"),
    (b"completion_tokens", b"output_tokens"),
)


def plain_usage(data: bytes, at: int | None = None) -> Usage | None:
    """From the last `"usage"` on, or from `at`, 1 KiB: the first number that each of the names has."""
    at = data.rfind(b'"usage"') if at is None else at
    tail = data[at : at + 1024] if at >= 0 else b""
    counts: list[int | None] = []
    for names in _NAMES:
        first: tuple[int, int] | None = None
        for name in names:
            for found in re.finditer(rb'"%s"[ \t]*:[ \t]*([0-9]+)' % name, tail):
                if len(found[1]) <= 9:
                    first = min(first or (len(tail), 0), (found.start(), int(found[1])))
                    break
        counts.append(first[1] if first else None)
    return Usage(*counts) if any(count is not None for count in counts) else None


def is_merged(usage: Usage | None, data: bytes) -> bool:
    """Whether what the last report lacks, its prompt among it, is of the first report, as far as pieces show that."""
    first, last = plain_usage(data, data.find(b'"usage"')), plain_usage(data)
    if usage is None or first is None or last is None or last.prompt_tokens is not None:
        return False
    return all(
        ours == theirs if theirs is not None else ours in {None, other}
        for ours, theirs, other in zip(usage, last, first, strict=True)
    )


def parsed_usage(data: bytes) -> Usage | None:
    """What the object says that the last `"usage"` is, if it has no object inside and both of the counts."""
    at = max(0, data.rfind(b'"usage"'))
    try:
        said = json.loads(data[data.index(b"{", at) : data.index(b"}", at) + 1])
        return Usage(said["prompt_tokens"], said.get("cached_tokens"), said["completion_tokens"])
    except (ValueError, KeyError):
        return None


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    events, usage = EventScanner(watch_finish=True), UsageScanner()
    for piece in pieces(data, rng):
        framed = b"5\r\n" + piece + b"\r\ndata:"
        events.feed(framed, 3, 3 + len(piece))
        usage.feed(framed, 3, 3 + len(piece))
    count = sum(line.startswith(b"data:") for line in data.split(b"\n"))
    lines = re.split(rb"\r?\n", data)
    boundary = not data or (len(lines) > 1 and lines[-2:] == [b"", b""])
    if (events.events, events.at_boundary) != (count, boundary):
        raise DifferenceError(f"{events.events} events, boundary {events.at_boundary}; plainly {count}, {boundary}")
    found = _FINISHED.search(data)
    if events.finished != (found is not None):
        if found is None or len(found[0]) <= 32:
            raise DifferenceError(f"finished: {events.finished}, plainly {found}")
        return "a finish reason behind much white space, cut"
    if usage.usage != plain_usage(data):
        if usage.usage == parsed_usage(data):
            return "an object of its own, parsed: what is behind it does not count, of two alike the last does"
        if is_merged(usage.usage, data):
            return "a report without a prompt goes on with the first one"
        raise DifferenceError(f"usage {usage.usage}, plainly {plain_usage(data)}")
    return "read alike"
