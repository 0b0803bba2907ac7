"""One request from its place in the balancer to its last byte: attempts, the commit point, the relay, the record.

Theory of operation. `run_exchange` is the only loop: place, forward, and after a failure either again elsewhere or give
up. When a head has come, the `Relay` commits: from then on bytes go from the endpoint's connection to the client's
transport in the same callback, unchanged, and nothing is ever retried. Invariants:

- A ticket is closed exactly once, in the `finally` of its attempt, whatever happens, cancellation included.
- Before the relay's first byte went out the client can still get an error; after it, never a second status line.
- An answer that broke never looks whole: no terminator, and a reset where a close would look like an end
  (the tables are in docs/failures.md).
- The client's connection and the endpoint's pause and die together: `ClientConnection` tells the relay at once.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from lbproxy.config import Settings
from lbproxy.core.openai import error_event
from lbproxy.core.retry import FailureKind, UpstreamError, decide
from lbproxy.core.sse import EventScanner, JsonWatcher
from lbproxy.core.types import EndpointUid, InferenceRequest, LbError, Outcome, RequestRecord, Ticket, TicketState
from lbproxy.net.h1 import ResponseHead
from lbproxy.net.pool import Connection, ConnectionPool
from lbproxy.proxy.headers import client_head
from lbproxy.proxy.upstream import Outgoing, Upstream
from lbproxy.runtime import Runtime

PROGRESS_S = 0.25
"""How often a stream's progress is reported to the balancer, at most."""


class Client(Protocol):
    """The client's connection, as the relay needs it."""

    transport: asyncio.Transport | None
    relay: Relay | None
    """Told of `pause`, `resume` and `client_gone` while it is set."""

    @property
    def writing_paused(self) -> bool:
        """The client's buffer is full."""
        ...


@dataclass(slots=True)
class Call:
    """A client's request, read whole and understood."""

    client: Client
    record: RequestRecord
    request: InferenceRequest
    outgoing: Outgoing
    http10: bool
    """The client takes no chunks, and its connection ends with the answer."""
    keep_alive: bool
    """The client's connection may serve another request."""


class Exchanger:
    """Runs exchanges."""

    def __init__(self, settings: Settings, runtime: Runtime, connections: ConnectionPool) -> None:
        self._runtime = runtime
        self._upstream = Upstream(connections, settings.timeouts)
        self._max_attempts = settings.retry.attempts
        self._stream_idle_s = settings.timeouts.stream_idle
        self._expose_endpoint = settings.expose_endpoint

    async def run_exchange(self, call: Call) -> bool:
        """Answer the call. Returns whether the client's connection may serve another request.

        Raises LbError if nothing went to the client. The record tells the rest.
        """
        record = call.record
        failed: frozenset[EndpointUid] = frozenset()
        while True:
            ticket = self._runtime.submit(call.request, failed)
            if ticket.state is not TicketState.PLACED:
                await self._wait_for_place(ticket)
            assert ticket.placed_on is not None
            assert ticket.placed_at is not None
            endpoint = ticket.placed_on.endpoint
            record.attempts += 1
            record.endpoint = endpoint.name
            record.placed_at = ticket.placed_at
            record.queue_s += ticket.placed_at - ticket.submitted_at
            outcome = Outcome.CLIENT_CLOSED
            try:
                connection, head = await self._upstream.forward(endpoint, call.outgoing)
                relay = Relay(call, ticket, self._runtime, connection, head)
                outcome = await relay.run(self._own_fields(record), self._stream_idle_s)
                record.outcome = outcome
                return relay.client_reusable
            except UpstreamError as error:
                verdict = decide(error.kind, attempts=record.attempts, max_attempts=self._max_attempts)
                outcome = verdict.outcome
                record.error = error.detail
                record.failed += ((endpoint.name, outcome.label),)
                if verdict.blame:
                    self._runtime.report_health(endpoint.uid, False, error.detail)
                if not verdict.again:
                    raise LbError(outcome) from error
                failed |= {endpoint.uid}
            finally:
                self._runtime.close(ticket, outcome)

    async def _wait_for_place(self, ticket: Ticket) -> None:
        try:
            await self._runtime.placed(ticket)
        except LbError as error:
            if ticket.avoid and error.outcome is Outcome.NO_ENDPOINTS and self._runtime.any_up():
                raise LbError(Outcome.CONNECT_FAILED) from error  # a live pool broke this request
            raise

    def _own_fields(self, record: RequestRecord) -> str:
        exposed = f"x-lbproxy-endpoint: {record.endpoint}\r\n" if self._expose_endpoint else ""
        return f"x-request-id: {record.id}\r\nx-lbproxy-attempts: {record.attempts}\r\n{exposed}"


def _is_plain_json(head: ResponseHead) -> bool:
    """The body is one JSON text that can be read."""
    kind = head.content_type.partition(b";")[0].strip()
    return kind == b"application/json" and b"content-encoding:" not in head.end_to_end.lower()


