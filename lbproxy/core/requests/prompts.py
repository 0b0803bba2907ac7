"""From a parsed request body to the prompt that the model would read, as bytes: one function for each API.

The next turn of a conversation flattens to the bytes of the turn before and more, so that a shared beginning stays one
(`core.requests.prompt_keys` makes keys of it). Two things serve that:

- A prompt is written in the order in which the engine's chat template has it: tools, system, then the messages. What
  every API calls by another name is written alike, so that one conversation is one prompt through each of them.
- What changes on every call and is no part of the prompt is left out: marks of Anthropic's `cache_control`, which move
  from message to message, and the billing line that Claude Code puts before its system prompt.

Nothing here raises, whatever the types; all is linear in the body and bounded by `MAX_PROMPT_BYTES` and `MAX_PIECES`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias, cast

import orjson
import xxhash

from lbproxy.core.requests.media import FILLER_BYTES, blob_tokens, filler, image_tokens
from lbproxy.core.requests.prompt_keys import MAX_PROMPT_BYTES

MAX_PIECES = 50_000
"""How many messages, parts and strings of a prompt are looked at: bounds the time (about 1 µs each)."""
FEW_MESSAGES: Final = 1000
"""So many are not bounded one by one."""
BILLING_LINE: Final = "x-anthropic-billing-header:"
"""How a system prompt of Claude Code begins, with a value that differs from call to call. vLLM drops it (its pull
request 36829); on an engine that does not, no prefix is shared whatever lbproxy does (llama.cpp issue 20623)."""
_MESSAGE: Final = b"\x1e"
_TOOLS: Final = b"\x1dtools\n"
_VALUE: Final = b"\x1f"

_hash: Final = xxhash.xxh3_64_intdigest


class Prompt(NamedTuple):
    """A prompt as bytes. `text` is empty if there is none."""

    text: bytes
    media_tokens: int = 0
    """Tokens, estimated, of what is no text; `FILLER_BYTES` for each of them stand in `text`."""


Flatten: TypeAlias = Callable[[Mapping[str, object]], Prompt]
"""Reads the prompt in a body of one API."""


# The APIs


def chat_prompt(body: Mapping[str, object]) -> Prompt:
    """Of /v1/chat/completions: `tools`, then each message's role, contents and tool calls, in order."""
    messages = body.get("messages")
    if type(messages) is list and len(messages) <= FEW_MESSAGES and "tools" not in body:
        texts = _texts_of(messages)
        if texts is not None:
            text = "".join(texts).encode("utf-8", "surrogatepass")
            return Prompt(text if len(text) <= MAX_PROMPT_BYTES else text[:MAX_PROMPT_BYTES])  # a slice is a copy
    pieces = _Pieces()
    _add_tools(body.get("tools"), pieces)
    for message in messages if isinstance(messages, list) else ():
        if pieces.full:
            break
        _add_message(message, pieces)
    return pieces.prompt()


def messages_prompt(body: Mapping[str, object]) -> Prompt:
    """Of Anthropic's /v1/messages and /v1/messages/count_tokens: `tools`, `system`, `messages`."""
    pieces = _Pieces()
    _add_tools(body.get("tools"), pieces)
    _add_system(body.get("system"), pieces)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if pieces.full:
            break
        _add_message(message, pieces)
    return pieces.prompt()


def responses_prompt(body: Mapping[str, object]) -> Prompt:
    """Of /v1/responses: `tools`, `instructions`, then `input`, a text or items. What `previous_response_id` stands for
    is not in it.
    """
    pieces = _Pieces()
    _add_tools(body.get("tools"), pieces)
    _add_system(body.get("instructions"), pieces)
    given = body.get("input")
    if isinstance(given, str):
        pieces.add(b"\x1euser\n")
        pieces.add(_encode(given))
    for item in given if isinstance(given, list) else ():
        if pieces.full:
            break
        _add_item(item, pieces)
    return pieces.prompt()


def completion_prompt(body: Mapping[str, object]) -> Prompt:
    """Of /v1/completions, and of llama.cpp's /completion: a text, texts, token ids, or lists of token ids."""
    pieces = _Pieces()
    _add_prompt(body.get("prompt"), pieces)
    return pieces.prompt()


def infill_prompt(body: Mapping[str, object]) -> Prompt:
    """Of llama.cpp's /infill: the files beside it, then what stands before the gap, then what stands behind it."""
    pieces = _Pieces()
    extra = body.get("input_extra")
    for one in extra if isinstance(extra, list) else ():
        if pieces.full:
            break
        pieces.add(_VALUE + _dump(one))
    for key in ("input_prefix", "prompt", "input_suffix"):
        _add_prompt(body.get(key), pieces)
        pieces.add(_VALUE)
    return pieces.prompt()


