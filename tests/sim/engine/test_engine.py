# SPDX-License-Identifier: Apache-2.0
"""The engine by hand-computed cases, against a naive scheduler, and under random schedules."""

import dataclasses
import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.sim.engine.engine import Engine, FirstToken, RequestTooLong, SimRequest, StepDone
from lbproxy.sim.engine.presets import BLOCK_TOKENS, PRESETS, Preset
from tests.sim.reference import Reference

STEADY = Preset(
    host_ms=10.0,
    weights_ms=0.0,
    token_ms=0.0,
    sequence_ms=0.0,
    context_ms=0.0,
    attention_ms=0.0,
    kv_tokens=64 * BLOCK_TOKENS,
    max_model_len=1024,
    token_budget=100,
    max_sequences=8,
    api_ms=0.0,
)
"""Every step takes 10 ms, so that a test is about scheduling."""


def hashes(*, prefix: str, blocks: int, own: str = "", shared: int = 0) -> list[int]:
    """Block hashes of which the first `shared` depend on the prefix only."""
    names = (f"{prefix} {index}" if index < shared else f"{prefix} {own} {index}" for index in range(blocks))
    return [xxhash.xxh3_64_intdigest(name.encode()) for name in names]


def drain(engine: Engine) -> list[StepDone]:
    """All steps until the engine is idle."""
    steps: list[StepDone] = []
    while (due := engine.next_event()) is not None:
        steps += engine.advance(now=due)
    return steps


def milliseconds(steps: list[StepDone]) -> list[float]:
    return [round(step.at * 1000, 9) for step in steps]


def test_step_time_is_the_published_formula() -> None:
    """Prefill of 1,000 tokens, then two decodes, worked out by hand for qwen-32b-2xh100."""
    engine = Engine(PRESETS["qwen-32b-2xh100"])
    engine.add(SimRequest("a", 1000, 3), now=5.0)
    prefill_ms = 1.0 + (13.3**1.5 + (0.054 * 1000) ** 1.5) ** (2 / 3) + 0.068 + 1.65 * 1000 * 500 / 1e6
    decode_ms = 1.0 + (13.3**1.5 + 0.054**1.5) ** (2 / 3) + 0.068
    at = 5.0 + (12.0 + prefill_ms) / 1000
    second = at + (decode_ms + 0.044 * 1000 / 1000) / 1000
    third = second + (decode_ms + 0.044 * 1001 / 1000) / 1000
    assert engine.next_event() == pytest.approx(5.012)
    assert [step.at for step in drain(engine)] == pytest.approx([at, second, third])


def test_full_prefill_takes_what_llm_d_measured() -> None:
    """8,192 tokens of Qwen3-32B on two H100: 0.40-0.51 s."""
    engine = Engine(PRESETS["qwen-32b-2xh100"])
    engine.add(SimRequest("a", 8192, 1), now=0.0)
    assert 0.40 < drain(engine)[0].at < 0.53


def test_speed_divides_every_duration() -> None:
    preset = PRESETS["llama-8b-h100"]
    ends = []
    for speed in (1.0, 4.0):
        engine = Engine(preset, speed=speed)
        engine.add(SimRequest("a", 300, 5), now=0.0)
        ends.append(drain(engine)[-1].at)
    assert ends[0] == pytest.approx(4 * ends[1])


def test_jitter_is_the_rngs_and_small() -> None:
    ends = []
    for seed in (1, 1, 2):
        engine = Engine(STEADY, rng=random.Random(seed))
        engine.add(SimRequest("a", 10, 100), now=0.0)
        ends.append(drain(engine)[-1].at)
    assert ends[0] == ends[1] != ends[2]
    assert ends[0] == pytest.approx(1.0, rel=0.02)


def test_long_prompt_is_computed_in_chunks_of_the_budget_beside_the_decodes() -> None:
    """Budget 100: a (10 tokens) leaves 90 for b's 250; from then on a's decode takes 1 of it in each step."""
    engine = Engine(STEADY)
    engine.add(SimRequest("a", 10, 6), now=0.0)
    engine.add(SimRequest("b", 250, 2), now=0.0)
    steps = drain(engine)
    # "a" starts alone: with no API time it was ready before "b" came.
    assert [step.tokens for step in steps] == [("a",), ("a",), ("a",), ("a", "b"), ("a", "b"), ("a",)]
    assert steps[3].first == (FirstToken("b", 0),)
    assert steps[4].finished == ("b",)
    assert milliseconds(steps) == [10, 20, 30, 40, 50, 60]


