# SPDX-License-Identifier: Apache-2.0
"""What first bytes alone show of parallel prefills."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.capacity.trends import MIN_WAIT_S, MIN_WAITS, WINDOW, WaitTrend


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
@pytest.mark.parametrize("slope", [0.0, 0.2, 0.8, 1.0, 2.0])
def test_the_slope_tells_how_far_the_prediction_holds_whatever_all_requests_take(slope: float, fixed_s: float) -> None:
    assert learned(slope, 0.05, fixed_s=fixed_s).certain_slope() == pytest.approx(slope, abs=0.1)


def test_nothing_is_concluded_from_noise() -> None:
    """With 3 s of it waits of up to .75 s show nothing; wrong conclusions are as rare as two standard errors are."""
    verdicts = [learned(slope, 3.0, seed=seed).certain_slope() for seed in range(50) for slope in (0.0, 1.0)]
    assert verdicts.count(None) > 80


def test_nothing_is_concluded_from_few_waits() -> None:
    trend = WaitTrend()
    assert trend.certain_slope() is None
    for _ in range(50):
        trend.learn(0.0, 0.1, 0)
    assert trend.certain_slope() is None, "none should have waited"
    for n in range(MIN_WAITS):
        assert trend.certain_slope() is None
        trend.learn(MIN_WAIT_S * (1 + n), 0.1, 1 + n)
    assert trend.certain_slope() == pytest.approx(0.0, abs=0.01)
    assert trend.most == MIN_WAITS
    trend.forget()
    assert (trend.certain_slope(), trend.most) == (None, 0)


def test_equal_waits_show_nothing() -> None:
    trend = WaitTrend()
    for _ in range(50):
        trend.learn(0.5, 0.0, 1)
    assert trend.certain_slope() is None


def test_what_was_long_ago_is_forgotten() -> None:
    trend = learned(1.0, samples=100)
    assert trend.certain_slope() == pytest.approx(1.0)
    for n in range(4 * WINDOW):
        trend.learn(0.25 * (n % 4), 0.0, n % 4)
    assert trend.certain_slope() == pytest.approx(0.0, abs=0.05)
