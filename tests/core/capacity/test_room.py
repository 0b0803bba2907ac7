# SPDX-License-Identifier: Apache-2.0
"""What an endpoint's room is made of: how many requests run at once, prefills side by side, others' load, the line."""

from __future__ import annotations

import random
from math import inf

import pytest

from lbproxy.core.capacity.lanes import AGAIN_S, LATE_S, MEMORY, Lanes
from lbproxy.core.capacity.opaque import FIRST_MS, PRIOR_COUNT, OpaqueTimes
from lbproxy.core.capacity.others import MeanOthers, Others
from lbproxy.core.capacity.reservations import Reservations
from lbproxy.core.capacity.room import Room
from lbproxy.core.capacity.slots import FULL_CACHE, INITIAL_LIMIT, SPACE_S, Slots
from lbproxy.core.capacity.trends import MIN_RESPONSES, ResponseTimes

# --- Requests that run at once ----------------------------------------------------------------------------------------


def report(slots: Slots, waiting: float, running: float, *, explained: float = 0.0, cache: float = 0.1) -> None:
    slots.learn_limit(waiting, running, explained, cache=cache, until=100.0)


def test_nothing_is_full_before_anything_showed_it_but_a_blind_beginning() -> None:
    slots = Slots()
    assert not slots.is_full(INITIAL_LIMIT - 1, 0.0)
    assert slots.is_full(INITIAL_LIMIT, 0.0), "no report, no first byte, no response"
    for _ in range(10):
        slots.finished(1.0)
    assert not slots.is_full(INITIAL_LIMIT + 9, 0.0)
    slots.first_byte_in_time(0.0, 0.0)
    assert not slots.is_full(10_000, 0.0), "first bytes come in time"


def test_a_report_of_requests_that_wait_shows_how_many_run() -> None:
    slots = Slots()
    slots.finished(17.0)
    report(slots, 5.0, 64.0)
    assert slots.limit == 64.0
    assert not slots.is_full(65, 1.0)
    assert slots.is_full(66, 1.0), "two may wait"
    assert slots.wait_ms(63, 1.0) == 0.0
    assert slots.wait_ms(66, 1.0) > slots.wait_ms(64, 1.0) > 0.0


def test_what_prefill_explains_shows_nothing() -> None:
    slots = Slots()
    report(slots, 5.0, 3.0, explained=5.0)
    assert slots.limit == inf


def test_a_limit_grows_while_it_is_used_and_nothing_waits() -> None:
    """An engine that got more room, or whose requests became smaller, is found out in seconds."""
    slots = Slots()
    report(slots, 3.0, 10.0)
    limits = []
    for _ in range(5):
        report(slots, 0.0, slots.limit)
        limits.append(slots.limit)
    assert limits == [11.0, 13.0, 17.0, 25.0, 41.0]
    report(slots, 0.0, 20.0)
    assert slots.limit == 41.0, "not used"
    report(slots, 4.0, 30.0)
    assert slots.limit == 30.0


def test_the_end_of_a_burst_shows_one_further_slot_at_most() -> None:
    """The last requests of a burst run without any that wait, in an engine that runs no more at once. The next burst
    would have it queue as many more as were learned there.
    """
    slots = Slots()
    slots.finished(3.0)
    report(slots, 3.0, 4.0)
    for running in (4.0, 4.0, 4.0, 4.0, 3.0, 1.0, 0.0):
        report(slots, 0.0, running)
    assert slots.limit == 5.0
    assert slots.is_full(7, 1.0)


def test_late_first_bytes_show_it_where_nothing_is_reported() -> None:
    slots = Slots()
    slots.first_byte_late(8.0, 10.0, 1.0, 1.0)
    assert slots.limit == inf, "one is chance"
    slots.started(1.0)
    slots.first_byte_late(8.0, 10.0, 1.0, 1.0)
    assert slots.limit == pytest.approx(8.0, abs=1.0)
    before = slots.limit
    slots.first_byte_in_time(before, 1.1)
    assert slots.limit == before, "it was not used as far as it may"
    slots.first_byte_in_time(before + 1.0, 1.2)
    assert slots.limit == before + 1.0


def test_no_first_byte_is_late_while_reports_come() -> None:
    slots = Slots()
    report(slots, 0.0, 40.0)
    for _ in range(10):
        slots.first_byte_late(1.0, 40.0, 5.0, 1.0)
    slots.first_byte_overdue(0.5, 1.0, 1.0)
    assert slots.limit == inf


