# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, repeated or late on the way: after the last reset every count is the truth, and in the end 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.replicas import journal
from lbproxy.core.replicas.batches import Batch
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from tests.support.sharing import Replica, ask, counts_of, exchange

ENDPOINTS = 2
FLOWS = ("a", "b")
PROMPTS = ((), (1,), (1, 2), (1, 2, 3), (1, 9), (5, 6, 7, 8))
LIMITS = FlowsSettings.model_validate({"named": {"a": {"in_flight": 1000}, "b": {"requests_per_minute": 9999}}})
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 2), st.integers(0, 2 * len(PROMPTS) - 1)),
        st.tuples(st.just("first"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 99), st.integers(0, 2)),
        st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 4**2 - 1)),
        st.tuples(st.just("arrive"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 40, 300, 90_000]), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("reset"), st.integers(0, 2), st.just(0)),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    """So that a reset takes several, of which some may be lost. Compiled, the constant is what it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "EVENTS_IN_BATCH", 3)
        yield


class World:
    """Replicas, and batches that are on their way."""

    def __init__(self, count: int) -> None:
        options = {"admission": AdmissionSettings(hold=False), "flows": LIMITS}
        self.replicas = [Replica(f"r{n}", ENDPOINTS, **options) for n in range(count)]
        self.now = 1.0
        self.running: list[tuple[int, Ticket]] = []
        self.late: list[tuple[Replica, Batch]] = []

    def act(self, kind: str, first: int, second: int) -> None:
        """One step of many."""
        number = first % len(self.replicas)
        one = self.replicas[number]
        if kind == "submit":
            self.submit(number, PROMPTS[second % len(PROMPTS)], FLOWS[second // len(PROMPTS)])
        elif kind == "first" and self.running:
            owner, ticket = self.running[first % len(self.running)]
            self.replicas[owner].balancer.first_byte(ticket, now=self.now)
        elif kind == "end" and self.running:
            self.end(first % len(self.running), second)
        elif kind == "send":
            self.send(one, second)
        elif kind == "arrive" and self.late:
            to, batch = self.late.pop(first % len(self.late))
            to.hears([batch], self.now)
        elif kind == "wait":
            self.now += first / 1000.0
        elif kind == "lose":
            one.peers.lose(self.replicas[second % len(self.replicas)].name, self.now)
        elif kind == "reset":
            one.journal.reset_due = True

    def submit(self, number: int, blocks: tuple[int, ...], flow: str) -> None:
        ticket = self.replicas[number].balancer.submit(ask(blocks=blocks, flow=flow), now=self.now)
        assert ticket.state is TicketState.PLACED
        self.running.append((number, ticket))

    def end(self, which: int, how: int) -> None:
        owner, ticket = self.running.pop(which)
        outcome = (Outcome.COMPLETED, Outcome.COMPLETED, Outcome.UPSTREAM_BROKE)[how]
        usage = Usage(700, 0, 10) if how == 0 else None
        self.replicas[owner].balancer.close(ticket, outcome, now=self.now, usage=usage)

    def send(self, one: Replica, fates: int) -> None:
        """The fate of a batch at each of the others, in base 4: it arrives, is lost, arrives twice, or is late."""
        batch = one.journal.take(self.now)
        others = [other for other in self.replicas if other is not one]
        for other in others if batch is not None else []:
            assert batch is not None
            fates, fate = divmod(fates, 4)
            other.hears([batch] * (1, 0, 2, 0)[fate], self.now)
            if fate == 3:
                self.late.append((other, batch))

    def check(self) -> None:
        """Every count of every replica, against all tickets."""
        for number, one in enumerate(self.replicas):
            for n, endpoint in enumerate(one.endpoints):
                here = [
                    (owner, ticket)
                    for owner, ticket in self.running
                    if ticket.placed_state.endpoint.base_url == endpoint.base_url
                ]
                others = [ticket for owner, ticket in here if owner != number]
                awaiting = sum(ticket.first_byte_at is None for ticket in others)
                blocks = {key for _, ticket in here for key in ticket.request.block_keys}
                assert counts_of(one.balancer, n) == (len(others), awaiting, len(here), len(blocks))
            elsewhere = Counter(ticket.request.flow for owner, ticket in self.running if owner != number)
            for flow in FLOWS:
                assert one.balancer._flows.of(flow, self.now).elsewhere == elsewhere[flow]


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 3), STEPS, st.data())
def test_after_the_last_reset_every_count_is_the_truth(
    count: int, steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    world = World(count)
    for step in steps:
        world.act(*step)
    for _ in range(data.draw(st.integers(0, len(world.late)))):
        world.act("arrive", data.draw(st.integers(0, 99)), 0)
    for one in world.replicas:
        one.journal.reset_due = True
    exchange(world.replicas, world.now)
    world.check()
    while world.late:  # what arrives after that is older
        world.act("arrive", 0, 0)
    world.check()
    while world.running:
        world.end(0, 0)
    exchange(world.replicas, world.now)
    world.check()
    for one in world.replicas:
        assert one.counts() == [(0, 0, 0, 0)] * ENDPOINTS
        assert [peer.in_flight for peer in one.peers.snapshot(world.now)] == [0] * (count - 1)
        for state in one.balancer.endpoints.members():
            work = state.load.work
            assert not work.pending
            assert (work.pending_tokens, work.context_tokens, work.live_tokens) == (0.0, 0.0, 0.0)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 3), STEPS)
def test_without_faults_every_count_is_the_truth_after_each_exchange(
    count: int, steps: list[tuple[str, int, int]]
) -> None:
    world = World(count)
    exchange(world.replicas, world.now)
    for kind, first, second in steps:
        if kind in {"submit", "first", "end", "wait", "reset"}:
            world.act(kind, first, second)
            exchange(world.replicas, world.now)
            world.check()
