# SPDX-License-Identifier: Apache-2.0
"""The prompt that the model will read, as bytes, from a parsed request body: one function for each API.

The next turn of a conversation flattens to the bytes of the previous turn and more, so that a shared prefix stays
shared (`core.requests.prompt_keys` makes keys of it). Two rules serve that:

- A prompt is written in the order of the engine's chat template: tools, system, then the messages. Fields that each API
  calls by another name are written alike, so that a conversation gives the same bytes through every API.
- What changes with every call and is not part of the prompt is left out: Anthropic's `cache_control` markers, which
  move from message to message, and the billing line that Claude Code puts before its system prompt.

Nothing here raises, whatever the types. All is linear in the body, and bounded by `MAX_PROMPT_BYTES` and `MAX_PIECES`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, cast

import orjson
import xxhash

from lbproxy.core.requests.media import FILLER_BYTES, blob_tokens, filler, image_tokens
from lbproxy.core.requests.prompt_keys import MAX_PROMPT_BYTES

MAX_PIECES = 50_000
"""How many messages, parts and strings of a prompt are read: this bounds the time (about 1 µs each)."""
FEW_MESSAGES: Final = 1000
"""Up to this many messages are not checked one by one against the limits."""
STEP_PIECES: Final = 1000
"""At most 5 ms of the event loop: a short tool takes 5 µs to write."""
BILLING_LINE: Final = "x-anthropic-billing-header:"
"""How a system prompt of Claude Code begins, with a value that differs from call to call. vLLM drops it (pull request
36829). On an engine that does not, no prefix is shared whatever lbproxy does (llama.cpp issue 20623)."""
_MESSAGE: Final = b"\x1e"
_TOOLS: Final = b"\x1dtools\n"
_VALUE: Final = b"\x1f"

_hash: Final = xxhash.xxh3_64_intdigest


class Prompt(NamedTuple):
    """A prompt as bytes. `text` is empty if there is none."""

    text: bytes
    media_tokens: int = 0
    """Estimated tokens of media; `text` has `FILLER_BYTES` for each of them."""
    least_tokens: int = 0
    """See `InferenceRequest`."""


class _Pieces:
    """The flattened pieces so far, within the limits."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = MAX_PROMPT_BYTES
        self.media_tokens = self.least_tokens = 0

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.room -= len(data)

    def add_media(self, payload: str, tokens: int) -> None:
        self.add(filler(payload, tokens))
        self.media_tokens += len(self.parts[-1]) // FILLER_BYTES

    @property
    def full(self) -> bool:
        return self.room <= 0 or len(self.parts) >= MAX_PIECES

    def prompt(self) -> Prompt:
        return Prompt(b"".join(self.parts)[:MAX_PROMPT_BYTES], self.media_tokens, self.least_tokens)


_Plan: TypeAlias = list[tuple[Callable[[object, _Pieces], None], Sequence[object]]]
"""The parts of a prompt in order: a function, and the values that it adds, one at a time."""


