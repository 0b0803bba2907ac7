# SPDX-License-Identifier: Apache-2.0
"""What is told of KV events, without any."""

from __future__ import annotations

from collections import Counter

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot, EndpointState, snapshot_of
from lbproxy.core.engines.kv_events import KvStats, Problem


def published() -> dict[str, KvStats]:
    """One endpoint that publishes."""
    stats = KvStats(lambda: 10.0, 7, 700, 30, 20, clears=1, restarts=2, lost=3, replayed=4, heard_at=8.5)
    stats.problems = Counter({Problem.GAP: 5})
    return {"gpu-1:8000": stats}


def snapshot(tokens: int | None, fill: float | None) -> EndpointSnapshot:
    """An endpoint with so much in its cache."""
    state = EndpointState(Endpoint(name="gpu-1:8000", base_url="http://gpu-1:8000", uid=EndpointUid(1)))
    state.health = Health.UP
    state.reported.cached_tokens = tokens
    state.reported.measured_cache_tokens = None if fill is None or tokens is None else round(tokens / fill)
    return snapshot_of(state, 1.0, False, 0.0)
