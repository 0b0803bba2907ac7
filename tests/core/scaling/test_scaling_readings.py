# SPDX-License-Identifier: Apache-2.0
"""What is assumed of limits that nothing has shown yet."""

from __future__ import annotations

from math import inf

import pytest

from lbproxy.core.scaling.readings import MIN_BLIND, MIN_SHOWN, SHOWN, Counts, MeanGauges, Readings


def seen(most: float, limit: float = inf, cache: float = inf, used: float = 0.0) -> float:
    """Requests that one endpoint is taken to run at once, of which one ran `most`."""
    readings = Readings()
    gauges = MeanGauges(2, most / 2, most / 2, most, limit, cache, used, None)
    for second in range(10):
        readings.look(
            Counts(second, 400 * second, second, 400 * second, 100.0 * second, second, 100 * second, 0),
            100,
            gauges,
            1.0,
        )
    return readings.capacity().max_running


def test_a_limit_that_nothing_showed_is_a_step_beyond_what_ran() -> None:
    assert seen(2.0) == SHOWN * MIN_BLIND, "nothing is known of its space either"
    assert seen(2.0, cache=1e6) == SHOWN * MIN_SHOWN
    assert seen(40.0) == SHOWN * 40.0


def test_known_slots_and_space_count_the_less_of_them() -> None:
    assert seen(2.0, limit=64.0) == 64.0
    by_space = seen(8.0, limit=64.0, cache=100_000.0, used=40_000.0)
    assert by_space == pytest.approx(0.93 * 100_000 / (40_000 / 4.0), rel=1e-6)
