# SPDX-License-Identifier: Apache-2.0
"""One request from its place in the balancer to the end of its response: attempts, the commit point, the relay.

Theory of operation. An `Exchange` is driven by callbacks alone: of the runtime (a place was found), of the pool (a
connection was made) and of that connection (its response arrived, or it broke). No task waits for it, which saves most
of the cost of a request. Each attempt places, sends, and ends with a response head or a failure. After a failure, or a
response that another endpoint may do better, the balancer decides whether to retry. An accepted head is passed to a
`Relay`; the first bytes of its body are the commit point, after which nothing is retried. `step` is what the exchange
does now; `proxy.exchange.steps` has the table. Invariants:

- It ends exactly once, in `finish`, whatever happens; every ticket is closed by then.
- What is in progress in a step (`_work`) is released when the step ends; the first leg of a split request (`_split`)
  when the exchange ends, or another attempt begins.
- Each attempt sends the same body. After a response's head (`head_sent_by`) only an event stream's body may follow.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from lbproxy.config.tree import Settings
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest, Usage, estimated
from lbproxy.core.requests.retry import FailureKind, UpstreamError, Verdict, may_fall_back, started, status_failure
from lbproxy.net.connections.call import Call
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.exchange import steps
from lbproxy.proxy.exchange.continuation import goes_on, moved, relay_for
from lbproxy.proxy.exchange.exchanger import LARGE_BODY_BYTES, Exchanger, origin_of
from lbproxy.proxy.exchange.failures import (
    NO_FAILURES,
    AttemptFailures,
    lacking,
    refusal_after,
    retry_after_s,
    without_response,
)
from lbproxy.proxy.exchange.fallback import Fallback, is_reason
from lbproxy.proxy.exchange.instead import Instead, fits
from lbproxy.proxy.exchange.keepalive import Keepalive
from lbproxy.proxy.exchange.relay import (
    Arguments,
    Client,
    HeadSender,
    Relay,
    RequestOwner,
    can_continue,
    end_after_head,
    end_with_response,
    note_stored,
)
from lbproxy.proxy.exchange.split import FirstLeg, SplitRequest, decode_endpoint, first_leg
from lbproxy.proxy.exchange.steps import Step
from lbproxy.proxy.exchange.used import STREAM_OPTIONS, expected_prompt_tokens, refuses_usage
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import client_head
from lbproxy.proxy.request.reading import as_named_by

logger = logging.getLogger("lbproxy")
Work: TypeAlias = asyncio.Task[None] | Connection | Call | Relay | asyncio.TimerHandle | None


class Exchange(RequestOwner, ABC):
    """One request; a net.connections.pool.Receiver until it accepts a response. Subclasses refuse and end it.

    Defaults live in the class until they are overwritten: one object is made for every request.
    """

    step = steps.READING
    _work: Work
    """What is in progress in this step: a dial, the connection that carries the request, a relay, a timer."""
    _ticket: Ticket | None = None
    """The current attempt."""
    _keepalive: Keepalive | None
    """Keeps the client's connection alive in silences; None: nothing does."""
    _split: SplitRequest | None = None
    """The first leg of a request that is split, and what the second one is sent."""
    switches: bool = False
    _failed: AttemptFailures = NO_FAILURES

    def __init__(self, shared: Exchanger, client: Client, record: RequestRecord, *, keep_alive: bool) -> None:
        self._shared = shared
        self._work = self.head_sent_by = self._keepalive = None  # in the class mypyc ignores None for such unions
        self.client = client
        self.record = record
        self.keep_alive = keep_alive

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

    # An attempt

    def start(self, request: ClientRequest, placed: InferenceRequest) -> None:
        """Send the request to an endpoint. The exchange may be finished when this returns."""
        self.request = request
        self.placed = placed
        if request.keepalive_s:
            self._keepalive = Keepalive(self, self._shared.runtime, lambda: self._ticket)
        self._place()

    def _place(self) -> None:
        """Begin an attempt: request a place."""
        self._enter(steps.PLACING)
        settled = lambda ticket: self.guarded(self._settled, ticket)  # noqa: E731
        runtime, record, failed, again = self._shared.runtime, self.record, self._failed, self._ticket is not None
        placed, split = self.placed, self._split
        if split is not None:
            if split.can_continue:
                placed = split.second()
            else:
                split.cancel()
                self._split = None
        self._ticket = ticket = runtime.submit(placed, record, failed.avoid, settled, failed.suspect, again)
        if ticket.wait is not None:
            record.note_wait(ticket)
        if ticket.state is not TicketState.WAITING:
            try:  # like `guarded`, which costs more: whoever called this knows nothing of the place
                self._settled(ticket)
            except LbError as error:
                self.give_up(error)
            except Exception:  # noqa: BLE001 - logged there, with its traceback
                self.defect()
        elif record.trace is not None:
            record.trace.waiting_since = ticket.submitted_at

    def _settled(self, ticket: Ticket) -> None:
        """The ticket was placed, or closed without a place."""
        if ticket.placed_on is None:
            if ticket.request.leg:
                self._place_whole()
                return
            if ticket.outcome is Outcome.NO_ENDPOINTS and self._failed.doubtful is not None:
                self._failed = self._failed._replace(doubtful=None)
                self._place()
                return
            if ticket.outcome is Outcome.MODEL_NOT_FOUND and not self._failed.has_looked:
                self._failed = self._failed._replace(has_looked=True)
                again = lambda: self.guarded(self._place) if self.step is steps.LOOKING else None  # noqa: E731
                if self._shared.runtime.look_for_models(again):
                    self._enter(steps.LOOKING)
                    return
            error = refusal_after(self._failed, ticket, self._shared.runtime, self.record)
            self._unserved(error, replaceable=is_reason(ticket))
            return
        assert ticket.placed_at is not None
        endpoint, record = ticket.placed_on.endpoint, self.record
        record.note_placed(ticket)
        if ticket.decision is not None:
            record.note_prediction(ticket)
        record.queue_s += ticket.placed_at - ticket.submitted_at
        if ticket.request.leg and self._begins_split(ticket):
            return
        if record.trace is not None:
            record.trace.placed(endpoint, ticket.submitted_at, ticket.placed_at, ticket.request.leg)
        self._connect(ticket)

    def _connect(self, ticket: Ticket) -> None:
        """Send the request, or its second leg, to where it is placed."""
        connections, before = self._shared.connections, moved(self.head_sent_by)
        if before is not None and before.continuation.counts:
            self._enter(steps.COUNTING, before.continuation.count(ticket))
            return
        connection = connections.take(origin_of(ticket)) if ticket.request.repeatable else None  # it may be closed
        if connection is not None:
            self._send(ticket, connection)
        else:
            self._dial(ticket)

    def _dial(self, ticket: Ticket) -> None:
        shared, done = self._shared, lambda result: self.guarded(self._dialled, result)
        self._enter(steps.DIALLING, shared.connections.dial(origin_of(ticket), shared.limits.connect_s, done))

    def _dialled(self, result: Connection | UpstreamError) -> None:
        assert self._ticket is not None
        if isinstance(result, UpstreamError):
            self.broke(result)
        else:
            self._send(self._ticket, result)

    def _send(self, ticket: Ticket, connection: Connection) -> None:
        self._enter(steps.SENT, connection)
        request, state, record, limits = self.request, ticket.placed_state, self.record, self._shared.limits
        if (before := moved(self.head_sent_by)) is not None:
            request = before.continuation.rest(request)
        if self._split is not None:
            request, limits = self._split.send_second()
        request = as_named_by(state.endpoint, request)
        if self.placed.stream and self._shared.asks_usage:
            refused, always = self._failed.refused_usage == state.endpoint.uid, self.settings.usage.ask == "always"
            self.request, request = self._shared.used.ask(self.request, request, ticket, always=always, refused=refused)
        forwarded = self.client.peer.lines(request.fields, http10=request.http10)
        one, trace, bound, asks = state.endpoint, record.trace, self.placed.max_tier, state.reported.asks_load
        head = request.head_for(one, record.attempt_id, forwarded, ask_load=asks, trace=trace, max_tier=bound)
        connection.send(request.method, head, request.pieces or request.body, self, limits)

    # A request that is split

    def _begins_split(self, ticket: Ticket) -> bool:
        """Begin the first leg, if this placement is one: the second one follows."""
        first = first_leg(ticket)
        if first is None:
            return False
        self._enter(steps.PREFILLING)
        forwarded, record = self.client.peer.lines(self.request.fields, http10=self.request.http10), self.record
        leg = FirstLeg(self.request, self.placed, record.attempt_id, forwarded, record.trace)
        self._split = split = SplitRequest(self._shared, first, leg, self)
        if record.trace is not None:
            assert first.placed_at is not None
            record.trace.placed(split.endpoint, first.submitted_at, first.placed_at, PREFILL)
        if not split.start():
            if record.trace is not None:
                record.trace.withdraw()
            self._place_whole()
        return True

    def _place_whole(self) -> None:
        """It cannot be split, or nothing can continue what was prefilled."""
        self._end_split(Outcome.COMPLETED)
        self.placed = self.placed._replace(splittable=False)
        self._place()

    def _place_whole_instead(self, kind: FailureKind) -> bool:
        """After a second leg that returned 500, or whose stream broke before a token: vLLM does that if it cannot fetch
        what prefill handed over, or knows no engine of the id that it was told. The request is placed whole, perhaps at
        the same endpoint: it may be well.
        """
        ticket, split = self._ticket, self._split
        if split is None or ticket is None or not (split.doubt() or split.is_handed_over):
            return False
        self.record.error = "the second leg failed before a token: perhaps the KV cache could not be fetched"
        if kind is FailureKind.RESET:  # or its process ended: what ends another one is not sent to a third
            self._failed = self._failed.doubt(ticket.placed_state.endpoint.uid, kind)
        label = Outcome.UPSTREAM_RESET.label if kind is FailureKind.RESET else "upstream_500"
        self.record.note_failure(ticket, label, self._shared.runtime.now())
        self._place_whole()
        return True

    def _end_split(self, outcome: Outcome) -> None:
        ticket, split = self._ticket, self._split
        if split is not None:
            split.abandon(decode_endpoint(ticket))
            self._split = None
        if ticket is not None:
            self._shared.runtime.close(ticket, outcome)

    def second_ready(self) -> None:
        ticket, trace = self._ticket, self.record.trace
        assert ticket is not None
        if trace is not None:
            assert ticket.placed_at is not None
            trace.placed(ticket.placed_state.endpoint, ticket.placed_at, ticket.placed_at, DECODE)
        self._connect(ticket)

    def prefilled(self, usage: Usage | None) -> None:
        ticket, runtime, record = self._ticket, self._shared.runtime, self.record
        assert ticket is not None
        if usage is not None:
            usage = usage.resolved(expected_prompt_tokens(ticket.prefill or ticket))
        record.note_prefilled(usage, runtime.now())
        if self.step is not steps.PREFILLING:
            return  # both legs run
        runtime.first_byte(ticket)
        runtime.close(ticket, Outcome.COMPLETED, usage)
        self._place()

    def first_failed(self, error: UpstreamError) -> None:
        """Once decode has begun to respond, it has what it needs."""
        ticket, step = self._ticket, self.step
        assert ticket is not None
        if step in {steps.PREFILLING, steps.DIALLING, steps.SENT} or (
            step is steps.RELAYING and self._relaying.revocable
        ):
            self._release_work()
            self._attempt_failed(ticket.prefill or ticket, error)

    def first_refused(self, head: ResponseHead, body: bytes) -> None:
        if self.step in {steps.PREFILLING, steps.DIALLING, steps.SENT}:
            self.record.note_first_refused(head.status, self._shared.runtime.now())
        if self.step is steps.PREFILLING:
            self._place_whole()
        elif self.step in {steps.DIALLING, steps.SENT}:
            if self._split is not None:
                self._shared.conceal(head, self._split.endpoint)
                head.reason = b""
            self._release_work()
            self.request = self.request._replace(usage=None)  # a first leg is not asked
            self.complete_response(head, body)

    # net.connections.pool.Receiver, until a response is accepted

    def complete_response(self, head: ResponseHead, body: bytes) -> None:
        """A short response arrived in one piece: do what `head` and a relay do, in one step."""
        try:  # like `guarded`, which costs more
            self._take_complete(head, body)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            self.defect()

    def _take_complete(self, head: ResponseHead, body: bytes) -> None:
        ticket, record, runtime = self._ticket, self.record, self._shared.runtime
        assert ticket is not None
        self._work = None  # the connection is back in the pool
        if head.load_report:
            head = self._shared.note_load_report(head, ticket, wanted=self.request.fields.wants_load_report)
        if head.status >= 400 and (
            self._asks_again(ticket, head, body) or self._retry_elsewhere(head.status, body, head)
        ):
            return
        if self.head_sent_by is not None:
            self._cannot_continue(head, body)
            return
        self._shared.conceal(head, ticket.placed_state.endpoint)
        reusable = self.keep_alive and not self.request.http10
        response = client_head(head, self._own_fields(), chunked=False, keep_alive=reusable) + body
        record.status = head.status
        record.outcome = Outcome.COMPLETED
        record.response_bytes += len(response)
        now = runtime.now()
        if body:
            record.first_byte_at = now
        transport = self.client.transport
        if transport is not None and not transport.is_closing():
            transport.write(response)
        usage = self._shared.used.of_body(record, ticket, self.request.route, head, body)
        note_stored(runtime, ticket, self.request, head, body)
        # The time of an error shows nothing of the endpoint's speed.
        runtime.answered(ticket, Outcome.COMPLETED, usage, began=bool(body) and head.status < 300, now=now)
        self.finish(reusable)

    def hints(self, head: ResponseHead) -> None:
        """Pass it on, if the client accepts such heads and has none yet. See net.connections.pool.Receiver."""
        if self._ticket is not None and not (self.head_sent_by or self.request.http10):
            self._shared.hint(head, self._ticket, self.client.transport)

    def head(self, head: ResponseHead) -> None:
        """A response begins: accept it, unless another endpoint may do better."""
        ticket, connection = self._ticket, self._work
        assert ticket is not None
        assert isinstance(connection, Connection)
        if head.load_report:
            head = self._shared.note_load_report(head, ticket, wanted=self.request.fields.wants_load_report)
        if head.status >= 400 and self._retry_elsewhere(head.status, head=head):
            connection.abort()
            return
        may_refuse = refuses_usage(self.request, head)
        if may_refuse and not fits(head):
            connection.abort()
            self._asks_again(ticket, head)
            return
        if may_refuse or (head.status == 400 and fits(head) and self._shared.runtime.takes_longer(ticket)):
            Instead(head, connection, lambda head, body: self.guarded(self._take_read, head, body))
            return
        if self.head_sent_by is not None and not can_continue(head):
            Instead(head, connection, lambda head, body: self.guarded(self._cannot_continue, head, body))
            return
        self._shared.conceal(head, ticket.placed_state.endpoint)
        relay = relay_for(self, head, connection, ticket, self._shared)
        self._enter(steps.RELAYING, relay)
        relay.begin(self._own_fields())

    def _take_read(self, head: ResponseHead, body: bytes) -> None:
        """The body was read: it may say what another endpoint has."""
        if len(body) != head.length:
            self.broke(UpstreamError(FailureKind.RESET, "the connection was closed inside an error's body"))
        else:
            self._take_complete(head, body)

    def _asks_again(self, ticket: Ticket, head: ResponseHead, body: bytes = STREAM_OPTIONS) -> bool:
        """If it refuses to be asked for usage, it is sent what the client asks for: nothing failed."""
        if refuses_usage(self.request, head, body):
            self._failed = self._failed._replace(refused_usage=ticket.placed_state.endpoint.uid)
            self._connect(ticket)
            return True
        return False

    def _cannot_continue(self, head: ResponseHead, body: bytes) -> None:
        """The client has the head of a stream, and this is another kind of response: it is told as an event."""
        ticket = self._ticket
        assert ticket is not None
        assert self.head_sent_by is not None
        self._shared.runtime.close(ticket, Outcome.COMPLETED)
        end_with_response(self.client, self.record, head.status, body, self.head_sent_by)
        self.finish(False)

    def broke(self, error: UpstreamError) -> None:
        """The attempt failed before a response was committed; its head may have arrived, or gone to the client."""
        self.guarded(self._fail, error)

    def _fail(self, error: UpstreamError) -> None:
        ticket, self._work = self._ticket, None
        assert ticket is not None
        if error.kind is FailureKind.STALE:
            self._dial(ticket)  # not the endpoint's fault: repeat on a new connection, without a retry
            return
        if self.step is steps.RELAYING and error.kind is FailureKind.RESET and self._place_whole_instead(error.kind):
            return
        self._attempt_failed(ticket, error)

    def _attempt_failed(self, at: Ticket, error: UpstreamError) -> None:
        """`at`: the ticket at the endpoint that failed, if the legs of a split request are at two."""
        runtime, ticket = self._shared.runtime, self._ticket
        assert ticket is not None
        verdict = runtime.after_failure(at, error, self._failed.kinds)
        self.record.error = error.detail
        ended, label = verdict.outcome, verdict.outcome.label
        if ended is Outcome.COMPLETED:  # a first leg, whose response is not the client's
            ended, label = without_response(error.kind), f"upstream_{error.kind.value}"
        self._note_failure(at, error.kind, label, ended)
        self._follow(ticket, verdict, ended)

    # Of its relay

    def head_sent(self, by: HeadSender) -> None:
        self.head_sent_by = by

    def committed(self) -> None:
        """No other endpoint will be asked, and a stream can last for minutes."""
        self.head_sent_by = None
        self._failed = NO_FAILURES
        if self._split is not None:
            self._split.forget_bodies()
        if len(self.request.body) > LARGE_BODY_BYTES and not self.request.continues:
            self.request = self.request._replace(body=b"")
            self._body_released()

    def stream_refused(self, status: int) -> bool:
        """Treated like an error status in the head."""
        return self._retry_elsewhere(status)

    def relayed(self, result: Outcome | UpstreamError) -> None:
        relay, ticket = self._relaying, self._ticket
        assert ticket is not None
        if isinstance(result, UpstreamError):
            self.broke(result)
            return
        self.record.outcome = result
        usage = self._shared.used.of_stream(self.record, ticket, self.request.route, relay, result)
        self._shared.runtime.close(ticket, result, usage, timed_out=relay.timed_out)
        self.finish(relay.client_reusable)

    def _used_so_far(self, outcome: Outcome) -> Usage | None:
        """What the response has used that ends now with this outcome; None: nothing that counts."""
        relay, ticket, is_left = self.relay, self._ticket, outcome is Outcome.CLIENT_CLOSED
        if ticket is None or relay is None:
            generates = self.step in {steps.SENT, steps.PREFILLING} and self.request.route.flatten is not None
            return estimated(None, 0) if is_left and generates else None
        return self._shared.used.so_far(self.record, ticket, self.request.route, relay, is_left=is_left)

    # A stream that goes on elsewhere

    def go_on(
        self, request: ClientRequest, placed: InferenceRequest, error: UpstreamError, ended: Outcome, usage: Usage
    ) -> None:
        ticket = self._ticket
        assert ticket is not None
        self.record.error = error.detail
        label, runtime = "moved" if ended is Outcome.CLIENT_CLOSED else ended.label, self._shared.runtime
        others = [one.endpoint.uid for one in runtime.members() if not goes_on(one)]
        self._failed = AttemptFailures(frozenset({ticket.placed_state.endpoint.uid, *others}))  # attempts count anew
        self.record.note_failure(ticket, label, runtime.now())
        runtime.close(ticket, ended, usage, timed_out=error.kind is FailureKind.TIMEOUT)
        self.request, self.placed, self.head_sent_by = request, placed, self.relay
        self._place()

    def counted(self) -> None:
        ticket, before = self._ticket, moved(self.head_sent_by)
        assert ticket is not None
        if before is not None and before.continuation.has_all:  # it ends where it broke
            self._enter(steps.RELAYING, before)
            before.end()
        else:
            self._connect(ticket)

    # Another attempt

    def move_if_stranded(self) -> None:
        """If the request is stranded, send it to another endpoint, as far as the balancer allows. Call it `guarded`."""
        ticket = self._ticket
        if ticket is None or ticket.state is not TicketState.PLACED or not self._shared.runtime.is_stranded(ticket):
            return
        if self.step is steps.RELAYING and not self._relaying.revocable:
            self._relaying.leave()
            return
        error = UpstreamError(FailureKind.STRANDED, "the endpoint is down, or makes no progress")
        verdict = self._shared.runtime.after_failure(ticket, error, self._failed.kinds)
        if not verdict.retry and not self._may_fall_back(error.kind):
            return
        self._release_work()
        self.record.error = error.detail
        self._note_failure(ticket, error.kind, f"upstream_{error.kind.value}", verdict.outcome)
        self._follow(ticket, verdict, verdict.outcome)

    def _retry_elsewhere(self, status: int, body: bytes = b"", head: ResponseHead | None = None) -> bool:
        """Whether to drop this response and ask another endpoint, which is then in progress."""
        ticket, runtime, is_inference = self._ticket, self._shared.runtime, self.request.route.is_inference
        assert ticket is not None
        own_key = ticket.placed_state.endpoint.api_key is not None
        kind = status_failure(status, own_key=own_key, is_inference=is_inference)
        if kind is None:
            return False
        if kind is FailureKind.MISSING:
            kind, self.placed = lacking(runtime, self.request.route, self.placed, ticket, status, body)
            if kind is None:
                return False
            if kind is FailureKind.TOO_LONG:
                self._failed = self._failed.without(runtime.as_short(ticket))
        if kind is FailureKind.ERROR and self._place_whole_instead(kind):
            return True
        after_s = None if head is None else retry_after_s(head.end_to_end)
        error = UpstreamError(kind, f"returned {status}", retry_after_s=after_s)
        verdict = runtime.after_failure(ticket, error, self._failed.kinds)
        if not (verdict.retry or kind is FailureKind.REFUSED or self._may_fall_back(kind)):
            return False
        self._note_failure(ticket, kind, f"upstream_{status}")
        self._follow(ticket, verdict, without_response(kind))  # words of REFUSED are for whoever owns the key
        return True

    def _note_failure(self, ticket: Ticket, kind: FailureKind, label: str, ended: Outcome | None = None) -> None:
        self._failed = self._failed.add(ticket.placed_state.endpoint.uid, kind, ended)
        self.record.note_failure(ticket, label, self._shared.runtime.now())

    def _follow(self, ticket: Ticket, verdict: Verdict, ended: Outcome) -> None:
        """End a failed attempt, and do what follows. `ended`: the request, if nothing does."""
        self._shared.runtime.close(ticket, verdict.outcome)
        if not verdict.retry:
            self._unserved(LbError(ended))
        elif verdict.delay_s:
            timer = self._shared.runtime.loop.call_later(verdict.delay_s, self.guarded, self._place)
            self._enter(steps.BACKING_OFF, timer)
        else:
            self._place()

    def _may_fall_back(self, *kinds: FailureKind) -> bool:
        """Whether another model is left that may serve the request after these failures, beside earlier ones."""
        failed = self._failed
        is_left = bool(self.request.fallbacks) if failed.fallback is None else failed.fallback.is_left
        return is_left and may_fall_back((*failed.kinds, *kinds), repeatable=self.placed.repeatable)

    def _unserved(self, error: LbError, *, replaceable: bool = True) -> None:
        """No endpoint serves it for this model: another model does, or the client gets the error."""
        fallback, kinds = self._failed.fallback, started(self._failed.kinds)
        if not (replaceable and self._may_fall_back()):
            self.refuse(error if fallback is None else fallback.give_up(self.record))
            return
        self._end_split(error.outcome)
        assert self._ticket is not None
        fallback = fallback or Fallback(self.request, self.placed, self._ticket, error)
        self.request, self.placed = fallback.next(self._shared.runtime.block_bytes)
        self.record.model, self.record.fallback_from = self.placed.model, self.placed.fallback_from
        self._failed = AttemptFailures(kinds=kinds, fallback=fallback)
        self._place()

    def guarded(self, step: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        try:
            step(*arguments)
        except LbError as error:
            self.give_up(error)
        except Exception:  # noqa: BLE001 - logged there, with its traceback
            self.defect()

    @property
    def relay(self) -> Relay | None:
        work = self._work
        return work if isinstance(work, Relay) else None

    # The client's back-pressure

    def pause(self) -> None:
        if self.step is steps.RELAYING:
            self._relaying.pause()

    def resume(self) -> None:
        if self.step is steps.RELAYING:
            self._relaying.resume()

    # The end

    def refuse(self, error: LbError) -> None:
        """End with an error; nothing went to the client yet, or the head of a stream alone."""
        if self.head_sent_by is not None:
            end_after_head(self.client, self.record, error, self.head_sent_by)
            self.finish(False)
        else:
            self.finish(self._refuse(error))

    def finish(self, reusable: bool) -> None:
        """End the exchange. Only the first call counts."""
        if self.step is not steps.FINISHED:
            self._enter(steps.FINISHED)
            self.head_sent_by = None  # a reference back to this exchange
            if self._keepalive is not None:
                self._keepalive.stop()
                self._keepalive = None  # another
            if self._split is not None:  # another
                self._split.abandon(decode_endpoint(self._ticket))
                self._split = None
            self._ended(reusable)

    def defect(self) -> None:
        """End because of a defect of lbproxy; call it while the exception is handled."""
        logger.exception("request %s failed", self.record.id)
        if self.step is steps.FINISHED:
            return
        self._abandon(Outcome.INTERNAL_ERROR)
        self.keep_alive = False
        if self.record.response_bytes and not self.head_sent_by:
            self.record.outcome = Outcome.INTERNAL_ERROR
            self.finish(False)
        else:
            self.refuse(LbError(Outcome.INTERNAL_ERROR))

    def client_disconnected(self) -> None:
        """The client's connection is lost: release everything at once."""
        if self.step is not steps.FINISHED:
            self.record.outcome = Outcome.CLIENT_CLOSED
            self._abandon(Outcome.CLIENT_CLOSED)
            self.finish(False)

    def cut(self, why: Outcome) -> None:
        """End early: lbproxy stops (DRAINING) or has no memory (OVERLOADED). The client is told, as far as possible."""
        if self.step is steps.RELAYING:
            self._relaying.cut(why)
        elif self.step is not steps.FINISHED:
            self.give_up(LbError(why))

    def give_up(self, error: LbError) -> None:
        """End with an error, whatever is in progress; nothing but the head of a stream went to the client yet."""
        self._abandon(error.outcome)
        self.refuse(error)

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
        elif work is not None:
            work.cancel()

    @property
    def _relaying(self) -> Relay:
        assert isinstance(self._work, Relay)
        return self._work

    def _abandon(self, outcome: Outcome) -> None:
        usage = self._used_so_far(outcome)
        self._release_work()
        if self._ticket is not None:
            self._shared.runtime.close(self._ticket, outcome, usage)

    def _own_fields(self) -> str:
        return self._shared.own_fields(self.record, self.cors, self._ticket, explain=self.request.fields.explain)
