# SPDX-License-Identifier: Apache-2.0
"""What requests use of limits per time, and who gets what is left of them."""

from __future__ import annotations

import random
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import pytest

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.queue.ticket import Ticket, TicketState
from lbproxy.core.replicas.batches import decode, encode
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.support.pool import MODEL, make_balancer, spec
from tests.support.sharing import Replica, exchange, joined, taken

POLICIES = ["adaptive", "least-request", "round-robin"]


def provider(n: int = 1, **bounds: int) -> EndpointSpec:
    return replace(spec(n), bounds=Bounds(**bounds), tier=2, metrics=None, health=None, models=(MODEL,), model="its")


def balancer_of(*specs: EndpointSpec, policy: str = "adaptive", now: float = 0.0, **options: object) -> Balancer:
    balancer = make_balancer(policy=policy, **options)  # type: ignore[arg-type]
    balancer.set_endpoints(specs, now=now)
    return balancer


def ask(tokens: int, **more: object) -> InferenceRequest:
    request = InferenceRequest("r", MODEL, True, 4 * tokens, 4 * tokens, max_tokens=1)
    return request._replace(**more)  # type: ignore[arg-type]


def used(balancer: Balancer, key: str, now: float, number: int = 0) -> float:
    """Of an endpoint's limit: the amount."""
    state = list(balancer.endpoints.members())[number]
    assert state.allowance is not None
    assert state.endpoint.bounds is not None
    return dict(state.allowance.used(0, now))[key] * float(getattr(state.endpoint.bounds, key))


def finish(balancer: Balancer, ticket: Ticket, now: float, usage: Usage | None = None) -> None:
    balancer.first_byte(ticket, now=now)
    balancer.close(ticket, Outcome.COMPLETED, now=now, usage=usage)


# --- What counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("usage", [None, Usage(1500, 0, 80)])
def test_an_upload_does_not_shut_a_provider(policy: str, usage: Usage | None) -> None:
    """25 MB of audio counted as 6.5 million tokens: at 200,000 a minute for half an hour."""
    balancer = balancer_of(provider(tokens_per_minute=200_000), policy=policy)
    audio = InferenceRequest("r", MODEL, body_bytes=25 << 20, binary=True)
    first = balancer.submit(audio, now=0.0)
    assert used(balancer, "tokens_per_minute", 0.0) < 2000
    finish(balancer, first, 1.0, usage)
    assert used(balancer, "tokens_per_minute", 1.0) < 2000
    assert balancer.submit(audio, now=1.0).state is TicketState.PLACED


def test_the_first_leg_of_a_split_request_teaches_no_length() -> None:
    """Its one token of a response is the first of the second leg."""
    balancer = balancer_of(provider(tokens_per_day=100_000), policy="least-request")
    ticket = balancer.submit(ask(1000), now=0.0)
    ticket.request = ticket.request.as_leg(1)
    finish(balancer, ticket, 1.0, Usage(1000, 0, 1))
    assert used(balancer, "tokens_per_day", 1.0) == 1000.0
    (flow,) = balancer._flows
    assert flow.allowance.mean_response_tokens == 200.0


# --- Replicas ---------------------------------------------------------------------------------------------------------


def of_all(replicas: list[Replica], requests: int, now: float, at: slice = slice(None)) -> int:
    """How many of so many requests at each of these replicas, in turn, are admitted. Each ends at once."""
    admitted = 0
    for _ in range(requests):
        for one in replicas[at]:
            ticket = one.balancer.submit(ask(10), now=now)
            if ticket.state is TicketState.PLACED:
                admitted += 1
                finish(one.balancer, ticket, now, Usage(10, 0, 1))
            elif ticket.state is TicketState.WAITING:
                one.balancer.close(ticket, Outcome.CLIENT_CLOSED, now=now)
            exchange(replicas, now)
    return admitted


