"""One small answer, whole: what the probes and scrapes need. Bounded in time and size; no redirect is followed and no
encoding undone, so that an endpoint cannot lead us elsewhere or send a bomb.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from lbproxy.core.retry import FailureKind, UpstreamError
from lbproxy.net.h1 import request_head
from lbproxy.net.pool import Connection, ConnectionPool, Origin


class Answer(NamedTuple):
    """A whole response."""

    status: int
    content_type: str
    """Lower case; empty if not given."""
    body: bytes


async def fetch(pool: ConnectionPool, origin: Origin, path: str, *, timeout_s: float, max_bytes: int) -> Answer:
    """GET `path`. Raises UpstreamError: PROTOCOL also if the body is larger than `max_bytes`, TIMEOUT if the whole
    takes longer than `timeout_s`. A kept connection that turns out to be closed costs nothing.
    """
    try:
        async with asyncio.timeout(timeout_s):
            connection = pool.take(origin)
            if connection is not None:
                try:
                    return await _exchange(connection, origin, path, timeout_s, max_bytes)
                except UpstreamError as error:
                    if error.kind is not FailureKind.STALE:
                        raise
            connection = await pool.connect(origin, timeout_s)
            return await _exchange(connection, origin, path, timeout_s, max_bytes)
    except TimeoutError:
        raise UpstreamError(FailureKind.TIMEOUT, f"{origin}{path}: no answer within {timeout_s:g} s") from None


async def _exchange(connection: Connection, origin: Origin, path: str, timeout_s: float, max_bytes: int) -> Answer:
    connection.send("GET", request_head("GET", path, str(origin), _FIELDS, 0), b"")
    head = await connection.head(timeout_s)
    collector = _Collector(max_bytes)
    connection.relay(head, collector, collector, timeout_s)
    try:
        failure = await collector.whole
    except BaseException:
        connection.abort()
        raise
    if failure is not None:
        connection.abort()
        raise failure
    return Answer(head.status, head.content_type.decode("latin-1"), b"".join(collector.pieces))


_FIELDS = b"Accept: */*\r\nUser-Agent: lbproxy\r\n"


class _Collector:
    """Takes the payload as a watcher, and the end as a receiver."""

    def __init__(self, max_bytes: int) -> None:
        self.pieces: list[bytes] = []
        self.whole: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()
        self._left = max_bytes

    def feed(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left >= 0:
            self.pieces.append(data[start:end])
        else:
            self.broke(UpstreamError(FailureKind.PROTOCOL, "the body is too large"))

    def body(self, data: bytes) -> None:
        """The payload was seen by `feed`."""

    def ended(self) -> None:
        if not self.whole.done():
            self.whole.set_result(None)

    def broke(self, error: UpstreamError) -> None:
        if not self.whole.done():
            self.whole.set_result(error)
