# SPDX-License-Identifier: Apache-2.0
"""The `Plane` of the balancer process: worker processes, added up."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lbproxy.config.tree import Settings
from lbproxy.control.admin.key_files import read_credentials
from lbproxy.control.families.common import WorkerFacts, Workers
from lbproxy.core.observed.record import RequestRecord
from lbproxy.driver.own_load import OwnLoad
from lbproxy.extras.tracing import find_traces
from lbproxy.processes.data_plane import Loop, Parts
from lbproxy.workers.server import Session, WorkerServer


class WorkersFront:
    """What is shown of the workers' front ends: see control.admin.state.ClientListener."""

    def __init__(self, server: WorkerServer, url: str, least: int) -> None:
        """`least`: so many workers are there before any is said to be."""
        self._server, self._url, self._least = server, url, least
        self.draining = False
        """Workers take no more requests. Set by the owner, which the supervisor tells."""

    @property
    def url(self) -> str | None:
        """Where clients reach them; None: none accepts connections, or not all that are to begin together."""
        server = self._server
        return self._url if server.sessions and server.most_sessions >= self._least else None

    @property
    def running(self) -> int:
        """Requests that run."""
        return sum(len(one.jobs) for one in self._server.sessions)

    @property
    def open_connections(self) -> int:
        """Of clients."""
        return sum(one.beat.load.connections for one in self._server.sessions)

    def running_records(self) -> Iterable[RequestRecord]:
        """Of requests that run, as far as they are placed or wait."""
        return self._server.running_records()


class WorkerTotals:
    """Counts of workers added up, those of ended workers included."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server
        self._gone: Counter[str] = Counter()
        """Counts of workers that are dead, by family and label."""
        server.succession.on_dead = self._on_dead

    def _on_dead(self, session: Session) -> None:
        self._gone += _counts(session)

    def by_label(self, family: str) -> dict[str, int]:
        """One of the families of `_counts`, by label."""
        total = Counter(self._gone)
        for session in (*self._server.sessions, *self._server.succession.former.values()):
            total.update(_counts(session))
        return {name.partition("/")[2]: n for name, n in total.items() if name.partition("/")[0] == family}

    def number(self, family: str) -> int:
        """One that has no labels."""
        return self.by_label(family).get("", 0)


class Lags:
    """How late the workers' event loops are: see driver.pulse.Pulse."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[float], None]] = []

    def listen(self, listener: Callable[[float], None]) -> None:
        self._listeners.append(listener)

    def observe(self, lags_s: Sequence[float]) -> None:
        """A worker observed these."""
        for lag_s in lags_s:
            for listener in self._listeners:
                listener(lag_s)


class WorkersPlane:
    """Has the methods of a DataPlane, for clients that other processes serve."""

    sockets: Sequence[socket.socket] | None = None

    def __init__(self, parts: Parts, path: str, url: str, count: int, *, begins: bool) -> None:
        """`path`: where workers find this process. `url`: where clients find workers. `count`: of workers. `begins`:
        none of them served before, nor those of another lbproxy in their place.
        """
        self.server = WorkerServer(parts.runtime)
        parts.sinks.append(self.server)
        self._loads = parts.loads
        self._path, self._url = path, url
        self.front = WorkersFront(self.server, url, count if begins else 1)
        self._totals = WorkerTotals(self.server)
        self._count = count
        self.pulse = Lags()
        self.server.on_beat = self._on_beat
        self.keys: int | None = None

    def _on_beat(self, session: Session) -> None:
        self.pulse.observe(session.beat.lags_s)
        self._loads.stale = {what for one in self.server.sessions for what in one.beat.stale}

    async def prepare(self, settings: Settings) -> int:
        """Read what workers will read, so that what is wrong is seen before; returns the number of API keys."""
        credentials = await asyncio.to_thread(read_credentials, settings)
        await asyncio.to_thread(find_traces, settings)
        return len(credentials.keys)

    def adopt(self, settings: Settings, prepared: int) -> None:
        """The owner tells the workers: they read the settings' text."""
        self.keys = prepared or None
        self._loads.stale.clear()

    def own_load(self) -> OwnLoad:
        loads, totals = [one.beat.load for one in self.server.sessions], self._totals
        return OwnLoad(
            next((one.refuses for one in loads if one.refuses), None),
            totals.by_label("refused"),
            totals.by_label("connections"),
            totals.number("handshakes"),
            totals.number("ended"),
            sum(one.held_bytes for one in loads),
            sum(one.max_held_bytes for one in loads),
            sum(one.limit_bytes or 0 for one in loads) or None,
            totals.by_label("traces") or None,
            sum(one.connections for one in loads),
            sum(one.upstream_connections for one in loads),
        )

    def workers(self) -> Workers:
        totals, unheard = self._totals, max(0, self._count - self.server.heard())
        errors, dropped, alone = totals.number("internal"), totals.number("dropped"), totals.number("alone")
        return Workers([_facts(one) for one in self.server.sessions], unheard, errors, dropped, alone)

    def set_log_level(self, level: str) -> None:
        """Workers log from this level on; this process's log is its owner's."""
        self.server.set_log_level(level)

    async def accept(self, sockets: Sequence[socket.socket]) -> str:
        """Workers accept; they find this process from now on."""
        await self.server.listen(self._path)
        return self._url

    def stop_accepting(self) -> None:
        """Nothing: the supervisor tells the workers."""

    def warn(self) -> None:
        """Nothing: the first worker does."""

    def loops(self) -> list[Loop]:
        """Nothing."""
        return []

    async def stop(self, *, deadline_s: float, lame_duck_s: float) -> int:
        """Workers have stopped before."""
        return 0

    def end_within(self, deadline_s: float) -> None:
        """Workers have stopped before."""

    async def close(self) -> None:
        """End the links."""
        self.server.close()


def _facts(session: Session) -> WorkerFacts:
    beat = session.beat
    lag_s = max(beat.lags_s, default=0.0)
    mine = beat.load.connections, beat.running, beat.load.upstream_connections, beat.cpu_s
    return WorkerFacts(session.index, session.pid, *mine, session.cpu_share, lag_s, beat.rss_bytes)


def _counts(session: Session) -> Counter[str]:
    beat, load = session.beat, session.beat.load
    counts: Counter[str] = Counter()
    families = {"refused": load.refused, "connections": load.refused_connections, "traces": load.traces or {}}
    for family, by_label in families.items():
        counts.update({f"{family}/{label}": n for label, n in by_label.items()})
    singles = {
        "ended": load.ended,
        "handshakes": load.failed_handshakes,
        "internal": beat.internal_errors,
        "dropped": beat.dropped_lines,
        "alone": beat.placed_alone,
    }
    counts.update({f"{family}/": n for family, n in singles.items()})
    return counts
