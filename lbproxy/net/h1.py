"""HTTP/1.1 as a client speaks it: request heads out, response heads and body framing in. Sans-io.

Theory of operation. A response is a head, which `parse_head` turns into a `ResponseHead` with its framing (RFC 9112,
section 6.3), and a body, which a framing object walks: it is fed every read, says how many of its bytes belong to the
message, and never copies or changes them, because the bytes are relayed as they came. Endpoints are not trusted: what
is ambiguous is an error, never a guess. Any exception other than `ProtocolError` is a bug.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 128
_MAX_CHUNK_LINE = 4 << 10
_MAX_TRAILER_BYTES = 16 << 10

# A status line, then fields; RFC 9112 sections 4 and 5. No obs-fold, no bare CR, LF or NUL, no space before the colon.
_HEAD = re.compile(
    rb"HTTP/1\.(?P<minor>[01]) (?P<status>[1-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*)?\r\n"
    rb"(?P<fields>(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*)\r\n"
)
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_LENGTH = re.compile(rb"[0-9]{1,15}")


class ProtocolError(Exception):
    """The endpoint's bytes are not one unambiguous HTTP/1.1 response."""


class PayloadWatcher(Protocol):
    """Sees the payload, without framing, as it goes by."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        ...


class Framing(Protocol):
    """Walks one body."""

    done: bool
    """The message is whole."""

    def feed(self, data: bytes, start: int = 0) -> int:
        """The next bytes are `data[start:]`; returns where in `data` the message ends, `len(data)` if not there.

        Raises ProtocolError if they cannot belong to this body.
        """
        ...

    def eof(self) -> bool:
        """The endpoint closed. Returns whether the message is whole."""
        ...

    @property
    def at_boundary(self) -> bool:
        """Bytes of our own, framed in the same way, could follow the last byte fed."""
        ...


class LengthFraming:
    """A body of a known number of bytes; 0 for answers without a body."""

    __slots__ = ("_left", "_watcher", "done")
    at_boundary = False

    def __init__(self, length: int, watcher: PayloadWatcher | None = None) -> None:
        self._left = length
        self._watcher = watcher
        self.done = length == 0

    def feed(self, data: bytes, start: int = 0) -> int:
        """See Framing."""
        end = min(len(data), start + self._left)
        self._left -= end - start
        if self._watcher is not None:
            self._watcher.feed(data, start, end)
        self.done = self._left == 0
        return end

    def eof(self) -> bool:
        """See Framing."""
        return self.done


class CloseFraming:
    """A body that ends when the endpoint closes: nothing tells a cut from an end."""

    __slots__ = ("_watcher", "done")
    at_boundary = True

    def __init__(self, watcher: PayloadWatcher | None = None) -> None:
        self._watcher = watcher
        self.done = False

    def feed(self, data: bytes, start: int = 0) -> int:
        """See Framing."""
        if self._watcher is not None:
            self._watcher.feed(data, start, len(data))
        return len(data)

    def eof(self) -> bool:
        """See Framing."""
        self.done = True
        return True


class ChunkedFraming:
    """A chunked body: RFC 9112, section 7.1."""

    __slots__ = ("_in_trailer", "_left", "_line", "_trailer_bytes", "_watcher", "done")

    def __init__(self, watcher: PayloadWatcher | None = None) -> None:
        self._watcher = watcher
        self._left = 0
        """What is still to come of the current chunk: its data and the CRLF after it."""
        self._line = b""
        """The beginning of a size or trailer line that the last read cut."""
        self._in_trailer = False
        self._trailer_bytes = 0
        self.done = False

    def feed(self, data: bytes, start: int = 0) -> int:
        """See Framing."""
        at, end = start, len(data)
        while at < end and not self.done:
            at = self._walk_chunk(data, at, end) if self._left else self._walk_line(data, at, end)
        return at

    def eof(self) -> bool:
        """See Framing."""
        return self.done

    @property
    def at_boundary(self) -> bool:
        """Between two chunks."""
        return not (self._left or self._line or self._in_trailer or self.done)

    def _walk_chunk(self, data: bytes, at: int, end: int) -> int:
        payload = min(self._left - 2, end - at)
        if payload > 0:
            if self._watcher is not None:
                self._watcher.feed(data, at, at + payload)
            at += payload
            self._left -= payload
        if self._left <= 2 and at < end:
            closing = data[at : at + self._left]
            if closing != b"\r\n"[2 - self._left :][: len(closing)]:
                raise ProtocolError("a chunk is longer than its size")
            at += len(closing)
            self._left -= len(closing)
        return at

    def _walk_line(self, data: bytes, at: int, end: int) -> int:
        eol = data.find(b"\n", at, end)
        if eol < 0:
            self._line += data[at:end]
            if len(self._line) > _MAX_CHUNK_LINE:
                raise ProtocolError("a chunk line is too long")
            return end
        line = self._line + data[at:eol] if self._line else data[at:eol]
        self._line = b""
        if line[-1:] != b"\r" or len(line) > _MAX_CHUNK_LINE:
            raise ProtocolError("a bad chunk line")
        if self._in_trailer:
            self._end_trailer_line(line[:-1])
        else:
            self._begin_chunk(line[:-1])
        return eol + 1

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise ProtocolError("a bad chunk size")
        size = int(match[1], 16)
        if size:
            self._left = size + 2
        else:
            self._in_trailer = True

    def _end_trailer_line(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if not line:
            self.done = True
        elif self._trailer_bytes > _MAX_TRAILER_BYTES or _TRAILER_LINE.fullmatch(line) is None:
            raise ProtocolError("a bad trailer")


class ResponseHead(NamedTuple):
    """A response's head, valid and unambiguous."""

    status: int
    fields: list[tuple[bytes, bytes]]
    """Lower-case name and the whole line without its CRLF, in order."""
    keep_alive: bool
    """The endpoint will take another request on this connection."""
    chunked: bool
    options: set[bytes]
    """What the Connection fields name: options, and fields that end at this hop. Lower case."""
    length: int | None
    """The body's Content-Length; 0 where the status forbids a body; None if chunked or ended by close."""

    def value(self, name: bytes) -> bytes | None:
        """The first value of a field (`name` in lower case), stripped."""
        return next((line[len(name) + 1 :].strip() for key, line in self.fields if key == name), None)

    def framing(self, watcher: PayloadWatcher | None = None) -> Framing:
        """A new walker for this head's body."""
        if self.chunked:
            return ChunkedFraming(watcher)
        return CloseFraming(watcher) if self.length is None else LengthFraming(self.length, watcher)