def test_a_cache_gauge_that_stands_at_full_does_not_starve_an_engine() -> None:
    """It may count what is merely cached: so many as ran when it was full may run, whatever it says."""
    slots = Slots()
    report(slots, 2.0, 40.0, cache=1.0)
    assert slots.limited_by_space
    assert slots.lacks_space(35.0, 0.2, 1.0, overloaded=True)
    assert not slots.lacks_space(29.0, 0.2, 1.0, overloaded=True)
    report(slots, 0.0, 35.0, cache=0.85)
    assert not slots.lacks_space(35.0, 0.2, 1.0, overloaded=True), "what is expected to grow will fit"
    assert slots.lacks_space(35.0, 0.4, 1.0, overloaded=True)
    assert not slots.lacks_space(35.0, 0.4, 101.0, overloaded=True), "the report is old"
    assert 0.9 < FULL_CACHE < 1.0


def test_a_burst_that_an_engine_takes_at_once_is_not_held_for_what_it_will_need_later() -> None:
    """The b2b ladder: twenty seconds of requests, whose cache is full when they have long begun to stream."""
    slots = Slots()
    report(slots, 2.0, 40.0, cache=1.0)
    report(slots, 0.0, 40.0, cache=0.85)
    until = slots.reported_until
    assert slots.lacks_space(35.0, 0.4, until, overloaded=False), "it lacked space just now"
    slots.reported_until = until + 10 * SPACE_S
    assert not slots.lacks_space(35.0, 0.4, until + 2 * SPACE_S, overloaded=False)
    assert slots.lacks_space(35.0, 0.4, until + 2 * SPACE_S, overloaded=True)


# --- Whole responses --------------------------------------------------------------------------------------------------


def whole(slots: int, *, load: float, spread: float, seconds: float = 400.0) -> tuple[Room, list[int]]:
    """Whole responses of an engine with so many slots and no metrics, offered `load` times what it can do: the room
    that was learned, and how many waited in the engine over the last half.
    """
    rng, room = random.Random(7), Room(MeanOthers())
    gap_s, tokens_mean = 0.02, 300.0
    flying: list[tuple[float, float, int, int]] = []
    waited: list[int] = []
    now, free = 0.0, [0.0] * slots
    while now < seconds:
        now += rng.expovariate(load * slots / (gap_s * tokens_mean))
        while flying and flying[0][0] <= now:
            end, placed, tokens, before = flying.pop(0)
            room.completed(end - placed, 0.05, tokens, before, end)
        if room.slots.is_full(len(flying), now):
            continue
        tokens = max(1, round(tokens_mean * rng.uniform(1.0 - spread, 1.0 + spread)))
        first = min(range(slots), key=free.__getitem__)
        free[first] = max(now, free[first]) + 0.05 + gap_s * tokens
        if now > seconds / 2:
            waited.append(max(0, len(flying) + 1 - slots))
        flying.append((free[first], now, tokens, len(flying)))
        flying.sort()
    return room, waited


def test_whole_responses_show_how_many_run_by_their_length() -> None:
    room, waited = whole(16, load=2.0, spread=0.8)
    assert room.slots.limit == pytest.approx(16.0, abs=3.0)
    assert sorted(waited)[int(0.95 * len(waited))] <= 6


def test_whole_responses_of_one_length_show_at_least_that_they_wait() -> None:
    room, waited = whole(4, load=3.0, spread=0.0)
    assert room.slots.limit < 12.0
    assert sorted(waited)[int(0.95 * len(waited))] <= 9


def test_without_overload_no_limit_is_found_and_nothing_held() -> None:
    room, _ = whole(64, load=0.6, spread=0.8)
    assert room.slots.limit > 60.0


def test_a_few_responses_show_nothing() -> None:
    times = ResponseTimes()
    for n in range(MIN_RESPONSES - 1):
        times.learn(1.0 + n, 100 + n)
    assert times.unexplained_s() is None


# --- First bytes ------------------------------------------------------------------------------------------------------


def test_a_first_byte_is_late_beyond_what_is_usual() -> None:
    lanes = Lanes()
    assert not lanes.delay_known
    for _ in range(50):
        lanes.learn_delay(3.0)
    assert lanes.late_after_s(0.1, reported=True) == pytest.approx(0.1 + 3.0 + LATE_S, abs=0.01), (
        "an engine that always takes 3 s"
    )
    steady = lanes.late_after_s(0.1, reported=True)
    for n in range(200):
        lanes.learn_delay(2.5 if n % 2 else 3.5)
    assert lanes.late_after_s(0.1, reported=True) > steady + 1.0, "and one that varies gets longer"
    assert lanes.late_after_s(5.0, reported=True) > 10.0, "a long prefill may take twice as long as predicted"


