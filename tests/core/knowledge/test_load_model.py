# SPDX-License-Identifier: Apache-2.0
"""What a LoadModel counts and what it learns, from calls alone."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest

from lbproxy.core.caches.adapters import LoadTimes
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.placement import FREED_S, Placement, freed_per_ms
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.observed.learned import PoolLearned, of_endpoint, of_pool
from lbproxy.core.requests.outline import UNCUT_STRING_BYTES
from lbproxy.core.requests.request import InferenceRequest, Usage

KIB = 1024


def prompt(tokens: int, keys: list[int] | None = None, *, stream: bool = True) -> InferenceRequest:
    """A prompt of so many tokens, at the four bytes each that a new pool believes in."""
    return InferenceRequest("r", "m", stream, 4 * tokens, 4 * tokens, tuple(keys or ()))


def scrape(load: LoadModel, *, others: float | None = None, queued: float = 0.0, **said: float | int) -> None:
    metrics = LoadMetrics(scraped_at=0.0, **said)  # type: ignore[arg-type]
    load.scraped(metrics, others=others, queued=queued, fresh_until=100.0)


def report(load: LoadModel, *, others: float, queued: float) -> None:
    load.scraped(LoadMetrics(scraped_at=0.0), others=others, queued=queued, fresh_until=100.0, reported=True)


# --- Bookkeeping ------------------------------------------------------------------------------------------------------


def test_a_request_is_counted_from_placement_to_end() -> None:
    load = LoadModel(PoolModel(KIB))
    one = load.place(prompt(1024, [1, 2, 3, 4]), 1.0)
    two = load.place(prompt(1536, [1, 2, 3, 4, 5, 6]), 1.0)
    assert (one.uncached_tokens, two.uncached_tokens) == (1024.0, 512.0), "the second finds the first's blocks"
    assert (load.work.in_flight, load.work.pending_tokens, load.work.head_tokens) == (2, 1536.0, 1024.0)
    assert (load.work.context_tokens, load.kv.cache.pinned) == (2560.0, 6)
    load.first_byte(one, 1.1)
    assert (load.work.pending_tokens, load.work.head_tokens, load.work.prefill_since) == (512.0, 512.0, 1.1)
    load.progress(one, 20, 1.5)
    assert (load.work.context_tokens, load.work.live_tokens) == (2580.0, 20.0)
    load.end(one, None, 2.0)
    load.end(one, None, 2.0)
    assert (load.work.in_flight, load.work.context_tokens, load.work.live_tokens) == (1, 1536.0, 0.0)
    load.end(two, None, 2.0)
    assert (load.work.in_flight, load.work.pending_tokens, load.work.context_tokens, load.kv.cache.pinned) == (
        0,
        0.0,
        0.0,
        0,
    )
    assert load.kv.cache.size == 6, "and stays cached"


def test_the_backlog_shrinks_while_the_first_of_it_is_prefilled() -> None:
    """At .1 ms a token: 100 ms for the head, and no more than that until its first byte comes."""
    load = LoadModel(PoolModel(KIB))
    load.place(prompt(1000), 1.0)
    load.place(prompt(2000), 1.0)
    assert load.backlog_tokens(1.0) == 3000.0
    assert load.backlog_tokens(1.05) == pytest.approx(2500.0)
    assert load.backlog_tokens(9.0) == 2000.0
    assert load.prefill_ms(1.05) == pytest.approx(250.0)


def test_a_request_that_does_not_stream_is_prefilled_when_it_should_be() -> None:
    """It shows no first byte, and must not look like queued work until its end."""
    load = LoadModel(PoolModel(KIB))
    one = load.place(prompt(1000, stream=False), 0.0)  # 40 + 100 ms
    two = load.place(prompt(1000, stream=False), 0.0)  # 40 + 200 ms
    assert [one.due_at, two.due_at] == pytest.approx([0.14, 0.24])
    assert load.backlog_tokens(0.15) == pytest.approx(900.0), "since its predicted time the second is on"
    assert load.backlog_tokens(0.25) == 0.0
    assert (load.work.in_flight, load.work.pending) == (2, {})
    load.first_byte(one, 3.0)
    load.end(one, Usage(1000, None, 300), 3.0)
    assert load.work.in_flight == 1
    assert load.pool.output_tokens == pytest.approx(200 + 0.02 * 100)
    assert (load.pool.token_ms, load.speed.base_ms) == (0.1, 40.0), "it is no sample"


@pytest.mark.parametrize("by", ["first byte", "end"])
def test_where_nobody_streams_answers_that_come_too_soon_say_how_fast_prefill_is(by: str) -> None:
    """A pool believes in .1 ms a token, 800 ms for these; they take 40 ms, answer included."""
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for n in range(60):
        placement = load.place(prompt(8000, stream=False), float(n))
        if by == "first byte":
            load.first_byte(placement, n + 0.04)
        load.end(placement, Usage(8000, 0, 1), n + 0.04)
    assert pool.token_ms * load.speed.factor * 8000 < 80.0
    assert load.prefill_ms(60.0) == 0.0


def test_many_small_prompts_at_once_say_it_too() -> None:
    """100 of 250 tokens: .1 ms a token would take them 2.5 s, and all are answered after 20 ms."""
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for n in range(5):
        batch = [load.place(prompt(250, stream=False), float(n)) for _ in range(100)]
        for placement in batch:
            load.first_byte(placement, n + 0.02)
            load.end(placement, Usage(250, 0, 1), n + 0.02)
    assert pool.token_ms * load.speed.factor * 25_000 < 100.0


def test_an_answer_that_comes_late_does_not_say_that_prefill_is_slow() -> None:
    """It may have been long."""
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for n in range(60):
        placement = load.place(prompt(8000, stream=False), 10.0 * n)
        load.work.expire(10.0 * n + 5.0, load.speed)
        load.first_byte(placement, 10.0 * n + 9.0)
        load.end(placement, Usage(8000, 0, 300), 10.0 * n + 9.0)
    assert (pool.token_ms, load.speed.factor) == (0.1, 1.0)


def test_a_request_that_failed_soon_says_nothing_of_speed() -> None:
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for n in range(60):
        load.end(load.place(prompt(8000, stream=False), float(n)), None, n + 0.01)
    assert (pool.token_ms, load.speed.factor) == (0.1, 1.0)


def test_a_stream_that_begins_proves_that_what_came_before_is_prefilled() -> None:
    load = LoadModel(PoolModel(KIB))
    silent = load.place(prompt(50_000, stream=False), 0.0)
    stream = load.place(prompt(1000), 0.0)
    later = load.place(prompt(70_000, stream=False), 0.0)
    load.first_byte(stream, 0.5)
    assert list(load.work.pending) == [later]
    load.end(silent, None, 1.0)
    load.end(stream, None, 1.0)
    load.end(later, None, 1.0)
    assert (load.work.in_flight, load.work.pending_tokens) == (0, 0.0)


def test_a_request_that_is_given_up_leaves_the_queue_and_the_clock() -> None:
    """Only if it was the one being prefilled does the next one begin now."""
    load = LoadModel(PoolModel(KIB))
    one, two, three = (load.place(prompt(1000), 0.0) for _ in range(3))
    load.end(two, None, 0.05)
    assert (load.work.pending_tokens, load.work.prefill_since) == (2000.0, 0.0)
    load.end(one, None, 0.06)
    assert (load.work.pending_tokens, load.work.prefill_since, load.work.head_tokens) == (1000.0, 0.06, 1000.0)
    load.first_byte(one, 0.07)
    load.progress(one, 5, 0.08)
    assert load.work.context_tokens == 1000.0, "what comes late counts no more"
    load.end(three, None, 0.1)


def test_the_cache_is_cut_to_what_the_engine_has_room_for() -> None:
    load = LoadModel(PoolModel(KIB))
    scrape(load, kv_blocks=128, block_size_tokens=16)  # 2,048 tokens, 8 blocks of ours
    for first in range(0, 40, 4):
        load.end(load.place(prompt(1024, list(range(first, first + 4))), 1.0), None, 1.1)
    assert load.kv.cache.size == 8
    held = load.place(prompt(1024, [100, 101, 102, 103]), 2.0)
    load.progress(held, 600, 3.0)
    other = load.place(prompt(256, [200]), 3.0)
    assert load.kv.cache.size == 5, "streamed tokens take room too: (2048 - 600) / 256"
    load.end(held, None, 4.0)
    load.end(other, None, 4.0)


def test_an_endpoint_that_left_or_restarted_takes_its_cache_along() -> None:
    pool = PoolModel(KIB)
    one, two = LoadModel(pool), LoadModel(pool)
    running = one.place(prompt(512, [1, 2]), 0.0)
    kept = two.place(prompt(512, [1, 2]), 0.0)
    one.restarted()
    assert pool.index.match((1, 2)) == [0, 2]
    fresh = one.place(prompt(512, [1, 2]), 1.0)
    one.end(running, None, 2.0)
    assert pool.index.match((1, 2)) == [2, 2]
    assert one.kv.cache.pinned == 2, "the old request's pins are not the new one's"
    pool.index.leave(two.kv.cache)
    assert pool.index.match((1, 2))[one.kv.member_id] == 2
    two.end(kept, None, 3.0)
    one.end(fresh, None, 3.0)
    assert pool.index.entries == 2


def test_another_start_time_is_a_restart() -> None:
    load = LoadModel(PoolModel(KIB))
    load.end(load.place(prompt(512, [1, 2]), 0.0), None, 0.0)
    for started_at, left in ((5.0, 2), (5.0, 2), (6.0, 0)):
        scrape(load, started_at=started_at)
        assert load.kv.cache.size == left
    load.end(load.place(prompt(512, [1, 2]), 0.0), None, 0.0)
    scrape(load)
    assert load.kv.cache.size == 2, "not said is not changed"


def test_others_load_counts_when_two_scrapes_say_so() -> None:
    """A gauge lags behind our own count by a step or two, which must not look like somebody else."""
    load = LoadModel(PoolModel(KIB))
    scrape(load, others=9.0, queued=4.0)
    others = load.room.others
    assert others.count == 0.0
    scrape(load, others=8.0, queued=4.0)
    assert (others.count, others.queued(50.0)) == (8.0, 4.0)
    assert load.backlog_tokens(50.0) == 2000.0
    assert load.backlog_tokens(101.0) == 0.0, "stale"
    scrape(load, others=1.0)
    scrape(load, others=1.0)
    assert (others.count, others.waiting) == (0.0, 0.0), "too little to be believed"


def test_a_reported_queue_counts_at_once_and_what_runs_as_scrapes_say() -> None:
    """A report is of the moment in which its answer left; but of others' running requests it only repeats a scrape."""
    load = LoadModel(PoolModel(KIB))
    scrape(load, others=9.0)
    report(load, others=9.0, queued=0.0)
    report(load, others=9.0, queued=0.0)
    others = load.room.others
    assert others.count == 0.0, "one scrape, however often it is repeated"
    report(load, others=15.0, queued=6.0)
    assert (others.count, others.waiting) == (6.0, 6.0)
    report(load, others=9.0, queued=0.0)
    assert others.waiting == 0.0
    scrape(load, others=8.0)
    assert others.count == 8.0, "the second scrape"


