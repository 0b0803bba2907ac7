# SPDX-License-Identifier: Apache-2.0
"""Routing rules of other routers, for comparison. Each is the rule, not the router: same signals, same tie-breaks, same
driver as `core.policies.adaptive`.

Two things are the same for all, unlike in their originals: prefixes are matched in blocks of 64 tokens against our own
index (an LRU of the endpoint's real capacity), and loads are our own exact counts unless a rule is about gauges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Final, cast

import xxhash

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.requests.request import InferenceRequest

BASELINE_BLOCK_BYTES: Final = 256
"""About 64 tokens."""


class TwoChoices(Policy):
    """The less loaded of two random endpoints, by requests in flight and weight. Source: Mitzenmacher, "The Power of
    Two Choices", 2001.
    """

    reads_weights = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Requests in flight on the two, with this one, by weight; others cannot win."""
        drawn = self._rng.sample(range(len(candidates)), min(2, len(candidates)))
        costs = [float("inf")] * len(candidates)
        for index in drawn:
            state = candidates[index]
            costs[index] = (state.requests + 1.0) / state.endpoint.weight
        return Prices(costs)


class GieTree(Policy):
    """The filter tree of the first Gateway API Inference Extension (pkg/epp/scheduling/filter.go, v0.1 to v0.3).

    Critical requests (priority 0 and up): where queues are below 128, adapter affinity, then short queue, then free
    cache; if none is, queue, then adapter, then cache. Sheddable ones: the same among those with queue ≤ 5 and cache ≤
    0.8, and 429 if there are none. Unknown gauges count as full.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES  # for the adapter table only
    may_refuse = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """0 for those that pass every filter, 1 for the rest; infinite if a sheddable request must be refused."""
        left, now = list(candidates), context.now
        if request.priority < 0:
            left = [s for s in left if _queue(s, now) <= 5.0 and _utilization(s, now) <= 0.8]
            if not left:
                return Prices([inf] * len(candidates))
        short = [state for state in left if _queue(state, now) < 128.0]
        if short:
            left = self._with_affinity(request, short, now)
            left = _lowest_band(left, lambda state: _queue(state, now))
        else:
            left = _lowest_band(left, lambda state: _queue(state, now))
            left = self._with_room(request, left, now)
        left = _lowest_band(left, lambda state: _utilization(state, now))
        passed = {id(state) for state in left}
        return Prices([0.0 if id(state) in passed else 1.0 for state in candidates])

    def _with_affinity(self, request: InferenceRequest, states: list[EndpointState], now: float) -> list[EndpointState]:
        """The endpoints that have the adapter; rarely those that could load it."""
        adapter = request.model
        if adapter is None or adapter not in states[0].load.pool.adapters:
            return states
        having = [state for state in states if state.load.adapters.is_loaded(adapter, now)]
        room = [s for s in states if not s.load.adapters.is_loaded(adapter, now) and s.load.adapters.has_room(now)]
        if having and room:
            return having if self._rng.random() < 0.999 else room
        return having or room or states

    @staticmethod
    def _with_room(request: InferenceRequest, states: list[EndpointState], now: float) -> list[EndpointState]:
        adapter = request.model
        if adapter is None or adapter not in states[0].load.pool.adapters:
            return states
        tables = [(state, state.load.adapters) for state in states]
        return [s for s, table in tables if table.is_loaded(adapter, now) or table.has_room(now)] or states


class LlmD(Policy):
    """llm-d's prefix-cache-affinity filter, then its token-load scorer.

    Source: llm-d-router, pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity (affinityThreshold 0.80,
    maxTTFTPenaltyMs 18,000, exploration 0). Its peak prefill throughput is calibrated, ours learned.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Uncached tokens, in flight and own; cold endpoints cannot win unless a warm one is 18 s behind."""
        uncached = _uncached(request, candidates)
        blocks = len(request.block_keys)
        depths = candidates[0].load.pool.index.match(request.block_keys)
        tokens = [state.load.work.pending_uncached() for state in candidates]
        warm = [blocks > 0 and depths[state.load.kv.member_id] >= 0.8 * blocks for state in candidates]
        costs = [queued + own for queued, own in zip(tokens, uncached, strict=True)]
        best_warm = min((t for t, is_warm in zip(tokens, warm, strict=True) if is_warm), default=inf)
        best_cold = min((t for t, is_warm in zip(tokens, warm, strict=True) if not is_warm), default=inf)
        if best_warm < inf and (best_warm - best_cold) * candidates[0].load.pool.token_ms <= 18_000.0:
            costs = [cost if is_warm else inf for cost, is_warm in zip(costs, warm, strict=True)]
        return Prices(costs)


class CacheAware(Policy):
    """SGLang's cache-aware router: the longest match if it is above 0.3 of the prompt, else the least filled cache; but
    if loads differ by more than 64 and by more than a factor of 1.5, the least loaded endpoint.

    Source: sgl-model-gateway (now SMG), src/policies/cache_aware.rs and its documentation, default thresholds.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Requests in flight, minus matched blocks, or blocks in the cache."""
        loads = [state.requests for state in candidates]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return Prices([float(load) for load in loads])
        depths = candidates[0].load.pool.index.match(request.block_keys)
        matches = [depths[state.load.kv.member_id] for state in candidates]
        if max(matches) * BASELINE_BLOCK_BYTES > 0.3 * request.prompt_bytes:
            return Prices([-float(match) for match in matches])
        return Prices([float(state.load.kv.cache.size) for state in candidates])


class PrefixHash(Policy):
    """Consistent hashing with bounded loads, by the first 256 tokens: the first endpoint in the order of its hash that
    has less than 1.25 times the mean in flight.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2017, as in KubeAI's PrefixHash
    and SMG's prefix_hash (256 tokens, 1.25); rendezvous hashing replaces the ring.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """The hash, 0 to 1, and 1 more for full endpoints."""
        keys = request.block_keys[:4]
        seed = cast(int, keys[-1]) if keys else _hash(request.session or request.id, 0)
        most = ceil(1.25 * (sum(state.requests for state in candidates) + 1) / len(candidates))
        return Prices([_hash(state.endpoint.name, seed) / 2**64 + (state.requests >= most) for state in candidates])


