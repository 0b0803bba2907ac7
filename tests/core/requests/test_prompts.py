# SPDX-License-Identifier: Apache-2.0
"""Bodies of every API become prompts: bytes that begin alike where the prompts do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests import prompts
from lbproxy.core.requests.media import FILLER_BYTES, IMAGE_TOKENS
from lbproxy.core.requests.prompts import (
    PromptFormat,
    chat_prompt,
    completion_prompt,
    generate_prompt,
    infill_prompt,
    messages_prompt,
    responses_prompt,
    tokens_prompt,
)

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


APIS: tuple[PromptFormat, ...] = (
    chat_prompt,
    messages_prompt,
    responses_prompt,
    completion_prompt,
    infill_prompt,
    generate_prompt,
)


def _chat(body: dict[str, Any]) -> bytes:
    return chat_prompt(body).text


def _completion(body: dict[str, Any]) -> bytes:
    return completion_prompt(body).text


# --- From a body to bytes ---------------------------------------------------------------------------------------------


@given(messages=st.lists(MESSAGE, max_size=8), cut=st.integers(0, 8))
def test_the_next_turn_extends_the_last(messages: list[Any], cut: int) -> None:
    """Otherwise a conversation would look new at each turn, and lose its cache."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = _chat({"messages": messages, "tools": tools})
    assert whole.startswith(_chat({"messages": messages[:cut], "tools": tools}))


@given(
    body=st.dictionaries(
        st.sampled_from(["messages", "prompt", "tools", "system", "instructions", "input", "text", "input_extra"]),
        JSON,
        max_size=4,
    ),
    messages=st.none() | st.lists(JSON | st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON)),
)
def test_any_json_can_be_flattened(body: dict[str, object], messages: list[object] | None) -> None:
    """What a client sends is not trusted: a wrong type must not become a 500."""
    if messages is not None:
        body["messages"] = messages
    for flatten in APIS:
        assert isinstance(flatten(body).text, bytes)


@given(messages=st.lists(MESSAGE, max_size=6))
def test_messages_of_plain_texts_take_a_short_way_to_the_same_bytes(messages: list[Any]) -> None:
    """Otherwise one and the same conversation would have two beginnings."""
    short = _chat({"messages": messages})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "FEW_MESSAGES", -1)
        assert _chat({"messages": messages}) == short


def test_nothing_that_came_through_json_is_too_strange() -> None:
    deep: object = 1
    result: object = "x"
    for _ in range(900):
        deep = [deep]
        result = {"type": "tool_result", "tool_use_id": "t", "content": [result]}
    for value in (deep, [result], 10**400, float("nan"), "\ud800", {"a": {"\udfff": deep}}):
        for body in ({"messages": [{"role": "user", "content": value}]}, {"prompt": value}, {"messages": value}):
            for flatten in APIS:
                flatten(body)
                flatten({"input": value, "instructions": value, "system": value, "tools": value, "input_ids": value})
                flatten({"input": [value, {"type": "reasoning", "summary": value}, {"type": value, "output": value}]})
        _chat({"messages": [{"role": value, "content": [value], "tool_calls": value}], "tools": value})


