# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 as a client: request heads out, response heads and body framing in. Sans-io.

Theory of operation. A response is a head, which `parse_head` turns into a `ResponseHead` with its framing (RFC 9112,
section 6.3), and a body, which a framing object walks. It is fed every read, returns how many of the bytes belong to
the message, and never copies or changes them, because they are relayed verbatim. Endpoints are not trusted: ambiguous
messages are errors, never guesses. Any exception other than `ProtocolError` is a bug.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, TypeAlias

from mypy_extensions import mypyc_attr

from lbproxy.net.dialing.above import REFERENCES, may_name

MAX_HEAD_BYTES: Final = 64 << 10
MAX_FIELDS: Final = 128
_MAX_CHUNK_LINE: Final = 4 << 10
_MAX_TRAILER_BYTES: Final = 16 << 10
LINES_AT_ONCE: Final = 64
"""Chunks, and lines of a trailer, of a response that are walked in one turn of the loop: about 30 µs, whatever the
endpoint sends. See `net.connections.backlog`."""
AT_ONCE_BYTES: Final = 8 << 10
"""A larger read waits in the backlog: those of 200 streams in one turn took 140 ms. Of lines shorter than
`_DENSE_LINE_BYTES` a watcher sees so much in one turn, less than 1 ms: an event of seven bytes costs it as much as one
of a hundred, and a read has room for 37,000."""
_DENSE_LINE_BYTES: Final = 64
_SMALL_BYTES: Final = 1 << 10
"""Smaller chunks of a read are shown to the watcher together."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TEXT: Final = bytes({*range(0x20, 0x100), 0x09} - {0x7F})
"""The bytes allowed in a head besides CR and LF: RFC 9110, section 5.5."""
_NOT_FORWARDED: Final = frozenset(
    {
        b"close",  # a field that the usual `Connection: close` would nominate
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"x-request-id",
        b"endpoint-load-metrics",
        b"endpoint-load-metrics-bin",
        b"alt-svc",  # it names another way to the endpoint, past us
        b"x-accel-redirect",  # orders for a proxy in front, which must not come from a model server
        b"x-sendfile",
    }
)
"""Response fields that are hop-by-hop (RFC 9110, section 7.6.1), that are set anew, or that no endpoint may send."""
_OURS: Final = b"x-lbproxy-"
"""What begins so is lbproxy's to say."""
_REASON: Final = re.compile(rb"[a-z0-9_]{1,64}")
_NO_TRAILERS: Final = _NOT_FORWARDED | REFERENCES
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_CRLF: Final = b"\r\n"
_LENGTH_LINE: Final = re.compile(rb"\r\nContent-Length: ([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
_LENGTH_NAMES: Final = [b"\r\ncontent-length: ", b"\r\nContent-Length: "]  # a tuple is made anew at each use
_LENGTH_DIGITS: Final = 9
_REPORT_BEGINS: Final = b"\r\nendpoint-load-metrics: "
_REPORT_LINE: Final = re.compile(rb"(?<=\r\n)endpoint-load-metrics: [ -~]{0,512}\r\n")
"""As vLLM writes it: also different each time."""


class ProtocolError(Exception):
    """The peer's bytes are not one unambiguous HTTP/1.1 message."""

    def __init__(self, problem: str, at: int = 0) -> None:
        super().__init__(problem)
        self.at = at
        """For a bad chunk line, or bad bytes after a chunk: their position in what was fed, or that of their
        continuation."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PayloadWatcher:
    """Sees the payload, without framing, while it is relayed.

    A class, as a call of a Protocol's method is a look-up by name, for each event of a stream.
    """

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece is `data[start:end]`."""
        raise NotImplementedError


class Framing:
    """Walks one body. A class, for the same reason."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        """The message is complete."""

    def feed(self, data: bytes, start: int = 0) -> int:
        """The next bytes are `data[start:]`. Returns up to where they were taken: `len(data)`, or where the message
        ends, or, if it is not `done`, where to go on in a later turn of the loop.

        Raises ProtocolError if they cannot belong to this body.
        """
        raise NotImplementedError

    def eof(self) -> bool:
        """The endpoint closed. Returns whether the message is complete."""
        return self.done

    @property
    def at_boundary(self) -> bool:
        """Other bytes, framed in the same way, could follow the last byte fed."""
        return False


class LengthFraming(Framing):
    """A body of a known number of bytes; 0 for responses without a body."""

    def __init__(self, length: int, watcher: PayloadWatcher | None = None) -> None:
        super().__init__(done=length == 0)
        self._left = length
        self._watcher = watcher

    def feed(self, data: bytes, start: int = 0) -> int:
        end = _seen_at_once(self._watcher, data, start, min(len(data), start + self._left))
        self._left -= end - start
        if self._watcher is not None:
            self._watcher.feed(data, start, end)
        self.done = self._left == 0
        return end


class CloseFraming(Framing):
    """A body that ends when the endpoint closes: a cut cannot be told from an end."""

    def __init__(self, watcher: PayloadWatcher | None = None) -> None:
        super().__init__()
        self._watcher = watcher

    def feed(self, data: bytes, start: int = 0) -> int:
        end = _seen_at_once(self._watcher, data, start, len(data))
        if self._watcher is not None:
            self._watcher.feed(data, start, end)
        return end

    def eof(self) -> bool:
        self.done = True
        return True

    @property
    def at_boundary(self) -> bool:
        return True


class ChunkedFraming(Framing):
    """A chunked body: RFC 9112, section 7.1."""

    def __init__(
        self,
        watcher: PayloadWatcher | None = None,
        *,
        max_extension_bytes: int | None = None,
        is_response: bool = False,
    ) -> None:
        """`max_extension_bytes`: the limit for all chunk extensions together. None = only each line is limited: a
        stream can last for hours, and nothing of it is kept. `is_response`: one call walks `LINES_AT_ONCE`, and not all
        trailers may pass.
        """
        super().__init__()
        self._watcher = watcher
        self._is_response = is_response
        self._small: list[bytes] = []
        """Small chunks that the watcher has not seen yet."""
        self._extensions_left = max_extension_bytes
        self._left = 0
        """Bytes that are missing from the current chunk: its data and the CRLF after it."""
        self._line = b""
        """The beginning of a size or trailer line that is split between reads."""
        self._in_trailer = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, start: int = 0) -> int:
        at, end = start, _seen_at_once(self._watcher, data, start, len(data)) if self._is_response else len(data)
        if not (self._left or self._line or self._in_trailer or self.done):
            # Usually one read is one complete chunk with one token; recognising that costs a twentieth of the walk.
            payload = _only_chunk(data, at, end)
            if payload:
                if self._watcher is not None:
                    self._watcher.feed(data, payload, end - 2)
                return end
        lines = LINES_AT_ONCE if self._is_response else end
        try:
            while at < end and not self.done and (lines or self._left):
                if self._left:
                    at = self._walk_chunk(data, at, end)
                else:
                    lines -= 1
                    at = self._walk_line(data, at, end)
        except ProtocolError as error:
            error.at = max(error.at, at)
            raise
        finally:
            self._show_small()
        return at

    @property
    def at_boundary(self) -> bool:
        """Whether the position is between two chunks."""
        return not (self._left or self._line or self._in_trailer or self.done)

    def _walk_chunk(self, data: bytes, at: int, end: int) -> int:
        payload = min(self._left - 2, end - at)
        if payload > 0:
            self._show(data, at, at + payload, end)
            at += payload
            self._left -= payload
        if self._left <= 2 and at < end:
            closing = data[at : at + self._left]
            if closing != b"\r\n"[2 - self._left :][: len(closing)]:
                raise ProtocolError("a chunk is longer than its size", at)
            at += len(closing)
            self._left -= len(closing)
        return at

    def _show(self, data: bytes, at: int, to: int, end: int) -> None:
        """Show the watcher payload; small pieces later, and together: one look at each costs more than its copy."""
        watcher = self._watcher
        if watcher is None:
            return
        if to - at < _SMALL_BYTES and (self._small or to + 2 < end):
            self._small.append(data[at:to])
        else:
            self._show_small()
            watcher.feed(data, at, to)

    def _show_small(self) -> None:
        if self._small and self._watcher is not None:
            data = b"".join(self._small)
            self._small = []
            self._watcher.feed(data, 0, len(data))

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
        if self._extensions_left is not None:
            self._extensions_left -= len(line) - match.end(1)
            if self._extensions_left < 0:
                raise ProtocolError("too much in chunk extensions")
        size = int(match[1], 16)
        if size:
            self._left = size + 2
        else:
            self._in_trailer = True

    def _end_trailer_line(self, line: bytes) -> None:
        self._trailer_bytes += len(line) + 2
        if not line:
            self.done = True
        elif self._trailer_bytes > _MAX_TRAILER_BYTES or _TRAILER_LINE.fullmatch(line) is None:
            raise ProtocolError("a bad trailer")
        elif self._is_response and _is_kept_back(line.partition(b":")[0].lower(), _NO_TRAILERS):
            raise ProtocolError("a trailer that must not be one")  # they are relayed as they are


def _seen_at_once(watcher: PayloadWatcher | None, data: bytes, at: int, to: int) -> int:
    """Up to where of `data[at:to]` the watcher sees in this turn of the loop."""
    size = to - at
    if watcher is None or size <= AT_ONCE_BYTES or _DENSE_LINE_BYTES * data.count(b"\n", at, to) <= size:
        return to
    return at + AT_ONCE_BYTES


_USUAL_DIGITS: Final = 6


def _only_chunk(data: bytes, at: int, end: int) -> int:
    """Where the payload begins if `data[at:end]` is one complete chunk, its size alone on its line; 0 if it is not, or
    something unusual. Byte by byte: compiled, that is a tenth of what a search or a slice costs.
    """
    line, size = at, 0
    last = min(end - 4, at + _USUAL_DIGITS)
    while line < last:
        digit = data[line]
        if 48 <= digit <= 57:
            size = 16 * size + digit - 48
        elif 97 <= digit <= 102:
            size = 16 * size + digit - 87
        elif 65 <= digit <= 70:
            size = 16 * size + digit - 55
        else:
            break
        line += 1
    payload = line + 2
    if not size or payload + size + 2 != end or data[line] != 13 or data[line + 1] != 10:
        return 0
    return payload if data[end - 2] == 13 and data[end - 1] == 10 else 0


class ResponseHead:
    """The head of a response, valid and unambiguous.

    Not a NamedTuple: compiled, making one would take ten times as long, and each look at it five times.
    """

    def __init__(
        self, fixed: _FixedHead, *, keep_alive: bool, chunked: bool, length: int | None, announced: bytes | None
    ) -> None:
        self.status = fixed.status
        self.end_to_end = fixed.end_to_end
        """The field lines to pass on to the client, as they came, each with its CRLF; without Content-Length."""
        self.content_type = fixed.content_type
        """Lower case; empty if not given."""
        self.is_stream = fixed.is_stream
        """The body is one of events or of JSON lines, however it is framed."""
        self.encoded = fixed.encoded
        """There is a Content-Encoding that changes something: the body cannot be read as it is."""
        self.keep_alive = keep_alive
        """The endpoint accepts another request on this connection."""
        self.chunked = chunked
        self.length = length
        """The body's length; 0 where the status forbids a body; None if it is chunked or ended by close."""
        self.announced = announced
        """The value of Content-Length, which with HEAD and 304 is about a body that does not follow."""
        self.load_report = fixed.load_report
        """The field line with the endpoint's load (see `core.engines.orca`), as it came, with its CRLF; the first of
        several."""
        self.http10 = fixed.http10
        """The endpoint responded in HTTP/1.0."""
        self.refers = fixed.refers
        """A field may hold a URL."""
        self.may_name = fixed.may_name
        """A field may hold another form of an address: see `net.dialing.above`."""
        self.reason = fixed.reason
        """The line of an `x-lbproxy-reason`, which is not among the others, with its CRLF; empty if not given."""

    def framing(self, watcher: PayloadWatcher | None = None) -> Framing:
        if self.chunked:
            return ChunkedFraming(watcher, is_response=True)
        return CloseFraming(watcher) if self.length is None else LengthFraming(self.length, watcher)


def parse_head(head: bytes, method: str) -> ResponseHead:
    """Parse a response head, from the status line to the empty line.

    `method` is the request's: the response to HEAD has no body. Raises ProtocolError.
    """
    rest, announced = _RESPONSES.split(head)
    report = _REPORT_LINE.search(rest) if rest.partition(_REPORT_BEGINS)[1] else None
    if report is not None:
        rest = rest[: report.start()] + rest[report.end() :]
    fixed = _read_head_cached(rest) if len(rest) <= _CACHED_HEAD_BYTES else _read_head(rest)
    if fixed.announced is not None:
        if announced is not None:
            raise ProtocolError("a repeated Content-Length")
        announced = fixed.announced
    status, chunked, keep_alive = fixed.status, fixed.chunked, fixed.keep_alive
    if chunked and announced is not None:
        raise ProtocolError("both Content-Length and Transfer-Encoding")
    if status >= 200 and status not in {204, 304} and method != "HEAD":
        length = None if announced is None else int(announced)
        keep_alive = keep_alive and (chunked or announced is not None)
    else:
        if status != 304 and (chunked or (announced is not None and announced != b"0")):
            keep_alive = False  # a body that follows all the same must not be read as the next response
        chunked, length = False, 0
    made = ResponseHead(fixed, keep_alive=keep_alive, chunked=chunked, length=length, announced=announced)
    if report is not None:
        made.load_report = report[0]
    return made


class LengthSplitter:
    """Takes Content-Length out of heads, which leaves most heads of a peer the same each time. One for requests and one
    for responses, as each remembers the last head: to see that the next one differs in nothing but its length takes a
    fifth of the time of splitting it.
    """

    def __init__(self) -> None:
        self._before, self._after, self._rest = b"", _CRLF, b""
        """The last head up to the value and from its end on, and without the line."""

    def split(self, head: bytes) -> tuple[bytes, bytes | None]:
        """The head without that line, and the value; the head as it is and None if the line is not there, or not as
        nearly everybody writes it. Of several the first one counts.
        """
        start, end = len(self._before), len(head) - len(self._after)
        if start < end <= start + _LENGTH_DIGITS and head.startswith(self._before) and head.endswith(self._after):
            value = head[start:end]
            if self._rest and value.isdigit():
                return self._rest, value
        return self._split(head)

    def _split(self, head: bytes) -> tuple[bytes, bytes | None]:
        """By `partition`, which compiled takes a quarter of the time of a search by a regular expression."""
        for name in _LENGTH_NAMES:
            before, found, after = head.partition(name)
            if found:
                value, line_end, rest = after.partition(_CRLF)
                if line_end and len(value) <= _LENGTH_DIGITS and value.isdigit():
                    self._before, self._after, self._rest = before + name, line_end + rest, before + line_end + rest
                    return self._rest, value
                return head, None
        line = _LENGTH_LINE.search(head)
        return (head, None) if line is None else (head[: line.start()] + head[line.end() :], line[1])


_RESPONSES: Final = LengthSplitter()


class _FixedHead:
    """The content of a head, independent of the length of the body. Shared: it must not be changed."""

    def __init__(self, minor: int, status: int, fields: _Fields) -> None:
        kept, self.content_type, self.encoded, self.chunked, self.announced, options, report, reason = fields
        """`announced`: a Content-Length that `LengthSplitter` did not find."""
        self.is_stream = b"text/event-stream" in self.content_type or b"ndjson" in self.content_type
        self.load_report, self.reason = report, reason
        self.status = status
        self.keep_alive = (minor == 1 or b"keep-alive" in options) and b"close" not in options
        """If the body has framing."""
        kept.append(b"")
        self.end_to_end = b"\r\n".join(kept)
        self.refers = b"//" in self.end_to_end or any(line.partition(b":")[0].lower() in REFERENCES for line in kept)
        self.may_name = may_name(kept)
        self.http10 = not minor


def _read_head(head: bytes) -> _FixedHead:
    lines = head[:-4].split(b"\r\n")
    # All other bytes must be the line ends, in their order: a bare CR, LF or any other control byte is found here.
    if not head.endswith(b"\r\n\r\n") or head.translate(None, _TEXT) != b"\r\n" * (len(lines) + 1):
        raise ProtocolError("the response head has control characters")
    minor, status = _read_status_line(lines[0])
    if len(lines) - 1 > MAX_FIELDS:
        raise ProtocolError("the response head has too many fields")
    fixed = _FixedHead(minor, status, _read_fields(lines))
    if fixed.chunked and not minor:
        raise ProtocolError("an HTTP/1.0 response is chunked")
    return fixed


_CACHED_HEAD_BYTES: Final = 2 << 10
"""Longer heads are not worth caching, and would let a peer fill the cache with megabytes."""
_read_head_cached: Final = lru_cache(maxsize=1024)(_read_head)


def _read_status_line(line: bytes) -> tuple[int, int]:
    """The minor version and the status."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise ProtocolError("the status line is malformed")
    return int(match[1]), int(match[2])


def split_field(line: bytes) -> tuple[bytes, bytes] | None:
    """The name in lower case, and the value without surrounding white space; None if the line is malformed."""
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None:  # no white space: neither folding nor a space before the colon
        return None
    return name.lower(), value.strip(b" \t")


def _is_kept_back(name: bytes, names: frozenset[bytes]) -> bool:
    """Whether a field is one of `names`, or lbproxy's own, also as those write it who take `_` for `-`."""
    plain = name.replace(b"_", b"-")
    return plain in names or plain.startswith(_OURS)


_Fields: TypeAlias = tuple[list[bytes], bytes, bool, bool, bytes | None, set[bytes] | frozenset[bytes], bytes, bytes]


def _read_fields(lines: list[bytes]) -> _Fields:
    """Sort the field lines; `lines[0]` is the status line.

    Returns the lines to pass on to the client, the Content-Type, whether the body is encoded, whether it is chunked,
    the Content-Length, what Connection names (options, and hop-by-hop fields, in lower case), and the lines of the load
    report and of the reason.
    """
    kept: list[bytes] = []
    content_type = load_report = reason = b""
    chunked = encoded = False
    length: bytes | None = None
    options: set[bytes] | frozenset[bytes] = _NO_OPTIONS
    for line in lines[1:]:
        field = split_field(line)
        if field is None:
            raise ProtocolError("a field line is malformed")
        name, value = field
        if not _is_kept_back(name, _NOT_FORWARDED):
            kept.append(line)
            if name == b"content-type":
                content_type = value.lower()
            elif name == b"content-encoding":
                encoded = encoded or value.lower() not in _NOT_ENCODED
        elif name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                raise ProtocolError("a bad or repeated Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise ProtocolError("a Transfer-Encoding other than chunked")
            chunked = True
        elif name == b"connection":
            options = options | {token.strip() for token in value.lower().split(b",")}
        elif name.startswith(b"endpoint-load-metrics"):
            load_report = load_report or line + b"\r\n"
        elif name == b"x-lbproxy-reason" and _REASON.fullmatch(value):
            reason = reason or line + b"\r\n"
    return _without(kept, options), content_type, encoded, chunked, length, options, load_report, reason


def _without(lines: list[bytes], options: set[bytes] | frozenset[bytes]) -> list[bytes]:
    """The field lines without those that Connection names."""
    if options <= _USUAL_OPTIONS:
        return lines
    return [line for line in lines if line.partition(b":")[0].lower() not in options]


_NO_OPTIONS: Final[frozenset[bytes]] = frozenset()
_NOT_ENCODED: Final = frozenset({b"", b"identity"})
_USUAL_OPTIONS: Final = frozenset({b"close", b"keep-alive", b""})


def request_head(method: str, target: str, authority: str, fields: bytes, length: int) -> bytes:
    """A request's head. `fields` are end-to-end and valid field lines, each with its CRLF; Host and Content-Length are
    set here. Content-Length is sent with every method that has a body, even if it is empty.
    """
    framing = f"Content-Length: {length}\r\n" if length or method in _WITH_BODY else ""
    return f"{method} {target} HTTP/1.1\r\nHost: {authority}\r\n{framing}".encode("ascii") + fields + b"\r\n"


_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
