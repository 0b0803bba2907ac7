# SPDX-License-Identifier: Apache-2.0
"""A client's connection: aiohttp's, with a fast lane for plain requests, back-pressure, and notice of its end.

Theory of operation. Received bytes go one of two ways, by the connection's state:

    state     event                                                                 next state
    FREE      a plain request (see proxy/request/plain.py), and the client reads    LANE
              the begin of one, likewise                                            ARRIVING
              anything else                                                         AIOHTTP
    ARRIVING  the rest of its body                                                  LANE
              it is refused, and the connection closes                              FREE
    LANE      its response is out, and nothing was received meanwhile               FREE
              its response is out, and received bytes are buffered                  DEFERRED
    AIOHTTP   the same                                                              FREE or DEFERRED
              its request switches to WebSocket                                     SWITCHED
    DEFERRED  in the next turn of the loop, they are processed like any others      FREE

In SWITCHED all bytes belong to a WebSocket, until the end. In AIOHTTP, aiohttp is given one message, whose end the walk
finds (proxy/request/walk.py), and as much of it as it takes. All other bytes are buffered, in each state, and from
`MAX_BUFFERED_BYTES` on the connection is not read. A connection whose request was not read to its end is closed after
the response. aiohttp knows in every state whether the connection is closing (`_close`, `_force_close`).
Invariants:

- One request runs at a time, and responses are sent in the order of the requests.
- The front end writes responses, never aiohttp: `KEEP` and `CLOSE` tell aiohttp that the response is out.
- When the connection is lost, its exchange releases the endpoint at once.
- In a turn of the loop at most one request of a connection begins, and one read, or a part of it, is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.connections.corked import Cork, Corked
from lbproxy.net.connections.h1 import ProtocolError
from lbproxy.net.listening.deadlines import Deadlines
from lbproxy.proxy.front.linger import Linger
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.forwarding import UNIX, Forwarding, Peer
from lbproxy.proxy.request.headers import MAX_HEAD_BYTES
from lbproxy.proxy.request.plain import read_begun, read_plain
from lbproxy.proxy.request.walk import RequestWalk

logger = logging.getLogger("lbproxy")

WRITE_HIGH_WATER_BYTES = 64 << 10
"""Bytes that lbproxy holds for a client that does not read, before it stops reading from the endpoint."""
REST_BITS = 20
"""With each MiB of a body, others get their turn: uvloop reads 32 times in a row, 8 MiB in 15 ms from a fast client."""
_REFUSED_BY_WALK = b"\0"
MAX_BUFFERED_BYTES = 64 << 10
"""Bytes that are buffered while a request runs, before the client's connection is no longer read: with one read, of up
to 256 KiB, it is the most that a client can make a connection hold besides a counted body."""


class State(Enum):
    """What received bytes are used for."""

    FREE = "free"
    ARRIVING = "in the lane, its body incomplete"
    LANE = "in the lane"
    DEFERRED = "behind a response"
    AIOHTTP = "in aiohttp"
    SWITCHED = "switched"


FREE, ARRIVING, LANE, DEFERRED, AIOHTTP, SWITCHED = State  # saves a look-up for each


class _Written(web.StreamResponse):
    """Tells aiohttp that the response has been written. It has no state: one instance serves all requests."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to send."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to send."""


KEEP = _Written(keep_alive=True)
CLOSE = _Written(keep_alive=False)


class CurrentRequest(Protocol):
    """The current request, as its connection needs it."""

    keep_alive: bool
    """What the response's head will say, as long as it is not written."""
    held_bytes: int
    """Bytes of its body."""
    record: RequestRecord

    def client_disconnected(self) -> None:
        """The connection is lost."""

    def cut(self, why: Outcome) -> None:
        """Respond with `why` now, or break the response visibly."""

    def move_if_stranded(self) -> None:
        """Ask another endpoint, if the request is stranded."""

    def guarded(self, step: Callable[[], None]) -> None:
        """Run a step of it; nothing above would handle its exceptions."""

    def pause(self) -> None:
        """The client's buffer is full."""

    def resume(self) -> None:
        """The client's buffer has room again."""

    def received(self, data: bytes) -> None:
        """More data from the client of a WebSocket."""

    def is_unread(self) -> None:
        """The client of a WebSocket was not read for long."""
        ...


