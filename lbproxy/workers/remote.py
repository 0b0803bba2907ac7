# SPDX-License-Identifier: Apache-2.0
"""The runtime of a worker process: it reports every event to the balancer process, which decides where requests go.

Theory of operation. `submit` sends a message and returns a ticket that waits; `Placed` or `Refused` settles it. Ticket
and endpoint are objects of the core, so that nothing in `proxy/` sees a difference, but only what exchanges read of
them is kept up. Failures are judged here, at once and by the same rules (`core.requests.retry`): each worker has the
budget for retries that its own requests earn, which together is the budget of all. The balancer process is told.

Without a balancer process (`alone`) requests are placed by `known`; so are those that wait for a place when it is lost.
A new balancer process is told of all requests that run, and decides again from then on. Invariants:

- A request is settled once, whichever process decides; what arrives for a closed ticket is dropped.
- No record is lost while there is no balancer process, up to `MAX_UNSENT`: they are sent when there is one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, Final, Protocol

import msgspec

from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.sink import Sink
from lbproxy.core.queue.flow import Refusal, told_flow
from lbproxy.core.queue.ticket import Overflow, Ticket, TicketState
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, Retries, UpstreamError, Verdict
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.workers import messages as m
from lbproxy.workers.contents import read_endpoint, read_handover, submit_of
from lbproxy.workers.known import Known
from lbproxy.workers.link import Link, Sent
from lbproxy.workers.origins import Sending
from lbproxy.workers.reports import Reports

logger = logging.getLogger("lbproxy")

PROGRESS_S: Final = 0.05
"""Progress is gathered for so long: sent one by one, a write for each was 2 % of the CPU time of a stream's events."""
REFRESH_S: Final = 10.0
"""The longest wait for an endpoint that is asked for its models."""


class _Open:
    """A request with an open ticket."""

    def __init__(
        self, ticket: Ticket, record: RequestRecord, submit: m.Submit, settled: Callable[[Ticket], None]
    ) -> None:
        self.ticket = ticket
        self.record = record
        self.submit = submit
        self.settled = settled
        self.stranded = self.leaves = False
        """It waits in vain for a first byte, or leaves an endpoint that drains, says the balancer process."""


class WorkerProcess(Protocol):
    """The worker process: what concerns it of the balancer process's messages."""

    def settle(self, text: str) -> None:
        """There are other settings: this is their text. `RemoteRuntime.adopted` follows, whether they can be used."""

    def set_log_level(self, level: str) -> None:
        """Log from this level on, until there are other settings."""

    def pong(self) -> None:
        """The balancer process lives."""


class _Nobody:
    """No owner."""

    def settle(self, text: str) -> None:
        """See WorkerProcess."""

    def set_log_level(self, level: str) -> None:
        """See WorkerProcess."""

    def pong(self) -> None:
        """See WorkerProcess."""


