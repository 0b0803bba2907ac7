# SPDX-License-Identifier: Apache-2.0
"""One small response, complete, for probes and scrapes. Bounded in time and size. No redirect is followed and no
encoding decoded, so that an endpoint cannot lead lbproxy elsewhere or send a decompression bomb.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.call import Call, Result
from lbproxy.net.connections.h1 import request_head
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import ConnectionPool
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
    # A failure is a result here: an exception that a cancelled task never fetches would be logged as lost.
    result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    limits = ClockLimits(timeout_s, timeout_s, timeout_s)
    call = Call(pool, origin, limits, max_bytes, lambda found: None if result.done() else result.set_result(found))
    try:
        async with pool.pulse.timeout(timeout_s):
            call.start(method, head, body)
            found = await result
    except TimeoutError:
        path = head.split(b" ", 2)[1].decode("latin-1")
        raise UpstreamError(FailureKind.TIMEOUT, f"{origin}{path}: no response within {timeout_s:g} s") from None
    finally:
        call.cancel()
    if isinstance(found, UpstreamError):
        raise UpstreamError(FailureKind.PROTOCOL, "the body is too large") if call.is_too_large else found
    return Response(found.head.status, found.head.content_type.decode("latin-1"), found.body)


def bearer(key: ApiKey) -> bytes:
    """The field line that sends an endpoint its key."""
    return f"Authorization: Bearer {key.reveal()}\r\n".encode("ascii")


_FIELDS = b"Accept: */*\r\nUser-Agent: lbproxy\r\n"
