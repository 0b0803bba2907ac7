"""From a prompt to the keys by which it is found again (`core.caches.prefix_index`). Two steps:

- `flatten`: a parsed OpenAI body -> the bytes that the model would read. The next turn of a conversation flattens to
  the bytes of the turn before and more, so that a shared beginning stays one.
- `hash_prompt`: those bytes -> one key for each full block, chained, so that a key stands for everything up to it.

Keys are not secret and can be forged; all that comes of a forged one is a wrong guess.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias, cast

import orjson
import xxhash

BLOCK_BYTES: Final = 1024
"""About 256 tokens of English. Smaller blocks find no more (64 tokens were tried) and cost four times as much."""
MAX_PROMPT_BYTES = 8 << 20
"""How much of a prompt is flattened and hashed: about 2 million tokens, more than engines take."""
MAX_PIECES = 50_000
"""How many messages, parts and strings of a prompt are looked at: bounds the time (about 1 µs each)."""
FEW_MESSAGES: Final = 1000
"""So many are not bounded one by one."""
BlockKey: TypeAlias = object
"""A number of 64 bits that nobody calculates with. As an int compiled code would take each apart and put it together
again, and keep it in every table anew."""

_hash: Final = xxhash.xxh3_64_intdigest


# From a body to bytes


def flatten(body: Mapping[str, object]) -> bytes:
    """The prompt in a chat or completions body as bytes; b"" if there is none.

    Chat: tools, then each message's role, contents and tool calls, in order; what is not text stands as its hash.
    Completions: the text, the texts one after the other, or 4 bytes for each token id. Never raises, whatever the
    types; linear in the body's size and bounded by `MAX_PROMPT_BYTES` and `MAX_PIECES`.
    """
    messages = body.get("messages")
    if type(messages) is list and len(messages) <= FEW_MESSAGES and "tools" not in body and "system" not in body:
        texts = _texts_of(messages)
        if texts is not None:
            prompt = "".join(texts).encode("utf-8", "surrogatepass")
            return prompt if len(prompt) <= MAX_PROMPT_BYTES else prompt[:MAX_PROMPT_BYTES]  # a slice is a copy
    pieces = _Pieces()
    if isinstance(messages, list):
        for key in ("tools", "system"):
            if body.get(key):
                pieces.add(b"\x1d" + key.encode() + b"\n")
                _flatten_content(body[key], pieces)
        for message in messages:
            if pieces.full:
                break
            _flatten_message(message, pieces)
    else:
        _flatten_prompt(body.get("prompt"), pieces)
    return b"".join(pieces.parts)[:MAX_PROMPT_BYTES]


def _texts_of(messages: list[object]) -> list[str] | None:
    """The same of messages that are each a role and a text, as nearly all are; None of others. Half the time."""
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

    __slots__ = ("parts", "room")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = MAX_PROMPT_BYTES

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.room -= len(data)

    @property
    def full(self) -> bool:
        return self.room <= 0 or len(self.parts) >= MAX_PIECES


def _flatten_message(message: object, pieces: _Pieces) -> None:
    if not isinstance(message, dict):
        pieces.add(b"\x1e")
        _flatten_content(message, pieces)
        return
    role = message.get("role")
    pieces.add(b"\x1e" + (_encode(role) if isinstance(role, str) else b"") + b"\n")
    _flatten_content(message.get("content"), pieces)
    for key in ("tool_calls", "tool_call_id"):
        if message.get(key):
            pieces.add(b"\x1f")
            pieces.add(_dump(message[key]))


def _flatten_content(content: object, pieces: _Pieces) -> None:
    """A text, or a list of parts: those of text as they are, others as a hash."""
    if isinstance(content, str):
        pieces.add(_encode(content))
    elif isinstance(content, list):
        for part in content:
            if pieces.full:
                break
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                pieces.add(_encode(text))
            elif isinstance(part, dict) and part.get("type") == "function":
                pieces.add(_dump(part))  # a tool: the model reads it as JSON
            else:
                pieces.add(b"\x1f%016x" % _hash(_dump(part)))
    elif content is not None:
        pieces.add(b"\x1f%016x" % _hash(_dump(content)))


def _flatten_prompt(prompt: object, pieces: _Pieces) -> None:
    """`prompt` of a completions body: text, texts, token ids, or lists of token ids."""
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
            pieces.add(b"\x1e")


def _token_bytes(ids: list[object]) -> bytes | None:
    """Four bytes for each token id; None if these are no token ids."""
    try:
        return array("I", cast("list[int]", ids[: MAX_PROMPT_BYTES // 4])).tobytes()
    except (TypeError, OverflowError):
        return None


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


# From bytes to keys


def hash_prompt(
    prompt: bytes,
    *,
    model: str | None,
    adapter: str | None = None,
    salt: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[BlockKey, ...]:
    """One 64-bit key for each full block of `prompt`, in order; a partial last block has none.

    Key n is the xxh3 hash of block n with key n-1 as the seed, and the first seed is that of model, adapter and cache
    salt: equal keys mean equal prompts so far, in the same cache. One pass, about 0.2 µs a block.
    """
    size = min(len(prompt), MAX_PROMPT_BYTES)
    if size < block_bytes:
        return ()
    key: BlockKey = _cached_seed(model, adapter) if salt is None else _seed(model, adapter, salt)
    hash_block = cast("Callable[[bytes, BlockKey], BlockKey]", _hash)
    keys: list[BlockKey] = []
    for start in range(0, size - block_bytes + 1, block_bytes):
        key = hash_block(prompt[start : start + block_bytes], key)
        keys.append(key)
    return tuple(keys)


def _seed(model: str | None, adapter: str | None, salt: str | None = None) -> int:
    names = "\0".join(f"{len(name)}:{name}" if name is not None else "-" for name in (model, adapter, salt))
    return _hash(names.encode("utf-8", "surrogatepass"))


_cached_seed: Final = lru_cache(maxsize=1024)(_seed)
"""Names of models are short (`core.requests.openai`); a salt may be as long as a body."""
