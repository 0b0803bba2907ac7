# SPDX-License-Identifier: Apache-2.0
"""Amounts over time, and that they go on in another process as they were."""

from __future__ import annotations

import random

import pytest

from lbproxy.core.capacity.bucket import DAY_S, MAX_RESUMED_MINUTES, MINUTE_S, SLOT_S, SLOTS, Bucket, Day, Spent


def resumed(spent: Spent, now: float, *, at: float | None = None) -> Day:
    day = Day(1000.0, now)
    day.resume(spent if at is None else spent._replace(at=at), now)
    return day


def test_what_was_used_is_forgotten_when_it_would_have_been_without_a_restart() -> None:
    """Twenty restarts a day at odd times do not keep it for longer, nor for less."""
    rng = random.Random(5)
    now = 12_345.6
    alone = restarted = Day(1e6, now)
    for _ in range(400):
        now += rng.uniform(0.0, 1500.0)
        amount = rng.uniform(0.0, 100.0)
        alone.take(amount, now)
        if restarted is not alone:
            restarted.take(amount, now)
        if rng.random() < 0.1 or restarted is alone:
            restarted = resumed(restarted.spent(now), now)
            restarted.size = alone.size
        assert restarted.used(now) == pytest.approx(alone.used(now))
        needed = 1e6 - alone.used(now) / 2.0
        assert restarted.wait_s(needed, now) == pytest.approx(alone.wait_s(needed, now))


def test_another_process_has_another_clock() -> None:
    before = Day(1000.0, 5e6)
    before.take(600.0, 5e6)
    before.take(300.0, 5e6 + 7200.0)
    spent = before.spent(5e6 + 7300.0)
    after = resumed(spent, 50.0, at=50.0 - (5e6 + 7300.0 - spent.at))
    assert after.used(50.0) == 900.0
    assert after.wait_s(1000.0, 50.0) == pytest.approx(before.wait_s(1000.0, 5e6 + 7300.0))
    assert after.used(50.0 + DAY_S - 7300.0 + SLOT_S + 1.0) == 300.0
    assert after.used(50.0 + DAY_S + SLOT_S) == 0.0


def test_after_a_day_and_a_step_nothing_is_left() -> None:
    before = Day(1000.0, 0.0)
    before.take(1000.0, 0.0)
    spent = before.spent(10.0)
    assert resumed(spent, DAY_S - 1.0).used(DAY_S - 1.0) == 1000.0
    assert resumed(spent, SLOTS * SLOT_S).used(SLOTS * SLOT_S) == 0.0
    assert resumed(spent, 1e9).used(1e9) == 0.0


def test_what_a_step_returns_is_of_those_before_it() -> None:
    """A reservation that ends in the next step: a file has no negative amounts, which could be forged credit."""
    day = Day(1000.0, 0.0)
    day.take(500.0, 10.0)
    day.take(-400.0, SLOT_S + 10.0)
    spent = day.spent(SLOT_S + 20.0)
    assert spent == Spent(SLOT_S, (0.0, 100.0))
    day.take(-900.0, SLOT_S + 30.0)
    assert day.spent(SLOT_S + 40.0).amounts == ()


def test_what_was_used_since_counts_too() -> None:
    day = Day(1000.0, 0.0)
    day.take(70.0, 100.0)
    day.resume(Spent(-3000.0, (1.0, 2.0)), 200.0)
    assert day.used(200.0) == 73.0
    assert day.used(-3000.0 + DAY_S + SLOT_S) == 70.0


@pytest.mark.parametrize("at", [1e15, -1e15, 0.0, 599.9999999999, -0.0000001, 1e-300])
def test_any_time_and_any_amount_is_harmless(at: float) -> None:
    """A time in the future counts as now, which keeps a budget rather than giving it twice."""
    day = resumed(Spent(at, (1e15,) * SLOTS), 1000.0)
    assert day.used(1000.0) >= 0.0
    assert (day.used(1000.0) > 0.0) is (at > -DAY_S)
    assert 0.0 <= day.wait_s(10.0, 1000.0) <= DAY_S + SLOT_S
    assert day.used(1000.0 + DAY_S + 2 * SLOT_S) == 0.0
    day.take(5.0, 1e6)
    assert day.used(1e6) == 5.0


