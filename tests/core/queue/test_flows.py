# SPDX-License-Identifier: Apache-2.0
"""Flows: who is next, what each is charged, what each may have, and who goes when the queue is full.

Under least-request with room for one request at an endpoint, the order of service is the order of placement.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.routing import AdmissionSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.capacity.bucket import Bucket
from lbproxy.core.queue.flow import Flow
from lbproxy.core.queue.flows import MAX_FLOWS, OTHERS, FlowRules, Flows
from lbproxy.core.queue.limits import FIRST_BINARY_TOKENS, Limits
from lbproxy.core.queue.ticket import Ticket, TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage, estimated
from tests.support.pool import MODEL, bring_up, make_balancer, pool_of, spec

TOKENS = 100
"""Of each prompt; answers are guessed at 200, so that a request costs 500."""


def rules(**flows: object) -> FlowsSettings:
    return FlowsSettings.model_validate(flows)


def ask(flow: str, *, name: str = "", priority: int = 0, deadline: float | None = None) -> InferenceRequest:
    return InferenceRequest(
        name or flow, MODEL, body_bytes=4 * TOKENS, priority=priority, flow=flow, deadline=deadline, max_tokens=200
    )


def one_at_a_time(flows: FlowsSettings | None = None, **admission: object) -> Balancer:
    """One endpoint with room for one request."""
    limits = AdmissionSettings.model_validate({"max_in_flight_per_endpoint": 1, **admission})
    balancer = make_balancer(admission=limits, flows=flows)
    bring_up(balancer, balancer.set_endpoints([spec(1)], now=0.0).added)
    return balancer


def pool_with_another(**options: object) -> Balancer:
    """An endpoint, and two flows: of one alone nothing is charged in advance."""
    balancer, _ = pool_of(1, **options)
    balancer._flows.of("another", 0.0)
    return balancer


def serve(
    balancer: Balancer, tickets: list[Ticket], count: int, *, usage: Usage | None = None, now: float = 1.0
) -> list[str]:
    """The ids of the next so many requests, each served for a millisecond and ended with `usage`."""
    order: list[str] = []
    for _ in range(count):
        now += 0.001
        balancer.poll(now=now)
        running = [ticket for ticket in tickets if ticket.state is TicketState.PLACED]
        assert len(running) == 1, "one at a time"
        order.append(running[0].request.id)
        balancer.first_byte(running[0], now=now)
        balancer.close(running[0], Outcome.COMPLETED, now=now, usage=usage)
    return order


FULL = Usage(prompt_tokens=TOKENS, cached_tokens=0, completion_tokens=200)


# --- Whose turn it is -------------------------------------------------------------------------------------------------


def test_a_light_flow_does_not_wait_behind_all_of_a_heavy_one() -> None:
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask("heavy"), now=0.0) for _ in range(20)]
    tickets += [balancer.submit(ask("light"), now=0.0) for _ in range(3)]
    assert serve(balancer, tickets, 8, usage=FULL) == ["heavy"] + ["light", "heavy"] * 3 + ["heavy"]


def test_one_flow_alone_is_served_as_if_there_were_none() -> None:
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask("one", name=str(n)), now=0.0) for n in range(9)]
    assert serve(balancer, tickets, 9, usage=FULL) == [str(n) for n in range(9)]


def test_weights_are_shares() -> None:
    balancer = one_at_a_time(rules(named={"gold": {"weight": 3}}))
    tickets = [balancer.submit(ask(name), now=0.0) for name in ("gold", "iron") * 40]
    order = serve(balancer, tickets, 40, usage=FULL)
    assert order.count("gold") in {29, 30, 31}


def test_long_answers_are_paid_for() -> None:
    """Asked alike, but one's answers turn out ten times as long: it gets a fraction of the turns."""
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask(name), now=0.0) for name in ("long", "short") * 60]
    order: list[str] = []
    now = 1.0
    while len(order) < 60:
        now += 0.001
        balancer.poll(now=now)
        running = next(ticket for ticket in tickets if ticket.state is TicketState.PLACED)
        order.append(running.request.id)
        balancer.first_byte(running, now=now)
        answer = 2000 if running.request.id == "long" else 200
        balancer.close(running, Outcome.COMPLETED, now=now, usage=Usage(TOKENS, 0, answer))
    assert 5 <= order.count("long") <= 9  # 4,100 against 500


