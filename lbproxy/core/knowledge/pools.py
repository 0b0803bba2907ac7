# SPDX-License-Identifier: Apache-2.0
"""The pool models of all tiers of endpoints: what is learned of one tier shows nothing of another.

An endpoint that joins starts with what its tier learned. A provider's speed is no guess for a GPU of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.knowledge.prior import assume_speeds

HIGHER_INDEX: Final = 10
"""The index of prefix caches of a higher tier has a tenth of the blocks: it is used less."""


class Pools:
    """By tier."""

    def __init__(self, first: PoolModel | None) -> None:
        """`first`: of tier 1; None under policies that learn nothing."""
        self.first = first
        self._higher: dict[int, PoolModel] = {}
        self._weights_differ = False

    def of(self, tier: int) -> PoolModel | None:
        """The pool model of a tier; None under policies that learn nothing."""
        first = self.first
        if tier == 1 or first is None:
            return first
        if tier not in self._higher:
            blocks = first.index.max_entries // HIGHER_INDEX
            self._higher[tier] = pool = PoolModel(first.index.block_bytes, blocks)
            pool.adapters = first.adapters
        return self._higher[tier]

    def limit_index(self, blocks: int, loads: Iterable[LoadModel]) -> None:
        """Limit the index of prefix caches to this many blocks in each tier."""
        if self.first is not None:
            self.first.index.max_entries = blocks
            for higher in self._higher.values():
                higher.index.max_entries = blocks // HIGHER_INDEX
            for load in loads:
                load.kv.cache.trim(load.pool.index.fair_share)

    def assume_speeds(self, members: Iterable[tuple[float, LoadModel]]) -> None:
        """See `core.knowledge.prior`: within each tier. `members`: the weight of each endpoint, and what is known."""
        members = list(members)
        before, self._weights_differ = self._weights_differ, len({weight for weight, _ in members}) > 1
        if not (before or self._weights_differ):
            return
        by_pool: dict[int, list[tuple[float, LoadModel]]] = {}
        for weight, load in members:
            by_pool.setdefault(id(load.pool), []).append((weight, load))
        for together in by_pool.values():
            assume_speeds(together)
