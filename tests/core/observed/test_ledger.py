# SPDX-License-Identifier: Apache-2.0
"""Who used how much: what servers reported and what is estimated, counted once and apart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.observed.ledger import MAX_PAIRS, REST, Ledger, by_flow, largest
from lbproxy.core.queue.ticket import TicketState
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import DECODE, PREFILL, DayUse, InferenceRequest, Tokens, Usage, estimated
from tests.support.pool import make_balancer, spec

MODELS = ("a", "b", "c")
FLOWS = ("team", "night", "anonymous")


def balancer_of(endpoints: int, policy: str) -> Balancer:
    balancer = make_balancer(policy=policy)
    specs = [replace(spec(n), metrics=None, health=None, models=MODELS) for n in range(endpoints)]
    balancer.set_endpoints(specs, now=0.0)
    return balancer


@pytest.mark.parametrize("policy", ["adaptive", "round-robin"])
def test_ten_thousand_requests_are_counted_by_flow_and_model(policy: str) -> None:
    """Reported ones exactly; those without a report within 10 %, and apart. What failed counts nothing."""
    rng, balancer, now = random.Random(7), balancer_of(4, policy), 0.0
    wanted: dict[tuple[str, str], list[int]] = {}
    for n in range(10_000):
        now += 0.01
        pair = rng.choice(FLOWS), rng.choice(MODELS)
        prompt, response = rng.randint(20, 3000), rng.randint(1, 400)
        size = int(prompt * rng.uniform(3.7, 4.3))
        ticket = balancer.submit(InferenceRequest(f"r{n}", pair[1], True, size + 99, size, flow=pair[0]), now=now)
        assert ticket.state is TicketState.PLACED
        row, kind = wanted.setdefault(pair, [0] * 5), n % 10
        if kind == 0:  # no response
            balancer.close(ticket, Outcome.CONNECT_FAILED, now=now)
            continue
        now += 0.02 + 1e-4 * prompt
        balancer.first_byte(ticket, now=now)
        now += 0.01 * response
        balancer.progress(ticket, response // 2, now=now)
        if kind < 7:
            cached = rng.randint(0, prompt)
            usage: Usage | None = Usage(prompt, cached, response)
            row[0] += prompt - cached
            row[1] += cached
        else:
            usage = None if kind < 9 else estimated(None, response)
            balancer.progress(ticket, response - response // 2, now=now)
            row[0] += prompt
            row[3] += prompt
            row[4] += response
        row[2] += response
        balancer.close(ticket, Outcome.COMPLETED, now=now, usage=usage)
    found = balancer.ledger.since_start()
    assert found.keys() == wanted.keys()
    for pair, want in wanted.items():
        used = found[pair]
        assert used.prompt_cached == want[1]
        assert used.completion == want[2]
        assert used.prompt_uncached - used.estimated_prompt == want[0] - want[3]
        assert used.estimated_prompt == pytest.approx(want[3], rel=0.1)
        assert used.estimated_completion == want[4]


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("told", [Usage(1000, 400, 80), None])
def test_a_split_request_is_counted_once(told: Usage | None, concurrent: bool) -> None:
    """Its first leg has the prompt, its second the response; with a concurrent connector both end with the second."""
    balancer = balancer_of(2, "least-request")
    request = InferenceRequest("r", "a", True, 4000, 4000, flow="team")
    first, second = (balancer.submit(request, now=0.0) for _ in range(2))
    first.request, second.request = request.as_leg(PREFILL), request.as_leg(DECODE, 1)
    if concurrent:
        second.prefill, first.counts_in_flow = first, False
    else:
        balancer.first_byte(first, now=1.0)
        usage = None if told is None else told._replace(completion_tokens=1)
        balancer.close(first, Outcome.COMPLETED, now=1.0, usage=usage)
    balancer.first_byte(second, now=1.0)
    balancer.progress(second, 80, now=2.0)
    balancer.close(second, Outcome.COMPLETED, now=2.0, usage=told)
    cached = 0 if concurrent else 400  # the second endpoint says what was transferred
    want = Tokens(1000 - cached, cached, 80) if told else Tokens(1000, 0, 80, 1000, 80)
    assert balancer.ledger.since_start() == {("team", "a"): want}


def test_what_is_beyond_the_bound_is_counted_together() -> None:
    ledger = Ledger()
    for n in range(MAX_PAIRS + 50):
        ledger.add(f"flow{n}", "m", Tokens(1, 2, 3))
    ledger.add("flow1", "m", Tokens(1, 0, 0))
    found = ledger.since_start()
    assert len(found) == MAX_PAIRS + 1
    assert found[REST] == Tokens(50, 100, 150)
    assert found["flow1", "m"] == Tokens(2, 2, 3)


def test_a_name_that_nobody_can_print_is_shown_all_the_same() -> None:
    """Clients choose models' names where endpoints list none: a surrogate cannot be written as JSON."""
    ledger = Ledger()
    ledger.add("f", "m\ud800\n" + "x" * 500, Tokens(1))
    ledger.add("f", None, Tokens(1))
    (one, other) = ledger.since_start()
    assert one[1].isprintable()
    assert len(one[1]) == 128
    assert other == ("f", "")


def test_the_largest_are_shown_and_all_others_together() -> None:
    rows = {("b", "m"): Tokens(9), ("a", "m"): Tokens(1, 1, 1)}
    rows |= {("a", "n"): Tokens(0, 0, 8, 0, 8), ("c", "m"): Tokens(2)}
    assert largest(rows, 4)[0] == (("b", "m"), Tokens(9))
    assert largest(rows, 3)[2] == (REST, Tokens(3, 1, 1))
    assert by_flow(rows)["a", ""] == Tokens(1, 1, 9, 0, 8)
    assert by_flow(rows)["a", ""].all == 11


def test_a_day_that_ends_is_kept_until_it_is_written_down() -> None:
    ledger = Ledger()
    ledger.turn("2026-11-28", "one")
    ledger.resume([DayUse("2026-11-27", "x", {}), DayUse("2026-11-28", "before", {("f", "m"): Tokens(5)})])
    ledger.add("f", "m", Tokens(1, 2, 3))
    assert ledger.today() == DayUse("2026-11-28", "before", {("f", "m"): Tokens(6, 2, 3)})
    assert ledger.since_start() == {("f", "m"): Tokens(1, 2, 3)}, "metrics count since the start"
    ledger.turn("2026-11-28", "two")
    ledger.turn("2026-11-29", "three")
    ledger.add("f", "m", Tokens(0, 0, 4))
    assert [(one.day, one.id) for one in ledger.days()] == [
        ("2026-11-27", "x"),
        ("2026-11-28", "before"),
        ("2026-11-29", "three"),
    ]
    assert ledger.today().rows == {("f", "m"): Tokens(0, 0, 4)}
