"""Where the heads and bodies of a client's requests end, for the requests that aiohttp reads. Sans-io.

aiohttp's parser reads them; the walk goes along beside it, and is stricter with chunk framing than a parser has to be:
a line must end with CRLF, whichever parser aiohttp was built with, and chunk extensions, which nobody reads, may take
`MAX_EXTENSION_BYTES` of a message and no more (RFC 9112, section 7.1.1). It judges nothing else: a head that is
ambiguous is refused by aiohttp, and what the walk thinks of it does not matter then.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.net.connections.h1 import ChunkedFraming, Framing, LengthFraming, ProtocolError
from lbproxy.proxy.request.headers import MAX_HEAD_BYTES

MAX_EXTENSION_BYTES: Final = 4 << 10
"""All chunk extensions of a request together."""
_CHUNKED: Final = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"\ncontent-length[ \t]*:[ \t]*([0-9]{1,15})[ \t]*\r", re.IGNORECASE)


class RequestWalk:
    """Walks the bytes of one connection, from the first of a head."""

    __slots__ = ("_body", "_head", "_lost", "head_ended")

    def __init__(self) -> None:
        self._head = b""
        """Of a head that is not whole, as far as it came."""
        self._body: Framing | None = None
        """The body that comes now."""
        self._lost = False
        """Nothing more is walked: what came is refused in any case."""
        self.head_ended = False
        """The last step came to the end of a head."""

    def step(self, data: bytes, at: int) -> int:
        """Where the head or the body ends that `data[at:]` is the beginning or the rest of; `len(data)` if not there.

        Raises ProtocolError for bad chunk framing, with the place where the wrong line begins or goes on, and walks
        nothing more.
        """
        self.head_ended = False
        if self._lost:
            return len(data)
        if self._body is None:
            return self._walk_head(data, at)
        try:
            end = self._body.feed(data, at)
        except ProtocolError:
            self._lost = True
            raise
        if self._body.done:
            self._body = None
        return end

    def _walk_head(self, data: bytes, at: int) -> int:
        earlier = len(self._head)
        head = self._head + data[at:] if earlier else data[at:]
        end = head.find(b"\r\n\r\n", max(0, earlier - 3)) + 4
        if end < 4:
            self._head = head
            self._lost = len(head) > MAX_HEAD_BYTES
            return len(data)
        self._head, self.head_ended = b"", True
        if _CHUNKED.search(head, 0, end) is not None:
            self._body = ChunkedFraming(max_extension_bytes=MAX_EXTENSION_BYTES)
        elif (length := _LENGTH.search(head, 0, end)) is not None and int(length[1]):
            self._body = LengthFraming(int(length[1]))
        return at + end - earlier
