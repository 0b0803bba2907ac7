# SPDX-License-Identifier: Apache-2.0
"""Watchers of the payload of a response that is relayed verbatim. They see every byte and change none.

They find out what must be known during a response and at its end: whether a token arrived, the number of events, the
reported usage, whether the last byte ended an event (only there may an error event follow), and, for a body that only a
closed connection ends, whether it is complete. Each piece costs a few searches at C speed and a copy of some bytes;
nothing is parsed before the end.
"""

from __future__ import annotations

import json
import re
from typing import Final

import orjson

from lbproxy.core.requests.request import Usage

_ENDS = (b"\n\n", b"\n\r\n")
"""An empty line. Some servers mix line ends."""
_OVERLAP_BYTES: Final = 32
"""How much of the last piece is kept: longer than every pattern that can be split between two pieces."""
_FINISH: Final = re.compile(
    rb'\[DONE\]|"finish_reason"[ \t]*:[ \t]*"|"message_stop"|"response\.(?:completed|failed|incomplete)"'
)
_DATA: Final = b"data:"
_DATA_LINE: Final = b"\ndata:"
"""In JSON a line feed is written as an escape, so this is always the beginning of a line."""


_PREAMBLE: Final = re.compile(
    rb"^event: ?(?:response\.(?:created|queued|in_progress|output_item\.added|content_part\.added)"
    rb"|message_start|content_block_start|ping)\r?$",
    re.MULTILINE,
)
"""Events that stand for no token. vLLM sends the first of them before the prompt is computed."""
_LINE_BYTES: Final = 64
"""How much of an incomplete line is kept to recognise such an event."""


_LINE_FEED: Final = b"\n"


class EventScanner:
    """Scans the payload of one SSE response, which it gets in order, in pieces of any size."""

    __slots__ = (
        "_line",
        "_overlap",
        "_skip_preamble",
        "_watch_finish",
        "at_boundary",
        "events",
        "finished",
        "has_content",
        "preamble_events",
    )

    def __init__(self, *, watch_finish: bool = False, skip_preamble: bool = False) -> None:
        self.events = 0
        """Events with data that began so far. Comments do not count: vLLM sends some before there is any token."""
        self.preamble_events = 0
        """Those of them, at the beginning, that stand for no token. Counted with `skip_preamble` only."""
        self.has_content = False
        """At least one event is not part of the preamble."""
        self._skip_preamble = skip_preamble
        self._line = b""
        self.at_boundary = True
        """The last byte so far ended an event, or there was none yet."""
        self.finished = False
        """A finish reason or [DONE] was seen. Only with `watch_finish`: bodies with framing do not need it."""
        self._watch_finish = watch_finish
        self._overlap = b"\n"

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        if start == end:
            return
        self.events += data.count(_DATA_LINE, start, end)
        if self.at_boundary and data.startswith(_DATA, start, end):
            self.events += 1  # the usual beginning of a piece
        else:
            self._search_overlap(data[start : min(end, start + _OVERLAP_BYTES)])
        if not self.has_content:
            if self._skip_preamble:
                self._count_preamble(data[start:end])
            self.has_content = self.events > self.preamble_events
        if self._watch_finish and not self.finished:
            self.finished = _FINISH.search(data, start, end) is not None
        if data.endswith(_ENDS, start, end):  # the usual end of a piece: no pattern is split there
            self.at_boundary = True
            self._overlap = b"\n"
            return
        if end - start >= _OVERLAP_BYTES:
            self._overlap = data[end - _OVERLAP_BYTES : end]
        else:
            self._overlap = (self._overlap + data[start:end])[-_OVERLAP_BYTES:]
        self.at_boundary = self._overlap.endswith(_ENDS)

    def is_token(self, data: bytes, start: int, end: int, usage: UsageScanner) -> bool:
        """Whether `data[start:end]` is one event of one line in which neither this nor `usage` finds anything: a token,
        as engines send it. It is counted then, and neither needs to be fed. A quarter of what the two cost: `partition`
        takes half of the time of `find`, and a quarter of that of `in`, which first tries to read bytes as a number.
        """
        if not self.at_boundary or not self.has_content or self._watch_finish or usage.is_reading:
            return False
        if end - start < 8 or data[end - 1] != 10 or data[end - 2] != 10 or data[start + 4] != 58:
            return False
        if data[start] != 100 or data[start + 1] != 97 or data[start + 2] != 116 or data[start + 3] != 97:
            return False
        line = data[start : end - 2]
        if line.partition(_LINE_FEED)[1]:
            return False
        parts = line.partition(_USAGE)
        if parts[1] and (usage.found or parts[2][:5] != _NULL or parts[2].partition(_USAGE)[1]):
            return False
        self.events += 1
        return True

    def _count_preamble(self, piece: bytes) -> None:
        """Count the events of the preamble."""
        lines, _, rest = (self._line + piece).rpartition(b"\n")
        self._line = rest[:_LINE_BYTES]
        self.preamble_events += len(_PREAMBLE.findall(lines))

    def _search_overlap(self, first: bytes) -> None:
        """Find patterns that are split between the last piece and this one."""
        most = len(_DATA_LINE) - 1
        self.events += (self._overlap[-most:] + first[:most]).count(_DATA_LINE)
        if self._watch_finish and not self.finished:
            self.finished = _FINISH.search(self._overlap + first) is not None

    @property
    def is_complete(self) -> bool:
        """The stream may be complete. Only meaningful with `watch_finish`."""
        return self.at_boundary and self.finished