def test_freed_space_is_a_rate_that_is_forgotten() -> None:
    load = LoadModel(PoolModel(KIB))
    placement = load.place(prompt(512, [1, 2]), 0.0)
    load.progress(placement, 88, 1.0)
    load.end(placement, None, 10.0)
    assert freed_per_ms(load.work.freed, 10.0) == pytest.approx(600 / 15_000)
    assert freed_per_ms(load.work.freed, 10.0 + FREED_S) == pytest.approx(600 / 15_000 / math.e)


# --- Learning ---------------------------------------------------------------------------------------------------------


class Server:
    """An engine of one line: prefills one after the other at a rate, and gaps that grow with the context."""

    def __init__(self, load: LoadModel, *, token_ms: float, base_ms: float, rng: random.Random) -> None:
        self.load, self.token_ms, self.base_ms, self.rng = load, token_ms, base_ms, rng
        self.now = 0.0

    def serve(self, tokens: int, *, noise: float = 0.15) -> Placement:
        """One request to its first byte; the size is wrong by up to `noise`."""
        believed = int(tokens * self.rng.uniform(1 - noise, 1 + noise))
        placement = self.load.place(prompt(believed), self.now)
        self.now += (self.base_ms + tokens * self.token_ms) / 1000.0
        self.load.first_byte(placement, self.now)
        return placement


