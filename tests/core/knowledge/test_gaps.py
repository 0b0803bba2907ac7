# SPDX-License-Identifier: Apache-2.0
"""Inter-token gaps: what context adds is the pool's, how slow an endpoint is its own."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.knowledge.gaps import Gaps, PoolGaps


def learned(slownesses: list[float], samples: int = 3000) -> tuple[PoolGaps, list[Gaps]]:
    """Endpoints with gaps of 15 ms + 0.0003 ms a token, times their slowness. Who has more context has more prefills in
    between.
    """
    rng = random.Random(3)
    pool = PoolGaps(15.0, 1e-4)
    endpoints = [Gaps(pool) for _ in slownesses]
    for _ in range(samples):
        for gaps, slowness in zip(endpoints, slownesses, strict=True):
            context = rng.uniform(20_000, 80_000)
            prefill_ms = max(0.0, rng.gauss(context / 4000, 3.0)) * slowness
            gaps.learn(context, slowness * (15.0 + 3e-4 * context) + prefill_ms, prefill_ms, len(endpoints))
    return pool, endpoints


def test_what_context_adds_is_told_from_what_prefills_add() -> None:
    pool, endpoints = learned([1.0] * 4)
    assert pool.gap_per_token_ms == pytest.approx(3e-4, rel=0.1)
    assert pool.gap_ms + pool.gap_per_token_ms * 50_000 == pytest.approx(30.0 + 12.5, rel=0.05)
    assert [gaps.slowness() for gaps in endpoints] == [1.0] * 4


def test_a_slow_endpoint_is_told_from_the_others() -> None:
    _, endpoints = learned([1.0, 1.0, 1.0, 3.0])
    slow = endpoints[3].slowness()
    assert slow / endpoints[0].slowness() == pytest.approx(3.0, rel=0.1)
    assert all(gaps.slowness() < 0.5 * slow for gaps in endpoints[:3])


def test_few_samples_count_little() -> None:
    _, endpoints = learned([1.0] * 4)
    pool = endpoints[0].pool
    new = Gaps(pool)
    found = []
    for _ in range(20):
        new.learn(50_000, 120.0, 0.0, 5)
        found.append(new.slowness())
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[-1] > 2.1


def test_the_line_stays_within_bounds_whatever_comes() -> None:
    rng = random.Random(5)
    pool = PoolGaps(15.0, 1e-4)
    gaps = Gaps(pool)
    for _ in range(500):
        gaps.learn(rng.choice([0.0, 1.0, 1e6]), rng.choice([0.0, 1e-3, 1e5]), rng.choice([0.0, 1e6]), 0)
        assert 0.0 <= pool.gap_ms < float("inf")
        assert 0.0 <= pool.gap_per_token_ms < float("inf")
        assert 0.0 < gaps.slowness() < float("inf")
