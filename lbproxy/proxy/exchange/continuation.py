# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on at another server when its own dies: which may, with what request, and how it is relayed.

A relay that breaks after the commitment asks its exchange for a move. Until then the client has whole events in chunks
of lbproxy's own, so the next server's may follow whatever the first one sent last. That next attempt is like any other
that has the head of an earlier one: it may fail and be repeated before its first new event, which commits it again.
"""

from __future__ import annotations

from typing import Final, Protocol

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.server_info import engine_of
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.core.responses.continued import (
    NotContinuedError,
    continued,
    held_back,
    read_continued,
    stops_of,
    tokens_left,
    wants_usage,
)
from lbproxy.core.responses.joined import MAX_MOVES, JoinedStream
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.exchange.relay import LAST_CHUNK, HeadSender, Relay, RelayOwner, Stage, can_continue, chunk
from lbproxy.proxy.exchange.used import expected_prompt_tokens
from lbproxy.proxy.request.client_request import ClientRequest

ENGINES: Final = frozenset({"vllm", "sglang", "llamacpp"})
"""Those that are known to go on with a text."""


HELD_BYTES: Final = 16 << 10
"""So much of the text is not counted: see LARGE_BODY_BYTES."""


class StreamOwner(RelayOwner, Protocol):
    """The exchange whose stream may go on elsewhere."""

    request: ClientRequest
    placed: InferenceRequest
    record: RequestRecord
    head_sent_by: HeadSender | None

    def go_on(self, request: ClientRequest, placed: InferenceRequest, error: UpstreamError, ended: Outcome) -> None:
        """End the attempt, which failed so, and begin another with this request for the rest of the response."""

    def hold(self, size: int) -> bool:
        """Count so many more bytes of memory. Returns whether there is room."""


class Continuation:
    """Of one request, whose response may go on at another server."""

    def __init__(self, exchange: StreamOwner) -> None:
        """When its first response begins."""
        self.exchange = exchange
        self._first = exchange.request, exchange.placed
        self._is_chat = exchange.request.route.role_events > 0
        self.joined = JoinedStream(chat=self._is_chat)
        self._fields: dict[str, object] | None = None

    def obstacle(self, ticket: Ticket) -> str | None:
        """Why the stream cannot go on elsewhere; None: it can."""
        joined = self.joined
        if not goes_on(ticket.placed_state):
            return "its engine is not known to go on with a text"
        if joined.obstacle is None and joined.moves >= MAX_MOVES:
            return f"it moved {MAX_MOVES} times"
        try:
            self._read()
        except NotContinuedError as why:
            return str(why)
        return joined.obstacle

    def move(self, ticket: Ticket, error: UpstreamError, runtime: RequestRuntime) -> str | None:
        """The stream broke, or is to leave its server: have it go on elsewhere. Returns why that cannot be; None: it
        does. What a server did that is dead costs no budget, as its load is gone.
        """
        why = self.obstacle(ticket)
        if why is None and error.kind is not FailureKind.RESET:
            asked = UpstreamError(FailureKind.STRANDED, error.detail)
            if not runtime.after_failure(ticket, asked, ()).retry:
                why = "no other endpoint is left, or no budget for it"
        if why is None:
            request, placed = self._next(ticket)
            ended = Outcome.CLIENT_CLOSED if error.kind is FailureKind.STRANDED else Outcome.UPSTREAM_BROKE
            self.exchange.go_on(request, placed, error, ended)
        return why

    def _next(self, ticket: Ticket) -> tuple[ClientRequest, InferenceRequest]:
        """The request for another server."""
        joined, (request, placed) = self.joined, self._first
        fields = self._read()
        held = held_back(fields) if is_engine(ticket.placed_state, "vllm") else 0
        text, tokens = joined.move(stops_of(fields), held, exactly=fields.get("temperature") == 0)
        body = continued(fields, chat=self._is_chat, text=text, tokens=tokens)
        left = tokens_left(fields, tokens)
        # The balancer sees the same prompt, which the client's usage tells of, too. Its first byte is not due any more.
        placed = placed._replace(max_tokens=left, deadline=None, splittable=False, fallback_after_s=None)
        return request._replace(body=body, pieces=(), naming=None, fallbacks=()), placed

    def ending(self, ticket: Ticket) -> bytes | None:
        """What is missing of a response that its server had finished; None: something else is."""
        joined = self.joined
        if joined.obstacle is not None:
            return None
        try:
            fields = self._read()
        except NotContinuedError:
            return None
        left = tokens_left(fields, joined.tokens)
        if joined.finish_reason is None and not joined.is_over and (left is None or left > 0):
            return None
        return joined.ending(round(expected_prompt_tokens(ticket)) if wants_usage(fields) else None)

    def _read(self) -> dict[str, object]:
        if self._fields is None:
            self._fields = read_continued(self._first[0].in_one_piece().body, chat=self._is_chat)
        return self._fields


def goes_on(state: EndpointState) -> bool:
    """Whether an endpoint is known to go on with a text."""
    return is_engine(state, *ENGINES)


def is_engine(state: EndpointState, *engines: str) -> bool:
    """Whether an endpoint is said to be one of these, or says so itself."""
    return state.endpoint.engine in engines or engine_of(list((state.models or {}).values())) in engines


class JoinedRelay(Relay):
    """The relay of a stream that may go on elsewhere, or does."""

    def __init__(
        self,
        head: ResponseHead,
        connection: Connection,
        ticket: Ticket,
        runtime: RequestRuntime,
        continuation: Continuation,
    ) -> None:
        exchange = continuation.exchange
        Relay.__init__(self, head, connection, ticket, exchange.record, runtime, exchange)
        self.continuation = continuation
        self._joined = continuation.joined
        self._events_before = exchange.record.events
        """Of the servers before."""
        self._held = self._joined.text_bytes
        """Bytes of text that are counted."""
        self._why: str | None = None
        """Why it does not go on elsewhere."""

    @property
    def _keeps_framing(self) -> bool:
        return False

    def feed(self, data: bytes, start: int, end: int) -> None:
        scanner, joined = self._scanner, self._joined
        if scanner is not None and not scanner.is_token(data, start, end):
            scanner.feed(data, start, end)
        if self._ids is not None:
            self._look_for_id(self._ids, data, start, end)
        piece = joined.feed(data[start:end])
        if joined.text_bytes - self._held > HELD_BYTES:
            self._hold()
        if piece:
            piece = chunk(piece) if self._chunked else piece
            if self._content_began:
                self._write(piece)
            else:
                self._write_first(piece)
        connection = self._connection
        if connection is not None and (joined.failure is not None or joined.is_stopped):
            connection.abort()
            self._connection = None
            if joined.failure is None:
                self._complete(joined.ending(None))
            else:
                self.broke(UpstreamError(FailureKind.RESET, joined.failure))

    def _hold(self) -> None:
        """Count the text that is kept."""
        size, self._held = self._joined.text_bytes - self._held, self._joined.text_bytes
        if not self.continuation.exchange.hold(size):
            self._joined.give_up("there is no memory for its text")

    def ended(self) -> None:
        self._connection = None
        self._joined.read()
        if self._joined.is_over or self._joined.obstacle is not None or self._head.status != 200:
            Relay.ended(self)
        else:
            self.broke(UpstreamError(FailureKind.RESET, "the stream ended before its end"))

    def broke(self, error: UpstreamError) -> None:
        self._joined.read()
        if self.revocable:
            Relay.broke(self, error)
            return
        self._connection = None
        ending = self.continuation.ending(self._ticket)
        if ending is not None:
            self._complete(ending)
            return
        self._release_head()
        self._count()
        why = self.continuation.move(self._ticket, error, self._runtime)
        if why is not None:
            self._why = why
            Relay.broke(self, UpstreamError(error.kind, f"{error.detail}; not continued: {why}"))

    def leave(self) -> None:
        connection, joined = self._connection, self._joined
        if connection is None or self.revocable:
            return
        joined.read()
        if joined.is_over or joined.finish_reason is not None or self.continuation.obstacle(self._ticket):
            return
        error = UpstreamError(FailureKind.STRANDED, "the endpoint drains")
        if self.continuation.move(self._ticket, error, self._runtime) is None:
            connection.abort()
            self._connection = None
            self._enter(Stage.FINISHED)
            self._count()

    def _told(self) -> LbError:
        told = Relay._told(self)
        return LbError(told.outcome, f"{told.message}; not continued: {self._why}")

    @property
    def _events(self) -> int:
        return self._events_before + (0 if self._scanner is None else self._scanner.events)

    def _complete(self, ending: bytes) -> None:
        """End where the server did not: what is missing is known."""
        if self._chunked:
            ending = (chunk(ending) if ending else b"") + LAST_CHUNK
        self._send(ending)
        self._finish(Outcome.COMPLETED)

    def _takes_event(self, connection: Connection | None) -> bool:
        return self._chunked and self._joined.is_whole

    def _count(self) -> None:
        Relay._count(self)
        self._record.events += self._events_before

    @property
    def usage(self) -> Usage | None:
        said = None if self._scanner is None else self._scanner.usage
        return None if said is None else self._joined.joined(said)

    @property
    def text_bytes(self) -> int:
        return self._joined.text_bytes

    def generated(self, bytes_per_token: float) -> int:
        return self._joined.tokens


def relay_for(
    exchange: StreamOwner, head: ResponseHead, connection: Connection, ticket: Ticket, runtime: RequestRuntime
) -> Relay:
    """What relays a response that begins."""
    if not (exchange.request.continues and can_continue(head)):
        return Relay(head, connection, ticket, exchange.record, runtime, exchange)
    earlier = exchange.head_sent_by
    continuation = earlier.continuation if isinstance(earlier, JoinedRelay) else Continuation(exchange)
    return JoinedRelay(head, connection, ticket, runtime, continuation)
