# SPDX-License-Identifier: Apache-2.0
"""One small response, complete, for probes and scrapes. Bounded in time and size. No redirect is followed and no
encoding decoded, so that an endpoint cannot lead lbproxy elsewhere or send a decompression bomb.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.h1 import PayloadWatcher, ResponseHead, request_head
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin


class Response(NamedTuple):
    """A complete response."""

    status: int
    content_type: str
    """Lower case; empty if not given."""
    body: bytes


async def fetch(
    pool: ConnectionPool, origin: Origin, path: str, *, timeout_s: float, max_bytes: int, key: ApiKey | None = None
) -> Response:
    """GET `path`, with the endpoint's `key`. Raises what `send` raises."""
    head = request_head("GET", path, origin.host_field, _FIELDS if key is None else _FIELDS + bearer(key), 0)
    return await send(pool, origin, "GET", head, b"", timeout_s=timeout_s, max_bytes=max_bytes)


async def send(  # noqa: PLR0913 - a request's four parts
    pool: ConnectionPool, origin: Origin, method: str, head: bytes, body: bytes, *, timeout_s: float, max_bytes: int
) -> Response:
    """Send a request, and return the complete response. Raises UpstreamError: PROTOCOL also if the response's body is
    larger than `max_bytes`, TIMEOUT if it takes longer than `timeout_s`, as `pulse` counts. If a kept connection turns
    out to be closed, a new one is used.
    """
    request = method, head, body
    try:
        async with pool.pulse.timeout(timeout_s):
            connection = pool.take(origin)
            if connection is not None:
                try:
                    return await _exchange(connection, *request, timeout_s, max_bytes)
                except UpstreamError as error:
                    if error.kind is not FailureKind.STALE:
                        raise
            connection = await pool.connect(origin, timeout_s)
            return await _exchange(connection, *request, timeout_s, max_bytes)
    except TimeoutError:
        path = head.split(b" ", 2)[1].decode("latin-1")
        raise UpstreamError(FailureKind.TIMEOUT, f"{origin}{path}: no response within {timeout_s:g} s") from None


async def _exchange(
    connection: Connection, method: str, head: bytes, body: bytes, timeout_s: float, max_bytes: int
) -> Response:
    collector = _Collector(connection, max_bytes)
    connection.send(method, head, body, collector, ClockLimits(timeout_s, timeout_s, timeout_s))
    try:
        result = await collector.result
    finally:
        collector.release()
    if isinstance(result, UpstreamError):
        raise result
    return result


def bearer(key: ApiKey) -> bytes:
    """The field line that sends an endpoint its key."""
    return f"Authorization: Bearer {key.reveal()}\r\n".encode("ascii")


_FIELDS = b"Accept: */*\r\nUser-Agent: lbproxy\r\n"


class _Collector(PayloadWatcher):
    """Gets head and end as a receiver, and the payload as a watcher."""

    switches = False

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        # A failure is a result here: an exception that a cancelled task never fetches would be logged as lost.
        self.result: asyncio.Future[Response | UpstreamError] = asyncio.get_running_loop().create_future()
        self._connection: Connection | None = connection
        """None: the response is complete, and another exchange may use the connection by now."""
        self._left = max_bytes
        self._body = bytearray()  # a list of pieces would be 20 times the size of a response of two bytes a chunk
        self._head: ResponseHead | None = None

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        self._head = head
        self.feed(body, 0, len(body))
        self.ended()

    def release(self) -> None:
        """Close the connection, unless the response was complete: no task waits for it any more."""
        self._body.clear()  # a raised error keeps this object, by its traceback, until the next garbage collection
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def hints(self, head: ResponseHead) -> None:
        """Not used here."""

    def head(self, head: ResponseHead) -> None:
        self._head = head
        assert self._connection is not None
        self._connection.relay(head, self, self)

    def feed(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left >= 0:
            self._body += memoryview(data)[start:end]
        else:
            self.broke(UpstreamError(FailureKind.PROTOCOL, "the body is too large"))

    def body(self, data: bytes) -> None:
        """The payload was passed to `feed`."""

    def ended(self) -> None:
        self._connection = None
        assert self._head is not None
        self._settle(Response(self._head.status, self._head.content_type.decode("latin-1"), bytes(self._body)))

    def broke(self, error: UpstreamError) -> None:
        self._settle(error)

    def _settle(self, result: Response | UpstreamError) -> None:
        if not self.result.done():
            self.result.set_result(result)
