# SPDX-License-Identifier: Apache-2.0
"""Which endpoint is believed to have how much of a prompt: the tree of prompts, and each endpoint's share of it."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lbproxy.core.caches.prefix_index import ENTRY_BYTES, STALE_PATHS, EndpointCache, Node, PrefixIndex
from tests.support.prompts import chained

Keys = tuple[object, ...]


def use(cache: EndpointCache, keys: Keys) -> None:
    """A request that is over."""
    cache.unpin(cache.pin(keys)[1])


def test_a_match_is_from_the_beginning_and_per_endpoint() -> None:
    index = PrefixIndex()
    one, two, three = index.join(), index.join(), index.join()
    use(one, (1, 2, 3))
    use(two, (1, 2))
    use(three, (7, 8))
    assert index.match((1, 2, 3, 4)) == [3, 2, 0]
    assert index.match((7, 9)) == [0, 0, 1]
    assert index.longest((1, 2, 3, 4)) == 3
    assert index.match(()) == [0, 0, 0]
    assert index.match((9, 1)) == [0, 0, 0]


def test_a_prompt_is_one_piece_until_another_leaves_its_path() -> None:
    index = PrefixIndex()
    one, two = index.join(), index.join()
    use(one, tuple(range(1000)))
    assert len(index) == 1
    use(two, (*range(600), 2000, 2001))
    assert len(index) == 3
    assert index.match(tuple(range(1000))) == [1000, 600]
    assert index.match((*range(600), 2000)) == [600, 601]
    for wanted in range(1, 1000, 37):
        assert index.match((*range(wanted), 3000)) == [wanted, min(wanted, 600)]


def test_tails_go_before_the_beginnings_that_others_share() -> None:
    index = PrefixIndex()
    cache = index.join()
    use(cache, (1, 2, 3, 4))
    cache.trim(2)
    assert index.match((1, 2, 3, 4)) == [2]


def test_what_one_evicts_others_keep() -> None:
    index = PrefixIndex()
    one, two = index.join(), index.join()
    use(one, (1, 2, 3, 4))
    use(two, (1, 2, 3, 4))
    one.trim(3)
    assert index.match((1, 2, 3, 4)) == [3, 4]
    one.trim(1)
    two.trim(2)
    assert index.match((1, 2, 3, 4)) == [1, 2]
    assert index.entries == 3


def test_what_was_used_last_stays_longest() -> None:
    index = PrefixIndex()
    cache = index.join()
    use(cache, (1,))
    use(cache, (2,))
    use(cache, (1,))
    cache.trim(1)
    assert index.match((1,)) == [1]
    assert index.match((2,)) == [0]


def test_what_is_in_use_is_never_evicted() -> None:
    index = PrefixIndex()
    cache = index.join()
    depth, short = cache.pin((1, 2))
    assert (depth, short.end) == (0, 2)
    depth, long = cache.pin((1, 2, 3))
    assert (depth, long.end) == (2, 3)
    cache.trim(0)
    assert (cache.size, cache.pinned) == (3, 3)
    assert cache.unpin(long) == 1, "the first request still uses the others"
    assert cache.pinned_depth((1, 2, 3)) == 2
    cache.trim(0)
    assert cache.size == 2


def test_a_request_that_began_before_its_piece_was_parted_ends_well() -> None:
    index = PrefixIndex()
    cache = index.join()
    _, long = cache.pin((1, 2, 3, 4))
    _, short = cache.pin((1, 2, 9))
    assert (cache.size, cache.pinned, len(index)) == (5, 5, 3)
    assert cache.unpin(long) == 2
    assert cache.unpin(short) == 3
    cache.trim(4)
    assert index.match((1, 2, 3, 4)) == [3], "it became idle first"


def test_slots_are_used_again_and_old_caches_cannot_speak() -> None:
    index = PrefixIndex()
    one, two = index.join(), index.join()
    use(two, (1,))
    _, end = one.pin((1, 2))
    index.leave(one)
    assert index.match((1, 2)) == [0, 1]
    new = index.join()
    assert (new.member_id, index.width) == (one.member_id, 2)
    assert one.unpin(end) == 0
    assert one.pin((5,)) == (0, index.root)
    assert index.match((5,)) == [0, 0]
    again = index.renew(two)
    assert again.member_id == two.member_id
    assert len(index) == 0
    assert index.entries == 0


def test_free_slots_are_filled_from_the_bottom() -> None:
    """So that masks stay as short as the pool is."""
    index = PrefixIndex()
    caches = [index.join() for _ in range(6)]
    for slot in (4, 1, 3):
        index.leave(caches[slot])
    assert [index.join().member_id for _ in range(4)] == [1, 3, 4, 6]


def test_a_prompt_that_comes_again_and_again_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    cache = index.join()
    for n in range(5 * STALE_PATHS):
        use(cache, (n % 7, 100 + n % 7))
    assert len(cache._idle) <= STALE_PATHS + 2 * 7 + 1
    cache.trim(2)
    assert index.match(((5 * STALE_PATHS - 1) % 7,)) == [1]


@pytest.mark.parametrize(
    ("entries", "blocks", "most"),
    [
        *[(20_000, 1, ENTRY_BYTES), (22_000, 1, ENTRY_BYTES), (30_000, 1, ENTRY_BYTES)],
        *[(22_000, 2, 320), (22_000, 8, 115), (22_000, 100, 55)],
    ],
)
def test_a_full_index_takes_no_more_memory_than_the_setting_says(entries: int, blocks: int, most: int) -> None:
    """`routing.prefix_memory` is divided by ENTRY_BYTES; prompts of a single block take most, as each is a piece.

    22,000 is just over a size at which a dict of as many pieces grows.
    """
    rng, index = random.Random(3), PrefixIndex(max_entries=entries)
    cache = index.join()
    tracemalloc.start()
    for _ in range(2 * entries // blocks):
        use(cache, tuple(rng.getrandbits(64) for _ in range(blocks)))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.entries == entries
    assert taken / entries < most


def test_pieces_of_one_block_each_take_no_more_memory_than_the_setting_says() -> None:
    """Each prompt goes one block further than the one before."""
    index = PrefixIndex(max_entries=1000)
    cache = index.join()
    keys = tuple(2**60 + n for n in range(1000))
    tracemalloc.start()
    for n in range(1, 1001):
        use(cache, keys[:n])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (len(index), index.entries) == (1000, 1000)
    assert taken / 1000 < ENTRY_BYTES


def test_the_index_has_a_hard_cap() -> None:
    """Pins cannot be evicted; so a prompt's end is left out rather than the bound."""
    index = PrefixIndex(max_entries=4)
    one, two = index.join(), index.join()
    first, second = one.pin((1, 2, 3))[1], two.pin((1, 2, 3))[1]
    assert (first.end, second.end) == (3, 1)
    assert index.entries == 4
    assert one.unpin(first) == 3
    depth, third = one.pin((7, 8))
    assert (depth, third.end) == (0, 2), "its own idle blocks make room"
    assert two.unpin(second) == 1
    assert index.entries == 4


