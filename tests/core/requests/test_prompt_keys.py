"""Prompts become bytes, keys and matches: what an endpoint is believed to have cached."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests import prompt_keys as prefix
from lbproxy.core.requests.prompt_keys import flatten, hash_prompt

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
