# SPDX-License-Identifier: Apache-2.0
"""Connections to the admin listener: how many, how long, and how much they hold, also of who sends no token.

Nobody is refused for lack of room, so that an operator gets in whatever others do: at a limit the connection is closed
that has been idle, or has not read, for the longest time. Invariants:

- At most `admin_connections()` are open, and the descriptors of clients and endpoints are none of theirs.
- A request is complete within `HEAD_S` of its first byte, the first one within that of the connection.
- One request waits behind the one that runs; then nothing is read. A head that is not complete has `MAX_HEAD_BYTES` and
  one read.
- Before a response is written, `MAX_UNSENT_BYTES` at most of others are unsent. Who reads nothing of one for `STALL_S`,
  or less than 1 KiB a second, is cut off, also where aiohttp has closed the connection already and only its rest is
  unsent: each byte that is unsent counts as a stall (the limit of asyncio's buffer is 0).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestPayloadError, _ErrInfo

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.driver.pulse import Pulse
from lbproxy.net.listening.deadlines import Deadlines
from lbproxy.net.listening.listener import admin_connections

logger = logging.getLogger("lbproxy")

HEAD_S = 10.0
STALL_S = 60.0
MAX_HEAD_BYTES = 64 << 10
MAX_UNSENT_BYTES = 16 << 20
"""Some pages of metrics of 1,000 endpoints."""
ACCEPTED_AT_ONCE = 8
"""In a turn of the loop, so that few are open beyond the limit until others are closed."""
_READ_BYTES = 64 << 10


class AdminConnections:
    """All that are open."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pulse: Pulse, refusal: Callable[[LbError], web.StreamResponse]
    ) -> None:
        """`refusal`: the response to what is no request."""
        self.refusal = refusal
        self.deadlines = Deadlines(loop, pulse, head_s=HEAD_S, stall_s=STALL_S)
        self.on_closed: Callable[[], None] = lambda: None
        """Called when a descriptor is free again."""
        self._loop = loop
        self._open: dict[AdminConnection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: AdminConnection) -> None:
        """Count a new one, and close another for it, if there must be."""
        if len(self._open) >= admin_connections():
            self.end_longest()
        self._open[connection] = None

    def closed(self, connection: AdminConnection) -> None:
        self._open.pop(connection, None)
        self.deadlines.disconnected(connection)
        self._loop.call_soon(self._freed)  # asyncio closes its socket after this

    def end_longest(self) -> bool:
        """Close the connection that has been idle or has not read for the longest time; if all are at work, the one
        that has been for the longest: a dashboard connects again. Returns whether there was one.
        """
        longest = min(self._open, key=lambda one: (one.at_work, one.since), default=None)
        if longest is not None:
            self._end(longest)
        return longest is not None

    def hold_less(self) -> None:
        """Make room for one more response."""
        unread = [(one.since, index, one) for index, one in enumerate(self._open) if one.unsent]
        held = sum(one.unsent for _, _, one in unread)
        for _, _, one in sorted(unread):
            if held <= MAX_UNSENT_BYTES:
                break
            held -= one.unsent
            self._end(one)

    def close(self) -> None:
        for one in list(self._open):
            self._end(one)
        self.deadlines.close()

    def _end(self, connection: AdminConnection) -> None:
        del self._open[connection]
        connection.abort()

    def _freed(self) -> None:
        self.on_closed()


class AdminConnection(web.RequestHandler):
    """aiohttp's, within the bounds above."""

    __slots__ = ("_all", "_body", "_head_bytes", "_wire", "since")

    def __init__(self, all_: AdminConnections, server: web.Server, **options: object) -> None:
        super().__init__(server, read_bufsize=_READ_BYTES, **options)  # type: ignore[arg-type]
        self._max_msg_queue_size = 1
        self._msg_queue_resume_size = 0
        self._parser = HttpRequestParser(
            self,
            self._loop,
            _READ_BYTES,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,  # aiohttp's own is 32 heads of up to 1 MiB
        )
        self._all = all_
        self._body: StreamReader = EMPTY_PAYLOAD
        """The body of the last request."""
        self._head_bytes = 0
        """Received since the last request."""
        self._wire: asyncio.Transport | None = None
        """Until it is lost; aiohttp forgets `transport` when it closes that."""
        self.since = self._loop.time()
        """When it last did what it should: connected, completed a request, or read all that it was sent."""

    @property
    def unsent(self) -> int:
        """Bytes that are written and unsent."""
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    @property
    def at_work(self) -> bool:
        """Whether a response is awaited, and not by us."""
        return self._request_in_progress and not self.writing_paused and self._body.is_eof()

    def abort(self) -> None:
        """Close it, whatever is unsent."""
        if self._wire is not None:
            self._wire.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._wire.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._all.opened(self)
        self._all.deadlines.head_due(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol. Who only reads is not served on; a change is made if it was begun."""
        request, task = self._current_request, self._task_handler
        super().connection_lost(exc)
        if task is not None and (request is None or request.method in {"GET", "HEAD"}):
            task.cancel()
        self._wire = None
        self._all.closed(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._all.deadlines.write_stalled(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.since = self._loop.time()
        self._all.deadlines.write_resumed(self)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            return  # refused
        count, in_body = self._request_count, not self._body.is_eof()
        super().data_received(data)
        if self._request_count > count:
            self._body = self._messages[-1][1]
            self._head_bytes = 0
        elif not in_body:
            self._head_bytes += len(data)
        if self._request_count > count or in_body:
            if self._body.is_eof():
                self.since = self._loop.time()
                self._all.deadlines.head_complete(self)
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(LbError(Outcome.HEAD_TOO_LARGE))
        elif data:
            self._all.deadlines.head_due(self)

    # The bounds

    def head_is_late(self) -> None:
        """See deadlines.WatchedClient; of a request's body too."""
        error = LbError(Outcome.BODY_TIMEOUT)
        runs = self._request_in_progress or self._messages
        if runs and not self._body.is_eof():
            self._lingering_time = 0.0  # or aiohttp would read on, and log what it raises
            self._body.set_exception(error)
        elif runs or not self._head_bytes:
            self.force_close()
        else:
            self._refuse_head(error)

    def _refuse_head(self, error: LbError) -> None:
        """Let aiohttp handle it as what it cannot parse, in its turn."""
        self._all.deadlines.head_complete(self)
        self._pause_transport_reading()
        self._messages.append((_ErrInfo(error.outcome.value.status, error, ""), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """In the shape of all errors, and without a traceback in the log for whatever comes to this port."""
        del request, message
        if status >= 500 and not isinstance(exc, ConnectionError):  # that is: its client has gone
            logger.error("aiohttp failed", exc_info=exc)
        other = Outcome.INTERNAL_ERROR if status >= 500 else Outcome.BAD_REQUEST
        response = self._all.refusal(exc if isinstance(exc, LbError) else LbError(other))
        response.force_close()
        return response