class IndexMachine(RuleBasedStateMachine):
    """Against a model of lists and sets: matches, pins, order of eviction, bounds."""

    @initialize(max_entries=st.integers(1, 60))
    def start(self, max_entries: int) -> None:
        self.index = PrefixIndex(max_entries=max_entries)
        self.caches: list[EndpointCache] = []
        self.idle: list[list[object]] = []
        self.pins: list[list[tuple[Node, Keys]]] = []
        """By cache: of each request in flight the end and the pinned keys."""

    prompts = st.lists(st.integers(0, 2), max_size=12).map(chained)
    which = st.integers(0, 5)

    def pinned(self, n: int) -> set[object]:
        return {key for _, keys in self.pins[n] for key in keys}

    @rule()
    def join(self) -> None:
        if len(self.caches) < 6:
            self.caches.append(self.index.join())
            self.idle.append([])
            self.pins.append([])

    @rule(n=which, keys=prompts)
    def pin(self, n: int, keys: Keys) -> None:
        if n >= len(self.caches):
            return
        here = self.pinned(n) | set(self.idle[n])
        matched = next((depth for depth, key in enumerate(keys) if key not in here), len(keys))
        got, end = self.caches[n].pin(keys)
        assert got == min(matched, end.end)
        total = sum(len(self.pinned(m)) + len(self.idle[m]) for m in range(len(self.caches)))
        taken: list[object] = []
        for key in keys:  # the same, slowly
            if key in self.idle[n]:
                self.idle[n].remove(key)
            elif key not in self.pinned(n) | set(taken):
                if total >= self.index.max_entries:
                    if not self.idle[n]:
                        break
                    self.idle[n].pop(0)
                else:
                    total += 1
            taken.append(key)
        assert end.end == len(taken)
        self.pins[n].append((end, tuple(taken)))

    @rule(n=which, pick=st.integers(0, 100))
    def unpin(self, n: int, pick: int) -> None:
        if n >= len(self.caches) or not self.pins[n]:
            return
        end, keys = self.pins[n].pop(pick % len(self.pins[n]))
        freed = [key for key in reversed(keys) if key not in self.pinned(n)]
        assert self.caches[n].unpin(end) == len(freed)
        self.idle[n] += freed

    @rule(n=which, blocks=st.integers(0, 20))
    def trim(self, n: int, blocks: int) -> None:
        if n < len(self.caches):
            self.caches[n].trim(blocks)
            while self.idle[n] and len(self.pinned(n)) + len(self.idle[n]) > blocks:
                self.idle[n].pop(0)

    @rule(n=which, renew=st.booleans())
    def lose(self, n: int, renew: bool) -> None:
        if n >= len(self.caches):
            return
        old, pins = self.caches[n], self.pins[n]
        self.idle[n], self.pins[n] = [], []
        if renew:
            self.caches[n] = self.index.renew(old)
        else:
            self.index.leave(old)
            del self.caches[n], self.idle[n], self.pins[n]
        assert [old.unpin(end) for end, _ in pins] == [0] * len(pins)

    @rule(keys=prompts)
    def match(self, keys: Keys) -> None:
        depths = self.index.match(keys)
        expected = [0] * self.index.width
        for n, cache in enumerate(self.caches):
            here = self.pinned(n) | set(self.idle[n])
            expected[cache.member_id] = next((d for d, key in enumerate(keys) if key not in here), len(keys))
            in_use = next((d for d, key in enumerate(keys) if key not in self.pinned(n)), len(keys))
            assert cache.pinned_depth(keys) == in_use
        assert depths == expected
        assert self.index.longest(keys) == max(expected, default=0)

    @invariant()
    def counts_are_right_and_bounded(self) -> None:
        sizes = [len(self.pinned(n)) + len(self.idle[n]) for n in range(len(self.caches))]
        assert [cache.size for cache in self.caches] == sizes
        assert [cache.pinned for cache in self.caches] == [len(self.pinned(n)) for n in range(len(self.caches))]
        assert self.index.entries == sum(sizes) <= self.index.max_entries
        assert len(self.index) <= sum(sizes)
        assert self.index.width <= 6


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=50)