def test_what_streams_beyond_the_guess_is_charged_as_it_comes() -> None:
    balancer = pool_with_another()
    ticket = balancer.submit(ask("one"), now=0.0)
    flow = ticket.flow
    assert flow is not None
    assert flow.served_tokens == TOKENS + 2 * 200
    balancer.first_byte(ticket, now=0.1)
    balancer.progress(ticket, 150, now=0.2)
    assert flow.served_tokens == TOKENS + 2 * 200
    balancer.progress(ticket, 150, now=0.3)
    assert flow.served_tokens == TOKENS + 2 * 300
    balancer.close(ticket, Outcome.CLIENT_CLOSED, now=0.4)
    assert flow.served_tokens == TOKENS + 2 * 300


def test_what_was_not_done_is_given_back() -> None:
    balancer = pool_with_another()
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.close(ticket, Outcome.CONNECT_FAILED, now=0.1)
    assert ticket.flow is not None
    assert (ticket.flow.served_tokens, ticket.flow.virtual_finish, ticket.flow.active, ticket.flow.in_flight) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("alone", [False, True])
def test_cached_tokens_are_free(alone: bool) -> None:
    balancer = pool_of(1)[0] if alone else pool_with_another()
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.first_byte(ticket, now=0.1)
    balancer.close(ticket, Outcome.COMPLETED, now=0.2, usage=Usage(TOKENS, 90, 10))
    assert ticket.flow is not None
    assert ticket.flow.served_tokens == 10 + 2 * 10


def test_who_was_away_saved_nothing_up() -> None:
    """After an hour of another's service, a flow takes turns with it: it is not served alone until it is even."""
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask("busy"), now=0.0) for _ in range(300)]
    serve(balancer, tickets, 100, usage=FULL)
    tickets += [balancer.submit(ask("back"), now=1.2) for _ in range(50)]
    assert serve(balancer, tickets, 20, usage=FULL, now=1.2).count("back") in {10, 11}


def test_what_is_owed_halves() -> None:
    flows = Flows(rules(half_life="10s"), Limits())
    flow = flows.of("one", 0.0)
    flow.virtual_finish = 1000.0
    assert flows.virtual_start(flow, 0.0) == 1000.0
    assert flows.virtual_start(flow, 10.0) == 500.0
    assert flows.virtual_start(flow, 30.0) == 125.0


def test_priority_goes_before_all_fairness() -> None:
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask("first"), now=0.0)]
    tickets += [balancer.submit(ask("calm", priority=0), now=0.0) for _ in range(3)]
    tickets += [balancer.submit(ask("urgent", priority=5), now=0.0) for _ in range(3)]
    tickets += [balancer.submit(ask("batch", priority=-1), now=0.0) for _ in range(2)]
    assert serve(balancer, tickets, 9, usage=FULL) == ["first"] + ["urgent"] * 3 + ["calm"] * 3 + ["batch"] * 2


def test_a_newcomer_does_not_take_the_place_of_one_that_waits() -> None:
    """A place became free, and before anybody was told, a request of a lower priority came."""
    balancer = one_at_a_time()
    first, urgent = balancer.submit(ask("a"), now=0.0), balancer.submit(ask("b", priority=1), now=0.0)
    balancer.close(first, Outcome.COMPLETED, now=1.0)
    late = balancer.submit(ask("c"), now=1.0)
    assert late.state is TicketState.WAITING
    assert balancer.poll(now=1.0) == [urgent]
    assert (urgent.state, late.state) == (TicketState.PLACED, TicketState.WAITING)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2000)), min_size=40, max_size=120))
