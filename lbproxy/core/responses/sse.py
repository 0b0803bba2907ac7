# SPDX-License-Identifier: Apache-2.0
"""Watchers of the payload of a response that is relayed verbatim. They see every byte and change none.

They find out what must be known during a response and at its end: whether a token arrived, the number of events and
how much text they have, the reported usage, whether the last byte ended an event (only there may an error event
follow), and, for a body that only a closed connection ends, whether it is complete. An ordinary event costs a few
searches at C speed and a copy of it; another one is parsed.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.json_walk import JsonWalk
from lbproxy.core.responses.objects import find_objects
from lbproxy.core.responses.usage import (
    NATIVE_BYTES,
    USAGE_KEY,
    StreamUsage,
    added,
    read_native,
    read_native_body,
    read_value,
)

_ENDS = (b"\n\n", b"\n\r\n")
"""An empty line. Some servers mix line ends."""
_FIRST_DATA: Final = re.compile(rb"^data:", re.MULTILINE)
_NO_DATA: Final = re.compile(
    rb"(?:(?::[^\r\n]*+|(?:event|id|retry)(?::[^\r\n]*+)?)?\r?\n)*+"
    rb"(?::[^\r\n]*+|(?:event|id|retry|data)(?::[^\r\n]*+)?|e(?:v|ve|ven)?|i|r(?:e|et|etr)?|d(?:a|at)?)?\r?"
)
"""Comments, and events without data, with what may become one at the end."""
_OVERLAP_BYTES: Final = 32
"""How much of the last piece is kept: longer than every pattern that can be split between two pieces."""
_DATA: Final = b"data:"
_DATA_LINE: Final = b"\ndata:"
"""In JSON a line feed is written as an escape, so this is always the beginning of a line."""


_PREAMBLE: Final = re.compile(
    rb"^event: ?(?:response\.(?:created|queued|in_progress|output_item\.added|content_part\.added)"
    rb"|message_start|content_block_start|ping)\r?$",
    re.MULTILINE,
)
"""Events that stand for no token. vLLM sends the first of them before the prompt is computed."""
_NAME_BYTES: Final = 64
"""How much of an incomplete line is kept to recognise such an event, and lines without data."""
LINE_BYTES: Final = 256 << 10
"""How long a line may be that is parsed, and of which the beginning is kept: some 60,000 tokens in one event."""
_SPAN_BYTES: Final = 24
"""An event that has up to so many bytes of text beside what the last one consisted of is taken for alike."""
_AGREE_BYTES: Final = 4
"""Two events must agree on what they consist of beside text, but for about a token. One may have more than all others,
such as the role: what it has more would be taken from the text of each."""
_ENDING_EVENTS: Final = 4
"""A stream has at most so many events without text, beside its preamble: with the role, the reason of its end, usage,
and `[DONE]`.
"""
_ANY_SIZE: Final = 1 << 60
_LAST: Final = re.compile(
    r"message_stop|error|response\.(?:completed|failed|incomplete)"
    r"|(?!response\.)[a-z_]+(?:\.[a-z_]+)*\.(?:done|completed|failed|incomplete)"
)
"""The types of the events that end a stream: of /v1/messages, /v1/responses, and of speech, transcripts and images."""
_TYPE: Final = re.compile(rb'data: ?\{"type": ?"([a-z_.]{1,64})"')
"""The type of an event that is too long to be parsed: an image."""
_NO_REASON: Final = frozenset({"", "null", "None"})
"""What servers wrote as a `finish_reason` that is none."""
_MANY_CHOICES: Final = 1024


_LINE_FEED: Final = b"\n"


class EventScanner:
    """Scans the payload of one SSE response, which it gets in order, in pieces of any size."""

    def __init__(
        self,
        *,
        watch_finish: bool = False,
        skip_preamble: bool = False,
        measures: bool = False,
        native: bool = False,
        trusts: bool = False,
    ) -> None:
        """`measures`: count the bytes of text. `native`: usage may be in an engine's own API. `trusts`: see
        StreamEnd.
        """
        self.events = 0
        """Events with data that began so far. Comments do not count: vLLM sends some before there is any token."""
        self.preamble_events = 0
        """Events at the beginning that stand for no token. Counted with `skip_preamble` only."""
        self.has_content = False
        """At least one event is not part of the preamble; or `is_opaque`."""
        self.is_opaque = False
        """Its events cannot be read, such as lines of JSON, or that end with CR: they are not, or not all, counted."""
        self._skip_preamble = skip_preamble
        self._line = b""
        self.at_boundary = True
        """The last byte so far ended an event, or there was none yet."""
        self._overlap = b"\n"
        self._usage = StreamUsage()
        self.text_bytes = 0
        """Bytes of what the model wrote, about. With `measures` only."""
        self._empty_events = 0
        """Events without text, of those that were parsed."""
        self._envelope = 0
        """Bytes of an event without its text."""
        self._span = -1 if measures else _ANY_SIZE
        """How many bytes of text an event may have to be counted without being parsed; below 0 = it is parsed."""
        self._carried = bytearray()
        """The beginning of a line that the last piece did not end, as far as lines are read."""
        self._end = StreamEnd(trusts=trusts) if watch_finish or native else None
        """Reads each event. Not needed for most bodies: their framing says where they end."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        if start == end:
            return
        found, before = data.count(_DATA_LINE, start, end), self.events
        self.events += found
        if self.at_boundary and data.startswith(_DATA, start, end):
            self.events += 1  # the usual beginning of a piece
        else:
            most = len(_DATA_LINE) - 1
            self.events += (self._overlap[-most:] + data[start : min(end, start + most)]).count(_DATA_LINE)
        if not self.has_content:
            self._open(data[start:end], before)
        self._usage.feed(data, start, end)
        reads = self._span < _ANY_SIZE or self._end is not None
        if reads and (found != 1 or not self._is_alike(data, start, end)):
            self._read(data[start:end])
        if data.endswith(_ENDS, start, end):  # the usual end of a piece: no pattern is split there
            self.at_boundary = True
            self._overlap = b"\n"
            return
        if end - start >= _OVERLAP_BYTES:
            self._overlap = data[end - _OVERLAP_BYTES : end]
        else:
            self._overlap = (self._overlap + data[start:end])[-_OVERLAP_BYTES:]
        self.at_boundary = self._overlap.endswith(_ENDS)

    def is_token(self, data: bytes, start: int, end: int) -> bool:
        """Whether `data[start:end]` is one event of one line like the last one, without usage: a token, as engines send
        it. It is counted then, and need not be fed. A quarter of what that costs: `partition` takes half of the time of
        `find`, and a quarter of that of `in`, which first tries to read bytes as a number.
        """
        if not self.at_boundary or not self.has_content or self._end is not None:
            return False
        text = end - start - self._envelope
        if text <= 0 or text > self._span:
            return False
        if end - start < 8 or data[end - 1] != 10 or data[end - 2] != 10 or data[start + 4] != 58:
            return False
        if data[start] != 100 or data[start + 1] != 97 or data[start + 2] != 116 or data[start + 3] != 97:
            return False
        line = data[start : end - 2]
        if line.partition(_LINE_FEED)[1]:
            return False
        parts = line.partition(USAGE_KEY)
        if parts[1] and (parts[2][:5] != _NULL or parts[2].partition(USAGE_KEY)[1]):
            return False
        self.text_bytes += text
        self.events += 1
        return True

    def _is_alike(self, data: bytes, start: int, end: int) -> bool:
        """Whether `data[start:end]` is one event, of a line with its name and one like the last one. It is measured
        then.
        """
        if not self.at_boundary or self._end is not None or self._carried:
            return False
        at = data.find(_DATA_LINE, start, end) + 1
        text = end - at - self._envelope
        if text <= 0 or text > self._span or data.find(_LINE_FEED, at, end) != end - 2 or data[end - 1] != 10:
            return False
        self.text_bytes += text
        return True

    def _read(self, piece: bytes) -> None:
        """Read the lines that this piece ends."""
        if piece.find(b"\r") >= 0 and (bytes(self._carried[-1:]) + piece).find(b"\r\r") >= 0:
            self.is_opaque = True  # empty lines by CR
        lines, found, rest = piece.rpartition(_LINE_FEED)
        if found:
            if self._carried:
                lines = bytes(self._carried) + lines
                self._carried.clear()
            for line in lines.split(_LINE_FEED):
                self._read_line(line)
        if rest and len(self._carried) <= LINE_BYTES:
            self._carried += rest[: LINE_BYTES + 1 - len(self._carried)]

    def _read_line(self, line: bytes) -> None:
        if self._end is not None:
            self._end.read(line)
        if self._span < _ANY_SIZE and line.startswith(_DATA):
            text = len(line) + 2 - self._envelope
            if 0 < text <= self._span:
                self.text_bytes += text
            elif len(line) <= LINE_BYTES:
                said = _parsed(line)
                text = 0 if said is None else _text_bytes(said)
                if text:
                    self.text_bytes += text
                    envelope = len(line) + 2 - text
                    agree = abs(envelope - self._envelope) <= _AGREE_BYTES
                    self._envelope, self._span = envelope, _SPAN_BYTES if agree else 0
                else:
                    self._empty_events += 1

    def _open(self, piece: bytes, before: int) -> None:
        """Look at the next piece of the beginning. `before`: the events that began before it."""
        text = self._line + piece
        lines, _, rest = text.rpartition(_LINE_FEED)
        self._line = rest if len(rest) <= _NAME_BYTES else rest[:_NAME_BYTES] + rest[-1:]
        if self._skip_preamble:
            self.preamble_events += len(_PREAMBLE.findall(lines))
        if not before and not text.startswith(_DATA):
            first = _FIRST_DATA.search(text)
            until = len(text) if first is None else first.start()
            self.is_opaque = _NO_DATA.fullmatch(text, 0, until) is None
        self.has_content = self.is_opaque or self.events > self.preamble_events

    @property
    def token_events(self) -> int:
        """Events that stand for tokens. Those that begin and end a stream have no text. Others without it do stand
        for some: of a character of several tokens, the last one brings the text.
        """
        without = self.preamble_events + min(_ENDING_EVENTS, self._empty_events - self.preamble_events)
        return self.events - max(self.preamble_events, without if self.text_bytes else 0)

    @property
    def is_within(self) -> bool:
        """What arrived last is within an event, or cannot be read: no comment."""
        return self.is_opaque or (self.has_content and not self.at_boundary)

    @property
    def usage(self) -> Usage | None:
        """The usage that was reported so far; None if there was none."""
        usage = self._usage.usage
        return self._end.usage if usage is None and self._end is not None else usage

    @property
    def is_complete(self) -> bool:
        """The stream may be complete. Only meaningful with `watch_finish`. What cannot be read is, as its framing
        says.
        """
        return self.is_opaque or (self.at_boundary and self._end is not None and self._end.is_over)


