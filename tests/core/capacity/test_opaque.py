# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be read: what they take is learned by their model, their endpoint and their size."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.capacity.opaque import MAX_FACTOR, MODELS, BodySizes
from lbproxy.core.policies.adaptive import Adaptive
from lbproxy.core.policies.policy import Context
from lbproxy.core.requests.request import InferenceRequest, Usage
from tests.core.policies.test_adaptive import pool_of


def embed(size: int) -> InferenceRequest:
    return InferenceRequest("r", "e", False, size)


def test_until_size_is_seen_to_matter_all_count_alike() -> None:
    sizes = BodySizes()
    rng = random.Random(1)
    for _ in range(200):
        sizes.learn("e", rng.randint(100, 100_000), 5.0)
    assert sizes.factor("e", 100_000) == pytest.approx(1.0, abs=0.01)
    assert sizes.factor("another", 100_000) == 1.0


def test_work_in_proportion_to_size_is_found() -> None:
    sizes = BodySizes()
    rng = random.Random(1)
    for _ in range(200):
        size = rng.randint(1_000, 9_000)
        sizes.learn("e", size, size / 1000.0 * rng.uniform(0.9, 1.1))
    assert sizes.factor("e", 20_000) == pytest.approx(4.0, rel=0.2)
    assert sizes.factor("e", 1_000) == pytest.approx(0.2, abs=0.1)
    assert sizes.factor("e", 10**9) == MAX_FACTOR


def test_a_fixed_time_and_a_share_by_size_are_told_apart() -> None:
    sizes = BodySizes()
    rng = random.Random(1)
    for _ in range(300):
        size = rng.randint(0, 10_000)
        sizes.learn("e", size, 10.0 + size / 1000.0)
    assert sizes.factor("e", 0) == pytest.approx(10.0 / 15.0, rel=0.1)


def test_the_models_told_apart_are_bounded() -> None:
    sizes = BodySizes()
    for n in range(2 * MODELS):
        sizes.learn(f"m{n}", 100, 1.0)
    assert len(sizes._lines) == MODELS


def test_a_large_one_ahead_counts_for_many_small_ones() -> None:
    """A call with 2,000 texts is no call with one."""
    pool, states = pool_of(2)
    rng = random.Random(1)
    for n in range(60):
        size = rng.randint(100, 20_000)
        load = states[n % 2].load
        load.end(load.place(embed(size), float(n)), Usage(), float(n) + size / 1_000_000.0)
    large = states[0].load.place(embed(100_000), 100.0)
    for _ in range(3):
        states[1].load.place(embed(500), 100.0)
    first, second = Adaptive().price(embed(500), states, Context(100.0)).costs
    assert first > second
    states[0].load.end(large, None, 100.2)
    assert states[0].load.room.opaque.extra_weight == pytest.approx(0.0, abs=1e-9)
    assert pool.body_sizes.factor("e", 10_000) > 0.5
