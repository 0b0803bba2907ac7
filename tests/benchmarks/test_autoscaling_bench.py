# SPDX-License-Identifier: Apache-2.0
"""What the page of recommended endpoints shows: a small cell of it, and how runs are judged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.autoscaling import (
    SHAPES,
    TARGET_S,
    WORKLOADS,
    Compared,
    Followed,
    Shape,
    at_load,
    by_knowledge,
    follow,
    judged,
    page,
)
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job

SLOTS = WORKLOADS[0]


def served(first: float | None, outcome: Outcome | None = Outcome.COMPLETED) -> Served:
    return Served(Job("a", (Piece(1, 100),), Piece(2, 10)), 100.0, 0, True, first_at=first, outcome=outcome)


def test_what_has_no_first_token_is_late() -> None:
    late, refused, p95 = judged(
        [served(101.0), served(100.0 + 2 * TARGET_S), served(None, Outcome.SATURATED), served(None, None)]
    )
    assert (late, refused, p95) == (0.75, 0.25, math.inf)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_slots_bind_and_whatever_the_fleet_it_recommends_about_as_many_as_are_enough(servers: int) -> None:
    """One is not enough, two are: see the page for the search."""
    found = at_load(SLOTS, 8.0, servers)
    assert found.is_enough == (servers > 1)
    assert 1 <= found.recommended <= 3
    assert found.recommended > 1 or servers > 1


def test_who_knows_the_load_has_enough_for_the_highest_of_the_next_minute() -> None:
    least = {5.0: 1, 10.0: 2, 25.0: 5}
    steps = SHAPES[1]
    assert steps.rate_at(0.0) == 0.3
    follower = None
    assert by_knowledge(least, 25.0, steps, follower, 0.0) == 2  # type: ignore[arg-type]
    assert by_knowledge(least, 25.0, steps, follower, 560.0) == 5  # type: ignore[arg-type]


def test_a_fleet_that_follows_grows_and_shrinks() -> None:
    """By a rule that says so: servers that start count, and those that drain do not."""
    shape = Shape("even", 300.0, lambda _: 0.3)
    found = follow(replace(SLOTS, rates=(16.0,)), shape, "two", lambda _, now: 2 if now < 150.0 else 3, 2)
    assert (found.changes, found.least, found.most) == (1, 2, 3)
    assert found.hours == pytest.approx((2 * 145 + 3 * 155) / 3600.0, rel=0.02)


def test_the_page_says_how_many_are_within_one() -> None:
    cells = [Compared("slots", 8.0, 2, 0.1, {1: 2, 2: 2, 3: 4}), Compared("mix", 8.0, 5, 0.1, {2: 6})]
    text = page(cells, {("slots", "steps"): [Followed("recommended", 0.01, 0.0, 3.0, 4, 1, 5)]})
    assert "**3 of 4 fleets" in text
    assert "| slots | 8 | 2 | 0.10 | 1: 2, 2: 2, 3: 4 | +2 |" in text
    assert "| recommended | 99.0 % | 0.00 % | 3.0 | 4 | 1 to 5 |" in text
