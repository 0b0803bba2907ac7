# SPDX-License-Identifier: Apache-2.0
"""A machine that does everything in every order, and holds the Balancer against a model of a few lines."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.caches.cache_report import RESTARTED
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.policies.registry import POLICIES
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.support.pool import MODEL, bring_up, make_balancer, show_gauges, spec
from tests.support.prompts import chained

MODELS = st.sampled_from([MODEL, "other", None])
KEYS = st.lists(st.integers(0, 2), max_size=6).map(chained)
SIZES = st.integers(0, 200)
QUEUE_REQUESTS, QUEUE_BYTES, LIMIT = 4, 500, 3


class BalancerMachine(RuleBasedStateMachine):
    """In-flight = placed tickets; a ticket closes once; bounds hold; nobody who may be served is left waiting."""

    @initialize(
        policy=st.sampled_from([*(name for name in POLICIES if name != "weighted"), *["adaptive"] * 8]),
        hold=st.none() | st.booleans(),
        fcfs=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(self, policy: str, hold: bool | None, fcfs: bool, seed: int) -> None:
        admission = AdmissionSettings(
            queue_requests=QUEUE_REQUESTS,
            queue_bytes=QUEUE_BYTES,
            queue_timeout=5.0,
            max_in_flight_per_endpoint=LIMIT,
            hold=hold,
            order="fcfs" if fcfs else "shortest",
        )
        self.balancer = make_balancer(policy=policy, admission=admission, seed=seed)
        self.now = 0.0
        self.uids: dict[int, EndpointUid] = {}
        self.last_uid = 0
        self.tickets: list[Ticket] = []
        self.ended: dict[int, Outcome] = {}
        self.waiting: set[int] = set()
        """Tickets whose wait `poll` has not ended yet, nor we."""

    def settle(self) -> None:
        """The driver's second step. Tickets that `poll` returns were waiting and are not any more."""
        for ticket in self.balancer.poll(now=self.now):
            self.waiting.remove(id(ticket))
            assert ticket.state is not TicketState.WAITING
        assert self.waiting == {id(t) for t in self.tickets if t.state is TicketState.WAITING}
        for ticket in self.tickets:
            if ticket.state is TicketState.CLOSED:
                assert ticket.outcome is not None
                assert self.ended.setdefault(id(ticket), ticket.outcome) is ticket.outcome, "it ended twice"
            else:
                assert id(ticket) not in self.ended, "it came back to life"

    @rule(members=st.sets(st.integers(1, 4)))
    def endpoints_change(self, members: set[int]) -> None:
        changes = self.balancer.set_endpoints([spec(n) for n in sorted(members)], now=self.now)
        for endpoint in changes.added:
            assert endpoint.uid > self.last_uid, "uids are never reused"
            self.last_uid = endpoint.uid
            self.uids[int(endpoint.name[1:])] = endpoint.uid
        self.settle()

    @rule(n=st.integers(1, 4), model=st.sampled_from([MODEL, "other"]))
    def endpoint_up(self, n: int, model: str) -> None:
        if n in self.uids:
            self.balancer.report_health(self.uids[n], True, "", now=self.now)
            member = next((e for e in self.snapshot() if e.endpoint.uid == self.uids[n] and not e.draining), None)
            if member is not None:
                bring_up(self.balancer, [member.endpoint], model)
        self.settle()

    @rule(n=st.integers(1, 4), ok=st.booleans(), times=st.integers(1, 3))
    def probe(self, n: int, ok: bool, times: int) -> None:
        for _ in range(times if n in self.uids else 0):
            self.balancer.report_health(self.uids[n], ok, "", now=self.now)
        self.settle()

    @rule(n=st.integers(1, 4), waiting=st.none() | st.floats(0, 50), kv=st.none() | st.floats(0, 1))
    def scrape(self, n: int, waiting: float | None, kv: float | None) -> None:
        if n in self.uids:
            show_gauges(self.balancer, self.uids[n], now=self.now, waiting=waiting, kv=kv)
        self.settle()

    @rule(n=st.integers(1, 4), draining=st.booleans())
    def drain(self, n: int, draining: bool) -> None:
        if n in self.uids:
            self.balancer.drain(self.uids[n], draining=draining)
        self.settle()

    @rule(n=st.integers(1, 4))
    def restart(self, n: int) -> None:
        if n in self.uids:
            self.balancer.report_cache(self.uids[n], RESTARTED)

    @rule(
        model=MODELS,
        size=SIZES,
        avoid=st.sets(st.integers(1, 4), max_size=2),
        prompt=st.sampled_from([0, 400, 8000, 60_000]),
        keys=KEYS,
        stream=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def submit(  # noqa: PLR0917
        self, model: str | None, size: int, avoid: set[int], prompt: int, keys: list[int], stream: bool, priority: int
    ) -> None:
        avoided = frozenset(self.uids[n] for n in avoid if n in self.uids)
        request = InferenceRequest("r", model, stream, size, prompt, tuple(keys), None, priority)
        ticket = self.balancer.submit(request, now=self.now, avoid=avoided)
        self.tickets.append(ticket)
        if ticket.state is TicketState.WAITING:
            self.waiting.add(id(ticket))
            deadline = self.balancer.next_deadline()
            assert deadline is not None
        if ticket.state is TicketState.PLACED:
            assert ticket.placed_on is not None
            assert ticket.placed_on.endpoint.uid not in avoided
            assert ticket.placed_on.health is Health.UP or ticket.is_trial
            assert not ticket.placed_on.draining
        self.settle()

    @rule(pick=st.integers(0, 1000), first=st.booleans(), tokens=st.integers(0, 9))
    def stream(self, pick: int, first: bool, tokens: int) -> None:
        if self.tickets:
            ticket = self.tickets[pick % len(self.tickets)]
            if first:
                self.balancer.first_byte(ticket, now=self.now)
            self.balancer.progress(ticket, tokens, now=self.now)
        self.settle()

    @rule(
        pick=st.integers(0, 1000),
        outcome=st.sampled_from([Outcome.COMPLETED, Outcome.CLIENT_CLOSED]),
        tokens=st.none() | st.integers(0, 50),
    )
    def close(self, pick: int, outcome: Outcome, tokens: int | None) -> None:
        if self.tickets:
            ticket = self.tickets[pick % len(self.tickets)]
            if ticket.state is TicketState.WAITING:
                self.waiting.remove(id(ticket))
            usage = None if tokens is None else Usage(tokens * 100, None, tokens)
            self.balancer.close(ticket, outcome, now=self.now, usage=usage)
        self.settle()

    @rule(seconds=st.floats(0, 4) | st.sampled_from([0.0005, 0.01, 0.25]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.balancer.check(now=self.now)
        self.settle()
        deadline = self.balancer.next_deadline()
        assert deadline is None or deadline > self.now, "poll left somebody who waited too long"

    def snapshot(self) -> list[EndpointSnapshot]:
        return self.balancer.snapshot(now=self.now).endpoints

    @invariant()
    def in_flight_is_the_number_of_placed_tickets(self) -> None:
        placed = [t.placed_on for t in self.tickets if t.state is TicketState.PLACED]
        waiting_for_byte = [
            t.placed_on for t in self.tickets if t.state is TicketState.PLACED and t.first_byte_at is None
        ]
        known = {e.endpoint.uid: e for e in self.snapshot()}
        for state in {id(s): s for s in placed if s is not None}.values():
            one = known[state.endpoint.uid]
            assert one.in_flight == placed.count(state) <= LIMIT
            assert one.awaiting_first_byte == waiting_for_byte.count(state)
        assert sum(e.in_flight for e in known.values()) == len(placed)

    @invariant()
    def the_queue_is_what_waits_and_within_bounds(self) -> None:
        waiting = [t for t in self.tickets if t.state is TicketState.WAITING]
        pool = self.balancer.snapshot(now=self.now)
        assert pool.waiting == len(waiting) <= QUEUE_REQUESTS
        assert pool.waiting_bytes == sum(t.request.body_bytes for t in waiting) <= QUEUE_BYTES

    @invariant()
    def models_count_what_is_placed(self) -> None:
        """In flight = placed tickets; pins = their keys; queued work = that of those without a first byte."""
        if self.balancer.block_bytes is None:
            return
        placed: dict[int, list[Ticket]] = {}
        for ticket in self.tickets:
            if ticket.state is TicketState.PLACED:
                assert ticket.placed_on is not None
                placed.setdefault(id(ticket.placed_on.load), []).append(ticket)
        for tickets in placed.values():
            assert tickets[0].placed_on is not None
            self.check_model(tickets[0].placed_on.load, tickets)
        pool = self.balancer._pool
        assert pool is not None
        assert pool.index.width <= 8

    @staticmethod
    def check_model(load: LoadModel, tickets: list[Ticket]) -> None:
        placements = [ticket.placement for ticket in tickets if ticket.placement is not None]
        assert load.work.in_flight == len(placements) == len(tickets)
        pinned = {
            key
            for one in placements
            if one.cache is load.kv.cache
            for key in one.request.block_keys[: one.pinned_end.end]
        }
        assert load.kv.cache.pinned == len(pinned) <= load.kv.cache.size or not load.kv.cache.attached
        assert set(load.work.pending) <= set(placements)
        streams = {one for one, ticket in zip(placements, tickets, strict=True) if one.request.stream}
        started = {t.placement for t in tickets if t.first_byte_at is not None}
        assert {one for one in load.work.pending if one.request.stream} == streams - started
        assert abs(load.work.pending_tokens - sum(one.work for one in load.work.pending)) < 1e-6
        assert load.work.live_tokens == sum(one.streamed_tokens for one in placements)

    def teardown(self) -> None:
        """Nothing leaks: when all is closed, everything is as at the start."""
        if not hasattr(self, "balancer"):
            return
        for ticket in self.tickets:
            self.balancer.close(ticket, Outcome.CLIENT_CLOSED, now=self.now)
        pool = self.balancer.snapshot(now=self.now)
        assert (pool.waiting, pool.waiting_bytes) == (0, 0)
        assert sum(one.in_flight + one.awaiting_first_byte for one in pool.endpoints) == 0
        for load in {
            id(t.placed_on.load): t.placed_on.load for t in self.tickets if t.placement and t.placed_on
        }.values():
            assert (load.work.in_flight, load.work.pending_tokens, load.work.context_tokens, load.work.live_tokens) == (
                0,
                0.0,
                0.0,
                0.0,
            )
            assert (load.kv.cache.pinned, load.adapters._active) == (0, {})


TestBalancer = BalancerMachine.TestCase
TestBalancer.settings = settings(max_examples=150, stateful_step_count=60)
