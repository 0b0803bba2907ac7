# SPDX-License-Identifier: Apache-2.0
"""One endpoint's prefix cache: what should be in it, how large it is, and whether it was lost.

Its size is configured, reported, measured by KV events, or learned; the first of these that is known counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from lbproxy.core.caches.cache_loss import LOST_SHARE, LossDetector
from lbproxy.core.caches.cache_size import FEW_KEYS, GUESSED_TOKENS, REMEMBERED_FACTOR, CapacityLearner
from lbproxy.core.knowledge.placement import Placement
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.requests.request import Usage


class KvModel:
    """The prefix cache of one endpoint. Sizes are in tokens."""

    def __init__(self, pool: PoolModel, kv_cache_tokens: int | None) -> None:
        self._pool = pool
        self.cache = pool.index.join()
        """The endpoint in the prefix index, until it is known to have lost its cache."""
        self.member_id = self.cache.member_id
        self.learner: CapacityLearner | None = None
        """Learns the size, unless the exact size is known."""
        self.capacity_tokens, self.known_tokens = 0.0, 0.0
        """The size (configured, reported, measured, learned or guessed); and the size by which space is priced if it is
        known, else 0."""
        self.is_configured = self.is_reported = False
        self.started_at: float | None = None
        """The start of the engine process, as it reports it."""
        self.is_restored = False
        """What is known was saved before a restart of lbproxy, and nothing has shown that the process is the same."""
        self.loss = LossDetector()
        self.configure(kv_cache_tokens)

    # The size

    def configure(self, kv_cache_tokens: int | None) -> None:
        """Set the configured size, which overrules the reported one. None: it is not configured."""
        self.is_configured, self.is_reported = kv_cache_tokens is not None, False
        self.learner = None if self.is_configured else CapacityLearner(self._pool.size)
        self.known_tokens = float(kv_cache_tokens or 0)
        self.capacity_tokens = self.known_tokens or float(GUESSED_TOKENS)

    def size_reported(self, tokens: float, *, at_most: bool = False) -> None:
        """Note the size that the engine reports; the latest report counts. `at_most`: an upper bound, below which it is
        learned.
        """
        if not at_most and not self.is_configured:
            self.capacity_tokens = self.known_tokens = tokens
            self.learner = None
            self.is_reported = True
        elif self.learner is not None:
            self.learner.size.cap(tokens)
            self.capacity_tokens = self.learner.size.tokens
            # The bound must not make its space cost less than where nothing is reported.
            self.known_tokens = min(tokens, self._pool.size.space_tokens)

    def forget_report(self) -> None:
        """The size that was reported, or measured, is that of another process."""
        if not self.is_configured and self.learner is None:
            self.configure(None)

    def size_measured(self, tokens: float) -> None:
        """Note the size that KV events show: it counts unless the size is configured or reported."""
        if not self.is_configured and not self.is_reported:
            self.capacity_tokens = self.known_tokens = tokens
            self.learner = None

    def save(self) -> dict[str, float]:
        """The learned size, for `restore`; empty if the size is configured or reported."""
        return {} if self.learner is None else self.learner.size.save()

    def restore(self, saved: Mapping[str, float], started_at: float | None) -> None:
        """Start with what `save` returned of the process that started at `started_at`, as far as nothing newer is
        known.
        """
        if self.started_at is None:
            self.started_at, self.is_restored = started_at, True
        if saved and self.learner is not None:
            self.learner.size.restore(saved)
            self.capacity_tokens = self.learner.size.tokens

    def forget_size(self) -> None:
        """The engine is not the one whose size was restored."""
        self.is_restored = False
        if self.learner is not None:
            self.learner.start_again()
            self.capacity_tokens = self.learner.size.tokens

    # What is in it

    def pin(self, placement: Placement, block_tokens: float, live_tokens: float) -> int:
        """Pin the prompt's blocks: they are in use from now on. Returns how many of them should have been cached
        before.
        """
        cache, keys = self.cache, placement.request.block_keys
        in_use = cache.pinned_depth(keys) if self.started_at is None else 0
        matched, placement.pinned_end = cache.pin(keys)
        placement.idle_blocks = matched - in_use
        room = (self.capacity_tokens - live_tokens) / block_tokens
        if cache.size > room or cache.size > self._pool.index.fair_share:
            cache.trim(min(room, self._pool.index.fair_share))
        return matched

    def look_up(self, placement: Placement, in_flight: int, live_tokens: float) -> None:
        """Note the distances of a request's blocks in the cache. To be called before the request is counted
        anywhere.
        """
        learner = self.learner
        if learner is not None and learner.reports_cached:
            block_tokens = self._pool.index.block_bytes / self._pool.bytes_per_token
            # Each request in flight has a last block that is half full on average, and is in no index.
            used_tokens = (self.cache.pinned + in_flight / 2.0) * block_tokens + live_tokens
            keys = placement.request.block_keys
            in_use = self.cache.pinned_depth(keys)
            placement.steps = learner.look_up(keys, in_use, used_tokens=used_tokens, block_tokens=block_tokens)

    def ended(self, placement: Placement, usage: Usage | None, output_tokens: int) -> None:
        """Learn the size from the end of a request that was prefilled and is not counted any more."""
        learner, request, index = self.learner, placement.request, self._pool.index
        if learner is None:
            return
        if usage is not None and usage.prompt_tokens:
            learner.reports_cached = learner.reports_cached or usage.cached_tokens is not None
            count = len(request.block_keys)
            if placement.steps and count >= FEW_KEYS and request.is_text(usage.prompt_tokens):
                # vLLM omits the field where other engines report 0.
                learner.learn(placement.steps, (usage.cached_tokens or 0) / usage.prompt_tokens * (count + 0.5))
        if learner.reports_cached and placement.cache is self.cache:
            block_tokens = index.block_bytes / self._pool.bytes_per_token
            room = (index.max_entries - index.entries) / max(1, index.members)
            learner.remember(
                request.block_keys[: placement.pinned_end.end],
                self.cache.pinned_depth(request.block_keys),
                rest_tokens=output_tokens + block_tokens / 2.0,
                max_blocks=min(room, REMEMBERED_FACTOR * learner.size.tokens / block_tokens),
            )
        self.capacity_tokens = learner.size.tokens

    # Its loss

    def is_lost(self, placement: Placement, usage: Usage) -> bool:
        """Whether the reported `cached_tokens` of this prompt and those before it show that the cache was lost."""
        expected_tokens = self._surely_cached(placement)
        if self.is_restored and expected_tokens and (usage.cached_tokens or 0) >= LOST_SHARE * expected_tokens:
            self.is_restored = False
        return self.loss.learn(expected_tokens, usage, doubtful=self.is_restored)

    def _surely_cached(self, placement: Placement) -> float:
        """Tokens of a prompt that are cached unless the cache was lost; 0 where the endpoint itself reports
        restarts.
        """
        reports_restarts = self.started_at is not None and not self.is_restored
        if reports_restarts or placement.cache is not self.cache:
            return 0.0
        steps = placement.steps
        is_known = not self.is_restored  # else nothing is known of when blocks were used
        if is_known and self.learner is not None and not (steps and self.learner.size.holds(steps[0].distance)):
            return 0.0  # it may have been evicted
        return placement.idle_blocks * self._pool.index.block_bytes / self._pool.bytes_per_token

    def renew(self, *, inferred: bool) -> None:
        """Note that the cache was lost. `inferred`: only missing cached tokens showed it."""
        self.cache = self._pool.index.renew(self.cache)
        if self.learner is not None:
            self.learner.forget(undo_misses=inferred)
