# SPDX-License-Identifier: Apache-2.0
"""What lbproxy shows of itself as JSON: its endpoints, the queue, what it learned, what happened of late.

Everything is read from the Runtime's snapshots when somebody asks; about 15 µs an endpoint. What is not known is null,
never 0, and gauges that are too old to be believed are not shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Protocol

from lbproxy import __version__
from lbproxy.config.tree import Settings
from lbproxy.control.admin.made_token import MadeToken
from lbproxy.control.families.common import Loads, StateStats, WorkerFacts, Workers
from lbproxy.control.telemetry.access_line import stamp
from lbproxy.control.telemetry.recent import Fields, Recent
from lbproxy.core.endpoints.state import EndpointSnapshot, EndpointState
from lbproxy.core.observed.learned import EndpointLearned, QueueSnapshot
from lbproxy.core.observed.ledger import Pair, by_flow, largest
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.replicas.shown import ReplicaFacts, ReplicationFacts
from lbproxy.core.requests.request import Tokens
from lbproxy.core.sleeping.phase import Phase
from lbproxy.core.sleeping.sleepers import SleepSnapshot
from lbproxy.driver.runtime import Runtime

RECENT_TRANSITIONS = 20
SHOWN_FLOWS = 100
SHOWN_PAIRS = 20


class Drainable(Protocol):
    """What stops taking requests before it ends: the listener for clients."""

    @property
    def url(self) -> str | None:
        """Where clients reach it; None: it does not listen yet."""

    @property
    def draining(self) -> bool:
        """It takes no more."""


class ClientListener(Drainable, Protocol):
    """What is shown of it besides."""

    @property
    def running(self) -> int:
        """Requests that were read and have no complete response yet."""

    @property
    def open_connections(self) -> int:
        """Connections of clients."""

    def running_records(self) -> Iterable[RequestRecord]:
        """What is known so far of the requests that run."""


class ShownState:
    """Reads; changes nothing."""

    def __init__(
        self,
        runtime: Runtime,
        front: ClientListener,
        recent: Recent,
        *,
        settings: Callable[[], Settings],
        origin: Callable[[str], str],
        loads: Loads,
    ) -> None:
        """`origin`: where an endpoint comes from, by its name."""
        self.workers: Callable[[], Workers | None] = lambda: None
        """The worker processes. Set by the owner."""
        self.replicas: Callable[[], ReplicationFacts] | None = None
        """Set by the owner if requests are exchanged with other replicas."""
        self.lease: Callable[[str], float | None] = lambda _: None
        """How long an endpoint stays that registered itself, in seconds. Set by the owner."""
        self.made = MadeToken()
        """The owner's, if it has an admin token of its own making."""
        self.recent = recent
        self._runtime = runtime
        self._set = runtime.balancer.endpoints
        self._front = front
        self._settings = settings
        self._origin = origin
        self._loads = loads
        self._started_at = time.monotonic()

    def everything(self) -> Fields:
        """GET /admin/state."""
        learned = self._runtime.balancer.learned(now=self._runtime.now())
        loads, workers, used = self._loads, self.workers(), self._runtime.used()
        return {
            "version": __version__,
            "at": stamp(time.time()),
            "listen": self._front.url,
            "pid": os.getpid(),
            "token_file": self.made.path,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "policy": self._settings().routing.policy,
            "stopping": self._front.draining,
            "running": self._front.running,
            "client_connections": self._front.open_connections,
            "workers": [] if workers is None else [_worker(one) for one in workers.connected],
            "replicas": None if self.replicas is None else _replicas(self.replicas()),
            "settings": {"accepted": loads.succeeded, "at": stamp(loads.succeeded_at)},
            "state_file": _state_file(loads.state),
            "endpoints": self.endpoints(),
            "models": [_rounded(one._asdict()) for one in self._runtime.snapshot().models],
            "flows": [_tokens(*row) for row in largest(by_flow(used), SHOWN_FLOWS)],
            "tokens": [_tokens(*row) for row in largest(used, SHOWN_PAIRS)],
            "queue": _queue(self._runtime.balancer.queue(now=self._runtime.now())),
            "learned": None if learned is None else _rounded(asdict(learned[0])),
            "transitions": self.recent.transitions()[:RECENT_TRANSITIONS],
        }

    @property
    def knows_all(self) -> bool:
        """Whether all requests are counted: a worker process that is not connected may place some by itself."""
        workers = self.workers()
        return workers is None or not workers.unheard

    def endpoints(self) -> list[Fields]:
        """In the order of the settings, then those that are leaving."""
        return self._fields(self._set.every())

    def find(self, name: str) -> list[EndpointSnapshot]:
        """A member by its name, or all ranks of a server by its name; if there is none, one that is leaving."""
        states = [one for one in self._set.every() if name in {one.endpoint.name, one.endpoint.server}]
        found = self._set.snapshot(now=self._runtime.now(), of=states)
        return [one for one in found if not one.removed] or found[:1]

    def endpoint(self, name: str) -> Fields | None:
        """The same as `endpoints` of one."""
        found = islice((one for one in self._set.every() if one.endpoint.name == name), 1)
        return next(iter(self._fields(found)), None)

    def _fields(self, states: Iterable[EndpointState]) -> list[Fields]:
        now, sleepers = self._runtime.now(), self._runtime.balancer.sleepers
        found = self._set.snapshot(now=now, of=states)
        learned, digests = self._runtime.learned_of(one.endpoint.uid for one in found), self.recent.by_endpoint()
        sleep, in_memory = sleepers.snapshot(now), sleepers.in_memory(now)
        return [
            self._endpoint(one, learned.get(one.endpoint.uid), digests.get(one.endpoint.name))
            | {"sleep": sleep_fields(sleep.get(one.endpoint.uid))}
            | {"in_memory": _in_memory(in_memory.get(one.endpoint.uid))}
            for one in found
        ]

    def _endpoint(self, one: EndpointSnapshot, learned: EndpointLearned | None, recent: Fields | None) -> Fields:
        fresh = None if one.stale else one.metrics
        endpoint = one.endpoint
        return {
            "name": endpoint.name,
            "url": endpoint.base_url,
            "engine": endpoint.engine,
            "role": one.handover.role.value,
            "connector": one.handover.connector,
            "tier": endpoint.tier,
            "limits_used": {name: round(share, 4) for name, share in one.limits_used},
            "from": self._origin(endpoint.server),
            "lease_s": None if one.removed or (rest_s := self.lease(endpoint.server)) is None else round(rest_s, 1),
            "health": one.health.value,
            "reason": one.reason or None,
            "draining": one.draining,
            "leaving": one.removed,
            "drained": one.draining and not one.in_flight and self.knows_all,
            "backing_off": one.backing_off,
            "readmitted": one.readmitted,
            "share": round(one.share, 3),
            "in_flight": one.in_flight,
            "awaiting_first_byte": one.awaiting_first_byte,
            "elsewhere": one.elsewhere,
            "placed": one.placed,
            "waiting": None if fresh is None else fresh.waiting,
            "running": None if fresh is None else fresh.running,
            "kv_utilization": None if fresh is None or fresh.kv_utilization is None else round(fresh.kv_utilization, 4),
            "kv_cached_tokens": one.kv_cached_tokens,
            "kv_fill": None if one.kv_fill is None else round(one.kv_fill, 4),
            "metrics_age_s": None if one.metrics_age_s is None else round(one.metrics_age_s, 3),
            "models": one.models,
            "learned": None if learned is None else _rounded(asdict(learned)),
            "recent": recent,
        }


