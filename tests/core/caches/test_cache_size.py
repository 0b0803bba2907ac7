# SPDX-License-Identifier: Apache-2.0
"""How an endpoint's cache size is learned, by hand: blocks of 100 tokens, segments of 16 blocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.caches.cache_size import (
    FEW_SEGMENTS,
    GUESSED_TOKENS,
    HIT_DISCOUNT,
    SEGMENT_BLOCKS,
    SMALLEST_TOKENS,
    CapacityLearner,
    SizeEstimate,
    Step,
    expected_size,
)
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.requests.request import InferenceRequest, Usage

BLOCK = 100.0


def used(learner: CapacityLearner, keys: range, *, rest: float = 0.0, most: float = math.inf) -> None:
    """A request with these keys that nobody shares, from begin to end."""
    learner.look_up(keys, 0, used_tokens=0.0, block_tokens=BLOCK)
    learner.remember(keys, 0, rest_tokens=rest, max_blocks=most)


def look_up(learner: CapacityLearner, keys: range, *, beside: float = 0.0) -> tuple[Step, ...]:
    return learner.look_up(keys, 0, used_tokens=beside, block_tokens=BLOCK)


def believing(tokens: float) -> CapacityLearner:
    """One that saw two misses so far away."""
    learner = CapacityLearner(SizeEstimate())
    for _ in range(2):
        learner.learn((Step(0, 16, tokens),), 0.0)
    return learner


# --- How far blocks are -----------------------------------------------------------------------------------------------


def test_a_block_is_as_far_as_what_was_used_since_and_what_is_in_use() -> None:
    learner = CapacityLearner(SizeEstimate())
    used(learner, range(16))
    used(learner, range(100, 116))
    used(learner, range(200, 216), rest=300.0)
    # Two segments of 16 blocks and the answer came after; of its own segment half counts.
    assert look_up(learner, range(16), beside=1000.0) == (Step(0, 16, 1000 + 3200 + 300 + 800),)


def test_what_is_used_again_comes_nearer_and_is_counted_once() -> None:
    learner = CapacityLearner(SizeEstimate())
    used(learner, range(16))
    for _ in range(5):
        used(learner, range(100, 116))
    (step,) = look_up(learner, range(16))
    assert step.distance == 1600 + 800, "five times the same 16 blocks are 16 blocks"


def test_a_prompt_has_a_step_for_each_time_that_its_parts_were_used_last() -> None:
    learner = CapacityLearner(SizeEstimate())
    used(learner, range(32))
    used(learner, range(16))  # the beginning again: its end is older
    steps = look_up(learner, range(40))
    assert steps == (Step(0, 16, 800.0), Step(16, 32, 2400.0)), "the last eight were never here"


def test_blocks_in_use_are_passed_and_the_first_unknown_one_ends_it() -> None:
    learner = CapacityLearner(SizeEstimate())
    learner.remember(range(4, 20), 0, rest_tokens=0.0, max_blocks=math.inf)
    keys = [0, 1, 2, 3, *range(4, 8), 99, *range(8, 20)]
    steps = learner.look_up(keys, 4, used_tokens=400.0, block_tokens=BLOCK)
    assert steps == (Step(4, 8, 400.0 + 800.0),)
    assert look_up(learner, range(4, 20)) == (), "and all of them are in use now"


def test_what_a_running_request_uses_is_remembered_when_it_ends() -> None:
    learner = CapacityLearner(SizeEstimate())
    learner.remember(range(8), 3, rest_tokens=0.0, max_blocks=math.inf)
    assert look_up(learner, range(3, 8)) == (Step(0, 5, 250.0),)
    assert look_up(learner, range(3)) == ()


def test_no_more_is_remembered_than_asked_for() -> None:
    learner = CapacityLearner(SizeEstimate())
    for first in range(0, 20_000, 100):
        used(learner, range(first, first + 10), most=64)
    kept = [first for first in range(0, 20_000, 100) if look_up(learner, range(first, first + 10))]
    assert kept == list(range(19_400, 20_000, 100)), "whole segments of twenty blocks, of which three fit"
    used(learner, range(16), most=0)
    assert look_up(learner, range(16)) == ()
    used(learner, range(16))
    assert look_up(learner, range(16)), "and it goes on"


# --- What that says of the size ---------------------------------------------------------------------------------------


def test_two_misses_bring_the_belief_down_to_the_farther_one() -> None:
    learner = CapacityLearner(SizeEstimate())
    learner.learn((Step(0, 16, 400_000.0),), 0.0)
    assert learner.size.tokens == GUESSED_TOKENS, "one may be anything"
    learner.learn((Step(0, 16, 350_000.0),), 0.0)
    assert learner.size.tokens == 400_000.0
    learner.learn((Step(0, 16, 330_000.0),), 0.0)
    assert learner.size.tokens == 350_000.0


def test_a_hit_is_believed_at_once() -> None:
    learner = believing(200_000)
    learner.learn((Step(0, 16, 250_000.0),), 16.0)
    assert learner.size.tokens == 250_000.0


def test_a_miss_nearer_than_hits_is_not_believed_but_raises_doubt() -> None:
    """A restart that nobody told of, say. It takes 70 such misses to come down by half."""
    learner = believing(300_000)
    learner.learn((Step(0, 16, 280_000.0),), 16.0)
    for n in range(1, 71):
        learner.learn((Step(0, 16, 1000.0),), 0.0)
        assert learner.size.tokens == pytest.approx(300_000 if n == 1 else 280_000 * HIT_DISCOUNT**n)
    assert learner.size.tokens == pytest.approx(140_000, rel=0.02)
    learner.learn((Step(0, 16, 290_000.0),), 16.0)
    assert learner.size.tokens == 290_000.0


def test_a_prompt_that_was_there_in_part_says_both() -> None:
    """An engine gives up the end of a prompt first."""
    steps = (Step(0, 10, 100_000.0), Step(10, 20, 300_000.0))
    learner = CapacityLearner(SizeEstimate())
    for _ in range(2):
        learner.learn(steps, 10.0)
    assert (learner.size.tokens, learner.size.space_tokens) == (300_000.0, expected_size(100_000, 300_000))


def test_a_block_more_or_less_says_nothing() -> None:
    """How many tokens a block has is known on average only."""
    learner = CapacityLearner(SizeEstimate())
    for _ in range(2):
        learner.learn((Step(0, 16, 100_000.0), Step(16, 17, 300_000.0)), 15.6)
    assert learner.size.tokens == GUESSED_TOKENS
    assert learner.size.space_tokens == expected_size(100_000, GUESSED_TOKENS), "nor that the 17th was there"


def test_the_price_of_space_is_right_on_average_while_the_size_is_unknown() -> None:
    """The mean of one over the size, each doubling as likely, by 100,000 equal steps of its logarithm."""
    least, most = 150_000.0, 900_000.0
    steps = 100_000
    sizes = [least * (most / least) ** ((n + 0.5) / steps) for n in range(steps)]
    assert 1 / expected_size(least, most) == pytest.approx(sum(1 / size for size in sizes) / steps)
    assert SizeEstimate().space_tokens == pytest.approx(315_300, rel=0.001)
    assert expected_size(0, SMALLEST_TOKENS / 2) == SMALLEST_TOKENS / 2
    assert expected_size(299_000, 300_000) == 300_000


def test_the_price_of_space_is_the_same_for_all_that_do_not_say_their_size() -> None:
    shared = SizeEstimate()
    one, other = CapacityLearner(shared), CapacityLearner(shared)
    one.learn((Step(0, 16, 400_000.0),), 16.0)
    assert (one.size.tokens, shared.space_tokens) == (GUESSED_TOKENS, expected_size(400_000, GUESSED_TOKENS))
    for _ in range(2):
        other.learn((Step(0, 16, 500_000.0),), 0.0)
    assert (one.size.tokens, other.size.tokens) == (GUESSED_TOKENS, 500_000.0)
    assert shared.space_tokens == expected_size(400_000, 500_000)


# --- In the model of an endpoint --------------------------------------------------------------------------------------


def prompt(keys: range) -> InferenceRequest:
    return InferenceRequest("r", "m", True, 1024 * len(keys), 1024 * len(keys), tuple(keys))


def answer(load: LoadModel, keys: range, cached: int | None, *, started: bool = True) -> None:
    """A request of blocks of 256 tokens, of which so many tokens were cached."""
    placement = load.place(prompt(keys), 1.0)
    if started:
        load.first_byte(placement, 1.1)
        load.end(placement, Usage(256 * len(keys), cached, 0), 1.2)
    else:
        load.end(placement, None, 1.2)


def thrash(load: LoadModel, cached: int | None = 0) -> None:
    """64 prompts of 64 blocks, each twice and never cached: in expected_size a million tokens."""
    for _ in range(2):
        for first in range(0, 6400, 100):
            answer(load, range(first, first + 64), cached)


@pytest.mark.parametrize("none", [0, None])
def test_an_endpoint_without_gauges_is_measured_by_its_answers(none: int | None) -> None:
    """Where answers say what was cached, vLLM's do not if it is nothing."""
    load = LoadModel(PoolModel(1024))
    answer(load, range(10_000, 10_064), 0)
    thrash(load, none)
    assert load.kv.capacity_tokens == pytest.approx(63.5 * 64 * 256 + 64 * 128, rel=0.02), "of 2 million"
    assert load.kv.cache.size * 256 <= load.kv.capacity_tokens
    assert SMALLEST_TOKENS < load.pool.size.space_tokens < load.kv.capacity_tokens


