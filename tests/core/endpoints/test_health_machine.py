# SPDX-License-Identifier: Apache-2.0
"""A machine that drives the states of three endpoints in every order: what must hold however they behave."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lbproxy.config.sections.health import BreakerSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints import health
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import MODEL, bring_up, make_balancer, request, taken

NAMES = ("e1", "e2", "e3")
_OF_KEYS = {FailureKind.REFUSED, FailureKind.FORBIDDEN}
KINDS = st.sampled_from(sorted(set(FailureKind) - _OF_KEYS - {FailureKind.STALE}, key=str))
"""Not those of a refused key: no probe shows whether that is valid, and a trial comes when the price is right."""
POLICIES = st.sampled_from(["least-request", "round-robin", "adaptive"])


class HealthMachine(RuleBasedStateMachine):
    """Three endpoints, the third of which nobody probes."""

    @initialize(policy=POLICIES, panic=st.booleans(), seed=st.integers(0, 99))
    def start(self, policy: str, panic: bool, seed: int) -> None:
        self.balancer: Balancer = make_balancer(policy=policy, breaker=BreakerSettings(panic=panic), seed=seed)
        self.panic = panic
        self.now = 1000.0
        path = {"e1": "/health", "e2": "/health", "e3": None}
        specs = [
            EndpointSpec(name=name, base_url=f"http://10.0.0.{n}:8000", health=path[name])
            for n, name in enumerate(NAMES, 1)
        ]
        bring_up(self.balancer, self.balancer.set_endpoints(specs, now=self.now).added)
        self.known = dict.fromkeys(NAMES, Health.UP)
        self.open: list[Ticket] = []

    @property
    def states(self) -> dict[str, EndpointState]:
        return {state.endpoint.name: state for state in self.balancer._endpoints._states.values()}

    def is_readmitted(self, state: EndpointState) -> bool:
        return self.balancer._endpoints.serving.is_readmitted(state)

    def settle(self) -> None:
        """Every change of state is told, once, and is in the table."""
        for change in taken(self.balancer):
            name = change.endpoint.name
            assert change.before is self.known[name]
            assert change.after in {after for (before, _), after in health.TABLE.items() if before is change.before}
            assert (change.cause is not None) == (change.after is Health.EJECTED)
            assert change.reason
            self.known[name] = change.after
        assert self.known == {name: state.health for name, state in self.states.items()}

    @rule()
    def submit(self) -> None:
        serving = {
            name: (state.health, state.standing.trial, self.is_readmitted(state), state.standing.breaker.until)
            for name, state in self.states.items()
        }
        ticket = self.balancer.submit(request(MODEL), now=self.now)
        assert ticket.state is not TicketState.WAITING
        if ticket.placed_on is None:
            assert ticket.outcome is Outcome.NO_ENDPOINTS
            assert not any(was is Health.UP for was, *_ in serving.values())
        else:
            was, trial, readmitted, until = serving[ticket.placed_on.endpoint.name]
            over = was is Health.HALF_OPEN or (was is Health.EJECTED and until <= self.now)
            if was is Health.EJECTED and not readmitted and not over:
                assert not any(one is Health.UP for one, *_ in serving.values()), "ejected and tried: nobody is up"
            if was is Health.DOWN:
                assert not any(one is Health.UP for one, *_ in serving.values())
            assert ticket.is_trial or not over or readmitted, "who tries it is noted, so that nobody else does"
            if ticket.is_trial:
                assert trial is None
            self.open.append(ticket)
        self.settle()

    def pick(self, n: int) -> Ticket:
        return self.open.pop(n % len(self.open))

    @precondition(lambda self: self.open)
    @rule(n=st.integers(0, 100), kind=KINDS)
    def fail(self, n: int, kind: FailureKind) -> None:
        ticket = self.pick(n)
        verdict = self.balancer.after_failure(ticket, kind, (), now=self.now)
        self.balancer.close(ticket, verdict.outcome, now=self.now)
        self.settle()

    @precondition(lambda self: self.open)
    @rule(n=st.integers(0, 100), first=st.booleans(), outcome=st.sampled_from(list(Outcome)))
    def end(self, n: int, first: bool, outcome: Outcome) -> None:
        ticket = self.pick(n)
        if first:
            self.balancer.first_byte(ticket, now=self.now)
        self.balancer.close(ticket, outcome, now=self.now)
        self.settle()

    @rule(name=st.sampled_from(["e1", "e2"]), ok=st.booleans())
    def probe(self, name: str, ok: bool) -> None:
        uid = self.states[name].endpoint.uid
        if not self.balancer.endpoints.may_probe_in(uid, now=self.now):
            self.balancer.report_health(uid, ok, "probe", now=self.now)
        self.settle()

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 5.0, 60.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.balancer.check(now=self.now)
        self.settle()

    @invariant()
    def one_trial_at_a_time(self) -> None:
        if not hasattr(self, "balancer"):
            return
        for name, state in self.states.items():
            trials = [ticket.trial for ticket in self.open if ticket.is_trial and ticket.placed_on is state]
            assert trials == ([] if state.standing.trial is None else [state.standing.trial]), name
            assert not trials or state.health is not Health.UP
            assert 0.1 <= self.balancer._judge.slow_start.share(state, self.now) <= 1.0
            assert self.panic or not self.is_readmitted(state)
            assert state.health is not Health.EJECTED or state.standing.breaker.until - self.now <= 90.0

    def teardown(self) -> None:
        """Whatever was: endpoints that behave are all up again in bounded time, and in use."""
        if not hasattr(self, "balancer"):
            return
        for ticket in self.open:
            self.balancer.close(ticket, Outcome.CLIENT_CLOSED, now=self.now)
        self.open = []
        ends = self.now + 100.0  # the longest ejection, and two rounds of probes
        while self.now < ends:
            self.now += 0.5
            self.balancer.check(now=self.now)
            for name in ("e1", "e2"):
                uid = self.states[name].endpoint.uid
                if not self.balancer.endpoints.may_probe_in(uid, now=self.now):
                    self.balancer.report_health(uid, True, "200", now=self.now)
            for ticket in [self.balancer.submit(request(MODEL), now=self.now) for _ in range(6)]:
                self.balancer.first_byte(ticket, now=self.now)
                self.balancer.close(ticket, Outcome.COMPLETED, now=self.now)
        self.settle()
        assert set(self.known.values()) == {Health.UP}
        assert not any(state.standing.trial for state in self.states.values())


TestHealth = HealthMachine.TestCase
TestHealth.settings = settings(max_examples=150, stateful_step_count=60)