def test_nobody_is_behind_by_more_than_a_request(asked: list[tuple[str, int]]) -> None:
    """Of two flows that wait all the while, neither gets more than the other by more than the largest request of each:
    the bound of start-time fair queueing.
    """
    balancer = one_at_a_time(queue_requests=1000)
    sizes = iter(size for _, size in asked)
    tickets = [balancer.submit(ask(name), now=0.0) for name in "ab" * 60]
    got = {"a": 0.0, "b": 0.0}
    now, largest = 1.0, 500.0
    for size in list(sizes)[:50]:
        now += 1e-6
        balancer.poll(now=now)
        running = next(ticket for ticket in tickets if ticket.state is TicketState.PLACED)
        balancer.first_byte(running, now=now)
        balancer.close(running, Outcome.COMPLETED, now=now, usage=Usage(TOKENS, 0, size))
        got[running.request.id] += TOKENS + 2 * size
        largest = max(largest, TOKENS + 2.0 * size)
        # Guesses are put right when a request ends, so that one more of them counts.
        assert abs(got["a"] - got["b"]) <= 2 * largest + 2 * 2000


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_more_requests_than_a_flow_may_have_wait_and_are_in_nobodys_way() -> None:
    balancer, _ = pool_of(2, flows=rules(named={"batch": {"in_flight": 2}}))
    batch = [balancer.submit(ask("batch"), now=0.0) for _ in range(5)]
    assert [ticket.state for ticket in batch] == [TicketState.PLACED] * 2 + [TicketState.WAITING] * 3
    assert {ticket.wait for ticket in batch[2:]} == {Wait.FLOW}
    other = balancer.submit(ask("other"), now=0.0)
    assert other.state is TicketState.PLACED
    assert balancer.poll(now=1.0) == []
    balancer.close(batch[0], Outcome.COMPLETED, now=2.0)
    assert balancer.poll(now=2.0) == [batch[2]]
    assert balancer.next_deadline() == 30.0
    assert balancer.poll(now=30.0) == batch[3:]
    assert {ticket.outcome for ticket in batch[3:]} == {Outcome.EXPIRED}


@pytest.mark.parametrize("policy", ["least-request", "adaptive"])
def test_a_limit_that_is_lifted_lets_those_that_wait_go(policy: str) -> None:
    balancer, _ = pool_of(1, policy=policy, flows=rules(default={"in_flight": 1}))
    tickets = [balancer.submit(ask("one"), now=0.0) for _ in range(3)]
    assert balancer.snapshot(now=0.0).waiting == 2
    flows = balancer._flows
    flows.reconfigure(rules(), 1.0)
    for flow in flows:
        balancer._unpark(flow, 1.0)
    assert balancer.poll(now=1.0) == tickets[1:]
    assert all(ticket.state is TicketState.PLACED for ticket in tickets)


def test_who_waits_for_its_flow_and_leaves_leaves_nothing() -> None:
    balancer, _ = pool_of(1, flows=rules(default={"in_flight": 1}))
    tickets = [balancer.submit(ask("one"), now=0.0) for _ in range(3)]
    balancer.close(tickets[1], Outcome.CLIENT_CLOSED, now=0.5)
    balancer.close(tickets[0], Outcome.COMPLETED, now=1.0)
    assert balancer.poll(now=1.0) == [tickets[2]]
    balancer.close(tickets[2], Outcome.COMPLETED, now=2.0)
    snapshot = balancer.snapshot(now=2.0)
    assert (snapshot.waiting, snapshot.waiting_bytes) == (0, 0)
    assert [(one.name, one.waiting, one.in_flight) for one in snapshot.flows] == [("one", 0, 0)]
    flow = tickets[0].flow
    assert flow is not None
    assert flow.active == 0


def test_a_model_that_nobody_has_is_said_at_once_also_to_a_full_flow() -> None:
    balancer, _ = pool_of(1, flows=rules(default={"in_flight": 1}))
    balancer.submit(ask("one"), now=0.0)
    unknown = balancer.submit(ask("one")._replace(model="nobody's"), now=0.0)
    assert unknown.outcome is Outcome.MODEL_NOT_FOUND


def test_requests_a_minute() -> None:
    balancer, _ = pool_of(1, flows=rules(default={"requests_per_minute": 60}))
    at_once = [balancer.submit(ask("one"), now=0.0) for _ in range(61)]
    assert [ticket.outcome for ticket in at_once] == [None] * 60 + [Outcome.RATE_LIMITED]
    refusal = at_once[-1].refusal
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(1.0)
    assert refusal.message == (
        "Flow `one` has reached its limit of requests a minute, 60 (`requests_per_minute`). Try again in 1 s."
    )
    assert balancer.submit(ask("one"), now=0.5).outcome is Outcome.RATE_LIMITED
    assert balancer.submit(ask("one"), now=1.01).outcome is None
    assert balancer.submit(ask("other"), now=1.01).outcome is None, "each flow has its own"
    assert {one.name: one.refused for one in balancer.snapshot(now=1.0).flows} == {"one": 2, "other": 0}


