# SPDX-License-Identifier: Apache-2.0
"""How full a prefix cache is and how large, counted from what the engine says of single blocks."""

from __future__ import annotations

import random
from collections import OrderedDict

from lbproxy.core.caches import kv_blocks
from lbproxy.core.caches.kv_blocks import KvBlocks


class Lru:
    """An engine's cache of so many blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, block: int, seen: KvBlocks | None) -> None:
        if block in self.blocks:
            self.blocks.move_to_end(block)
            return
        if len(self.blocks) == self.size:
            gone, _ = self.blocks.popitem(last=False)
            if seen is not None:
                seen.removed([gone], 0)
        self.blocks[block] = None
        if seen is not None:
            seen.stored([block], 16, 0)


def test_followed_from_the_start_the_count_is_exact() -> None:
    cache, seen, rng = Lru(100), KvBlocks(), random.Random(1)
    seen.begin()
    for step in range(2_000):
        cache.use(rng.randrange(300), seen)
        assert seen.tokens == len(cache.blocks) * 16
        if step < 99:
            assert seen.size_tokens is None, "it was never full"
    assert seen.size_tokens == 1_600


def test_a_late_subscriber_says_nothing_until_the_cache_has_turned_over() -> None:
    """vLLM was recorded like that: the first event seen is the end of a block that was never seen stored."""
    cache, seen = Lru(100), KvBlocks()
    for block in range(100):
        cache.use(block, None)
    for block in range(100, 199):
        cache.use(block, seen)
        assert seen.tokens is None
    for block in range(199, 400):
        cache.use(block, seen)
    assert seen.tokens == 1_600
    for block in range(400, 500):
        cache.use(block, seen)
    assert seen.size_tokens == 1_600


def test_a_block_stored_twice_counts_once_and_one_that_leaves_twice_too() -> None:
    seen = KvBlocks()
    seen.begin()
    for _ in range(2):
        seen.stored([1, 2], 16, 0)
    assert seen.tokens == 32
    for _ in range(2):
        seen.removed([2, 3], 0)
    assert seen.tokens == 16


def test_after_lost_events_nothing_is_said_and_after_a_clear_again() -> None:
    seen = KvBlocks()
    seen.begin()
    seen.stored([1, 2], 16, 0)
    seen.forget()
    seen.stored([3], 16, 0)
    assert seen.tokens is None
    seen.begin()
    assert seen.tokens == 0


def test_of_models_with_groups_of_layers_nothing_is_said() -> None:
    """One token is in several blocks of one pool there."""
    seen = KvBlocks()
    seen.begin()
    seen.stored([1], 16, 0)
    seen.stored([1], 16, 1)
    assert seen.tokens is None
    seen.start_again()
    seen.begin()
    seen.stored([1], 16, 0)
    assert seen.tokens == 16


def test_too_many_blocks_are_not_held() -> None:
    seen = KvBlocks()
    seen.begin()
    blocks = range(kv_blocks.MAX_BLOCKS)
    assert seen.stored(blocks, 1, 0)
    assert seen.tokens == kv_blocks.MAX_BLOCKS
    assert not seen.stored([-1], 1, 0)
    assert not seen._blocks