steps = st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(0, 5), max_size=8).map(tuple))


@given(st.lists(steps, max_size=60), st.integers(1, 30))
@example([(0, 1, (0, 1, 0)), (0, 1, (0, 1))], 4)
def test_forged_keys_are_only_wrong_guesses(done: list[tuple[int, int, Keys]], max_entries: int) -> None:
    """Keys that stand for several beginnings, or come twice in a prompt: counts stay right, and all of it can go."""
    index = PrefixIndex(max_entries=max_entries)
    caches = [index.join() for _ in range(3)]
    running: list[tuple[EndpointCache, Node]] = []
    for what, n, keys in done:
        if what < 2:
            depth, end = caches[n].pin(keys)
            assert depth <= end.end <= len(keys)
            running.append((caches[n], end))
        elif what == 2 and running:
            cache, end = running.pop(n % len(running))
            cache.unpin(end)
        else:
            caches[n].trim(len(keys))
        assert index.entries == sum(cache.size for cache in caches) <= max_entries
        assert all(0 <= cache.pinned <= cache.size for cache in caches)
        assert all(depth <= len(keys) for depth in index.match(keys))
    for cache, end in running:
        cache.unpin(end)
    for cache in caches:
        cache.trim(0)
    assert (index.entries, len(index)) == (0, 0)


def test_a_prefix_is_in_demand_by_its_requests_in_flight_for_each_copy() -> None:
    index = PrefixIndex()
    one, two = index.join(), index.join()
    ends = [one.pin((1, 2, 10 + n))[1] for n in range(4)]
    assert index.demanded((1, 2, 99), 4.0) == 2
    assert index.demanded((1, 2, 99), 5.0) == 0
    assert index.demanded((1, 2, 10), 1.0) == 3, "its own block as well"
    two.unpin(two.pin((1, 2, 20))[1])
    assert index.demanded((1, 2, 99), 4.0) == 0, "there are two copies now"
    assert index.demanded((1, 2, 99), 2.0) == 2
    index.renew(one)
    assert index.demanded((1, 2, 99), 0.0) == 0, "the engine restarted: none of them is there"
    for end in ends:
        one.unpin(end)
    last = two.pin((1, 2, 20))[1]
    assert index.demanded((1, 2, 99), 1.0) == 2
    two.unpin(last)
    assert index.demanded((1, 2, 99), 0.0) == 0, "nothing is in flight"