class Flattening:
    """One prompt that is being flattened. Call `step` until it returns False; then `prompt` is complete."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._part = self._at = 0
        self._pieces = _Pieces()

    def step(self, pieces: int = STEP_PIECES) -> bool:
        """Flatten about `pieces` more pieces. Returns whether there is more to do."""
        done = self._pieces
        enough = len(done.parts) + pieces
        while self._part < len(self._plan):
            add, values = self._plan[self._part]
            while self._at < len(values):
                if done.full:
                    return False
                if len(done.parts) >= enough:
                    return True
                add(values[self._at], done)
                self._at += 1
            self._part += 1
            self._at = 0
        return False

    def prompt(self) -> Prompt:
        return self._pieces.prompt()


class PromptFormat:
    """How to find the prompt in the bodies of one API."""

    def __init__(
        self,
        plan: Callable[[Mapping[str, object]], _Plan],
        quick: Callable[[Mapping[str, object]], Prompt | None] | None = None,
    ) -> None:
        """`quick` flattens simple bodies faster, and returns None for others."""
        self._plan = plan
        self._quick = quick

    def __call__(self, body: Mapping[str, object]) -> Prompt:
        """Flatten the prompt of a body at once."""
        prompt = None if self._quick is None else self._quick(body)
        if prompt is None:
            whole = Flattening(self._plan(body))
            whole.step(MAX_PIECES)
            prompt = whole.prompt()
        return prompt

    def begin(self, body: Mapping[str, object]) -> Flattening:
        """Begin to flatten the prompt of a large body, in many short steps."""
        return Flattening(self._plan(body))


# The APIs


def _chat(body: Mapping[str, object]) -> _Plan:
    return [*_tools(body.get("tools")), (_add_message, _listed(body.get("messages")))]


def _quick_chat(body: Mapping[str, object]) -> Prompt | None:
    """The prompt of a short list of messages that have only a role and a text, as most do. Takes half the time."""
    messages = body.get("messages")
    if type(messages) is not list or len(messages) > FEW_MESSAGES or "tools" in body:
        return None
    texts: list[str] = []
    for message in messages:
        if type(message) is not dict or "tool_calls" in message or "tool_call_id" in message:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        texts += ("\x1e", role, "\n", content)
    text = "".join(texts).encode("utf-8", "surrogatepass")
    return Prompt(text if len(text) <= MAX_PROMPT_BYTES else text[:MAX_PROMPT_BYTES])  # a slice is a copy


def _messages(body: Mapping[str, object]) -> _Plan:
    parts = [*_tools(body.get("tools")), *_system(body.get("system"))]
    return [*parts, (_add_message, _listed(body.get("messages")))]


def _responses(body: Mapping[str, object]) -> _Plan:
    parts = [*_tools(body.get("tools")), *_system(body.get("instructions"))]
    given = body.get("input")
    if isinstance(given, str):
        return [*parts, (_add_message, [{"role": "user", "content": given}])]
    return [*parts, (_add_item, _listed(given))]


def _completion(body: Mapping[str, object]) -> _Plan:
    return _texts(body.get("prompt"))


def _infill(body: Mapping[str, object]) -> _Plan:
    plan: _Plan = [(_add_extra, _listed(body.get("input_extra")))]
    for key in ("input_prefix", "prompt", "input_suffix"):
        plan += _texts(body.get(key))
        plan.append((_add_bytes, [_VALUE]))
    return plan


def _generate(body: Mapping[str, object]) -> _Plan:
    return _texts(body.get("text") or body.get("input_ids"))


def _tokens(body: Mapping[str, object]) -> _Plan:
    return _texts(_listed(body.get("token_ids")))


def _ollama_chat(body: Mapping[str, object]) -> _Plan:
    return [*_tools(body.get("tools")), (_add_pictured, _listed(body.get("messages")))]


def _ollama_generate(body: Mapping[str, object]) -> _Plan:
    pictures: _Plan = [(_add_picture, _listed(body.get("images")))]
    return [*_system(body.get("system")), *_texts(body.get("context")), *pictures, *_texts(body.get("prompt"))]


chat_prompt: Final = PromptFormat(_chat, _quick_chat)
"""/v1/chat/completions: `tools`, then each message's role, contents and tool calls, in order."""
messages_prompt: Final = PromptFormat(_messages)
"""Anthropic's /v1/messages and /v1/messages/count_tokens: `tools`, `system`, `messages`."""
responses_prompt: Final = PromptFormat(_responses)
"""/v1/responses: `tools`, `instructions`, then `input`, a text or items. The conversation of `previous_response_id` is
not in it."""
completion_prompt: Final = PromptFormat(_completion)
"""/v1/completions, and llama.cpp's /completion: a text, texts, token ids, or lists of token ids."""
infill_prompt: Final = PromptFormat(_infill)
"""llama.cpp's /infill: the other files, then the text before the gap, then the text after it."""
generate_prompt: Final = PromptFormat(_generate)
"""SGLang's /generate: `text` or `input_ids`, one or several."""
tokens_prompt: Final = PromptFormat(_tokens)
"""vLLM's /inference/v1/generate: `token_ids`."""
ollama_chat_prompt: Final = PromptFormat(_ollama_chat)
"""Ollama's /api/chat: as chat, with `images` in messages."""
ollama_generate_prompt: Final = PromptFormat(_ollama_generate)
"""Ollama's /api/generate: `system`, `context`, `images`, `prompt`."""


