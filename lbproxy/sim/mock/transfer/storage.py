# SPDX-License-Identifier: Apache-2.0
"""How vLLM's ExampleConnector (once SharedStorageConnector) names what it keeps in a folder: one folder a prompt.

A match is the whole prompt, in whole blocks. Prompts of one token more than whole blocks never match: what is stored is
aligned from all tokens, what is looked up from all but the last one.
"""

from __future__ import annotations

import xxhash

from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.mock.text import BLOCK_BYTES, token_count


def aligned(tokens: int) -> int:
    """vLLM's `align_to_block_size`: whole blocks before the last token."""
    return max(0, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def stored_as(prompt: bytes, model: str, adapter: str | None) -> str:
    """The folder in which a prompt is kept."""
    return _name(prompt, aligned(token_count(len(prompt))), model, adapter)


def looked_up_as(prompt: bytes, model: str, adapter: str | None) -> tuple[str, int]:
    """The folder in which a prompt is looked for, and how many tokens it would save; 0 = it is not looked for."""
    tokens = aligned(token_count(len(prompt)) - 1)
    return _name(prompt, tokens, model, adapter), tokens


def _name(prompt: bytes, tokens: int, model: str, adapter: str | None) -> str:
    # The length is not part of vLLM's hash either: the tokens are.
    digest = xxhash.xxh3_128(prompt[: tokens // BLOCK_TOKENS * BLOCK_BYTES])
    digest.update(f"\0{model}\0{adapter or ''}".encode())
    return digest.hexdigest()