def test_another_attempt_is_not_another_request() -> None:
    balancer, endpoints = pool_of(2, flows=rules(default={"requests_per_minute": 1}))
    ticket = balancer.submit(ask("one"), now=0.0)
    assert ticket.placed_on is not None
    failed = ticket.placed_on.endpoint.uid
    balancer.close(ticket, Outcome.CONNECT_FAILED, now=0.1)
    again = balancer.submit(ask("one"), now=0.1, avoid=frozenset({failed}))
    assert again.state is TicketState.PLACED
    assert len(endpoints) == 2


@pytest.mark.parametrize(
    ("stream", "max_tokens", "least", "most"), [(True, 900, 0, 0), (False, 900, 900, 900), (False, None, 900, 5000)]
)
def test_a_client_that_leaves_before_its_response_is_charged_what_was_probably_generated(
    stream: bool, max_tokens: int | None, least: int, most: int
) -> None:
    """Its request takes the server's time all the same. Of a stream without a token only the prompt is sure."""
    balancer, _ = pool_of(1, flows=rules(default={"tokens_per_minute": 60}))
    asked = ask("one")._replace(stream=stream, max_tokens=max_tokens)
    ticket = balancer.submit(asked, now=0.0)
    balancer.close(ticket, Outcome.CLIENT_CLOSED, now=60.0, usage=estimated(None, 0))
    written = ticket.used_tokens - asked.body_bytes / 4.0
    assert least <= round(written) <= most


def test_tokens_a_minute_are_known_afterwards() -> None:
    """The prompt counts at once, the answer as it comes, and the usage puts it right."""
    balancer, _ = pool_of(1, flows=rules(default={"tokens_per_minute": 6000}))
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.first_byte(ticket, now=0.0)
    balancer.close(ticket, Outcome.COMPLETED, now=0.0, usage=Usage(5000, 4000, 4000))
    refused = balancer.submit(ask("one"), now=0.0)
    assert refused.outcome is Outcome.RATE_LIMITED
    assert refused.refusal is not None
    assert refused.refusal.retry_after_s == pytest.approx(30.0, abs=0.1), "3,000 are missing, 100 come in a second"
    assert refused.refusal.limit == "tokens a minute, 6000 (`tokens_per_minute`)"
    assert balancer.submit(ask("one"), now=30.1).outcome is None


def test_of_two_limits_the_one_is_named_that_keeps_it_out_longest() -> None:
    balancer, _ = pool_of(1, flows=rules(default={"requests_per_minute": 1, "tokens_per_minute": 6000}))
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.close(ticket, Outcome.COMPLETED, now=0.0, usage=Usage(5000, 0, 1500))
    said: list[object] = []
    for now in (0.0, 59.0, 61.0):
        refusal = balancer.submit(ask("one"), now=now).refusal
        said.append(None if refusal is None else (refusal.limit, refusal.retry_after_s))
    assert said == [
        ("requests a minute, 1 (`requests_per_minute`)", pytest.approx(60.0)),
        ("requests a minute, 1 (`requests_per_minute`)", pytest.approx(1.0)),
        None,
    ]
    balancer = pool_of(1, flows=rules(default={"requests_per_minute": 600, "tokens_per_minute": 6000}))[0]
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.close(ticket, Outcome.COMPLETED, now=0.0, usage=Usage(9000, 0, 1000))
    refusal = balancer.submit(ask("one"), now=0.0).refusal
    assert refusal is not None
    assert "tokens_per_minute" in refusal.limit


def test_who_was_parked_to_the_end_is_told_of_the_limit_and_others_are_not() -> None:
    balancer, _ = pool_of(
        1, flows=rules(named={"batch": {"in_flight": 1}}), admission=AdmissionSettings(max_in_flight_per_endpoint=2)
    )
    tickets = [balancer.submit(ask(name), now=0.0) for name in ("batch", "batch", "chat", "chat")]
    assert [ticket.state for ticket in tickets] == [
        TicketState.PLACED,
        TicketState.WAITING,
        TicketState.PLACED,
        TicketState.WAITING,
    ]
    over = balancer.poll(now=1000.0)
    assert [(one.request.flow, one.outcome) for one in over] == [("batch", Outcome.EXPIRED), ("chat", Outcome.EXPIRED)]
    assert over[0].refusal is not None
    assert over[0].refusal.message == (
        "Flow `batch` has reached its limit of requests at a time, 1 (`in_flight`), and this one could wait no longer."
    )
    assert over[1].refusal is None