# Parts of prompts


def _listed(values: object) -> list[object]:
    return values if isinstance(values, list) else []


def _tools(tools: object) -> _Plan:
    """Add the tools: the model reads each of them as JSON."""
    if not tools:
        return []
    return [(_add_bytes, [_TOOLS]), (_add_tool, tools if isinstance(tools, list) else [tools])]


def _system(system: object) -> _Plan:
    """Add the system prompt, a text or parts, as a system message. A first part that is the billing line is left out;
    in a text vLLM keeps that line, so it is kept here too.
    """
    if not system:
        return []
    if isinstance(system, list) and _is_billing(system[0]):
        system = system[1:]
    return [(_add_bytes, [b"\x1esystem\n"]), (_add_content, [system])]


def _texts(prompt: object) -> _Plan:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, list):
        ids = _token_bytes(prompt)
        return [(_add_text, prompt)] if ids is None else [(_add_ids, [ids])]
    return [(_add_bytes, [_encode(prompt)])] if isinstance(prompt, str) else []


def _add_bytes(data: object, pieces: _Pieces) -> None:
    pieces.add(cast("bytes", data))


def _add_ids(ids: object, pieces: _Pieces) -> None:
    pieces.add(cast("bytes", ids))
    pieces.least_tokens = len(pieces.parts[-1]) // 4


def _add_tool(tool: object, pieces: _Pieces) -> None:
    pieces.add(_dump(_without_cache_control(tool)))


def _add_extra(file: object, pieces: _Pieces) -> None:
    pieces.add(_VALUE + _dump(file))


def _add_text(one: object, pieces: _Pieces) -> None:
    if isinstance(one, str):
        pieces.add(_encode(one))
    elif isinstance(one, list):
        pieces.add(_token_bytes(one) or b"")
    pieces.add(_MESSAGE)
    pieces.least_tokens = -1


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else part
    return isinstance(text, str) and text.startswith(BILLING_LINE)


def _add_message(message: object, pieces: _Pieces) -> None:
    """Add a message of chat, of Anthropic's API, or an item of /v1/responses that is a message."""
    if not isinstance(message, dict):
        pieces.add(_MESSAGE)
        _add_content(message, pieces)
        return
    role = message.get("role")
    pieces.add(_MESSAGE + (_encode(role) if isinstance(role, str) else b"") + b"\n")
    _add_content(message.get("content"), pieces)
    for key in ("tool_calls", "tool_call_id"):
        if message.get(key):
            pieces.add(_VALUE)
            pieces.add(_dump(message[key]))


def _add_pictured(message: object, pieces: _Pieces) -> None:
    """Add a message of Ollama's chat."""
    _add_message(message, pieces)
    for image in _listed(message.get("images")) if isinstance(message, dict) else ():
        _add_picture(image, pieces)


def _add_picture(image: object, pieces: _Pieces) -> None:
    """Add an image, given as base64."""
    if isinstance(image, str):
        pieces.add_media(image, image_tokens(image))


def _add_item(item: object, pieces: _Pieces) -> None:
    """Add an item of `input`: a message, a function call and its output, reasoning, or any other kind.

    An item's own `id` and `status` are not part of the prompt: clients that store a conversation themselves leave them
    out.
    """
    if not isinstance(item, dict) or "role" in item:
        _add_message(item, pieces)
        return
    kind = item.get("type")
    if kind == "function_call":
        pieces.add(b"\x1ecall\n" + _dump([item.get("call_id"), item.get("name"), item.get("arguments")]))
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        pieces.add(b"\x1etool\n" + _dump(item.get("call_id")))
        _add_content(item.get("output"), pieces)
    elif kind == "reasoning":
        pieces.add(b"\x1ereasoning\n")
        for key in ("summary", "content", "encrypted_content"):
            _add_content(item.get(key), pieces)
    else:
        said = {key: value for key, value in item.items() if key not in {"id", "status"}}
        pieces.add(_MESSAGE + _dump(said))


