"""One endpoint's prefix cache: what should be in it, how large it is, and whether it was lost.

Its size is configured, reported or learned, and what is reported or configured overrules what is learned.
"""

from __future__ import annotations

from lbproxy.core.caches.cache_loss import Recall
from lbproxy.core.caches.cache_size import FEW_KEYS, GUESSED_TOKENS, REMEMBERED, CapacityLearner
from lbproxy.core.knowledge.placement import Placement
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.requests.request import Usage


class KvModel:
    """Of one endpoint. Sizes are tokens."""

    __slots__ = (
        "_pool",
        "cache",
        "capacity_tokens",
        "declared",
        "learner",
        "loss",
        "slot",
        "started_at",
        "told_tokens",
    )

    def __init__(self, pool: PoolModel, kv_cache_tokens: int | None) -> None:
        self._pool = pool
        self.cache = pool.index.join()
        """The endpoint in the index of prefixes, for as long as it is not known to have lost them."""
        self.slot = self.cache.slot
        self.learner: CapacityLearner | None = None
        """Of the size, unless that is told exactly."""
        self.capacity_tokens, self.told_tokens, self.declared = 0.0, 0.0, False
        """The size: told, learned or a guess; what space is priced by if it is told, else 0; the settings told it."""
        self.started_at: float | None = None
        """The engine process's start, by its own word."""
        self.loss = Recall()
        self.declare(kv_cache_tokens)

    # The size

    def declare(self, kv_cache_tokens: int | None) -> None:
        """What the settings say of the size counts more than what the engine says. None: they do not say it."""
        self.declared = kv_cache_tokens is not None
        self.learner = None if self.declared else CapacityLearner(self._pool.size)
        self.told_tokens = float(kv_cache_tokens or 0)
        self.capacity_tokens = self.told_tokens or float(GUESSED_TOKENS)

    def told(self, tokens: float, *, at_most: bool = False) -> None:
        """What the engine says of the size: its last word counts. `at_most`: or less, and that is learned."""
        if not at_most and not self.declared:
            self.capacity_tokens = self.told_tokens = tokens
            self.learner = None
        elif self.learner is not None:
            self.learner.size.limit(tokens)
            self.capacity_tokens = self.learner.size.tokens
            # Its space is not cheaper for that than where nothing is said.
            self.told_tokens = min(tokens, self._pool.size.space_tokens)

    # What is in it

    def pin(self, placement: Placement, block_tokens: float, live_tokens: float) -> int:
        """The prompt's blocks are in use from now on. Returns how many of them should have been there."""
        cache, keys = self.cache, placement.request.block_keys
        in_use = cache.pinned_depth(keys) if self.started_at is None else 0
        matched, placement.end = cache.pin(keys)
        placement.left_blocks = matched - in_use
        room = (self.capacity_tokens - live_tokens) / block_tokens
        if cache.size > room or cache.size > self._pool.index.fair_share:
            cache.trim(min(room, self._pool.index.fair_share))
        return matched

    def look_up(self, placement: Placement, in_flight: int, live_tokens: float) -> None:
        """Note how far the blocks of a request are in the cache. To be called before it is counted anywhere."""
        learner = self.learner
        if learner is not None and learner.listens:
            block_tokens = self._pool.index.block_bytes / self._pool.bytes_per_token
            # Of each request in flight half a block on average is no full block, and stands in no index.
            used_tokens = (self.cache.pinned + in_flight / 2.0) * block_tokens + live_tokens
            keys = placement.request.block_keys
            in_use = self.cache.pinned_depth(keys)
            placement.steps = learner.look_up(keys, in_use, used_tokens=used_tokens, block_tokens=block_tokens)

    def ended(self, placement: Placement, usage: Usage | None, output_tokens: int) -> None:
        """A request that was prefilled is over, and counted no more: learn the size from it, where that is learned."""
        learner, request, index = self.learner, placement.request, self._pool.index
        if learner is None:
            return
        if usage is not None and usage.prompt_tokens:
            learner.listens = learner.listens or usage.cached_tokens is not None
            count = len(request.block_keys)
            if placement.steps and count >= FEW_KEYS and request.is_text(usage.prompt_tokens):
                # vLLM says nothing where the others say 0.
                learner.learn(placement.steps, (usage.cached_tokens or 0) / usage.prompt_tokens * (count + 0.5))
        if learner.listens and placement.cache is self.cache:
            block_tokens = index.block_bytes / self._pool.bytes_per_token
            room = (index.max_entries - index.entries) / max(1, index.members)
            learner.remember(
                request.block_keys[: placement.end.end],
                self.cache.pinned_depth(request.block_keys),
                rest_tokens=output_tokens + block_tokens / 2.0,
                max_blocks=min(room, REMEMBERED * learner.size.tokens / block_tokens),
            )
        self.capacity_tokens = learner.size.tokens

    # Its loss

    def is_lost(self, placement: Placement, usage: Usage) -> bool:
        """Whether what was reported as cached, of this prompt and those before it, says that the cache was lost."""
        return self.loss.learn(self._surely_cached(placement), usage)

    def _surely_cached(self, placement: Placement) -> float:
        """Tokens of a prompt that are in the cache unless it was lost; 0 where the endpoint itself reports restarts."""
        if self.started_at is not None or placement.cache is not self.cache:
            return 0.0
        steps = placement.steps
        if self.learner is not None and not (steps and self.learner.size.holds(steps[0].distance)):
            return 0.0  # it may have been evicted
        return placement.left_blocks * self._pool.index.block_bytes / self._pool.bytes_per_token

    def renew(self, *, unseen: bool) -> None:
        """It was lost. `unseen`: only what was not cached any more showed it."""
        self.cache = self._pool.index.renew(self.cache)
        if self.learner is not None:
            self.learner.forget(undo_misses=unseen)