def test_speed_and_fixed_time_are_learned() -> None:
    """Within 15 % for the rate although every size is wrong by as much."""
    load = LoadModel(PoolModel(KIB))
    server = Server(load, token_ms=0.054, base_ms=20.0, rng=random.Random(1))
    for _ in range(400):
        for tokens in (100, 3000):
            load.end(server.serve(tokens), None, server.now + 0.1)
            server.now += 1.0
    rate = load.pool.token_ms * load.speed.factor
    assert rate == pytest.approx(0.054, rel=0.15)
    assert load.speed.base_ms == pytest.approx(22.0, rel=0.35)


def test_a_slow_endpoint_is_told_from_the_pool() -> None:
    pool = PoolModel(KIB)
    rng = random.Random(2)
    servers = [Server(LoadModel(pool), token_ms=rate, base_ms=20.0, rng=rng) for rate in (0.05, 0.05, 0.05, 0.2)]
    for _ in range(600):
        for server in servers:
            server.load.end(server.serve(4000), None, server.now)
            server.now += 1.0
    rates = [pool.token_ms * server.load.speed.factor for server in servers]
    assert rates[3] == pytest.approx(0.2, rel=0.3)
    assert rates[:3] == pytest.approx([0.05] * 3, rel=0.1)


def test_endpoints_that_differ_by_noise_alone_count_as_equal() -> None:
    """Otherwise the noise of the estimate would choose."""
    pool = PoolModel(KIB)
    rng = random.Random(3)
    servers = [Server(LoadModel(pool), token_ms=0.05, base_ms=20.0, rng=rng) for _ in range(3)]
    for _ in range(300):
        for server in servers:
            server.load.end(server.serve(4000), None, server.now)
            server.now += 1.0
    assert [server.load.speed.factor for server in servers] == [1.0] * 3