def test_a_size_that_the_engine_says_is_never_overruled() -> None:
    load = LoadModel(PoolModel(1024))
    load.scraped(
        LoadMetrics(scraped_at=0.0, kv_blocks=200_000, block_size_tokens=16), others=None, queued=0.0, fresh_until=1.0
    )
    thrash(load)
    assert load.kv.capacity_tokens == load.kv.known_tokens == 3_200_000
    assert load.kv.learner is None


def test_answers_that_do_not_say_what_was_cached_cost_and_teach_nothing() -> None:
    load = LoadModel(PoolModel(1024))
    thrash(load, None)
    assert load.kv.capacity_tokens == GUESSED_TOKENS
    assert load.pool.size.space_tokens == SizeEstimate().space_tokens
    assert load.kv.learner is not None
    assert not load.kv.learner.reports_cached


def test_what_was_never_prefilled_cannot_be_missed() -> None:
    """Clients that leave while they wait inside the engine."""
    load = LoadModel(PoolModel(1024))
    answer(load, range(1000, 1064), 0)  # answers here say it
    for _ in range(10):
        answer(load, range(64), 0, started=False)
    answer(load, range(64), 0)
    assert load.kv.capacity_tokens == GUESSED_TOKENS


def test_after_a_restart_nothing_is_missed_that_was_there_before() -> None:
    load = LoadModel(PoolModel(1024))
    running = load.place(prompt(range(2000, 2064)), 0.5)
    for first in (0, 100, 200):
        answer(load, range(first, first + 64), 0)
    load.restarted()
    load.end(running, Usage(64 * 256, 0, 0), 0.9)
    for first in (0, 100, 200, 2000):
        answer(load, range(first, first + 64), 0)
    assert load.kv.capacity_tokens == GUESSED_TOKENS


