# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on at another server when its own dies: which may, with what request, and how it is relayed.

A relay that breaks after the commitment asks its exchange for a move. Until then the client has whole events in chunks
of lbproxy's own, so the next server's may follow whatever the first one sent last. That next attempt is like any other
that has the head of an earlier one: it may fail and be repeated before its first new event, which commits it again. It
asks twice: how many tokens the text so far has, as servers send several in one event, and then for the rest of it. If
nothing but the usage is missing, another server is asked for the numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Final

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.server_info import engine_of
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.core.responses.continued import (
    NotContinuedError,
    continued,
    count_request,
    held_back,
    read_continued,
    read_count,
    stops_of,
    tokens_left,
    wants_usage,
)
from lbproxy.core.responses.joined import JoinedStream
from lbproxy.core.responses.text_rate import TextRate
from lbproxy.core.responses.unasked import UnaskedUsage, UsageForm
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.call import Call, Called, Result
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.exchange.relay import (
    LAST_CHUNK,
    HeadSender,
    Relay,
    RequestOwner,
    Stage,
    can_continue,
    chunk,
)
from lbproxy.proxy.exchange.used import AskedRelay, expected_prompt_tokens
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.reading import as_named_by

ENGINES: Final = frozenset({"vllm", "sglang", "llamacpp"})
"""Those that are known to go on with a text."""
MAX_MOVES: Final = 10
"""Each after new text: a request that ends each server is not sent to all of them."""

MAX_IDS_BYTES: Final = 2 << 20
"""Of the list of the tokens of a text: that of a longer one is not read."""
HELD_BYTES: Final = 16 << 10
"""So much of the text is not counted: see LARGE_BODY_BYTES."""


