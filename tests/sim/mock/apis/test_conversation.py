# SPDX-License-Identifier: Apache-2.0
"""One conversation is one prompt, whichever API it comes by; and what stands for images and tools."""

from __future__ import annotations

import base64
import struct

import pytest

from lbproxy.sim.mock.apis import chat, media, messages, responses
from lbproxy.sim.mock.apis.fields import EngineError, Json, canonical
from lbproxy.sim.mock.apis.tools import example

SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + struct.pack(">II", 560, 280) + b"\x08\x02\x00\x00\x00"
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()

CHAT: Json = {
    "tools": [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": URL}}],
        },
        {
            "role": "assistant",
            "reasoning": "Hm",
            "content": "I will ask.",
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"days": 2, "city": "Köln"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ],
}
RESPONSES: Json = {
    "tools": [{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}],
    "instructions": "Be short.",
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": URL}],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I will ask."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city":"Köln","days":2}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"role": "user", "content": "So?"},
    ],
}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 5,
    "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=4711;"},
        {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL[22:]}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "I will ask."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln", "days": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ],
}


def test_one_conversation_is_one_prompt_through_each_api() -> None:
    (by_chat,) = chat.parse_chat(CHAT)[0].prompts
    assert responses.parse(RESPONSES).call.prompts == (by_chat,)
    assert messages.parse(MESSAGES).prompts == (by_chat,)
    assert b"billing" not in by_chat
    assert by_chat.index(b"weather") < by_chat.index(b"Be short.")


def test_an_image_takes_tokens_by_its_size_and_stands_for_its_bytes() -> None:
    def prompt(url: str) -> bytes:
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return chat.parse_chat({"messages": [{"role": "user", "content": parts}]})[0].prompts[0]

    without = len(prompt("")) - 4 * media.UNKNOWN_IMAGE_TOKENS
    assert len(prompt(URL)) - without == 4 * (560 * 280 // 784)
    assert prompt(URL) == prompt(URL.replace("png", "any"))
    assert prompt("http://a/1.png") != prompt("http://a/2.png")


JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08" + struct.pack(">HH", 784, 1000)
WEBP = b"RIFF\x00\x00\x00\x00WEBPVP8X" + b"\0" * 8 + (999).to_bytes(3, "little") + (783).to_bytes(3, "little")


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        (JPEG, 1000),
        (WEBP, 1000),
        (PNG, 200),
        (PNG[:16] + struct.pack(">II", 2, 2), 64),
        (PNG[:16] + struct.pack(">II", 2**31, 2**31), 16_384),
        (b"", 1024),
        (PNG[:20], 1024),
        (b"\xff\xd8" + b"\xff\xe0\x00\x00" * 9, 1024),
    ],
)
def test_headers_of_images(data: bytes, tokens: int) -> None:
    assert media.image_tokens(data) == tokens


def test_images_in_one_request_are_bounded() -> None:
    parts = [{"type": "image_url", "image_url": "x"}] * 257
    with pytest.raises(EngineError, match="At most 256"):
        chat.parse_chat({"messages": [{"role": "user", "content": parts}]})


def test_arguments_fit_their_schema() -> None:
    schema: Json = {
        "type": "object",
        "required": ["a", "b", "c", "d", "e", "f", "g"],
        "properties": {
            "a": {"type": "string", "minLength": 10, "maxLength": 12},
            "b": {"type": "integer", "minimum": 3, "maximum": 4},
            "c": {"enum": ["x", "é"]},
            "d": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "e": {"type": "array", "items": {"$ref": "#/$defs/inner"}, "minItems": 2},
            "f": {"const": 7},
            "g": {"type": ["null", "number"]},
            "not-required": {"type": "string"},
        },
        "$defs": {"inner": {"type": "object", "properties": {"n": {"type": "number"}}}},
    }
    found = example(schema, "key")
    assert isinstance(found, dict)
    assert sorted(found) == ["a", "b", "c", "d", "e", "f", "g"]
    assert 10 <= len(found["a"]) <= 12
    assert found["b"] in (3, 4)
    assert found["c"] in ("x", "é")
    assert isinstance(found["d"], bool)
    assert [set(one) for one in found["e"]] == [{"n"}, {"n"}]
    assert (found["f"], type(found["g"])) == (7, float)
    assert found == example(schema, "key")
    assert found != example(schema, "another")


@pytest.mark.parametrize(
    "schema", [None, 5, {"$ref": "#"}, {"$ref": "#/nothing"}, {"type": "array", "items": {"$ref": "#"}}, {"type": 5}]
)
def test_schemas_that_make_no_sense_are_bounded(schema: object) -> None:
    assert len(canonical(example(schema, "key"))) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {**CHAT, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {**CHAT, "tool_choice": 5},
        {"messages": [], "tool_choice": "required"},
        {"messages": [], "tools": [5]},
        {"messages": [], "tools": [{"type": "function"}]},
        {"messages": [], "tools": [{"type": "function", "function": {"name": 5}}]},
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
    ],
)
def test_tools_that_are_wrong_are_refused(fields: Json) -> None:
    with pytest.raises(EngineError) as caught:
        chat.parse_chat(fields)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "change",
    [
        *({"model": None}, {"max_tokens": 0}, {"max_tokens": None}, {"messages": [{"role": "robot"}]}),
        *({"messages": [5]}, {"tool_choice": {"type": "tool", "name": "x"}}, {"tool_choice": []}),
    ],
)
def test_bad_messages_are_refused(change: Json) -> None:
    with pytest.raises(EngineError) as caught:
        messages.parse({**MESSAGES, **change})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "change",
    [
        *({"input": None}, {"input": 5}, {"input": [5]}, {"input": [{"content": "x"}]}, {"max_output_tokens": 0}),
        *({"tools": [5]}, {"tool_choice": {"type": "x"}}, {"metadata": 5}),
    ],
)
def test_bad_responses_are_refused(change: Json) -> None:
    with pytest.raises(EngineError) as caught:
        responses.parse({**RESPONSES, **change})
    assert caught.value.status == 400


def test_json_that_is_nested_deeply_is_a_400() -> None:
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(EngineError, match="nested too deeply"):
        chat.parse_chat({"messages": [], "tools": [{"function": {"name": "x", "parameters": {"a": deep}}}]})