def test_several_prompts_share_one_steps_budget() -> None:
    """40 + 40 + 20 of c's 40 fill the first step; c is done in the second, where d gets the rest."""
    engine = Engine(dataclasses.replace(STEADY, api_ms=1.0))
    for name in "abcd":
        engine.add(SimRequest(name, 40, 1), now=0.0)
    steps = drain(engine)
    assert [step.finished for step in steps] == [("a", "b"), ("c", "d")]
    assert milliseconds(steps) == [11, 21]


def test_no_more_than_max_sequences_run() -> None:
    engine = Engine(dataclasses.replace(STEADY, max_sequences=2, api_ms=1.0))
    for name in "abc":
        engine.add(SimRequest(name, 4, 3), now=0.0)
    engine.advance(now=0.012)
    assert engine.gauges()[:2] == (1, 2)
    assert [step.finished for step in drain(engine)][1] == ("a", "b")


def test_prefix_hits_are_whole_blocks_and_never_the_last_token() -> None:
    """64 tokens, all four blocks cached: only three are taken, as the last token has to be computed."""
    engine = Engine(STEADY)
    shared = hashes(prefix="p", blocks=4, shared=4)
    engine.add(SimRequest("a", 64, 1, shared), now=0.0)
    drain(engine)
    engine.add(SimRequest("b", 64, 1, shared), now=1.0)
    engine.add(SimRequest("c", 70, 1, shared), now=2.0)
    first = [first for step in drain(engine) for first in step.first]
    assert first == [FirstToken("b", 48), FirstToken("c", 64)]
    gauges = engine.gauges()
    assert (gauges.prefix_queries, gauges.prefix_hits) == (64 + 64 + 70, 48 + 64)
    assert (gauges.prompt_tokens, gauges.generation_tokens) == (198, 3)


def test_twins_in_one_step_share_their_prefix() -> None:
    engine = Engine(dataclasses.replace(STEADY, api_ms=1.0))
    shared = hashes(prefix="p", blocks=3, shared=3)
    engine.add(SimRequest("a", 50, 1, shared), now=0.0)
    engine.add(SimRequest("b", 50, 1, shared), now=0.0)
    assert drain(engine)[0].first == (FirstToken("a", 0), FirstToken("b", 48))


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    """The second turn of a chat holds the first one's prompt and answer: 20 + 30 tokens, of which 49 were computed."""
    engine = Engine(STEADY)
    text = hashes(prefix="chat", blocks=5, shared=5)
    engine.add(SimRequest("turn 1", 20, 30, text[:3]), now=0.0)
    drain(engine)
    engine.add(SimRequest("turn 2", 80, 1, text), now=1.0)
    assert drain(engine)[0].first == (FirstToken("turn 2", 48),)


def test_usage_counts_blocks_in_use_only() -> None:
    """33 tokens are 3 of 64 blocks; when they are only cached, the gauge is 0 again."""
    engine = Engine(STEADY)
    engine.add(SimRequest("a", 33, 2, hashes(prefix="a", blocks=2)), now=0.0)
    engine.advance(now=0.015)
    assert engine.gauges().kv_usage == 3 / 64
    engine.advance(now=0.02)
    assert engine.gauges().kv_usage == 0.0
    assert engine.gauges().running == 0


def test_shortage_of_blocks_preempts_the_last_running_which_is_resumed_first() -> None:
    """4 blocks. a and b prefill one full block each and need a second one for their first decode, and a third after 16
    more. Then all four are in use: a takes b's, and b starts again, in front of c, once a has finished.
    """
    preset = dataclasses.replace(STEADY, kv_tokens=4 * BLOCK_TOKENS, max_model_len=64, api_ms=1.0)
    engine = Engine(preset)
    for name in "ab":
        engine.add(SimRequest(name, 16, 20), now=0.0)
    engine.add(SimRequest("c", 32, 1), now=0.05)
    steps = drain(engine)
    together, alone = [("a", "b")] * 17, [("a",)] * 3
    assert [step.tokens for step in steps[:20]] == together + alone
    # b computes its prompt and the 17 tokens it had, and goes on with its 18th; c fits beside it only at the end.
    assert [step.tokens for step in steps[20:]] == [("b",), ("b",), ("b",), ("c",)]
    assert engine.gauges().preemptions == 1
    assert not any(first.id == "b" for step in steps[1:] for first in step.first)