class RemoteRuntime(RequestRuntime):
    """The balancer process, as a worker sees it. `attach` and `detach` are the link's life; the rest is the data
    plane's.
    """

    def __init__(self, settings: Settings, rng: random.Random, sinks: Sequence[Sink] = ()) -> None:
        """`sinks`: of this process's own records, besides the balancer process."""
        self.known = Known()
        super().__init__(self.known.serving, self.known.stored_responses)
        self.placed_alone = 0
        """Requests that were placed without a balancer process."""
        self.owner: WorkerProcess = _Nobody()
        self._reports = Reports(self.loop, sinks)
        self._retries = Retries(settings.retry, rng)
        self._link: Link[m.ToWorker] | None = None
        self._welcomed = False
        """The balancer process decides."""
        self._last_number = 0
        self._open: dict[int, _Open] = {}
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            m.Placed: self._on_placed,
            m.Refused: self._on_refused,
            m.Waits: self._on_waits,
            m.Stranded: self._on_stranded,
            m.Members: self._on_members,
            m.Models: self._on_models,
            m.Remember: self._on_remember,
            m.Refreshed: self._on_refreshed,
            m.Settle: self._on_settle,
            m.LogLevel: lambda message: self.owner.set_log_level(message.level),
            m.Welcome: self._on_welcome,
            m.Pong: lambda _: self.owner.pong(),
        }

    def reconfigure(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self._retries.reconfigure(settings.retry)

    def adopted(self) -> None:
        """Tell the balancer process that the settings it sent are in force in this process, or are refused."""
        if self._link is not None:
            self._link.send(m.Adopted())

    # The link

    @property
    def alone(self) -> bool:
        """There is no balancer process that decides."""
        return not self._welcomed

    def attach(self, link: Link[m.ToWorker]) -> None:
        """There is a link to a balancer process, which has not said yet that it is ready."""
        self._link, self._reports.origins = link, Sending()
        self.known.begin()
        link.dropped = self._dropped

    def detach(self) -> None:
        """The link is lost: decide alone, about requests that wait as well."""
        self._link = None
        self._welcomed = False
        for call in self._calls.values():
            if not call.done():
                call.set_result(None)
        for one in list(self._open.values()):
            if one.ticket.state is TicketState.WAITING:
                self.loop.call_soon(self._settle_alone, one)

    def received(self, arrived: list[m.ToWorker]) -> None:
        """Messages of the balancer process."""
        handlers = self._handlers
        for message in arrived:
            try:
                handlers[type(message)](message)
            except Exception:  # one bad message must not cost the others
                logger.exception("a message of the balancer process failed: %s", type(message).__name__)

    # A request

    def submit(
        self,
        request: InferenceRequest,
        record: RequestRecord,
        avoid: frozenset[EndpointUid],
        settled: Callable[[Ticket], None],
        suspect: EndpointUid | None = None,
        again: bool = False,
    ) -> Ticket:
        """See RequestRuntime. It waits, unless there is no balancer process."""
        now = self.now()
        ticket = Ticket(request, now, inf, avoid)
        if not record.number:
            self._last_number += 1
            record.number = self._last_number
        ticket.number = number = record.number
        if not (avoid or again):
            self._retries.count_request(now=now)
        owner = self.known.owner(request, now) if request.response_id is not None else None
        state = None if owner is None else self.known.get(owner)
        owned_by = None if state is None else state.endpoint.key
        message = submit_of(number, request, record, avoid, suspect, again, owned_by)
        self._open[number] = _Open(ticket, record, message, settled)
        if self._welcomed and self._link is not None:
            self._link.send(self._reports.origins.shortened(message))
        else:
            self._place_alone(ticket)
        return ticket

    def close(self, ticket: Ticket, outcome: Outcome, usage: Usage | None = None, *, timed_out: bool = False) -> None:
        if self._end(ticket, outcome) and self._link is not None:
            self._link.send(m.Close(ticket.number, m.OUTCOME_NUMBERS[outcome], usage, timed_out))

    def answered(self, ticket: Ticket, outcome: Outcome, usage: Usage | None, *, began: bool, now: float) -> None:
        if self._end(ticket, outcome) and self._link is not None:
            self._link.send(m.Answered(ticket.number, m.OUTCOME_NUMBERS[outcome], usage, began))

    def _end(self, ticket: Ticket, outcome: Outcome) -> bool:
        """Whether the ticket was open."""
        if ticket.state is TicketState.CLOSED:
            return False
        if ticket.placed_on is not None:
            ticket.placed_on.in_flight -= 1
        ticket.state = TicketState.CLOSED
        ticket.outcome = outcome
        self._open.pop(ticket.number, None)
        if ticket.number in self._reports.progress:
            self._send_progress()  # before the end
        return True

    def first_byte(self, ticket: Ticket) -> None:
        if ticket.first_byte_at is None:
            ticket.first_byte_at = self.now()
            if self._link is not None:
                self._link.send(m.FirstByte(ticket.number))

    def progress(self, ticket: Ticket, tokens: int) -> None:
        if self._link is None:
            return
        number, gathered = ticket.number, self._reports.progress
        ticket.response_tokens += tokens
        if not gathered:
            self.loop.call_later(PROGRESS_S, self._send_progress)
        gathered[number] = gathered.get(number, 0) + tokens

    def _send_progress(self) -> None:
        gathered, self._reports.progress = self._reports.progress, {}
        if gathered and self._link is not None:
            self._link.send(m.ProgressMade(gathered))

    def after_failure(self, ticket: Ticket, error: UpstreamError, earlier: Sequence[FailureKind]) -> Verdict:
        now, request = self.now(), ticket.request
        verdict = self._retries.decide(
            error.kind,
            earlier,
            others_available=self.known.others_available(ticket, now),
            now=now,
            repeatable=request.repeatable,
        )
        if error.refused and self.known.owner(request, now) is not None:
            verdict = Verdict(False, Outcome.RESPONSE_NOT_FOUND)  # the process that stored it is gone
        verdict = self._final(verdict, error)
        if self._link is None:
            self.known.failed(ticket, now)
        else:
            kinds = tuple(one.value for one in earlier)
            outcome = m.OUTCOME_NUMBERS[verdict.outcome]
            is_first = ticket.request.leg == PREFILL
            what = error.kind.value, error.detail, error.refused, kinds, verdict.retry, outcome
            self._link.send(m.Failed(ticket.number, *what, is_first, error.retry_after_s))
        return verdict

    def is_stranded(self, ticket: Ticket) -> bool:
        one = self._open.get(ticket.number)
        return one is not None and one.stranded and (one.leaves or ticket.first_byte_at is None)

    @property
    def link(self) -> Link[m.ToWorker] | None:
        """To the balancer process; None: there is none."""
        return self._link

    def emit(self, record: RequestRecord) -> None:
        self._reports.emit(record, self._link if self._welcomed else None)

    def hand_out(self) -> None:
        """Tell this process's own sinks now what ended."""
        self._reports.hand_out()

    # What its response shows

    def report_load(self, ticket: Ticket, report: LoadReport | None) -> None:
        if self._link is not None:
            self._link.send(m.LoadReported(ticket.number, report))

    def stores(self, ticket: Ticket, response_id: str) -> None:
        """See RequestRuntime. All workers learn it."""
        super().stores(ticket, response_id)
        if self._link is not None:
            self._link.send(m.Stores(ticket.number, response_id))

    # Endpoints and models

    def members(self) -> Iterable[EndpointState]:
        return self.known.members()

    @property
    def block_bytes(self) -> int | None:
        return self.known.block_bytes

    @property
    def splits(self) -> bool:
        return self.known.has_roles

    def look_for_models(self, looked: Callable[[], None]) -> bool:
        """See RequestRuntime. The balancer process did so before it refused."""
        return False

    def doubt_models(self, uid: EndpointUid) -> None:
        if self._link is not None:
            self._link.send(m.DoubtModels(uid))

    async def refresh_models(self, uid: EndpointUid) -> None:
        if self._link is None:
            return
        self._last_number += 1
        call, done = self._last_number, self.loop.create_future()
        self._calls[call] = done
        self._link.send(m.RefreshModels(uid, call))
        try:
            async with asyncio.timeout(REFRESH_S):
                await done
        except TimeoutError:
            logger.warning("the balancer process did not say whether the models were read", extra={"event": "workers"})
        finally:
            del self._calls[call]

    # Without a balancer process

    def _settle_alone(self, one: _Open) -> None:
        ticket = one.ticket
        if ticket.state is TicketState.WAITING and self.alone:
            self._place_alone(ticket)
            one.settled(ticket)

    def _place_alone(self, ticket: Ticket) -> None:
        """Place it, or close it."""
        now = self.now()
        chosen = self.known.choose(ticket.request, ticket.avoid, now)
        if isinstance(chosen, EndpointState):
            self.placed_alone += 1
            self._place(ticket, chosen, now)
        else:
            ticket.state, ticket.outcome = TicketState.CLOSED, chosen
            del self._open[ticket.number]

    @staticmethod
    def _place(ticket: Ticket, state: EndpointState, now: float) -> None:
        state.in_flight += 1
        state.placed += 1
        ticket.state = TicketState.PLACED
        ticket.placed_on = state
        ticket.placed_at = now

    # Messages

    def _on_placed(self, message: Any) -> None:
        """Any: or compiled code looks at each field of the tuple."""
        one = self._open.get(message.number)
        if one is None or one.ticket.state is not TicketState.WAITING:
            return  # closed meanwhile; the balancer process is told, or was
        ticket, state = one.ticket, self.known.get(EndpointUid(message.uid))
        if state is None:
            raise LookupError(f"endpoint {message.uid} was not told")
        ticket.counted = True
        placed_at, rest = message.placed_at, message.rest
        waited, state.reported.asks_load, one.record.explanation, leg, first_uid, overflow, rates = (
            rest or m.USUAL_PLACEMENT
        )
        if rates is not None:
            ticket.flow = told_flow(rates)
        if not waited:  # the way of the messages is no wait
            ticket.submitted_at = placed_at
        ticket.predicted_prompt_tokens = message.prompt_tokens
        ticket.overflow = None if overflow is None else Overflow(overflow)
        if leg == PREFILL:
            ticket.request = ticket.request.as_leg(PREFILL)
        elif first_uid:
            self._place_first(ticket, EndpointUid(first_uid), placed_at)
        self._place(ticket, state, placed_at)
        one.settled(ticket)

    def _place_first(self, ticket: Ticket, uid: EndpointUid, now: float) -> None:
        """Both legs were placed; the ticket is that of the second one."""
        state = self.known.get(uid)
        if state is None:
            raise LookupError(f"endpoint {uid} was not told")
        ticket.prefill = first = Ticket(ticket.request.as_leg(PREFILL), ticket.submitted_at, inf, ticket.avoid)
        first.number, first.placed_on, first.placed_at = ticket.number, state, now
        ticket.request = ticket.request.as_leg(DECODE, uid)

    def _on_refused(self, message: m.Refused) -> None:
        one = self._open.get(message.number)
        if one is None or one.ticket.state is not TicketState.WAITING:
            return
        ticket = one.ticket
        ticket.retry_after_s = message.retry_after_s
        ticket.refusal = None if message.refusal is None else Refusal._make(message.refusal)
        ticket.flow = None if message.rates is None else told_flow(message.rates)
        self._end(ticket, m.OUTCOMES[message.outcome])
        one.settled(ticket)

    def _on_waits(self, message: m.Waits) -> None:
        one = self._open.get(message.number)
        if one is not None:
            one.ticket.flow = told_flow(message.rates)

    def _on_stranded(self, message: m.Stranded) -> None:
        one = self._open.get(message.number)
        if one is not None and not one.stranded:
            one.stranded, one.leaves = True, message.leaves
            self.loop.call_soon(self._move, one)

    def _move(self, one: _Open) -> None:
        """Have all stranded requests sent elsewhere, in one go: for the others it is done then."""
        if not one.stranded:
            return
        stranded = [other for other in self._open.values() if other.stranded]
        if self.move_stranded is not None:
            self.move_stranded()
        for other in (one, *stranded):
            other.stranded = False

    def _on_members(self, message: m.Members) -> None:
        news = (
            (read_endpoint(one), Health(one.health), one.draining, read_handover(one), one.dormant, one.process)
            for one in message.members
        )
        self.known.note_members(news, message.order, more=message.more)

    def _on_models(self, message: m.Models) -> None:
        cards = message.cards
        read = None if cards is None else [ModelCard(*msgspec.structs.astuple(one)) for one in cards]
        self.known.list_models(message.uids, read, gone=message.gone, adds=message.adds, more=message.more)

    def _on_remember(self, message: m.Remember) -> None:
        stored, uid = self.stored_responses, EndpointUid(message.uid)
        stored.remember(message.response_id, uid, message.request, now=self.now())

    def _on_refreshed(self, message: m.Refreshed) -> None:
        call = self._calls.get(message.call)
        if call is not None and not call.done():
            call.set_result(None)

    def _on_settle(self, message: m.Settle) -> None:
        self.known.block_bytes = message.block_bytes
        self.owner.settle(message.text)

    def _on_welcome(self, message: m.Welcome) -> None:
        """Tell it what runs, and what ended without it; it decides from now on."""
        assert self._link is not None
        self.known.block_bytes = message.block_bytes
        self._welcomed = True
        if self._reports.known_from:  # there was one before
            logger.info("a new balancer process places this worker's requests", extra={"event": "workers"})
        self._reports.known_from = self._last_number + 1
        self._link.feed(self._what_runs())

    def _what_runs(self) -> Iterator[Sent]:
        """What a new balancer process has to know. Of a request that ended or began anew meanwhile it was told."""
        for one in [*self._open.values()]:
            ticket = one.ticket
            number = ticket.number
            if self._open.get(number) is not one:
                continue
            if ticket.placed_on is None:
                yield one.submit
                continue
            told = ticket.response_tokens - self._reports.progress.get(number, 0)  # the rest is sent soon
            told_tokens = told if ticket.counted else None
            ticket.counted = True
            yield m.StillRunning(
                one.submit, ticket.placed_on.endpoint.key, ticket.first_byte_at is not None, told_tokens
            )
        yield from self._reports.take_unsent()
        yield m.Told()

    def _dropped(self, message: Any) -> None:
        """A message could not be sent. A request that waits because of it is refused; it may have had an origin."""
        self._reports.origins = Sending()
        number = message.number if isinstance(message, m.Submit) else message[1] if isinstance(message, tuple) else 0
        one = self._open.get(number)
        if one is not None and one.ticket.state is TicketState.WAITING:
            self.loop.call_soon(self._refuse, one)

    def _refuse(self, one: _Open) -> None:
        if self._end(one.ticket, Outcome.INTERNAL_ERROR):
            one.settled(one.ticket)