def test_a_batch_of_first_bytes_is_one_sample() -> None:
    """Four prefills in one step take the time of their sum."""
    one, two = LoadModel(PoolModel(KIB)), LoadModel(PoolModel(KIB))
    batch = [one.place(prompt(1000), 0.0) for _ in range(4)]
    for n, placement in enumerate(batch):
        one.first_byte(placement, 0.3 + n * 0.0002)
    whole = two.place(prompt(4000), 0.0)
    two.first_byte(whole, 0.3)
    for load, placement in ((one, batch[0]), (two, whole)):
        load.progress(placement, 1, 1.0)
    assert one.pool.token_ms == pytest.approx(two.pool.token_ms)
    expected = math.log((300 - 20) / (0.1 * 4000))
    assert one.pool.token_ms == pytest.approx(0.1 * math.exp(0.2 * expected))


def test_one_odd_sample_moves_little() -> None:
    load = LoadModel(PoolModel(KIB))
    server = Server(load, token_ms=0.1, base_ms=40.0, rng=random.Random(3))
    stuck = load.place(prompt(2000), server.now)
    load.first_byte(stuck, server.now + 600.0)
    load.end(stuck, None, server.now + 601.0)
    assert load.pool.token_ms == pytest.approx(0.1 * math.exp(0.14))


def test_a_prompt_that_nobody_could_read_teaches_nothing() -> None:
    load = LoadModel(PoolModel(KIB))
    placement = load.place(InferenceRequest("r", "m", True, 5000), 0.0)
    load.first_byte(placement, 30.0)
    load.end(placement, None, 31.0)
    pool = load.pool
    assert (load.speed.base_ms, pool.token_ms, pool.hit_ratio, pool.output_tokens) == (40.0, 0.1, 0.3, 200.0)


def test_what_was_learned_says_from_how_many_samples() -> None:
    """None: it is assumed, or another endpoint's, and nobody may show it as a finding."""
    pool = PoolModel(KIB)
    load, other = LoadModel(pool), LoadModel(pool)

    def counts() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        return of_endpoint(load, 9.0, False).samples, of_endpoint(other, 9.0, False).samples, of_pool(pool).samples

    own, others, all_ = counts()
    assert {*own.values(), *others.values(), *all_.values()} == {0}
    assert {*own} == {"prefill_ms_per_token", "base_ms", "gap_ms"}
    assert {*all_} == {field.name for field in fields(PoolLearned)} - {"samples"}
    placement = load.place(prompt(100), 0.0)
    load.first_byte(placement, 0.05)
    load.progress(placement, 4, 0.1)
    load.progress(placement, 4, 0.2)
    load.end(placement, Usage(100, None, 20), 1.0)
    own, others, all_ = counts()
    assert own == {"prefill_ms_per_token": 0, "base_ms": 1, "gap_ms": 1}
    assert {*others.values()} == {0}
    assert all_ == {
        "prefill_ms_per_token": 0,
        "base_ms": 1,
        "bytes_per_token": 1,
        "media_scale": 0,
        "answer_tokens": 1,
        "hit_ratio": 1,
        "adapter_load_ms": 0,
        "transfer_fixed_ms": 0,
        "transfer_ms_per_token": 0,
    }
    placement = load.place(prompt(4000), 2.0)
    load.first_byte(placement, 2.5)
    load.end(placement, None, 3.0)
    assert counts()[0]["prefill_ms_per_token"] == counts()[2]["prefill_ms_per_token"] == 1


def test_gaps_are_learned_as_a_line_over_the_context() -> None:
    """Gap = 15 ms + 0.0001 ms a token, with noise."""
    load = LoadModel(PoolModel(KIB))
    rng = random.Random(4)
    now = 0.0
    for _ in range(300):
        streams = [load.place(prompt(rng.randrange(1000, 60_000)), now) for _ in range(rng.randrange(1, 8))]
        for stream in streams:
            load.first_byte(stream, now)
        for _ in range(10):
            gap_ms = (15.0 + 1e-4 * load.work.context_tokens) * rng.lognormvariate(0, 0.03)
            now += 10 * gap_ms / 1000
            for stream in streams:
                load.progress(stream, 10, now)
        for stream in streams:
            load.end(stream, None, now)
    assert load.speed.gap_per_token_ms == pytest.approx(1e-4, rel=0.15)
    assert load.speed.gap_ms == pytest.approx(15.0, rel=0.1)


def test_a_gap_with_a_prefill_queued_is_no_gap() -> None:
    load = LoadModel(PoolModel(KIB))
    stream = load.place(prompt(1000), 0.0)
    load.first_byte(stream, 0.1)
    load.progress(stream, 1, 0.1)
    before = load.speed.mean_gap_ms
    other = load.place(prompt(9000), 0.2)
    load.progress(stream, 1, 1.0)
    assert load.speed.mean_gap_ms == before
    load.first_byte(other, 1.1)
    load.progress(stream, 10, 1.2)
    assert load.speed.mean_gap_ms == pytest.approx(20.0)


