"""Prompts become bytes, keys and matches: what an endpoint is believed to have cached."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lbproxy.core import prefix
from lbproxy.core.prefix import ENTRY_BYTES, EndpointCache, PrefixIndex, flatten, hash_prompt

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
CONTENT = st.text(max_size=30) | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=20))
    | st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, st.text(max_size=20)),
    max_size=3,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT},
    optional={"tool_calls": st.just([{"function": {"name": "f", "arguments": "{}"}}])},
)


# --- From a body to bytes ---------------------------------------------------------------------------------------------


@given(messages=st.lists(MESSAGE, max_size=8), cut=st.integers(0, 8))
def test_the_next_turn_extends_the_last(messages: list[Any], cut: int) -> None:
    """Otherwise a conversation would look new at each turn, and lose its cache."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = flatten({"messages": messages, "tools": tools})
    assert whole.startswith(flatten({"messages": messages[:cut], "tools": tools}))


@given(
    body=st.dictionaries(st.sampled_from(["messages", "prompt", "tools", "system"]), JSON, max_size=4),
    messages=st.none() | st.lists(JSON | st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON)),
)
def test_any_json_can_be_flattened(body: dict[str, object], messages: list[object] | None) -> None:
    """What a client sends is not trusted: a wrong type must not become a 500."""
    if messages is not None:
        body["messages"] = messages
    assert isinstance(flatten(body), bytes)


@given(messages=st.lists(MESSAGE, max_size=6))
def test_messages_of_plain_texts_take_a_short_way_to_the_same_bytes(messages: list[Any]) -> None:
    """Otherwise one and the same conversation would have two beginnings."""
    short = flatten({"messages": messages})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "FEW_MESSAGES", -1)
        assert flatten({"messages": messages}) == short


def test_nothing_that_came_through_json_is_too_strange() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for value in (deep, 10**400, float("nan"), "\ud800", {"a": {"\udfff": deep}}):
        for body in ({"messages": [{"role": "user", "content": value}]}, {"prompt": value}, {"messages": value}):
            flatten(body)
        flatten({"messages": [{"role": value, "content": [value], "tool_calls": value}], "tools": value})


