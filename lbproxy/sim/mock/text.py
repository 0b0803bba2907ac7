# SPDX-License-Identifier: Apache-2.0
"""Text as the simulated server sees it: tokens, blocks, the chat template, and what it answers.

A token is four bytes of UTF-8, and a token id is those four bytes read as a little-endian number (the last token filled
up with zero bytes). So text and token ids turn into each other without loss, and both are hashed alike: a prompt here
is always *bytes*, four per token. Answers are made of plain ASCII sentences, so that each token of a response is
readable by itself.

Everything here is a function of its arguments: the same prompt and seed give the same answer, on every server.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from itertools import islice, product

import xxhash

from lbproxy.sim.engine.presets import BLOCK_TOKENS

TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES

NATURAL_TOKENS = range(32, 97)
"""How long a response gets when nobody limits it, give or take the last sentence: 64 tokens on average."""

_SENTENCES = [
    f"{subject} {verb} {thing} {when}. ".encode()
    for subject, verb, thing, when in product(
        ("The scheduler", "A quiet server", "Every good answer", "The patient client"),
        ("waits for", "looks after", "remembers", "counts"),
        ("the longest prefix", "one more token", "a free block", "the next question"),
        ("in the morning", "before it sleeps", "step by step", "without a sound"),
    )
]
_SHORTEST_SENTENCE = min(map(len, _SENTENCES))
_BEGINNING = re.compile(b"|".join(sorted({sentence[:8] for sentence in _SENTENCES})))
_MOST_BEGINNINGS = 200


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """What the server will say, known before it says the first token."""

    text: bytes
    """ASCII. Token i is `text[4i:4i+4]`; a stop string and what follows it are cut off."""
    tokens: int
    """Tokens to generate; those of a stop string count."""
    finish_reason: str
    stop_reason: str | None
    computed: bytes
    """All of the generated text, a stop string included: what lies in the KV cache."""
    begun: int = 0
    """Bytes of the first token that the client has."""

    def token(self, position: int, after: int | None = None) -> str:
        """The text of one token, possibly empty; of all after the one at `after`, if given."""
        begin = (position if after is None else after + 1) * TOKEN_BYTES
        return self.text[max(begin, self.begun) : (position + 1) * TOKEN_BYTES].decode("ascii")


def token_count(size_bytes: int) -> int:
    """Tokens of a text of so many bytes."""
    return -(-size_bytes // TOKEN_BYTES)


def pad(text: bytes, filler: bytes = b"\0") -> bytes:
    """The text, filled up to whole tokens."""
    return text + filler * (-len(text) % TOKEN_BYTES)


def to_token_ids(text: bytes) -> list[int]:
    """The token ids of a text. Linear in its size."""
    whole = pad(text)
    return list(struct.unpack(f"<{len(whole) // TOKEN_BYTES}I", whole))


def from_token_ids(ids: Sequence[int]) -> bytes:
    """The text of token ids, with the last one's filling. Raises `struct.error` for what is no token id."""
    return struct.pack(f"<{len(ids)}I", *ids)


def block_hashes(text: bytes, adapter: str | None = None) -> list[int]:
    """The chained hash of each full block of a text: equal hashes mean equal text from the start, and one adapter."""
    hashes: list[int] = []
    parent = 0 if adapter is None else xxhash.xxh3_64_intdigest(adapter.encode())
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_BYTES], seed=parent)
        hashes.append(parent)
    return hashes


def render_chat(messages: Iterable[tuple[str, str | bytes]]) -> bytes:
    """(role, content) pairs as ChatML, with the assistant's turn opened. Content is text, or its bytes.

    Headers and ends are filled up to whole tokens with line feeds. So the tokens of a response are the same when the
    answer comes back in the history of the next turn, and the next turn hits the blocks that were computed for it.
    """
    parts: list[bytes] = []
    for role, content in messages:
        body = (content.encode() if isinstance(content, str) else content) + b"<|im_end|>\n"
        parts += (_header(role), pad(body, b"\n"))
    parts.append(_header("assistant"))
    return b"".join(parts)


def _header(role: str) -> bytes:
    return pad(f"<|im_start|>{role}\n".encode(), b"\n")


def answer(prompt: bytes, key: str, *, max_tokens: int, natural_end: bool, stop: Sequence[str]) -> PlannedAnswer:
    """The response to a prompt: at most `max_tokens` of it, less if it comes to its natural end or to a stop string.

    `key` is whatever else the response depends on: seeds, the number of the choice. Under the same key a shorter answer
    is the beginning of a longer one.
    """
    source = shake_128(f"{key}:{xxhash.xxh3_64_hexdigest(prompt)}".encode())
    if natural_end:
        wanted = NATURAL_TOKENS[source.digest(1)[0] % len(NATURAL_TOKENS)]
        text = _sentences(source.digest(wanted), wanted * TOKEN_BYTES).rstrip()
    else:
        text = _sentences(source.digest(max_tokens * TOKEN_BYTES // _SHORTEST_SENTENCE + 1), max_tokens * TOKEN_BYTES)
    ended = natural_end and token_count(len(text)) <= max_tokens
    text = text[: max_tokens * TOKEN_BYTES]
    found = [(at, word) for word in stop if (at := text.find(word.encode())) >= 0]
    if found:
        at, word = min(found)
        generated = text[: token_count(at + len(word)) * TOKEN_BYTES]
        return PlannedAnswer(text[:at], token_count(len(generated)), "stop", word, generated)
    return PlannedAnswer(text, token_count(len(text)), "stop" if ended else "length", None, text)


def begun(prompt: bytes, key: str) -> int:
    """How many bytes at the end of a prompt are the beginning of the response to what is before them: somebody had it
    from another server, and asks for the rest. Shorter ones than eight bytes are not recognised.
    """
    for found in islice(_BEGINNING.finditer(prompt), _MOST_BEGINNINGS):
        size = len(prompt) - found.start()
        if found.start():
            whole = answer(prompt[: found.start()], key, max_tokens=token_count(size), natural_end=False, stop=())
            if whole.text.startswith(prompt[found.start() :]):
                return size
    return 0


def rest_of(said: PlannedAnswer, size: int) -> PlannedAnswer:
    """A response without its first `size` bytes. The token in the middle of which it begins is generated again, as
    tokens are where they end.
    """
    first = size // TOKEN_BYTES * TOKEN_BYTES
    tokens = max(1, said.tokens - size // TOKEN_BYTES)
    return replace(said, text=said.text[first:], computed=said.computed[first:], tokens=tokens, begun=size - first)


def reflection(key: str) -> bytes:
    """What is thought before the response: two sentences."""
    return _sentences(shake_128(f"{key}:reflection".encode()).digest(2), 1 << 16).rstrip()


def _sentences(choices: bytes, at_least: int) -> bytes:
    """Whole sentences, one for each byte of `choices`, until they have `at_least` bytes."""
    parts: list[bytes] = []
    size = 0
    for choice in choices:
        parts.append(_SENTENCES[choice])
        size += len(parts[-1])
        if size >= at_least:
            break
    return b"".join(parts)


def embedding(text: bytes, dimensions: int) -> list[float]:
    """A vector of length 1 that depends on all of the text."""
    raw = [byte - 127.5 for byte in shake_128(text).digest(dimensions)]
    length = sum(value * value for value in raw) ** 0.5
    return [value / length for value in raw]