class Preble(Policy):
    """Preble's E2: a prompt that is mostly cached goes to the least loaded of the endpoints with the longest match,
    unless its load is far above the lowest; others to the lowest sum of load, eviction cost and own prefill.

    Source: WukLab/preble, multi_node/global_scheduler_with_time.py. Its load is a histogram over 3 minutes by tree
    node, ours a sum with that time constant; its eviction cost walks the tree, ours uses the pool's hit ratio.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES
    MAX_RATIO = 15.0
    """HIGH_LOAD_THRESHOLD there."""

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Tokens: of the last three minutes, to be recomputed because of evictions, and its own."""
        pool = candidates[0].load.pool
        uncached = _uncached(request, candidates)
        block = pool.index.block_bytes / pool.bytes_per_token
        work = [state.load.work.recent_tokens(context.now) for state in candidates]
        fewest = min(uncached)
        if request.prompt_bytes / pool.bytes_per_token - fewest > fewest:
            holders = [load if own == fewest else inf for load, own in zip(work, uncached, strict=True)]
            if min(holders) <= self.MAX_RATIO * max(1.0, min(work)):
                return Prices(holders)
        costs = []
        for state, load, own in zip(candidates, work, uncached, strict=True):
            evicted = max(0.0, state.load.kv.cache.size * block + own - state.load.kv.capacity_tokens)
            costs.append(load + evicted * pool.hit_ratio + own)
        return Prices(costs)


class Dynamo(Policy):
    """NVIDIA Dynamo's KV router: prefill to compute (queued and own) plus KV in use (there and own), in blocks.

    Source: Dynamo's documentation, "Routing Concepts" (overlap credit 1, prefill scale 1, temperature 0).
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Blocks of 16 tokens."""
        pool = candidates[0].load.pool
        block = pool.index.block_bytes / pool.bytes_per_token
        prompt = request.prompt_bytes / pool.bytes_per_token
        costs = []
        for state, own in zip(candidates, _uncached(request, candidates), strict=True):
            load = state.load
            in_use = load.kv.cache.pinned * block + load.work.live_tokens
            costs.append((load.work.pending_uncached() + own + in_use + prompt) / 16.0)
        return Prices(costs)


class LMetric(Policy):
    """Uncached tokens, queued and own, times requests with this one. Source: Zhang et al., "LMetric: Simple is Better",
    arXiv 2603.15202.
    """

    block_bytes: int | None = BASELINE_BLOCK_BYTES

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Tokens times requests."""
        uncached = _uncached(request, candidates)
        return Prices(
            [
                (state.load.work.pending_uncached() + own) * (state.requests + 1)
                for state, own in zip(candidates, uncached, strict=True)
            ]
        )


class MinTtft(Policy):
    """The earliest first token, whatever it costs others: the first term of the adaptive price alone."""

    reads_weights = True  # as speeds, until they are measured: see `core.knowledge.prior`
    block_bytes: int | None = BASELINE_BLOCK_BYTES
    unit: str | None = "ms"

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        """Milliseconds to the first token."""
        token_ms, now = candidates[0].load.pool.token_ms, context.now
        return Prices(
            [
                state.load.speed.base_ms + (state.load.backlog_tokens(now) + own) * token_ms * state.load.speed.factor
                for state, own in zip(candidates, _uncached(request, candidates), strict=True)
            ]
        )


def _hash(text: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed)


def _uncached(request: InferenceRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Tokens of the prompt that each candidate has to compute."""
    pool = candidates[0].load.pool
    depths = pool.index.match(request.block_keys)
    prompt = request.prompt_bytes / pool.bytes_per_token
    block = pool.index.block_bytes / pool.bytes_per_token
    return [max(1.0, prompt - depths[state.load.kv.member_id] * block) for state in candidates]


def _queue(state: EndpointState, now: float) -> float:
    """Requests waiting in the engine, by its gauge."""
    metrics = state.metrics
    return inf if metrics is None or metrics.waiting is None or now > state.fresh_until else metrics.waiting


def _utilization(state: EndpointState, now: float) -> float:
    metrics = state.metrics
    unknown = metrics is None or metrics.kv_utilization is None or now > state.fresh_until
    return 1.0 if unknown or metrics is None else metrics.kv_utilization or 0.0


def _lowest_band(states: list[EndpointState], signal: Callable[[EndpointState], float]) -> list[EndpointState]:
    """Those in the first of N equal parts of the range of the N states."""
    values = [signal(state) for state in states]
    known = [value for value in values if value < inf]
    if not known:
        return states
    most = min(known) + (max(known) - min(known)) / len(states)
    return [state for state, value in zip(states, values, strict=True) if value <= most]
