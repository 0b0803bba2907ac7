# SPDX-License-Identifier: Apache-2.0
"""An exchange with other replicas without a store: what telemetry, the admin API and the documentation show of one."""

from __future__ import annotations

from lbproxy.core.replicas.peers import PeerSnapshot
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationStats


class FakeReplicas:
    """Connected, with these others."""

    url = "redis://redis:6379/0"

    def __init__(self, *others: ReplicaFacts) -> None:
        self.name, self.replica = "lb-1", "lb-1-00000001"
        self.problem: str | None = None
        self.stats = ReplicationStats(
            batches_sent=7,
            bytes_sent=700,
            batches_received=9,
            bytes_received=900,
            malformed=2,
            failures=1,
            append_s=0.25,
        )
        self.beat_age_s: float | None = 0.5
        self.others = list(others)

    def facts(self) -> list[ReplicaFacts]:
        return self.others


def other(name: str, uid: str = "1", in_flight: int = 4, **more: int | float | bool) -> ReplicaFacts:
    """A replica whose batches were received."""
    facts = {"batches": 3, "resets": 1, "missed": 0, "repeated": 0, "unknown": 0, "heard_s": 0.25, "is_complete": True}
    peer = PeerSnapshot(replica=f"{name}-{uid}", in_flight=in_flight, **{**facts, **more})  # type: ignore[arg-type]
    return ReplicaFacts(f"{name}-{uid}", name, "0.2.0", peer)


def unheard(name: str, uid: str = "1") -> ReplicaFacts:
    """One that is alive, and nothing more is known of it."""
    return ReplicaFacts(f"{name}-{uid}", name, "0.2.0", None)
