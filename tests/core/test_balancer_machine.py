"""A machine that does everything in every order, and holds the Balancer against a model of a few lines."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lbproxy.config import AdmissionSettings
from lbproxy.core.types import EndpointSnapshot, EndpointUid, Health, Outcome, Ticket, TicketState
from tests.support.pool import MODEL, bring_up, make_balancer, request, show_gauges, spec

MODELS = st.sampled_from([MODEL, "other", None])
SIZES = st.integers(0, 200)
QUEUE_REQUESTS, QUEUE_BYTES, LIMIT = 4, 500, 3


class BalancerMachine(RuleBasedStateMachine):
    """In-flight = placed tickets; a ticket closes once; bounds hold; nobody who may be served is left waiting."""

    @initialize(policy=st.sampled_from(["least-request", "round-robin", "random", "gie"]), seed=st.integers(0, 99))
    def start(self, policy: str, seed: int) -> None:
        admission = AdmissionSettings(
            queue_requests=QUEUE_REQUESTS, queue_bytes=QUEUE_BYTES, queue_timeout=5.0, max_in_flight_per_endpoint=LIMIT
        )
        self.balancer = make_balancer(policy=policy, admission=admission, seed=seed)
        self.now = 0.0
        self.uids: dict[int, EndpointUid] = {}
        self.last_uid = 0
        self.tickets: list[Ticket] = []
        self.ended: dict[int, Outcome] = {}

    def settle(self) -> None:
        """The driver's second step. Tickets that `poll` returns were waiting and are not any more."""
        waiting = {id(t) for t in self.tickets if t.state is TicketState.WAITING}
        for ticket in self.balancer.poll(now=self.now):
            assert id(ticket) in waiting
            assert ticket.state is not TicketState.WAITING
        for ticket in self.tickets:
            if ticket.state is TicketState.CLOSED:
                assert ticket.outcome is not None
                assert self.ended.setdefault(id(ticket), ticket.outcome) is ticket.outcome, "it ended twice"
            else:
                assert id(ticket) not in self.ended, "it came back to life"

    @rule(members=st.sets(st.integers(1, 4)))
    def endpoints_change(self, members: set[int]) -> None:
        changes = self.balancer.set_endpoints([spec(n) for n in sorted(members)])
        for endpoint in changes.added:
            assert endpoint.uid > self.last_uid, "uids are never reused"
            self.last_uid = endpoint.uid
            self.uids[int(endpoint.name[1:])] = endpoint.uid
        self.settle()

    @rule(n=st.integers(1, 4), model=st.sampled_from([MODEL, "other"]))
    def endpoint_up(self, n: int, model: str) -> None:
        if n in self.uids:
            self.balancer.report_health(self.uids[n], True, "")
            member = next((e for e in self.snapshot() if e.endpoint.uid == self.uids[n] and not e.draining), None)
            if member is not None:
                bring_up(self.balancer, [member.endpoint], model)
        self.settle()

    @rule(n=st.integers(1, 4), ok=st.booleans(), times=st.integers(1, 3))
    def probe(self, n: int, ok: bool, times: int) -> None:
        for _ in range(times if n in self.uids else 0):
            self.balancer.report_health(self.uids[n], ok, "")
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

    @rule(model=MODELS, size=SIZES, avoid=st.sets(st.integers(1, 4), max_size=2))
    def submit(self, model: str | None, size: int, avoid: set[int]) -> None:
        avoided = frozenset(self.uids[n] for n in avoid if n in self.uids)
        ticket = self.balancer.submit(request(model, size=size), now=self.now, avoid=avoided)
        self.tickets.append(ticket)
        if ticket.state is TicketState.PLACED:
            assert ticket.placed_on is not None
            assert ticket.placed_on.endpoint.uid not in avoided
            assert ticket.placed_on.health is Health.UP
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

    @rule(pick=st.integers(0, 1000), outcome=st.sampled_from([Outcome.COMPLETED, Outcome.CLIENT_CLOSED]))
    def close(self, pick: int, outcome: Outcome) -> None:
        if self.tickets:
            self.balancer.close(self.tickets[pick % len(self.tickets)], outcome, now=self.now)
        self.settle()

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
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


TestBalancer = BalancerMachine.TestCase
TestBalancer.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
