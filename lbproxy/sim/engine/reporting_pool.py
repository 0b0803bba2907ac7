"""A block pool that reports which content becomes hittable and which is overwritten, as vLLM's KV events do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lbproxy.sim.engine.kv_cache import BlockPool


class BlockReport(Protocol):
    """Who is told."""

    def stored(self, hashes: Sequence[int]) -> None:
        """Full blocks can be hit from now on."""

    def removed(self, content: int) -> None:
        """A block cannot be hit any more."""

    def cleared(self) -> None:
        """No block can be hit any more."""


class ReportingPool(BlockPool):
    """See BlockPool."""

    def __init__(self, total: int, report: BlockReport) -> None:
        super().__init__(total)
        self._report = report

    def emptied(self) -> ReportingPool:
        """See BlockPool. Reports a clear."""
        self._report.cleared()
        return ReportingPool(self.total, self._report)

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """See BlockPool."""
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