@pytest.mark.parametrize(("age_s", "left"), [(0.0, 30.0), (15.0, 15.0), (30.0, 0.0), (1e9, 0.0)])
def test_a_minute_goes_on_by_its_age(age_s: float, left: float) -> None:
    bucket = Bucket(60.0, 0.0)
    bucket.resume(30.0, age_s, 0.0)
    assert bucket.used(0.0) == left


def test_a_forged_level_blocks_for_ten_minutes_at_most() -> None:
    bucket = Bucket(60.0, 0.0)
    bucket.resume(1e15, 0.0, 0.0)
    assert 0.0 < bucket.wait_s(1.0, 0.0) <= MAX_RESUMED_MINUTES * MINUTE_S


def test_a_bucket_fills_evenly_and_holds_a_minutes_worth() -> None:
    bucket = Bucket(60.0, 100.0)
    bucket.take(60.0, 100.0)
    assert bucket.wait_s(1.0, 100.0) == 1.0
    assert bucket.used(110.0) == pytest.approx(50.0)
    assert bucket.used(1000.0) == 0.0
    assert bucket.wait_s(61.0, 1000.0) == 0.0, "more than it holds waits for a full one"


@pytest.mark.parametrize(
    "told",
    [
        [(0.0, 50.0, 0.25)],
        [(0.0, 10.0, 0.25), (0.02, 10.0, 0.25), (0.2, 10.0, 0.25)],
        [(0.1, 30.0, 0.1), (0.0, 5.0, 0.25), (0.05, 20.0, 0.25)],
        [(0.0, 10.0, 0.0), (0.2, 30.0, 0.2), (0.0, 15.0, 2.0), (0.15, 5.0, 2.0)],
        [(0.0, 40.0, 0.25), (0.0, -30.0, 2.0)],
        [(0.0, 90.0, 0.25), (0.0, -10.0, 2.0), (1.0, 80.0, 1.0)],
        [(0.0, 60.0, 0.0), (0.0, -50.0, 2.0), (0.5, 30.0, 0.5)],
    ],
    ids=["one", "several", "after one that was known", "more of it", "less of it", "still not full", "was full since"],
)
def test_when_an_amount_is_told_makes_no_difference(told: list[tuple[float, float, float]]) -> None:
    """Each amount is of a time, and told at another. 100 are refilled in a second."""
    known, late = Bucket(6000.0, 0.0), Bucket(6000.0, 0.0)
    sums = {at: sum(amount for when, amount, _ in told if when == at) for at, _, _ in told}
    for at, amount in sorted(sums.items()):
        known.take(amount, at)
    for at, amount, heard in sorted(told, key=lambda one: one[2]):
        late.used(heard)
        late.take(amount, at)
    for now in (2.0, 2.1, 3.0):
        assert late.used(now) == pytest.approx(known.used(now), abs=1e-6)


def test_amounts_may_be_told_in_another_order_than_they_were_used() -> None:
    """The first of them was refilled before the second was used, though that is told before."""
    bucket = Bucket(6000.0, 0.0)
    bucket.used(0.25)
    bucket.take(30.0, 0.1)
    bucket.take(5.0, 0.0)
    assert bucket.used(0.25) == pytest.approx(15.0)


def test_what_is_returned_counts_whatever_the_rounding_of_times() -> None:
    """These left a millionth of a nanosecond in which the bucket seemed to be full."""
    used_at, told_at = 0.4469735891317629, 0.4469735891317629 + 0.9744344222833102
    bucket = Bucket(1000.0, 0.0)
    bucket.used(told_at)
    bucket.take(304.7951133124325, used_at)
    bucket.take(-140.92390796877356, used_at)
    assert bucket.used(told_at) == pytest.approx(
        304.7951133124325 - 140.92390796877356 - 1000.0 * 0.9744344222833102 / 60
    )
