# SPDX-License-Identifier: Apache-2.0
"""What a coding agent sends with each turn: tools, and the whole conversation, with marks for a cache."""

from __future__ import annotations

import json
from itertools import cycle, islice

TURNS = 13
"""Of three messages each, after the system prompt: 40 messages."""
LINES = (
    "    def step(self, data: bytes, at: int) -> int:",
    '        """Return where the message ends, or where this step does."""',
    "        for name, value in fields.items():",
    "            head[\"%s\"] = [one for one in values if one[0] != 'x']",
    "",
    "# It checks nothing else: who comes next refuses what is ambiguous.",
    '        raise ValueError(f"a bad trailer at {at}", {"at": at})',
)
SAID = "Reads a file and shows its lines, from the first one on or from any other one. "
PARAMETER = {"type": "string", "description": SAID}
SCHEMA = {"type": "object", "properties": dict.fromkeys(("path", "begin", "end"), PARAMETER)}
FUNCTIONS = [{"name": f"tool_{number}", "description": SAID * 4} for number in range(20)]
CACHED = {"cache_control": {"type": "ephemeral"}}


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def conversation(size_bytes: int, mark: str, path: str = CHAT) -> bytes:
    """A body for this path, which names model m and asks for six tokens. `mark` is in its last message."""
    short = _dumped("", mark, path)
    text = "\n".join(islice(cycle(LINES), (size_bytes - len(short)) // (3 * TURNS * 20)))
    grows = len(json.dumps(text)) - 2
    text = text[: len(text) * (size_bytes - len(short)) // (3 * TURNS * grows) - 3]
    body = _dumped(text, mark, path)
    return body[:-1] + b" " * max(0, size_bytes - len(body)) + body[-1:]


def _dumped(text: str, mark: str, path: str) -> bytes:
    body = {CHAT: _chat, MESSAGES: _messages, RESPONSES: _responses}[path](text, mark)
    return json.dumps({"model": "m", **body}).encode()


def _chat(text: str, mark: str) -> dict[str, object]:
    messages: list[object] = [{"role": "system", "content": [{"type": "text", "text": SAID * 20, **CACHED}]}]
    for number in range(TURNS):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "tool_1", "arguments": text}}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": text, **(CACHED if number == TURNS - 1 else {})}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text + (mark if number == TURNS - 1 else "")},
        ]
    tools = [{"type": "function", "function": one | {"parameters": SCHEMA}} for one in FUNCTIONS]
    return {"max_tokens": 6, "tools": tools, "messages": messages}


def _messages(text: str, mark: str) -> dict[str, object]:
    messages: list[object] = []
    for number in range(TURNS):
        result = {"type": "tool_result", "tool_use_id": f"call_{number - 1}", "content": text}
        said = {"type": "text", "text": text + (mark if number == TURNS - 1 else "")}
        call = {"type": "tool_use", "id": f"call_{number}", "name": "tool_1", "input": {"text": text}}
        messages += [{"role": "user", "content": [*([result] if number else []), said | CACHED]}]
        messages += [{"role": "assistant", "content": [call]}]
    tools = [one | {"input_schema": SCHEMA} for one in FUNCTIONS]
    system = [{"type": "text", "text": SAID * 20, **CACHED}]
    return {"max_tokens": 6, "system": system, "tools": tools, "messages": messages}


def _responses(text: str, mark: str) -> dict[str, object]:
    items: list[object] = []
    for number in range(TURNS):
        call = {"call_id": f"call_{number}", "type": "function_call", "name": "tool_1", "arguments": text}
        said = text + (mark if number == TURNS - 1 else "")
        items += [
            {"role": "user", "content": [{"type": "input_text", "text": text}]},
            call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": said},
        ]
    tools = [{"type": "function", "parameters": SCHEMA, **one} for one in FUNCTIONS]
    return {"max_output_tokens": 6, "instructions": SAID * 20, "tools": tools, "input": items}