_NULL: Final = b":null"
"""After the key of usage, in each chunk of SGLang: it is no object."""


def _parsed(line: bytes) -> dict[str, Any] | None:
    """What a line of data says, if it is an object."""
    try:
        said = orjson.loads(line[len(_DATA) :])
    except orjson.JSONDecodeError:
        return None
    return said if type(said) is dict else None


def _text_bytes(said: dict[str, Any]) -> int:
    """Bytes of the text that an event adds to the response, whichever API it belongs to. Events that repeat what came
    before, as those of /v1/responses whose names end in `done`, add none.
    """
    size = 0
    choices = said.get("choices")
    for choice in choices if type(choices) is list else ():
        if type(choice) is dict:
            size += _size(choice.get("text")) + _delta_bytes(choice.get("delta"))
    return size + _delta_bytes(said.get("delta")) + _size(said.get("content"))


def _delta_bytes(delta: object) -> int:
    if type(delta) is not dict:
        return _size(delta)
    size = max(_size(delta.get("reasoning_content")), _size(delta.get("reasoning")))  # vLLM writes it under both names
    for name in ("content", "thinking", "text", "partial_json", "refusal"):
        size += _size(delta.get(name))
    calls = delta.get("tool_calls")
    functions = [one.get("function") for one in calls if type(one) is dict] if type(calls) is list else []
    for function in (*functions, delta.get("function_call")):
        if type(function) is dict:
            size += _size(function.get("name")) + _size(function.get("arguments"))
    return size