_USAGE: Final = b'"usage"'
_NULL: Final = b":null"
"""After the key, in each chunk of SGLang: it is no object."""
_USAGE_BEGINS: Final = tuple(_USAGE[:n] for n in range(len(_USAGE) - 1, 0, -1))
"""How a piece ends if the key continues in the next piece; the longest first."""
_USAGE_BYTES: Final = 1024
"""How much is kept from the key on: vLLM's object has some 150 bytes."""
_COUNT: Final = re.compile(
    rb'"((?:prompt|input|completion|output)_tokens|cached_tokens|cache_(?:read|creation)_input_tokens)"'
    rb"[ \t]*:[ \t]*([0-9]{1,9})(?![0-9])"
)
_COUNTS: Final = {
    b"prompt_tokens": 0,
    b"input_tokens": 0,
    b"cached_tokens": 1,
    b"cache_read_input_tokens": 1,
    b"completion_tokens": 2,
    b"output_tokens": 2,
    b"cache_creation_input_tokens": 3,
}
"""The position in `Usage` of each count: the names of OpenAI's two APIs, and of Anthropic's."""
_TOO_MANY: Final = 1_000_000_000


class UsageScanner:
    """Finds the last `usage` object of a payload, streaming or not."""

    __slots__ = ("_first", "_partial_key", "_tail", "found", "is_reading")

    def __init__(self) -> None:
        self.found = False
        """The key was found."""
        self.is_reading = False
        """A piece may continue what was found before."""
        self._first = b""
        """The text of the first such object, once another follows: in Anthropic's streams only the first may have the
        prompt tokens."""
        self._tail = b""
        """The text from the last `"usage"` on."""
        self._partial_key = b""
        """What may be the beginning of the key, at the very end of the payload so far."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        at = data.rfind(_USAGE, start, end)
        if at >= 0 and not (self.found or self._partial_key) and data[at + 7 : min(end, at + 12)] == _NULL:
            at = -1 if data.find(_USAGE, start, end) == at else at  # so that `is_token` knows the next pieces
        if at >= 0:
            self.found = True
            if not self._first:
                first = start if self._tail else data.find(_USAGE, start, end)
                self._first = (self._tail + data[first : min(at, first + _USAGE_BYTES)])[:_USAGE_BYTES]
            self._tail = data[at : min(end, at + _USAGE_BYTES)]
        elif self._partial_key:
            self._search_overlap(data, start, end)
            return
        elif self._tail and len(self._tail) < _USAGE_BYTES:
            self._tail += data[start : min(end, start + _USAGE_BYTES - len(self._tail))]
        self._partial_key = _beginning(data, start, end) if data.endswith(_USAGE_BEGINS, start, end) else b""
        self.is_reading = bool(self._partial_key) or 0 < len(self._tail) < _USAGE_BYTES

    def _search_overlap(self, data: bytes, start: int, end: int) -> None:
        """Find a key that is split between the last piece and this one, or continues into the next."""
        piece = data[start:end]
        overlap = self._partial_key + piece
        if overlap.startswith(_USAGE):
            self.found = True
            self._first = self._first or self._tail
            self._tail = overlap[:_USAGE_BYTES]
        elif self._tail:
            self._tail = (self._tail + piece)[:_USAGE_BYTES]
        self._partial_key = _beginning(overlap, 0, len(overlap))
        self.is_reading = bool(self._partial_key) or 0 < len(self._tail) < _USAGE_BYTES

    @property
    def usage(self) -> Usage | None:
        """The usage; None if there is none."""
        if not self._tail:
            return None
        usage = _read_counts(self._tail)
        if usage is None or not self._first or (usage.prompt_tokens is not None and usage.written_tokens is None):
            return usage
        first = _read_counts(self._first)
        return usage if first is None else _merged(first, usage)


def _merged(first: Usage, last: Usage) -> Usage:
    """Merge the first and last report of a stream that reports its prompt at the beginning and the rest at the end.
    vLLM's first report has the complete prompt; its last one has the parts of it.
    """
    prompt, cached, completion, written = last
    if prompt is None:
        cached = first.cached_tokens if cached is None else cached
        completion = first.completion_tokens if completion is None else completion
        return Usage(first.prompt_tokens, cached, completion, first.written_tokens if written is None else written)
    if written is not None and first.prompt_tokens == prompt + (cached or 0) + written:
        return Usage(first.prompt_tokens, cached, completion)
    return last


def _read_counts(tail: bytes) -> Usage | None:
    """Read the counts that follow `"usage"`.

    An object that follows immediately is parsed, up to its first closing brace: that takes half the time of a search.
    Anything else (another object, a cut or unusual one) is searched.
    """
    text, brace, _ = tail[8 if tail[7:9] == b":{" else 9 :].partition(b"}")
    try:
        said = orjson.loads(text + brace)
    except orjson.JSONDecodeError:
        return _search_counts(tail)
    if type(said) is dict and "cached_tokens" not in said:
        prompt, completion = said.get("prompt_tokens"), said.get("completion_tokens")
        if type(prompt) is int and type(completion) is int and 0 <= prompt < _TOO_MANY and 0 <= completion < _TOO_MANY:
            return tuple.__new__(
                Usage, (prompt, None, completion, None)
            )  # without the constructor, which takes as long as the rest
    return _search_counts(tail)


def _search_counts(tail: bytes) -> Usage | None:
    counts: list[int | None] = [None, None, None, None]
    if tail.startswith(_USAGE):
        for name, count in _COUNT.findall(tail):
            if counts[_COUNTS[name]] is None:
                counts[_COUNTS[name]] = int(count)
        if counts[3] is None and b'"cache_read_input_tokens"' in tail:
            counts[3] = 0
    return None if counts == [None, None, None, None] else Usage(*counts)


def _beginning(data: bytes, start: int, end: int) -> bytes:
    """The part of the key that may have begun at the end of a piece."""
    return next((begin for begin in _USAGE_BEGINS if data.endswith(begin, start, end)), b"")


def read_usage(body: bytes) -> Usage | None:
    """Return the usage of a response that arrived in one piece."""
    at = body.rfind(_USAGE)
    return None if at < 0 else _read_counts(body[at : at + _USAGE_BYTES])


_ID: Final = re.compile(rb'"id"[ \t]*:[ \t]*"((?:resp|chatcmpl)[_-][A-Za-z0-9_-]{1,128})"')
_ID_BYTES: Final = 4096
"""Bytes at the beginning of a response in which its id is searched."""


def find_response_id(head: bytes) -> str | None:
    """Return the id under which a response may be stored. `head`: the beginning of its body, streaming or not."""
    found = _ID.search(head, 0, _ID_BYTES)
    return None if found is None else found[1].decode("ascii")


class IdScanner:
    """Finds the id under which a response may be stored."""

    __slots__ = ("_head", "done")

    def __init__(self) -> None:
        self._head = b""
        self.done = False
        """The id was found, or will not be."""

    def feed(self, data: bytes, start: int, end: int) -> str | None:
        """The next piece is `data[start:end]`. Returns the id, once."""
        self._head += data[start : min(end, start + _ID_BYTES)]
        found = find_response_id(self._head)
        self.done = found is not None or len(self._head) >= _ID_BYTES
        return found


MAX_JSON_BYTES: Final = 1 << 20


class JsonWatcher:
    """Keeps the payload, up to a limit, to find out whether it is a complete JSON text."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        self._size += end - start
        if self._size <= MAX_JSON_BYTES:
            self._pieces.append(data[start:end])
        else:
            self._pieces.clear()

    @property
    def is_complete(self) -> bool:
        """The payload can be parsed, or is too large to be checked."""
        if self._size > MAX_JSON_BYTES:
            return True
        try:
            json.loads(b"".join(self._pieces))  # accepts NaN and a byte order mark, which servers may write
        except (ValueError, RecursionError):
            return False
        return True
