# SPDX-License-Identifier: Apache-2.0
"""Where the messages of a client's connection end, for requests that aiohttp reads. Sans-io.

aiohttp's parser reads them; the walk goes before it, so that aiohttp gets one message at a time. It is stricter than a
parser must be where a peer could choose how much work there is: a chunk line must end with CRLF, whichever parser
aiohttp was built with; chunk extensions, which are not used, may take `MAX_EXTENSION_BYTES` of a message and no more
(RFC 9112, section 7.1.1), and empty lines before a request `MAX_EMPTY_BYTES` (section 2.2). It checks nothing else:
aiohttp refuses ambiguous heads, and then the result of the walk does not matter. Each byte is looked at a fixed number
of times, and a step does the work of some milliseconds at most, whatever its bytes are.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.net.connections.h1 import ChunkedFraming, Framing, LengthFraming, ProtocolError

MAX_EXTENSION_BYTES: Final = 4 << 10
"""All chunk extensions of a request together."""
MAX_EMPTY_BYTES: Final = 16
"""CR and LF before a request line. Some old clients end a body with a CRLF that is not part of it."""
PIECE_BYTES: Final = 64 << 10
"""Bytes of a chunked body that are read in one step."""
DENSE_LINES: Final = 1024
DENSE_PIECE_BYTES: Final = 4 << 10
"""The same if more lines than that are in it. Chunks of one byte cost their parsers microseconds each, and a read can
have 40,000 of them: 4 KiB take about 2 ms."""
_CHUNKED: Final = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"\ncontent-length[ \t]*:[ \t]*0*([0-9]{1,15})[ \t]*\r", re.IGNORECASE)


class RequestWalk:
    """Walks the bytes of one connection, from the beginning of a message."""

    __slots__ = ("_body", "_head", "lost")

    def __init__(self) -> None:
        self._head = bytearray()
        """The received part of an incomplete head."""
        self._body: Framing | None = None
        """The current body."""
        self.lost = False
        """The bytes are no HTTP: what follows is not looked at."""

    @property
    def head_bytes(self) -> int:
        """Bytes of an incomplete head; 0 if none has begun."""
        return len(self._head)

    @property
    def in_head(self) -> bool:
        """A head is incomplete, or has not begun."""
        return self._body is None

    @property
    def at_boundary(self) -> bool:
        """Whether what comes next is a new message."""
        return not (self._head or self._body is not None or self.lost)

    def step(self, data: bytes, at: int) -> int:
        """Return where the message that contains `data[at:]` ends, or where this step does. It is over if
        `at_boundary`; if not, and there is more data, another step takes that, in another turn of the event loop.

        Raises ProtocolError for empty lines instead of a head, and for bad chunk framing, with the position of the
        wrong line or its continuation; nothing more is walked then.
        """
        if self.lost:
            return len(data)
        try:
            if self._body is None:
                at = self._walk_head(data, at)
            if self._body is not None and at < len(data):
                at = self._walk_body(self._body, data, at)
        except ProtocolError:
            self.lost = True
            raise
        return at

    def _walk_head(self, data: bytes, at: int) -> int:
        earlier = len(self._head)
        head: bytes | bytearray = data
        if earlier:
            head = self._head = self._head + data[at:]
        begin = first = 0 if earlier else at
        while first < len(head) and head[first] in b"\r\n":
            first += 1
            if first - begin > MAX_EMPTY_BYTES:
                raise ProtocolError("empty lines instead of a request", at)
        end = head.find(b"\r\n\r\n", max(first, begin + earlier - 3)) + 4
        if end < 4:
            if not earlier:
                self._head = bytearray(data[at:])
            return len(data)
        self._head = bytearray()
        if _CHUNKED.search(head, begin, end) is not None:
            self._body = ChunkedFraming(max_extension_bytes=MAX_EXTENSION_BYTES)
        elif (length := _LENGTH.search(head, begin, end)) is not None and int(length[1]):
            self._body = LengthFraming(int(length[1]))
        return at + end - begin - earlier

    def _walk_body(self, body: Framing, data: bytes, at: int) -> int:
        if isinstance(body, ChunkedFraming):
            dense = data.count(b"\n", at, at + PIECE_BYTES) > DENSE_LINES
            piece = data[at : at + (DENSE_PIECE_BYTES if dense else PIECE_BYTES)]
            try:
                end = at + body.feed(piece)
            except ProtocolError as error:
                error.at += at
                raise
        else:
            end = body.feed(data, at)
        if body.done:
            self._body = None
        return end
