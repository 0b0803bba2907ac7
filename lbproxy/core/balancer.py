"""The Balancer: tell it what happened and what time it is, and it says where each request goes.

Sans-io. It owns the endpoint set, the tickets and the waiting queue; whom a request suits best, `core.choice` says. It
is driven by the asyncio runtime, by the simulation and by tests alike. The contract of a driver is five steps:

1. Tell it every event as it happens (`submit`, `first_byte`, `progress`, `close`, `report_*`, `set_endpoints`).
2. After any event, call `poll` and act on the tickets that it returns: each was placed or closed just now.
3. Call `poll` again at `next_deadline`, and `check` every `CHECK_S` seconds.
4. `close` every ticket that was placed, exactly once, whatever happened to its request.
5. Take away `transitions` now and then: what endpoints became, for a log.

Late binding: under a policy that `holds`, a request whose best endpoint is full (`core.room`) stays here, with a
reservation in that endpoint's line. Newcomers are priced against the reservations and placed at once, unless the
endpoint that is best for them has a line too. What happens at an endpoint wakes it: while it has room, those that wait
are considered in the order of service, first of all those in its line, and of the others a few, which may do better
there. Nothing is looked at while nothing happens, but for the moment in which an endpoint has worked off enough.

Invariants: an endpoint's in-flight count is the number of its PLACED tickets; a ticket closes once (a second `close` is
a no-op); choosing and counting happen without anything in between, so two requests are never placed on one stale
picture; nothing here awaits, so every method is atomic on an event loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final

from mypy_extensions import mypyc_attr

from lbproxy.config import (
    AdmissionSettings,
    BreakerSettings,
    FlowsSettings,
    HealthSettings,
    RetrySettings,
    ScrapeSettings,
)
from lbproxy.core.admission import WORK_S, Pace, WaitingQueue, least_work
from lbproxy.core.backpressure import Backpressure
from lbproxy.core.choice import Choice, model_for
from lbproxy.core.endpoints import EndpointChanges, EndpointSet
from lbproxy.core.flows import Flow, Flows
from lbproxy.core.learned import EndpointLearned, PoolLearned, QueueSnapshot, of_endpoint, of_pool, of_queue
from lbproxy.core.orca import LoadReport
from lbproxy.core.pricing import Policy
from lbproxy.core.retry import FailureKind, Retries, Verdict
from lbproxy.core.types import (
    EndpointSpec,
    EndpointState,
    EndpointUid,
    Health,
    InferenceRequest,
    LoadMetrics,
    ModelCard,
    Outcome,
    PoolSnapshot,
    Ticket,
    TicketState,
    Transition,
    Usage,
    Wait,
)

DEFAULT_BREAKER, DEFAULT_FLOWS = BreakerSettings(), FlowsSettings()
PRICED: Final = 32
"""Requests that wait which are priced at a time; if there are more to price, the driver's loop gets a turn between."""
MOVED: Final = 6
"""Of these, requests in other lines that may do better at an endpoint that has room."""
PRICE_AGAIN_S: Final = 0.05
"""How long after its last price a request in another line is priced again at the earliest."""
OVERLOAD: Final = 6.0
"""A line is too long if its last request would wait for a sixth of the queue timeout: 5 s, unless the settings say
another. Who allows longer waits, prefers late responses to none."""


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
        self._choice = Choice(policy, admission, self._endpoints, self._backpressure, rng)
        self._adopt(admission)
        self._woken: dict[EndpointUid, EndpointState] = {}
        """Endpoints where something happened since the queue was looked at, while requests wait."""
        self._all_woken = False
        """The same of the set of endpoints, or of the settings."""
        self._openings: list[tuple[float, EndpointUid]] = []
        """A heap: when endpoints may have room again without anything happening there."""
        self._placements = 0
        self._pace = Pace()
        self._changed: list[Ticket] = []
        """Closed by another ticket's arrival, for `poll` to return."""

    def _adopt(self, admission: AdmissionSettings) -> None:
        self._hold = self._choice.holds
        self._by_work = admission.order == "shortest" and self._pool is not None
        self._queue_timeout_s = admission.queue_timeout
        self._long_s = admission.queue_timeout / OVERLOAD

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
        self._all_woken = True

    # Requests

    def submit(
        self,
        request: InferenceRequest,
        *,
        now: float,
        avoid: frozenset[EndpointUid] = frozenset(),
        accused: EndpointUid | None = None,
    ) -> Ticket:
        """Ask for a place. The ticket comes back placed, closed with the reason, or waiting (then `poll` returns it).

        `avoid`: endpoints that failed this request already. If only such ones are left, NO_ENDPOINTS. `accused`: that
        of them that answered it 500, if one did.
        """
        ticket = Ticket(request, now, now + self._queue_timeout_s, avoid)
        ticket.flow = flow = self._flows.of(request.flow, now)
        if accused is not None:
            ticket.accused = accused
        if request.deadline is not None:
            ticket.deadline = min(ticket.deadline, request.deadline)
        if not avoid:
            self._retries.requested(now=now)
            if flow.limited:
                ticket.refusal = self._flows.admit(flow, request, now)
                if ticket.refusal is not None:
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
        if (self._woken or self._all_woken) and self._queue.ready:
            self._serve(now, self._changed)  # those that wait come first
        self._consider(ticket, now)
        if ticket.state is TicketState.WAITING and self._comes_too_late(ticket, now):
            self._end(ticket, Outcome.TOO_LATE)
        if ticket.state is TicketState.WAITING:
            self._wait(ticket, now)
        return ticket

    def _comes_too_late(self, ticket: Ticket, now: float) -> bool:
        """Whether a newcomer that waits for any endpoint will not be placed by its deadline, at the pace of late."""
        deadline = ticket.request.deadline
        if deadline is None or ticket.best is not None or not self._queue.ready:
            return False
        share = self._queue.before(ticket)
        before = self._queue.ready if share < 0.0 else round(share * self._queue.ready)
        ticket.retry_after_s = self._pace.wait_s(before)
        return now + ticket.retry_after_s > deadline

    def poll(self, *, now: float) -> list[Ticket]:
        """The tickets that stopped waiting: shed for another, placed now, or closed with the reason."""
        changed, self._changed = self._changed, []
        if self._queue:
            openings = self._openings
            while openings and openings[0][0] <= now:
                self._wake(self._endpoints.get(heappop(openings)[1]))
            if self._queue.ready and (self._woken or self._all_woken):
                self._serve(now, changed)
            for ticket in self._queue.expired(now):
                deadline = ticket.request.deadline
                too_late = Outcome.EXPIRED if deadline is None or now < deadline else Outcome.TOO_LATE
                ticket.retry_after_s = ticket.best_wait_s or None
                self._end(ticket, too_late if self._endpoints.any_up() else Outcome.NO_ENDPOINTS)
                changed.append(ticket)
        if not self._queue:
            self._woken.clear()
            self._openings.clear()
            self._all_woken = False
        return changed

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        """The first byte of a good answer's body came. Later calls for the same ticket are no-ops."""
        if ticket.state is TicketState.PLACED and ticket.first_byte_at is None:
            ticket.first_byte_at = now
            state = ticket.where
            state.awaiting_first_byte -= 1
            state.progress_at = now
            state.breaker.good += 1
            state.breaker.in_row = 0
            self._backpressure.answered(state)
            if ticket.trial or ticket.accused is not None:
                accused = None if ticket.accused is None else self._endpoints.get(ticket.accused)
                self._judge.answered(ticket, state, accused, now=now)
            if ticket.placement is not None:
                ticket.placement.load.first_byte(ticket.placement, now)
                self._wake(state)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        """More came, `tokens` as far as is known. At most every 250 ms per stream, never per chunk."""
        if ticket.state is TicketState.PLACED:
            state = ticket.where
            state.tokens_streamed += tokens
            state.progress_at = now
            if tokens:
                self._flows.progress(ticket, tokens, now)
            if ticket.placement is not None:
                ticket.placement.load.progress(ticket.placement, tokens, now)

    def close(self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None) -> None:
        """The request, or this attempt at it, is over. Legal in every state; the first call counts.

        `usage`: what the endpoint said that the request used.
        """
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.PLACED:
            state = ticket.where
            state.in_flight -= 1
            if ticket.first_byte_at is None:
                state.awaiting_first_byte -= 1
            if outcome is Outcome.COMPLETED:
                state.progress_at = now
            elif outcome is Outcome.UPSTREAM_BROKE:
                self._judge.broke(state, now=now)
            if ticket.trial:
                self._judge.trial_ended(state, outcome, now=now)
            served = ticket.first_byte_at is not None or (outcome is Outcome.COMPLETED and usage is not None)
            self._flows.ended(ticket, usage, now, served=served)
            if ticket.placement is not None:
                ticket.placement.load.end(ticket.placement, usage, now)
            self._endpoints.released(state)
            self._wake(state)
        self._end(ticket, outcome)

    def after_failure(
        self, ticket: Ticket, kind: FailureKind, earlier: Sequence[FailureKind], *, now: float, detail: str = ""
    ) -> Verdict:
        """What follows an attempt that failed before anything of an answer's body went to the client.

        `earlier`: why the same request's earlier attempts failed; `detail` is for the log. Does not close the ticket.
        """
        state = ticket.where
        stranded = kind is FailureKind.STRANDED
        self._backpressure.refused(state, kind, now=now)
        if now < state.backing_off_until and self._queue:
            heappush(self._openings, (state.backing_off_until, state.endpoint.uid))
        tried = {state.endpoint.uid, *ticket.avoid}
        elsewhere = any(
            one.endpoint.uid not in tried and self._choice.takes(one)
            for one in self._endpoints.candidates(ticket.request.model, now=now)
        ) and not (stranded and ticket.trial and state.health is Health.HALF_OPEN)
        verdict = self._retries.decide(kind, earlier, elsewhere=elsewhere, now=now)
        # A 500 that is tried elsewhere counts if that goes well; one that came from two endpoints is the request's.
        open_question = kind is FailureKind.ERROR and not ticket.trial and (verdict.again or kind in earlier)
        if not stranded and not open_question:
            self._judge.failed(ticket, state, kind, detail or kind.value, now=now)
            self._all_woken = True
        return verdict

    def next_deadline(self) -> float | None:
        """When `poll` has something to do though nothing happens until then; None = never. May be past."""
        if self._changed or (self._queue.ready and (self._woken or self._all_woken)):
            return -inf
        deadline = self._queue.first_deadline()
        if deadline is None or not self._openings or not self._queue.ready:
            return deadline
        return min(deadline, self._openings[0][0])

    # Endpoints

    def set_endpoints(self, specs: Sequence[EndpointSpec], *, now: float) -> EndpointChanges:
        """The complete set, from discovery. Names and addresses are distinct."""
        self._all_woken = True
        return self._endpoints.replace(specs, now=now)

    def check(self, *, now: float) -> list[EndpointUid]:
        """Every `CHECK_S`: what time alone brings to endpoints. Returns those where requests wait in vain for a first
        byte: ask `after_failure` about each of these by STRANDED, also when a transition says that one is down.
        """
        before = self._endpoints.version
        stranding = self._endpoints.check(now=now)
        if self._endpoints.version != before:
            self._all_woken = True
        return stranding

    @property
    def transitions(self) -> list[Transition]:
        """What endpoints became since the driver last cleared this list, which it owns."""
        return self._judge.transitions

    def may_probe_in(self, uid: EndpointUid, *, now: float) -> float:
        """In how many seconds a probe may go to an endpoint; 0 = now, and it counts as sent."""
        return self._endpoints.may_probe_in(uid, now=now)

    def report_health(self, uid: EndpointUid, ok: bool, reason: str, *, now: float) -> None:
        """A probe's answer."""
        self._all_woken = True
        self._endpoints.report_health(uid, ok, reason, now=now)

    def report_models(self, uid: EndpointUid, cards: Iterable[ModelCard] | None) -> None:
        """What an endpoint says it serves; None if it cannot say."""
        self._all_woken = True
        self._endpoints.report_models(uid, cards)

    def scrape_sent(self, uid: EndpointUid) -> None:
        """A scrape leaves now."""
        self._endpoints.scrape_sent(uid)

    def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
        """What the scrape that was sent last said."""
        self._endpoints.report_scrape(uid, metrics)
        self._wake(self._endpoints.get(uid))

    def ask_load(self, uid: EndpointUid, ask: bool) -> None:
        """Whether requests to an endpoint ask for load reports from now on."""
        self._endpoints.ask_load(uid, ask)

    def report_load(self, ticket: Ticket, report: LoadReport | None, *, now: float) -> None:
        """A load report came with a placed request's answer; None = it was malformed."""
        self._endpoints.report_load(ticket.where, report, answered=ticket.first_byte_at is not None, now=now)

    def report_restart(self, uid: EndpointUid) -> None:
        """An endpoint is another process than before: its caches are empty. A scrape with `started_at` says it too."""
        self._endpoints.report_restart(uid)

    def report_cache_size(self, uid: EndpointUid, tokens: int, *, at_most: bool = False) -> None:
        """How much an endpoint's KV cache holds, by its own word; `at_most`: or less."""
        self._endpoints.report_cache_size(uid, tokens, at_most)

    def drain(self, uid: EndpointUid, *, draining: bool = True) -> None:
        """Give an endpoint no new requests (or again)."""
        self._all_woken = True
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
                if self._is_hopeless(ticket, now):
                    ticket.retry_after_s = ticket.best_wait_s
                    self._end(ticket, Outcome.SATURATED)
            ticket.priced_at = now

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
            self._judge.tried(state, ticket, now=now)
        if self._pool is not None:
            ticket.placement = state.load.place(ticket.request, now)
        self._flows.placed(ticket, now)
        if self._queue:
            for one in self._choice.starting:  # a placement gives them credit
                self._wake(one)

    # Waiting

    def _is_hopeless(self, ticket: Ticket, now: float) -> bool:
        """Whether a newcomer would wait in vain for the endpoint that is best for it: longer than anybody may."""
        if ticket.best is None or not ticket.best.load.room.line.count:
            return False
        return now + ticket.best_wait_s > ticket.submitted_at + self._queue_timeout_s

    def _wait(self, ticket: Ticket, now: float, *, parked: bool = False) -> None:
        """Into the queue; whoever has no place in it any more is told."""
        if not parked:
            if not self._queue.ready:  # it was considered just now, and nobody looked at what opens by itself
                self._woken.clear()
                self._all_woken = False
                for state in self._endpoints.candidates(None, now=now):
                    self._open_later(state, now)
            self._reserve(ticket, now)
            if ticket.best is not None and self._choice.is_open(ticket.best, now):
                self._woken[ticket.best.endpoint.uid] = ticket.best
        for shed in self._queue.push(ticket, parked=parked):
            shed.retry_after_s = shed.best_wait_s or None
            self._end(shed, Outcome.SATURATED)
            if shed is not ticket:
                self._changed.append(shed)

    def _reserve(self, ticket: Ticket, now: float) -> None:
        """A place in the line of the endpoint that the ticket is held for."""
        state = ticket.best
        if state is None or self._pool is None:
            return
        load = state.load
        if self._by_work and now - ticket.work_at >= WORK_S:
            ticket.work_tokens, ticket.work_at = self._pool.uncached(ticket.request), now
        work, line = ticket.work_tokens, load.room.line
        line.add(work, ticket.best_tokens)
        ticket.reserved = line, work, ticket.best_tokens
        self._pool.held += 1
        line.observe(load.line_wait_ms(now) / 1000.0, self._long_s, now)
        self._open_later(state, now)

    def _release(self, ticket: Ticket) -> None:
        """Give up that place."""
        if ticket.reserved is not None and self._pool is not None:
            line, work, tokens = ticket.reserved
            line.remove(work, tokens)
            ticket.reserved = None
            self._pool.held -= 1

    def _open_later(self, state: EndpointState, now: float) -> None:
        """Look at an endpoint again when it has worked off enough."""
        if self._pool is None or not self._hold:
            return
        opens_in_s = state.load.opens_in_s(now)
        if 0.0 < opens_in_s < inf:
            heappush(self._openings, (now + opens_in_s + 1e-6, state.endpoint.uid))

    def _wake(self, state: EndpointState | None) -> None:
        if state is not None and self._queue:
            self._woken[state.endpoint.uid] = state

    def _unpark(self, flow: Flow) -> None:
        """As many of the flow's requests as it may have wait for an endpoint now."""
        while not flow.is_full and (ticket := self._queue.unpark(flow)) is not None:
            flow.active += 1
            ticket.counted = True
            self._all_woken = True

    def _serve(self, now: float, changed: list[Ticket]) -> None:
        """Consider those that wait for what was woken, in the order of service; those that stop waiting are appended to
        `changed`.
        """
        everything, self._all_woken = self._all_woken, False
        woken, self._woken = self._woken, {}
        is_open = self._choice.is_open
        opened = {uid: state for uid, state in woken.items() if is_open(state, now)}
        if everything:
            opened.update(
                (one.endpoint.uid, one) for one in self._endpoints.candidates(None, now=now) if is_open(one, now)
            )
        if opened or everything:
            self._serve_by_turn(opened, everything, now, changed)
        for state in woken.values():
            self._open_later(state, now)

    def _serve_by_turn(
        self, opened: dict[EndpointUid, EndpointState], everything: bool, now: float, changed: list[Ticket]
    ) -> None:
        left, moves, moved = PRICED, MOVED, False
        stuck: set[tuple[str | None, frozenset[EndpointUid]]] = set()
        work = least_work(self._pool.uncached, now) if self._by_work and self._pool is not None else None
        for ticket in self._queue.in_order(work, self._flows, now):
            key, best = (ticket.request.model, ticket.avoid), ticket.best
            if best is None or (everything and _is_out(best)):
                if key in stuck:
                    continue
            elif best.endpoint.uid not in opened:
                if moves <= 0 or now - ticket.priced_at < PRICE_AGAIN_S:
                    continue
                moves -= 1
            left -= 1
            if left < 0:  # the rest in another turn, if that may bring anything
                if moved:
                    self._woken.update(opened)
                    self._all_woken = self._all_woken or everything
                return
            self._release(ticket)
            self._consider(ticket, now, in_turn=True)
            moved = moved or ticket.best is not best
            if ticket.state is TicketState.WAITING:
                self._reserve(ticket, now)
                if ticket.best is None:
                    stuck.add(key)
                continue
            moved = True
            self._queue.remove(ticket)
            self._pace.count(now)
            changed.append(ticket)
            stuck.discard(key)
            state = ticket.placed_on
            if state is not None and state.endpoint.uid in opened and not self._choice.is_open(state, now):
                del opened[state.endpoint.uid]
            if not opened and not everything:
                return

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        if ticket.state is TicketState.WAITING:
            self._queue.remove(ticket)
            self._release(ticket)
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


def _is_out(state: EndpointState) -> bool:
    """It takes no requests any more."""
    return state.left or state.draining or (state.health is not Health.UP and not state.readmitted)