def test_more_work_done_than_one_prefill_at_a_time_can_do_shows_several() -> None:
    """An engine that computes four in parallel finishes four seconds of prefill in each."""
    lanes = Lanes()
    now = 0.0
    for _ in range(4 * int(MEMORY)):
        now += 0.125
        lanes.prefilled(0.5, 4, now)
    assert lanes.lanes == pytest.approx(4.0)
    for _ in range(4 * int(MEMORY)):
        now += 0.45
        lanes.prefilled(0.5, 4, now)
    assert lanes.lanes == 1.0, "the speed was wrong by a tenth"
    lanes = Lanes()
    for _ in range(int(MEMORY)):
        assert lanes.lanes == 1.0, "in no time, or of few, nothing shows"
        lanes.prefilled(0.5, 2, 0.0)


def first_byte(lanes: Lanes, before: int, engine: int, now: float = 0.0, noise_s: float = 0.0) -> None:
    """One behind `before` prefills of .5 s, of an engine that computes so many in parallel."""
    lanes.prefilled(0.5, before + 1, now)
    lanes.waited(0.5 * before, (0.5 * before / engine if before >= engine else 0.0) + noise_s, now, slots_free=True)


def test_a_prediction_counts_until_it_is_certainly_wrong() -> None:
    rng, serial, lanes = random.Random(1), Lanes(), Lanes()
    for n in range(100):
        first_byte(serial, n % 4, 1, noise_s=rng.uniform(-0.3, 0.3))
        assert serial.lanes == 1.0
        lanes.waited(0.01 * (n % 4), 0.0, 0.0, slots_free=True)
    assert lanes.lanes == 1.0, "short prefills that share a step do not wait either"
    for n in range(100):
        lanes.waited(0.5 * (n % 8), rng.uniform(-2.0, 2.0), 0.0, slots_free=True)
    assert lanes.lanes > 8.0, "first bytes vary, whatever is before them"


def test_without_reports_a_first_byte_is_late_by_what_all_of_them_show() -> None:
    """Those with requests before them, too: behind some engines there are always some."""
    lanes = Lanes()
    lanes.learn_delay(0.1)
    usual_s = lanes.late_after_s(0.1, reported=False)
    for n in range(40):
        lanes.waited(0.1, 4.0 * (n % 2), 0.0, slots_free=False)
    assert lanes.late_after_s(0.1, reported=False) == usual_s, "they may have waited for slots"
    for n in range(40):
        lanes.waited(0.1, 4.0 * (n % 2), 0.0, slots_free=True)
    assert lanes.late_after_s(0.1, reported=False) > usual_s + 3.0
    assert lanes.late_after_s(0.1, reported=True) == usual_s


@pytest.mark.parametrize("engine", [4, 16])
def test_more_are_placed_while_first_bytes_do_not_wait(engine: int) -> None:
    lanes, most = Lanes(), 0
    for n in range(40):
        before = 0
        while before < lanes.lanes or lanes.may_grow(before, float(n)):
            first_byte(lanes, before, engine, float(n))
            before += 1
            if before > 8 * engine:
                break
        most = max(most, before)
    assert most >= engine


def test_an_engine_that_was_seen_to_be_serial_is_not_tested_for_a_while() -> None:
    lanes = Lanes()
    assert not lanes.may_grow(1, 0.0), "nothing came yet"
    lanes.prefilled(0.5, 1, 0.5)
    assert lanes.may_grow(1, 0.5)
    assert not lanes.may_grow(2, 0.0)
    for n in range(12):
        first_byte(lanes, n % 2, 1, 1.0)
    assert not lanes.may_grow(1, 2.0)
    assert lanes.may_grow(1, 1.0 + AGAIN_S), "it may be another one by then"
    lanes.queue_reported(1.0, 2, 1.0 + AGAIN_S)
    assert not lanes.may_grow(1, 2.0 + AGAIN_S), "it says that one waits"


