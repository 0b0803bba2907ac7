# SPDX-License-Identifier: Apache-2.0
"""The block pool alone: sharing, eviction order, and what a failed take leaves behind."""

from lbproxy.sim.engine.kv_cache import BlockPool


def filled(total: int, *prompts: list[int]) -> BlockPool:
    """A pool in which prompts, given by their hashes, were computed and released one after the other."""
    pool = BlockPool(total)
    for hashes in prompts:
        hits = pool.match(hashes, len(hashes))
        blocks = pool.take(hits, len(hashes) - len(hits))
        assert blocks is not None
        pool.register(blocks[len(hits) :], hashes[len(hits) :])
        pool.release(blocks)
    return pool


def test_released_blocks_stay_hittable_and_do_not_count_as_used() -> None:
    pool = filled(8, [1, 2, 3])
    assert (pool.used, pool.available) == (0, 8)
    assert len(pool.match([1, 2, 3, 4], limit=8)) == 3
    assert len(pool.match([1, 2, 3], limit=2)) == 2
    assert pool.match([9, 2, 3], limit=8) == []


def test_unused_blocks_go_before_cached_ones() -> None:
    pool = filled(8, [1, 2, 3])
    assert pool.take((), 5) is not None
    assert len(pool.match([1, 2, 3], limit=8)) == 3


def test_oldest_released_prompt_is_evicted_first_and_its_tail_before_its_head() -> None:
    """What others share is the head of a prompt: it has to survive longest."""
    pool = filled(6, [1, 2, 3], [4, 5, 6])
    survivors = []
    for _ in range(6):
        assert pool.take((), 1) is not None
        survivors.append((len(pool.match([1, 2, 3], 3)), len(pool.match([4, 5, 6], 3))))
    assert survivors == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_hit_takes_a_prompt_out_of_the_line_for_eviction() -> None:
    pool = filled(6, [1, 2, 3], [4, 5, 6])
    hits = pool.match([1, 2, 3], 3)
    assert pool.take(hits, 0) == hits
    assert pool.take((), 3) is not None
    assert pool.match([4, 5, 6], 3) == []
    assert pool.match([1, 2, 3], 3) == hits


def test_shared_blocks_are_used_once_and_freed_by_the_last_user() -> None:
    pool = filled(6, [1, 2])
    hits = pool.match([1, 2], 2)
    first, second = pool.take(hits, 1), pool.take(hits, 1)
    assert first is not None
    assert second is not None
    assert pool.used == 4
    pool.release(first)
    assert pool.used == 3
    pool.release(second)
    assert pool.used == 0


def test_take_that_does_not_fit_changes_nothing() -> None:
    """Cached blocks about to be used cannot be evicted for the same request: 2 hits + 3 new ones need 5 of 4."""
    pool = filled(4, [1, 2])
    hits = pool.match([1, 2], 2)
    assert pool.take(hits, 3) is None
    assert (pool.used, pool.available) == (0, 4)
    assert pool.take(hits, 2) is not None
    assert pool.available == 0