def test_queue_stops_at_the_first_request_whose_blocks_do_not_fit() -> None:
    """First come, first served: b (3 blocks) waits for a (2 of 4), and c (1 block) waits behind b although it fits."""
    preset = dataclasses.replace(STEADY, kv_tokens=4 * BLOCK_TOKENS, max_model_len=64, api_ms=1.0)
    engine = Engine(preset)
    for name, prompt in (("a", 20), ("b", 40), ("c", 8)):
        engine.add(SimRequest(name, prompt, 2), now=0.0)
    engine.advance(now=0.011)
    assert engine.gauges()[:2] == (2, 1)
    assert [step.tokens for step in drain(engine)] == [("a",), ("b", "c"), ("b", "c")]


@pytest.mark.parametrize(
    ("at", "left"),
    [(0.0005, "arriving"), (0.005, "prefilling"), (0.015, "decoding"), (0.025, "decoding")],
)
def test_abort_frees_everything_wherever_the_request_is(at: float, left: str) -> None:
    """And the step in flight still ends at its time, without the aborted request's token."""
    engine = Engine(dataclasses.replace(STEADY, api_ms=1.0))
    engine.add(SimRequest("a", 150, 9), now=0.0)
    engine.add(SimRequest("b", 10, 9), now=0.0)
    assert engine.abort("a", now=at)
    assert not engine.abort("a", now=at)
    steps = drain(engine)
    after = [step for step in steps if step.at > at]
    assert not any("a" in step.tokens for step in after)
    assert steps[-1].finished == ("b",)
    assert engine._pool.used == 0
    assert engine.gauges().running == 0


def test_abort_of_the_only_request_leaves_nothing_to_wake_for() -> None:
    engine = Engine(dataclasses.replace(STEADY, api_ms=1.0))
    engine.add(SimRequest("a", 4, 2), now=0.0)
    engine.abort("a", now=0.0)
    assert engine.next_event() is None


def test_abort_of_a_waiting_request_lets_the_next_one_pass() -> None:
    engine = Engine(dataclasses.replace(STEADY, max_sequences=1, api_ms=1.0))
    for name in "abc":
        engine.add(SimRequest(name, 4, 2), now=0.0)
    engine.abort("b", now=0.005)
    assert [step.tokens for step in drain(engine)] == [("a",), ("a",), ("c",), ("c",)]


def test_gauges_change_only_when_a_step_ends() -> None:
    engine = Engine(STEADY)
    engine.add(SimRequest("a", 4, 2), now=0.0)
    engine.advance(now=0.009)
    assert engine.gauges().running == 0
    engine.advance(now=0.010)
    assert engine.gauges().running == 1
    engine.abort("a", now=0.011)
    assert engine.gauges().running == 1
    engine.advance(now=0.020)
    assert engine.gauges().running == 0


def test_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(STEADY, max_model_len=128)
    with pytest.raises(RequestTooLong):
        engine.add(SimRequest("a", 120, 9), now=0.0)
    small_cache = Engine(dataclasses.replace(STEADY, kv_tokens=100))
    assert small_cache.max_model_len == 96
    with pytest.raises(RequestTooLong):
        small_cache.add(SimRequest("a", 97, 1), now=0.0)
    assert small_cache.next_event() is None


def test_preset_with_more_sequences_than_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_sequences"):
        dataclasses.replace(STEADY, max_sequences=101)


CRAMPED = dataclasses.replace(
    PRESETS["llama-8b-h100"], kv_tokens=24 * BLOCK_TOKENS, max_model_len=256, token_budget=64, max_sequences=6
)
"""So small that random requests queue, are chunked, evict each other's prefixes and are preempted."""


@st.composite
def requests(draw: st.DrawFn, name: str) -> SimRequest:
    prompt, output = draw(st.integers(1, 130)), draw(st.integers(1, 60))
    prefix, shared = draw(st.sampled_from("pqr")), draw(st.integers(0, 8))
    full = (prompt + output) // BLOCK_TOKENS
    return SimRequest(name, prompt, output, hashes(prefix=prefix, own=name, blocks=full, shared=shared))


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, SimRequest]]:
    # The length is drawn first: left to itself, a list is mostly short, and then nothing is ever preempted.
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    return [(sum(gaps[: i + 1]) / 1000, draw(requests(f"r{i}"))) for i in range(len(gaps))]