@pytest.mark.parametrize("paused_s", [70.0, 4000.0])
def test_a_limit_is_one_for_all_replicas_also_after_a_pause(paused_s: float) -> None:
    """What others admitted was taken from a bucket as it was before the pause, and then filled up: 20 + 20."""
    flows = FlowsSettings.model_validate({"default": {"requests_per_minute": 20}})
    replicas = joined(2, 1, flows=flows)
    assert of_all(replicas, 1, 0.0) == 2
    assert of_all(replicas, 21, paused_s, slice(1)) == 20
    assert of_all(replicas, 20, paused_s, slice(1, 2)) == 0
    assert of_all(replicas, 20, paused_s + 30.0) == 10


def limited_replica(name: str, now: float = 0.0, **bounds: int) -> Replica:
    replica = Replica(name, 0)
    replica.balancer.set_endpoints([provider(**bounds)], now=now)
    return replica


def test_the_limits_of_an_endpoint_are_those_of_all_replicas() -> None:
    """A provider counts what all of them send."""
    replicas = [limited_replica(f"r{n}", requests_per_minute=20, tokens_per_day=10**6) for n in range(3)]
    exchange(replicas, 0.0)
    assert of_all(replicas, 20, 100.0) == 20
    assert of_all(replicas, 20, 130.0) == 10
    for one in replicas:
        assert used(one.balancer, "tokens_per_day", 131.0) == pytest.approx(30 * 11)


def test_who_joins_knows_what_endpoints_were_used_by_all() -> None:
    """What still runs is told anew, and counts once."""
    bounds = {"requests_per_minute": 600, "tokens_per_minute": 10**6, "tokens_per_day": 10**7}
    a = limited_replica("a", **bounds)
    running = [a.balancer.submit(ask(1000), now=1000.0) for _ in range(3)]
    finish(a.balancer, a.balancer.submit(ask(1000), now=1000.0), 1000.0, Usage(1000, 0, 500))
    b = limited_replica("b", now=5.0, **bounds)
    a.journal.ask("b")
    for key, amount in (("requests_per_minute", 4.0), ("tokens_per_minute", 4503.0), ("tokens_per_day", 4503.0)):
        for batch in taken(a.journal, 1000.0):
            b.peers.hear(decode(encode(batch)), 5.0)
        assert used(b.balancer, key, 5.0) == pytest.approx(amount)
        a.journal.reset_due = True  # another one changes nothing
    for ticket in running:
        finish(a.balancer, ticket, 1000.0, Usage(1000, 0, 1))
    for batch in taken(a.journal, 1000.0):
        b.peers.hear(decode(encode(batch)), 5.0)
    assert used(b.balancer, "tokens_per_day", 5.0) == pytest.approx(4503.0)


def test_a_reset_of_many_requests_counts_each_once() -> None:
    """It takes several batches; those told in the later ones counted again."""
    flows = FlowsSettings.model_validate({"default": {"tokens_per_minute": 10**8}})
    a, b = Replica("a", 1, flows=flows, policy="least-request"), Replica("b", 1, flows=flows, policy="least-request")
    for _ in range(1300):
        a.balancer.submit(ask(1000), now=0.0)
    b.hears(a.tells(0.0), 0.0)
    for one in (a, b):
        assert one.balancer._flows.of("anonymous", 0.0).allowance.use(0.0).tokens == pytest.approx(1300 * 1000)


# --- Who gets what is left --------------------------------------------------------------------------------------------


def placed(balancer: Balancer, now: float) -> list[Ticket]:
    return [one for one in balancer.poll(now=now) if one.state is TicketState.PLACED]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", [1, 2])
