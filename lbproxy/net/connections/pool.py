# SPDX-License-Identifier: Apache-2.0
"""Connections to the endpoints: opened, kept for a while, reused, and watched for silence.

Theory of operation. A `Connection` is an asyncio protocol that carries one exchange at a time. `send` takes a receiver,
which is called as the response arrives: `head`; then, if it accepted the body by `relay`, every read in the same
callback in which it arrived; then the end. There is no future and no task between the socket and the receiver. A
connection returns to the pool when a message ended cleanly and nothing forbids its reuse; otherwise it is closed.
Invariants:

- A connection with an unread or unexpected byte is never reused, nor one on which something waits in the kernel when
  the request would be sent.
- A read that has more pieces than one turn may walk is walked on in later ones (`backlog`); until then nothing is read.
- After `abort`, or when its receiver released it, a connection makes no more calls.
- Kept connections are closed before the 5 s after which vLLM and SGLang (uvicorn) close them.

One sweep every 250 ms checks the clocks of all connections (`net.connections.patience`): a timer per request would cost
more than its precision is worth. Connecting has its own time-out. No clock runs while lbproxy itself is stopped: see
`pulse`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Final, Protocol, cast

from mypy_extensions import mypyc_attr

from lbproxy.core.endpoints.credentials import Tls
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.driver.pulse import Pulse
from lbproxy.net.connections.backlog import Backlog
from lbproxy.net.connections.corked import Cork, Corked
from lbproxy.net.connections.h1 import (
    AT_ONCE_BYTES,
    MAX_HEAD_BYTES,
    Framing,
    PayloadWatcher,
    ProtocolError,
    ResponseHead,
    parse_head,
)
from lbproxy.net.connections.patience import ClockLimits, Patience
from lbproxy.net.connections.upload import Upload
from lbproxy.net.dialing.dial import OUR_FAULT, open_socket, open_transport, reason
from lbproxy.net.dialing.names import Names
from lbproxy.net.dialing.origin import Origin
from lbproxy.net.dialing.tls import client_context
from lbproxy.net.dialing.vanished import find_vanished

IDLE_S = 3.0
MAX_IDLE_PER_ORIGIN: Final = 1024
STALE_S = 0.5
"""A kept connection that breaks this soon after a request was sent was closed before it: the keep-alive race. One that
breaks later failed with the request on it, which must then not be sent again: it may have broken the server."""
SWEEP_S: Final = 0.25
CLOSING_S: Final = 0.01
"""An aborted transport closes its descriptor some turns of the loop later."""
LARGE_BYTES: Final = 1 << 20
"""A larger body is sent in slices, one in each turn of the loop."""
MAX_INFORMATIONAL: Final = 8
"""1xx responses before the final one."""


class Receiver(Protocol):
    """Receives a response. Called from the connection's own callbacks; must not block."""

    @property
    def switches(self) -> bool:
        """The request asks to switch protocols: a 101 is its response, and goes to `head`. Otherwise a 101 is
        an error.
        """

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        """A complete response that is no stream, after any 1xx responses, in one piece as its length says. Nothing
        follows.
        """

    def hints(self, head: ResponseHead) -> None:
        """103 Early Hints: fields of the response that follows."""

    def head(self, head: ResponseHead) -> None:
        """The head of any other response. Before this returns, it must call `relay` for the body, or `abort`; or
        `switch` for a 101.
        """

    def body(self, data: bytes) -> None:
        """The next bytes of the message, framing included."""

    def ended(self) -> None:
        """The message is complete. Nothing follows."""

    def broke(self, error: UpstreamError) -> None:
        """There will be no response, or its body will never be complete. Nothing follows."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BodyReceiver(PayloadWatcher):
    """A Receiver of the body of a response whose head another had before."""

    switches = False

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        """Never called."""
        raise AssertionError("one answer has one head")

    def hints(self, head: ResponseHead) -> None:
        """Never called."""
        raise AssertionError("hints after the head")

    def head(self, head: ResponseHead) -> None:
        """Never called."""
        raise AssertionError("one answer has one head")


class HeadReceiver:
    """A Receiver that leaves the body of its response to another."""

    def body(self, data: bytes) -> None:
        """Never called."""
        raise AssertionError("a body before its head")

    def ended(self) -> None:
        """Never called."""
        raise AssertionError("an end before its head")


class Connection:
    """One connection to an endpoint, with the methods of an asyncio.Protocol. Made by `ConnectionPool` only."""

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self.origin = origin
        self.reused = False
        """An earlier exchange used this connection."""
        self.patience = Patience()
        """The clock of the current exchange."""
        self._pool = pool
        self._loop = pool.loop
        self._transport: Corked | None = None
        self._buffer = b""
        """The beginning of an incomplete head; or from `_at` on, what of a read is to be walked in a later turn."""
        self._at = 0
        self._reusable = False
        """The connection can be reused after the response that is being relayed."""
        self._method = ""
        self._informational = 0
        self._receiver: Receiver | None = None
        """Set during an exchange."""
        self._framing: Framing | None = None
        """Set from `relay` on, until the message is complete."""
        self._paused = False
        """The receiver is full."""
        self._upload = Upload(pool.loop)
        self._descriptor: int | None = None
        """The descriptor of its socket, which it does not own."""

    # The exchange

    def watch(self, sock: socket.socket) -> None:
        """Its socket. If anything waits there when a kept connection would send, its receiver gets STALE instead."""
        self._descriptor = sock.fileno()

    def send(
        self,
        method: str,
        head: bytes,
        body: bytes | tuple[bytes | memoryview, ...],
        receiver: Receiver,
        limits: ClockLimits,
    ) -> None:
        """Send a complete request. The response goes to `receiver`, from the next turn of the loop on; or a TIMEOUT
        when a clock of these `limits` expires. The receiver reports when the response `began`.
        """
        self._method = method
        self._receiver = receiver
        self._informational = 0
        self.patience.sent(limits, self._loop.time())
        transport = self._transport
        if transport is None:  # lost in the turn in which it was made or taken
            self._loop.call_soon(self._eof, None)
            return
        if self.reused and self._descriptor is not None:
            self._pool.cork.send_if_silent(transport, self._descriptor)
        if isinstance(body, bytes) and len(body) < 16 << 10:
            transport.write(head + body)
        elif isinstance(body, bytes) and len(body) <= LARGE_BYTES:
            transport.writelines((head, body))
        else:
            transport.write(head)
            self._upload.begin(transport, (body,) if isinstance(body, bytes) else body)

    def relay(self, head: ResponseHead, receiver: Receiver, watcher: PayloadWatcher | None) -> None:
        """Send the body to `receiver`; what has arrived already within this call. Call it from `Receiver.head`."""
        self._framing = head.framing(watcher)
        self._receiver = receiver
        self._reusable = head.keep_alive
        data, self._buffer = self._buffer, b""
        self._arrived(data)

    def switch(self, protocol: asyncio.Protocol) -> tuple[Corked | None, bytes]:
        """After a 101, from `Receiver.head`: give the transport to `protocol`. Returns the transport, None if it was
        lost in this turn, and the bytes after the head. `abort` must be called in the end.
        """
        self._receiver = None
        self.patience.stop()
        rest, self._buffer = self._buffer, b""
        if self._transport is not None:
            self._transport.set_protocol(protocol)
        return self._transport, rest

    def began(self) -> None:
        """The first event, or byte of any other body, arrived. From now on silence is timed."""
        self.patience.began(self._loop.time())

    @property
    def at_boundary(self) -> bool:
        """Other bytes with the framing of the message could follow what was relayed so far."""
        return self._framing is not None and self._framing.at_boundary

    def pause(self) -> None:
        """Stop reading: the receiver is full. This time is not the endpoint's silence."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self.patience.paused(self._loop.time())
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.patience.resumed(self._loop.time())
            if self._framing is not None and self._buffer:
                self._pool.backlog.add(self)
            elif self._transport is not None:
                self._transport.resume_reading()

    def walk_on(self) -> None:
        """Called by the backlog: walk more of a read. No effect if that is done: `resume` can make it due twice."""
        if self._receiver is None or self._framing is None or self._paused or not self._buffer:
            return
        data, self._buffer = self._buffer, b""
        self.patience.heard(self._loop.time())  # that it waited is not the endpoint's silence
        transport = self._transport
        try:
            self._relay(data, self._at)
        except Exception:
            if transport is not None:
                transport.abort()  # as it does itself if `data_received` fails: its loss ends the exchange
            raise
        if self._buffer or self._paused:
            return
        if transport is None:
            self._eof(None)
        else:
            self._loop.call_soon(self._read_on)  # after what was passed on is sent: its receiver may be full then

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and not (self._buffer or self._paused or transport.is_closing()):
            transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is in progress. Makes no calls. Allowed at any time."""
        self._receiver = None
        self._buffer = b""
        self._upload.drop()
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    # Time limits

    def sweep(self, now: float) -> None:
        """Called by the pool regularly: end an exchange that was silent for too long."""
        if now >= self.patience.deadline:
            self._break(UpstreamError(FailureKind.TIMEOUT, f"{self.origin}: {self.patience.reason}"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = Corked(cast(asyncio.Transport, transport), self._pool.cork)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.abort()  # a kept connection must be silent
        elif self._framing is not None:
            self.patience.heard(self._loop.time())
            if self._buffer:
                self._buffer += data  # a transport may have had it before it was told to pause
            else:
                self._arrived(data)
        elif self._descriptor in self._pool.cork.silent:
            if self._transport is not None:
                self._transport.drop()  # a response to a request that is not sent yet
        else:
            self._buffer = self._buffer + data if self._buffer else data
            self._find_head(receiver)

    def pause_writing(self) -> None:
        self._upload.is_full = True

    def resume_writing(self) -> None:
        self._upload.resume()

    def eof_received(self) -> None:
        """See asyncio.Protocol: None closes our side too, as no endpoint half-closes during a response."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._upload.drop()
        self._pool.forget(self)
        if self._framing is None or not self._buffer:
            self._eof(exc)  # else once what came before is walked

    # The bytes received

    def _find_head(self, receiver: Receiver) -> None:
        end = self._buffer.find(b"\r\n\r\n") + 4
        try:
            if (len(self._buffer) if end < 4 else end) > MAX_HEAD_BYTES:
                raise ProtocolError("the response head is too large")
            if end < 4:
                if not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise ProtocolError("the response is not HTTP/1.x")
                return
            head = parse_head(self._buffer[:end], self._method)
            if head.status == 101 and not receiver.switches:
                raise ProtocolError("the endpoint switches protocols")
        except ProtocolError as error:
            self._break(UpstreamError(FailureKind.PROTOCOL, f"{self.origin}: {error}"))
            return
        rest = self._buffer = self._buffer[end:]
        if head.length == len(rest) and head.status >= 200 and not head.is_stream:
            # Most non-streaming responses. Without framing and relay: 7 µs less for each.
            self._release(head.keep_alive)
            receiver.complete_response(head, rest)
            return
        if head.status >= 200 or head.status == 101:
            receiver.head(head)
            return
        if head.status == 103:
            receiver.hints(head)
        self._informational += 1
        if self._informational > MAX_INFORMATIONAL:
            self._break(UpstreamError(FailureKind.PROTOCOL, f"{self.origin}: too many 1xx responses"))
        elif self._buffer and self._receiver is receiver:
            self._find_head(receiver)

    def _arrived(self, data: bytes) -> None:
        """Pass it on. A large read waits in the backlog: hundreds of them in one turn took 140 ms."""
        if len(data) > AT_ONCE_BYTES:
            self._put_off(data, 0)
        else:
            self._relay(data, 0)

    def _relay(self, data: bytes, at: int) -> None:
        """Pass `data[at:]` on, or as much of it as one turn may walk."""
        framing, receiver = self._framing, self._receiver
        assert framing is not None
        assert receiver is not None
        try:
            end = framing.feed(data, at)
        except ProtocolError as error:
            self._break(UpstreamError(FailureKind.PROTOCOL, f"{self.origin}: {error}"))
            return
        whole, done = end == len(data), framing.done
        if done and not whole:
            self._reusable = False  # bytes after the end of a message forbid the reuse of its connection
        piece = data if whole and at == 0 else data[at:end]
        if piece:
            receiver.body(piece)
        if self._receiver is not receiver:
            return  # it may have released it
        if done:
            self._finish(receiver)
        elif not whole:
            self._put_off(data, end)

    def _put_off(self, data: bytes, at: int) -> None:
        """Walk `data[at:]` in a later turn. Nothing is read before that."""
        self._buffer, self._at = data, at
        if self._transport is not None:
            self._transport.pause_reading()
        self._pool.backlog.add(self)

    def _finish(self, receiver: Receiver) -> None:
        self._release(self._reusable)
        receiver.ended()

    def _release(self, keeps: bool) -> None:
        """The message is complete: return to the pool before the receiver is called, which may need a connection at
        once. An idle connection keeps nothing of the message.
        """
        self._receiver = self._framing = None
        self._buffer = b""
        self.patience.stop()
        transport = self._transport
        if keeps and not self._upload.pieces and transport is not None and not transport.is_closing():
            self._pool.keep(self, idle=not transport.get_write_buffer_size())
        else:
            self.abort()

    def _eof(self, exc: Exception | None) -> None:
        """The endpoint closed the connection."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._framing is not None and exc is None and self._framing.eof():
            receiver.ended()
        else:
            receiver.broke(self._connection_error(exc))

    def _connection_error(self, exc: Exception | None) -> UpstreamError:
        unanswered = self._framing is None and not self._buffer and not self._informational
        stale = self.reused and unanswered and self._loop.time() - self.patience.sent_at < STALE_S
        detail = f"{self.origin}: " + (f"connection lost: {exc}" if exc else "the server closed the connection")
        return UpstreamError(FailureKind.STALE if stale else FailureKind.RESET, detail)

    def _break(self, error: UpstreamError) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.broke(error)


class ConnectionPool:
    """All connections to all endpoints. Must be made inside a running loop; `close` it there."""

    def __init__(self, pulse: Pulse | None = None) -> None:
        """`pulse`: knows when lbproxy itself was stopped."""
        self.loop = asyncio.get_running_loop()
        self.pulse = pulse or Pulse()
        self.cork = Cork(self.loop)
        self.backlog = Backlog(self.loop)
        self.names = Names(self.loop)
        self._stalled_s = 0.0
        """The total time by which the limits of all connections were prolonged."""
        self._idle: defaultdict[Origin, dict[Connection, float]] = defaultdict(dict)
        self._busy: set[Connection] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    @property
    def open_connections(self) -> int:
        """Kept and busy connections."""
        return len(self._busy) + sum(map(len, self._idle.values()))

    def take(self, origin: Origin) -> Connection | None:
        """The kept connection that was used last, None if there is none."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection, _ = idle.popitem()
        connection.reused = True
        self._busy.add(connection)
        return connection

    async def connect(self, origin: Origin, timeout_s: float) -> Connection:
        """Open a new connection. Raises UpstreamError CONNECT, or EXHAUSTED if there are no descriptors.

        `timeout_s`: for the TCP connection; a TLS handshake may take as long again.
        """
        try:
            try:
                sock = await open_socket(self.loop, self.pulse, self.names, origin, timeout_s)
            except OSError as error:
                if error.errno not in OUR_FAULT or not self._close_idle():
                    raise
                await asyncio.sleep(CLOSING_S)
                sock = await open_socket(self.loop, self.pulse, self.names, origin, timeout_s)
            find_vanished(sock)
            try:
                if origin[2] is None:
                    connection = Connection(self, origin)
                    await open_transport(self.loop, cast(asyncio.Protocol, connection), sock)
                else:
                    connection = await self._tls_handshake(origin, origin[2], sock, timeout_s)
            except BaseException:
                sock.close()
                raise
        except TimeoutError:
            raise UpstreamError(FailureKind.CONNECT, f"{origin}: no connection within {timeout_s:g} s") from None
        except OSError as error:
            kind = FailureKind.EXHAUSTED if error.errno in OUR_FAULT else FailureKind.CONNECT
            refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)  # the file is a Unix socket
            raise UpstreamError(kind, f"{origin}: {reason(error)}", refused=refused) from error
        connection.watch(sock)
        self._busy.add(connection)
        return connection

    async def _tls_handshake(self, origin: Origin, tls: Tls, sock: socket.socket, timeout_s: float) -> Connection:
        """Open a TLS connection. Raises OSError; TimeoutError after `timeout_s`."""
        context = client_context(tls.ca, tls.verify)
        name = tls.server_name or origin[0].rstrip(".")
        connection = Connection(self, origin)
        async with self.pulse.timeout(timeout_s):
            await self.loop.create_connection(
                lambda: cast(asyncio.Protocol, connection), sock=sock, ssl=context, server_hostname=name
            )
        return connection

    def dial(
        self, origin: Origin, timeout_s: float, on_result: Callable[[Connection | UpstreamError], None]
    ) -> asyncio.Task[None]:
        """`connect` for callers that do not await: `on_result` is called with the result, never within this call.

        Cancelling the task ends it, and then there is no call.
        """

        async def connect() -> None:
            try:
                result: Connection | UpstreamError = await self.connect(origin, timeout_s)
            except UpstreamError as error:
                result = error
            on_result(result)

        task = self.loop.create_task(connect())
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return task

    def keep(self, connection: Connection, *, idle: bool) -> None:
        """Keep a connection whose exchange ended cleanly. `idle`: nothing of the request is left to send."""
        self._busy.discard(connection)
        kept = self._idle[connection.origin]
        if idle and len(kept) < MAX_IDLE_PER_ORIGIN:
            kept[connection] = self.loop.time()
            if connection._paused:  # it must be read, so that its close is noticed
                connection.resume()
                connection.patience.stop()
        else:
            connection.abort()

    def forget(self, connection: Connection) -> None:
        self._busy.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]

    def close(self) -> None:
        self._sweeper.cancel()
        self.names.close()
        for task in self._dialling:
            task.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.abort()

    def _close_idle(self) -> bool:
        """Close kept connections when descriptors are short. Returns whether there were any."""
        idle = [connection for kept in self._idle.values() for connection in kept]
        for connection in idle:
            connection.abort()
        return bool(idle)

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        stalled_s = self.pulse.stalled_s() - self._stalled_s
        self._stalled_s += stalled_s
        now = self.loop.time()
        for connection in list(self._busy):
            connection.patience.prolong(stalled_s)
            connection.sweep(now)
        for idle in list(self._idle.values()):
            for connection, since in list(idle.items()):
                if now - since < IDLE_S:
                    break  # in the order in which they were kept
                connection.abort()