def test_one_gap_in_five_is_looked_at() -> None:
    load = LoadModel(PoolModel(KIB))
    stream = load.place(prompt(1000), 0.0)
    load.first_byte(stream, 0.1)
    load.progress(stream, 1, 0.2)
    for n in range(10):
        load.progress(stream, 1, 0.2 + 0.01 * (n + 1) if n % 5 == 0 else 0.2 + 0.01 * (n + 1) + 0.005)
    assert load.speed.mean_gap_ms == pytest.approx((10.0 + 2 * 5.0) / 3), "a new one counts twice at the beginning"


def test_an_endpoint_without_samples_of_late_is_taken_to_be_like_the_others() -> None:
    pool = PoolModel(KIB)
    usual, slow = LoadModel(pool), LoadModel(pool)
    for load, gap_s in ((usual, 0.02), (slow, 0.06)):
        stream = load.place(prompt(1000), 0.0)
        load.first_byte(stream, 0.1)
        for n in range(100):
            load.progress(stream, 10, 0.1 + 10 * gap_s * (n + 1))
    assert pool.gap_ms != PoolModel(KIB).gap_ms
    assert slow.speed.gap_ms > 1.3 * pool.gap_ms
    assert slow.speed.gap_until == pytest.approx(60.1 + 30.0, abs=3.0)
    assert LoadModel(pool).speed.gap_until < 0.0


def test_a_fixed_time_of_its_own_is_believed_for_a_while_and_then_tried_again() -> None:
    pool = PoolModel(KIB)
    usual, slow = LoadModel(pool), LoadModel(pool)
    for n in range(200):
        for load, took in ((usual, 0.01), (usual, 0.01), (usual, 0.01), (slow, 0.1)):
            stream = load.place(prompt(100), n)
            load.first_byte(stream, n + took)
            load.end(stream, None, n + 0.2)
    assert usual.speed.base_until < 0.0, "as far from the pool's as noise is"
    assert slow.speed.base_ms > 2 * pool.base_ms
    assert slow.speed.base_until == pytest.approx(199.1 + 30.0, abs=2.0)


def test_another_process_is_not_as_slow_as_the_one_before_it() -> None:
    """One that was slow before it was killed got no short prompts for half a minute, though it was idle."""
    pool = PoolModel(KIB)
    usual, slow = LoadModel(pool), LoadModel(pool)
    for n in range(40):
        for load, took, gap_s in ((usual, 0.01, 0.02), (usual, 0.01, 0.02), (slow, 0.1, 0.06)):
            stream = load.place(prompt(100), n)
            load.first_byte(stream, n + took)
            for k in range(20):
                load.progress(stream, 1, n + took + gap_s * (k + 1))
            load.end(stream, None, n + took + 20 * gap_s)
    factor = slow.speed.factor
    assert slow.speed.base_until > 60.0
    assert slow.speed.gap_until > 60.0
    slow.restarted(inferred=True)
    assert slow.speed.gap_until > 60.0, "missing cached tokens do not show another process"
    slow.restarted()
    assert max(slow.speed.base_until, slow.speed.gap_until) < 0.0
    assert slow.speed.first_byte_ms(0.0, 0.0, 40.0) == pool.base_ms
    assert slow.speed.mean_gap_ms == pool.gap_ms
    assert slow.speed.factor == factor, "how fast it computes prompts is the hardware's"


def test_bytes_per_token_come_from_usage() -> None:
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for _ in range(300):
        load.end(load.place(prompt(3000), 0.0), Usage(prompt_tokens=4000, completion_tokens=50), 1.0)
    assert pool.bytes_per_token == pytest.approx(3.0, rel=0.02)
    assert pool.output_tokens == pytest.approx(50.0, rel=0.02)
    for tokens in (1, 10**9, 0, None):
        load.end(load.place(prompt(3000), 0.0), Usage(prompt_tokens=tokens), 1.0)
    assert pool.bytes_per_token == pytest.approx(3.0, rel=0.02), "impossible counts are not believed"


@pytest.mark.parametrize(("body_bytes", "teaches"), [(UNCUT_STRING_BYTES, True), (UNCUT_STRING_BYTES + 1, False)])
def test_a_prompt_of_which_parts_were_left_out_teaches_nothing_of_bytes_per_token(
    body_bytes: int, teaches: bool
) -> None:
    """Its bytes are counted by marks in it, and one such prompt would weigh as much as hundreds of others."""
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    large = prompt(1_000_000)._replace(body_bytes=body_bytes)
    for _ in range(300):
        load.end(load.place(large, 0.0), Usage(prompt_tokens=2_000_000), 1.0)
    assert pool.bytes_per_token == pytest.approx(2.0 if teaches else 4.0, rel=0.02)