def parse_head(head: bytes, method: str) -> ResponseHead:
    """Parse a response head, from the status line to the empty line.

    `method` is the request's: the answer to HEAD has no body. Raises ProtocolError.
    """
    match = _HEAD.fullmatch(head)
    if match is None:
        raise ProtocolError("the response head is malformed")
    status = int(match["status"])
    lines = match["fields"].split(b"\r\n")
    lines.pop()
    if len(lines) > MAX_FIELDS:
        raise ProtocolError("the response head has too many fields")
    fields = [(line[: line.index(b":")].lower(), line) for line in lines]
    chunked, length, options = _framing_fields(fields)
    if status < 200 or status in {204, 304} or method == "HEAD":
        chunked, length = False, 0
    version_keeps = match["minor"] == b"1"
    keep_alive = b"close" not in options and (version_keeps or b"keep-alive" in options)
    if chunked and not version_keeps:
        raise ProtocolError("an HTTP/1.0 response is chunked")
    framed = chunked or length is not None
    return ResponseHead(status, fields, keep_alive and framed, chunked, options, length)


def _framing_fields(fields: Iterable[tuple[bytes, bytes]]) -> tuple[bool, int | None, set[bytes]]:
    """Whether chunked, the Content-Length, and the options of Connection."""
    chunked = False
    length: int | None = None
    options: set[bytes] = set()
    for name, line in fields:
        if name == b"content-length":
            value = line[15:].strip()
            if length is not None or _LENGTH.fullmatch(value) is None:
                raise ProtocolError("a bad or repeated Content-Length")
            length = int(value)
        elif name == b"transfer-encoding":
            if chunked or line[18:].strip().lower() != b"chunked":
                raise ProtocolError("a Transfer-Encoding other than chunked")
            chunked = True
        elif name == b"connection":
            options.update(token.strip() for token in line[11:].lower().split(b","))
    if chunked and length is not None:
        raise ProtocolError("both Content-Length and Transfer-Encoding")
    return chunked, length, options


def request_head(method: str, target: str, authority: str, fields: Sequence[tuple[bytes, bytes]], length: int) -> bytes:
    """A request's head. `fields` are end-to-end and already valid; Host and Content-Length are set here.

    Content-Length is sent with every method that has a body, also when that is empty.
    """
    lines = [f"{method} {target} HTTP/1.1\r\nHost: {authority}".encode("latin-1")]
    lines += [name + b": " + value for name, value in fields]
    if length or method not in {"GET", "HEAD", "OPTIONS", "DELETE"}:
        lines.append(b"Content-Length: %d" % length)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
