# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows of what not every fleet has: recommended numbers of endpoints, endpoints that may sleep, other
replicas, KV events; and what it has to know for that.

Autoscalers get figures by model (`core.scaling.advice`): adapters count for the endpoints of their base model, and have
no series. The label `replica` is the name. Ids are not labels: each process has another one, so that every restart
would add series. Replicas of the same name are added up. Only replicas that are alive have series: 64 at most
(`extras.redis_store.MAX_REPLICAS`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from prometheus_client.core import Metric

from lbproxy.control.families.common import add_to, counter, counters, gauge, gauges, histogram
from lbproxy.control.families.histogram import Histogram
from lbproxy.core.engines.kv_events import KvStats, Problem
from lbproxy.core.observed.snapshot import PoolSnapshot
from lbproxy.core.replicas.peers import PeerSnapshot
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationFacts
from lbproxy.core.scaling.advice import ModelScaling
from lbproxy.core.sleeping.phase import Phase

_TASKS = (
    ("wake", "wakes", "Times that the endpoint was woken, by result"),
    ("sleep", "sleeps", "Times that the endpoint was put to sleep, by result"),
    ("start", "cold_starts", "Times that the webhook was called that starts the endpoint, by result"),
)
MAX_MODELS: Final = 100
MAX_LABEL_CHARS: Final = 128
_COUNTERS = (
    ("messages", "Messages that the endpoint published over ZMQ"),
    ("bytes", "Bytes of these messages"),
    ("clears", "Times that the endpoint cleared its prefix cache"),
    ("restarts", "Times that the publisher of the endpoint started again"),
    ("lost", "Messages that were lost and not replayed"),
    ("replayed", "Messages that were replayed"),
)


class Sleeping(Protocol):
    """The driver of what sleeps: control.sleeping.driver.SleepDriver."""

    wake_times: Histogram
    """How long wakes took that succeeded, in seconds."""

    @property
    def is_needed(self) -> bool:
        """Whether there are servers that may sleep."""

    @property
    def waited(self) -> int:
        """Requests that waited for a wake, so far."""

    @property
    def results(self) -> Mapping[tuple[str, str, str], int]:
        """Orders that were carried out: the endpoint, what, and ok or failed."""


def sleep_families(sleeping: Sleeping, snapshot: PoolSnapshot) -> Iterator[Metric]:
    """Nothing while no endpoint may sleep."""
    if not sleeping.is_needed:
        return
    names = {one.endpoint.uid: one.endpoint.name for one in snapshot.endpoints}
    phases = {names[uid]: one.phase for uid, one in snapshot.sleep.items() if uid in names}
    states = [((name, phase.value), float(phase is now)) for name, now in phases.items() for phase in Phase]
    yield gauges("endpoint_sleep_state", "1 for the current state of the endpoint", ("endpoint", "state"), states)
    failures = [((names[uid],), float(one.failures)) for uid, one in snapshot.sleep.items() if uid in names]
    text = "Wakes, sleeps or starts of the endpoint in a row that failed"
    yield gauges("endpoint_sleep_failures", text, ("endpoint",), failures)
    servers = {one.endpoint.server for one in snapshot.endpoints}
    results = dict(sleeping.results)
    for task, name, text in _TASKS:
        rows = [((one, how), count) for (one, what, how), count in results.items() if what == task and one in servers]
        yield counters(name, text, ("endpoint", "result"), rows)
    times = histogram("wake_seconds", "How long wakes took that succeeded", ())
    add_to(times, [], sleeping.wake_times)
    yield times
    yield counter("waited_for_wake", "Requests that waited for an endpoint to wake", sleeping.waited)


def scaling_families(models: Sequence[ModelScaling]) -> Iterator[Metric]:
    """No sample, while no endpoint has listed its models."""
    by_label = {one.model[:MAX_LABEL_CHARS]: one for one in models[:MAX_MODELS]}
    rows = [((label,), one) for label, one in by_label.items()]
    text = "Endpoints that the model's load needs, by learned speeds; unknown: those that there are"
    yield gauges("recommended_endpoints", text, ("model",), [(labels, one.recommended) for labels, one in rows])
    text = "Endpoints of the model that take requests now"
    yield gauges("model_endpoints", text, ("model",), [(labels, one.endpoints) for labels, one in rows])
    text = "Requests for the model in the queue of lbproxy"
    yield gauges("model_waiting_requests", text, ("model",), [(labels, one.waiting) for labels, one in rows])
    text = "Predicted wait of a request for the model that arrives now, until its prefill"
    yield gauges("model_predicted_wait_seconds", text, ("model",), [(ls, one.predicted_wait_s) for ls, one in rows])
    text = "Share of the capacity of the model's endpoints that is left"
    yield gauges("model_room_ratio", text, ("model",), [(labels, one.room) for labels, one in rows])


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


def kv_families(stats: Mapping[str, KvStats]) -> Iterator[Metric]:
    """How the events of each endpoint arrive, by its name; nothing while none are read."""
    if not stats:
        return
    for name, text in _COUNTERS:
        rows = [((endpoint,), getattr(one, name)) for endpoint, one in stats.items()]
        suffix = "_messages" if name in {"lost", "replayed"} else ""
        yield counters(f"kv_events_{name}{suffix}", text, ("endpoint",), rows)
    text = "Blocks stored in or removed from the prefix cache of the endpoint's GPU"
    blocks = [
        ((endpoint, change), count)
        for endpoint, one in stats.items()
        for change, count in (("stored", one.stored), ("removed", one.removed))
    ]
    yield counters("kv_events_blocks", text, ("endpoint", "change"), blocks)
    text = "Messages or events that were not used, by kind of problem"
    problems = [((name, kind.value), one.problems.get(kind, 0)) for name, one in stats.items() for kind in Problem]
    yield counters("kv_events_problems", text, ("endpoint", "problem"), problems)
    text = "Seconds since the last message of the endpoint"
    yield gauges("kv_events_age_seconds", text, ("endpoint",), [((name,), one.age_s) for name, one in stats.items()])