class Relay:
    """The answer's way from the endpoint's connection to the client's transport: the net.pool.Receiver of a call."""

    __slots__ = (
        "_call",
        "_chunked",
        "_connection",
        "_done",
        "_head",
        "_prefix",
        "_progress_at",
        "_progressed",
        "_raw",
        "_record",
        "_runtime",
        "_scanner",
        "_ticket",
        "_transport",
        "_whole",
        "client_reusable",
    )

    def __init__(
        self, call: Call, ticket: Ticket, runtime: Runtime, connection: Connection, head: ResponseHead
    ) -> None:
        assert call.client.transport is not None, "a lost client cancels its handler"
        self._call = call
        self._record = call.record
        self._ticket = ticket
        self._runtime = runtime
        self._transport = call.client.transport
        self._connection: Connection | None = connection
        self._head = head
        self._chunked = head.chunked and not call.http10
        self._raw = head.chunked == self._chunked
        """The client gets the endpoint's bytes as they are; else the payload without its chunk framing."""
        self.client_reusable = call.keep_alive and not call.http10 and (head.chunked or head.length is not None)
        self._prefix = b""
        """The head, until it went out."""
        content_type = head.content_type
        ends_by_close = not head.chunked and head.length is None
        self._scanner = EventScanner(watch_finish=ends_by_close) if b"text/event-stream" in content_type else None
        self._whole: EventScanner | JsonWatcher | None = None
        """Tells whether a body that only closing ends is whole."""
        if ends_by_close:
            self._whole = self._scanner or (JsonWatcher() if _is_plain_json(head) else None)
        self._progressed = 0
        self._progress_at = 0.0
        # A failure is a result here: an exception that a cancelled handler never fetches would be logged as lost.
        self._done: asyncio.Future[Outcome | UpstreamError] = runtime.loop.create_future()

    async def run(self, own_fields: str, idle_s: float) -> Outcome:
        """Relay until the end. Raises UpstreamError if the endpoint failed before anything went to the client."""
        head, client = self._head, self._call.client
        assert self._connection is not None
        connection = self._connection
        self._record.status = head.status
        self._prefix = client_head(head, own_fields, chunked=self._chunked, keep_alive=self.client_reusable)
        client.relay = self
        try:
            watcher = self if self._scanner or self._whole or not self._raw else None
            connection.relay(head, self, watcher, idle_s)
            if self._prefix and not self._done.done():
                self._write(b"")
            if client.writing_paused:
                self.pause()
            result = await self._done
            if isinstance(result, UpstreamError):
                raise result
            return result
        finally:
            client.relay = None
            self.client_gone()  # only if we were cancelled: lets go of the connection

    # net.h1.PayloadWatcher

    def feed(self, data: bytes, start: int, end: int) -> None:
        """The next piece of payload."""
        if self._scanner is not None:
            self._scanner.feed(data, start, end)
        elif self._whole is not None:
            self._whole.feed(data, start, end)
        if not self._raw:
            self._first_byte()
            self._write(data[start:end])

    # net.pool.Receiver

    def body(self, data: bytes) -> None:
        """The next bytes of the message, framing included."""
        self._first_byte()
        if self._raw:
            self._write(data)
        if self._scanner is not None:
            now = self._runtime.now()
            if now >= self._progress_at:
                self._report_progress(now)

    def ended(self) -> None:
        """The endpoint says that the message is whole; where it cannot say so, we look."""
        self._connection = None
        if self._whole is not None and not self._whole.whole:
            self.broke(UpstreamError(FailureKind.RESET, "the body ended by close, and is not whole"))
            return
        if self._prefix:
            self._write(b"")
        self._finish(Outcome.COMPLETED)

    def broke(self, error: UpstreamError) -> None:
        """The endpoint failed in the middle."""
        connection, self._connection = self._connection, None
        if self._prefix:
            self._finish(error)
            return
        self._record.error = error.detail
        told = LbError(Outcome.UPSTREAM_RESET, f"upstream connection lost after {self._events} events")
        self._break(Outcome.UPSTREAM_BROKE, told, connection)

    def cut(self) -> None:
        """We stop, and cannot wait for the end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            told = LbError(Outcome.CUT, f"the load balancer was stopped after {self._events} events")
            self._break(Outcome.CUT, told, connection)

    def _break(self, outcome: Outcome, told: LbError, connection: Connection | None) -> None:
        """End the answer so that nobody takes it for whole; an event stream is told why, where an event can stand."""
        self.client_reusable = False
        if not self._chunked and self._head.length is None:
            self._reset(outcome)
            return
        at_boundary = connection is not None and connection.at_boundary
        if self._scanner is not None and self._scanner.at_boundary and at_boundary and self._raw:
            event = error_event(told)
            self._write(b"%x\r\n%s\r\n" % (len(event), event))
        self._finish(outcome)
        self._transport.close()

    # The client

    def pause(self) -> None:
        """The client's buffer is full."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The client's buffer has room."""
        if self._connection is not None:
            self._connection.resume()

    def client_gone(self) -> None:
        """The client's connection is lost: close the endpoint's, at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            self._finish(Outcome.CLIENT_CLOSED)

    # Steps

    def _first_byte(self) -> None:
        if self._record.first_byte_at is None:
            self._record.first_byte_at = self._runtime.now()
            self._runtime.first_byte(self._ticket)

    def _write(self, data: bytes) -> None:
        if self._prefix:
            data = self._prefix + data
            self._prefix = b""
        self._record.response_bytes += len(data)
        if not self._transport.is_closing():
            self._transport.write(data)

    def _report_progress(self, now: float) -> None:
        assert self._scanner is not None
        events = self._scanner.events
        if events > self._progressed:
            self._runtime.progress(self._ticket, events - self._progressed)
            self._progressed = events
        self._progress_at = now + PROGRESS_S

    def _reset(self, outcome: Outcome) -> None:
        """A close would look like the end: reset the client's connection."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._finish(outcome)
        self._transport.abort()

    @property
    def _events(self) -> int:
        return 0 if self._scanner is None else self._scanner.events

    def _finish(self, result: Outcome | UpstreamError) -> None:
        """Before the client's transport is closed: losing that cancels the handler, which must wake with this first."""
        if self._scanner is not None:
            self._record.events = self._scanner.events
            self._report_progress(self._runtime.now())
        if not self._done.done():
            self._done.set_result(result)
