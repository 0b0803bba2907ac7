# SPDX-License-Identifier: Apache-2.0
"""The blocks of one server's KV cache, and which of them can be hit by a prefix.

As in vLLM V1: a block in use has one or more users; a block without users goes to the end of one free list, keeps its
content (and so its hash) there, and is overwritten when it has come to the front. Blocks never used stand before all
others. Content is known by hash only: whoever computes hashes chains them over the whole prefix, so that equal hashes
mean equal prefixes.

Not modelled: two blocks with the same content both being hittable. The first one keeps the hash, the second is private.

Invariants: `used + available == total`; a block is on the free list exactly if it has no users; a hash leads to a block
exactly if the block carries it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import not_
from typing import Protocol, cast

_STRETCH = 64
"""Hashes looked up at once: a long prefix is nearly always all there, or misses early."""


class BlockPool:
    """`total` blocks. Costs are linear in the blocks named in a call, never in the size of the pool."""

    def __init__(self, total: int) -> None:
        self.total = total
        # Block ids are given out on first use, so a pool that is mostly empty is small: fleets hold hundreds.
        self._users: list[int] = []
        self._hash_of: list[int | None] = []
        self._by_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    def emptied(self) -> BlockPool:
        """A pool of the same kind and size, with nothing in it."""
        return BlockPool(self.total)

    def forget(self) -> None:
        """No block can be hit any more, whoever uses it."""
        self._by_hash.clear()
        self._hash_of = [None] * len(self._hash_of)

    @property
    def available(self) -> int:
        """Blocks without a user, cached content or not."""
        return self.total - len(self._users) + len(self._free)

    @property
    def used(self) -> int:
        """Blocks with at least one user."""
        return len(self._users) - len(self._free)

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest known prefix, at most `limit` of them. Takes none of them."""
        found: list[int] = []
        for start in range(0, min(limit, len(hashes)), _STRETCH):
            stretch = list(map(self._by_hash.get, hashes[start : min(limit, start + _STRETCH)]))
            if None in stretch:
                return found + cast(list[int], stretch[: stretch.index(None)])
            found += cast(list[int], stretch)
        return found

    def take(self, hits: Sequence[int], fresh: int) -> list[int] | None:
        """Use the cached blocks `hits` and `fresh` new ones, in this order, or change nothing and return None."""
        users, free = self._users, self._free
        spare = self.available - fresh
        if spare < 0 or sum(map(not_, map(users.__getitem__, hits))) > spare:
            return None
        for block in hits:
            if not users[block]:
                del free[block]
            users[block] += 1
        taken = list(hits)
        unused = min(fresh, self.total - len(users))
        taken.extend(range(len(users), len(users) + unused))
        users.extend([1] * unused)
        self._hash_of.extend([None] * unused)
        taken.extend(self._evict() for _ in range(fresh - unused))
        return taken

    def _evict(self) -> int:
        block, _ = self._free.popitem(last=False)
        content = self._hash_of[block]
        if content is not None:
            del self._by_hash[content]
            self._hash_of[block] = None
        self._users[block] = 1
        return block

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Make full blocks, not registered before, hittable, each under the hash at its position."""
        for block, content in zip(blocks, hashes, strict=True):
            if content not in self._by_hash:
                self._by_hash[content] = block
                self._hash_of[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one request's blocks, named in the order of its text.

        The tail is freed first and so overwritten first: the head of a prefix is what others share.
        """
        users, free = self._users, self._free
        for block in reversed(blocks):
            users[block] -= 1
            if not users[block]:
                free[block] = None


class BlockReport(Protocol):
    """Who is told."""

    def stored(self, hashes: Sequence[int]) -> None:
        """Full blocks can be hit from now on."""

    def removed(self, content: int) -> None:
        """A block cannot be hit any more."""

    def cleared(self) -> None:
        """No block can be hit any more."""


class ReportingPool(BlockPool):
    """A pool that reports which content becomes hittable and which is overwritten, as vLLM's KV events do."""

    def __init__(self, total: int, report: BlockReport) -> None:
        super().__init__(total)
        self._report = report

    def emptied(self) -> ReportingPool:
        """See BlockPool. Reports a clear."""
        self._report.cleared()
        return ReportingPool(self.total, self._report)

    def forget(self) -> None:
        """See BlockPool. Reports a clear."""
        self._report.cleared()
        super().forget()

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        new = [content for content in hashes if content not in self._by_hash]
        super().register(blocks, hashes)
        if new:
            self._report.stored(new)

    def _evict(self) -> int:
        content = self._hash_of[next(iter(self._free))]
        block = super()._evict()
        if content is not None:
            self._report.removed(content)
        return block