@pytest.mark.parametrize(("reported", "scale"), [(1.1, 1.1), (0.11, 0.11), (3.0, 3.0), (1e6, 20.0), (1e-6, 1.0)])
def test_what_engines_count_for_media_comes_from_usage(reported: float, scale: float) -> None:
    """Of a conversation with an image in each turn it is known within a factor of two after the third at most, also
    from engines that count a tenth of the estimate, whatever the size. What no engine counts is not believed.
    """
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    ratios = []
    for turn in range(1, 40):
        images, text = 1275 * turn, 100 * turn
        request = prompt(text + images)._replace(media_tokens=images)
        tokens = text + reported * images
        ratios.append(pool.prompt_tokens(request) / tokens)
        load.end(load.place(request, 0.0), Usage(prompt_tokens=max(1, int(tokens))), 1.0)
    assert pool.media.scale == pytest.approx(scale, rel=0.05)
    assert pool.bytes_per_token == 4.0, "nothing is learned of text from prompts with media"
    if 0.1 < reported < 10.0:
        assert all(0.5 < ratio < 2.0 for ratio in ratios[3:])


def test_what_thumbnails_beside_long_texts_seem_to_have_does_not_count() -> None:
    """The text is wrong by more tokens than they have."""
    pool = PoolModel(KIB)
    load = LoadModel(pool)
    for _ in range(20):
        large = prompt(100 + 5000)._replace(media_tokens=5000)
        load.end(load.place(large, 0.0), Usage(prompt_tokens=100 + 5000), 1.0)
        small = prompt(5000 + 64)._replace(media_tokens=64)
        load.end(load.place(small, 0.0), Usage(prompt_tokens=6000 + 64), 1.0)
    assert pool.media.scale == pytest.approx(1.0, rel=0.3)


def test_a_scrape_tells_of_adapters() -> None:
    load = LoadModel(PoolModel(KIB))
    lora = LoraMetrics(running=frozenset({"a"}), waiting=frozenset({"b"}), max_lora=2)
    load.scraped(LoadMetrics(scraped_at=0.0, lora=lora), others=None, queued=0.0, fresh_until=2.0)
    assert load.adapters.slots == 2
    assert [load.adapters.is_loaded(name, 1.0) for name in "abc"] == [True, True, False]
    assert not load.adapters.has_room(1.0)
    assert load.adapters.has_room(3.0), "nobody says any more that they are in use"


def test_the_first_use_of_an_adapter_teaches_its_load_and_nothing_else() -> None:
    pool = PoolModel(KIB)
    pool.adapters = frozenset(["lora"])
    load = LoadModel(pool)
    for _ in range(60):
        load.adapters.forget()
        placement = load.place(InferenceRequest("r", "lora", True, 8000, 8000), 0.0)
        load.first_byte(placement, 0.04 + 0.2 + 0.7)
        load.end(placement, None, 1.0)
    assert pool.load_times.first == pytest.approx(700.0, rel=0.06)
    assert pool.load_times.again == LoadTimes().again
    assert (pool.token_ms, load.speed.base_ms) == (0.1, 40.0)


def test_who_waits_for_a_slot_teaches_nothing() -> None:
    pool = PoolModel(KIB)
    pool.adapters = frozenset(["one", "two"])
    load = LoadModel(pool)
    load.adapters.report((), 1, now=0.0, until=2.0)
    first = load.place(InferenceRequest("r", "one", True, 8000, 8000), 0.0)
    load.first_byte(first, 0.1)
    second = load.place(InferenceRequest("r", "two", True, 8000, 8000), 0.2)
    load.end(first, None, 5.0)
    learned = pool.load_times, pool.token_ms, load.speed.base_ms
    load.first_byte(second, 5.3)
    load.end(second, None, 6.0)
    assert (pool.load_times, pool.token_ms, load.speed.base_ms) == learned


def test_whatever_happens_the_numbers_stay_numbers() -> None:
    """A thousand events at random, with times that stand still and prompts of every size."""
    rng = random.Random(5)
    pool = PoolModel(KIB)
    loads = [LoadModel(pool) for _ in range(3)]
    running: list[tuple[LoadModel, Placement]] = []
    now = 0.0
    for _ in range(5000):
        now += rng.choice([0.0, 0.0, 0.0005, 0.01, 1.0, 100.0])
        what = rng.randrange(6)
        if what < 2 or not running:
            keys = tuple(range(rng.randrange(20)))
            size = rng.choice([0, 1, 5000, 10**7])
            request = InferenceRequest("r", "m", rng.random() < 0.5, size, size, keys)
            load = rng.choice(loads)
            running.append((load, load.place(request, now)))
        elif what == 2:
            load, one = rng.choice(running)
            load.first_byte(one, now)
        elif what == 3:
            load, one = rng.choice(running)
            load.progress(one, rng.choice([0, 1, 1000]), now)
        else:
            load, one = running.pop(rng.randrange(len(running)))
            load.end(one, Usage(rng.randrange(10**6), None, rng.randrange(10**4)), now)
    for load, one in running:
        load.end(one, None, now)
    for load in loads:
        assert (load.work.in_flight, load.work.pending, load.work.pending_tokens, load.work.context_tokens) == (
            0,
            {},
            0.0,
            0.0,
        )
        for value in (
            load.speed.factor,
            load.speed.base_ms,
            load.speed.gap_ms,
            load.speed.gap_per_token_ms,
            freed_per_ms(load.work.freed, now),
        ):
            assert math.isfinite(value)
            assert value >= 0.0
    assert 0.0 < pool.token_ms < 1000.0
    assert 0.0 <= pool.hit_ratio <= 1.0


