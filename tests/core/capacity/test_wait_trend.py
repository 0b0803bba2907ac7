# SPDX-License-Identifier: Apache-2.0
"""What first bytes alone show of parallel prefills."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.capacity.wait_trend import MIN_WAIT_S, MIN_WAITS, WINDOW, WaitTrend


def learned(
    slope: float, noise_s: float = 0.0, *, fixed_s: float = 0.0, samples: int = WINDOW, seed: int = 1
) -> WaitTrend:
    """First bytes that take `fixed_s` and `slope` of each second that they should wait."""
    rng, trend = random.Random(seed), WaitTrend()
    for n in range(samples):
        wait_s = 0.25 * (n % 4)
        trend.learn(wait_s, fixed_s + slope * wait_s + rng.gauss(0.0, noise_s), n % 4)
    return trend


@pytest.mark.parametrize("fixed_s", [0.0, -0.3, 3.0])
@pytest.mark.parametrize(("slope", "parallel"), [(0.0, True), (0.2, True), (0.8, False), (1.0, False), (2.0, False)])
def test_the_slope_tells_parallel_from_serial_whatever_all_requests_take(
    slope: float, parallel: bool, fixed_s: float
) -> None:
    trend = learned(slope, 0.05, fixed_s=fixed_s)
    found = trend.slope()
    assert found is not None
    assert found[0] == pytest.approx(slope, abs=0.1)
    assert trend.is_parallel() is parallel


def test_nothing_is_concluded_from_noise() -> None:
    """With 3 s of it waits of up to .75 s show nothing; wrong conclusions are as rare as two standard errors are."""
    verdicts = [learned(slope, 3.0, seed=seed).is_parallel() for seed in range(50) for slope in (0.0, 1.0)]
    assert verdicts.count(None) > 80


def test_nothing_is_concluded_from_few_waits() -> None:
    trend = WaitTrend()
    assert trend.is_parallel() is None
    for _ in range(50):
        trend.learn(0.0, 0.1, 0)
    assert trend.is_parallel() is None, "none should have waited"
    for n in range(MIN_WAITS):
        assert trend.is_parallel() is None
        trend.learn(MIN_WAIT_S * (1 + n), 0.1, 1 + n)
    assert trend.is_parallel() is True
    assert trend.most == MIN_WAITS
    trend.forget()
    assert (trend.is_parallel(), trend.most) == (None, 0)


def test_equal_waits_show_nothing() -> None:
    trend = WaitTrend()
    for _ in range(50):
        trend.learn(0.5, 0.0, 1)
    assert trend.is_parallel() is None


def test_what_was_long_ago_is_forgotten() -> None:
    trend = learned(1.0, samples=100)
    assert trend.is_parallel() is False
    for n in range(4 * WINDOW):
        trend.learn(0.25 * (n % 4), 0.0, n % 4)
    assert trend.is_parallel() is True
