# SPDX-License-Identifier: Apache-2.0
"""From a load to a number of endpoints: what binds, and what contradicts a formula."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.scaling.capacity import MAX_ENDPOINTS, Capacity, Load, endpoints_for, use_of, wait_p95_s

FREE = Capacity(prefill_s=0.0, step_s=0.0, token_s=0.0, other_s=0.0, max_running=inf)
"""An endpoint that nothing costs anything."""


def test_prefill_binds() -> None:
    """4 endpoint-seconds of prefill a second: four are busy all the time, five are enough."""
    load, capacity = Load(10.0, 20_000.0, 10.0), FREE._replace(prefill_s=2e-5)
    assert use_of(load, capacity, 5).prefill == pytest.approx(0.8)
    assert endpoints_for(load, capacity, 2.0) == 5


def test_slots_bind_and_few_of_them_are_used_less() -> None:
    """40 requests run on average: in large batches nearly all slots may be used, in small ones chance needs some."""
    load = Load(10.0, 100.0, 100.0)
    large, small = (FREE._replace(other_s=4.0, max_running=slots) for slots in (45.0, 3.0))
    assert endpoints_for(load, large, 10.0) == 1
    assert endpoints_for(load, small, 0.1) > 40 / 3 + 1


def test_decode_binds_before_the_batch_is_full() -> None:
    """A step takes 10 ms and 0.1 ms for each request in it: 9,500 tokens a second at most, however many may run."""
    load, capacity = Load(19.0, 100.0, 1000.0), FREE._replace(step_s=0.01, token_s=1e-4, max_running=inf)
    assert use_of(load, capacity, 2).decode == pytest.approx(0.95)
    assert endpoints_for(load, capacity, 2.0) == 3
    assert use_of(load, capacity, 1).running == inf


def test_prefill_takes_time_from_decode() -> None:
    alone = use_of(Load(1.0, 0.0, 1000.0), FREE._replace(step_s=0.01), 1).running
    beside = use_of(Load(1.0, 10_000.0, 1000.0), FREE._replace(step_s=0.01, prefill_s=5e-5), 1).running
    assert alone == pytest.approx(10.0)
    assert beside == pytest.approx(20.0)


def test_no_load_needs_nothing_and_no_number_is_wild() -> None:
    assert endpoints_for(Load(0.0, 0.0, 0.0), FREE, 2.0) == 0
    assert endpoints_for(Load(0.1, 0.0, 0.0), FREE, 2.0) == 1
    assert endpoints_for(Load(1e9, 1e6, 1e6), Capacity(1.0, 1.0, 1.0, 1.0, 1.0), 2.0) == MAX_ENDPOINTS


RATES = st.floats(0.0, 1e4)
LOADS = st.builds(Load, RATES, st.floats(0.0, 1e5), st.floats(0.0, 1e4))
CAPACITIES = st.builds(
    Capacity,
    st.floats(0.0, 1e-2),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 100.0),
    st.floats(1.0, 1e4) | st.just(inf),
)


@given(LOADS, CAPACITIES, st.floats(0.01, 60.0))
def test_it_is_the_least_number_and_more_load_never_needs_fewer(
    load: Load, capacity: Capacity, target_s: float
) -> None:
    found = endpoints_for(load, capacity, target_s)
    assert 0 <= found <= MAX_ENDPOINTS
    if 0 < found < MAX_ENDPOINTS:
        assert wait_p95_s(load, capacity, found) <= target_s
    if found > 1:
        assert wait_p95_s(load, capacity, found - 1) > target_s
    more = endpoints_for(load._replace(rate=2.0 * load.rate), capacity, target_s)
    assert more >= found
