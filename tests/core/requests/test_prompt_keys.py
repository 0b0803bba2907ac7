# SPDX-License-Identifier: Apache-2.0
"""Prompts become keys: equal ones mean equal prompts so far, in the same cache."""

from __future__ import annotations

from lbproxy.core.requests.prompt_keys import hash_prompt


def test_keys_are_one_for_each_full_block() -> None:
    assert hash_prompt(b"x" * 1023, model="m") == ()
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


def test_a_prompt_that_goes_on_has_the_keys_of_what_went_before() -> None:
    """A response that is stored stands for a prompt that is not sent again."""
    first = hash_prompt(b"a" * 3000, model="m")
    both = hash_prompt(b"b" * 2048, model="m", after=first)
    assert both[: len(first)] == first
    assert len(both) == len(first) + 2
    assert hash_prompt(b"b", model="m", after=first) == first
    assert hash_prompt(b"b" * 2048, model="m")[0] not in both
