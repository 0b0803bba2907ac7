# SPDX-License-Identifier: Apache-2.0
"""A response that is read before anything of it goes to the client, as what it says decides that.

It is a refusal that may mean that another endpoint does better; or, where the client has the head of a stream, an error
or JSON that it is told of as an event. Bounded: a larger one, or one that breaks, has no body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lbproxy.core.requests.retry import UpstreamError
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import BodyReceiver, Connection

MAX_BYTES: Final = 64 << 10


def fits(head: ResponseHead) -> bool:
    """Whether a response is certainly read whole."""
    return head.length is not None and head.length <= MAX_BYTES


class Instead(BodyReceiver):
    """`done` is called once, unless the connection is aborted."""

    def __init__(self, head: ResponseHead, connection: Connection, done: Callable[[ResponseHead, bytes], None]) -> None:
        self._head, self._connection, self._done = head, connection, done
        self._body = b""
        connection.relay(head, self, self)

    def feed(self, data: bytes, start: int, end: int) -> None:
        self._body += data[start:end]

    def body(self, data: bytes) -> None:
        if len(self._body) > MAX_BYTES:
            self._connection.abort()
            self._done(self._head, b"")

    def ended(self) -> None:
        self._done(self._head, self._body)

    def broke(self, error: UpstreamError) -> None:
        self._done(self._head, b"")
