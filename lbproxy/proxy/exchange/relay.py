# SPDX-License-Identifier: Apache-2.0
"""The transfer of a response from an endpoint's connection to a client's transport, from its head to the last byte.

Theory of operation. After the head, every read from the endpoint goes to the client in the same callback, unchanged,
chunk framing included; scanners watch it. Only a client that does not accept chunks gets the payload alone, and one
whose head promised them, or that is to get comments, gets it in new ones. `stage` is how far the response is:

    stage        event                                                          next stage
    HELD         the first of the body (opening.py), of a stream its first      COMMITTED
                 event; or none arrived with the head of a response that is
                 not a stream; or `HOLD_HEAD_S` passed, and only this body
                 could follow this head; or complete
                 `HOLD_HEAD_S` passed, and another stream could follow; or      HEAD_SENT
                 the client has the head of an earlier attempt, or ours
    HEAD_SENT    the first event, or complete                                   COMMITTED
    COMMITTED    complete, broken, or cut                                       FINISHED
    any          broken, refused, or cancelled: the exchange decides             FINISHED

Invariants:

- The head goes out with the first body bytes, in one write; without any the head of a stream after `HOLD_HEAD_S`, any
  other head at once, which commits. There is never a second status line.
- Until it is committed a response can be replaced: vLLM sends 200 before it begins with the prompt, refuses
  some requests of a burst a moment later, and may fail in the seconds until the first token. A stream whose head is out
  continues with the body of another endpoint's stream; after the first bytes of a body nothing is retried.
- A broken response never looks complete: it gets no terminator, and a reset where a close would look like an end (the
  tables are in docs/failures.md).
- The client's connection and the endpoint's are paused and closed together.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from math import ceil
from typing import Final, Protocol, TypeVarTuple

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import error_event, event_of_response
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import DECODE, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.core.responses.lines import LineScanner
from lbproxy.core.responses.objects import find_objects
from lbproxy.core.responses.sse import BodyScanner, EventScanner, IdScanner, find_response_id
from lbproxy.core.responses.text_rate import TextRate
from lbproxy.core.responses.unasked import UsageForm
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import BodyReceiver, Connection, HeadReceiver
from lbproxy.proxy.exchange.opening import Opening
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.forwarding import Peer
from lbproxy.proxy.request.headers import client_head
from lbproxy.proxy.request.routes import Route

HOLD_HEAD_S: Final = 0.25
"""How long the head of a stream waits for a first event. Clients would notice a longer delay."""
CUTS: Final = {
    Outcome.DRAINING: (Outcome.CUT, "the load balancer was stopped"),
    Outcome.OVERLOADED: (Outcome.OVERLOADED, "the load balancer ran out of resources"),
}
"""How a response ends that is cut, by the reason, and what the client is told if it can be."""
PROGRESS_S: Final = 0.25
"""The minimum interval of progress reports for a stream."""


class Client(Protocol):
    """The client's connection, as a response needs it."""

    transport: asyncio.Transport | None
    """None: the connection is closed."""

    @property
    def writing_paused(self) -> bool:
        """The client's buffer is full."""

    @property
    def peer(self) -> Peer:
        """What endpoints are told of the client."""


class HeadSender(Protocol):
    """Who sent the head of a stream to the client, without any of a body."""

    client_reusable: bool
    """It said that the client's connection lives on."""

    @property
    def is_ours(self) -> bool:
        """It is lbproxy's own head; otherwise an endpoint's, whose response the client sees break."""

    @property
    def has_moved(self) -> bool:
        """The client has a part of the body as well, and another endpoint is to go on with it."""


Arguments = TypeVarTuple("Arguments")


