# SPDX-License-Identifier: Apache-2.0
"""A cache counts as far as it saved time."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.caches.savings import ENOUGH, Savings


def learned(of_saved: float, *, count: int = 200, saved: float = 4000.0, noise: float = 0.3) -> Savings:
    """After prefills at .1 ms a token, of which so much of the saved work was done all the same."""
    rng, savings = random.Random(1), Savings()
    for _ in range(count):
        left, cached = rng.uniform(50, 2000), rng.uniform(0, saved)
        savings.learn(left, cached, 0.1 * (left + of_saved * cached) * rng.uniform(1 - noise, 1 + noise))
    return savings


def test_a_cache_that_saves_time_is_believed() -> None:
    assert learned(0.0).share == 1.0
    assert learned(0.3).share == 1.0, "some of it was evicted"


@pytest.mark.parametrize("of_saved", [0.9, 1.0])
def test_a_cache_that_is_off_counts_as_far_as_it_saves(of_saved: float) -> None:
    assert learned(of_saved).share == pytest.approx(1.0 - of_saved, abs=0.1)


def test_it_is_believed_again_once_it_saves_time() -> None:
    savings, rng = learned(1.0), random.Random(2)
    for _ in range(2000):
        left = rng.uniform(50, 2000)
        savings.learn(left, rng.uniform(0, 4000), 0.1 * left)
    assert savings.share == 1.0


def test_few_prefills_and_those_that_are_all_alike_show_nothing() -> None:
    assert learned(1.0, count=int(ENOUGH) - 1).share == 1.0
    savings = Savings()
    for n in range(200):
        savings.learn(100.0 + n, 10.0 * (100.0 + n), 1000.0)
    assert savings.share == 1.0
    assert learned(1.0, saved=0.0).share == 1.0
