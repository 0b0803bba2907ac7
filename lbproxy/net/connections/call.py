# SPDX-License-Identifier: Apache-2.0
"""One request with a small, bounded response, driven by callbacks: for an exchange, which has no task that could await
`fetch`. No redirect is followed and no encoding decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.h1 import PayloadWatcher, ResponseHead
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin


class Called(NamedTuple):
    """A complete response."""

    head: ResponseHead
    body: bytes


Result: TypeAlias = Called | UpstreamError


class Call(PayloadWatcher):
    """One request, a net.connections.pool.Receiver. `start` it once; `done` is called once, unless it is cancelled."""

    switches = False

    def __init__(
        self, pool: ConnectionPool, origin: Origin, limits: ClockLimits, max_bytes: int, done: Callable[[Result], None]
    ) -> None:
        self._pool, self._origin, self._limits, self._done = pool, origin, limits, done
        self._left = max_bytes
        self._request = "", b"", b""
        self._work: asyncio.Task[None] | Connection | None = None
        self._head: ResponseHead | None = None
        self._body = bytearray()
        self.sent = self.is_too_large = False
        """The request was sent, as far as is known; its response is larger than `max_bytes`."""

    def start(self, method: str, head: bytes, body: bytes) -> None:
        """Send the request. `done` is not called within this call."""
        self._request = method, head, body
        connection = self._pool.take(self._origin)
        if connection is None:
            self._dial()
        else:
            self._send(connection)

    def cancel(self) -> None:
        """End it; there is no call then. Allowed at any time."""
        work, self._work = self._work, None
        self._body.clear()
        if isinstance(work, Connection):
            work.abort()
        elif work is not None:
            work.cancel()

    def _dial(self) -> None:
        self._work = self._pool.dial(self._origin, self._limits.connect_s, self._dialled)

    def _dialled(self, result: Connection | UpstreamError) -> None:
        if isinstance(result, UpstreamError):
            self._end(result)
        else:
            self._send(result)

    def _send(self, connection: Connection) -> None:
        self._work, self.sent = connection, True
        method, head, body = self._request
        connection.send(method, head, body, self, self._limits)

    def _end(self, result: Result) -> None:
        self._work = None
        self._done(result)

    # net.connections.pool.Receiver

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        self._end(Called(head, body) if len(body) <= self._left else self._too_large())

    def hints(self, head: ResponseHead) -> None:
        """Not used here."""

    def head(self, head: ResponseHead) -> None:
        self._head, connection = head, self._work
        assert isinstance(connection, Connection)
        connection.began()
        connection.relay(head, self, self)

    def body(self, data: bytes) -> None:
        """The payload was passed to `feed`."""

    def ended(self) -> None:
        assert self._head is not None
        self._end(Called(self._head, bytes(self._body)))

    def broke(self, error: UpstreamError) -> None:
        if error.kind is FailureKind.STALE:
            self.sent = False
            self._dial()
        else:
            self._end(error)

    # net.connections.h1.PayloadWatcher

    def feed(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left >= 0:
            self._body += memoryview(data)[start:end]
        elif isinstance(self._work, Connection):
            self._work.abort()
            self._end(self._too_large())

    def _too_large(self) -> UpstreamError:
        self.is_too_large = True
        return UpstreamError(FailureKind.PROTOCOL, f"{self._origin}: the response is too large")