def cut(steps: list[StepDone]) -> list[StepDone]:
    """Steps with a time that can be compared: the engine adds the same terms in another order."""
    return [step._replace(at=round(step.at, 9), tokens=tuple(sorted(step.tokens))) for step in steps]


@settings(max_examples=150)
@given(arrivals())
def test_shortcuts_give_what_the_naive_scheduler_gives(schedule: list[tuple[float, SimRequest]]) -> None:
    """Nobody walks all decodes in a step here, so the walk itself is the oracle."""
    engine = Engine(CRAMPED)
    for at, request in schedule:
        engine.add(request, now=at)
    reference = Reference(CRAMPED)
    expected = reference.run(schedule)
    assert cut(drain(engine)) == cut(expected)
    assert engine.gauges().preemptions == reference.preemptions


def check(engine: Engine) -> None:
    """Blocks are conserved: each one's users are exactly the live sequences that hold it."""
    pool = engine._pool
    held = [block for sequence in engine._live.values() for block in sequence.blocks]
    assert [held.count(block) for block in range(len(pool._users))] == pool._users
    assert set(pool._free) == {block for block, users in enumerate(pool._users) if not users}
    assert pool.used + pool.available == pool.total
    assert {content: block for block, content in enumerate(pool._hash_of) if content is not None} == pool._by_hash
    running = len(engine._decoding) + (engine._partial is not None)
    assert running <= engine._preset.max_sequences


@st.composite
def aborts(draw: st.DrawFn, count: int) -> list[tuple[float, str]]:
    chosen = draw(st.lists(st.integers(0, count - 1), max_size=8, unique=True))
    return [(draw(st.integers(0, 4000)) / 1000, f"r{index}") for index in chosen]


@settings(max_examples=100)
@given(st.data())
def test_late_drivers_see_the_same_steps_and_blocks_are_conserved(data: st.DataObject) -> None:
    """One driver wakes for every event; the other only adds and aborts, and collects everything at the end."""
    schedule = data.draw(arrivals())
    calls: list[tuple[float, SimRequest | str]] = [*schedule, *data.draw(aborts(len(schedule)))]
    calls.sort(key=lambda call: call[0])
    punctual, late = (Engine(CRAMPED, rng=random.Random(7)) for _ in range(2))
    steps: list[StepDone] = []
    aborted: set[str] = set()
    for at, what in calls:
        while (due := punctual.next_event()) is not None and due <= at:
            steps += punctual.advance(now=due)
            check(punctual)
        for engine in (punctual, late):
            if isinstance(what, SimRequest):
                engine.add(what, now=at)
            elif engine.abort(what, now=at):
                aborted.add(what)
    steps += drain(punctual)
    check(punctual)
    assert late.advance(now=1e9) == steps
    assert late.gauges() == punctual.gauges()
    finished = [request_id for step in steps for request_id in step.finished]
    # An abort may come before its request is added; then the request lives on.
    assert sorted([*finished, *aborted]) == sorted(request.id for _, request in schedule)
    assert (punctual._pool.used, punctual._context, punctual._waiting, punctual._live) == (0, 0, {}, {})


def test_new_speed_counts_from_the_next_step() -> None:
    """Four steps of 10 ms; at 15 ms the server becomes five times slower: the step in flight still ends at 20."""
    engine = Engine(STEADY)
    engine.add(SimRequest("a", 10, 4), now=0.0)
    engine.set_speed(0.2, now=0.015)
    assert milliseconds(engine.advance(now=0.125)) == [10, 20, 70, 120]


def test_later_request_does_not_overtake_one_that_came_while_the_server_was_slow() -> None:
    engine = Engine(dataclasses.replace(STEADY, api_ms=5.0), speed=0.1)
    engine.add(SimRequest("a", 10, 1), now=0.0)
    engine.set_speed(1.0, now=0.001)
    engine.add(SimRequest("b", 10, 1), now=0.002)
    assert [step.finished for step in drain(engine)] == [("a", "b")]


def test_nothing_begins_in_the_past_when_the_slow_one_in_front_is_aborted() -> None:
    engine = Engine(dataclasses.replace(STEADY, api_ms=5.0), speed=0.1)
    engine.add(SimRequest("a", 10, 1), now=0.0)
    engine.set_speed(1.0, now=0.001)
    engine.add(SimRequest("b", 10, 1), now=0.002)
    engine.abort("a", now=0.03)
    assert [step.at for step in drain(engine)] == [pytest.approx(0.06)]