class Continuation:
    """Of one request, whose response may go on at another server."""

    def __init__(self, exchange: RequestOwner, ticket: Ticket, shared: Exchanger) -> None:
        """When its first response begins."""
        self.exchange = exchange
        self._shared = shared
        self._first = exchange.request, exchange.placed
        self.ticket = ticket
        """Of the server whose stream is relayed, or was."""
        self._is_chat = exchange.request.route.role_events > 0
        self.joined = JoinedStream(chat=self._is_chat)
        self.moves = 0
        self.charged = 0
        """Tokens of the response that count with servers before the present one."""
        self.is_counted = False
        """A server has counted all tokens of the response, or it has as many as it may have."""
        self._fields: dict[str, object] | str | None = None
        """Of the request, once they are read, which may take 20 ms; or why they cannot be."""
        self._text = ""
        """What came before the last move, as the next server is told it."""
        self.counts = False
        """The next server is asked for the number of its tokens first."""
        self._uncounted = ["prompt", "text"]
        """What no server was asked to count yet when only the usage was missing."""

    def obstacle(self) -> str | None:
        """Why the stream cannot go on elsewhere; None: it can."""
        joined = self.joined
        if not goes_on(self.ticket.placed_state):
            return "its engine is not known to go on with a text"
        if joined.obstacle is None and self.moves >= MAX_MOVES:
            return f"it moved {MAX_MOVES} times"
        try:
            self._read()
        except NotContinuedError as why:
            return str(why)
        return joined.obstacle

    def move(self, error: UpstreamError, relay: Relay) -> str | None:
        """The stream of a relay broke, or is to leave its server: have it go on elsewhere. Returns why that cannot be;
        None: it does. What a server did that is dead costs no budget, as its load is gone.
        """
        why = self.obstacle()
        if why is None and error.kind is not FailureKind.RESET:
            asked = UpstreamError(FailureKind.STRANDED, error.detail)
            if not self._shared.runtime.after_failure(self.ticket, asked, ()).retry:
                why = "no other endpoint is left, or no budget for it"
        if why is None:
            ended = Outcome.CLIENT_CLOSED if error.kind is FailureKind.STRANDED else Outcome.UPSTREAM_BROKE
            written = relay.generated(self._shared.used.rate(self.exchange.record, self.ticket))
            usage = Usage(0, 0, max(0, written - self.charged), is_estimate=True)  # the prompt: with the last server
            self.charged = max(self.charged, written)
            request, placed = self._next()
            self.exchange.go_on(request, placed, error, ended, usage)
        return why

    def _next(self) -> tuple[ClientRequest, InferenceRequest]:
        """The request for another server, without its body."""
        joined, (request, placed) = self.joined, self._first
        fields = self._read()
        held = held_back(fields) if is_engine(self.ticket.placed_state, "vllm") else 0
        self._text = joined.move(stops_of(fields), held, exactly=fields.get("temperature") == 0)
        self.moves += 1
        self.counts = bool(self._text)
        # The balancer sees the same prompt, which the client's usage tells of, too. Its first byte is not due any more.
        left = tokens_left(fields, joined.tokens)
        placed = placed._replace(max_tokens=left, deadline=None, splittable=False, fallback_after_s=None)
        return request._replace(pieces=(), naming=None, fallbacks=()), placed

    def count(self, ticket: Ticket) -> Call:
        """Have an endpoint count the tokens of the text: see RequestOwner.counted."""
        self.counts = False
        return self._count(ticket.placed_state, self.joined.counted, self.joined.count, self.exchange.counted)

    def count_usage(self, then: Callable[[], None]) -> Call | None:
        """Have a server count what the client's usage needs and none told, one number after the other. None: nothing is
        left that one can count.
        """
        joined, placed, ticket = self.joined, self.exchange.placed, self.ticket
        if not (self._uncounted and joined.lacks_usage and wants_usage(self._read())):
            return None
        usable = chain.from_iterable(self._shared.runtime.serving.by_tier(placed.model, placed.max_tier))
        died = None if joined.is_stopped else ticket.placed_state.endpoint.uid
        other = next((one for one in usable if goes_on(one) and one.endpoint.uid != died), None)
        if other is None:
            return None
        if self._uncounted.pop() == "prompt":
            return self._count(other, None, joined.count_prompt, then)
        if joined.finish_reason != "stop" or not joined.generated:  # otherwise it has as many tokens as it may have
            return self.count_usage(then)
        return self._count(other, joined.generated, self._count_all, then)

    def _count_all(self, tokens: int) -> None:
        self.is_counted = self.joined.count_all(tokens)

    def _count(
        self, state: EndpointState, text: str | None, note: Callable[[int], None], then: Callable[[], None]
    ) -> Call:
        """Have an endpoint count the tokens of a text, or of the prompt (None): note it, if it does, and go on."""
        exchange, shared, endpoint = self.exchange, self._shared, state.endpoint
        body = count_request(self._read(), text, name="content" if is_engine(state, "llamacpp") else "prompt")
        request = as_named_by(endpoint, exchange.request._replace(target="/tokenize", body=body, naming=None))
        forwarded = exchange.client.peer.lines(request.fields, http10=request.http10)
        head = request.head_for(endpoint, exchange.record.attempt_id, forwarded, max_tier=exchange.placed.max_tier)

        def counted(result: Result) -> None:
            tokens = read_count(result.body) if isinstance(result, Called) and result.head.status == 200 else None
            if tokens is not None:
                note(tokens)
            then()

        limits = shared.limits._replace(response_s=shared.limits.connect_s)
        origin = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
        done = lambda result: exchange.guarded(counted, result)  # noqa: E731
        call = Call(shared.connections, origin, limits, MAX_IDS_BYTES, done)
        call.start("POST", head, request.body)
        return call

    def rest(self, request: ClientRequest) -> ClientRequest:
        text, tokens = self._text, self.joined.tokens
        return request._replace(body=continued(self._read(), chat=self._is_chat, text=text, tokens=tokens))

    @property
    def has_all(self) -> bool:
        """Its server had finished the response: what is missing are events that tell so, and the usage."""
        joined = self.joined
        if joined.obstacle is not None:
            return False
        try:
            left = tokens_left(self._read(), joined.tokens)
        except NotContinuedError:
            return False
        return joined.finish_reason is not None or joined.is_over or (left is not None and left <= 0)

    def ending(self) -> bytes:
        """What is missing of a response that has all else."""
        joined, fields = self.joined, self._read()
        left = tokens_left(fields, joined.tokens)
        if left is not None and (joined.finish_reason == "length" or left <= 0):
            joined.tokens += left  # some came together, or were counted apart
            self.is_counted = True
        return joined.ending(round(expected_prompt_tokens(self.ticket)) if wants_usage(fields) else None)

    def _read(self) -> dict[str, object]:
        if self._fields is None:
            try:
                self._fields = read_continued(self._first[0].in_one_piece().body, chat=self._is_chat)
            except NotContinuedError as why:
                self._fields = str(why)
        if isinstance(self._fields, str):
            raise NotContinuedError(self._fields)
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
        Relay.__init__(self, head, connection, ticket, runtime, exchange)
        continuation.ticket = ticket
        self.continuation = continuation
        self._joined = continuation.joined
        self._joined.begin()
        head.announced = None
        usage = exchange.request.usage
        self._unasked = None if usage is None else UnaskedUsage(usage)
        self._events_before = exchange.record.events
        """Of the servers before."""
        self._given = self._joined.given
        self._held = self._joined.kept_bytes
        """Bytes of text that are counted."""
        self._call: Call | None = None
        """Another server counts what the usage tells."""
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
        if self._unasked is not None and not joined.is_text:
            piece = self._unasked.feed(piece)
        if joined.kept_bytes - self._held > HELD_BYTES:
            self._hold()
        self._pass(piece)
        connection = self._connection
        if connection is not None and (joined.failure is not None or joined.is_stopped):
            connection.abort()
            self._connection = None
            if joined.failure is None:
                self.end()
            else:
                self.broke(UpstreamError(FailureKind.RESET, joined.failure))

    def _hold(self) -> None:
        size, self._held = self._joined.kept_bytes - self._held, self._joined.kept_bytes
        if not self.continuation.exchange.hold(size):
            self._joined.give_up("there is no memory for its text")

    def ended(self) -> None:
        self._connection = None
        self._joined.read()
        if self._joined.obstacle is not None:
            rest = self._joined.end()
            self._pass(rest if self._unasked is None else self._unasked.feed(rest) + self._unasked.end())
        if self.stage is Stage.FINISHED:
            return  # the rest was an error, for which it is dropped
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
        if self.continuation.has_all:
            self.end()
            return
        self._release_head()
        self._count()
        why = self.continuation.move(error, self)
        if why is not None:
            self._why = why
            Relay.broke(self, UpstreamError(error.kind, f"{error.detail}; not continued: {why}"))

    def leave(self) -> None:
        connection, joined = self._connection, self._joined
        if connection is None or self.revocable:
            return
        joined.read()
        if joined.is_over or joined.finish_reason is not None or self.continuation.obstacle():
            return
        error = UpstreamError(FailureKind.STRANDED, "the endpoint drains")
        if self.continuation.move(error, self) is None:
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

    def end(self) -> None:
        """End where the server did not. What the usage tells is counted first; it is estimated if nobody does that."""
        self._call = self.continuation.count_usage(self.end)
        if self._call is None:
            self.complete(self.continuation.ending())

    def cut(self, why: Outcome) -> None:
        if self._call is None:
            Relay.cut(self, why)
        else:
            self._call.cancel()
            self.complete(self.continuation.ending())

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
        Relay.cancel(self)

    def complete(self, ending: bytes) -> None:
        self._unasked = None  # its server did not say what it writes at the end
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
    def usage_form(self) -> UsageForm | None:
        return None if self._unasked is None else self._unasked.learned

    def generated(self, rate: TextRate) -> int:
        joined = self._joined
        if self.continuation.is_counted:
            return joined.tokens
        return max(joined.tokens, self._given + Relay.generated(self, rate))

    @property
    def has_moved(self) -> bool:
        return self.continuation.moves > 0

    def share(self, usage: Usage) -> Usage:
        completion, before = usage.completion_tokens, self.continuation.charged
        return usage if completion is None else usage._replace(completion_tokens=max(0, completion - before))


def moved(by: HeadSender | None) -> JoinedRelay | None:
    """Whose stream is to go on elsewhere, if `by` sent its head."""
    return by if isinstance(by, JoinedRelay) and by.has_moved else None


def relay_for(
    exchange: RequestOwner, head: ResponseHead, connection: Connection, ticket: Ticket, shared: Exchanger
) -> Relay:
    if not (exchange.request.continues and can_continue(head)):
        kind = Relay if exchange.request.usage is None or not can_continue(head) else AskedRelay
        return kind(head, connection, ticket, shared.runtime, exchange)
    earlier = moved(exchange.head_sent_by)
    continuation = Continuation(exchange, ticket, shared) if earlier is None else earlier.continuation
    return JoinedRelay(head, connection, ticket, shared.runtime, continuation)