def _add_content(content: object, pieces: _Pieces, *, in_result: bool = False) -> None:
    """Add a text, or a list of parts. `in_result`: it is what a tool returned."""
    if isinstance(content, str):
        pieces.add(_encode(content))
    elif isinstance(content, list):
        for part in content:
            if pieces.full:
                break
            _add_part(part, pieces, in_result=in_result)
    elif content is not None:
        pieces.add(_VALUE + b"%016x" % _hash(_dump(content)))


def _add_part(part: object, pieces: _Pieces, *, in_result: bool) -> None:
    """Add text as it is, media as tokens, tool calls and results as their content, anything else as its hash. A result
    inside a result is hashed too: they could be nested deeper than Python's stack.
    """
    if isinstance(part, str):
        pieces.add(_encode(part))
        return
    if not isinstance(part, dict):
        pieces.add(_VALUE + b"%016x" % _hash(_dump(part)))
        return
    text, kind = part.get("text"), part.get("type")
    if isinstance(text, str):
        pieces.add(_encode(text))
    elif kind == "tool_result" and not in_result:
        pieces.add(_VALUE + _dump(part.get("tool_use_id")))
        _add_content(part.get("content"), pieces, in_result=True)
    elif kind == "tool_use":
        pieces.add(_VALUE + _dump([part.get("id"), part.get("name"), part.get("input")]))
    elif kind == "thinking" and isinstance(part.get("thinking"), str):
        pieces.add(_encode(cast("str", part["thinking"])))
    elif not _add_media(part, pieces):
        pieces.add(_VALUE + b"%016x" % _hash(_dump(_without_cache_control(part))))


_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_PAYLOAD_KEYS: Final = ["url", "data", "file_data", "file_url", "image_url", "file_id"]
"""The keys of the payload in the part, or in the object that is named after the part's type."""


def _add_media(part: dict[str, object], pieces: _Pieces) -> bool:
    """Add an image, audio, video or a file, given as base64, a URL or an id. Returns whether `part` is one."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    inner = part.get("source") or part.get(kind) or part
    payload = inner if isinstance(inner, str) else None
    if isinstance(inner, dict):
        payload = next((one for key in _PAYLOAD_KEYS if isinstance(one := inner.get(key), str)), None)
        if inner.get("type") == "text" and payload is not None:  # one of Anthropic's documents that is a text
            pieces.add(_encode(payload))
            return True
    if payload is None:
        return False
    if kind in _IMAGES:
        detail = part.get("detail") or (inner.get("detail") if isinstance(inner, dict) else None)
        pieces.add_media(payload, image_tokens(payload, detail))
    else:
        pieces.add_media(payload, blob_tokens(payload))
    return True


def _token_bytes(ids: list[object]) -> bytes | None:
    """Four bytes for each token id; None if these are not token ids."""
    try:
        return array("I", cast("list[int]", ids[: MAX_PROMPT_BYTES // 4])).tobytes()
    except (TypeError, OverflowError):
        return None


def _without_cache_control(part: object) -> object:
    """A tool or a part without `cache_control`, which is not part of the prompt."""
    if isinstance(part, dict) and "cache_control" in part:
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part


def _encode(text: str) -> bytes:
    return text[:MAX_PROMPT_BYTES].encode("utf-8", "surrogatepass")


def _dump(value: object) -> bytes:
    """JSON of a value that came from JSON, even if orjson cannot write it; b"?" if no library can."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        try:
            return json.dumps(value).encode()
        except (ValueError, TypeError, RecursionError):
            return b"?"
