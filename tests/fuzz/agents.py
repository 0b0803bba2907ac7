# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/responses and /v1/messages: the `model` that lbproxy sees against json.loads's; each is flattened."""

from __future__ import annotations

import json
import random

from lbproxy.core.requests.media import FILLER_BYTES
from lbproxy.core.requests.openai import read_json_body
from lbproxy.core.requests.outcome import LbError
from lbproxy.core.requests.prompt_keys import MAX_PROMPT_BYTES
from lbproxy.core.requests.prompts import chat_prompt, messages_prompt, responses_prompt
from tests.fuzz import bodies
from tests.fuzz.oracle import DifferenceError

NAME = "agents"
_PNG = "iVBORw0KGgoAAAANSUhEUgAABAAAAAMACAIAAAAAAAAA"
SEEDS = [
    json.dumps(body).encode()
    for body in (
        {
            "model": "m",
            "instructions": "You code.",
            "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "shell", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64," + _PNG}]},
            ],
            "previous_response_id": "resp_1",
            "store": True,
            "max_output_tokens": 7,
            "prompt_cache_key": "key",
        },
        {
            "model": "m",
            "max_tokens": 7,
            "stream": True,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [{"name": "read", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "fix it"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "file"}]},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}},
                        {"type": "document", "source": {"type": "text", "data": "law"}},
                    ],
                },
            ],
        },
        {"model": "m", "input": "hi", "stream": True, "store": False},
        {"model": "m", "system": "be brief", "messages": [{"role": "user", "content": "hi"}]},
    )
]
TOKENS = [
    *bodies.TOKENS,
    *(b'"content":', b'"type":"tool_result"', b'"type":"image"', b'"source":', b'"data":"', b'"text":', b'"input":'),
    *(b'"system":', b'"tools":', b'"instructions":', b'"image_url":', b'"url":', b'"role":', b'"output":'),
    *(b'{"type":"tool_result","content":[' * 300, b"data:image/jpeg;base64,/9j/", b"UklGRiQAAABXRUJQVlA4"),
    *(b"previous_response_id", b"cache_control", b"x-anthropic-billing-header:", b"resp_", b"[{}]", b'[""]'),
]


def check(data: bytes, rng: random.Random) -> str:
    """See the module."""
    label = bodies.check(data, rng)
    try:
        facts = read_json_body(data)
    except LbError:
        return label
    for flatten in (chat_prompt, messages_prompt, responses_prompt):
        prompt = flatten(facts.fields)
        if len(prompt.text) > MAX_PROMPT_BYTES or prompt.media_tokens * FILLER_BYTES > len(prompt.text):
            raise DifferenceError("a prompt is out of its bounds")
    return label
