# SPDX-License-Identifier: Apache-2.0
"""The built-in scorers: each rates every candidate of a request between 0 (worst) and 1 (best).

A candidate whose signal is unknown or stale scores 0: an unknown load must never look idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from lbproxy.core.caches.adapters import AdapterTable
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.request import InferenceRequest


class Scorer(Protocol):
    """Rates candidates."""

    def __call__(self, request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
        """Scores 0..1 in the order of the candidates; higher is better."""
        ...


def queue(request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
    """Requests waiting in the engine: the longest queue scores 0, the shortest 1, all 1 if they are equal.

    Source: the queue scorer of the Gateway API Inference Extension.
    """
    return _lowest_scores_best(
        [None if state.metrics is None or now > state.fresh_until else state.metrics.waiting for state in candidates]
    )


def kv_utilization(request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
    """The share of the KV cache that is free.

    Source: the KV-cache-utilization scorer of the Gateway API Inference Extension.
    """
    return [
        0.0
        if state.metrics is None or now > state.fresh_until or state.metrics.kv_utilization is None
        else 1.0 - state.metrics.kv_utilization
        for state in candidates
    ]


def in_flight(request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
    """Our own requests in flight, scaled like `queue`; always known."""
    return _lowest_scores_best([state.requests for state in candidates])


def prefix(request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
    """The share of the prompt's blocks that the endpoint should have cached; 0 for a prompt shorter than a block.

    Source: the prefix-cache scorer of the Gateway API Inference Extension.
    """
    keys = request.block_keys
    if not keys:
        return [0.0] * len(candidates)
    depths = candidates[0].load.pool.index.match(keys)
    return [depths[state.load.kv.member_id] / len(keys) for state in candidates]


def lora(request: InferenceRequest, candidates: Sequence[EndpointState], *, now: float) -> list[float]:
    """1 where the adapter is loaded, 0.8 where it would get a free slot, 0.6 where our requests for it already wait for
    a slot, 0 where it would have to wait for other adapters. 1 everywhere for a request without an adapter.

    Source: the LoRA-affinity scorer of the Gateway API Inference Extension.
    """
    adapter = request.model
    if adapter is None or adapter not in candidates[0].load.pool.adapters:
        return [1.0] * len(candidates)
    return [_affinity(state.load.adapters, adapter, now) for state in candidates]


def _affinity(table: AdapterTable, adapter: str, now: float) -> float:
    if table.is_loaded(adapter, now):
        return 1.0
    if table.has_room(now):
        return 0.8
    return 0.6 if table.is_waiting(adapter) else 0.0


READ_LOADS: Final = frozenset({"prefix", "lora"})
"""The `SCORERS` that read `EndpointState.load`."""
SCORERS: Final[Mapping[str, Scorer]] = {
    "queue": queue,
    "kv-utilization": kv_utilization,
    "in-flight": in_flight,
    "prefix": prefix,
    "lora": lora,
}


def _lowest_scores_best(counts: Sequence[float | None]) -> list[float]:
    known = [count for count in counts if count is not None]
    if not known:
        return [0.0] * len(counts)
    low, high = min(known), max(known)
    span = high - low
    return [0.0 if count is None else (high - count) / span if span else 1.0 for count in counts]