def test_what_is_said_is_in_it_and_what_is_shown_is_a_hash() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    flat = flatten({"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}]})
    assert b"user" in flat
    assert b"what is it" in flat
    assert len(flat) < 100
    other = json.loads(json.dumps(image).replace("AAAA", "AAAB"))
    assert flatten({"messages": [{"role": "user", "content": [image]}]}) != flatten(
        {"messages": [{"role": "user", "content": [other]}]}
    )


def test_a_text_and_a_list_of_one_text_are_the_same() -> None:
    texts = ["hello", [{"type": "text", "text": "hello"}], ["hello"]]
    assert len({flatten({"messages": [{"role": "user", "content": content}]}) for content in texts}) == 1


def test_roles_tools_and_calls_matter() -> None:
    user = {"role": "user", "content": "x"}
    bodies: list[dict[str, object]] = [
        {"messages": [user]},
        {"messages": [{**user, "role": "system"}]},
        {"messages": [user], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [user], "tools": [{"type": "function", "function": {"name": "g"}}]},
        {"messages": [{**user, "tool_calls": [{"id": "1"}]}]},
    ]
    assert len({flatten(body) for body in bodies}) == len(bodies)


def test_completions_take_text_texts_and_token_ids() -> None:
    assert flatten({"prompt": "abc"}) == b"abc"
    assert flatten({"prompt": ["abc", "de"]}).startswith(b"abc")
    assert len(flatten({"prompt": list(range(100))})) == 400
    assert flatten({"prompt": [[1, 2, 3], [4]]}).startswith(flatten({"prompt": [1, 2, 3]}))
    assert flatten({"input": "an embedding"}) == b""
    strangers: list[object] = [[-1], [1.5], [2**40], [None], [[None]], {}, 3, True, None, [[[1]]]]
    for strange in strangers:
        assert len(flatten({"prompt": strange})) <= 4


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_PROMPT_BYTES", 1000)
    monkeypatch.setattr(prefix, "MAX_PIECES", 50)
    assert len(flatten({"prompt": "x" * 5000})) == 1000
    assert len(flatten({"prompt": ["x" * 999] * 5000})) == 1000
    assert flatten({"messages": [{"content": "y"}] * 500}).count(b"y") <= 50
    assert flatten({"messages": [{"content": ["y"] * 500}]}).count(b"y") <= 50


# --- From bytes to keys -----------------------------------------------------------------------------------------------


def test_keys_are_one_for_each_full_block() -> None:
    assert hash_prompt(b"x" * 1023, model="m") == []
    assert len(hash_prompt(b"x" * 1024, model="m")) == 1
    assert len(hash_prompt(b"x" * 5000, model="m")) == 4
    assert len(hash_prompt(b"x" * 5000, model="m", block_bytes=256)) == 19


def test_equal_beginnings_have_equal_keys_up_to_where_they_part() -> None:
    one, two = b"a" * 4096 + b"b" * 1024, b"a" * 4096 + b"c" * 1024
    keys, other = hash_prompt(one, model="m"), hash_prompt(two, model="m")
    assert keys[:4] == other[:4]
    assert keys[4] != other[4]
    assert len(set(keys)) == 5, "equal blocks in different places are different"


def test_equal_text_behind_different_beginnings_is_not_the_same() -> None:
    tail = b"t" * 2048
    assert not set(hash_prompt(b"a" * 1024 + tail, model="m")) & set(hash_prompt(b"b" * 1024 + tail, model="m"))


def test_model_adapter_and_salt_part_the_caches() -> None:
    names: list[dict[str, str | None]] = [
        {"model": "m"},
        {"model": "n"},
        {"model": None},
        {"model": "m", "adapter": "a"},
        {"model": "m", "salt": "a"},
        {"model": "m", "adapter": "a", "salt": "a"},
        {"model": "m-", "adapter": "-a"},
    ]
    keys = {tuple(hash_prompt(b"x" * 1024, **name)) for name in names}  # type: ignore[arg-type]
    assert len(keys) == len(names)


# --- From keys to endpoints -------------------------------------------------------------------------------------------


def use(cache: EndpointCache, keys: list[int]) -> None:
    """A request that is over."""
    cache.unpin(keys, cache.pin(keys)[1])


def test_a_match_is_without_gaps_and_per_endpoint() -> None:
    index = PrefixIndex()
    one, two, three = index.join(), index.join(), index.join()
    use(one, [1, 2, 3])
    use(two, [1, 2])
    use(three, [2, 3, 4])
    assert index.match([1, 2, 3, 4]) == [3, 2, 0]
    assert index.match([2, 3]) == [2, 1, 2]
    assert index.longest([1, 2, 3, 4]) == 3
    assert index.match([]) == [0, 0, 0]
    assert index.match([9, 1]) == [0, 0, 0]


def test_tails_go_before_the_beginnings_that_others_share() -> None:
    index = PrefixIndex()
    cache = index.join()
    use(cache, [1, 2, 3, 4])
    cache.trim(2)
    assert index.match([1, 2, 3, 4]) == [2]


def test_what_was_used_last_stays_longest() -> None:
    index = PrefixIndex()
    cache = index.join()
    use(cache, [1])
    use(cache, [2])
    use(cache, [1])
    cache.trim(1)
    assert index.match([1]) == [1]
    assert index.match([2]) == [0]


def test_what_is_in_use_is_never_evicted() -> None:
    index = PrefixIndex()
    cache = index.join()
    assert cache.pin([1, 2]) == (0, 2)
    assert cache.pin([1, 2, 3]) == (2, 3)
    cache.trim(0)
    assert (cache.size, cache.pinned) == (3, 3)
    assert cache.unpin([1, 2, 3], 3) == 1, "the first request still uses the others"
    cache.trim(0)
    assert cache.size == 2


def test_slots_are_used_again_and_old_caches_cannot_speak() -> None:
    index = PrefixIndex()
    one, two = index.join(), index.join()
    use(two, [1])
    one.pin([1, 2])
    index.leave(one)
    assert index.match([1, 2]) == [0, 1]
    new = index.join()
    assert (new.slot, index.width) == (one.slot, 2)
    assert one.unpin([1, 2], 2) == 0
    assert one.pin([5]) == (0, 0)
    assert index.match([5]) == [0, 0]
    again = index.renew(two)
    assert again.slot == two.slot
    assert not index.masks
    assert index.entries == 0


def test_free_slots_are_filled_from_the_bottom() -> None:
    """So that masks stay as short as the pool is."""
    index = PrefixIndex()
    caches = [index.join() for _ in range(6)]
    for slot in (4, 1, 3):
        index.leave(caches[slot])
    assert [index.join().slot for _ in range(4)] == [1, 3, 4, 6]


@pytest.mark.parametrize("entries", [20_000, 22_000, 30_000])
def test_a_full_index_takes_no_more_memory_than_the_setting_says(entries: int) -> None:
    """`routing.prefix_memory` is divided by ENTRY_BYTES; hash tables in which keys come and go take most."""
    rng, index = random.Random(3), PrefixIndex(max_entries=entries)
    cache = index.join()
    tracemalloc.start()
    for _ in range(4 * entries // 100):
        keys = [rng.getrandbits(64) for _ in range(100)]
        cache.unpin(keys, cache.pin(keys)[1])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.entries == entries
    assert ENTRY_BYTES / 3 < taken / entries < ENTRY_BYTES


def test_the_index_has_a_hard_cap() -> None:
    """Pins cannot be evicted; so a prompt's end is left out rather than the bound."""
    index = PrefixIndex(max_entries=4)
    one, two = index.join(), index.join()
    assert one.pin([1, 2, 3]) == (0, 3)
    assert two.pin([1, 2, 3]) == (0, 1)
    assert index.entries == 4
    assert one.unpin([1, 2, 3], 3) == 3
    assert one.pin([7, 8]) == (0, 2), "its own idle blocks make room"
    assert two.unpin([1, 2, 3], 1) == 1
    assert index.entries == 4


class IndexMachine(RuleBasedStateMachine):
    """Against a model of lists and sets: matches, pins, order of eviction, bounds."""

    @initialize(max_entries=st.integers(1, 60))
    def start(self, max_entries: int) -> None:
        self.index = PrefixIndex(max_entries=max_entries)
        self.caches: list[EndpointCache] = []
        self.idle: list[list[int]] = []
        self.pins: list[list[list[int]]] = []
        """By cache: the pinned keys of each request in flight."""

    chains = st.lists(st.integers(0, 30), max_size=12, unique=True)
    which = st.integers(0, 5)

    def pinned(self, n: int) -> set[int]:
        return {key for keys in self.pins[n] for key in keys}

    @rule()
    def join(self) -> None:
        if len(self.caches) < 6:
            self.caches.append(self.index.join())
            self.idle.append([])
            self.pins.append([])

    @rule(n=which, keys=chains)
    def pin(self, n: int, keys: list[int]) -> None:
        if n >= len(self.caches):
            return
        here = self.pinned(n) | set(self.idle[n])
        matched = next((depth for depth, key in enumerate(keys) if key not in here), len(keys))
        got, held = self.caches[n].pin(keys)
        assert got == min(matched, held)
        total = sum(len(self.pinned(m)) + len(self.idle[m]) for m in range(len(self.caches)))
        taken: list[int] = []
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
        assert held == len(taken)
        self.pins[n].append(taken)

    @rule(n=which, pick=st.integers(0, 100))
    def unpin(self, n: int, pick: int) -> None:
        if n >= len(self.caches) or not self.pins[n]:
            return
        keys = self.pins[n].pop(pick % len(self.pins[n]))
        freed = [key for key in reversed(keys) if key not in self.pinned(n)]
        assert self.caches[n].unpin([*keys, 99], len(keys)) == len(freed)
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
        old = self.caches[n]
        self.idle[n], self.pins[n] = [], []
        if renew:
            self.caches[n] = self.index.renew(old)
        else:
            self.index.leave(old)
            del self.caches[n], self.idle[n], self.pins[n]
        assert old.unpin([1], 1) == 0

    @rule(keys=chains)
    def match(self, keys: list[int]) -> None:
        depths = self.index.match(keys)
        expected = [0] * self.index.width
        for n, cache in enumerate(self.caches):
            here = self.pinned(n) | set(self.idle[n])
            expected[cache.slot] = next((d for d, key in enumerate(keys) if key not in here), len(keys))
        assert depths == expected
        assert self.index.longest(keys) == max(expected, default=0)

    @invariant()
    def counts_are_right_and_bounded(self) -> None:
        sizes = [len(self.pinned(n)) + len(self.idle[n]) for n in range(len(self.caches))]
        assert [cache.size for cache in self.caches] == sizes
        assert [cache.pinned for cache in self.caches] == [len(self.pinned(n)) for n in range(len(self.caches))]
        assert self.index.entries == sum(sizes) <= self.index.max_entries
        assert len(self.index.masks) <= sum(sizes)
        assert self.index.width <= 6


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