# --- Images -----------------------------------------------------------------------------------------------------------


def test_what_engines_count_for_images_is_learned_and_bytes_of_text_are_not_spoiled_by_it() -> None:
    """An engine whose images take three times as many tokens as estimated says so in `usage`."""
    pool = PoolModel(1024)
    load = LoadModel(pool)
    text, image = 4 * 1000, 1000
    request = InferenceRequest("r", "m", True, 500_000, text + 4 * image, (), media_tokens=image)
    assert pool.prompt_tokens(request) == pytest.approx(2000.0)
    for n in range(60):
        placement = load.place(request, float(n))
        load.first_byte(placement, n + 0.1)
        load.end(placement, Usage(1000 + 3 * image, None, 5), n + 0.2)
    assert pool.prompt_tokens(request) == pytest.approx(4000.0, rel=0.05)
    assert pool.bytes_per_token == pytest.approx(4.0)
    assert pool.block_tokens(request) == pytest.approx(pool.prompt_tokens(request) / 8000 * 1024)


# --- Space without gauges ---------------------------------------------------------------------------------------------


def with_streams(count: int) -> tuple[LoadModel, list[Placement]]:
    """An endpoint that has shown how soon it answers, and so many streams with one report of progress each at 10.0."""
    load = LoadModel(PoolModel(KIB))
    for at in (1.0, 2.0, 3.0, 4.0):
        first = load.place(prompt(100), at)
        load.first_byte(first, at + 0.05)
        load.end(first, Usage(100, 10, 0), at + 0.5)
    streams = []
    for n in range(count):
        streams.append(load.place(prompt(1000), 5.0 + n))
        load.first_byte(streams[-1], 5.1 + n)
    for stream in streams:
        load.progress(stream, 10, 30.0)
    return load, streams


def stall(load: LoadModel, streams: list[Placement], until: float) -> None:
    """The last three streams are silent, the others go on."""
    at = 30.25
    while at <= until:
        for stream in streams[:-3]:
            load.progress(stream, 10, at)
        at += 0.25


def test_streams_that_stall_while_a_first_byte_is_late_show_what_the_cache_holds() -> None:
    load, streams = with_streams(10)
    waiting = load.place(prompt(1000), 30.0)
    stall(load, streams, 40.0)
    assert load.work.stalled() == 3
    assert waiting.late_at < 40.0
    assert not load.is_full(40.0, overloaded=False), "whoever asks learns nothing"
    load.look(39.0, overloaded=False)
    assert not load.is_full(39.0, overloaded=False), "it may be chance"
    load.look(40.0, overloaded=False)
    assert load.is_full(40.0, overloaded=False)
    assert load.room.space.limit_tokens == pytest.approx(load.work.context_tokens * 8 / 11)
    assert load.room.slots.limit <= 11.0, "so that waits are predicted from it"
    assert load.full_by(40.0, overloaded=False) == "space", "as the dashboard shows it"


def test_silent_streams_alone_show_nothing() -> None:
    """The engine's parser keeps a tool call back until it is complete; first bytes come in time."""
    load, streams = with_streams(10)
    stall(load, streams, 40.0)
    prompt_answer = load.place(prompt(100), 40.0)
    load.first_byte(prompt_answer, 40.05)
    assert load.work.stalled() == 3
    assert load.room.space.limit_tokens == math.inf
    assert not load.is_full(40.1, overloaded=False)


def test_a_pause_of_all_streams_is_no_stall() -> None:
    load, streams = with_streams(10)
    for stream in streams:
        load.progress(stream, 10, 50.0)
    assert load.work.stalled() == 0
    load.end(streams[0], None, 51.0)
    load.progress(streams[1], 10, 60.0)
    load.progress(streams[1], 10, 60.3)
    assert load.work.stalled() == 8, "one that has ended does not count"


def test_at_the_end_of_a_long_step_streams_whose_tokens_follow_do_not_stall() -> None:
    """Seen at agents' prompts of 50,000 tokens: a first byte that was late came with the tokens of two of eleven
    streams, and the cache was thought to hold no more than those two."""
    load, streams = with_streams(10)
    late = load.place(prompt(1000), 30.0)
    for stream in streams[:2]:
        load.progress(stream, 10, 32.0)
    assert load.work.stalled() == 0
    load.first_byte(late, 32.01)
    assert load.room.space.limit_tokens == math.inf
    for at in (32.02, 34.0):
        for stream in streams[2:]:
            load.progress(stream, 10, at)
    assert load.work.stalled() == 0, "the first two may follow"
    for stream in streams[2:]:
        load.progress(stream, 10, 36.0)
    assert load.work.stalled() == 2