class RequestOwner(HeadReceiver, ABC):
    """The exchange of a request, as what it consists of needs it: relays, a first leg, `Keepalive`."""

    request: ClientRequest
    """The client's request. Set by `Exchange.start`."""
    placed: InferenceRequest
    """The request as the balancer sees it. Set likewise."""
    record: RequestRecord
    client: Client
    keep_alive: bool
    """The client's connection may serve another request."""
    cors = ""
    """Field lines of the response that replace the endpoint's own; "" = the settings allow no origins."""
    head_sent_by: HeadSender | None
    """Who sent the head of a stream to the client, without any of a body: the relay of an attempt, or `Keepalive`."""

    @abstractmethod
    def guarded(self, step: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Run a step; nothing above would handle its exceptions."""

    # Of a relay

    @property
    @abstractmethod
    def relay(self) -> Relay | None:
        """What relays the response, once that has begun."""

    @abstractmethod
    def head_sent(self, by: HeadSender) -> None:
        """The head of a stream went to the client, alone: any other response must be the body of such a stream."""

    @abstractmethod
    def committed(self) -> None:
        """The first of the body goes to the client: no other response is possible from here on."""

    @abstractmethod
    def relayed(self, result: Outcome | UpstreamError) -> None:
        """Called once: the outcome, or the failure if none of a body went to the client. Not called after `cancel`."""

    @abstractmethod
    def stream_refused(self, status: int) -> bool:
        """The stream begins with an error whose code is an HTTP status. None of it went out. True: drop it; another
        endpoint is asked, and `relayed` is not called.
        """

    # Of a stream that may go on elsewhere

    @abstractmethod
    def go_on(
        self, request: ClientRequest, placed: InferenceRequest, error: UpstreamError, ended: Outcome, usage: Usage
    ) -> None:
        """End the attempt, which failed so and used this, and begin another for the rest of the response."""

    @abstractmethod
    def counted(self) -> None:
        """The text has been counted, or the endpoint does not do that: request the rest of it, if there is any."""

    @abstractmethod
    def hold(self, size: int) -> bool:
        """Count so many more bytes of memory. Returns whether there is room."""

    # Of the first leg of a split request: only one is called after `second_ready`, and none after `cancel`

    @abstractmethod
    def second_ready(self) -> None:
        """The second leg can be sent, while the first one runs."""

    @abstractmethod
    def prefilled(self, usage: Usage | None) -> None:
        """The first leg is complete; the second can be placed."""

    @abstractmethod
    def first_failed(self, error: UpstreamError) -> None:
        """The first leg failed."""

    @abstractmethod
    def first_refused(self, head: ResponseHead, body: bytes) -> None:
        """The endpoint has refused the first leg as wrong."""


class Stage(Enum):
    """How far a response is: see the module."""

    HELD = "held"
    HEAD_SENT = "head sent"
    COMMITTED = "committed"
    FINISHED = "over"


class Relay(BodyReceiver):
    """One response."""

    def __init__(
        self, head: ResponseHead, connection: Connection, ticket: Ticket, runtime: RequestRuntime, owner: RequestOwner
    ) -> None:
        self._head = head
        self._connection: Connection | None = connection
        self._ticket = ticket
        self._record = owner.record
        self._runtime = runtime
        self._owner = owner
        self._head_timer: asyncio.TimerHandle | None = None
        """Sends the head without a body."""
        self._opening = Opening(holds=False, events=0)
        self._content_began = False
        """The first event, or byte of any other body, arrived."""
        self.timed_out = False
        """The response broke because its endpoint was silent for too long."""
        self.stage = Stage.HELD
        self.revocable = True
        """None of the body went to the client, by the stage."""
        self._progressed = 0
        self._progress_at = 0.0

    def begin(self, own_fields: str) -> None:
        """Relay the response's body. It may be complete, or broken, when this returns. If the client has the head of a
        stream, this response continues it (see `can_continue`).
        """
        turn = self._owner
        head, connection, client, http10 = self._head, self._connection, turn.client, turn.request.http10
        head_sent_by = turn.head_sent_by
        assert client.transport is not None, "a lost client ends its exchange"
        assert connection is not None
        self._transport = client.transport
        keeps_framing = self._keeps_framing
        needs_chunks = head_sent_by is not None or (turn.request.keepalive_s > 0.0 and can_continue(head))
        self._chunked = (head.chunked or needs_chunks or not keeps_framing) and not http10
        self._verbatim = head.chunked == self._chunked and keeps_framing
        """The client gets the endpoint's bytes unchanged; else the payload, in chunks of ours or without any."""
        ends_by_close = not head.chunked and head.length is None
        self.client_reusable = turn.keep_alive and not http10 and (self._chunked or not ends_by_close)
        route = turn.request.route
        streams = is_stream(head, route)
        self._scanner = stream_scanner(head, route, watch_finish=ends_by_close) if streams else None
        stores = self._ticket.request.stores and head.status < 300
        is_text = is_json(head) and not streams
        self._body = BodyScanner(native=route.is_native, shows=stores and route.flatten is None) if is_text else None
        self._judges_end = ends_by_close and (self._scanner is not None or self._body is not None)
        """Whether a body that only a closed connection ends is complete can be told from it."""
        is_second = self._ticket.request.leg == DECODE and self._ticket.prefill is None
        self._opening = Opening(holds=is_second, events=route.role_events)
        self._ids = IdScanner() if stores and route.flatten is not None else None
        self._record.status = head.status
        if head_sent_by is not None:
            self._enter(Stage.HEAD_SENT)
            self.client_reusable = head_sent_by.client_reusable  # as in its head
        else:
            self._opening.head = client_head(head, own_fields, chunked=self._chunked, keep_alive=self.client_reusable)
        reads = self._scanner is not None or self._body is not None or self._ids is not None
        watcher = self if reads or not self._verbatim else None
        connection.relay(head, self, watcher)
        if self._connection is None:
            return
        if self._opening.head and streams:
            self._head_timer = self._runtime.loop.call_later(HOLD_HEAD_S, self._send_head_alone)
        elif self._opening.head:
            self._write(b"")
        if client.writing_paused:
            self.pause()

    # net.connections.h1.PayloadWatcher

    def feed(self, data: bytes, start: int, end: int) -> None:
        scanner = self._scanner
        if scanner is not None:
            if not scanner.is_token(data, start, end):
                scanner.feed(data, start, end)
        elif self._body is not None:
            self._body.feed(data, start, end)
        if self._ids is not None:
            self._look_for_id(self._ids, data, start, end)
        if not self._verbatim and start < end:
            self._pass(data[start:end])

    # net.connections.pool.Receiver

    def body(self, data: bytes) -> None:
        """The next bytes of the message, framing included."""
        if self._verbatim:
            if self._content_began:
                self._write(data)
            else:
                self._write_first(data)
        if not self._content_began and (self.revocable or self._connection is None):
            return  # it is held, or dropped
        now = self._runtime.now()
        if now >= self._progress_at:
            self._report_progress(now)

    def ended(self) -> None:
        """The message is complete; if only the closed connection says so, check it."""
        self._connection = None
        if self._judges_end and not self._seems_complete:
            self.broke(
                UpstreamError(FailureKind.RESET, "the body was ended by closing the connection, and is incomplete")
            )
            return
        if self._body is not None and self._body.shows:
            note_objects(self._runtime, self._ticket, self._body.objects())
        if self.revocable and self._scanner is not None:
            self._write_opening(b"")  # what is held: the end of its first event is missing
        elif self.revocable:
            self._write(b"")
        if self._in_own_chunks:
            self._send(LAST_CHUNK)
        self._finish(Outcome.COMPLETED)

    def broke(self, error: UpstreamError) -> None:
        """The endpoint failed during the response."""
        connection, self._connection = self._connection, None
        if self.revocable:
            self._release_head()
            self._enter(Stage.FINISHED)
            self._owner.relayed(error)
            return
        after = f" after {self._events} events" if self._scanner is not None and self._events else ""
        self._record.error = f"{error.detail}{after}"
        self.timed_out = error.kind is FailureKind.TIMEOUT
        self._break(Outcome.UPSTREAM_BROKE, self._told(), connection)

    def cut(self, why: Outcome) -> None:
        """End early: see Exchange.cut."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            if self.revocable:
                self._write(b"")
            outcome, text = CUTS[why]
            self._break(outcome, LbError(outcome, f"{text} after {self._events} events"), connection)

    def _break(self, outcome: Outcome, client_error: LbError, connection: Connection | None) -> None:
        """End the response so that it does not look complete. An event stream gets an error event, if one can
        follow.
        """
        self.client_reusable = False
        if not self._chunked and self._head.announced is None:
            self._reset(outcome)
            return
        if self._takes_event(connection):
            self._write(chunk(error_event(client_error, self._record.path)))
        self._finish(outcome)
        self._transport.close()

    # The client

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def cancel(self) -> None:
        """Close the endpoint's connection: the client is gone, or a defect ends the exchange. `relayed` is not
        called.
        """
        connection, self._connection = self._connection, None
        self._release_head()
        if self.stage is not Stage.FINISHED:  # a defect at its end
            self._enter(Stage.FINISHED)
        if connection is not None:
            connection.abort()
            self._count()

    def leave(self) -> None:
        """Have the stream go on elsewhere, if it can: its endpoint drains."""

    def say(self, words: bytes) -> None:
        """Send a chunk with a comment of lbproxy's own, if it can stand here."""
        scanner = self._scanner
        is_readable = scanner is not None and not scanner.is_opaque and self._chunked
        is_between = self.stage is Stage.COMMITTED and is_readable and self._takes_event(self._connection)
        if self.stage is Stage.HEAD_SENT or is_between:  # before the commitment all that the client has was whole
            self._send(words)

    @property
    def silent_since(self) -> float:
        """The time from which on nothing came for the client, or up to `PROGRESS_S` before that."""
        return self._progress_at - PROGRESS_S

    # Steps

    def _enter(self, stage: Stage) -> None:
        """The only place where the stage changes."""
        self.stage = stage
        self.revocable = stage is Stage.HELD or stage is Stage.HEAD_SENT

    def _is_refusal(self, data: bytes) -> bool:
        """Whether a stream, of whose body nothing went out, begins with an error, and is dropped for it."""
        status = self._opening.refusal(data)
        if status is None or not self._owner.stream_refused(status):
            return False
        self._release_head()
        self._enter(Stage.FINISHED)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        return True

    def _release_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _look_for_id(self, ids: IdScanner, data: bytes, start: int, end: int) -> None:
        found = ids.feed(data, start, end)
        if found is not None:
            self._runtime.stores(self._ticket, found)
        if ids.done:
            self._ids = None

    def _pass(self, piece: bytes) -> None:
        """Send a piece of payload that is not sent as it came."""
        if piece:
            piece = chunk(piece) if self._chunked else piece
            if self._content_began:
                self._write(piece)
            else:
                self._write_first(piece)

    def _write_first(self, data: bytes) -> None:
        """Write, and note the first byte. Of a stream only an event counts: comments come while the prompt waits."""
        if self.revocable and self._scanner is not None:
            data = self._opening.held + data
            if self._is_refusal(data):
                return
            if self._opening.keeps(data, self._scanner):
                if self.stage is Stage.HEAD_SENT and self._holds_comments:
                    self._send_ahead(self._opening.take())
                return
        self._write_opening(data)

    def _write_opening(self, data: bytes) -> None:
        if self._scanner is None or self._scanner.has_content:
            self._content_began = True
            if self._connection is not None:
                self._connection.began()
            if self._record.first_byte_at is None:
                self._record.first_byte_at = self._runtime.now()
        self._write(data)
        if self._content_began and self._head.status < 300:  # the time of an error shows nothing of the speed
            self._runtime.first_byte(self._ticket)  # last: else its message, in a worker, goes before the bytes

    def _send_head_alone(self) -> None:
        """Send the head alone, without a commitment if another stream could continue after it."""
        self._head_timer = None
        if not (self._chunked and can_continue(self._head)):
            self._write(b"")
            return
        self._enter(Stage.HEAD_SENT)
        self._send_ahead(self._opening.take() if self._holds_comments else self._opening.take_head())
        self._owner.head_sent(self)

    @property
    def _holds_comments(self) -> bool:
        """What is held is comments, and the body of any other stream could follow them."""
        return self._takes_event(self._connection) and not self._events

    def _takes_event(self, connection: Connection | None) -> bool:
        """Whether an event in a chunk of its own can follow what came from the endpoint. `connection`: to it."""
        if self._scanner is None or not self._scanner.at_boundary:
            return False
        return self._in_own_chunks or (self._verbatim and connection is not None and connection.at_boundary)

    @property
    def _in_own_chunks(self) -> bool:
        """The client gets chunks, and not the endpoint's."""
        return self._chunked and not self._verbatim

    def _write(self, data: bytes) -> None:
        if self.revocable:
            self._release_head()
            self._enter(Stage.COMMITTED)
            data = self._opening.take() + data
            self._owner.committed()
        self._send(data)

    def _send_ahead(self, data: bytes) -> None:
        """Send what commits nothing."""
        self._progress_at = self._runtime.now()
        self._send(data)

    def _send(self, data: bytes) -> None:
        self._record.response_bytes += len(data)
        self._transport.write(data)  # which drops it if the connection is closing

    def _report_progress(self, now: float) -> None:
        """Report progress. Of a stream that can be read only events count: comments only show that the server lives."""
        scanner = self._scanner
        events = scanner.events - scanner.preamble_events if scanner is not None and scanner.has_content else 0
        if events > self._progressed or scanner is None or scanner.is_within:
            self._runtime.progress(self._ticket, events - self._progressed)
            self._progressed = events
        self._progress_at = now + PROGRESS_S

    def _reset(self, outcome: Outcome) -> None:
        """Reset the client's connection, as a close would look like the end.

        At once, unlike in `_finish`: with TLS a transport cannot be reset once it was closed, since that sends an
        encrypted close_notify.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()  # the protocol is told in a later turn of the loop
        self._finish(outcome)

    @property
    def _keeps_framing(self) -> bool:
        """The client may get the endpoint's chunks."""
        return True

    def _told(self) -> LbError:
        """What the client is told of a response that broke."""
        return broken(self.timed_out, self._events)

    @property
    def _events(self) -> int:
        return 0 if self._scanner is None else self._scanner.events

    @property
    def _seems_complete(self) -> bool:
        if self._scanner is not None:
            return self._scanner.is_complete
        return self._body is None or self._body.is_complete

    @property
    def is_readable_stream(self) -> bool:
        """It is an event stream, and not compressed."""
        return self._scanner is not None

    @property
    def content_type(self) -> bytes:
        """Of the response: see ResponseHead."""
        return self._head.content_type

    @property
    def usage(self) -> Usage | None:
        if self._scanner is not None:
            return self._scanner.usage
        return None if self._body is None else self._body.usage

    @property
    def usage_form(self) -> UsageForm | None:
        """What its stream shows of what its endpoint writes without being asked; None: nothing."""
        return None

    @property
    def written(self) -> tuple[int, int]:
        """Events that stand for tokens, and bytes of text, of its endpoint's stream; zeros: unknown."""
        scanner = self._scanner
        return (0, 0) if scanner is None or scanner.is_opaque else (scanner.token_events, scanner.text_bytes)

    def generated(self, rate: TextRate) -> int:
        """About how many tokens the endpoint has written so far, by what it sent: at least one for each event."""
        scanner = self._scanner
        if scanner is not None and not scanner.is_opaque:
            return rate.tokens(scanner.token_events, scanner.text_bytes)
        if self._body is not None:
            return ceil(self._body.size / rate.bytes_per_token)
        size = self._record.response_bytes
        is_text = self.content_type.startswith(b"text/") and not self._head.encoded
        return ceil(size / rate.bytes_per_token) if is_text else size  # compressed, a token has about one byte

    @property
    def is_ours(self) -> bool:
        return False

    @property
    def has_moved(self) -> bool:
        return False

    def share(self, usage: Usage) -> Usage:
        """What its endpoint used, of what the response did."""
        return usage

    def _count(self) -> None:
        if self._scanner is not None:
            self._record.events = self._scanner.events
            if not self.timed_out:  # what arrived before that silence is no sign of life now
                self._report_progress(self._runtime.now())

    def _finish(self, outcome: Outcome) -> None:
        """End before the client's transport is closed: its loss would end the exchange as the client's doing."""
        self._release_head()
        self._enter(Stage.FINISHED)
        self._count()
        self._owner.relayed(outcome)


def note_objects(runtime: RequestRuntime, ticket: Ticket, found: Iterable[str]) -> None:
    """Note which objects the endpoint of a request has. Of those that are known nothing is new."""
    for one in found:
        if runtime.stored(one) is None:
            runtime.stores(ticket, one)


def note_stored(
    runtime: RequestRuntime, ticket: Ticket, request: ClientRequest, head: ResponseHead, body: bytes
) -> None:
    """Note what a complete response shows its endpoint to have."""
    if not ticket.request.stores or head.status >= 300:
        return
    if request.route.flatten is None:
        if is_json(head):
            note_objects(runtime, ticket, find_objects(body))
    elif (stored := find_response_id(body)) is not None:
        runtime.stores(ticket, stored)


def can_continue(head: ResponseHead) -> bool:
    """Whether it is a stream like all others: after the head of another, in chunks, its body can follow."""
    return head.status == 200 and b"text/event-stream" in head.content_type and not head.encoded


def end_after_head(client: Client, record: RequestRecord, error: LbError, by: HeadSender) -> None:
    """Send an error event to a client that has the head of a stream; its connection closes."""
    if error.outcome in CUTS:
        record.outcome, text = CUTS[error.outcome]
        client_error = LbError(record.outcome, f"{text} after {record.events} events")
    else:
        # A retry that lbproxy refuses (queue full, waited too long) says so; its client may try again later.
        ours = by.is_ours or error.outcome is Outcome.INTERNAL_ERROR or error.outcome.value.status == 429
        record.outcome = error.outcome if ours else Outcome.UPSTREAM_BROKE
        client_error = error if ours else broken(error.outcome is Outcome.UPSTREAM_TIMEOUT, record.events)
        if by.has_moved and not ours:
            client_error = LbError(client_error.outcome, f"{client_error.message}; not continued: {error.message}")
    _end_with(client, record, error_event(client_error, record.path))


def end_with_response(client: Client, record: RequestRecord, status: int, body: bytes, by: HeadSender) -> None:
    """The same, of a response that cannot continue that stream. An endpoint's 4xx is complete, as it would be alone;
    what it says to a request that goes on there is not for the client.
    """
    if by.has_moved:
        record.error = f"returned {status} instead of going on"
        end_after_head(client, record, LbError(Outcome.UPSTREAM_RESET, "the next server refused"), by)
        return
    record.error = f"returned {status}, which cannot continue a stream"
    record.outcome = Outcome.COMPLETED if 400 <= status < 500 else Outcome.UPSTREAM_BROKE
    _end_with(client, record, event_of_response(status, body, record.path))


def _end_with(client: Client, record: RequestRecord, event: bytes) -> None:
    data = chunk(event)  # and no last one: the stream is not complete
    record.response_bytes += len(data)
    if client.transport is not None and not client.transport.is_closing():
        client.transport.write(data)
        client.transport.close()


LAST_CHUNK: Final = b"0\r\n\r\n"


_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(1024)]
"""The first line of a chunk, by its size. To format one takes 750 instructions."""


