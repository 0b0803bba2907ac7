# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of the exchange with other replicas, and what it has to know for that.

The label `replica` is the name. Ids are not labels: each process has another one, so that every restart would add
series. Replicas of the same name are added up. Only replicas that are alive have series: 64 at most
(`extras.redis_store.MAX_REPLICAS`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from lbproxy.control.families.common import counter, counters, gauge, gauges
from lbproxy.core.replicas.peers import PeerSnapshot
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationFacts


def replica_families(replicas: ReplicationFacts) -> Iterator[Metric]:
    """How the exchange works, and what is known of each other replica."""
    stats, others = replicas.stats, replicas.others
    yield gauge("replicas", "Other replicas that are alive", len(others))
    text = "1 while the store of the replicas can be used"
    yield gauge("replicas_connected", text, float(replicas.problem is None))
    text = "Times that the store could not be used any more, or not yet"
    yield counter("replicas_failures", text, stats.failures)
    text = "Seconds since the store last listed the replicas that are alive"
    yield gauges("replicas_heartbeat_age_seconds", text, (), [((), replicas.beat_age_s)])
    text = "How long the last write of a batch to the store took"
    yield gauges("replicas_append_seconds", text, (), [((), stats.append_s)])
    text = "Batches of events that were exchanged over the store, by direction"
    batches = [(("sent",), stats.batches_sent), (("received",), stats.batches_received)]
    yield counters("replicas_batches", text, ("direction",), batches)
    sizes = [(("sent",), stats.bytes_sent), (("received",), stats.bytes_received)]
    yield counters("replicas_bytes", "Bytes of these batches, by direction", ("direction",), sizes)
    text = "Received batches that could not be read, such as those of another version"
    yield counter("replicas_malformed_batches", text, stats.malformed)
    yield from _by_replica(others)


def _by_replica(others: Sequence[ReplicaFacts]) -> Iterator[Metric]:
    rows: defaultdict[str, list[PeerSnapshot | None]] = defaultdict(list)
    for one in others:
        rows[one.name or one.replica].append(one.peer)
    heard = {name: [peer for peer in peers if peer is not None] for name, peers in rows.items()}
    text = "Requests in flight of another replica, as far as is known"
    in_flight = [((name,), sum(peer.in_flight for peer in peers)) for name, peers in heard.items()]
    yield gauges("replica_in_flight", text, ("replica",), in_flight)
    text = "Seconds since the last batch of another replica"
    ages = [((name,), max((peer.heard_s for peer in peers), default=None)) for name, peers in heard.items()]
    yield gauges("replica_batch_age_seconds", text, ("replica",), ages)
    text = "1 while all requests in flight of another replica are known"
    complete = [
        ((name,), float(all(peer is not None and peer.is_complete for peer in peers))) for name, peers in rows.items()
    ]
    yield gauges("replica_complete", text, ("replica",), complete)
    text = "Times that another replica sent all of its requests in flight again"
    resets = [((name,), sum(peer.resets for peer in peers)) for name, peers in heard.items()]
    yield counters("replica_resets", text, ("replica",), resets)
    text = "Times that batches of another replica were missing"
    missed = [((name,), sum(peer.missed for peer in peers)) for name, peers in heard.items()]
    yield counters("replica_missed_batches", text, ("replica",), missed)
