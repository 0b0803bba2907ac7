# SPDX-License-Identifier: Apache-2.0
"""Balancers that share: what one tells, and what another has counted."""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.core.balancer import Balancer
from lbproxy.core.replicas.batches import Batch, decode, encode
from lbproxy.core.replicas.journal import Journal
from lbproxy.core.replicas.peers import PeerSnapshot
from lbproxy.core.requests.request import InferenceRequest
from tests.support.pool import MODEL, pool_of
from tests.support.prompts import chained


class Replica:
    """A balancer over endpoints that are up, and its part of the exchange."""

    def __init__(self, name: str, endpoints: int = 2, **options: object) -> None:
        self.name = name
        self.balancer, self.endpoints = pool_of(endpoints, **{"policy": "adaptive", **options})
        self.journal, self.peers = self.balancer.share(name)

    def tells(self, now: float) -> list[Batch]:
        """All that it has to tell."""
        return taken(self.journal, now)

    def hears(self, batches: Sequence[Batch], now: float) -> None:
        """As they arrive: as bytes, and in this order."""
        for batch in batches:
            self.peers.hear(decode(encode(batch)), now)

    @property
    def peer(self) -> PeerSnapshot:
        """What it knows of the only other one."""
        (only,) = self.peers.snapshot(0.0)
        return only

    def counts(self) -> list[tuple[int, int, int, int]]:
        """For each endpoint: requests of others, those without a first byte, in flight and pinned in its model."""
        return [counts_of(self.balancer, n) for n in range(len(self.endpoints))]


def counts_of(balancer: Balancer, number: int) -> tuple[int, int, int, int]:
    """Of one endpoint: see `Replica.counts`."""
    state = list(balancer.endpoints.members())[number]
    work, cache = state.load.work, state.load.kv.cache
    return state.elsewhere, state.reported.elsewhere_awaiting, work.in_flight, cache.pinned


def taken(journal: Journal, now: float) -> list[Batch]:
    """All batches that there are."""
    batches = []
    while (batch := journal.take(now)) is not None:
        batches.append(batch)
    return batches


def ask(name: str = "q", blocks: Sequence[int] = (1, 2, 3), **more: object) -> InferenceRequest:
    """A streamed request with a prompt of these blocks."""
    size = 1024 * len(blocks)
    request = InferenceRequest(name, MODEL, True, size + 50, size, chained(blocks))
    return request._replace(**more)  # type: ignore[arg-type]


def joined(count: int = 2, endpoints: int = 2, **options: object) -> list[Replica]:
    """Replicas that have heard each other."""
    replicas = [Replica(f"r{n}", endpoints, **options) for n in range(count)]
    exchange(replicas, 0.0)
    return replicas


def exchange(replicas: Sequence[Replica], now: float) -> None:
    """Until nobody has anything to tell, each hears all."""
    for _ in range(4):
        for one in replicas:
            batches = one.tells(now)
            for other in replicas:
                if other is not one:
                    other.hears(batches, now)