def test_text_stands_in_it_and_an_image_as_its_hash_repeated() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    made = chat_prompt({"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}]})
    assert b"user" in made.text
    assert b"what is it" in made.text
    assert made.media_tokens == IMAGE_TOKENS
    assert len(made.text) == len("|user|what is it") + FILLER_BYTES * IMAGE_TOKENS
    other = json.loads(json.dumps(image).replace("AAAA", "AAAB"))
    assert _chat({"messages": [{"role": "user", "content": [image]}]}) != _chat(
        {"messages": [{"role": "user", "content": [other]}]}
    )


def test_a_text_and_a_list_of_one_text_are_the_same() -> None:
    texts = ["hello", [{"type": "text", "text": "hello"}], ["hello"]]
    assert len({_chat({"messages": [{"role": "user", "content": content}]}) for content in texts}) == 1


def test_roles_tools_and_calls_matter() -> None:
    user = {"role": "user", "content": "x"}
    bodies: list[dict[str, object]] = [
        {"messages": [user]},
        {"messages": [{**user, "role": "system"}]},
        {"messages": [user], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [user], "tools": [{"type": "function", "function": {"name": "g"}}]},
        {"messages": [{**user, "tool_calls": [{"id": "1"}]}]},
    ]
    assert len({_chat(body) for body in bodies}) == len(bodies)


def test_completions_take_text_texts_and_token_ids() -> None:
    assert _completion({"prompt": "abc"}) == b"abc"
    assert _completion({"prompt": ["abc", "de"]}).startswith(b"abc")
    assert len(_completion({"prompt": list(range(100))})) == 400
    assert _completion({"prompt": [[1, 2, 3], [4]]}).startswith(_completion({"prompt": [1, 2, 3]}))
    assert _completion({"input": "an embedding"}) == b""
    strangers: list[object] = [[-1], [1.5], [2**40], [None], [[None]], {}, 3, True, None, [[[1]]]]
    for strange in strangers:
        assert len(_completion({"prompt": strange})) <= 4


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 1000)
    monkeypatch.setattr(prompts, "MAX_PIECES", 50)
    assert len(_completion({"prompt": "x" * 5000})) == 1000
    assert len(_completion({"prompt": ["x" * 999] * 5000})) == 1000
    assert _chat({"messages": [{"content": "y"}] * 500}).count(b"y") <= 50
    assert _chat({"messages": [{"content": ["y"] * 500}]}).count(b"y") <= 50


# --- The APIs of agents -----------------------------------------------------------------------------------------------


TOOLS = [{"name": "read", "description": "Reads a file", "input_schema": {"type": "object"}}]


def _anthropic(turns: int, *, billing: str = "cch=1", marked: int = -1) -> bytes:
    """A conversation of an agent as Claude Code sends it: a billing line that differs, and a mark that moves."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        said = [{"type": "thinking", "thinking": f"hm {turn}"}, {"type": "tool_use", "id": f"t{turn}", "name": "read"}]
        found: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": f"t{turn}", "content": [{"type": "text", "text": f"file {turn}"}]}
        ]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
    messages.insert(0, {"role": "user", "content": [{"type": "text", "text": "fix it"}]})
    messages[marked]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; {billing};"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
    ]
    tools = [*TOOLS[:-1], {**TOOLS[-1], "cache_control": {"type": "ephemeral"}}] if turns % 2 else TOOLS
    return messages_prompt({"system": system, "tools": tools, "messages": messages}).text


def test_a_turn_of_claude_code_extends_the_last_whatever_its_marks_and_billing_line_say() -> None:
    """On one server the billing line alone took a turn from 3.65 s to 50 s (llama.cpp issue 20623)."""
    for turns in range(1, 6):
        later = _anthropic(turns + 1, billing=f"cch={turns}")
        assert later.startswith(_anthropic(turns, billing="cch=zz"))
        assert later == _anthropic(turns + 1, marked=0)
        assert b"cch" not in later
        assert f"file {turns}".encode() in later
        assert b"hm 1" in later


def test_a_billing_line_is_left_out_where_vllm_leaves_it_out() -> None:
    """In a text vLLM 0.32 keeps it, so that nothing behind it is ever cached."""
    bodies: list[dict[str, Any]] = [
        {"system": "Be brief.", "messages": []},
        {"system": [{"type": "text", "text": "Be brief."}], "messages": []},
        {"system": ["x-anthropic-billing-header: cch=2;", "Be brief."], "messages": []},
    ]
    assert {messages_prompt(body).text for body in bodies} == {b"\x1esystem\nBe brief."}
    kept = {"system": "x-anthropic-billing-header: cch=1;\nBe brief.", "messages": []}
    assert b"cch=1" in messages_prompt(kept).text


def test_one_conversation_is_one_prompt_through_each_api() -> None:
    """So an application that changes its API finds its prefixes again."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat[1:]]
    items = [
        {"type": "message", "role": one["role"], "content": [{"type": "input_text", "text": one["content"]}]}
        for one in chat[1:]
    ]
    texts = {
        _chat({"messages": chat}),
        messages_prompt({"system": "Be brief.", "messages": chat[1:]}).text,
        messages_prompt({"system": "Be brief.", "messages": parts}).text,
        responses_prompt({"instructions": "Be brief.", "input": items}).text,
        responses_prompt({"instructions": "Be brief.", "input": chat[1:]}).text,
    }
    assert len(texts) == 1
    assert responses_prompt({"instructions": "Be brief.", "input": "Hi"}).text == _chat({"messages": chat[:2]})


def test_a_turn_of_codex_extends_the_last_with_and_without_the_ids_of_its_items() -> None:
    """A client that keeps the conversation itself may leave out what the server added to it."""
    tools = [{"type": "function", "name": "shell", "parameters": {"type": "object"}}]
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "fix it"}]}]
    before = b""
    for turn in range(5):
        call: dict[str, Any] = {
            "type": "function_call",
            "call_id": f"c{turn}",
            "name": "shell",
            "arguments": f'{{"n": {turn}}}',
        }
        thought: dict[str, Any] = {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": f"hm {turn}"}],
            "content": None,
        }
        output: dict[str, Any] = {"type": "function_call_output", "call_id": f"c{turn}", "output": f"file {turn}"}
        bare, full = (
            [thought, call, output],
            [{**one, "id": f"x{turn}", "status": "completed"} for one in (thought, call)],
        )
        flat = responses_prompt({"tools": tools, "instructions": "You code.", "input": [*items, *bare]}).text
        assert (
            flat
            == responses_prompt({"tools": tools, "instructions": "You code.", "input": [*items, *full, output]}).text
        )
        assert flat.startswith(before)
        assert f"file {turn}".encode() in flat
        items, before = [*items, *bare], flat


