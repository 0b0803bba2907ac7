# SPDX-License-Identifier: Apache-2.0
"""The request by which another server goes on with a response that broke: what the client sent, and the text so far.

Completions get it after their prompt. Chats get it as the last turn of the assistant, with the two fields by which vLLM
and SGLang leave that turn open (https://docs.vllm.ai, chat completions, `continue_final_message`); llama.cpp goes on
with a last turn of the assistant in any case. Only requests that an engine continues as it would have gone on itself:
what looks back at more than the text (penalties, grammars, numbers of tokens), or is no text, is not continued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import orjson

from lbproxy.core.requests.outline import is_light

_COMMON: Final = frozenset(
    {
        "model", "stream", "stream_options", "max_tokens", "seed", "stop", "stop_token_ids", "user", "metadata",
        "temperature", "top_p", "top_k", "min_p", "typical_p", "logit_bias", "ignore_eos", "skip_special_tokens",
        "spaces_between_special_tokens", "include_stop_str_in_output", "priority", "cache_salt", "service_tier",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id", "session_id", "lora_path",
    }
)  # fmt: skip
_OF_CHAT: Final = frozenset(
    {
        "messages", "max_completion_tokens", "tools", "parallel_tool_calls", "store", "verbosity", "chat_template",
        "chat_template_kwargs", "reasoning_effort", "documents",
    }
)  # fmt: skip
_OF_COMPLETION: Final = frozenset({"prompt", "add_special_tokens"})
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
}
"""Fields with which a request is continued if they say what they say by default."""
_NAME: Final = re.compile(r"[a-z_]{1,64}")
_LIMITS = ("max_completion_tokens", "max_tokens")
_TOKENIZED = ("model", "tools", "chat_template", "chat_template_kwargs")
"""Fields of a chat that say how its messages become tokens."""


class NotContinuedError(Exception):
    """Why a response cannot be continued."""


def read_continued(body: bytes, *, chat: bool) -> dict[str, object]:
    """The fields of a request whose response can be continued. Raises NotContinuedError."""
    try:
        fields = orjson.loads(body) if is_light(body) else None
    except orjson.JSONDecodeError:
        fields = None
    if type(fields) is not dict:
        raise NotContinuedError("its body takes too long to read, or is no JSON as engines write it")
    known = _COMMON | (_OF_CHAT if chat else _OF_COMPLETION)
    for name, value in fields.items():
        if name not in known and value is not None and value is not False and value not in _NEUTRAL.get(name, ()):
            raise NotContinuedError(f"the request has `{name}`" if _NAME.fullmatch(name) else "a field is not known")
    if not chat and type(fields.get("prompt")) is not str:
        raise NotContinuedError("the prompt is no text")
    if not chat and type(fields.get("max_tokens")) is not int:
        raise NotContinuedError("the request has no `max_tokens`, and engines differ in what that means")
    if chat:
        messages = fields.get("messages")
        last = messages[-1] if type(messages) is list and messages else None
        if type(last) is not dict or last.get("role") == "assistant":
            raise NotContinuedError("the client itself began the assistant's turn, or its messages cannot be read")
    return fields


def tokens_left(fields: Mapping[str, object], tokens: int) -> int | None:
    """How many tokens the response may still have after so many; None: as many as it likes."""
    limits = [limit for name in _LIMITS if type(limit := fields.get(name)) is int]
    return min(limits) - tokens if limits else None


def stops_of(fields: Mapping[str, object]) -> tuple[str, ...]:
    """The texts that end the response."""
    said = fields.get("stop")
    found = said if type(said) is list else [said]
    return tuple(one for one in found if type(one) is str and one)


def held_back(fields: Mapping[str, object]) -> int:
    """How many characters of its text vLLM keeps back until its end (`stop_buffer_length` in v1/engine/detokenizer)."""
    return 0 if fields.get("include_stop_str_in_output") else max(map(len, stops_of(fields)), default=1) - 1


def wants_usage(fields: Mapping[str, object]) -> bool:
    """Whether the client asks for an event with the usage."""
    options = fields.get("stream_options")
    return type(options) is dict and options.get("include_usage") is True


def continued(fields: Mapping[str, object], *, chat: bool, text: str, tokens: int) -> bytes:
    """The body of the request that goes on after `text`, of `tokens` tokens. `text` does not end in white space, which
    templates may strip. Without any the request is as it was.
    """
    if not text:
        return orjson.dumps(fields)
    changed = dict(fields)
    for name in _LIMITS:
        limit = changed.get(name)
        if type(limit) is int:
            changed[name] = limit - tokens
    if not chat:
        return orjson.dumps(changed | {"prompt": f"{fields['prompt']}{text}"})
    messages = fields["messages"]
    assert isinstance(messages, list)
    changed["messages"] = [*messages, {"role": "assistant", "content": text}]
    return orjson.dumps(changed | {"continue_final_message": True, "add_generation_prompt": False})


def count_request(fields: Mapping[str, object], text: str | None, *, name: str) -> bytes:
    """The body of the request for the number of tokens of a text, or (None) of the prompt: of /tokenize, where a text
    is called `name`.
    """
    asked = {key: fields[key] for key in _TOKENIZED if key in fields}
    if text is None and "messages" in fields:
        return orjson.dumps(asked | {"messages": fields["messages"], "add_generation_prompt": True})
    model = {key: asked[key] for key in ("model",) if key in asked}
    if text is None:
        special = fields.get("add_special_tokens", True)
        return orjson.dumps({**model, name: fields["prompt"], "add_special_tokens": special, "add_special": special})
    return orjson.dumps({**model, name: text, "add_special_tokens": False})


def read_count(body: bytes) -> int | None:
    """The number of tokens, as the response says it; None: it says none."""
    try:
        said = orjson.loads(body) if is_light(body) else None
    except orjson.JSONDecodeError:
        return None
    tokens = said.get("tokens") if type(said) is dict else None
    return len(tokens) or None if type(tokens) is list else None
