# SPDX-License-Identifier: Apache-2.0
"""Capacity that the settings or DNS say: what comes of it under the policies that go by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lbproxy.core.balancer import Balancer
from lbproxy.core.requests.outcome import Outcome
from tests.support.pool import bring_up, make_balancer, request, spec


def pool(policy: str, *weights: float) -> Balancer:
    balancer = make_balancer(policy=policy)
    specs = [replace(spec(n), weight=weight) for n, weight in enumerate(weights, 1)]
    bring_up(balancer, balancer.set_endpoints(specs, now=0.0).added)
    return balancer


def placed(balancer: Balancer, count: int, *, ends: bool) -> Counter[str]:
    """How many of `count` requests each endpoint got; they are over at once, or run on."""
    counts: Counter[str] = Counter()
    for _ in range(count):
        ticket = balancer.submit(request(), now=0.0)
        assert ticket.placed_on is not None
        counts[ticket.placed_on.endpoint.name] += 1
        if ends:
            balancer.close(ticket, Outcome.COMPLETED, now=0.0)
    return counts


def test_least_request_fills_endpoints_by_their_weights() -> None:
    counts = placed(pool("least-request", 1, 2, 5), 800, ends=False)
    assert [counts[f"e{n}"] for n in (1, 2, 3)] == [100, 200, 500]


def test_least_request_begins_with_the_strongest() -> None:
    """With one request at a time the others have nothing that a stronger one had not better."""
    assert placed(pool("least-request", 1, 2), 50, ends=True) == {"e2": 50}


def test_two_choices_go_by_weight() -> None:
    counts = placed(pool("p2c", 1, 3), 400, ends=False)
    assert [counts["e1"], counts["e2"]] == [100, 300]


def test_random_draws_by_weight() -> None:
    """Within four standard deviations."""
    counts = placed(pool("random", 1, 3), 4000, ends=True)
    assert abs(counts["e1"] - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("policy", ["least-request", "p2c", "random"])
def test_equal_weights_are_no_weights(policy: str) -> None:
    assert placed(pool(policy, 1, 1, 1), 300, ends=False) == placed(pool(policy, 7, 7, 7), 300, ends=False)


def test_the_parts_of_a_weighted_price_add_up_to_it() -> None:
    balancer = pool("least-request", 1, 4)
    balancer.explain(True)
    placed(balancer, 7, ends=False)
    decision = balancer.submit(request(), now=0.0).decision
    assert decision is not None
    assert [sum(parts.values()) for parts in decision.breakdown()] == pytest.approx(decision.costs)
    assert decision.breakdown()[0].keys() == {"in_flight", "others", "this_one"}