def _size(text: object) -> int:
    if type(text) is not str:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class StreamEnd:
    """Finds out from the lines of a stream whether it is over, and what the last events of engines' own APIs say."""

    def __init__(self, *, trusts: bool = False) -> None:
        """`trusts`: a stream of no kind whose end is known is over when it has an event."""
        self._trusts = trusts
        self._known = self._unknown = False
        """There were events of such a kind; of another."""
        self._done = False
        """There was an event that ends each such stream."""
        self._over = False
        """A choice has ended."""
        self._open: set[int] = set()
        """The choices that have begun, and not ended."""
        self._name = b""
        """The name of the event that the current lines belong to."""
        self._last: dict[str, Any] | None = None
        """The last event of an engine's own API, if it does not end a choice."""
        self._total: Usage | None = None
        """Tokens of the choices that have ended, in an engine's own API."""

    def read(self, line: bytes) -> None:
        """The next line, without its end."""
        if line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif line.startswith(_DATA):
            self._read_data(line)
            self._name = b""

    def _read_data(self, line: bytes) -> None:
        if line[len(_DATA) :].strip() == b"[DONE]":
            self._done = True
            return
        self._note_type(self._name.decode("ascii", "replace"))
        said = _parsed(line) if len(line) <= LINE_BYTES else None
        if said is None:
            large = _TYPE.match(line)
            self._note_type("" if large is None else large[1].decode("ascii"))
            self._unknown = True
            return
        self._note_type(said.get("type"))
        self._done = self._done or type(said.get("error")) is dict
        choices, meta = said.get("choices"), said.get("meta_info")
        for choice in choices if type(choices) is list else ():
            if type(choice) is dict:
                self._note(choice.get("index"), choice.get("finish_reason"))
        if type(meta) is dict:
            self._note(said.get("index"), meta.get("finish_reason"))
            self._last = said
            if meta.get("finish_reason"):
                self._total, self._last = added(self._total, read_native(said)), None
        elif "tokens_predicted" in said or type(said.get("stop")) is bool:
            self._last = said
            self._note(said.get("index"), said.get("stop") is True or None)
        elif type(choices) is not list:
            self._unknown = True

    def _note_type(self, kind: object) -> None:
        """Note the type of an event."""
        if type(kind) is str and kind:
            self._known = True
            self._done = self._done or _LAST.fullmatch(kind) is not None

    def _note(self, index: object, reason: object) -> None:
        """Note whether a choice goes on."""
        self._known = True
        choice = index if type(index) is int else 0
        if reason is None or reason is False or (type(reason) is str and reason in _NO_REASON):
            if len(self._open) < _MANY_CHOICES:
                self._open.add(choice)
        else:
            self._open.discard(choice)
            self._over = True

    @property
    def is_over(self) -> bool:
        """Every choice has ended; or the event came that ends them all."""
        if self._done or self._open:
            return self._done
        return self._over or (self._trusts and self._unknown and not self._known)

    @property
    def usage(self) -> Usage | None:
        """The usage in an engine's own API."""
        return self._total if self._last is None else added(self._total, read_native(self._last))