def generate_prompt(body: Mapping[str, object]) -> Prompt:
    """Of SGLang's /generate: `text` or `input_ids`, one or several."""
    pieces = _Pieces()
    _add_prompt(body.get("text") or body.get("input_ids"), pieces)
    return pieces.prompt()


# Their parts


def _texts_of(messages: list[object]) -> list[str] | None:
    """The prompt of messages that are each a role and a text, as nearly all are; None of others. Half the time."""
    texts: list[str] = []
    for message in messages:
        if type(message) is not dict or "tool_calls" in message or "tool_call_id" in message:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        texts += ("\x1e", role, "\n", content)
    return texts


class _Pieces:
    """What was flattened so far, within bounds."""

    __slots__ = ("media_tokens", "parts", "room")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = MAX_PROMPT_BYTES
        self.media_tokens = 0

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.room -= len(data)

    def add_media(self, payload: str, tokens: int) -> None:
        """Something that is no text and takes about so many tokens."""
        self.add(filler(payload, tokens))
        self.media_tokens += len(self.parts[-1]) // FILLER_BYTES

    @property
    def full(self) -> bool:
        return self.room <= 0 or len(self.parts) >= MAX_PIECES

    def prompt(self) -> Prompt:
        return Prompt(b"".join(self.parts)[:MAX_PROMPT_BYTES], self.media_tokens)


def _add_tools(tools: object, pieces: _Pieces) -> None:
    """The model reads each tool as JSON."""
    if not tools:
        return
    pieces.add(_TOOLS)
    for tool in tools if isinstance(tools, list) else (tools,):
        if pieces.full:
            break
        pieces.add(_dump(_without_marks(tool)))


def _add_system(system: object, pieces: _Pieces) -> None:
    """A text, or parts: as a message of the system, without a first part that is the billing line. In a text vLLM keeps
    that line, so it stays here too.
    """
    if not system:
        return
    if isinstance(system, list) and _is_billing(system[0]):
        system = system[1:]
    pieces.add(b"\x1esystem\n")
    _add_content(system, pieces)


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else part
    return isinstance(text, str) and text.startswith(BILLING_LINE)


def _add_message(message: object, pieces: _Pieces) -> None:
    """Of chat, of Anthropic's messages, and an item of /v1/responses that is one."""
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


def _add_item(item: object, pieces: _Pieces) -> None:
    """One of `input`: a message, a call of a function and its output, reasoning, or whatever else there will be.

    An item's own `id` and `status` are no part of the prompt: clients that keep a conversation themselves leave them
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
    """A text, or a list of parts; `in_result`: of what a tool returned."""
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
    """Text as it is, media as tokens, calls and results of tools as what they say, anything else as its hash. A result
    in a result is something else: they could be nested deeper than Python's stack.
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
        pieces.add(_VALUE + b"%016x" % _hash(_dump(_without_marks(part))))


_IMAGES: Final = frozenset({"image", "image_url", "input_image"})
_PAYLOAD_KEYS: Final = ["url", "data", "file_data", "file_url", "image_url", "file_id"]
"""Where the payload stands in the part, or in the object that has its kind's name."""


def _add_media(part: dict[str, object], pieces: _Pieces) -> bool:
    """An image, audio, video or a file, if `part` is one: base64, a URL or an id. Returns whether it is."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    inner = part.get("source") or part.get(kind) or part
    payload = inner if isinstance(inner, str) else None
    if isinstance(inner, dict):
        payload = next((one for key in _PAYLOAD_KEYS if isinstance(one := inner.get(key), str)), None)
        if inner.get("type") == "text" and payload is not None:  # a document of Anthropic's that is one
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


def _add_prompt(prompt: object, pieces: _Pieces) -> None:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        pieces.add(_encode(prompt))
    elif isinstance(prompt, list):
        ids = _token_bytes(prompt)
        if ids is not None:
            pieces.add(ids)
            return
        for one in prompt:
            if pieces.full:
                break
            if isinstance(one, str):
                pieces.add(_encode(one))
            elif isinstance(one, list):
                pieces.add(_token_bytes(one) or b"")
            pieces.add(_MESSAGE)


def _token_bytes(ids: list[object]) -> bytes | None:
    """Four bytes for each token id; None if these are no token ids."""
    try:
        return array("I", cast("list[int]", ids[: MAX_PROMPT_BYTES // 4])).tobytes()
    except (TypeError, OverflowError):
        return None


def _without_marks(part: object) -> object:
    """A tool or a part without `cache_control`, which says nothing to the model."""
    if isinstance(part, dict) and "cache_control" in part:
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part


def _encode(text: str) -> bytes:
    return text[:MAX_PROMPT_BYTES].encode("utf-8", "surrogatepass")


def _dump(value: object) -> bytes:
    """JSON of a value that came from JSON, even of one that orjson cannot write; b"?" if nobody can."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        try:
            return json.dumps(value).encode()
        except (ValueError, TypeError, RecursionError):
            return b"?"
