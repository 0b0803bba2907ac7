# SPDX-License-Identifier: Apache-2.0
"""How the endpoints of a group are now, on average: what they run, what they hold, and what is known of their limits.

The engine's own word counts before ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.handover import Role

MIN_PREFILLS: Final = 20
"""Samples of the time to prefill a token, for each endpoint, before it counts."""


class MeanGauges(NamedTuple):
    """What a group's endpoints that take requests have, each on average; `endpoints` of them."""

    endpoints: int
    running: float
    """Requests of all clients."""
    own: float
    """Requests of this lbproxy, waiting in the engine or not."""
    most_running: float
    limit: float
    """Requests that one runs at once; infinite: not known."""
    cache_tokens: float
    """Size of the KV cache; infinite: not known."""
    used_tokens: float
    """Tokens of the KV cache in use."""
    prefill_s: float | None
    """For a token; None: not known."""


def gauges_of(usable: Sequence[EndpointState], endpoints: int, now: float) -> MeanGauges | None:
    """Of a sample of `endpoints` that take requests; None if there are none, or if they share the work of one
    request.
    """
    if not usable or any(state.handover.role is not Role.BOTH for state in usable):
        return None
    count = len(usable)
    running = [_running(state, now) for state in usable]
    slots = [state.load.room.slots for state in usable]
    caches = [state.load.kv.known_tokens for state in usable if state.load.kv.known_tokens]
    limits = [one.limit for one in slots if one.limit < inf and not (caches and one.limited_by_space)]
    speeds = [state.load.speed.token_ms / 1000.0 for state in usable]
    pool = usable[0].load.pool
    is_learned = pool.samples.prefill_ms_per_token >= MIN_PREFILLS * pool.index.members
    return MeanGauges(
        endpoints,
        sum(running) / count,
        sum(state.in_flight for state in usable) / count,
        max(running),
        sum(limits) / len(limits) if limits else inf,
        sum(caches) / len(caches) if caches else inf,
        sum(used_tokens(state, now) for state in usable) / count,
        sum(speeds) / count if is_learned else None,
    )


def _running(state: EndpointState, now: float) -> float:
    """Requests of all clients in the engine's batch: its own word, or ours up to what it runs at once."""
    if state.metrics is not None and state.metrics.running is not None and now <= state.fresh_until:
        return state.metrics.running
    present = state.in_flight + max(float(state.elsewhere), state.load.room.others.requests(now))
    return min(present, state.load.room.slots.limit)


def used_tokens(state: EndpointState, now: float) -> float:
    """Of the KV cache, by requests that run: the engine's own word, or ours."""
    load = state.load
    metrics = state.metrics
    if metrics is not None and metrics.kv_utilization is not None and now <= state.fresh_until:
        return metrics.kv_utilization * load.kv.capacity_tokens
    own = load.kv.cache.pinned * load.pool.index.block_bytes / load.pool.bytes_per_token + load.work.live_tokens
    return own + load.room.others.space(now)