def test_a_failed_attempt_costs_no_tokens() -> None:
    balancer, _ = pool_of(1, flows=rules(default={"tokens_per_minute": TOKENS}))
    ticket = balancer.submit(ask("one"), now=0.0)
    balancer.close(ticket, Outcome.CONNECT_FAILED, now=0.0)
    assert balancer.submit(ask("one"), now=0.0).outcome is None


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 120), st.floats(-50, 500)), max_size=40))
def test_a_bucket_says_truly_when_it_will_be_full_enough(size: int, steps: list[tuple[float, float]]) -> None:
    bucket, now = Bucket(size, 0.0), 0.0
    for passed, amount in steps:
        now += passed
        wait = bucket.wait_s(1.0, now)
        assert wait >= 0.0
        if wait > 1e-6:  # less is lost beside the time of day
            assert bucket.wait_s(1.0, now + 0.99 * wait) > 0.0
            assert bucket.wait_s(1.0, now + wait) <= 1e-6
            now += wait
        bucket.take(amount, now)


# --- A full queue -----------------------------------------------------------------------------------------------------


def test_a_full_queue_gives_a_place_of_the_flow_with_most() -> None:
    balancer = one_at_a_time(queue_requests=6)
    heavy = [balancer.submit(ask("heavy"), now=0.0) for _ in range(7)]
    light = [balancer.submit(ask("light"), now=0.1 * n) for n in range(1, 4)]
    assert [ticket.outcome for ticket in heavy[-3:]] == [Outcome.SATURATED] * 3, "the youngest go"
    assert balancer.submit(ask("light"), now=1.0).outcome is Outcome.SATURATED, "three and three"
    assert balancer.submit(ask("heavy"), now=1.0).outcome is Outcome.SATURATED
    assert {ticket.outcome for ticket in light} == {None}
    assert set(balancer.poll(now=1.0)) == set(heavy[-3:])


def test_lower_priorities_are_shed_first_whoever_has_them() -> None:
    balancer = one_at_a_time(queue_requests=3)
    balancer.submit(ask("running"), now=0.0)
    batch = balancer.submit(ask("light", priority=-1), now=0.0)
    for _ in range(2):
        balancer.submit(ask("heavy"), now=0.0)
    assert balancer.submit(ask("heavy"), now=0.1).outcome is None
    assert batch.outcome is Outcome.SATURATED
    assert balancer.submit(ask("light", priority=-1), now=0.2).outcome is Outcome.SATURATED


def test_what_waits_for_its_flow_counts_and_goes_first() -> None:
    balancer, _ = pool_of(
        1, flows=rules(named={"batch": {"in_flight": 1}}), admission=AdmissionSettings(queue_requests=2)
    )
    batch = [balancer.submit(ask("batch"), now=0.0) for _ in range(4)]
    assert [ticket.outcome for ticket in batch] == [None, None, None, Outcome.SATURATED]


# --- Deadlines --------------------------------------------------------------------------------------------------------


def test_who_cannot_be_in_time_is_told_at_once() -> None:
    """A new pool assumes .1 ms a token: 100,000 of them, 50,000 of context before each, take 24 seconds."""
    balancer, _ = pool_of(1, policy="adaptive")
    long = ask("one", deadline=5.0)._replace(prompt_bytes=400_000)
    assert balancer.submit(long, now=0.0).state is TicketState.PLACED, "an idle endpoint shows whether that is true"
    short = ask("one", deadline=5.0)._replace(prompt_bytes=400)
    refused = balancer.submit(short, now=0.5)
    assert refused.outcome is Outcome.TOO_LATE, "behind those 24 seconds"
    assert refused.retry_after_s == pytest.approx(23.53)
    assert balancer.submit(short._replace(deadline=None), now=0.5).outcome is None
    assert balancer.submit(short, now=1.5).outcome is None, "and once a second one is let through"
    assert balancer.submit(short, now=1.6).outcome is Outcome.TOO_LATE


