# SPDX-License-Identifier: Apache-2.0
"""Where the heads and bodies of a client's requests end, for requests that aiohttp reads. Sans-io.

aiohttp's parser reads them; the walk runs in parallel, and is stricter with chunk framing than a parser must be: a line
must end with CRLF, whichever parser aiohttp was built with, and chunk extensions, which are not used, may take
`MAX_EXTENSION_BYTES` of a message and no more (RFC 9112, section 7.1.1). It checks nothing else: aiohttp refuses
ambiguous heads, and then the result of the walk does not matter.
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
    """Walks the bytes of one connection, from the beginning of a head."""

    __slots__ = ("_body", "_head", "_lost", "head_ended")

    def __init__(self) -> None:
        self._head = b""
        """The received part of an incomplete head."""
        self._body: Framing | None = None
        """The current body."""
        self._lost = False
        """Nothing more is walked: what follows is refused in any case."""
        self.head_ended = False
        """The last step reached the end of a head."""

    def step(self, data: bytes, at: int) -> int:
        """Return where the head or body that contains `data[at:]` ends; `len(data)` if it does not.

        Raises ProtocolError for bad chunk framing, with the position of the wrong line or its continuation, and walks
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
