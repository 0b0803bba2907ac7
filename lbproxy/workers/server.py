# SPDX-License-Identifier: Apache-2.0
"""The balancer process's end of the links: it does for every worker what exchanges do with a runtime in their process.

One `_Session` for each link. A request of a worker has a `_Job` from its first `Submit` (or `Running`) to its `Ended`:
its record, begun here so that those who look see what runs, and the ticket of its current attempt. Invariants:

- A link that is lost, for whatever reason, closes all tickets of its worker at once. What becomes of their records is
  known later (`workers.succession`).
- A worker is told of an endpoint before any request is placed there.
- What arrives for a number that is not known is dropped: it belongs to a request that another balancer process placed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from lbproxy.core.capacity.allowance import Rates
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Transition
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import compact
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, reported
from lbproxy.core.requests.retry import FailureKind, UpstreamError, Verdict
from lbproxy.driver.own_load import OwnLoad
from lbproxy.driver.runtime import Runtime
from lbproxy.workers import messages as m
from lbproxy.workers.contents import fill, fill_plain, member, placed
from lbproxy.workers.link import Link
from lbproxy.workers.origins import Receiving
from lbproxy.workers.succession import Succession
from lbproxy.workers.telling import Telling

logger = logging.getLogger("lbproxy")

TELL_EVERY_S: Final = 0.05
"""How soon workers learn that an endpoint changed, unless a request is placed there before."""
SETTLE_S: Final = 5.0
"""How long a reload waits for workers: they read files, and may be busy."""
UNHEARD_S: Final = 2.0
"""A worker that has not beaten for so long may decide alone."""
MEMBERS_AT_ONCE: Final = 500
"""In one message: about 150 KB."""
NOBODY: Final[frozenset[EndpointUid]] = frozenset()
NO_BEAT: Final = m.WorkerFigures(OwnLoad())
"""The figures of a worker that has not sent any yet."""


class _Job:
    """A request of a worker."""

    def __init__(self, session: Session, number: int, record: RequestRecord, submit: m.Submit) -> None:
        self.session = session
        self.number = number
        self.record = record
        self.submit = submit
        self.ticket: Ticket | None = None
        self.looked = False
        """All endpoints were asked for their models because of it."""

    def settled(self, ticket: Ticket) -> None:
        self.session.settled(self, ticket)


class Session:
    """One worker that is connected."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server
        self._runtime = server.runtime
        self.link: Link[m.FromWorker] = Link(m.FromWorker, self._received, self._lost)
        self.index = -1
        """-1: it has not said yet which worker it is."""
        self.pid = 0
        self.is_back = False
        """Its process had a link before this one."""
        self.beat = NO_BEAT
        self.cpu_share = 0.0
        """The share of one core that it used between its last two figures."""
        self._beat_at = 0.0
        self.jobs: dict[int, _Job] = {}
        self._origins = Receiving()
        self.adopted = asyncio.Event()
        """It uses the settings that it was sent last, or it is gone."""
        self.telling: Telling | None = None
        """What it is told of endpoints; None = nothing yet, as this process does not decide."""
        self.has_told = False
        """It has said all of its requests that run."""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            m.Hello: self._on_hello,
            m.Submit: self._on_submit,
            m.FirstByte: self._on_first_byte,
            m.ProgressMade: self._on_progress,
            m.Close: self._on_close,
            m.Answered: self._on_answered,
            m.Failed: self._on_failed,
            m.Stores: self._on_stores,
            m.LoadReported: self._on_load,
            m.Ended: self._on_ended,
            m.ServedAtOnce: self._on_served,
            m.StillRunning: self._on_running,
            m.DoubtModels: self._on_doubt_models,
            m.RefreshModels: self._on_refresh_models,
            m.WorkerFigures: self._on_beat,
            m.Adopted: lambda _: self.adopted.set(),
            m.Told: self._on_told,
        }

    # The link

    def _received(self, arrived: list[m.FromWorker]) -> None:
        handlers = self._handlers
        for message in arrived:
            try:
                handlers[type(message)](message)
            except Exception:  # one bad message must not cost the others
                logger.exception("a message of a worker process failed: %s", type(message).__name__)
                if isinstance(message, m.Submit):  # else its client would wait for ever
                    refused = m.OUTCOME_NUMBERS[Outcome.INTERNAL_ERROR]
                    self.link.send(m.Refused(message.number, refused, None, None))

    def _lost(self) -> None:
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            if job.ticket is not None:
                self._runtime.close(job.ticket, Outcome.INTERNAL_ERROR)
        self._server.succession.lost.add(self.index, self.pid, {job.number: job.record for job in jobs.values()})
        self.adopted.set()
        self._server.left(self)

    def _on_hello(self, message: m.Hello) -> None:
        self.index, self.pid = message.index, message.pid
        self._server.joined(self)

    def _on_told(self, _: m.Told) -> None:
        self.has_told = True

    def is_heard(self, now: float) -> bool:
        """Whether all of its requests are known: it places none by itself, and has said what ran before."""
        return self.has_told and now - self._beat_at <= UNHEARD_S

    def goes_on(self, before: Session) -> None:
        """It is the process whose link `before` is lost."""
        self.is_back = True
        self.beat, self._beat_at, self.cpu_share = before.beat, before._beat_at, before.cpu_share

    # Requests

    def _on_submit(self, message: m.Submit) -> None:
        job = self._job(message)
        job.looked = False
        self._submit(job, message, False)

    def _job(self, message: Any) -> _Job:
        """That of an attempt; it begins with the first one. Any: or compiled code looks at each field of the tuples."""
        number, origin = message.number, self._origins.origin(message.origin)
        job = self.jobs.get(number)
        if job is not None:
            return job
        request: m.Fields = message.request
        record = self._lost_record(number) or RequestRecord(
            request[0], origin[0], origin[1], origin[2], message.started_at
        )
        record.route, record.key = origin[3], origin[4]
        record.model, record.stream = request[1], request[2]
        job = self.jobs[number] = _Job(self, number, record, message)
        return job

    def _lost_record(self, number: int) -> RequestRecord | None:
        """The record of a request that began over an earlier link of this worker's process."""
        return self._server.succession.lost.take(self.pid, number) if self.is_back else None

    def _submit(self, job: _Job, message: Any, again: bool) -> None:
        """Any: see `_job`. `again`: after a look for its model."""
        runtime, job.submit = self._runtime, message
        request: InferenceRequest = message.request
        attempt: m.Fields | None = message.attempt
        avoid, suspect = NOBODY, None
        if attempt is not None:
            uids, suspect, asked_again, owner = attempt
            again = again or asked_again
            if uids:
                avoid = frozenset(EndpointUid(uid) for uid in uids)
            if owner is not None and request.response_id is not None:
                runtime.owns_response(owner, request.response_id, request)
        record = job.record
        record.flow, record.model, record.fallback_from = request.flow, request.model, request.fallback_from
        ticket = runtime.submit(
            request,
            job.record,
            avoid,
            job.settled,
            None if suspect is None else EndpointUid(suspect),
            again,
        )
        job.ticket = ticket
        if ticket.wait is not None:
            job.record.note_wait(ticket)
        if ticket.state is not TicketState.WAITING:
            self.settled(job, ticket)
        elif (rates := self._rates(ticket)) is not None:
            self.link.send(m.Waits(job.number, rates))

    def _rates(self, ticket: Ticket) -> Rates | None:
        return None if ticket.flow is None else ticket.flow.rates(self._runtime.now())

    def settled(self, job: _Job, ticket: Ticket) -> None:
        """The ticket was placed, or closed without a place."""
        if ticket.placed_on is None:
            self._refused(job, ticket)
            return
        record, explanation, prompt_tokens = job.record, None, 0.0
        record.note_placed(ticket)
        record.note_prediction(ticket)
        if ticket.decision is not None and ticket.request.explain and record.attempt_decision is not None:
            explanation = compact(record.attempt_decision)
        if ticket.placement is not None:
            prompt_tokens = ticket.placement.prompt_tokens
        self._server.tell()  # by this the worker judges what follows a failure
        self.link.send(placed(job.number, ticket, prompt_tokens, explanation))

    def _refused(self, job: _Job, ticket: Ticket) -> None:
        assert ticket.outcome is not None
        if ticket.outcome is Outcome.MODEL_NOT_FOUND and not job.looked:
            job.looked = True
            if self._runtime.look_for_models(lambda: self._after_look(job)):
                return
        self._server.tell()  # what is said to the client depends on whether any endpoint is up
        outcome = m.OUTCOME_NUMBERS[ticket.outcome]
        self.link.send(m.Refused(job.number, outcome, ticket.retry_after_s, ticket.refusal, self._rates(ticket)))

    def _after_look(self, job: _Job) -> None:
        if job.number in self.jobs:
            self._server.tell()  # the models that were found
            self._submit(job, job.submit, True)

    def _ticket(self, number: int) -> Ticket | None:
        job = self.jobs.get(number)
        return None if job is None else job.ticket

    def _placed(self, number: int) -> Ticket | None:
        """The ticket of a request that is placed; None: an earlier one, or none."""
        ticket = self._ticket(number)
        return ticket if ticket is not None and ticket.state is TicketState.PLACED else None

    def _on_first_byte(self, message: m.FirstByte) -> None:
        if (ticket := self._placed(message.number)) is not None:
            self._runtime.first_byte(ticket)

    def _on_progress(self, message: m.ProgressMade) -> None:
        for number, tokens in message.tokens.items():
            if (ticket := self._placed(number)) is not None:
                self._runtime.progress(ticket, tokens)

    def _on_close(self, message: m.Close) -> None:
        job = self.jobs.get(message.number)
        if job is not None and job.ticket is not None:
            self._runtime.close(job.ticket, m.OUTCOMES[message.outcome], message.usage, timed_out=message.timed_out)

    def _on_answered(self, message: m.Answered) -> None:
        if (ticket := self._placed(message.number)) is not None:
            runtime, outcome = self._runtime, m.OUTCOMES[message.outcome]
            runtime.answered(ticket, outcome, message.usage, began=message.began, now=runtime.now())

    def _on_failed(self, message: m.Failed) -> None:
        if (ticket := self._placed(message.number)) is not None:
            kind, after_s = FailureKind(message.kind), message.retry_after_s
            error = UpstreamError(kind, message.detail, refused=message.refused, retry_after_s=after_s)
            earlier = [FailureKind(one) for one in message.earlier]
            if message.first_leg and ticket.prefill is not None:
                ticket = ticket.prefill
            self._runtime.after_failure(ticket, error, earlier, Verdict(message.retry, m.OUTCOMES[message.outcome]))

    def _on_stores(self, message: m.Stores) -> None:
        if (ticket := self._placed(message.number)) is not None:
            self._runtime.stores(ticket, message.response_id)
            uid = ticket.placed_state.endpoint.uid
            note = m.Remember(message.response_id, uid, ticket.request)
            for other in self._server.sessions:
                if other is not self:
                    other.link.send(note)

    def _on_load(self, message: m.LoadReported) -> None:
        if (ticket := self._placed(message.number)) is not None:
            self._runtime.report_load(ticket, message.report)

    def _on_ended(self, message: m.Ended) -> None:
        job = self.jobs.pop(message.number, None)
        if job is None:
            lost = self._lost_record(message.number)
            record = lost or RequestRecord(message.id, message.method, message.path, message.client, message.started_at)
            if lost is None and message.usage is not None and message.flow is not None:  # its worker placed it alone
                used = reported(message.usage)
                self._runtime.balancer.ledger.add(message.flow, message.model, used)
        else:
            record = job.record
            ticket = job.ticket
            if ticket is not None and ticket.state is not TicketState.CLOSED:  # only after a defect
                self._runtime.close(ticket, m.OUTCOMES[message.outcome])
        self._runtime.emit(fill(record, message))

    def _on_served(self, message: m.ServedAtOnce) -> None:
        job = self.jobs.pop(message.number, None)
        if job is None:
            return
        runtime, record, ticket = self._runtime, job.record, job.ticket
        what: m.Fields = cast(Any, message).what  # see `_job`
        outcome = fill_plain(record, what)
        if ticket is not None and ticket.state is not TicketState.CLOSED:
            if what[0] and ticket.state is TicketState.PLACED:
                runtime.answered(ticket, outcome, record.usage, began=what[1], now=runtime.now())
            else:  # only after a defect
                runtime.close(ticket, outcome)
        runtime.emit(record)

    def _on_running(self, message: m.StillRunning) -> None:
        """A request that was placed by another balancer process, or by the worker alone."""
        job = self._job(message.submit)
        request, told_tokens = message.submit.request, message.told_tokens
        job.ticket = self._runtime.adopt(request, message.url, began=message.began, told_tokens=told_tokens)

    def strand(self) -> None:
        """Tell the worker which of its requests are stranded."""
        for job in self.jobs.values():
            ticket = job.ticket
            if ticket is not None and ticket.state is TicketState.PLACED and self._runtime.is_stranded(ticket):
                self.link.send(m.Stranded(job.number, ticket.first_byte_at is not None))

    # Models and figures

    def _on_doubt_models(self, message: m.DoubtModels) -> None:
        self._runtime.doubt_models(EndpointUid(message.uid))

    def _on_refresh_models(self, message: m.RefreshModels) -> None:
        self._server.spawn(self._refresh(message))

    async def _refresh(self, message: m.RefreshModels) -> None:
        await self._runtime.refresh_models(EndpointUid(message.uid))
        self._server.tell()
        refreshed = m.Refreshed(message.call)
        if self.telling is not None:
            self.telling.after(refreshed)
        else:
            self.link.send(refreshed)

    def _on_beat(self, message: m.WorkerFigures) -> None:
        now = self._runtime.now()
        if self.beat is not NO_BEAT:
            self.cpu_share = (message.cpu_s - self.beat.cpu_s) / max(0.001, now - self._beat_at)
        self.beat, self._beat_at = message, now
        self._server.on_beat(self)
        self.link.send(m.Pong())