def test_what_streams_runs_whatever_the_gauges_call_it() -> None:
    """An engine that reports all in flight as waiting, and none as running, seemed full: 73 % were refused."""
    load, streams = with_streams(9)
    load.queue_reported(LoadMetrics(scraped_at=30.1, waiting=9, running=0, kv_utilization=0.2), 40.0)
    assert load.room.slots.limit == math.inf
    assert load.room.slots.is_idle(30.1)
    load.queue_reported(LoadMetrics(scraped_at=30.2, waiting=12, running=0, kv_utilization=0.2), 40.0)
    assert load.room.slots.limit == len(streams), "the other three do wait"


def test_unknown_load_is_not_idle() -> None:
    """A page without a queue pulled the mean down by which others without reports are priced."""
    pool = PoolModel(1024)
    known, unknown = LoadModel(pool), LoadModel(pool)
    for n in range(40):
        page = LoadMetrics(scraped_at=float(n), waiting=4, running=8)
        known.scraped(page, others=12.0, queued=4.0, fresh_until=n + 5.0)
        unknown.scraped(LoadMetrics(scraped_at=float(n)), others=None, queued=0.0, fresh_until=n + 5.0)
    assert unknown.room.others.requests(40.0) == pytest.approx(12.0, abs=0.5)


def test_reports_of_the_engine_count_more_than_stalls() -> None:
    load, streams = with_streams(10)
    load.place(prompt(1000), 30.0)
    stall(load, streams, 40.0)
    for at in (39.0, 40.0):
        load.look(at, overloaded=False)
    assert load.is_full(40.0, overloaded=False)
    scrape(load, others=0.0, waiting=0, running=11, kv_utilization=0.2)
    assert not load.is_full(40.1, overloaded=False)


# --- Beside others ----------------------------------------------------------------------------------------------------


def flooded(queued: float) -> LoadModel:
    """An endpoint where others fill every slot and the queue: two scrapes in a row say so."""
    load = LoadModel(PoolModel(KIB))
    for _ in range(2):
        scrape(load, others=queued + 8.0, queued=queued, waiting=int(queued), running=8)
    return load


@pytest.mark.parametrize(("queued", "most"), [(8, 4), (50, 10), (200, 20)])
def test_where_others_wait_in_the_engine_ours_wait_with_them(queued: int, most: int) -> None:
    """What is held here loses its turn to the next of theirs, though their prefills alone take seconds."""
    load = flooded(queued)
    assert load.prefill_ms(1.0) > 250.0
    for n in range(most):
        assert not load.is_full(1.0, overloaded=False), n
        assert load.full_by(1.0, overloaded=False) is None, n
        load.place(prompt(1000), 1.0)
    assert load.is_full(1.0, overloaded=False), (
        "two lbproxies that do not know of each other must not drive each other up"
    )
    assert load.full_by(1.0, overloaded=False) == "requests"


def test_non_streaming_requests_count_as_waiting_there_by_the_share_of_all_that_waits() -> None:
    """By prediction they are prefilled; but of 8 running and 8 waiting of others and 16 of ours, 24 wait."""
    load = flooded(8)
    for _ in range(16):
        load.place(prompt(10, stream=False), 1.0)
    assert load.is_full(60.0, overloaded=False)
    assert not load.work.pending, "all are due"
    for one in [load.place(prompt(10), 60.0) for _ in range(2)]:
        load.first_byte(one, 60.1)
        load.progress(one, 1, 60.2)
    assert load.work.silent() == 16


def test_a_queue_of_ours_alone_is_no_queue_of_others() -> None:
    load = LoadModel(PoolModel(KIB))
    load.place(prompt(4000), 1.0)
    for _ in range(2):
        scrape(load, others=0.0, queued=0.0, waiting=1, running=0)
    assert load.is_full(1.0, overloaded=False)


def test_requests_that_a_full_engine_returned_to_its_queue_are_not_those_of_others() -> None:
    """A load report only has the queue; ours that had begun are in it."""
    load, _ = with_streams(40)
    for at in (30.8, 30.9):
        full = LoadMetrics(scraped_at=at, waiting=20, running=20, kv_utilization=0.99)
        load.scraped(full, others=0.0, queued=0.0, fresh_until=100.0)
    assert load.full_by(31.0, overloaded=False) == "space"
    report(load, others=20.0, queued=20.0)
    assert load.room.others.queued(30.0) == 20.0
    assert load.full_by(30.0, overloaded=False) == "space"
    for at in (31.0, 32.0):
        full = LoadMetrics(scraped_at=at, waiting=20, running=40, kv_utilization=0.99)
        load.scraped(full, others=20.0, queued=20.0, fresh_until=100.0)
    assert load.full_by(32.0, overloaded=False) is None, "scrapes have shown them"
