# SPDX-License-Identifier: Apache-2.0
"""Servers that say something else than what they do, or nothing: usage, gauges, first bytes, restarts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FaultKind, FleetOptions, Reported, Served, ServerFault, SimulatedServer, ToldUsage
from lbproxy.sim.workloads.workload import OpenLoop
from tests.sim.engine.test_engine import STEADY
from tests.sim.fleet.test_cluster import job, replicas
from tests.sim.fleet.test_contradictions import listening

ROOMY = SimulatedServer(dataclasses.replace(STEADY, kv_tokens=100_000, max_model_len=8192))
"""10 ms a token."""


class Told(Balancer):
    """Keeps what it is told of requests."""

    def note(self, what: str, ticket: Ticket, now: float) -> None:
        self.events = [*getattr(self, "events", []), (what, ticket.request.id, round(now, 3))]

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        self.note("first byte", ticket, now)
        super().first_byte(ticket, now=now)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        self.note(f"{tokens} tokens", ticket, now)
        super().progress(ticket, tokens, now=now)

    def close(self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, **more: bool) -> None:
        self.usages = [*getattr(self, "usages", []), usage]
        super().close(ticket, outcome, now=now, usage=usage, **more)


def told(spec: SimulatedServer, *faults: ServerFault) -> tuple[Told, list[Served]]:
    """Of two requests with one prompt, of 40 tokens each, 1 s apart; the network takes no time."""
    made: list[Told] = []

    def make(rng: random.Random) -> Balancer:
        balancer = replicas("round-robin", Told)(rng)
        assert isinstance(balancer, Told)
        made.append(balancer)
        return balancer

    options = FleetOptions(servers=(spec,), faults=faults, jitter=False, network_s=0.0)
    jobs = [(at, dataclasses.replace(job("a", 40, 40), id=name)) for at, name in ((0.0, "a"), (1.0, "b"))]
    served = Fleet(options, OpenLoop([jobs]), make, seed=1).run()
    return made[0], served


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (ToldUsage.ALL, Usage(40, 32, 40)),
        (ToldUsage.NO_CACHED, Usage(40, None, 40)),
        # What a proxy counts itself.
        (ToldUsage.NONE, Usage(None, None, 40, is_estimate=True)),
    ],
)
def test_what_usage_says(usage: ToldUsage, said: Usage) -> None:
    balancer, served = told(dataclasses.replace(ROOMY, usage=usage))
    assert served[1].cached_tokens == 32
    assert balancer.usages[1] == said


def test_hidden_tokens_come_before_the_first_byte() -> None:
    balancer, served = told(dataclasses.replace(ROOMY, hidden_share=0.75))
    assert balancer.events[:3] == [("first byte", "a", 0.31), ("1 tokens", "a", 0.31), ("9 tokens", "a", 0.4)]
    assert [one.first_at for one in served] == pytest.approx([0.31, 1.31])
    assert balancer.usages[0] == Usage(40, 0, 40)


def test_all_tokens_may_be_hidden() -> None:
    _balancer, served = told(dataclasses.replace(ROOMY, hidden_share=1.0))
    assert [one.first_at for one in served] == pytest.approx([0.4, 1.4])


def test_a_stream_may_begin_at_once() -> None:
    balancer, served = told(dataclasses.replace(ROOMY, role_chunk=True))
    assert balancer.events[:2] == [("first byte", "a", 0.0), ("1 tokens", "a", 0.01)]
    assert served[0].first_at == pytest.approx(0.01)


def test_a_stream_that_began_is_broken() -> None:
    lost = ServerFault(server=0, from_s=0.005, until_s=0.006, kind=FaultKind.RESTARTED)
    for role_chunk, outcome in ((False, Outcome.UPSTREAM_RESET), (True, Outcome.UPSTREAM_BROKE)):
        _, served = told(dataclasses.replace(ROOMY, role_chunk=role_chunk), lost)
        assert served[0].outcome is outcome


@pytest.mark.parametrize(("kind", "broken"), [(FaultKind.RESTARTED, True), (FaultKind.CLEARED, False)])
def test_a_cache_is_lost_and_nothing_tells(kind: FaultKind, broken: bool) -> None:
    fault = ServerFault(server=0, from_s=0.2, until_s=0.3, kind=kind)
    _balancer, served = told(ROOMY, fault)
    assert (served[0].outcome is Outcome.UPSTREAM_BROKE) == broken
    assert served[1].cached_tokens == 0
    assert {metrics.started_at for _, metrics in listening(_options(fault), (0.0, job("a", 10, 100)))} == {0.0}


def _options(*faults: ServerFault, server: SimulatedServer = ROOMY) -> FleetOptions:
    return FleetOptions(servers=(server,), faults=faults, jitter=False)


@pytest.mark.parametrize(
    ("reported", "seen"),
    [
        (Reported.TRUE, (4, 8)),
        (Reported.IN_FLIGHT, (12, 0)),
        (Reported.TWICE, (8, 16)),
        (Reported.NOTHING, (0, 0)),
    ],
)
def test_what_gauges_say(reported: Reported, seen: tuple[int, int]) -> None:
    """Eight slots, twelve requests."""
    server = dataclasses.replace(ROOMY, reported=reported)
    heard = listening(_options(server=server), *((0.0, job(chr(97 + n), 10, 200)) for n in range(12)))
    assert {(metrics.waiting, metrics.running) for _, metrics in heard if 0.5 < metrics.scraped_at < 1.5} == {seen}


def test_a_stale_page_is_new_again_after_that() -> None:
    fault = ServerFault(server=0, from_s=0.5, until_s=3.0, kind=FaultKind.STALE)
    heard = listening(_options(fault), (0.0, job("a", 10, 200)), (4.0, job("b", 10, 1)))
    assert {metrics.running for _, metrics in heard if 0.1 < metrics.scraped_at < 3} == {1}
    assert {metrics.running for _, metrics in heard if metrics.scraped_at > 3} == {0}
