"""One small response, whole: what the probes and scrapes need. Bounded in time and size; no redirect is followed and no
encoding undone, so that an endpoint cannot lead us elsewhere or send a bomb.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.h1 import ResponseHead, request_head
from lbproxy.net.connections.patience import Limits
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin


class Response(NamedTuple):
    """A whole response."""

    status: int
    content_type: str
    """Lower case; empty if not given."""
    body: bytes


async def fetch(
    pool: ConnectionPool, origin: Origin, path: str, *, timeout_s: float, max_bytes: int, key: ApiKey | None = None
) -> Response:
    """GET `path`, showing the endpoint its `key`. Raises what `send` does."""
    head = request_head("GET", path, origin.host_field, _FIELDS if key is None else _FIELDS + bearer(key), 0)
    return await send(pool, origin, "GET", head, b"", timeout_s=timeout_s, max_bytes=max_bytes)


async def send(  # noqa: PLR0913 - a request's four parts
    pool: ConnectionPool, origin: Origin, method: str, head: bytes, body: bytes, *, timeout_s: float, max_bytes: int
) -> Response:
    """Send a request, whole. Raises UpstreamError: PROTOCOL also if the response's body is larger than `max_bytes`,
    TIMEOUT if the whole takes longer than `timeout_s`, as `pulse` counts. A kept connection that turns out to be closed
    costs nothing.
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
    connection.send(method, head, body, collector, Limits(timeout_s, timeout_s, timeout_s))
    try:
        result = await collector.result
    finally:
        collector.release()
    if isinstance(result, UpstreamError):
        raise result
    return result


def bearer(key: ApiKey) -> bytes:
    """The field line that shows an endpoint its key."""
    return f"Authorization: Bearer {key.reveal()}\r\n".encode("ascii")


_FIELDS = b"Accept: */*\r\nUser-Agent: lbproxy\r\n"


class _Collector:
    """Takes head and end as a receiver, and the payload as a watcher."""

    switches = False

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        # A failure is a result here: an exception that a cancelled task never fetches would be logged as lost.
        self.result: asyncio.Future[Response | UpstreamError] = asyncio.get_running_loop().create_future()
        self._connection: Connection | None = connection
        """None: the response is whole, and the connection may be another's by now."""
        self._left = max_bytes
        self._body = bytearray()  # not a list of pieces: a response of two bytes a chunk would be 20 times its size
        self._head: ResponseHead | None = None

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        self._head = head
        self.feed(body, 0, len(body))
        self.ended()

    def release(self) -> None:
        """Nobody waits for the response any more: close the connection, unless the response was whole."""
        self._body.clear()  # an error that is raised keeps us, by its traceback, until the next collection of garbage
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def hints(self, head: ResponseHead) -> None:
        """Of no use here."""

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
        """The payload was seen by `feed`."""

    def ended(self) -> None:
        self._connection = None
        assert self._head is not None
        self._settle(Response(self._head.status, self._head.content_type.decode("latin-1"), bytes(self._body)))

    def broke(self, error: UpstreamError) -> None:
        self._settle(error)

    def _settle(self, result: Response | UpstreamError) -> None:
        if not self.result.done():
            self.result.set_result(result)