class BodyScanner:
    """Scans the payload of one JSON response that is no stream, which it gets in order, in pieces of any size."""

    def __init__(self, *, native: bool = False, shows: bool = False) -> None:
        """`native`: usage may be in an engine's own API. `shows`: it may show objects."""
        self._walk = JsonWalk(b"usage")
        self._native = native
        self._pieces: list[bytes] | None = [] if native or shows else None
        self.shows = shows
        self.size = 0
        """Its bytes so far."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        self._walk.feed(piece)
        self.size += len(piece)
        if self._pieces is not None:
            self._pieces.append(piece)
            if self.size > NATIVE_BYTES:
                self._pieces = None

    @property
    def usage(self) -> Usage | None:
        """The usage that was reported so far; None if there was none."""
        usage = read_value(self._walk.value)
        if usage is None and self._native and self._pieces is not None:
            return read_native_body(b"".join(self._pieces))
        return usage

    def objects(self) -> list[str]:
        """The ids of objects that a complete payload shows."""
        return [] if self._pieces is None else find_objects(b"".join(self._pieces))

    @property
    def is_complete(self) -> bool:
        """The payload is not the beginning of a JSON text."""
        return self._walk.is_complete


_ID: Final = re.compile(rb'"((?:resp|chatcmpl)[_-][A-Za-z0-9_-]{1,128})"')
_ID_BYTES: Final = 4096
"""Bytes at the beginning of a response in which its id is searched."""


def find_response_id(head: bytes) -> str | None:
    """Return the id under which a response may be stored. `head`: the beginning of its body, streaming or not. Only the
    response's own id counts, wherever clients write another.
    """
    text = head[:_ID_BYTES]
    event = _FIRST_DATA.search(text)
    if event is not None:
        text = text[event.start() :].partition(_LINE_FEED)[0]
    walk = JsonWalk(b"id")
    walk.feed(text)
    found = _ID.match(walk.value)
    return None if found is None else found[1].decode("ascii")


class IdScanner:
    """Finds the id under which a response may be stored."""

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
