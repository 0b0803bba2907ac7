"""One attempt at one endpoint: the request goes out, the head of the answer comes in."""

from __future__ import annotations

from typing import NamedTuple

from lbproxy.config import TimeoutSettings
from lbproxy.core.retry import FailureKind, UpstreamError
from lbproxy.core.types import Endpoint
from lbproxy.net.h1 import ResponseHead, request_head
from lbproxy.net.pool import Connection, ConnectionPool, Origin


class Outgoing(NamedTuple):
    """A request as every endpoint gets it; the same bytes each time, but for the endpoint's own name."""

    method: str
    target: str
    fields: bytes
    """Field lines, each with its CRLF."""
    body: bytes
    request_id: str


class Upstream:
    """Sends requests to endpoints."""

    def __init__(self, connections: ConnectionPool, timeouts: TimeoutSettings) -> None:
        self._connections = connections
        self._timeouts = timeouts

    async def forward(self, endpoint: Endpoint, outgoing: Outgoing) -> tuple[Connection, ResponseHead]:
        """Send the request and await the answer's head; the caller relays the body or aborts the connection.

        Raises UpstreamError. A kept connection that turns out to be closed is replaced by a new one, once, for free:
        the endpoint is not at fault, and it did not answer.
        """
        origin = Origin.parse(endpoint.base_url)
        head = self._head(endpoint, outgoing)
        connection = self._connections.take(origin)
        if connection is not None:
            connection.send(outgoing.method, head, outgoing.body)
            try:
                return connection, await connection.head(self._timeouts.first_byte)
            except UpstreamError as error:
                if error.kind is not FailureKind.STALE:
                    raise
        connection = await self._connections.connect(origin, self._timeouts.connect)
        connection.send(outgoing.method, head, outgoing.body)
        return connection, await connection.head(self._timeouts.first_byte)

    def _head(self, endpoint: Endpoint, outgoing: Outgoing) -> bytes:
        authority = endpoint.authority
        own = f"x-request-id: {outgoing.request_id}\r\nx-gateway-destination-endpoint: {authority}\r\n"
        fields = outgoing.fields + own.encode("ascii")
        return request_head(outgoing.method, outgoing.target, authority, fields, len(outgoing.body))
