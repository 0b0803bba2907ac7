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
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": SAID * 4,
            "parameters": {"type": "object", "properties": dict.fromkeys(("path", "begin", "end"), PARAMETER)},
        },
    }
    for number in range(20)
]


def conversation(size_bytes: int, mark: str) -> bytes:
    """A body for chat completions, which names model m and asks for six tokens. `mark` is in its last message."""
    short = _dumped("", mark)
    text = "\n".join(islice(cycle(LINES), (size_bytes - len(short)) // (3 * TURNS * 20)))
    grows = len(json.dumps(text)) - 2
    text = text[: len(text) * (size_bytes - len(short)) // (3 * TURNS * grows)]
    body = _dumped(text, mark)
    return body[:-1] + b" " * max(0, size_bytes - len(body)) + body[-1:]


def _dumped(text: str, mark: str) -> bytes:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[object] = [{"role": "system", "content": [{"type": "text", "text": SAID * 20, **cached}]}]
    for number in range(TURNS):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "tool_1", "arguments": text}}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": text, **(cached if number == TURNS - 1 else {})}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text + (mark if number == TURNS - 1 else "")},
        ]
    return json.dumps({"model": "m", "max_tokens": 6, "tools": TOOLS, "messages": messages}).encode()