def test_an_endpoint_that_is_in_time_is_taken_though_another_is_cheaper() -> None:
    """One has the prompt cached and .24 s of work; the other would prefill for .2 s beside eight streams."""
    balancer, endpoints = pool_of(2, policy="adaptive")
    prompt = ask("one")._replace(stream=True, prompt_bytes=8_000, block_keys=tuple(range(1, 8)))
    first = balancer.submit(prompt, now=0.0)
    balancer.first_byte(first, now=0.24)
    balancer.close(first, Outcome.COMPLETED, now=0.6, usage=Usage(2000, 0, 10))
    cached = first.placed_state.endpoint.uid
    (other,) = {endpoint.uid for endpoint in endpoints} - {cached}
    for n in range(8):
        ticket = balancer.submit(ask("one", name=str(n)), now=0.6, avoid=frozenset({cached}))
        balancer.first_byte(ticket, now=0.65)
    balancer.submit(ask("one")._replace(stream=True, prompt_bytes=9_600), now=1.0, avoid=frozenset({other}))

    def chosen(deadline: float | None) -> int:
        ticket = balancer.submit(prompt._replace(deadline=deadline), now=1.0)
        uid = ticket.placed_state.endpoint.uid
        balancer.close(ticket, Outcome.CLIENT_CLOSED, now=1.0)
        return uid

    assert [chosen(None), chosen(1.5), chosen(1.27)] == [cached, cached, other]


def test_a_wait_ends_when_the_client_wants_no_answer_any_more() -> None:
    balancer = one_at_a_time()
    balancer.submit(ask("one"), now=0.0)
    patient, hasty = balancer.submit(ask("one"), now=0.0), balancer.submit(ask("one", deadline=2.0), now=0.0)
    assert balancer.next_deadline() == 2.0
    assert balancer.poll(now=2.0) == [hasty]
    assert hasty.outcome is Outcome.TOO_LATE
    assert (patient.state, balancer.next_deadline()) == (TicketState.WAITING, 30.0)


def test_a_queue_that_moves_too_slowly_takes_nobody_who_is_in_a_hurry() -> None:
    """One leaves in a second and twenty wait."""
    balancer = one_at_a_time()
    tickets = [balancer.submit(ask("one"), now=0.0) for _ in range(31)]
    for second in range(1, 11):
        balancer.close(tickets[second - 1], Outcome.COMPLETED, now=float(second))
        assert balancer.poll(now=float(second)) == [tickets[second]]
    balancer.close(tickets[10], Outcome.COMPLETED, now=11.0)
    assert balancer.submit(ask("one", deadline=16.0), now=11.0).outcome is Outcome.TOO_LATE
    balancer.poll(now=11.0)
    assert balancer.submit(ask("one", priority=9, deadline=16.0), now=11.0).state is TicketState.WAITING


# --- The table --------------------------------------------------------------------------------------------------------


def test_the_table_is_bounded_and_forgets_who_is_idle() -> None:
    flows = Flows(rules(named={"kept": {"weight": 2}}), Limits())
    flows.of("kept", 0.0)
    busy = [flows.of(f"f{n}", 0.0) for n in range(MAX_FLOWS)]
    for flow in busy:
        flow.active = 1
    assert flows.of("one more", 1.0).name == OTHERS
    assert flows.of("and another", 1.0) is flows.of(OTHERS, 1.0)
    busy[7].active = 0
    assert flows.of("later", 100.0).name == "later"
    assert flows.of("f7", 100.0).name == "f7", "nobody is in the place of the others now"
    assert flows.of("f7 again", 100.0).name == OTHERS
    assert flows.of("kept", 100.0).weight == 2.0


def test_a_flow_that_is_forgotten_with_something_owed_is_not_one() -> None:
    flows = Flows(rules(), Limits())
    for n in range(MAX_FLOWS):
        flows.of(f"f{n}", 0.0).virtual_finish = 1.0
    assert flows.of("new", 100.0).name == OTHERS


