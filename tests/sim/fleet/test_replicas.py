# SPDX-License-Identifier: Apache-2.0
"""Balancers that tell each other of their requests over a bad network, die, and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import BalancerFault, ExchangeRules, FleetOptions, Served, decisions
from lbproxy.sim.fleet.replicas import LOST_S, ReplicaExchange
from lbproxy.sim.workloads.workload import Workload
from tests.sim.fleet.test_cluster import QWEN, replicas, small

DEATH_AT_S, JOIN_AT_S = 8.0, 14.0
BAD = ExchangeRules(lost=0.2, repeated=0.2, late=0.2)
OPTIONS = FleetOptions(servers=(QWEN,) * 3, balancers=3, exchange=ExchangeRules())
DYING = replace(OPTIONS, balancer_faults=(BalancerFault(balancer=0, from_s=DEATH_AT_S, until_s=JOIN_AT_S),))


def total_in_flight(balancers: Sequence[Balancer]) -> int:
    """Requests that balancers have in flight themselves."""
    return sum(state.in_flight for one in balancers for state in one.endpoints.members())


def all_requests(balancer: Balancer) -> int:
    """Those that it has in flight, and those that wait."""
    return total_in_flight([balancer]) + len(balancer._queue)


def prefixes() -> Workload:
    return small(rate=8, prompt_tokens=3000, shared_tokens=2500, groups=30, output_tokens=150)


@dataclass
class Watched:
    """A fleet that ran, and what was looked at between."""

    fleet: Fleet
    served: list[Served]

    @property
    def exchange(self) -> ReplicaExchange:
        assert self.fleet._exchange is not None
        return self.fleet._exchange


def balancer(fleet: Fleet, number: int) -> Balancer:
    """The one that is there now."""
    return fleet._fronts[number].balancer


def elsewhere(fleet: Fleet, number: int) -> int:
    """Requests of others that a balancer knows of."""
    return sum(state.elsewhere for state in balancer(fleet, number).endpoints.members())


def cached_blocks(fleet: Fleet, number: int) -> int:
    """Blocks that a balancer expects in caches."""
    return sum(state.load.kv.cache.size for state in balancer(fleet, number).endpoints.members())


def run(options: FleetOptions, at: dict[float, Callable[[Fleet], None]] | None = None, seed: int = 1) -> Watched:
    """`at`: what to look at, and when."""
    fleet = Fleet(options, prefixes(), replicas("adaptive"), seed=seed)
    for at_s, look in (at or {}).items():
        fleet._heap.at(at_s, look, fleet)
    return Watched(fleet, fleet.run())


def known(fleet: Fleet, number: int) -> dict[str, int]:
    """Requests in flight of each of the others, as one balancer knows them."""
    assert fleet._exchange is not None
    return {one.replica: one.in_flight for one in fleet._exchange.peers(number).snapshot(fleet.now)}


# --- The network ------------------------------------------------------------------------------------------------------


def test_a_network_with_faults_loses_repeats_and_delays() -> None:
    traffic = run(replace(OPTIONS, exchange=BAD)).exchange.traffic
    sent = 2 * traffic.batches  # to each of the others
    assert traffic.lost == pytest.approx(0.2 * sent, rel=0.3)
    assert traffic.repeated == pytest.approx(0.16 * sent, rel=0.3)
    assert traffic.late == pytest.approx(0.2 * 0.96 * sent, rel=0.3)
    assert 0 < traffic.largest < traffic.bytes
    traffic = run(OPTIONS).exchange.traffic
    assert (traffic.lost, traffic.repeated, traffic.late) == (0, 0, 0)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (ExchangeRules(), (False, False)),
        (ExchangeRules(lost=0.3), (True, False)),
        (ExchangeRules(repeated=0.3), (False, True)),
        (ExchangeRules(late=0.3), (True, True)),
    ],
)
def test_each_fault_is_seen_by_those_who_hear(faults: ExchangeRules, expected: tuple[bool, bool]) -> None:
    """What is late is missed at first, and ignored when it arrives."""
    exchange = run(replace(OPTIONS, exchange=faults)).exchange
    for number in range(3):
        seen = [(peer.missed > 0, peer.repeated > 0) for peer in exchange.peers(number).snapshot(0.0)]
        assert seen == [expected] * 2


def test_without_faults_every_request_of_others_is_known_at_once() -> None:
    seen: list[tuple[int, int]] = []

    def look(fleet: Fleet) -> None:
        others = total_in_flight([balancer(fleet, 1), balancer(fleet, 2)])
        seen.append((elsewhere(fleet, 0), others))

    run(OPTIONS, {2.0 + 0.5 * n: look for n in range(30)})
    assert max(others for _, others in seen) > 5
    assert max(abs(counted - others) for counted, others in seen) <= 3, "what happened in an interval of 50 ms"


def test_with_faults_nothing_is_left_in_the_end() -> None:
    watched = run(replace(OPTIONS, exchange=BAD))
    assert {one.outcome for one in watched.served} == {Outcome.COMPLETED}
    exchange = watched.exchange
    exchange._options = ExchangeRules()  # or the last batches may be among those that are lost
    for member in exchange._members.values():
        member.journal.reset_due = True
    watched.fleet.settle(1.0)
    for number in range(3):
        states = list(balancer(watched.fleet, number).endpoints.members())
        assert [(one.elsewhere, one.reported.elsewhere_awaiting, one.load.work.in_flight) for one in states] == [
            (0, 0, 0)
        ] * 3
        assert [one.load.kv.cache.pinned for one in states] == [0] * 3
        missed = [(peer.missed > 0, peer.repeated > 0) for peer in exchange.peers(number).snapshot(0.0)]
        assert missed == [(True, True)] * 2


def test_prefixes_are_kept_together_over_a_network_with_faults() -> None:
    def hits(exchange: ExchangeRules | None) -> float:
        served = run(replace(OPTIONS, exchange=exchange)).served
        return sum(one.cached_tokens for one in served) / sum(one.job.prompt_tokens for one in served)

    shared, bad, unshared = hits(ExchangeRules()), hits(BAD), hits(None)
    assert shared > unshared + 0.1
    assert bad > unshared + 0.05


def test_equal_seeds_are_equal_runs() -> None:
    options = replace(DYING, exchange=BAD)
    first, again, other = (decisions(run(options, seed=seed).served) for seed in (1, 1, 2))
    assert first == again
    assert first != other


# --- A balancer dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network_s", [0.0005, 1.0])
def test_a_balancer_that_dies_takes_only_its_own_requests_with_it(network_s: float) -> None:
    """Those as well that are on their way to a server."""
    running: list[int] = []
    options = replace(DYING, network_s=network_s)
    watched = run(options, {DEATH_AT_S - 1e-6: lambda fleet: running.append(all_requests(balancer(fleet, 0)))})
    cut = [one for one in watched.served if one.outcome is Outcome.CUT]
    assert cut
    assert len(cut) == running[0]
    assert {one.balancer for one in cut} == {0}
    assert all(one.submitted_at <= DEATH_AT_S for one in cut)
    assert {one.outcome for one in watched.served if one not in cut} == {Outcome.COMPLETED}


def test_requests_come_to_the_others_until_a_new_one_is_there() -> None:
    served = run(DYING).served
    away = {one.balancer for one in served if DEATH_AT_S < one.submitted_at < JOIN_AT_S}
    after = {one.balancer for one in served if one.submitted_at > JOIN_AT_S}
    assert (away, after) == ({1, 2}, {0, 1, 2})


def test_its_counts_are_gone_elsewhere_after_three_seconds() -> None:
    seen: list[dict[str, int]] = []
    counts: list[tuple[int, int]] = []

    def look(fleet: Fleet) -> None:
        seen.append(known(fleet, 1))
        counts.append((elsewhere(fleet, 1), total_in_flight([balancer(fleet, 2)])))

    run(DYING, dict.fromkeys((DEATH_AT_S, DEATH_AT_S + LOST_S - 0.01, DEATH_AT_S + LOST_S + 0.01), look))
    before, almost, after = seen
    assert before["r0-0"] > 0
    assert almost["r0-0"] > 0
    assert "r0-0" not in after
    assert counts[1][0] > counts[1][1] + 3
    assert abs(counts[2][0] - counts[2][1]) <= 2


def test_a_new_balancer_starts_with_what_another_one_knows() -> None:
    seen: dict[str, tuple[int, int]] = {}

    def look(name: str, number: int) -> Callable[[Fleet], None]:
        def note(fleet: Fleet) -> None:
            seen[name] = cached_blocks(fleet, number), elsewhere(fleet, number)

        return note

    looks = {
        JOIN_AT_S + 1e-6: look("new", 0),
        JOIN_AT_S + 2e-6: look("old", 1),
        JOIN_AT_S + 0.2: look("told", 0),
        JOIN_AT_S + 0.2 + 1e-6: lambda fleet: seen.update(
            truth=(0, total_in_flight([balancer(fleet, 1), balancer(fleet, 2)])), names=(len(known(fleet, 1)), 0)
        ),
    }
    run(DYING, looks)
    assert seen["new"][0] > 0.8 * seen["old"][0]
    assert abs(seen["told"][1] - seen["truth"][1]) <= 3
    assert seen["names"] == (2, 0), "the new one has another name, and the old one is forgotten"


def test_a_new_balancer_asks_the_others_at_once() -> None:
    complete: list[list[bool]] = []

    def look(fleet: Fleet) -> None:
        assert fleet._exchange is not None
        complete.append([one.is_complete for one in fleet._exchange.peers(0).snapshot(fleet.now)])

    run(replace(DYING, exchange=ExchangeRules(interval_s=1.0)), {JOIN_AT_S + 1.1: look})
    assert complete == [[True, True]]


def test_without_an_exchange_a_new_balancer_knows_nothing() -> None:
    seen: list[int] = []
    watched = run(replace(DYING, exchange=None), {JOIN_AT_S + 1e-6: lambda fleet: seen.append(cached_blocks(fleet, 0))})
    assert seen == [0]
    assert {one.outcome for one in watched.served} == {Outcome.COMPLETED, Outcome.CUT}