def test_a_limit_that_late_first_bytes_show_holds_once_an_even_number_runs() -> None:
    """With slots each start follows an end. Where first bytes vary for another reason, so does what runs."""
    rng, slots, varied = random.Random(1), Slots(), Slots()
    slots.finished(19.0)
    varied.finished(8.0)
    for n in range(40):
        slots.started(0.3 * n)
        slots.first_byte_late(63.0 + n % 2, 70.0, 2.0, 0.3 * n)
        varied.started(0.3 * n)
        varied.first_byte_late(float(max(1, round(rng.gauss(24.0, 5.0)))), 70.0, 2.0, 0.3 * n)
    assert slots.limit == pytest.approx(64.0, abs=3.0)
    assert slots.is_full(slots.limit + 10.0, 12.0)
    assert not varied.is_full(varied.limit + 100.0, 12.0)
    assert slots.wait_ms(slots.limit + 10.0, 12.0) > 0.0
    assert varied.wait_ms(varied.limit + 10.0, 12.0) == 0.0, "nor do prices count it"
    varied.limit_estimated(20.0)
    assert varied.wait_ms(30.0, 12.0) > 0.0, "whole responses show more"
    slots.first_byte_in_time(0.0, 13.0)
    assert slots.is_full(slots.limit + 10.0, 13.0), "one in time changes nothing"


def test_slots_that_the_engine_says_bound_the_limit_from_the_first_request() -> None:
    slots = Slots()
    slots.limit_reported(4)
    assert (slots.limit, slots.is_full(5.0, 0.0), slots.is_full(6.0, 0.0)) == (4.0, False, True), "and a short queue"
    for n in range(20):
        slots.first_byte_in_time(8.0, float(n))
    slots.limit_estimated(9.0)
    assert slots.limit == 4.0, "it cannot run more"
    for n in range(4):
        slots.first_byte_late(2.0, 5.0, 1.0, 30.0 + n)
    assert slots.limit < 3.0, "memory lets it run less"
    limit = slots.limit
    slots.limit_reported(4)
    assert slots.limit == limit, "it says so again and again"
    slots.limit_reported(8)
    assert slots.limit == 8.0, "it was started with more"


# --- The line ---------------------------------------------------------------------------------------------------------


def test_what_has_less_work_goes_before() -> None:
    line = Reservations()
    for work in (100.0, 1000.0, 10_000.0):
        line.add(work, work)
    assert line.ahead_of(10.0) == (0.0, 0.0)
    assert line.ahead_of(5000.0) == (2.0, 1100.0)
    assert line.ahead_of(5000.0, 0.5) == (1.5, 5550.0), "by flow"
    assert line.ahead_of(5000.0, newest_first=True) == (1.0, 600.0), "of 1,000 tokens half"
    for work in (100.0, 1000.0, 10_000.0):
        line.remove(work, work)
    assert (line.count, line.tokens, line.ahead_of(1e9)) == (0, 0.0, (0.0, 0.0))


# --- Others, and work that cannot be read -----------------------------------------------------------------------------


def test_an_endpoint_that_does_not_report_has_the_mean_of_those_that_do() -> None:
    mean = MeanOthers()
    loud, silent = Others(mean), Others(mean)
    for _ in range(200):
        loud.learn(12.0, 0.0, 0, until=10.0, reported=False)
        mean.learn(loud.count, 10.0, 2)
    assert loud.requests(5.0) == 12.0
    assert silent.requests(5.0) == pytest.approx(12.0)
    assert silent.requests(11.0) == 0.0, "then nobody knows anything"


def test_a_little_cache_in_use_beside_ours_is_a_wrong_estimate_and_much_is_others() -> None:
    others = Others(MeanOthers())
    others.until = 10.0
    others.learn_space(10_500.0, 10_000.0, 100_000.0)
    assert others.space(5.0) == 0.0
    others.learn_space(95_000.0, 10_000.0, 100_000.0)
    assert others.space(5.0) == 85_000.0
    assert others.space(11.0) == 0.0


def test_work_that_cannot_be_read_is_what_it_took() -> None:
    unread = OpaqueTimes()
    assert unread.ms("embed", FIRST_MS) == FIRST_MS
    for _ in range(30):
        unread.learn("embed", 100.0, 5.0)
    assert 15.0 < unread.ms("embed", FIRST_MS) < 20.0, "20 ms for each that was there, and a little of the others'"
    assert unread.ms("audio", FIRST_MS) == FIRST_MS
    for n in range(200):
        unread.learn(f"model {n}", 50.0, 1.0)
    assert unread.ms("one more", FIRST_MS) == pytest.approx(50.0, abs=2 * PRIOR_COUNT * 2)