def test_the_models_of_a_key_hold_whichever_flow_is_chosen_and_null_is_all() -> None:
    rule = FlowRules(rules(default={"models": ["a"]}, named={"b": {"models": ["b"]}, "all": {"models": None}, "x": {}}))

    def may(flow: str, key: str | None) -> str:
        return "".join(name for name in "abc" if all(name in one for one in rule.models_of(flow, key)))

    assert (may("anyone", None), may("b", None), may("all", None), may("x", None)) == ("a", "b", "abc", "a")
    assert (may("all", "b"), may("b", "all"), may("b", "anyone"), may("b", "b")) == ("b", "b", "", "b")
    assert rule.models_of("anyone", "x") == rule.models_of("x", "anyone")
    assert rule.bounds_models
    assert not FlowRules(rules(named={"all": {"models": None}})).bounds_models


def test_what_a_request_is_of() -> None:
    rule = FlowRules(rules(named={"team": {"priority": 3, "max_priority": 7}}))
    assert rule.flow_of(None, None) == "anonymous"
    assert rule.flow_of(None, "team") == "team"
    assert rule.flow_of("key", "team") == "key", "who has a key says nothing about flows"
    assert FlowRules(rules(header=True)).flow_of("key", "team") == "team"
    assert FlowRules(rules(header=False)).flow_of(None, "team") == "anonymous"
    assert [rule.priority_of("team", asked, None) for asked in (None, 5, 9, -2)] == [3, 5, 7, -2]
    assert [rule.priority_of("x", asked, None) for asked in (None, 5, 999)] == [0, 5, 999]
    assert [rule.priority_of("x", asked, "x") for asked in (None, 5, -5)] == [0, 0, -5]


def test_named_flows_have_the_defaults_that_they_do_not_say() -> None:
    settings = rules(default={"in_flight": 4, "weight": 2}, named={"a": {"weight": 5}, "b": {"in_flight": None}})
    assert (settings.rules["a"].in_flight, settings.rules["a"].weight) == (4, 5.0)
    assert (settings.rules["b"].in_flight, settings.rules["b"].weight) == (None, 2.0)


def test_a_flow_is_told_its_new_rule() -> None:
    flows = Flows(rules(default={"requests_per_minute": 10}), Limits())
    flow = flows.of("one", 0.0)
    for _ in range(10):
        assert flows.admit(flow, ask("one"), 0.0) is None
    assert flows.admit(flow, ask("one"), 0.0) is not None
    flows.reconfigure(rules(default={"requests_per_minute": 20}), 0.0)
    assert flows.admit(flow, ask("one"), 0.0) is None
    flows.reconfigure(rules(), 0.0)
    assert isinstance(flow, Flow)
    assert flow.allowance._requests is None


def test_audio_counts_as_endpoints_count_it_and_not_by_its_bytes() -> None:
    """20 MB are no five million tokens: the endpoint says how many, and what it said of others counts until then."""
    balancer, _ = pool_of(1, flows=rules(default={"tokens_per_minute": 6000}))
    audio = ask("one")._replace(prompt_bytes=0, body_bytes=20 << 20, binary=True, block_keys=())
    for tokens in (1500, 1700):
        ticket = balancer.submit(audio, now=0.0)
        balancer.first_byte(ticket, now=0.0)
        balancer.close(ticket, Outcome.COMPLETED, now=0.0, usage=Usage(tokens, 0, 0))
    third = balancer.submit(audio, now=0.0)
    assert third.outcome is None, "2,800 of 6,000 are left"
    assert third.used_tokens == pytest.approx(1520.0)
    unknown = balancer.submit(audio._replace(model="unheard-of"), now=0.0)
    assert unknown.outcome is not Outcome.RATE_LIMITED


def test_small_audio_does_not_make_other_audio_count_less() -> None:
    """A client could send a hundred seconds first, and then hours as text, of which nothing is reported."""
    balancer, _ = pool_of(1, flows=rules(default={"tokens_per_minute": 6000}))
    audio = ask("one")._replace(prompt_bytes=0, body_bytes=20 << 20, binary=True, block_keys=())
    for _ in range(50):
        ticket = balancer.submit(audio, now=0.0)
        balancer.close(ticket, Outcome.COMPLETED, now=0.0, usage=Usage(5, 0, 0))
    assert balancer.submit(audio, now=0.0).used_tokens >= FIRST_BINARY_TOKENS
