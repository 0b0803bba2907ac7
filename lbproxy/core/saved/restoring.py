# SPDX-License-Identifier: Apache-2.0
"""Gives saved data to a new pool: by the age of the data, and to each endpoint when it joins.

Rates of an endpoint are used as far as their age allows: what is left of their deviation from the pool's shrinks by
`RATES_S`. What an endpoint has in memory (prefixes, adapters) is used for `CONTENTS_S`. An endpoint whose process
started at another time than the saved one keeps nothing: its `LoadModel` sees that in its first page of metrics.

Prefixes are restored as requests would: each prompt is pinned and unpinned, the least recently used first. So the index
holds its own invariants whatever the data says. That takes time, and is done in bounded steps.
"""

from __future__ import annotations

import struct
from collections import deque
from math import exp
from typing import Final, NamedTuple

from lbproxy.core.caches.prefix_index import EndpointCache
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.saved.reading import KEY_BYTES, MAX_AGE_S, Saved

RATES_S: Final = 600.0
"""Time constant after which what an endpoint's rates differ from the pool's is 1/e."""
CONTENTS_S: Final = 300.0
"""Prefixes and adapters that are older are not restored: other clients' requests replace them, as do restarts that
nothing reports."""
STEP_KEYS: Final = 5000
"""Blocks of prompts that one step restores: some 2 ms."""
STEP_PROMPTS: Final = 250


class _Prompts(NamedTuple):
    """Prompts that are to be restored in one cache, the least recently used first."""

    cache: EndpointCache
    ends: deque[int]


class Restoring:
    """Saved data on its way into a pool. Endpoints take theirs when they join; `step` restores prefixes."""

    def __init__(self, pool: PoolModel, saved: Saved, age_s: float, now: float) -> None:
        """Restores what all endpoints have in common. `saved`: it is used up. `age_s`: of the data, as of `now`."""
        self._pool = pool
        self._saved = saved
        self._saved_at = now - age_s
        """When it was saved, by the driver's clock."""
        self._due: deque[_Prompts] = deque()
        self.endpoints = 0
        """How many took their data."""
        self.prompts = 0
        pool.restore(saved.pool, exp(-age_s / RATES_S))

    def joined(self, url: str, load: LoadModel, now: float) -> None:
        """Give a new endpoint what was saved of it, if anything was."""
        age_s = max(0.0, now - self._saved_at)
        found = self._saved.endpoints.pop(url, None)
        if found is None or age_s > MAX_AGE_S:
            return
        load.restore(found.learned, found.started_at, age_s, exp(-age_s / RATES_S), now)
        self.endpoints += 1
        if age_s > CONTENTS_S:
            return
        load.adapters.restore(found.loaded, found.known)
        if found.ends and self._saved.block_bytes == self._pool.index.block_bytes:
            self._due.append(_Prompts(load.kv.cache, deque(found.ends)))

    def step(self) -> bool:
        """Restore some prefixes. Returns whether others are left; later endpoints may bring more."""
        keys = prompts = 0
        while self._due and keys < STEP_KEYS and prompts < STEP_PROMPTS:
            cache, ends = self._due[0]
            if not ends or not cache.attached:
                cache.trim(self._pool.index.fair_share)
                self._due.popleft()
                continue
            path = self._path(ends.popleft())
            cache.unpin(cache.pin(path)[1])
            keys += len(path)
            prompts += 1
            self.prompts += 1
        return bool(self._due)

    def is_over(self, now: float) -> bool:
        """Whether nothing is left to be restored, as all endpoints have joined or the data is too old. Frees what is
        not needed any more.
        """
        age_s, saved = now - self._saved_at, self._saved
        if age_s > CONTENTS_S and not self._due:
            for endpoint in saved.endpoints.values():
                endpoint.ends = []
            saved.parents, saved.keys, saved.depths = [], [], []
        if age_s > MAX_AGE_S:
            saved.endpoints.clear()
        return not self._due and not saved.endpoints

    def _path(self, end: int) -> tuple[object, ...]:
        """The keys of a prompt."""
        pieces: list[bytes] = []
        while end >= 0:
            pieces.append(self._saved.keys[end])
            end = self._saved.parents[end]
        data = b"".join(reversed(pieces))
        return struct.unpack(f"<{len(data) // KEY_BYTES}Q", data)