class WorkerServer:
    """All workers, as the balancer process sees them. `listen`, then `close`. A sink of the Runtime's."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        runtime.move_stranded = self._strand
        self.sessions: list[Session] = []
        self.told: Mapping[EndpointUid, tuple[object, ...]] = {}
        """The endpoints that workers know, each with what they were told of it."""
        self.succession: Succession[Session] = Succession(runtime)
        self.on_beat: Callable[[Session], None] = lambda _: None
        """Called with each worker whose figures arrived."""
        self._lists: Mapping[EndpointUid, object] = {}
        """Model lists of endpoints, as workers were told last."""
        self._version = -1
        self._text: str | None = None
        """The text of the settings that workers were told to use last."""
        self._log_level: str | None = None
        """If it is another than that of the settings."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = False
        self.most_sessions = 0
        """Workers that were there at one time, at most."""
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, path: str) -> None:
        """Accept links on a Unix socket that is made now. Raises OSError."""
        self._server = await self.runtime.loop.create_unix_server(self._accept, path)
        self._tick()

    def _accept(self) -> asyncio.Protocol:
        return Session(self).link.protocol()

    def close(self) -> None:
        """End all links."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for session in (*self.sessions, *self.succession.early):
            session.link.close()
        self.succession.lost.close()

    def ready(self) -> None:
        """Decide from now on, for the workers that are there and those that come."""
        self._ready = True
        for session in self.sessions:
            self._welcome(session)

    def joined(self, session: Session) -> None:
        """A worker said which one it is."""
        if self.succession.wait_for_earlier(session, self.sessions):
            return
        self.succession.joined(session)
        self.sessions.append(session)
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        self.sessions.sort(key=lambda one: one.index)
        if self._ready:
            self._welcome(session)

    def left(self, session: Session) -> None:
        """Its link is lost."""
        self.succession.stop_waiting(session)
        if session in self.sessions:
            self.sessions.remove(session)
            following = self.succession.left(session)
            if following is not None:
                self.joined(following)

    async def settle(self, text: str) -> None:
        """Have all workers use other settings, also those that come later; returns when those that are there do, or
        after `SETTLE_S`.
        """
        self._text, self._log_level = text, None
        self.tell()
        told = list(self.sessions)
        for session in told:
            self._settle(session, text)
        try:
            async with asyncio.timeout(SETTLE_S):
                for session in told:
                    await session.adopted.wait()
        except TimeoutError:
            text = "not all workers use the new settings after %g s"
            logger.error(text, SETTLE_S, extra={"event": "workers"})

    def _settle(self, session: Session, text: str) -> None:
        session.adopted.clear()
        session.link.send(m.Settle(text, self.runtime.block_bytes))

    def set_log_level(self, level: str) -> None:
        """Have all workers log from this level on, also those that come later, until there are other settings."""
        self._log_level = level
        for session in self.sessions:
            session.link.send(m.LogLevel(level))

    def heard(self) -> int:
        """How many workers have said all of their requests, and place none alone."""
        now = self.runtime.now()
        return sum(one.is_heard(now) for one in self.sessions)

    def running_records(self) -> Iterable[RequestRecord]:
        """The records of requests that run."""
        return [job.record for session in self.sessions for job in session.jobs.values()]

    def spawn(self, work: Any) -> None:
        """Run a coroutine that ends by itself."""
        task = self.runtime.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _welcome(self, session: Session) -> None:
        self.tell()
        for message in _members([*self.runtime.members()], [*self.told]):
            session.link.send(message)
        if self._text is not None:  # it may have been started with the settings of before
            self._settle(session, self._text)
        if self._log_level is not None:
            session.link.send(m.LogLevel(self._log_level))
        session.telling = telling = Telling(self.runtime, session.link)
        telling.tell(self.told)
        telling.after(m.Welcome(self.runtime.block_bytes))

    # What workers know of endpoints

    def ended(self, records: list[RequestRecord]) -> None:
        """See runtime.Sink. Nothing follows."""

    def transition(self, transition: Transition) -> None:
        """See runtime.Sink. Workers learn it at once."""
        if self.sessions:
            self.runtime.loop.call_soon(self.tell)

    def tell(self) -> None:
        """Tell the workers what changed of the endpoints since they were told last. O(endpoints) if anything did."""
        version = self.runtime.balancer.endpoints.version
        if version == self._version:
            return
        self._version = version
        before, listed_before = self.told, self._lists
        members = [*self.runtime.members()]
        told = {
            one.endpoint.uid: (one.endpoint, one.health, one.draining, one.dormant, one.handover, one.standing.process)
            for one in members
        }
        lists = {one.endpoint.uid: one.models for one in members}
        self.told, self._lists = told, lists
        changed, moves = [], len(told) != len(before) or [*told] != [*before]
        for one in members:
            uid = one.endpoint.uid
            known = before.get(uid)
            if known != told[uid]:
                changed.append(one)
                moves = moves or known is None or known[0] != one.endpoint
        listed = [uid for uid, models in lists.items() if uid not in before or listed_before[uid] is not models]
        messages = _members(changed, [*told] if moves else None) if changed or moves else []
        for session in self.sessions:
            if session.telling is not None:
                for message in messages:
                    session.link.send(message)
                session.telling.tell(listed)

    def _tick(self) -> None:
        self.tell()
        self._timer = self.runtime.loop.call_later(TELL_EVERY_S, self._tick)

    def _strand(self) -> None:
        for session in self.sessions:
            session.strand()


def _members(states: list[EndpointState], order: list[EndpointUid] | None) -> list[m.Members]:
    """What is new of members, in messages of a bounded size."""
    pieces = [states[start : start + MEMBERS_AT_ONCE] for start in range(0, len(states), MEMBERS_AT_ONCE)] or [[]]
    said = [m.Members([_member(one) for one in piece], None, True) for piece in pieces[:-1]]
    return [*said, m.Members([_member(one) for one in pieces[-1]], None if order is None else [*order])]


def _member(one: EndpointState) -> m.Member:
    facts = one.endpoint, one.health.value, one.handover
    return member(*facts, draining=one.draining, dormant=one.dormant, process=one.standing.process)
