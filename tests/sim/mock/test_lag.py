# SPDX-License-Identifier: Apache-2.0
"""The lag meter."""

import pytest

from lbproxy.sim.mock.serving.driver import LagMeter


def test_nothing_recorded_is_no_lag() -> None:
    assert LagMeter().figures(now=100.0) == (0.0, 0.0)


def test_percentile_is_at_most_a_bucket_above_the_true_one() -> None:
    meter = LagMeter()
    for millisecond in range(1000):
        meter.record(millisecond / 1000, now=10.0 + millisecond / 100)
    largest, p99 = meter.figures(now=20.0)
    assert largest == 0.999
    assert 0.989 <= p99 <= 0.999


def test_rare_spike_is_the_maximum_but_not_the_percentile() -> None:
    meter = LagMeter()
    for _ in range(199):
        meter.record(0.001, now=5.0)
    meter.record(2.0, now=5.0)
    largest, p99 = meter.figures(now=5.0)
    assert largest == 2.0
    assert p99 == pytest.approx(0.001, rel=0.2)


def test_a_minute_later_it_is_forgotten() -> None:
    meter = LagMeter()
    meter.record(1.0, now=5.0)
    meter.record(0.001, now=64.9)
    assert meter.figures(now=64.9)[0] == 1.0
    assert meter.figures(now=65.1)[0] == 0.001
    meter.record(0.002, now=65.5)
    assert meter.figures(now=65.5)[0] == 0.002
