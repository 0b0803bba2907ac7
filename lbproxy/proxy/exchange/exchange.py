"""One request from its place in the balancer to the end of its response: attempts, the commit point, the relay.

Theory of operation. An `Exchange` is driven by callbacks alone: of the runtime (a place was found), of the pool (a
connection was made) and of that connection (its response arrived, or it broke). No task waits for it, which saves most
of the cost of a request. Each attempt places, sends, and ends with a response head or a failure. After a failure, or a
response that another endpoint may do better, the balancer decides whether to retry. An accepted head is passed to a
`Relay`; the first bytes of its body are the commit point, after which nothing is retried. `step` is what the exchange
does now; `proxy.exchange.steps` has the table. Invariants:

- It ends exactly once, in `finish`, whatever happens; every ticket is closed by then.
- What is in progress in a step (`_work`: a dial, a connection, a relay, a timer) is released when the step ends.
- Each attempt sends the same body; the head differs by endpoint. If a response's head was sent (`_head_sent_by`), only
  the body of an event stream may follow.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias, TypeVarTuple

from lbproxy.config.tree import Settings
from lbproxy.core.engines.orca import read_field
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import STATUS_FAILURES, FailureKind, UpstreamError
from lbproxy.core.requests.sse import find_response_id, read_usage
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.exchanger import LARGE_BODY_BYTES, Exchanger
from lbproxy.proxy.exchange.failures import NO_FAILURES, FailedAttempts
from lbproxy.proxy.exchange.relay import Client, Relay, can_continue, end_after_head, is_json
from lbproxy.proxy.exchange.steps import (
    BACKING_OFF,
    DIALLING,
    FINISHED,
    LOOKING,
    PLACING,
    READING,
    RELAYING,
    SENT,
    Step,
)
from lbproxy.proxy.request.client_request import ClientRequest, rank_is_gone
from lbproxy.proxy.request.headers import client_head
from lbproxy.proxy.request.own_responses import refusal

logger = logging.getLogger("lbproxy")
Arguments = TypeVarTuple("Arguments")
Work: TypeAlias = asyncio.Task[None] | Connection | Relay | asyncio.TimerHandle | None


class Exchange(ABC):
    """One request; a net.connections.pool.Receiver until it accepts a response. Subclasses refuse and end it.

    Defaults live in the class until they are overwritten: one object is made for every request.
    """

    request: ClientRequest
    """The client's request. Set by `start`."""
    placed: InferenceRequest
    """The request as the balancer sees it. Set by `start`."""
    cors = ""
    """Field lines of the response that replace the endpoint's own; "" = the settings allow no origins."""
    switches: bool = False
    """See net.connections.pool.Receiver."""
    step = READING
    _work: Work
    """What is in progress in this step: a dial, the connection that carries the request, a relay, a timer."""
    _ticket: Ticket | None = None
    """The current attempt."""
    _head_sent_by: Relay | None = None
    """The relay, of any attempt, that sent the head of a stream to the client, without any of a body."""
    _models_refreshed = False
    """The endpoints were asked again for their models."""
    _failed: FailedAttempts = NO_FAILURES

    def __init__(self, shared: Exchanger, client: Client, record: RequestRecord, *, keep_alive: bool) -> None:
        self._shared = shared
        self._work = None  # not in the class: mypyc ignores a default of None for a union of other types
        self.client = client
        self.record = record
        self.keep_alive = keep_alive
        """The client's connection may serve another request."""

    @property
    def settings(self) -> Settings:
        """The settings under which the request is served."""
        return self._shared.settings

    @abstractmethod
    def _body_released(self) -> None:
        """The request's body is not held any more."""

    @abstractmethod
    def _refuse(self, error: LbError) -> bool:
        """Send an error; nothing went to the client yet. Returns whether its connection can be used again."""

    @abstractmethod
    def _ended(self, reusable: bool) -> None:
        """The exchange is finished and its record complete. `reusable`: the client's connection can be used again."""

    # The end

    def refuse(self, error: LbError) -> None:
        """End with an error; nothing went to the client yet, or the head of a stream alone."""
        if self._head_sent_by:
            end_after_head(self.client, self.record, error)
            self.finish(False)
        else:
            self.finish(self._refuse(error))

    def finish(self, reusable: bool) -> None:
        """End the exchange. Only the first call counts."""
        if self.step is not FINISHED:
            self._enter(FINISHED)
            self._head_sent_by = None  # a reference back to this exchange
            self._ended(reusable)

    def defect(self) -> None:
        """End because of a defect of lbproxy; call it while the exception is handled."""
        logger.exception("request %s failed", self.record.id)
        if self.step is FINISHED:
            return
        self._abandon(Outcome.INTERNAL_ERROR)
        self.keep_alive = False
        if self.record.response_bytes and not self._head_sent_by:
            self.record.outcome = Outcome.INTERNAL_ERROR
            self.finish(False)
        else:
            self.refuse(LbError(Outcome.INTERNAL_ERROR))

    def client_disconnected(self) -> None:
        """The client's connection is lost: release everything at once."""
        if self.step is not FINISHED:
            self.record.outcome = Outcome.CLIENT_CLOSED
            self._abandon(Outcome.CLIENT_CLOSED)
            self.finish(False)

    def cut(self, why: Outcome) -> None:
        """End early: lbproxy stops (DRAINING) or has no memory (OVERLOADED). The client is told, as far as possible."""
        if self.step is RELAYING:
            self._relaying.cut(why)
        elif self.step is not FINISHED:
            self._abandon(why)
            self.refuse(LbError(why))

    # Steps

    def _enter(self, step: Step, work: Work = None) -> None:
        """The only place where the step changes. What was in progress has ended, or was released."""
        self.step = step
        self._work = work

    def _release_work(self) -> None:
        """Release what is in progress in this step, which is about to change."""
        work, self._work = self._work, None
        if isinstance(work, Connection):
            work.abort()
        elif isinstance(work, Relay):
            work.release()
        elif work is not None:
            work.cancel()

    @property
    def _relaying(self) -> Relay:
        """The relay, while RELAYING."""
        work = self._work
        assert isinstance(work, Relay)
        return work

    def _abandon(self, outcome: Outcome) -> None:
        self._release_work()
        if self._ticket is not None:
            self._shared.runtime.close(self._ticket, outcome)

    # An attempt

    def start(self, request: ClientRequest, placed: InferenceRequest) -> None:
        """Send the request to an endpoint. The exchange may be finished when this returns."""
        self.request = request
        self.placed = placed
        self._place()

    def _place(self) -> None:
        """Begin an attempt: request a place."""
        self._enter(PLACING)
        settled = lambda ticket: self._guarded(self._settled, ticket)  # noqa: E731
        runtime, record, failed, again = self._shared.runtime, self.record, self._failed, self._ticket is not None
        self._ticket = ticket = runtime.submit(self.placed, record, failed.endpoints, settled, failed.suspect, again)
        if ticket.wait is not None:
            record.note_wait(ticket)
        if ticket.state is not TicketState.WAITING:
            self._settled(ticket)
        elif record.trace is not None:
            record.trace.waiting_since = ticket.submitted_at

    def _settled(self, ticket: Ticket) -> None:
        """The ticket was placed, or closed without a place."""
        if ticket.placed_on is None:
            if ticket.outcome is Outcome.MODEL_NOT_FOUND and not self._models_refreshed:
                self._models_refreshed = True
                if self._shared.runtime.look_for_models(lambda: self._guarded(self._place_after_look)):
                    self._enter(LOOKING)
                    return
            self.refuse(self._refusal(ticket))
            return
        assert ticket.placed_at is not None
        endpoint, record = ticket.placed_on.endpoint, self.record
        record.attempts += 1
        record.endpoint = endpoint.name
        record.placed_at = ticket.placed_at
        record.queue_s += ticket.placed_at - ticket.submitted_at
        if record.trace is not None:
            record.trace.placed(endpoint, ticket.submitted_at, ticket.placed_at)
        if ticket.decision is not None:
            record.note_decision(ticket.decision)
            if ticket.placement is not None:
                record.predicted_cached_tokens = ticket.placement.cached_tokens
        origin = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
        connection = self._shared.connections.take(origin) if ticket.request.repeatable else None  # may be closed
        if connection is not None:
            self._send(ticket, connection)
        else:
            self._dial(ticket)

    def _place_after_look(self) -> None:
        if self.step is LOOKING:
            self._place()

    def _dial(self, ticket: Ticket) -> None:
        endpoint = ticket.placed_state.endpoint
        origin = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
        shared = self._shared
        dial = shared.connections.dial(
            origin, shared.limits.connect_s, lambda result: self._guarded(self._dialled, result)
        )
        self._enter(DIALLING, dial)

    def _dialled(self, result: Connection | UpstreamError) -> None:
        assert self._ticket is not None
        if isinstance(result, UpstreamError):
            self.broke(result)
        else:
            self._send(self._ticket, result)

    def _send(self, ticket: Ticket, connection: Connection) -> None:
        self._enter(SENT, connection)
        assert ticket.placed_on is not None
        request, state, record = self.request, ticket.placed_on, self.record
        forwarded = self.client.peer.lines(request.fields, http10=request.http10)
        head = request.head_for(state.endpoint, record.id, forwarded, ask_load=state.asks_load, trace=record.trace)
        connection.send(request.method, head, request.body, self, self._shared.limits)

    # net.connections.pool.Receiver, until a response is accepted

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        """A short response arrived in one piece: do what `head` and a relay do, in one step."""
        try:  # like `_guarded`, which costs more
            self._take_complete(head, body)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            self.defect()

    def _take_complete(self, head: ResponseHead, body: bytes) -> None:
        ticket, record, runtime = self._ticket, self.record, self._shared.runtime
        assert ticket is not None
        self._work = None  # the connection is back in the pool
        if head.load_report:
            head = self._handle_load_report(head, ticket)
        if head.status in STATUS_FAILURES and self._retry_elsewhere(head.status, body):
            return
        if self._head_sent_by:
            self._cannot_continue(head, ticket)
            return
        reusable = self.keep_alive and not self.request.http10
        response = client_head(head, self._own_fields(), chunked=False, keep_alive=reusable) + body
        record.status = head.status
        record.outcome = Outcome.COMPLETED
        record.response_bytes = len(response)
        now = runtime.now()
        if body:
            record.first_byte_at = now
        transport = self.client.transport
        if transport is not None and not transport.is_closing():
            transport.write(response)
        usage = read_usage(body) if is_json(head) else None
        if usage is not None:
            usage = self._note_usage(ticket, usage)
        if ticket.request.stores and head.status < 300 and (stored := find_response_id(body)) is not None:
            runtime.stores(ticket, stored)
        # The time of an error shows nothing of the endpoint's speed.
        runtime.answered(ticket, Outcome.COMPLETED, usage, began=bool(body) and head.status < 300, now=now)
        self.finish(reusable)

    def hints(self, head: ResponseHead) -> None:
        """Pass it on, if the client accepts such heads and has none yet. See net.connections.pool.Receiver."""
        transport = self.client.transport
        if transport is not None and not transport.is_closing() and not (self._head_sent_by or self.request.http10):
            transport.write(b"HTTP/1.1 103 Early Hints\r\n%b\r\n" % head.end_to_end)

    def head(self, head: ResponseHead) -> None:
        """A response begins: accept it, unless another endpoint may do better."""
        ticket, connection = self._ticket, self._work
        assert ticket is not None
        assert isinstance(connection, Connection)
        if head.load_report:
            head = self._handle_load_report(head, ticket)
        if head.status in STATUS_FAILURES and self._retry_elsewhere(head.status):
            connection.abort()
            return
        if self._head_sent_by and not can_continue(head):
            connection.abort()
            self._cannot_continue(head, ticket)
            return
        relay = Relay(head, connection, ticket, self.record, self._shared.runtime, self)
        self._enter(RELAYING, relay)
        relay.begin(self, self._own_fields(), head_sent_by=self._head_sent_by)

    def _cannot_continue(self, head: ResponseHead, ticket: Ticket) -> None:
        """The client has the head of a stream, and this is the head of another kind of response."""
        self.record.error = f"returned {head.status}, which cannot continue a stream"
        self._shared.runtime.close(ticket, Outcome.COMPLETED)
        self.refuse(LbError(Outcome.UPSTREAM_RESET))

    def body(self, data: bytes) -> None:
        """Never called: the relay takes the body."""
        raise AssertionError("a body before its head")

    def ended(self) -> None:
        """Never called: the relay takes the end."""
        raise AssertionError("an end before its head")

    def broke(self, error: UpstreamError) -> None:
        """The attempt failed before a response was committed; its head may have arrived, or gone to the client."""
        self._guarded(self._fail, error)

    def _fail(self, error: UpstreamError) -> None:
        ticket, self._work = self._ticket, None
        assert ticket is not None
        if error.kind is FailureKind.STALE:
            self._dial(ticket)  # not the endpoint's fault: repeat on a new connection, without a retry
            return
        runtime = self._shared.runtime
        verdict = runtime.after_failure(ticket, error, self._failed.kinds)
        self.record.error = error.detail
        self._note_failure(ticket, error.kind, verdict.outcome.label, verdict.outcome)
        runtime.close(ticket, verdict.outcome)
        if verdict.retry:
            self._retry(verdict.delay_s)
        else:
            self.refuse(LbError(verdict.outcome))

    # relay.Owner

    def head_sent(self) -> None:
        """See relay.Owner."""
        self._head_sent_by = self._relaying

    def committed(self) -> None:
        """See relay.Owner. No other endpoint will be asked, and a stream can last for minutes."""
        self._head_sent_by = None
        if len(self.request.body) > LARGE_BODY_BYTES:
            self.request = self.request._replace(body=b"")
            self._body_released()

    def stream_refused(self, status: int) -> bool:
        """See relay.Owner. Treated like an error status in the head."""
        return self._retry_elsewhere(status)

    def relayed(self, result: Outcome | UpstreamError) -> None:
        """See relay.Owner."""
        relay, ticket = self._relaying, self._ticket
        assert ticket is not None
        if isinstance(result, UpstreamError):
            self.broke(result)
            return
        self.record.outcome = result
        usage = relay.usage
        if usage is not None:
            usage = self._note_usage(ticket, usage)
        self._shared.runtime.close(ticket, result, usage, timed_out=relay.timed_out)
        self.finish(relay.client_reusable)

    def _handle_load_report(self, head: ResponseHead, ticket: Ticket) -> ResponseHead:
        """Report the endpoint's load. Only clients that asked for it get it."""
        self._shared.runtime.report_load(ticket, read_field(head.load_report))
        if not self.request.fields.wants_load_report:
            return head
        return head._replace(end_to_end=head.end_to_end + head.load_report)

    def _note_usage(self, ticket: Ticket, usage: Usage) -> Usage:
        """Record the usage that the endpoint reported, with the complete prompt in it."""
        expected = ticket.predicted_prompt_tokens or ticket.request.body_bytes / 4.0
        if ticket.placement is not None:
            self.record.predicted_cached_tokens = ticket.placement.cached_tokens
            expected = ticket.placement.prompt_tokens
        self.record.usage = usage = usage.resolved(expected)
        return usage

    # Another attempt

    def move_if_stranded(self) -> None:
        """If the request is stranded, send it to another endpoint, as far as the balancer allows."""
        self._guarded(self._move_if_stranded)

    def _move_if_stranded(self) -> None:
        ticket = self._ticket
        if self.step is FINISHED or ticket is None or ticket.state is not TicketState.PLACED:
            return
        if self.step is RELAYING and not self._relaying.revocable:
            return
        if not self._shared.runtime.is_stranded(ticket):
            return
        error = UpstreamError(FailureKind.STRANDED, "the endpoint is down, or makes no progress")
        verdict = self._shared.runtime.after_failure(ticket, error, self._failed.kinds)
        if not verdict.retry:
            return
        self._release_work()
        self.record.error = error.detail
        self._note_failure(ticket, error.kind, f"upstream_{error.kind.value}", verdict.outcome)
        self._shared.runtime.close(ticket, verdict.outcome)
        self._retry(verdict.delay_s)

    def _retry_elsewhere(self, status: int, body: bytes = b"") -> bool:
        """Whether to drop this response and ask another endpoint, which is then in progress."""
        ticket, runtime = self._ticket, self._shared.runtime
        assert ticket is not None
        kind = STATUS_FAILURES[status]
        if kind is FailureKind.MISSING and not self._is_missing(status, body, ticket):
            return False
        verdict = runtime.after_failure(ticket, UpstreamError(kind, f"returned {status}"), self._failed.kinds)
        if not verdict.retry:
            return False
        self._note_failure(ticket, kind, f"upstream_{status}")
        runtime.close(ticket, verdict.outcome)
        self._retry(verdict.delay_s)
        return True

    def _is_missing(self, status: int, body: bytes, ticket: Ticket) -> bool:
        """Whether a 400 or 404 can only mean that something is not there: the rank that lbproxy named, a listed adapter
        (the path exists on every model server), or a stored response whose endpoint is not known.
        """
        runtime, placed, endpoint = self._shared.runtime, self.placed, ticket.placed_state.endpoint
        if status == 400 and not rank_is_gone(endpoint, body):
            return False
        if status == 400 or (self.request.route.is_common and runtime.lists_adapter(placed.model)):
            runtime.doubt_models(endpoint.uid)
            return True
        return placed.response_id is not None and runtime.stored(placed.response_id) is None

    def _note_failure(self, ticket: Ticket, kind: FailureKind, label: str, ended: Outcome | None = None) -> None:
        endpoint = ticket.placed_state.endpoint
        self._failed = self._failed.add(endpoint.uid, kind, ended)
        self.record.failed += ((endpoint.name, label),)
        if self.record.trace is not None:
            self.record.trace.failed(label, self._shared.runtime.now())

    def _retry(self, delay_s: float) -> None:
        if delay_s:
            timer = self._shared.runtime.loop.call_later(delay_s, self._guarded, self._place)
            self._enter(BACKING_OFF, timer)
        else:
            self._place()

    def _guarded(self, step: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Run a step; nothing above would handle its exceptions."""
        try:
            step(*arguments)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            self.defect()

    # The client's back-pressure

    def pause(self) -> None:
        """The client's buffer is full."""
        if self.step is RELAYING:
            self._relaying.pause()

    def resume(self) -> None:
        """The client's buffer has room."""
        if self.step is RELAYING:
            self._relaying.resume()

    # Responses of lbproxy itself

    def _refusal(self, ticket: Ticket) -> LbError:
        last = self._failed.last
        if ticket.outcome is Outcome.NO_ENDPOINTS and last is not None and self._shared.runtime.any_up():
            return LbError(last)  # a live pool failed this request
        return refusal(ticket, self.record.alias or self.placed.model)

    def _own_fields(self) -> str:
        return self._shared.own_fields(self.record, self.cors, explain=self.request.fields.explain)
