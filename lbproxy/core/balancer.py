"""The Balancer: tell it what happened and what time it is, and it says where each request goes.

Sans-io. It owns the endpoint set, the tickets and the waiting queue; whom a request suits best, `core.queue.choice`
says. It is driven by the asyncio runtime, by the simulation and by tests alike. The contract of a driver is five steps:

1. Tell it every event as it happens (`submit`, `first_byte`, `progress`, `close`, `report_*`, `set_endpoints`).
2. After any event, call `poll` and act on the tickets that it returns: each was placed or closed just now.
3. Call `poll` again at `next_deadline`, and `check` every `CHECK_S` seconds.
4. `close` every ticket that was placed, exactly once, whatever happened to its request.
5. Take away `transitions` now and then: what endpoints became, for a log.

Late binding: under a policy that `holds`, a request whose best endpoint is full (`core.capacity.room`) stays here, with
a reservation in that endpoint's line. Newcomers are priced against the reservations and placed at once, unless the
endpoint that is best for them has a line too. What happens at an endpoint wakes it: while it has room, those that wait
are considered in the order of service, first of all those in its line, and of the others a few, which may do better
there. Nothing is looked at while nothing happens, but for the moment in which an endpoint has worked off enough.

Invariants: an endpoint's in-flight count is the number of its PLACED tickets; a ticket closes once (a second `close` is
a no-op); nothing here awaits, so no two requests are placed on one stale picture.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import inf

from mypy_extensions import mypyc_attr

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.routing import AdmissionSettings, RetrySettings
from lbproxy.core.endpoints.backpressure import Backpressure
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import EndpointChanges, EndpointSet
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.observed.learned import EndpointLearned, PoolLearned, QueueSnapshot, of_endpoint, of_pool, of_queue
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.policies.policy import Policy
from lbproxy.core.queue.choice import Choice, model_for
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import Flows
from lbproxy.core.queue.held import Waiting
from lbproxy.core.queue.owners import Owners
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.queue.waiting_queue import WaitingQueue
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import NO_USAGE, InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, Retries, Verdict

DEFAULT_BREAKER, DEFAULT_FLOWS = BreakerSettings(), FlowsSettings()


@mypyc_attr(allow_interpreted_subclasses=True)  # the simulation has some
class Balancer:
    """Places requests on endpoints. See the module for the driver's contract."""

    def __init__(  # noqa: PLR0913 - each is a section of the settings
        self,
        policy: Policy,
        *,
        admission: AdmissionSettings,
        health: HealthSettings,
        scrape: ScrapeSettings,
        retry: RetrySettings,
        rng: random.Random,
        breaker: BreakerSettings = DEFAULT_BREAKER,
        flows: FlowsSettings = DEFAULT_FLOWS,
    ) -> None:
        self._retries, self._backpressure = Retries(retry, rng), Backpressure()
        self._pool = model_for(policy)
        self._endpoints = EndpointSet(health, scrape, breaker, self._pool, rng)
        self._judge = self._endpoints.judge
        self._flows, self._queue = Flows(flows), WaitingQueue(admission)
        self.owners = Owners()
        """Told by the driver which endpoint stores which response."""
        self._choice = Choice(policy, admission, self._endpoints, self._backpressure, self.owners, rng)
        self._waiting = Waiting(self._endpoints, self._choice, self._queue, self._flows)
        self._adopt(admission)
        self._placements = 0
        self._changed: list[Ticket] = []
        """Closed by another ticket's arrival, for `poll` to return."""

    def _adopt(self, admission: AdmissionSettings) -> None:
        self._queue_timeout_s = admission.queue_timeout
        self._waiting.adopt(admission, self._pool)

    def reconfigure(  # noqa: PLR0913 - each is a section of the settings
        self,
        policy: Policy | None,
        *,
        admission: AdmissionSettings,
        health: HealthSettings,
        breaker: BreakerSettings,
        scrape: ScrapeSettings,
        retry: RetrySettings,
        flows: FlowsSettings,
        now: float,
    ) -> None:
        """Other settings, from now on. What is known of the endpoints stays, and who has a place keeps it.

        `policy`: None = the same as before, with all that it has learned. What was learned of work and caches is kept
        unless the new policy needs it in other blocks. Nobody who waits waits longer than the new settings say.
        """
        policy = policy or self._choice.policy
        if policy.block_bytes != self._choice.policy.block_bytes:
            self._pool = model_for(policy)
            self._endpoints.use(self._pool)
        self._endpoints.remember(policy.index_entries)
        self._retries.reconfigure(retry)
        self._endpoints.reconfigure(health, scrape, breaker)
        self._queue.reconfigure(admission, now=now)
        self._flows.reconfigure(flows, now)
        for flow in self._flows:
            self._unpark(flow)
        self._choice.adopt(policy, admission)
        self._adopt(admission)

    # Requests

    def submit(
        self,
        request: InferenceRequest,
        *,
        now: float,
        avoid: frozenset[EndpointUid] = frozenset(),
        accused: EndpointUid | None = None,
        again: bool = False,
    ) -> Ticket:
        """Ask for a place. The ticket comes back placed, closed with the reason, or waiting (then `poll` returns it).

        `avoid`: endpoints that failed this request already. If only such ones are left, NO_ENDPOINTS. `accused`: that
        of them that answered it 500. `again`: it has asked before, and counts towards no limit anew.
        """
        ticket = Ticket(request, now, now + self._queue_timeout_s, avoid)
        ticket.flow = flow = self._flows.of(request.flow, now)
        if accused is not None:
            ticket.accused = accused
        if request.deadline is not None:
            ticket.deadline = min(ticket.deadline, request.deadline)
        if not (avoid or again):
            self._retries.requested(now=now)
            if flow.limited:
                ticket.refusal = self._flows.admit(flow, request, now)
                if ticket.refusal is not None:
                    ticket.retry_after_s = ticket.refusal.retry_after_s
                    self._end(ticket, Outcome.RATE_LIMITED)
                    return ticket
        if flow.limited and flow.is_full:
            ticket.wait = Wait.FLOW
            hopeless = self._choice.hopeless(ticket, now=now)
            if hopeless is None:
                self._wait(ticket, now, parked=True)
            else:
                self._end(ticket, hopeless)
            return ticket
        flow.active += 1
        ticket.counted = True
        if self._queue.ready:
            self._waiting.pass_time(now)
            if self._waiting.is_woken:
                self._waiting.serve(now, self._in_turn, self._changed)  # those that wait come first
        self._consider(ticket, now)
        if ticket.state is TicketState.WAITING and self._waiting.comes_too_late(ticket, now):
            self._end(ticket, Outcome.TOO_LATE)
        if ticket.state is TicketState.WAITING:
            self._wait(ticket, now)
        return ticket

    def poll(self, *, now: float) -> list[Ticket]:
        """The tickets that stopped waiting: shed for another, placed now, or closed with the reason."""
        changed, self._changed = self._changed, []
        if self._queue:
            self._waiting.pass_time(now)
            if self._waiting.is_woken:
                self._waiting.serve(now, self._in_turn, changed)
            for ticket in self._queue.expired(now):
                deadline = ticket.request.deadline
                too_late = Outcome.EXPIRED if deadline is None or now < deadline else Outcome.TOO_LATE
                ticket.retry_after_s = ticket.best_wait_s or None
                self._end(ticket, too_late if self._endpoints.any_up() else Outcome.NO_ENDPOINTS)
                changed.append(ticket)
        if not self._queue:
            self._waiting.forget(now)
        return changed

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        """The first byte of a good response's body came. Later calls for the same ticket are no-ops."""
        if ticket.state is TicketState.PLACED and ticket.first_byte_at is None:
            ticket.first_byte_at = now
            state = ticket.where
            state.awaiting_first_byte -= 1
            state.progress.at = now
            state.breaker.good += 1
            state.breaker.in_row = 0
            self._backpressure.answered(state)
            if ticket.trial is not None or ticket.accused is not None:
                accused = None if ticket.accused is None else self._endpoints.get(ticket.accused)
                self._judge.answered(state, accused, trial=ticket.is_trial, now=now)
            if ticket.load is not None and ticket.placement is not None:
                ticket.load.first_byte(ticket.placement, now)
                self._waiting.wake(state)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        """More came, `tokens` as far as is known. At most every 250 ms per stream, never per chunk."""
        if ticket.state is TicketState.PLACED:
            state = ticket.where
            state.tokens_streamed += tokens
            state.progress.at = now
            if tokens:
                self._flows.progress(ticket, tokens, now)
            if ticket.load is not None and ticket.placement is not None:
                ticket.load.progress(ticket.placement, tokens, now)

    def close(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, timed_out: bool = False
    ) -> None:
        """The request, or this attempt at it, is over. Legal in every state; the first call counts.

        `usage`: what the endpoint said that the request used. `timed_out`: it broke since it was silent for too long.
        """
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.PLACED:
            state = ticket.where
            state.in_flight -= 1
            state.progress.open_ended -= ticket.request.open_ended
            if ticket.first_byte_at is None:
                state.awaiting_first_byte -= 1
            if outcome is Outcome.COMPLETED:
                state.progress.at = now
            elif outcome is Outcome.UPSTREAM_BROKE:
                self._judge.broke(state, timed_out=timed_out, placed_at=ticket.placed_at or 0.0, now=now)
            if ticket.is_trial:
                self._judge.trial_ended(state, outcome, now=now)
            if usage is None and outcome is Outcome.COMPLETED and ticket.first_byte_at is not None:
                usage = NO_USAGE if not ticket.request.prompt_bytes else None
            served = ticket.first_byte_at is not None or (outcome is Outcome.COMPLETED and usage is not None)
            self._flows.ended(ticket, usage, now, served=served)
            if ticket.load is not None and ticket.placement is not None:
                ticket.load.end(ticket.placement, usage, now)
            self._endpoints.released(state)
            self._waiting.wake(state)
        self._end(ticket, outcome)

    def after_failure(
        self,
        ticket: Ticket,
        kind: FailureKind,
        earlier: Sequence[FailureKind],
        *,
        now: float,
        detail: str = "",
        refused: bool = False,
    ) -> Verdict:
        """What follows an attempt that failed before anything of a response's body went to the client.

        `earlier`: why the same request's earlier attempts failed; `detail` is for the log; `refused`: nothing listens
        there. Does not close the ticket.
        """
        state = ticket.where
        stranded = kind is FailureKind.STRANDED
        self._backpressure.refused(state, kind, now=now)
        if self._queue and now < state.backing_off_until:
            self._waiting.wake_at(state.endpoint.uid, state.backing_off_until)
        elsewhere = self._choice.others_take(ticket, now)
        if stranded and ticket.is_trial and state.health is Health.HALF_OPEN:
            elsewhere = False
        verdict = self._retries.decide(
            kind, earlier, elsewhere=elsewhere, now=now, repeatable=ticket.request.repeatable
        )
        if refused and self._choice.owner(ticket.request, now) is not None:
            verdict = Verdict(False, Outcome.RESPONSE_NOT_FOUND)  # it was in that process
        # A 500 that is tried elsewhere counts if that goes well; one that came from two endpoints is the request's.
        open_question = kind is FailureKind.ERROR and not ticket.is_trial and (verdict.again or kind in earlier)
        if not stranded and not open_question:
            trial, placed_at = ticket.is_trial, ticket.placed_at or 0.0
            why = detail or kind.value
            self._judge.failed(state, kind, why, trial=trial, placed_at=placed_at, now=now, refused=refused)
            self._waiting.wake_all()
        return verdict

    def next_deadline(self) -> float | None:
        """When `poll` has something to do though nothing happens until then; None = never. May be past."""
        if self._changed or self._waiting.is_woken:
            return -inf
        first = self._queue.first_deadline()
        if first is None:
            return None
        return min(first, self._waiting.next_at)

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        """The complete set, from discovery. Names and addresses are distinct."""
        self._waiting.wake_all()
        return self._endpoints.replace(specs, now=now)

    def check(self, *, now: float) -> list[EndpointUid]:
        """Every `CHECK_S`: what time alone brings to endpoints. Returns those where requests may wait in vain for a
        first byte: of each that `is_stranded`, ask `after_failure` by STRANDED.
        """
        before = self._endpoints.version
        stranding = self._endpoints.check(now=now)
        if self._endpoints.version != before:
            self._waiting.wake_all()
        return stranding

    def is_stranded(self, ticket: Ticket, *, now: float) -> bool:
        """Whether a placed request waits in vain for its first byte."""
        watch = self._judge.progress
        return ticket.first_byte_at is None and watch.is_dead(ticket.where, now, stream=ticket.request.stream)

    @property
    def transitions(self) -> list[Transition]:
        """What endpoints became since the driver last cleared this list, which it owns."""
        return self._judge.transitions

    def may_probe_in(self, uid: EndpointUid, *, now: float) -> float:
        """In how many seconds a probe may go to an endpoint; 0 = now, and it counts as sent."""
        return self._endpoints.may_probe_in(uid, now=now)

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, now: float, refused: bool = False) -> None:
        """A probe's response. `refused`: nothing listens there."""
        self._waiting.wake_all()
        self._endpoints.report_health(uid, ok, reason, now=now, refused=refused)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What an endpoint says it serves; None if it cannot say."""
        self._waiting.wake_all()
        self._endpoints.report_models(uid, cards)

    def scrape_sent(self, uid: EndpointUid) -> None:
        """A scrape leaves now."""
        self._endpoints.scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """What the scrape that was sent last said."""
        self._endpoints.report_scrape(uid, metrics)
        self._waiting.wake(self._endpoints.get(uid))

    def ask_load(self, uid: EndpointUid, ask: bool) -> None:
        """Whether requests to an endpoint ask for load reports from now on."""
        self._endpoints.ask_load(uid, ask)

    def report_load(self, ticket: Ticket, report: LoadReport | None, *, now: float) -> None:
        """A load report came with a placed request's response; None = it was malformed."""
        self._endpoints.report_load(ticket.where, report, answered=ticket.first_byte_at is not None, now=now)

    def report_restart(self, uid: EndpointUid) -> None:
        """An endpoint is another process than before: its caches are empty. A scrape with `started_at` says it too."""
        self._endpoints.report_restart(uid)

    def report_cache_size(self, uid: EndpointUid, tokens: int, *, at_most: bool = False) -> None:
        """How much an endpoint's KV cache holds, by its own word; `at_most`: or less."""
        self._endpoints.report_cache_size(uid, tokens, at_most)

    def report_slots(self, uid: EndpointUid, slots: int) -> None:
        """How many requests an endpoint runs at once, by its own word."""
        self._endpoints.report_slots(uid, slots)

    def drain(self, uid: EndpointUid, *, draining: bool = True) -> None:
        """Give an endpoint no new requests (or again)."""
        self._waiting.wake_all()
        self._endpoints.drain(uid, draining)

    def explain(self, wanted: bool) -> None:
        """Whether tickets that are placed from now on say why: `Ticket.decision`."""
        self._choice.explains = wanted

    # Reading

    @property
    def block_bytes(self) -> int | None:
        """Into blocks of how many bytes prompts have to be hashed; None = they need not be read at all."""
        return self._choice.policy.block_bytes

    def health(self, uid: EndpointUid) -> Health | None:
        """The verdict on an endpoint; None if it left the set."""
        state = self._endpoints.get(uid)
        return None if state is None else state.health

    def wants_scrape(self, uid: EndpointUid) -> bool:
        """Whether to read an endpoint's metrics: it is up, or requests of ours run there."""
        state = self._endpoints.get(uid)
        return state is not None and (state.health is Health.UP or state.in_flight > 0)

    def reported_at(self, uid: EndpointUid) -> float:
        """When an endpoint's last load report came; long ago if it left the set."""
        return self._endpoints.reported_at(uid)

    def any_up(self) -> bool:
        """Whether an endpoint takes requests."""
        return self._endpoints.any_up()

    def base_models(self) -> list[str]:
        """The distinct base models that the endpoints serve."""
        return self._endpoints.base_models()

    def model_cards(self) -> list[ModelCard]:
        """One card for each model, adapters included, that an endpoint which is up serves."""
        return self._endpoints.model_cards()

    def snapshot(self, *, now: float) -> PoolSnapshot:
        """Everything, at this moment."""
        queue = self._queue
        flows = self._flows.snapshot(queue.by_flow())
        return PoolSnapshot(self._endpoints.snapshot(now=now), len(queue), queue.bytes, flows)

    def learned(self, *, now: float) -> tuple[PoolLearned, dict[EndpointUid, EndpointLearned]] | None:
        """What was learned of speeds and caches; None under policies that learn nothing."""
        if self._pool is None:
            return None
        states = self._endpoints.members()
        return of_pool(self._pool), {state.endpoint.uid: of_endpoint(state.load, now=now) for state in states}

    def queue(self, *, now: float) -> QueueSnapshot:
        """Who waits. O(n)."""
        return of_queue(self._queue, self._queue.bytes, now=now)

    # Placing

    def _consider(self, ticket: Ticket, now: float, *, in_turn: bool = False) -> None:
        """Place the ticket, or close it if waiting cannot help, or leave it."""
        if self._pool is not None and self._pool.held:
            self._pool.turn_share = self._queue.before(ticket)
        chosen = self._choice.choose(ticket, now=now, in_turn=in_turn)
        if isinstance(chosen, EndpointState):
            self._place(ticket, chosen, now)
        elif isinstance(chosen, Outcome):
            self._end(ticket, chosen)
        else:
            if ticket.wait is None:
                ticket.wait = chosen
                if self._waiting.is_hopeless(ticket, now):
                    ticket.retry_after_s = ticket.best_wait_s
                    self._end(ticket, Outcome.SATURATED)
            ticket.priced_at = now

    def _in_turn(self, ticket: Ticket, now: float) -> None:
        self._consider(ticket, now, in_turn=True)

    def _place(self, ticket: Ticket, state: EndpointState, now: float) -> None:
        self._placements += 1
        state.in_flight += 1
        state.awaiting_first_byte += 1
        state.placed += 1
        state.placed_seq = self._placements
        ticket.state = TicketState.PLACED
        ticket.placed_on = state
        ticket.placed_at = now
        if state.health is not Health.UP:
            ticket.trial = self._judge.tried(state, stream=ticket.request.stream, now=now)
        state.progress.open_ended += ticket.request.open_ended
        if self._pool is not None and not ticket.request.open_ended:  # what work that will be is not known
            ticket.load = state.load
            ticket.placement = ticket.load.place(ticket.request, now)
        self._flows.placed(ticket, now)
        if self._queue:
            for one in self._choice.starting:  # a placement gives them credit
                self._waiting.wake(one)

    # Waiting

    def _wait(self, ticket: Ticket, now: float, *, parked: bool = False) -> None:
        """Into the queue; whoever has no place in it any more is told."""
        if not parked:
            self._waiting.begin(ticket, now)
        for shed in self._queue.push(ticket, parked=parked):
            shed.retry_after_s = shed.best_wait_s or None
            self._end(shed, Outcome.SATURATED)
            if shed is not ticket:
                self._changed.append(shed)

    def _unpark(self, flow: Flow) -> None:
        """As many of the flow's requests as it may have wait for an endpoint now."""
        while not flow.is_full and (ticket := self._queue.unpark(flow)) is not None:
            flow.active += 1
            ticket.counted = True
            self._waiting.wake_all()

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        if ticket.state is TicketState.WAITING:
            self._queue.remove(ticket)
            self._waiting.release(ticket)
        ticket.state = TicketState.CLOSED
        ticket.outcome = outcome
        flow = ticket.flow
        if ticket.counted and flow is not None:
            ticket.counted = False
            flow.active -= 1
            if flow.limited:
                self._unpark(flow)
        elif ticket.wait is Wait.FLOW and flow is not None:
            ticket.refusal = flow.crowded()