class AwaitedBody(Protocol):
    """The body of a request in the lane, of which more is to come."""

    missing: int
    """Bytes that are still to come."""

    def received(self, piece: bytes) -> None:
        """Some of them, or all."""

    def drop(self) -> None:
        """The rest is not waited for."""


class ConnectionOwner(Protocol):
    """The front end, as its connections need it."""

    max_plain_body_bytes: int
    """Of a body that is there with its head, and served in the turn of the loop in which it came."""
    max_body_bytes: int
    """Of any that the lane takes."""
    forwarding: Forwarding
    deadlines: Deadlines
    cork: Cork

    def serve_plain(self, plain: ClientRequest, client: ClientConnection, length: int = 0) -> None:
        """Serve a plain request; `client.lane_ended` is called when the response is out, maybe before this returns.
        `length`: of its body, which is not complete: `client.arriving` is set, unless it is refused. 0: it is complete.
        """

    def refuse_unread(self, client: ClientConnection, error: LbError) -> None:
        """Respond to something that is not a request; the caller closes."""

    def connected(self) -> bool:
        """Count a new connection. Returns whether it may be served; `disconnected` follows in either case."""

    def disconnected(self) -> None:
        """Count a closed connection."""


class ClientConnection(web.RequestHandler):
    """One client's connection. Made by `FrontEnd`."""

    __slots__ = (
        "_at",
        "_buffered",
        "_feeds_soon",
        "_front",
        "_head_due",
        "_idle_since",
        "_linger",
        "_walk",
        "address",
        "arriving",
        "body_reader",
        "peer",
        "request_body",
        "state",
        "turn",
    )

    def __init__(self, front: web.Server, **options: object) -> None:
        super().__init__(front, **options)  # type: ignore[arg-type]
        self._front = cast(ConnectionOwner, front)
        self.turn: CurrentRequest | None = None
        """The current request, in either lane."""
        self.arriving: AwaitedBody | None = None
        """The body of the lane's request, in ARRIVING."""
        self.body_reader: StreamReader | None = None
        """The body that aiohttp's handler is reading, if it is."""
        self.address = ""
        """The client's address, without its port; `unix:` for a Unix socket."""
        self.request_body: StreamReader | None = None
        """The body of the request in aiohttp's handler, read or not."""
        self.peer: Peer = self._front.forwarding.peer("", encrypted=False)
        """What endpoints are told of the client."""
        self.state = FREE
        """See the module."""
        self._buffered = b""
        """Received bytes, those from `_at` on are buffered: aiohttp was given the others."""
        self._at = 0
        self._feeds_soon = False
        """`_feed_more` is called in the next turn of the loop."""
        self._walk = RequestWalk()
        """Over all that aiohttp gets."""
        self._head_due = True
        """A head has begun and is incomplete, or none has arrived yet."""
        self._idle_since = self._loop.time()
        """When the last response was out, or the connection was made."""
        self._linger: Linger | None = None
        """Waits for the client to close, too."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        corked = Corked(cast(asyncio.Transport, transport), self._front.cork)
        corked.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        corked.on_reading = self._on_reading
        super().connection_made(cast(asyncio.Transport, corked))
        peer = self.peername
        self.address = peer[0] if isinstance(peer, tuple) else "" if peer is None else UNIX
        self.peer = self._make_peer()
        if not self._front.connected():
            self._front.refuse_unread(self, LbError(Outcome.OVERLOADED))
            self.force_close()
        else:
            self._front.deadlines.head_due(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Close the endpoint's connection now; a handler's cancellation comes later."""
        if self.turn is not None:
            self.turn.client_disconnected()
        self.transport = self._linger = None  # aiohttp closes it, now and when its handler ends
        super().connection_lost(exc)
        self.request_body = None  # which refers to this: old objects are looked at very seldom (process.COLLECT_AFTER)
        self._buffered = b""
        self._front.deadlines.disconnected(self)
        self._front.disconnected()

    def _make_peer(self) -> Peer:
        encrypted = self.transport is not None and self.transport.get_extra_info("sslcontext") is not None
        return self._front.forwarding.peer(self.address, encrypted=encrypted)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._front.deadlines.write_stalled(self)
        if self.turn is not None:
            self.turn.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._front.deadlines.write_resumed(self)
        if self.turn is not None:
            self.turn.resume()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol, and the states above."""
        state = self.state
        if state is FREE and not self._close and not self._force_close:
            plain = None if self.writing_paused else read_plain(data, self._front.max_plain_body_bytes)
            if plain is not None:
                self._start(plain)
            elif not self._begin(data):
                self.state = AIOHTTP
                self._feed(data, 0)
        elif state is ARRIVING:
            self._arrive(data)
        elif state is SWITCHED:
            if self.turn is not None:
                self.turn.received(data)
        elif not data:
            super().data_received(data)  # aiohttp goes on with what it has
        elif not self._close and not self._force_close:
            if state is AIOHTTP and not self._buffered and self._takes_more:
                self._feed(data, 0)
            else:
                self._buffer(data)

    def read_from(self, body: StreamReader) -> None:
        """The handler reads this body. If it is malformed, so that bytes follow it although it has no end, its reader
        must fail: aiohttp would leave the handler waiting.
        """
        self.body_reader = body
        if self._messages and not body.is_eof():
            fail_body(body, web.RequestPayloadError("the body is malformed"))

    def _feed(self, data: bytes, at: int) -> None:
        """Pass bytes to aiohttp, up to the end of its message; buffer the others. What the walk refuses is replaced by
        bytes that every parser refuses.
        """
        walk, requests, in_head = self._walk, self._request_count, self._walk.in_head
        try:
            end = walk.step(data, at)
            piece = data[at:end]
        except ProtocolError as error:
            end, piece = len(data), data[at : error.at] + _REFUSED_BY_WALK
        super().data_received(piece)
        self._note_errors()
        if end < len(data):
            self._keep(data, end)
            if not walk.at_boundary:
                self._feed_soon()
        self._watch_head()
        if walk.head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(LbError(Outcome.HEAD_TOO_LARGE))
        elif in_head and not walk.head_bytes and self._request_count == requests:
            self._refuse_head(LbError(Outcome.BAD_REQUEST))  # aiohttp's parser sees no end of it
        elif self.body_reader is not None:
            self.read_from(self.body_reader)

    def _note_errors(self) -> None:
        """What aiohttp could not read: nothing more is given to it. A traceback in its queue would keep the frames of
        this read, and what was read, for hours: they refer to the queue.
        """
        for message, _ in self._messages:
            if not isinstance(message, RawRequestMessage):
                self._walk.lost = True
                message.exc.__traceback__ = None

    def _feed_soon(self) -> None:
        if not self._feeds_soon:
            self._feeds_soon = True
            self._loop.call_soon(self._feed_more)

    def _feed_more(self) -> None:
        """Pass on what was buffered of the current message, if aiohttp reads it."""
        self._feeds_soon = False
        if self._buffered and self.state is AIOHTTP and self._takes_more:
            self._feed(*self._take_buffered())
            self._read_on()

    @property
    def _takes_more(self) -> bool:
        """aiohttp waits for more of its message."""
        walk = self._walk
        return not (self._reading_paused or walk.at_boundary or walk.lost or self._close or self._force_close)

    def _watch_head(self) -> None:
        waiting = self._walk.head_bytes > 0
        if waiting and not self._head_due:
            self._front.deadlines.head_due(self)
        elif not waiting and self._head_due:
            self._front.deadlines.head_complete(self)
        self._head_due = waiting

    def _refuse_head(self, error: LbError) -> None:
        if self.turn is None:
            self._front.refuse_unread(self, error)
            self.linger()

    def head_is_late(self) -> None:
        """See deadlines.WatchedClient. A client that sent nothing gets no response."""
        if not self._walk.head_bytes:
            self.force_close()
        else:
            self._refuse_head(LbError(Outcome.BODY_TIMEOUT, "The request head did not arrive in time."))

    def _on_reading(self, wanted: bool) -> None:
        if wanted:
            self._front.deadlines.read_again(self)
        else:
            self._front.deadlines.unread(self, self._find_out)

    def _find_out(self) -> None:
        """Has it gone? What was sent behind a request that runs is given up, and read, for the end that may be behind.
        The request is responded to, if its client is there; `_close` has the connection end with that.
        """
        turn = self.turn
        if turn is None:
            return
        if self.state is SWITCHED:
            turn.is_unread()
        elif self.state is LANE or self.request_is_read:
            turn.keep_alive = False
            self._close = True
            self._take_buffered()
            self._read_on()

    def switch(self) -> bytes:
        """From now on received bytes belong to a WebSocket, and go to the turn. Returns those that came before."""
        self.state = SWITCHED
        data, at = self._take_buffered()
        self._read_on()
        return data[at:]

    # Buffered bytes

    def _buffer(self, data: bytes) -> None:
        self._keep(self._buffered[self._at :] + data, 0)

    def _keep(self, data: bytes, at: int) -> None:
        self._buffered, self._at = data, at
        if len(data) - at > MAX_BUFFERED_BYTES:
            self._pause_transport_reading()

    def _take_buffered(self) -> tuple[bytes, int]:
        """The buffered bytes, from the position on. `_read_on` follows, when it is known what is kept of them."""
        buffered, at = self._buffered, self._at
        self._buffered, self._at = b"", 0
        return buffered, at

    def _read_on(self) -> None:
        if not (self._reading_paused or self._buffer_paused):
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        """See aiohttp's BaseProtocol: not while that much is buffered."""
        if len(self._buffered) - self._at <= MAX_BUFFERED_BYTES:
            super()._resume_transport_reading()

    def _responded(self) -> None:
        """A response is out, and the connection lives on: what is buffered begins the next request."""
        self._idle_since = self._loop.time()
        if self._buffered:
            self.state = DEFERRED
            self._loop.call_soon(self._process_buffered)  # not now: this may be in a callback of the request that ended
        else:
            self.state = FREE

    def _process_buffered(self) -> None:
        self.state = FREE
        if self.transport is None or self._force_close or self._close:
            return
        data, at = self._take_buffered()
        if at:  # it came with other requests: not the lane, which would copy what follows it once for each
            self.state = AIOHTTP
            self._feed(data, at)
        else:
            self.data_received(data)
        self._read_on()

    # The fast lane

    def _begin(self, data: bytes) -> bool:
        """Take the begin of a plain request, if it is one."""
        begun = None if self.writing_paused else read_begun(data, self._front.max_body_bytes)
        if begun is not None:
            self._start(*begun)
        return begun is not None

    def _arrive(self, data: bytes) -> None:
        body = self.arriving
        if body is None:
            return  # refused: the connection closes
        missing = body.missing
        if missing <= len(data):
            self.state, self.arriving = LANE, None
            if missing < len(data):
                self._keep(data, missing)
        body.received(data[:missing])
        if self.arriving is body and body.missing >> REST_BITS != missing >> REST_BITS:
            self._pause_transport_reading()
            self._loop.call_soon(self._read_on)

    def _start(self, plain: ClientRequest, length: int = 0) -> None:
        if self._head_due:
            self._head_due = False
            self._front.deadlines.head_complete(self)
        self._request_in_progress = True  # aiohttp's shutdown waits for it
        self.request_body = None
        self.state = ARRIVING if length else LANE
        self._front.serve_plain(plain, self, length)

    def lane_ended(self, keep_alive: bool) -> None:
        """The plain request's response is out, as far as it will be."""
        self._request_in_progress = False
        if self.arriving is not None:
            self.arriving.drop()
            self.arriving = None
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        if not keep_alive or self._close or self._force_close:
            self.state = FREE
            self._close = True
            self._loop.call_soon(self.linger)  # not now: a response that broke is about to be reset
            return
        self._responded()
        self._next_keepalive_close_time = self._idle_since + self._keepalive_timeout

    def _process_keepalive(self) -> None:
        """aiohttp's idle timer takes a connection with a busy lane for idle."""
        if not self._in_lane:
            super()._process_keepalive()
        else:
            self._keepalive_handle = self._loop.call_later(self._keepalive_timeout, self._process_keepalive)

    # The end

    def linger(self) -> None:
        """The last response was written: close when the client has it. aiohttp has no transport from here on."""
        transport = self.transport
        if self._linger is not None:
            return
        if transport is None or transport.is_closing() or not transport.can_write_eof():
            self.force_close()
            return
        self.transport = None
        self._buffered = b""
        self.force_close()
        self._front.deadlines.head_complete(self)
        self._linger = Linger(transport, self, self._front.deadlines.stall_s)

    def force_close(self) -> None:
        """Close now, whatever is in progress. With TLS that needs a close_notify of both sides."""
        transport = self.transport
        if self._linger is not None:
            self._linger.close()
        elif transport is not None and not transport.can_write_eof():
            self.transport = None
            self._linger = Linger(transport, self, self._front.deadlines.stall_s)
        super().force_close()

    # Stopping

    @property
    def busy(self) -> bool:
        """A request runs, or waits: aiohttp's loop is not waiting for one, or the lane is in use."""
        return self._waiter is None or self._in_lane or bool(self._messages or self._buffered)

    @property
    def _in_lane(self) -> bool:
        return self.state is LANE or self.state is ARRIVING

    @property
    def held_bytes(self) -> int:
        """What it holds: the body of its request, bytes that were sent ahead, and what the client has not read."""
        held = len(self._buffered) + (0 if self.turn is None else self.turn.held_bytes)
        if self._linger is not None:
            return held + self._linger.held_bytes
        return held if self.transport is None else held + self.transport.get_write_buffer_size()

    def close_if_idle(self, for_s: float) -> None:
        if self._linger is not None:
            self._linger.hurry()
        elif not self.busy and not self._walk.head_bytes and self._loop.time() - self._idle_since >= for_s:
            self.force_close()

    def stop(self) -> None:
        """Close it: at once, or when its last response had time to arrive."""
        if self._linger is not None:
            self._linger.hurry()
        else:
            self.force_close()

    def reconfigure(self, idle_s: float) -> None:
        """Apply another idle time-out, and other settings for what endpoints are told of it."""
        self._keepalive_timeout = idle_s
        self.peer = self._make_peer()

    def cut(self, why: Outcome) -> None:
        """End the current request visibly: at the deadline of the drain, or for lack of memory."""
        if self.turn is not None:
            self.turn.cut(why)
        if self._task_handler is not None and not self._in_lane and self.state is not SWITCHED:
            self._task_handler.cancel()

    def shed(self) -> None:
        """Free what it holds, for lack of memory: its request is ended visibly, or its last response broken off."""
        if self.turn is not None:
            self.cut(Outcome.OVERLOADED)
        elif self._linger is not None:
            self._linger.abort()
        elif self.transport is not None:
            self.transport.abort()

    # aiohttp's side

    def aiohttp_responded(self) -> None:
        """aiohttp's handler wrote a response after which the connection lives on: `request_is_read`."""
        self._responded()

    @property
    def request_is_read(self) -> bool:
        """All bytes of the current request were read: what comes next is another request, if there is to be one."""
        if self._close or self.state is ARRIVING:
            return False
        return self._walk.at_boundary and (self.request_body is None or self.request_body.is_eof())

    async def drained(self) -> None:
        """Wait until the client has read earlier responses, so that those of pipelined requests cannot pile up here.

        A client that does not read is closed by its deadline, which cancels the waiting task.
        """
        if self.writing_paused:
            await self._drain_helper()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this after each read of a body; it would then parse nothing, and resume a connection that was
        not paused.
        """
        if self._reading_paused:
            super().resume_reading(resume_parser)
            if self._buffered:
                self._feed_soon()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to what aiohttp could not parse: in our format, recorded like a request, never logged with
        traceback.
        """
        del request, message
        if status >= 500:
            if not isinstance(exc, ConnectionError):  # that is: its client has gone
                logger.error("aiohttp failed", exc_info=exc)
            error = LbError(Outcome.INTERNAL_ERROR)
        elif isinstance(exc, LineTooLong):
            is_target = exc.args[0][:1] == b"/"
            error = LbError(Outcome.URI_TOO_LONG if is_target else Outcome.HEAD_TOO_LARGE)
        elif "Too many headers" in str(exc):
            error = LbError(Outcome.HEAD_TOO_LARGE)
        else:
            error = LbError(Outcome.BAD_REQUEST)
        self._front.refuse_unread(self, error)
        self.linger()
        return CLOSE


def fail_body(body: StreamReader, error: Exception) -> None:
    """Fail whoever reads this body. Twice: a reader that was waked in this turn, by the end of a chunk, does not look
    whether the body has failed before it waits again.
    """
    body.set_exception(error)
    asyncio.get_running_loop().call_soon(body.set_exception, error)