def chunk(payload: bytes) -> bytes:
    """The payload, not empty, as a chunk."""
    size = len(payload)
    return (_SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size) + payload + b"\r\n"


def broken(timed_out: bool, events: int) -> LbError:
    """The error that a client gets in the middle of a stream."""
    if timed_out:
        return LbError(Outcome.UPSTREAM_TIMEOUT, f"the model server sent nothing for too long, after {events} events")
    return LbError(Outcome.UPSTREAM_RESET, f"upstream connection lost after {events} events")


def stream_scanner(head: ResponseHead, route: Route, *, watch_finish: bool) -> LineScanner | EventScanner | None:
    """What reads a stream; None: it is compressed."""
    if head.encoded:
        return None
    if b"ndjson" in head.content_type:
        return LineScanner()
    return EventScanner(
        watch_finish=watch_finish,
        skip_preamble=route.skips_preamble,
        measures=True,
        native=route.is_native,
        trusts=route.flatten is None,
    )


def is_stream(head: ResponseHead, route: Route) -> bool:
    """Whether the body is one of events, or of an engine's JSON lines."""
    return b"text/event-stream" in head.content_type or (route.engine is not None and b"ndjson" in head.content_type)


def is_json(head: ResponseHead) -> bool:
    """Whether the body is one readable JSON text."""
    kind = head.content_type
    return (kind == b"application/json" or kind.startswith(b"application/json;")) and not head.encoded
