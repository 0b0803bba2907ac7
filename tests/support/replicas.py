# SPDX-License-Identifier: Apache-2.0
"""An exchange with other replicas without a store: what telemetry, the admin API and the documentation show of one."""

from __future__ import annotations

from lbproxy.core.replicas.peers import PeerSnapshot
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationFacts, ReplicationStats


def exchanged(*others: ReplicaFacts) -> ReplicationFacts:
    """Connected, with these others."""
    stats = ReplicationStats(7, 700, 9, 900, malformed=2, failures=1, append_s=0.25)
    return ReplicationFacts("lb-1-00000001", "lb-1", "redis://redis:6379/0", None, stats, 0.5, others)


def other(name: str, uid: str = "1", in_flight: int = 4, **more: int | float | bool) -> ReplicaFacts:
    """A replica whose batches were received."""
    facts = {"batches": 3, "resets": 1, "missed": 0, "repeated": 0, "unknown": 0, "heard_s": 0.25, "is_complete": True}
    peer = PeerSnapshot(replica=f"{name}-{uid}", in_flight=in_flight, **{**facts, **more})  # type: ignore[arg-type]
    return ReplicaFacts(f"{name}-{uid}", name, "0.2.0", peer)


def unheard(name: str, uid: str = "1") -> ReplicaFacts:
    """One that is alive, and nothing more is known of it."""
    return ReplicaFacts(f"{name}-{uid}", name, "0.2.0", None)