def test_restart_loses_everything_but_what_had_left() -> None:
    """Cache, queue, counters and the step in flight are gone; the first step's tokens had been sent."""
    engine = Engine(dataclasses.replace(STEADY, api_ms=1.0))
    shared = hashes(prefix="p", blocks=2, shared=2)
    for name, output in (("a", 1), ("b", 9)):
        engine.add(SimRequest(name, 40, output, shared), now=0.0)
    engine.add(SimRequest("c", 300, 9), now=0.0108)
    assert engine.restart(now=0.012) == ["b", "c"]
    assert [(step.finished, len(step.first)) for step in engine.advance(now=0.012)] == [(("a",), 2)]
    assert (engine.next_event(), engine.gauges().prompt_tokens, engine._pool.used) == (None, 0, 0)
    engine.add(SimRequest("b", 40, 1, shared), now=0.02)
    assert drain(engine)[0].first == (FirstToken("b", 0),)


@settings(max_examples=50)
@given(arrivals())
def test_unnamed_tokens_change_nothing_but_their_names(schedule: list[tuple[float, SimRequest]]) -> None:
    """And `generated` says at any time how many tokens were named."""
    named, unnamed = Engine(CRAMPED), Engine(CRAMPED, name_tokens=False)
    counts: dict[str, int] = {request.id: 0 for _, request in schedule}
    for at, request in schedule:
        named.add(request, now=at)
        unnamed.add(request, now=at)
    while (due := named.next_event()) is not None:
        assert unnamed.next_event() == due
        steps = named.advance(now=due)
        assert unnamed.advance(now=due) == [step._replace(tokens=()) for step in steps]
        for step in steps:
            for request_id in step.tokens:
                counts[request_id] += 1
            for request_id in step.finished:
                del counts[request_id]
        assert {request_id: unnamed.generated(request_id) for request_id in counts} == counts
    assert unnamed.gauges() == named.gauges()


def test_pauses_are_between_its_work() -> None:
    """It works for 30 ms, then stands for 20: steps of 10 ms."""
    preset = dataclasses.replace(STEADY, pause_s=0.02, pause_every_s=0.05)
    engine = Engine(preset)
    engine.add(SimRequest("a", 10, 7), now=0.001)
    assert milliseconds(drain(engine)) == [11, 21, 51, 61, 71, 101, 111]
    assert [preset.ends_at(at, 0.01) for at in (0.0, 0.025, 0.03, 0.045)] == pytest.approx([0.01, 0.055, 0.06, 0.06])
    assert dataclasses.replace(preset, pause_at_s=0.025).ends_at(0.0, 0.01) == pytest.approx(0.03)


def test_a_request_with_cold_experts_holds_up_its_step() -> None:
    """A share of the requests, the same ones in every engine."""
    preset = dataclasses.replace(STEADY, cold_share=0.3, cold_ms=100.0)
    cold = [name for name in map(str, range(1000)) if preset.is_cold(name)]
    assert 250 < len(cold) < 350
    for name, took in ((cold[0], 110.0), (next(name for name in map(str, range(1000)) if name not in cold), 10.0)):
        engine = Engine(preset)
        engine.add(SimRequest(name, 10, 2), now=0.0)
        assert milliseconds(drain(engine)) == [took, took + 10.0]


def test_without_prefix_caching_nothing_is_hit() -> None:
    for caches, cached in ((True, 32), (False, 0)):
        engine = Engine(dataclasses.replace(STEADY, prefix_caching=caches))
        shared = hashes(prefix="p", blocks=3)
        for name, now in (("a", 0.0), ("b", 1.0)):
            engine.add(SimRequest(name, 48, 1, shared), now=now)
            (last,) = [first for step in drain(engine) for first in step.first]
        assert last == FirstToken("b", cached)


def test_what_is_cached_can_be_forgotten_while_requests_run() -> None:
    engine = Engine(STEADY)
    shared = hashes(prefix="p", blocks=3)
    engine.add(SimRequest("a", 48, 20, shared), now=0.0)
    engine.forget(now=0.015)
    engine.add(SimRequest("b", 48, 1, shared), now=0.02)
    steps = drain(engine)
    assert [first for step in steps for first in step.first] == [FirstToken("a", 0), FirstToken("b", 0)]
    assert {name for step in steps for name in step.finished} == {"a", "b"}
    check(engine)