def test_what_differs_between_calls_of_tools_matters() -> None:
    call: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    inputs: list[list[dict[str, Any]]] = [
        [call],
        [{**call, "name": "g"}],
        [{**call, "arguments": '{"a": 1}'}],
        [{"type": "function_call_output", "call_id": "c", "output": "{}"}],
        [{"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "[]"}]}],
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "web_search_call", "action": {"query": "q"}}],
    ]
    assert len({responses_prompt({"input": one}).text for one in inputs}) == len(inputs)


def test_servers_own_routes_are_read() -> None:
    assert generate_prompt({"text": "abc"}).text == b"abc"
    assert len(generate_prompt({"input_ids": list(range(10))}).text) == 40
    assert tokens_prompt({"token_ids": [1, 2]}).text == generate_prompt({"input_ids": [1, 2]}).text
    assert tokens_prompt({"token_ids": "abc"}).text == b""
    assert completion_prompt({"prompt": "abc", "n_predict": 3}).text == b"abc"
    infill = infill_prompt({"input_prefix": "def f(", "input_suffix": "return", "input_extra": [{"text": "x"}]}).text
    assert infill.index(b"def f(") < infill.index(b"return")


PNG = "iVBORw0KGgoAAAANSUhEUgAABAAAAAMACAIAAAA"  # 1024 x 768


def test_an_image_counts_by_its_pixels_wherever_it_stands() -> None:
    """And in each API as much; twenty megabytes of base64 are no twenty megabytes of text."""
    payload = PNG + "A" * 200_000
    url = f"data:image/png;base64,{payload}"
    content: list[tuple[PromptFormat, dict[str, Any]]] = [
        (chat_prompt, {"type": "image_url", "image_url": {"url": url}}),
        (chat_prompt, {"type": "image_url", "image_url": url}),
        (messages_prompt, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}}),
        (
            messages_prompt,
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"data": payload}}]},
        ),
    ]
    for flatten, part in content:
        made = flatten({"messages": [{"role": "user", "content": [part]}]})
        assert made.media_tokens == 1024 * 768 // 784 // 4 * 4
        assert len(made.text) < 4200
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    assert responses_prompt({"input": [item]}).media_tokens == 1024 * 768 // 784 // 4 * 4


def test_an_image_that_is_a_url_keeps_its_place() -> None:
    one, other = ({"type": "image_url", "image_url": {"url": f"https://x/{name}.png"}} for name in "ab")
    texts = {_chat({"messages": [{"role": "user", "content": [image]}]}) for image in (one, other)}
    assert len(texts) == 2
    low = {"type": "image_url", "image_url": {"url": "https://x/a.png", "detail": "low"}}
    assert chat_prompt({"messages": [{"role": "user", "content": [low]}]}).media_tokens < IMAGE_TOKENS


def test_documents_of_text_are_text_and_others_count_by_their_bytes() -> None:
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the law"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "A" * 400_000}}
    audio = {"type": "input_audio", "input_audio": {"data": "A" * 400_000, "format": "wav"}}
    file = {"type": "input_file", "file_data": "data:application/pdf;base64," + "A" * 400_000}
    made = messages_prompt({"messages": [{"role": "user", "content": [text, pdf]}]})
    assert b"the law" in made.text
    assert made.media_tokens == 300
    assert chat_prompt({"messages": [{"role": "user", "content": [audio]}]}).media_tokens == 300
    assert responses_prompt({"input": [{"role": "user", "content": [file]}]}).media_tokens == 300
