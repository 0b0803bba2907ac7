# SPDX-License-Identifier: Apache-2.0
"""One prompt in the words of each API that generates, and what its responses say, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from tests.real.servers import MODEL

Fields = dict[str, Any]
TIMEOUT_S = 120.0


class Said(NamedTuple):
    """What a response says."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Api(NamedTuple):
    """One API."""

    path: str
    body: Callable[[str, int], Fields]
    """From a prompt and the length of the response in tokens."""
    read: Callable[[Fields], Said]
    """A response that is not streamed."""
    read_events: Callable[[Sequence[Fields]], Said]
    """The events of one that is."""


def ask(url: str, api: Api, body: Fields) -> Said:
    """Send it and read the response. AssertionError if it is no complete one with status 200."""
    response = httpx.post(f"{url}{api.path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, (response.status_code, response.text[:2000])
    assert "remote_engine_id" not in response.text, "it tells the client what only the servers may know"
    if not body.get("stream"):
        return api.read(response.json())
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    assert not any("error" in event and event["error"] for event in events), events
    return api.read_events(events)


def _usage(usage: Fields) -> tuple[int, int, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], usage["completion_tokens"], cached


def _chat(prompt: str, tokens: int) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}


def _read_chat(fields: Fields) -> Said:
    return Said(fields["choices"][0]["message"]["content"], *_usage(fields["usage"]))


def _read_chat_events(events: Sequence[Fields]) -> Said:
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return Said(text, *_usage(events[-1]["usage"]))


def _completions(prompt: str, tokens: int) -> Fields:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def _read_completions(fields: Fields) -> Said:
    return Said(fields["choices"][0]["text"], *_usage(fields["usage"]))


def _read_completions_events(events: Sequence[Fields]) -> Said:
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return Said(text, *_usage(events[-1]["usage"]))


def _responses(prompt: str, tokens: int) -> Fields:
    return {"model": MODEL, "input": prompt, "max_output_tokens": tokens, "temperature": 0, "store": False}


def _read_responses(fields: Fields) -> Said:
    text = "".join(part["text"] for item in fields["output"] for part in item["content"])
    usage = fields["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Said(text, usage["input_tokens"], usage["output_tokens"], cached)


def _read_responses_events(events: Sequence[Fields]) -> Said:
    assert events[-1]["type"] == "response.completed", events[-1]
    said = _read_responses(events[-1]["response"])
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return said._replace(text=text)


def _messages(prompt: str, tokens: int) -> Fields:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}


def _messages_usage(usage: Fields) -> tuple[int, int, int]:
    cached, written = (usage.get(f"cache_{name}_input_tokens") or 0 for name in ("read", "creation"))
    return usage["input_tokens"] + cached + written, usage["output_tokens"], cached


def _read_messages(fields: Fields) -> Said:
    return Said("".join(block["text"] for block in fields["content"]), *_messages_usage(fields["usage"]))


def _read_messages_events(events: Sequence[Fields]) -> Said:
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    (usage,) = [event["usage"] for event in events if event["type"] == "message_delta"]
    return Said(text, *_messages_usage(usage))


APIS = {
    "chat": Api("/v1/chat/completions", _chat, _read_chat, _read_chat_events),
    "completions": Api("/v1/completions", _completions, _read_completions, _read_completions_events),
    "responses": Api("/v1/responses", _responses, _read_responses, _read_responses_events),
    "messages": Api("/v1/messages", _messages, _read_messages, _read_messages_events),
}


def streamed(api: Api, body: Fields) -> Fields:
    """The same, streamed and with usage."""
    usage = {"stream_options": {"include_usage": True}} if "completions" in api.path else {}
    return {**body, "stream": True, **usage}
