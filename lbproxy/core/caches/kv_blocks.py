# SPDX-License-Identifier: Apache-2.0
"""The blocks that an engine has in its prefix cache, counted from its KV events: how full the cache is, and how large.

Only blocks on the GPU count: they are what a request hits without a transfer. A block may be stored twice, and a
subscriber that joined late sees blocks leave that it never saw arrive, so it is a set and not a counter. The count is
*complete* if the publisher was followed from its start, from a clear, or for so long that as many known blocks left in
a row as there are: then hardly a block is left that was there before. Until then there is no figure at all.

An engine evicts only what it has no other space for. So once as many blocks were evicted as the cache ever held, the
largest count is its size, less the blocks that are not full. That may be too low by one block for each request that is
cached: a size that the engine reports itself counts more (`KvModel`).

Invariant: at most `MAX_BLOCKS` hashes are held. A model with several groups of layers (sliding windows, Mamba) stores
each token in several blocks of one pool: of these nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_BLOCKS: Final = 1 << 19
"""8 million tokens in blocks of 16; 36 MB at most."""


class KvBlocks:
    """The blocks in the GPU's cache of one endpoint."""

    def __init__(self) -> None:
        self.is_complete = False
        """All blocks in the cache are known."""
        self.block_size = 0
        """Tokens in a block; 0 = not known yet."""
        self._blocks: set[int] = set()
        self._turned = 0
        """Known blocks that left since one left that was not known."""
        self._evicted = 0
        """Blocks that left since the count is complete."""
        self._most = 0
        """The largest count since then."""
        self._has_groups = False

    def begin(self) -> None:
        """The cache is empty now: the engine starts, or cleared it. Its size is what it was."""
        self._blocks.clear()
        self.is_complete = True

    def forget(self) -> None:
        """Events were lost: nothing is known any more, but what the size was."""
        self._blocks.clear()
        self.is_complete = False
        self._turned = 0

    def start_again(self) -> None:
        """It is another engine."""
        self.forget()
        self._evicted = self._most = self.block_size = 0
        self._has_groups = False

    def stored(self, blocks: Sequence[int], block_size: int, group: int) -> bool:
        """Note blocks that arrived. Returns False if there are too many to count: nothing is known then."""
        if group or (self.block_size and block_size != self.block_size):
            self._has_groups = True
        if group:
            return True
        self.block_size = block_size
        self._blocks.update(blocks)
        if len(self._blocks) > MAX_BLOCKS:
            self.forget()
            return False
        if self.is_complete:
            self._most = max(self._most, len(self._blocks))
        return True

    def removed(self, blocks: Sequence[int], group: int) -> None:
        """Note blocks that left, whether they were known or not."""
        if group:
            return
        known = self._blocks
        for block in blocks:
            if block in known:
                known.remove(block)
                self._turned += 1
            else:
                self._turned = 0
        if self.is_complete:
            self._evicted += len(blocks)
        elif self._turned and self._turned >= len(known):
            self.is_complete = True
            self._evicted, self._most = 0, len(known)

    @property
    def tokens(self) -> int | None:
        """Tokens in the cache; None = not known."""
        return len(self._blocks) * self.block_size if self.is_complete and not self._has_groups else None

    @property
    def size_tokens(self) -> int | None:
        """The size of the cache; None = it was never full, or not known."""
        is_measured = self._most > 0 and self._evicted >= self._most and not self._has_groups
        return self._most * self.block_size if is_measured else None
