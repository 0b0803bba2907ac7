# SPDX-License-Identifier: Apache-2.0
"""The Balancer: a driver reports events with the current time, and the Balancer decides where each request goes.

It does no I/O. It owns the endpoint set, tickets and the waiting queue; `core.queue.choice` chooses. The asyncio
runtime, the simulation and the tests drive it in the same way, in five steps:

1. It reports every event as it happens (`submit`, `first_byte`, `progress`, `close`, `report_*`, `set_endpoints`).
2. After any event it calls `poll`, and acts on the returned tickets: each of them was placed or closed just now.
3. It calls `poll` again at `next_deadline`, and `check` every `CHECK_S` seconds.
4. It calls `close` exactly once for every ticket that was placed, however its request ended.
5. It reads and clears `transitions` regularly, and logs them.

Late binding: under a policy that `holds`, a request whose best endpoint is full (`core.capacity.room`) stays in the
queue, with a reservation at that endpoint. New requests are priced against these reservations. They are placed at once,
unless the endpoint that is best for them is full or has reservations too. An event at an endpoint wakes it: while it
has room, waiting requests are considered in the order of service, first those that are held for it, then a few others
that may do better there. Without events it only wakes endpoints that have worked off enough of their prefill queue.

Invariants: an endpoint's in-flight count is the number of its PLACED tickets; a ticket closes once (a second `close`
has no effect); nothing here awaits, so no two requests are placed by the same outdated state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import inf

from mypy_extensions import mypyc_attr

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.caches.cache_report import CacheReport
from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges, EndpointSet, is_emptied
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Handover
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.observed.learned import (
    EndpointLearned,
    PoolLearned,
    QueueSnapshot,
    of_endpoint,
    of_pool,
    of_queue,
    of_transfer,
)
from lbproxy.core.observed.ledger import Ledger
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.placing import Placing
from lbproxy.core.policies.policy import Policy
from lbproxy.core.queue.candidates import Candidates
from lbproxy.core.queue.choice import Choice, model_for
from lbproxy.core.queue.dispatcher import Dispatcher
from lbproxy.core.queue.failed_attempts import FailedAttempts
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.limits import Limits
from lbproxy.core.queue.overdue import Overdue
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.queue.ticket import Answer, Ticket, TicketState, Turn, Wait
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.replicas.peers import Peers
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, MAX_TIER, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, Retries, Verdict
from lbproxy.core.restarts import Restarts
from lbproxy.core.scaling.advice import Advice
from lbproxy.core.sleeping.sleepers import Sleepers


@mypyc_attr(allow_interpreted_subclasses=True)  # the simulation has some
class Balancer:
    """Places requests on endpoints. The module describes what a driver must do."""

    def __init__(self, policy: Policy, settings: BalancingSettings, *, rng: random.Random, first_uid: int = 0) -> None:
        """Uids of endpoints are larger than `first_uid`: a balancer after another uses none of its uids."""
        self._retries, self._backpressure = Retries(settings.retry, rng), Backpressure()
        self._pool = model_for(policy)
        self._endpoints = EndpointSet(settings, self._pool, rng, first_uid)
        self._judge = self._endpoints.judge
        limits = Limits()
        self._flows, self._queue = Flows(settings.flows, limits), WaitingQueue(settings.admission)
        self.stored_responses = StoredResponses()
        """The driver notes here which endpoint stores which response."""
        self._candidates = Candidates(self._endpoints, self.stored_responses, limits)
        self._choice = Choice(self._candidates, self._endpoints, self._backpressure, self._queue, rng)
        self._choice.reconfigure(policy, settings.admission, settings.overflow)
        self._failures = FailedAttempts(self._retries, self._backpressure, self._judge, self._candidates)
        self._dispatcher = Dispatcher(self._endpoints, self._candidates, self._choice, self._queue, self._flows)
        owner, wake_all = self._candidates.response_owner, self._dispatcher.wake_all
        self.sleepers = Sleepers(self._endpoints, self._queue, owner, wake_all)
        """Which endpoints sleep. It has a driver of its own, which carries out its orders."""
        self.sleepers.reconfigure(settings.hosts)
        self._choice.wakes_in_s, self._choice.passed_by = self.sleepers.wakes_in_s, self.sleepers.passed_by
        self.restarts = Restarts(self._endpoints, self._flows, self.sleepers)
        """What survives a restart: exported at any time, restored before the first request."""
        self._overdue = Overdue(self._endpoints, self._choice, self._dispatcher, self._queue)
        self._reconfigure_queue(settings.admission)
        parts = self._endpoints, self._flows, self._backpressure, self._dispatcher
        self._placing = Placing(*parts, Advice(settings.autoscaling.ttft, settings.autoscaling.window))
        self._changed: list[Ticket] = []
        """Tickets that were closed because another ticket arrived; `poll` returns them."""

    def _reconfigure_queue(self, admission: AdmissionSettings) -> None:
        self._queue_timeout_s = admission.queue_timeout
        self._dispatcher.reconfigure(admission, self._pool)

    def reconfigure(self, policy: Policy | None, settings: BalancingSettings, *, now: float) -> None:
        """Replace the settings. What was learned of endpoints stays, and placed requests keep their places.

        `policy`: None keeps the policy and what it has learned. Another policy keeps learned work and caches, unless it
        needs blocks of another size. No waiting request waits longer than the new settings allow.
        """
        policy = policy or self._choice.policy
        if policy.block_bytes != self._choice.policy.block_bytes:
            self._pool = model_for(policy)
            self._endpoints.adopt_pool(self._pool)
        self._endpoints.limit_index(policy.index_entries)
        self._retries.reconfigure(settings.retry)
        self._endpoints.reconfigure(settings)
        self.sleepers.reconfigure(settings.hosts)
        self._queue.reconfigure(settings.admission, now=now)
        self._flows.reconfigure(settings.flows, now)
        self._placing.advice.reconfigure(settings.autoscaling.ttft, settings.autoscaling.window)
        for flow in self._flows:
            self._unpark(flow, now)
        self._choice.reconfigure(policy, settings.admission, settings.overflow)
        if self._placing.journal is not None:
            self._placing.journal.block_bytes = policy.block_bytes
        self._reconfigure_queue(settings.admission)

    # Requests

    def submit(
        self,
        request: InferenceRequest,
        *,
        now: float,
        avoid: frozenset[EndpointUid] = frozenset(),
        suspect: EndpointUid | None = None,
        resubmitted: bool = False,
    ) -> Ticket:
        """Ask for a place. The returned ticket is placed, closed with a reason, or waiting (`poll` returns it later).

        The second leg of a split request never waits. `avoid`: endpoints that already failed this request; NO_ENDPOINTS
        if no others are left. `suspect`: the one of them that returned 500. `resubmitted`: submitted before, and not
        counted again for limits or the retry budget.
        """
        expires_at = now + self._queue_timeout_s
        expires_at = expires_at if request.deadline is None else min(expires_at, request.deadline)
        ticket = Ticket(request, now, expires_at, avoid)
        ticket.flow = flow = self._flows.of(request.flow, now)
        ticket.suspect = suspect
        if request.leg == DECODE:
            self._place_second(ticket, now)
            return ticket
        if not (avoid or resubmitted):
            self._retries.count_request(now=now)
            if flow.limited:
                ticket.refusal = self._flows.admit(flow, request, now)
                if ticket.refusal is not None:
                    ticket.retry_after_s = ticket.refusal.retry_after_s
                    self._end(ticket, Outcome.RATE_LIMITED, now)
                    return ticket
            self._placing.advice.demand.arrived(request)
        elif request.fallback_from is not None and not avoid:
            self._placing.advice.demand.arrived(request)
        if flow.limited and flow.is_full:
            ticket.wait = Wait.FLOW
            hopeless = self._candidates.outcome_if_hopeless(ticket, now=now)
            if hopeless is None:
                self._wait(ticket, now, parked=True)
            else:
                self._end(ticket, hopeless, now)
            return ticket
        self._begin_to_wait(ticket, now)
        if self._queue.ready:
            self._dispatcher.wake_due(now)
            if self._dispatcher.has_work:
                self._dispatcher.serve(now, self._consider, self._changed)  # waiting requests come first
        self._consider(ticket, now)
        if ticket.state is TicketState.WAITING and (late := self._dispatcher.lateness(ticket, now)) is not None:
            self._refuse(ticket, late, now)
        if ticket.state is TicketState.WAITING:
            self._wait(ticket, now)
        return ticket

    def adopt(
        self, request: InferenceRequest, uid: EndpointUid, *, began: bool, told_tokens: int | None, now: float
    ) -> Ticket:
        """Return the ticket of a request that was placed at this member by another balancer, or by none. It counts as
        in flight, but teaches nothing; the engine's gauges show its work.

        `began`: its response has begun. `told_tokens`: of the response, those that the other balancer counted; None:
        it did not count the request.
        """
        state = self._endpoints.get(uid)
        assert state is not None
        ticket = Ticket(request._replace(open_ended=True, max_tier=MAX_TIER), now, now, frozenset())  # it runs there
        ticket.flow = flow = self._flows.of(request.flow, now)
        ticket.counted, ticket.response_tokens = told_tokens is not None, told_tokens or 0
        self._place(ticket, Answer(state), state, now)
        flow.active, ticket.counts_in_flow = flow.active + 1, True
        if began:
            self.first_byte(ticket, now=now)
        return ticket

    def poll(self, *, now: float) -> list[Ticket]:
        """Return the tickets that stopped waiting: placed now, closed with a reason, or shed for another request."""
        changed, self._changed = self._changed, []
        if self._queue:
            self._dispatcher.wake_due(now)
            if self._dispatcher.has_work:
                self._dispatcher.serve(now, self._consider, changed)
            self._overdue.serve(now, self._consider, changed)
            for ticket in self._queue.expired(now):
                deadline = ticket.request.deadline
                too_late = Outcome.EXPIRED if deadline is None or now < deadline else Outcome.TOO_LATE
                ticket.retry_after_s = ticket.best_wait_s or None
                self._refuse(ticket, too_late if self._endpoints.any_up() else Outcome.NO_ENDPOINTS, now)
                changed.append(ticket)
        if not self._queue:
            self._dispatcher.clear(now)
        return changed

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        """Report the first byte of a successful response's body. Later calls for the same ticket have no effect."""
        self._placing.first_byte(ticket, now)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        """Report `tokens` more of the response, as far as known. At most every 250 ms per stream, not per chunk."""
        self._placing.progress(ticket, tokens, now)

    def close(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, timed_out: bool = False
    ) -> None:
        """End the request, or this attempt at it. Allowed in every state; only the first call counts.

        `usage`: as the endpoint reported it. `timed_out`: the response broke as the endpoint was silent for too long.
        """
        if ticket.state is TicketState.CLOSED:
            return
        self._placing.end(ticket, outcome, usage, now, timed_out=timed_out)
        self._end(ticket, outcome, now)

    def after_failure(  # noqa: PLR0913 - what is known of a failure
        self,
        ticket: Ticket,
        kind: FailureKind,
        earlier: Sequence[FailureKind],
        *,
        now: float,
        detail: str = "",
        refused: bool = False,
        decided: Verdict | None = None,
        retry_after_s: float | None = None,
    ) -> Verdict:
        """Decide what follows an attempt that failed before any of a response's body went to the client.

        `earlier`: why earlier attempts failed. `detail`: for the log. `refused`: nothing listens there. `decided`: by a
        worker process, by its own budget. `retry_after_s`: as the endpoint said. Does not close.
        """
        state = ticket.placed_state
        why = detail or kind.value
        verdict, counts = self._failures.decide(
            ticket, kind, earlier, now=now, why=why, refused=refused, decided=decided, retry_after_s=retry_after_s
        )
        if self._queue and now < (held_until := state.held_until(ticket.request.model)):
            self._dispatcher.wake_at(state.endpoint.uid, held_until)
        if counts:
            self._dispatcher.wake_all()
        return verdict

    def next_deadline(self) -> float | None:
        """The time at which to call `poll` if no event comes before; None = never. It may be in the past."""
        if self._changed or self._dispatcher.has_work:
            return -inf
        first = self._queue.first_deadline()
        return None if first is None else min(first, self._dispatcher.next_wake_at, self._overdue.next_at())

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        """Replace the set of endpoints, as discovery found it. Names and addresses must be distinct."""
        self._dispatcher.wake_all()
        changes = self._endpoints.replace(specs, now=now)
        self.sleepers.follow(now)
        self.restarts.follow(now)
        return changes

    def check(self, *, now: float) -> list[EndpointUid]:
        """Apply what time alone changes, every `CHECK_S`. Returns endpoints where requests may be stranded: for each
        ticket there that `is_stranded`, call `after_failure` with STRANDED.
        """
        before, stranding = self._endpoints.version, self._endpoints.check(now=now)
        if self._endpoints.version != before:
            self._dispatcher.wake_all()
        waiting, overloaded = (ticket.request.model for ticket in self._queue), self._queue.overload.is_lasting
        learns = self._pool is not None
        self._placing.advice.look(self._endpoints, waiting, now, learns=learns, overloaded=overloaded)
        return stranding

    def is_stranded(self, ticket: Ticket, *, now: float) -> bool:
        """Whether a placed request waits for a first byte from an endpoint that shows no sign of life, or is to go on
        elsewhere as its endpoint drains.
        """
        if is_emptied(ticket.placed_state, now):
            return True
        watch = self._judge.progress
        return ticket.first_byte_at is None and watch.is_dead(ticket.placed_state, now, stream=ticket.request.stream)

    @property
    def transitions(self) -> list[Transition]:
        """Endpoint transitions since the driver last cleared this list, which it owns."""
        return self._judge.transitions

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, now: float, refused: bool = False) -> None:
        """Report the result of a probe. `refused`: no process listens there."""
        self._dispatcher.wake_all()
        self._endpoints.report_health(uid, ok, reason, now=now, refused=refused)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """Report the models that an endpoint lists; None if it has no such list."""
        self._dispatcher.wake_all()
        self._endpoints.report_models(uid, cards)

    def scrape_sent(self, uid: EndpointUid) -> None:
        """Report that a scrape is sent now."""
        self._endpoints.scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """Report the result of the scrape that was sent last."""
        self._endpoints.report_scrape(uid, metrics)
        self._dispatcher.wake(self._endpoints.get(uid))

    def report_load(self, ticket: Ticket, report: LoadReport | None, *, now: float) -> None:
        """Report the load report that came with a placed request's response; None = it was malformed."""
        has_first_byte = ticket.first_byte_at is not None
        self._endpoints.report_load(ticket.placed_state, report, has_first_byte=has_first_byte, now=now)

    def report_cache(self, uid: EndpointUid, report: CacheReport) -> None:
        """Report what an endpoint's KV events show. That it is a new process a scrape with `started_at` shows too."""
        self._dispatcher.wake(self._endpoints.report_cache(uid, report))

    def report_cache_size(self, uid: EndpointUid, tokens: int, *, at_most: bool = False) -> None:
        """Report the KV cache size that an endpoint states of itself. `at_most`: an upper bound."""
        self._dispatcher.wake(self._endpoints.report_cache_size(uid, tokens, at_most))

    def report_slots(self, uid: EndpointUid, slots: int) -> None:
        """Report how many requests an endpoint states that it runs at once."""
        self._dispatcher.wake(self._endpoints.report_slots(uid, slots))

    def report_role(self, uid: EndpointUid, handover: Handover) -> None:
        """Report what an engine says of its part where prefill and decode are apart."""
        self._dispatcher.wake_all()
        self._endpoints.report_role(uid, handover)

    def drain(self, uid: EndpointUid, *, draining: bool = True, emptied_at: float = inf) -> None:
        """Drain an endpoint: it gets no new requests. `draining=False` ends that. `emptied_at`: from when on streams
        that can go on elsewhere are `is_stranded`.
        """
        self._dispatcher.wake_all()
        self._endpoints.drain(uid, draining, emptied_at)

    def explain(self, wanted: bool) -> None:
        """Set whether tickets that are placed from now on get a `Ticket.decision`."""
        self._choice.explains = wanted

    # Other replicas

    def share(self, replica: str) -> tuple[Journal, Peers]:
        """Tell other replicas of every request from now on, and count theirs. `replica`: the id of this one.

        The driver sends what it takes from the journal, and calls `poll` after it reported a batch to the peers.
        """
        self._placing.journal = journal = Journal(replica, self.block_bytes, self._endpoints, self._flows)
        self.stored_responses.told = journal.stored
        wake, unpark = self._dispatcher.wake, self._unpark
        return journal, Peers(journal, self._endpoints, self._flows, self.stored_responses, wake=wake, unpark=unpark)

    # Reading

    @property
    def ledger(self) -> Ledger:
        """Who used how many tokens."""
        return self._placing.ledger

    @property
    def block_bytes(self) -> int | None:
        """The block size in which prompts must be hashed; None = prompts need not be read."""
        return self._choice.policy.block_bytes

    @property
    def endpoints(self) -> EndpointSet:
        """The endpoints. To be read only."""
        return self._endpoints

    def wants_scrape(self, uid: EndpointUid) -> bool:
        """Whether a server's metrics are to be scraped: it is up, or has requests of ours, or sleeps by their word."""
        ranks = self._endpoints.at_address(uid)
        return any(
            state.health is Health.UP or state.in_flight > 0 or (state.metrics is not None and state.metrics.asleep)
            for state in ranks
        )

    def snapshot(self, *, now: float) -> PoolSnapshot:
        """A snapshot of the pool."""
        flows, sleep = self._flows.snapshot(self._queue.by_flow()), self.sleepers.snapshot(now)
        transfer = None if self._pool is None else of_transfer(self._pool)
        endpoints, models = self._endpoints.snapshot(now=now), self._placing.advice.models
        in_memory = self.sleepers.in_memory(now)
        return PoolSnapshot(endpoints, len(self._queue), self._queue.bytes, flows, transfer, models, sleep, in_memory)

    def unavailable(self) -> Sequence[tuple[Endpoint, str]]:
        """Endpoints that take no requests, with the reasons: the first of them."""
        return self._endpoints.unavailable()

    def learned(self, *, now: float) -> tuple[PoolLearned, dict[EndpointUid, EndpointLearned]] | None:
        """What was learned of speeds and caches; None under policies that learn nothing."""
        if self._pool is None:
            return None
        return of_pool(self._pool), self.learned_of(self._endpoints.members(), now=now)

    def learned_of(self, states: Iterable[EndpointState], *, now: float) -> dict[EndpointUid, EndpointLearned]:
        """The same of these endpoints alone."""
        concerns, known = self._queue.overload.concerns, states if self._endpoints.has_loads else ()
        return {one.endpoint.uid: of_endpoint(one.load, now, concerns(one.endpoint.tier)) for one in known}

    def queue(self, *, now: float) -> QueueSnapshot:
        """A summary of the waiting requests. O(n)."""
        return of_queue(self._queue, self._queue.bytes, now=now)

    # Placing

    def _consider(self, ticket: Ticket, now: float, turn: Turn | None = None) -> None:
        """Place the ticket, close it if waiting cannot help, or leave it waiting. `turn`: see `Choice.choose`."""
        answer = self._choice.choose(ticket, now=now, turn=turn)
        chosen, ticket.best = answer.chosen, answer.best
        if isinstance(chosen, EndpointState):
            self._place(ticket, answer, chosen, now)
        elif isinstance(chosen, Outcome):
            if answer.retry_after_s is not None:
                ticket.retry_after_s = answer.retry_after_s
            self._end(ticket, chosen, now)
        else:
            if answer.best is not None:
                ticket.best_wait_s, ticket.best_tokens = answer.best_wait_s, answer.best_tokens
            self._dispatcher.claim(ticket, answer.short, now)
            if ticket.wait is None:
                ticket.wait = chosen
                if chosen is Wait.WAKING and (refusal := self.sleepers.refusal(ticket, now)) is not None:
                    self._refuse(ticket, refusal, now)
                elif self._dispatcher.exceeds_timeout(ticket, now):
                    ticket.retry_after_s = ticket.best_wait_s
                    self._refuse(ticket, Outcome.SATURATED, now)
            ticket.priced_at = now

    def _place(self, ticket: Ticket, answer: Answer, state: EndpointState, now: float) -> None:
        """Place the ticket as the answer says: at `state`."""
        ticket.decision, ticket.overflow = answer.decision, answer.overflow
        self._placing.place(ticket, state, answer.decode_on, now)

    def _place_second(self, ticket: Ticket, now: float) -> None:
        """Place the second leg of a split request at once, or close it. Its first leg counted for limits."""
        answer = self._choice.choose_second(ticket, now=now)
        if isinstance(answer.chosen, EndpointState):
            self._place(ticket, answer, answer.chosen, now)
        else:
            self._end(ticket, Outcome.NO_ENDPOINTS, now)

    # Waiting

    def _wait(self, ticket: Ticket, now: float, *, parked: bool = False) -> None:
        """Put the ticket into the queue, and close the tickets that are shed for it."""
        if not parked:
            if (best := ticket.best) is not None:
                ticket.full_by = best.load.full_by(now, self._queue.overload.concerns(best.endpoint.tier))
            self._dispatcher.start_waiting(ticket, now)
        for shed in self._queue.push(ticket, parked=parked):
            shed.retry_after_s = shed.best_wait_s or None
            self._refuse(shed, Outcome.SATURATED, now)
            if shed is not ticket:
                self._changed.append(shed)
        self._overdue.add(ticket, now)

    @staticmethod
    def _begin_to_wait(ticket: Ticket, now: float) -> None:
        """Its flow lets it wait for an endpoint."""
        assert ticket.flow is not None
        ticket.flow.active += 1
        ticket.counts_in_flow = True
        after_s = ticket.request.fallback_after_s
        if after_s is not None:
            ticket.expires_at = min(ticket.expires_at, now + after_s)

    def _unpark(self, flow: Flow, now: float) -> None:
        """Let parked requests of the flow wait for an endpoint, as many as its limit allows."""
        while not flow.is_full and (ticket := self._queue.parked(flow)) is not None:
            self._begin_to_wait(ticket, now)
            self._queue.unpark(ticket)
            self._dispatcher.wake_all()

    def _refuse(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        """End a ticket for lack of room; or place it on a higher tier, if one has some."""
        if self._endpoints.has_tiers and ticket.counts_in_flow:
            answer = self._choice.elsewhere(ticket, outcome, now)
            if answer is not None and isinstance(answer.chosen, EndpointState):
                self._queue.remove(ticket)
                self._place(ticket, answer, answer.chosen, now)
                return
        self._end(ticket, outcome, now)

    def _end(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        if ticket.state is TicketState.WAITING:
            self._queue.remove(ticket)
        ticket.state, ticket.outcome = TicketState.CLOSED, outcome
        flow = ticket.flow
        if ticket.counts_in_flow and flow is not None:
            ticket.counts_in_flow = False
            flow.active -= 1
            if flow.limited:
                self._unpark(flow, now)
        elif ticket.wait is Wait.FLOW and flow is not None:
            ticket.refusal = flow.concurrency_refusal()
