# SPDX-License-Identifier: Apache-2.0
"""The keys of a prompt, by which `core.caches.prefix_index` finds it again.

The bytes of a prompt (`core.requests.prompts`) become one key for each full block. Keys are chained, so that a key
stands for the prompt up to the end of its block. Keys are not secret and can be forged; a forged key only causes a
wrong prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias, cast

import xxhash

BLOCK_BYTES: Final = 1024
"""About 256 tokens of English. Smaller blocks (64 tokens were tried) find no more and cost four times as much."""
MAX_PROMPT_BYTES = 8 << 20
"""How much of a prompt is flattened and hashed: about 2 million tokens, more than engines accept."""
BlockKey: TypeAlias = object
"""A number of 64 bits that is never used in arithmetic. Typed as an int, compiled code would unbox and box each one,
and store a new object in every table."""

_hash: Final = xxhash.xxh3_64_intdigest


def hash_prompt(
    prompt: bytes,
    *,
    model: str | None,
    adapter: str | None = None,
    salt: str | None = None,
    block_bytes: int = BLOCK_BYTES,
    after: tuple[BlockKey, ...] = (),
) -> tuple[BlockKey, ...]:
    """Return one 64-bit key for each full block of `prompt`, in order; a partial last block has none.

    `after`: the keys of what precedes `prompt`; they come first.

    Key n is the xxh3 hash of block n with key n-1 as the seed; the first seed is made of model, adapter and cache salt.
    Equal keys mean equal prompts up to there, in the same cache. One pass, about 0.2 µs a block.
    """
    size = min(len(prompt), MAX_PROMPT_BYTES)
    if size < block_bytes:
        return after
    seed = _cached_seed(model, adapter) if salt is None else _seed(model, adapter, salt)
    key: BlockKey = after[-1] if after else seed
    hash_block = cast("Callable[[bytes, BlockKey], BlockKey]", _hash)
    keys: list[BlockKey] = list(after)
    for start in range(0, size - block_bytes + 1, block_bytes):
        key = hash_block(prompt[start : start + block_bytes], key)
        keys.append(key)
    return tuple(keys)


def _seed(model: str | None, adapter: str | None, salt: str | None = None) -> int:
    names = "\0".join(f"{len(name)}:{name}" if name is not None else "-" for name in (model, adapter, salt))
    return _hash(names.encode("utf-8", "surrogatepass"))


_cached_seed: Final = lru_cache(maxsize=1024)(_seed)
"""Names of models are short (`core.requests.openai`); a salt may be as long as a body."""
