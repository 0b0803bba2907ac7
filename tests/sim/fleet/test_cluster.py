# SPDX-License-Identifier: Apache-2.0
"""The fleet in virtual time: by hand, by its invariants, and through failures."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.registry import POLICIES, make_policy
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import PROGRESS_S, Fleet
from lbproxy.sim.fleet.des import EventHeap
from lbproxy.sim.fleet.fleet import ExchangeRules, FleetOptions, Served, ServerFault, SimulatedServer, decisions
from lbproxy.sim.workloads.catalogue import adapter_names, make_workload
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job, OpenLoop, Workload
from tests.sim.engine.test_engine import STEADY

QWEN = SimulatedServer(dataclasses.replace(PRESETS["qwen-32b-2xh100"], max_model_len=131_072))
STREAMS = FleetOptions(servers=(QWEN, QWEN, QWEN))
ROOMY = AdmissionSettings(queue_requests=100_000, queue_bytes=2**34, queue_timeout=86_400)


def replicas(policy: str, kind: type[Balancer] = Balancer) -> Callable[[random.Random], Balancer]:
    """What makes the balancers of a fleet."""

    def make(rng: random.Random) -> Balancer:
        routing = RoutingSettings.model_validate({"policy": policy})
        return kind(make_policy(routing, rng), BalancingSettings(admission=ROOMY), rng=rng)

    return make


def run(
    policy: str, workload: Workload, options: FleetOptions = STREAMS, *, seed: int = 1, kind: type[Balancer] = Balancer
) -> list[Served]:
    return Fleet(options, workload, replicas(policy, kind), seed=seed).run()


def small(name: str = "own", **parameters: float) -> Workload:
    return make_workload(name, {"duration_s": 20, **parameters}, seed=3)


def shared(rate: float = 12.0) -> Workload:
    """Light, with prefixes to route by."""
    return small(rate=rate, prompt_tokens=1500, shared_tokens=800, groups=6, spread=0.7)


def job(name: str, prompt: int, output: int, model: str | None = None) -> Job:
    return Job(name, (Piece(ord(name), prompt),), Piece(1000 + ord(name), output), model)


def test_events_happen_in_order_and_ties_in_the_order_of_asking() -> None:
    heap = EventHeap()
    seen: list[tuple[float, str]] = []

    def note(what: str) -> None:
        seen.append((heap.now, what))
        if what == "b":
            heap.at(0.5, note, "late")

    for when, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        heap.at(when, note, what)
    while heap.step():
        pass
    # What is asked for in the past happens now: time does not go back.
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]


def test_two_servers_by_hand() -> None:
    """Steps of 10 ms, 1 ms of network each way, requests in turn. a reaches its server at 1 ms, so its tokens leave at
    11, 21, 31; b the other server at 3 ms; c the first one at 5 ms, in the middle of a's step, and joins at 11.
    """
    options = FleetOptions(servers=(SimulatedServer(STEADY), SimulatedServer(STEADY)), network_s=0.001, jitter=False)
    arrivals = [(0.0, job("a", 10, 3)), (0.002, job("b", 10, 1)), (0.004, job("c", 10, 2))]
    served = run("round-robin", OpenLoop([arrivals]), options)
    a, b, c = served
    assert a.server == c.server != b.server
    assert [one.first_at for one in served] == pytest.approx([0.012, 0.014, 0.022])
    assert [one.ended_at for one in served] == pytest.approx([0.032, 0.014, 0.032])
    assert [one.placed_at for one in served] == [0.0, 0.002, 0.004]


def test_next_phase_begins_when_the_last_one_has_drained() -> None:
    options = FleetOptions(servers=(SimulatedServer(STEADY),), network_s=0.0, jitter=False)
    served = run("random", OpenLoop([[(0.0, job("a", 10, 5))], [], [(0.5, job("b", 10, 1))]]), options)
    assert served[0].ended_at == pytest.approx(0.05)
    assert served[1].submitted_at == pytest.approx(0.55)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "weighted"])
def test_every_policy_serves_everything_once(policy: str) -> None:
    served = run(policy, shared())
    assert len(served) > 150
    assert {one.outcome for one in served} == {Outcome.COMPLETED}
    assert len({one.job.id for one in served}) == len(served)
    for one in served:
        assert one.placed_at is not None
        assert one.first_at is not None
        assert one.submitted_at <= one.placed_at < one.first_at <= one.ended_at
        assert one.cached_tokens < one.job.prompt_tokens


@pytest.mark.parametrize("policy", ["random", "least-request", "adaptive"])
def test_same_seed_same_decisions_and_times(policy: str) -> None:
    def log(seed: int) -> list[object]:
        served = run(policy, shared(), seed=seed)
        return [decisions(served), [(one.first_at, one.ended_at, one.cached_tokens) for one in served]]

    assert log(1) == log(1) != log(2)


def test_jobs_arrive_alike_whatever_the_policy() -> None:
    """Also what is random about a job: its size as the balancer sees it, whether it is streamed."""

    def seen(policy: str) -> list[tuple[object, ...]]:
        requests: list[tuple[object, ...]] = []

        class Watched(Balancer):
            def close(
                self,
                ticket: Ticket,
                outcome: Outcome,
                *,
                now: float,
                usage: Usage | None = None,
                timed_out: bool = False,
            ) -> None:
                request = ticket.request
                requests.append((ticket.submitted_at, request.id, request.prompt_bytes, request.stream))
                super().close(ticket, outcome, now=now, usage=usage, timed_out=timed_out)

        options = dataclasses.replace(STREAMS, stream_share=0.5, balancers=2)
        run(policy, shared(), options, kind=Watched)
        return sorted(requests)

    requests = seen("round-robin")
    assert requests == seen("adaptive")
    assert 0.3 < sum(bool(request[3]) for request in requests) / len(requests) < 0.7


class Book(Balancer):
    """A balancer that writes down what it is told."""

    calls: list[tuple[float, str, str, int]]

    def note(self, now: float, what: str, ticket: Ticket, amount: int = 0) -> None:
        if not hasattr(self, "calls"):
            self.calls = []
            BOOKS.append(self)
        self.calls.append((now, what, ticket.request.id, amount))

    def first_byte(self, ticket: Ticket, *, now: float) -> None:
        self.note(now, "first byte", ticket)
        super().first_byte(ticket, now=now)

    def progress(self, ticket: Ticket, tokens: int, *, now: float) -> None:
        self.note(now, "progress", ticket, tokens)
        super().progress(ticket, tokens, now=now)

    def close(
        self, ticket: Ticket, outcome: Outcome, *, now: float, usage: Usage | None = None, timed_out: bool = False
    ) -> None:
        assert ticket.state is TicketState.PLACED
        self.note(now, "close", ticket, 0 if usage is None else usage.completion_tokens or 0)
        super().close(ticket, outcome, now=now, usage=usage, timed_out=timed_out)


BOOKS: list[Book] = []


@pytest.mark.parametrize("stream_share", [1.0, 0.0, 0.5])
def test_balancer_is_told_what_a_proxy_would_know(stream_share: float) -> None:
    """Of a stream: first byte, progress at most every 250 ms, all of it before the end. Of other answers: the end."""
    BOOKS.clear()
    options = dataclasses.replace(STREAMS, stream_share=stream_share)
    served = run("least-request", shared(), options, kind=Book)
    (book,) = BOOKS
    calls: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for now, what, name, amount in book.calls:
        calls[name].append((now, what, amount))
    assert len(calls) == len(served)
    for one in served:
        tokens = one.job.answer.tokens
        told = calls[one.job.id]
        assert told[-1] == (one.ended_at, "close", tokens)
        if not one.streamed:
            assert [what for _, what, _ in told] == ["first byte", "close"]
            assert told[0][0] == one.ended_at
            continue
        assert told[0][:2] == (one.first_at, "first byte")
        reports = [(now, amount) for now, what, amount in told if what == "progress"]
        assert sum(amount for _, amount in reports) == tokens
        # The last one is the end's, whenever that is.
        assert all(after[0] - before[0] >= PROGRESS_S - 1e-9 for before, after in pairwise(reports[:-1]))
    assert stream_share < 1 or len(book.calls) > 4 * len(served)


def test_slow_servers_get_less_of_a_policy_that_can_tell() -> None:
    options = FleetOptions(servers=(QWEN, dataclasses.replace(QWEN, speed=0.3)))
    counts = Counter(one.server for one in run("least-request", small(rate=12, duration_s=40), options))
    assert counts[0] > 1.5 * counts[1]


def test_server_that_becomes_slow_for_a_while_is_slow_for_that_while() -> None:
    fault = ServerFault(server=0, from_s=20, until_s=40, speed=0.1)
    options = FleetOptions(servers=(QWEN,), faults=(fault,))
    served = run("random", small(rate=1, duration_s=80), options)
    times = [(one.submitted_at, one.ended_at - one.submitted_at) for one in served]
    before = [took for at, took in times if at < 15]
    during = [took for at, took in times if 20 < at < 35]
    after = [took for at, took in times if at > 55]
    assert min(during) > 2 * max(before)
    assert max(after) < min(during)


def test_dead_server_loses_its_requests_and_gets_no_more_until_it_is_back_empty() -> None:
    fault = ServerFault(server=0, from_s=10, until_s=30)
    options = FleetOptions(servers=(QWEN, QWEN), faults=(fault,))
    served = run("round-robin", small(rate=8, duration_s=50, shared_tokens=500), options)
    assert len({one.job.id for one in served}) == len(served)
    outcomes = Counter(one.outcome for one in served)
    assert outcomes[Outcome.COMPLETED] > 0.9 * len(served)
    # Streams that had begun are broken; whoever waited for its first byte is reset, which is not tried again.
    assert outcomes[Outcome.UPSTREAM_BROKE] >= 5
    assert set(outcomes) <= {Outcome.COMPLETED, Outcome.UPSTREAM_BROKE, Outcome.UPSTREAM_RESET}
    assert all(one.ended_at == 10 for one in served if one.outcome is Outcome.UPSTREAM_BROKE)
    # Until enough connections were refused it is still tried, and those requests go elsewhere.
    retried = [one for one in served if one.attempts > 1]
    assert 1 <= len(retried) <= 10
    assert all(one.server == 1 and one.outcome is Outcome.COMPLETED for one in retried)
    placed = [(one.placed_at or 0, one.server) for one in served if one.attempts == 1]
    assert not [at for at, server in placed if server == 0 and 12 < at < 30]
    back = [one for one in served if one.server == 0 and one.submitted_at > 35]
    assert len(back) > 10


def test_request_that_no_server_takes_ends_as_a_bad_one() -> None:
    options = FleetOptions(servers=(SimulatedServer(STEADY),))
    served = run("random", OpenLoop([[(0.0, job("a", 2000, 5)), (0.1, job("b", 10, 5))]]), options)
    assert [one.outcome for one in served] == [Outcome.BAD_REQUEST, Outcome.COMPLETED]


def test_adapters_are_models_with_a_parent() -> None:
    lora = SimulatedServer(dataclasses.replace(QWEN.preset, max_loras=4))
    options = FleetOptions(servers=(lora, lora, QWEN), adapters=tuple(adapter_names(15)))
    served = run("least-request", small("lora", rate=6), options)
    assert {one.outcome for one in served} == {Outcome.COMPLETED}
    assert {one.server for one in served} == {0, 1}


def test_scrapes_come_in_time_with_the_gauges_of_when_they_were_sent() -> None:
    pages: dict[int, list[LoadMetrics]] = defaultdict(list)

    class Scraped(Balancer):
        def report_scrape(self, uid: EndpointUid, metrics: LoadMetrics) -> None:
            pages[uid].append(metrics)
            super().report_scrape(uid, metrics)

    options = dataclasses.replace(STREAMS, scrape_interval_s=0.5, scrape_delay_s=0.1)
    served = run("least-request", small(rate=30), options, kind=Scraped)
    assert len(pages) == 3
    for of_server in pages.values():
        gaps = {round(after.scraped_at - before.scraped_at, 9) for before, after in pairwise(of_server)}
        assert gaps == {0.5}
        assert len(of_server) == pytest.approx(served[-1].ended_at / 0.5, abs=3)
    seen = [page for of_server in pages.values() for page in of_server]
    assert max((page.running or 0) for page in seen) > 20
    assert max((page.kv_utilization or 0) for page in seen) > 0.05
    pages.clear()
    run("least-request", small(), dataclasses.replace(options, scrape_interval_s=None), kind=Scraped)
    assert not pages


def test_replicas_that_tell_each_other_keep_prefixes_together() -> None:
    def hits(exchange: ExchangeRules | None) -> float:
        options = FleetOptions(servers=(QWEN,) * 4, balancers=4, exchange=exchange)
        workload = small(rate=8, prompt_tokens=7000, shared_tokens=6000, groups=60, duration_s=40, output_tokens=50)
        served = run("gie", workload, options)
        assert {one.outcome for one in served} == {Outcome.COMPLETED}
        return sum(one.cached_tokens for one in served) / sum(one.job.prompt_tokens for one in served)

    assert hits(ExchangeRules(interval_s=0.02)) > hits(None) + 0.1


def test_requests_of_others_count_and_leave_nothing_behind() -> None:
    balancers: list[Balancer] = []

    class Kept(Balancer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            balancers.append(self)

    options = FleetOptions(
        servers=(QWEN, QWEN), balancers=3, exchange=ExchangeRules(lost=0.05, repeated=0.1, late=0.05)
    )
    fleet = Fleet(options, small(rate=5), replicas("adaptive", Kept), seed=1)
    seen: list[int] = []
    fleet.watch(1.0, lambda _: seen.append(max(one.elsewhere for one in balancers[0].endpoints.members())))
    fleet.run()
    assert max(seen) > 2
    exchange = fleet._exchange
    assert exchange is not None
    exchange._options = ExchangeRules()  # or the last batches may be among those that are lost
    for member in exchange._members.values():
        member.journal.reset_due = True
    fleet.settle(5.0)
    for balancer in balancers:
        for state in balancer.endpoints.members():
            assert (state.in_flight, state.elsewhere, state.reported.elsewhere_awaiting) == (0, 0, 0)
            assert state.load.work.in_flight == 0
            assert not state.load.work.pending
            assert state.load.kv.cache.pinned == 0