def test_who_waits_for_tokens_a_minute_is_woken_when_they_are_there(policy: str, tier: int) -> None:
    """It was told once, when one token was there, and then only if something else happened: 429 after 30 s."""
    only = replace(provider(tokens_per_minute=60_000), tier=tier)
    balancer = balancer_of(only, policy=policy)
    finish(balancer, balancer.submit(ask(59_999), now=0.0), 0.0, Usage(60_000, 0, 0))
    waiting, now = balancer.submit(ask(9_999), now=0.0), 0.0
    while now < 20.0 and not placed(balancer, now):  # a driver has no other events
        now = balancer.next_deadline() or 20.0
    assert now == pytest.approx(10.0, abs=0.01)
    assert waiting.state is TicketState.PLACED


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["shortest", "fcfs"])
def test_large_requests_get_their_turn_at_a_limit_of_tokens(policy: str, order: str) -> None:
    """Small ones took each token as it came: 299 of 299 were served, and 11 of 27 large ones."""
    admission = AdmissionSettings.model_validate({"order": order})
    balancer = balancer_of(provider(tokens_per_minute=60_000), policy=policy, admission=admission)
    finish(balancer, balancer.submit(ask(59_999), now=0.0), 0.0, Usage(60_000, 0, 0))
    rng, now, ids = random.Random(3), 0.0, count()
    sizes: dict[int, int] = {}
    ends: dict[int, list[bool]] = {100: [], 9000: []}
    due = [(0.0, next(ids), 100), (0.5, next(ids), 9000)]

    def noted(tickets: list[Ticket]) -> None:
        for one in tickets:
            ends[sizes.pop(id(one))].append(one.state is TicketState.PLACED)
            if one.state is TicketState.PLACED:
                finish(balancer, one, now, Usage(one.request.prompt_bytes // 4, 0, 1))

    while due and now < 900.0:
        deadline = balancer.next_deadline()
        if deadline is not None and deadline <= due[0][0]:
            now = max(now, deadline)
            noted(balancer.poll(now=now))
            continue
        now, _, size = heappop(due)
        heappush(due, (now + rng.expovariate(6.0 if size == 100 else 1.0 / 30.0), next(ids), size))
        ticket = balancer.submit(ask(size), now=now)
        sizes[id(ticket)] = size
        if ticket.state is not TicketState.WAITING:
            noted([ticket])
        noted(balancer.poll(now=now))
    for size, results in ends.items():
        assert sum(results) >= 0.95 * len(results), (size, sum(results), len(results))
    assert len(ends[9000]) >= 15


def test_a_higher_priority_does_not_wait_for_what_is_kept() -> None:
    balancer = balancer_of(provider(tokens_per_minute=60_000))
    finish(balancer, balancer.submit(ask(59_999), now=0.0), 0.0, Usage(60_000, 0, 0))
    large = balancer.submit(ask(9_999), now=0.0)
    assert balancer.submit(ask(900), now=5.0).state is TicketState.WAITING
    assert balancer.submit(ask(900, priority=1), now=5.0).state is TicketState.PLACED
    assert large.state is TicketState.WAITING


def test_what_was_kept_for_a_client_that_leaves_is_there_for_the_next() -> None:
    balancer = balancer_of(provider(tokens_per_minute=60_000))
    finish(balancer, balancer.submit(ask(59_999), now=0.0), 0.0, Usage(60_000, 0, 0))
    large, small = balancer.submit(ask(20_000), now=0.0), balancer.submit(ask(900), now=0.0)
    balancer.poll(now=5.0)
    assert small.state is TicketState.WAITING
    balancer.close(large, Outcome.CLIENT_CLOSED, now=5.0)
    assert balancer.next_deadline() == float("-inf")
    assert placed(balancer, 5.0) == [small]


def test_with_two_endpoints_something_is_kept_of_one_alone() -> None:
    balancer = balancer_of(provider(1, tokens_per_minute=60_000), provider(2, tokens_per_minute=6_000))
    for state in balancer.endpoints.members():
        assert state.allowance is not None
        state.allowance.take(0.0, 60_000.0 if state.endpoint.name == "e1" else 6_000.0, 0.0)
    large, small = balancer.submit(ask(5_000), now=0.0), balancer.submit(ask(300), now=0.0)
    assert {one.state for one in (large, small)} == {TicketState.WAITING}
    taken_by, now = [], 0.0
    while now < 20.0:
        now = max(now, balancer.next_deadline() or 20.0)
        taken_by += [(one is large, now) for one in placed(balancer, now)]
    assert [is_large for is_large, _ in taken_by] == [False, True]
    assert [at for _, at in taken_by] == pytest.approx([3.0, 5.0], abs=0.1)
