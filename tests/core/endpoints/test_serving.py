# SPDX-License-Identifier: Apache-2.0
"""The index of models: whatever happens in whatever order, it equals one that is built anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.health import BreakerSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.endpoints.endpoint_set import DIAL_ANY_S, DIAL_S
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.explain import MAX_SHOWN
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import FailureKind
from tests.support.pool import card, make_balancer, pool_of, request, seen, spec

FAR = 1e9
"""Ejections have ended by then."""
MODELS = ("a", "b", "c", "d")
LISTS = st.none() | st.lists(st.sampled_from(MODELS), unique=True)
FAILURES = st.sampled_from([FailureKind.RESET, FailureKind.CONNECT, FailureKind.TIMEOUT])


class Reference:
    """The same answers, worked out from all endpoints at once."""

    def __init__(self, states: list[EndpointState], *, panic: bool) -> None:
        self.states = states
        self.members = [
            state
            for state in states
            if state.health in {Health.UP, Health.EJECTED, Health.HALF_OPEN} and not state.draining
        ]
        self.panic = panic

    def group(self, model: str | None) -> list[EndpointState]:
        return [
            state for state in self.members if model is None or (state.models is not None and model in state.models)
        ]

    @property
    def silent(self) -> list[EndpointState]:
        return [state for state in self.members if state.models is None]

    def panics(self, group: list[EndpointState]) -> bool:
        return self.panic and 2 * sum(state.health is Health.UP for state in group) < len(group)

    def usable(self, group: list[EndpointState]) -> list[EndpointState]:
        return [state for state in group if _is_open(state) or (self.panics(group) and _is_reachable(state))]

    def candidates(self, model: str | None) -> list[EndpointState]:
        found = self.usable(self.group(model))
        return found if found or model is None else self.usable(self.silent)

    def readmitted(self, state: EndpointState) -> bool:
        groups = [self.group(None), self.silent, *(self.group(model) for model in state.models or ())]
        kept_out = not _is_open(state) and _is_reachable(state)
        return kept_out and any(state in group and self.panics(group) for group in groups)

    def absent(self) -> list[tuple[str, str]]:
        out = [one for one in self.states if one.draining or not (_is_open(one) or self.readmitted(one))]
        return [(one.endpoint.name, "draining" if one.draining else one.health.value) for one in out][:MAX_SHOWN]

    def cards(self) -> list[ModelCard]:
        found: dict[str, ModelCard] = {}
        for state in self.members:
            for one in (state.models or {}).values():
                found.setdefault(one.id, one)
        return list(found.values())

    def adapters(self) -> set[str]:
        return {one.id for state in self.members for one in (state.models or {}).values() if one.parent is not None}


def _is_open(state: EndpointState) -> bool:
    return state.health is Health.UP or (state.health is Health.HALF_OPEN and state.standing.trial is None)


def _is_reachable(state: EndpointState) -> bool:
    return state.standing.breaker.cause is not Cause.UNREACHABLE


class ServingMachine(RuleBasedStateMachine):
    """Endpoints that come, leave, list other models, fail, recover and drain."""

    @initialize(policy=st.sampled_from(["least-request", "adaptive"]), panic=st.booleans())
    def start(self, policy: str, panic: bool) -> None:
        self.breaker = BreakerSettings(panic=panic, consecutive_failures=1)
        self.balancer: Balancer = make_balancer(policy=policy, breaker=self.breaker)
        self.now = 1000.0
        self.specs: list[EndpointSpec] = []
        self.open: list[Ticket] = []
        self.held: list[tuple[list[EndpointState], list[EndpointState]]] = []

    @property
    def states(self) -> list[EndpointState]:
        return list(self.balancer._endpoints.members())

    def uid(self, n: int) -> EndpointUid:
        states = self.states
        return states[n % len(states)].endpoint.uid if states else EndpointUid(0)

    @rule(
        numbers=st.lists(st.integers(1, 7), unique=True),
        configured=st.dictionaries(st.integers(1, 7), st.lists(st.sampled_from(MODELS), unique=True), max_size=2),
        unprobed=st.sets(st.integers(1, 7), max_size=2),
    )
    def set_endpoints(self, numbers: list[int], configured: dict[int, list[str]], unprobed: set[int]) -> None:
        """Some join, some leave, in another order; settings of those that stay change."""
        self.specs = []
        for n in numbers:
            one = spec(n)
            if n in configured:
                one = replace(one, models=tuple(configured[n]))
            self.specs.append(replace(one, health=None) if n in unprobed else one)
        self.balancer.set_endpoints(self.specs, now=self.now)

    @rule(n=st.integers(0, 6), models=LISTS, adapters=st.sets(st.sampled_from(MODELS)))
    def report_models(self, n: int, models: list[str] | None, adapters: set[str]) -> None:
        cards = None if models is None else [card(one, "base" if one in adapters else None) for one in models]
        self.balancer.report_models(self.uid(n), cards)

    @rule(n=st.integers(0, 6), ok=st.booleans(), times=st.integers(1, 3))
    def probe(self, n: int, ok: bool, times: int) -> None:
        for _ in range(times):
            self.balancer.report_health(self.uid(n), ok, "probe", now=self.now)

    @rule()
    def all_up(self) -> None:
        for state in self.states:
            self.balancer.report_health(state.endpoint.uid, True, "probe", now=self.now)

    @rule(n=st.integers(0, 6), draining=st.booleans())
    def drain(self, n: int, draining: bool) -> None:
        self.balancer.drain(self.uid(n), draining=draining)

    @rule(model=st.sampled_from([None, *MODELS]))
    def submit(self, model: str | None) -> None:
        ticket = self.balancer.submit(request(model), now=self.now)
        if ticket.placed_on is not None:
            self.open.append(ticket)
        else:
            self.balancer.close(ticket, Outcome.CLIENT_CLOSED, now=self.now)

    @precondition(lambda self: self.open)
    @rule(n=st.integers(0, 100), kind=FAILURES)
    def fail(self, n: int, kind: FailureKind) -> None:
        """An ejection, or the end of a trial."""
        ticket = self.open.pop(n % len(self.open))
        self.balancer.after_failure(ticket, kind, (), now=self.now)
        self.balancer.close(ticket, Outcome.UPSTREAM_RESET, now=self.now)

    @precondition(lambda self: self.open)
    @rule(n=st.integers(0, 100))
    def end(self, n: int) -> None:
        ticket = self.open.pop(n % len(self.open))
        self.balancer.first_byte(ticket, now=self.now)
        self.balancer.close(ticket, Outcome.COMPLETED, now=self.now)

    @rule(seconds=st.sampled_from([0.5, 5.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.balancer.check(now=self.now)

    @rule(panic=st.booleans(), policy=st.sampled_from(["least-request", "adaptive"]))
    def reconfigure(self, panic: bool, policy: str) -> None:
        self.breaker = self.breaker.model_copy(update={"panic": panic})
        self.balancer.reconfigure(
            make_balancer(policy=policy)._choice.policy,
            BalancingSettings(breaker=self.breaker),
            now=self.now,
        )

    @rule(model=st.sampled_from([None, *MODELS]))
    def hold(self, model: str | None) -> None:
        """A caller keeps a list: nothing that follows may alter it."""
        kept = self.candidates(model)
        self.held.append((kept, kept[:]))

    def candidates(self, model: str | None) -> list[EndpointState]:
        found = self.balancer._endpoints.candidates(model, now=-FAR)
        assert isinstance(found, list)
        return found

    @invariant()
    def equals_one_built_anew(self) -> None:
        if not hasattr(self, "balancer"):
            return
        endpoints, wanted = self.balancer._endpoints, Reference(self.states, panic=self.breaker.panic)
        assert [state.endpoint.name for state in wanted.states] == [one.name for one in self.specs]
        for model in (None, *MODELS, "unknown"):
            assert self.candidates(model) == wanted.candidates(model), model
            for state in wanted.states:
                readmitted = endpoints.serving.is_readmitted_for(state, model)
                assert readmitted == (state in wanted.candidates(model) and not _is_open(state)), model
        snapshots = seen(self.balancer, self.now)
        for state in wanted.states:
            assert snapshots[state.endpoint.name].readmitted == wanted.readmitted(state)
        assert [(endpoint.name, why) for endpoint, why in endpoints.unavailable()] == wanted.absent()
        assert self.balancer.endpoints.serving.model_cards() == wanted.cards()
        assert self.balancer.endpoints.any_up() == bool(wanted.candidates(None))
        assert endpoints.serving.adapters == wanted.adapters()
        if self.balancer._pool is not None:
            assert self.balancer._pool.adapters == wanted.adapters()
        down = sum(state.health is Health.DOWN for state in wanted.states)
        assert len(endpoints.serving.down) == down
        assert all(kept == before for kept, before in self.held)


TestServing = ServingMachine.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=50)


def listing(*lists: str) -> tuple[Balancer, list[EndpointUid]]:
    """Endpoints that are up and list these models, one letter each."""
    balancer = make_balancer(breaker=BreakerSettings(consecutive_failures=1))
    uids = [one.uid for one in balancer.set_endpoints([spec(n) for n in range(1, len(lists) + 1)], now=0.0).added]
    for uid, models in zip(uids, lists, strict=True):
        balancer.report_models(uid, [card(one) for one in models])
        balancer.report_health(uid, True, "", now=0.0)
    return balancer, uids


def eject(balancer: Balancer, uid: EndpointUid) -> None:
    state = balancer._endpoints.get(uid)
    assert state is not None
    balancer._judge._count(state, FailureKind.RESET, "test", 0.0)
    assert state.health is Health.EJECTED


def names(balancer: Balancer, model: str | None) -> list[str]:
    return [state.endpoint.name for state in balancer._endpoints.candidates(model, now=0.0)]


@pytest.mark.parametrize("change", [lambda balancer, uid: balancer.drain(uid), eject], ids=["drained", "ejected"])
def test_a_change_of_one_endpoint_drops_the_lists_of_its_models_alone(
    change: Callable[[Balancer, EndpointUid], object],
) -> None:
    """Else each ejection in a large fleet would cost what all endpoints and adapters together do."""
    balancer, uids = listing("ab", "bc", "cd")
    before = {model: balancer._endpoints.candidates(model, now=0.0) for model in "abcd"}
    change(balancer, uids[0])
    after = {model: balancer._endpoints.candidates(model, now=0.0) for model in "abcd"}
    assert [model for model in "abcd" if after[model] is not before[model]] == ["a", "b"]
    assert names(balancer, "b") == ["e2"]


def test_an_endpoint_is_readmitted_for_the_models_that_lack_others() -> None:
    """The only server of an adapter fails: that is no reason to send it requests that three others can take."""
    balancer, uids = listing("mx", "m", "m", "m")
    eject(balancer, uids[0])
    assert names(balancer, "x") == ["e1"]
    assert names(balancer, "m") == names(balancer, None) == ["e2", "e3", "e4"]
    assert seen(balancer)["e1"].readmitted
    serving, state = balancer._endpoints.serving, balancer._endpoints.get(uids[0])
    assert state is not None
    assert serving.is_readmitted_for(state, "x")
    assert not serving.is_readmitted_for(state, "m")


@pytest.mark.parametrize("leaves", ["a", "b"])
def test_a_model_that_no_member_lists_any_more_leaves_nothing_behind(leaves: str) -> None:
    """Names of models come and go for months; the index holds those of now."""
    balancer, uids = listing("a", "b")
    balancer.report_models(uids["ab".index(leaves)], [card("c")])
    assert leaves not in balancer._endpoints.serving.tiers[1].by_model
    assert names(balancer, leaves) == []


def test_what_was_ever_listed_is_remembered() -> None:
    """Of endpoints that are down, draining or gone, too: a pattern of the settings must not take their models."""
    balancer, uids = listing("a", "b")
    serving = balancer._endpoints.serving
    balancer.report_models(uids[0], [card("c")])
    balancer.drain(uids[1])
    balancer.set_endpoints([replace(spec(3), models=("named",))], now=0.0)
    assert [one for one in ("a", "b", "c", "named", "d") if serving.has_listed(one)] == ["a", "b", "c", "named"]
    balancer.report_models(balancer.set_endpoints([spec(4)], now=0.0).added[0].uid, [card("d")])
    balancer.report_health(next(iter(balancer._endpoints.members())).endpoint.uid, True, "", now=0.0)
    assert serving.has_listed("d")


def test_the_more_endpoints_are_down_the_seldomer_each_is_dialled() -> None:
    balancer, endpoints = pool_of(100)
    for number, endpoint in enumerate(endpoints, 1):
        for _ in range(3):
            balancer.report_health(endpoint.uid, False, "refused", now=0.0)
        wait_s = balancer.endpoints.may_probe_in(endpoint.uid, now=0.0)
        assert wait_s == pytest.approx(max(DIAL_S, DIAL_ANY_S * number))
    balancer.set_endpoints([spec(1)], now=0.0)
    assert balancer.endpoints.may_probe_in(endpoints[0].uid, now=0.0) == pytest.approx(DIAL_S)