def drain_progress(name: str, found: Sequence[EndpointSnapshot], *, knows_all: bool) -> Fields:
    """How far the draining of an endpoint is, or of all ranks of a server. `knows_all`: see ShownState."""
    in_flight = sum(one.in_flight for one in found)
    draining = all(one.draining for one in found)
    return {
        "name": name,
        "draining": draining,
        "leaving": all(one.removed for one in found),
        "in_flight": in_flight,
        "awaiting_first_byte": sum(one.awaiting_first_byte for one in found),
        "drained": draining and not in_flight and knows_all,
    }


def sleep_fields(one: SleepSnapshot | None) -> Fields | None:
    """Of an endpoint that may sleep."""
    if one is None:
        return None
    return {
        "state": one.phase.value,
        "for_s": round(one.since_s, 3),
        "left_s": None if one.left_s is None else round(one.left_s, 3),
        "failures": one.failures,
        "host": one.host,
    }


MODEL_STATES = {
    Phase.UNKNOWN: "unknown",
    Phase.AWAKE: "loaded",
    Phase.WAKING: "loading",
    Phase.DRAINING: "leaving",
    Phase.FALLING_ASLEEP: "leaving",
}
"""The phases of a model of an endpoint that loads models on demand, as they are shown."""


def _in_memory(models: Sequence[SleepSnapshot] | None) -> list[Fields] | None:
    return (
        None
        if models is None
        else [
            {"model": one.model, "state": MODEL_STATES.get(one.phase, "unknown"), "for_s": round(one.since_s, 3)}
            for one in models
        ]
    )


def _state_file(stats: StateStats) -> Fields:
    return {
        "age_at_start_s": None if stats.age_at_start_s is None else round(stats.age_at_start_s, 3),
        "bytes": stats.bytes,
        "written_at": None if stats.written_at is None else stamp(stats.written_at),
        "writes": {**stats.writes},
    }


def _queue(queue: QueueSnapshot) -> Fields:
    return {
        "waiting": queue.waiting,
        "bytes": queue.bytes,
        "oldest_s": None if queue.oldest_s is None else round(queue.oldest_s, 3),
        "by_priority": {str(priority): count for priority, count in queue.by_priority.items()},
        "by_model": {model or "": count for model, count in queue.by_model.items()},
        "by_flow": queue.by_flow,
        "by_reason": queue.by_reason,
    }


def _worker(one: WorkerFacts) -> Fields:
    return {
        "index": one.index,
        "pid": one.pid,
        "client_connections": one.connections,
        "upstream_connections": one.upstream_connections,
        "running": one.running,
        "cpu_share": round(one.cpu_share, 3),
        "loop_lag_ms": round(1000.0 * one.loop_lag_s, 3),
        "memory_bytes": one.memory_bytes,
    }


def _replicas(replicas: ReplicationFacts) -> Fields:
    age_s = replicas.beat_age_s
    return {
        "id": replicas.replica,
        "name": replicas.name,
        "url": replicas.url,
        "connected": replicas.problem is None,
        "problem": replicas.problem,
        "heartbeat_age_s": None if age_s is None else round(age_s, 3),
        "others": [_other(one) for one in replicas.others],
    }


def _other(one: ReplicaFacts) -> Fields:
    peer = one.peer
    return {
        "id": one.replica,
        "name": one.name,
        "version": one.version,
        "in_flight": None if peer is None else peer.in_flight,
        "batch_age_s": None if peer is None else round(peer.heard_s, 3),
        "complete": peer is not None and peer.is_complete,
        "resets": 0 if peer is None else peer.resets,
        "missed": 0 if peer is None else peer.missed,
    }


def _tokens(pair: Pair, used: Tokens) -> Fields:
    parts = {name: getattr(used, name) for name in Tokens._fields[:3]}
    return {"flow": pair[0], "model": pair[1] or None, **parts, "estimated": used.estimated}


def _rounded(values: Fields) -> Fields:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
