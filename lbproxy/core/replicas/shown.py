# SPDX-License-Identifier: Apache-2.0
"""What is shown of the exchange with other replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbproxy.core.replicas.peers import PeerSnapshot


@dataclass(slots=True)
class ReplicationStats:
    """What was exchanged since the start."""

    batches_sent: int = 0
    bytes_sent: int = 0
    batches_received: int = 0
    bytes_received: int = 0
    malformed: int = 0
    """Batches that could not be read."""
    failures: int = 0
    """How often the store could not be used any more, or not yet."""
    append_s: float | None = None
    """How long the last batch took to be stored."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One other replica that is alive."""

    replica: str
    """Its id."""
    name: str
    """Empty if it is not known, like `version`."""
    version: str
    """The version of its lbproxy."""
    peer: PeerSnapshot | None
    """What is known of its requests; None = it was not heard yet."""


@dataclass(frozen=True, slots=True)
class ReplicationFacts:
    """How the exchange with other replicas is."""

    replica: str
    """The id of this one."""
    name: str
    url: str
    """The URL of the store, without a password."""
    problem: str | None
    """Why the store cannot be used now; None = it can."""
    stats: ReplicationStats
    beat_age_s: float | None
    """Seconds since the store last listed the replicas that are alive; None = it never did."""
    others: Sequence[ReplicaFacts]
