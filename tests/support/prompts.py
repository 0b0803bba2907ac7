# SPDX-License-Identifier: Apache-2.0
"""Keys of prompts without the prompts."""

from __future__ import annotations

from collections.abc import Sequence


def chained(blocks: Sequence[int]) -> tuple[int, ...]:
    """The keys of a prompt of these blocks: as `core.requests.prompt_keys.hash_prompt` does it, each stands for all up
    to it.
    """
    return tuple(hash(tuple(blocks[: n + 1])) & (2**64 - 1) for n in range(len(blocks)))