def test_segments_are_small_beside_a_cache() -> None:
    """So that what half a segment is off does not matter."""
    assert SEGMENT_BLOCKS * 256 / 2 < 0.01 * 307_200 * 0.7


def test_an_upper_bound_that_answers_contradict_is_not_believed() -> None:
    """What was there was there, whatever an engine says."""
    size = SizeEstimate()
    size.cap(200_000.0)
    assert size.tokens == 200_000
    assert SMALLEST_TOKENS < size.space_tokens < 200_000
    size.learn(300_000.0, None)
    size.cap(200_000.0)
    assert size.tokens == size.space_tokens == 300_000


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(0, 500)), min_size=1, max_size=400),
    st.sampled_from([200, 2000]),
)
@settings(max_examples=60)
def test_what_is_given_up_changes_no_distance(requests: list[tuple[int, int, int]], most: int) -> None:
    bounded, unbounded = CapacityLearner(SizeEstimate()), CapacityLearner(SizeEstimate())
    unbounded._compact_at = 1 << 30  # as before: it keeps them all
    for first, count, rest in requests:
        keys = range(first * 20, first * 20 + count)
        found = [look_up(one, keys, beside=float(count)) for one in (bounded, unbounded)]
        assert found[0] == found[1]
        for one in (bounded, unbounded):
            one.remember(keys, 0, rest_tokens=float(rest), max_blocks=most)
    assert bounded._idle.keys() == unbounded._idle.keys()
    assert len(bounded._blocks) <= 2 * sum(count > 0 for count in bounded._blocks) + FEW_SEGMENTS + 2


def test_a_long_conversation_leaves_no_segment_for_each_of_its_requests() -> None:
    """It kept one for ever: 40 bytes each, and milliseconds to add them up."""
    learner = CapacityLearner(SizeEstimate())
    for length in range(20, 3000):
        look_up(learner, range(length))
        learner.remember(range(length), 0, rest_tokens=10.0, max_blocks=math.inf)
    assert len(learner._blocks) <= 2 * FEW_SEGMENTS
