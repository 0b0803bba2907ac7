# SPDX-License-Identifier: Apache-2.0
"""A worker process: a DataPlane whose runtime speaks to the balancer process."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import socket
from collections.abc import Awaitable, Callable
from math import ceil
from pathlib import Path

from lbproxy.config.text import ConfigError
from lbproxy.config.tree import LogSettings, Settings
from lbproxy.control.families.common import Loads
from lbproxy.control.loops import supervise
from lbproxy.control.telemetry.memory import Memory
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.core.observed.sink import Sink
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.processes import process
from lbproxy.processes.control import SHARES, Ready, Start, Stop, Stopped, Stopping, Text, ToChild
from lbproxy.processes.data_plane import DataPlane, place_of
from lbproxy.processes.supervised import SupervisorLink, read
from lbproxy.proxy.front.bodies import BESIDE
from lbproxy.proxy.front.overload import default_bodies
from lbproxy.workers import messages as m
from lbproxy.workers.link import Link
from lbproxy.workers.remote import RemoteRuntime
from lbproxy.workers.shares import Shares

logger = logging.getLogger("lbproxy")

BEAT_S = 0.5
SILENT_S = 3.0
"""A balancer process that says nothing for so long is as good as dead."""
DIAL_S = 0.05
MAX_LAGS = 64
"""Observations of the event loop's lag in one beat."""


async def run_worker(supervisor: SupervisorLink, start: Start) -> None:
    """Serve clients until the supervisor says otherwise, or is gone. Raises ConfigError, OSError."""
    process.prepare()
    Memory.tune()
    worker = Worker(supervisor, start)
    try:
        await worker.run()
    finally:
        await worker.close()


class Worker:
    """One worker process. `run`, then `close`."""

    def __init__(self, supervisor: SupervisorLink, start: Start) -> None:
        self._supervisor = supervisor
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._rng = rng = random.Random()  # noqa: S311 - spreads retries and samples
        self._settings = settings = dealt(read(start.settings), start.workers)
        self._log = ProcessLog(settings.log, shared=True)
        self._log_level: str | None = None
        """If it is another than that of the settings."""
        self._loads = Loads()
        sinks: list[Sink] = [self._log]
        self._runtime = runtime = RemoteRuntime(settings, rng, sinks)
        runtime.owner = self
        connections = ConnectionPool(runtime.pulse)
        self._plane = DataPlane(settings, runtime, connections, rng, sinks, self._loads)
        self._shares = Shares(Path(start.path).parent / SHARES)
        self._lags: list[float] = []
        self._heard_at = 0.0
        self._stop: asyncio.Future[Stop] = self._loop.create_future()

    async def run(self) -> None:
        """Until it is told to stop, and has."""
        async with asyncio.TaskGroup() as self._group:
            running: list[asyncio.Task[None]] = []
            try:
                await self._serve(running)
            finally:
                for task in running:
                    task.cancel()

    async def _serve(self, running: list[asyncio.Task[None]]) -> None:
        """The same; `running`: what must be cancelled at the end."""

        def spawn(name: str, run: Callable[[], Awaitable[None]]) -> None:
            running.append(self._group.create_task(supervise(name, run, self._rng)))

        supervisor, plane, runtime = self._supervisor, self._plane, self._runtime
        front, index = plane.front, self._start.index
        supervisor.on_message = self._on_message
        plane.adopt(self._settings, await plane.prepare(self._settings))
        runtime.pulse.listen(self._note_lag)
        runtime.pulse.listen(supervisor.beat)
        runtime.pulse.start()
        spawn("the link to the balancer process", self._keep_linked)
        while runtime.alone:
            if supervisor.gone.is_set():
                return
            await asyncio.sleep(DIAL_S)
        shares = self._shares
        runtime.pulse.listen(lambda _: shares.set(index, None if self._stop.done() else front.open_connections))
        front.listener.batch = self._batch
        await plane.accept([socket.socket(fileno=fd) for fd in self._start.descriptors["listen"]])
        plane.front.url = self._start.url
        if not self._start.index:
            plane.warn()
        for name, run in plane.loops():
            spawn(name, run)
        spawn("the heartbeat", self._keep_beating)
        spawn("the watch over the supervisor", self._follow_supervisor)
        process.settle()
        supervisor.send(Ready("", None))
        stop = await self._stop
        supervisor.send(Stopping(front.running))
        if not stop.keep_listening:
            plane.stop_accepting()
        cut = await plane.stop(deadline_s=stop.deadline_s, lame_duck_s=stop.lame_duck_s)
        supervisor.send(Stopped(cut))
        runtime.hand_out()
        await asyncio.sleep(0)  # the last records leave

    async def close(self) -> None:
        """Let go of everything."""
        self._runtime.pulse.close()
        if self._runtime.link is not None:
            self._runtime.link.close()
        await self._plane.close()
        self._log.close()

    def _batch(self, waited: bool) -> int:
        front = self._plane.front
        self._shares.set(self._start.index, front.open_connections + front.listener.passing)
        return self._shares.batch(self._start.index, waited=waited)

    # The supervisor

    def _on_message(self, message: ToChild) -> None:
        if isinstance(message, Stop):
            if self._stop.done():
                self._plane.end_within(message.deadline_s)
            else:
                self._stop.set_result(message)

    async def _follow_supervisor(self) -> None:
        """Without a supervisor: finish what runs, and end."""
        await self._supervisor.gone.wait()
        logger.error("the supervisor is gone: this worker finishes its requests and ends", extra={"event": "workers"})
        if not self._stop.done():
            self._stop.set_result(Stop(self._settings.drain.restart_deadline, 0.0, False))

    # The balancer process

    async def _keep_linked(self) -> None:
        """Have a link to the balancer process; when it is lost, another as soon as there is such a process again."""
        while True:
            lost = asyncio.Event()
            link: Link[m.ToWorker] = Link(m.ToWorker, self._runtime.received, lost.set)
            try:
                await self._loop.create_unix_connection(link.protocol, self._start.path)
            except OSError:
                await asyncio.sleep(DIAL_S)
                continue
            self._heard_at = self._loop.time()
            self._runtime.attach(link)
            link.send(m.Hello(self._start.index, os.getpid()))
            await lost.wait()
            was_alone = self._runtime.alone
            self._runtime.detach()
            if not was_alone and not self._stop.done():
                text = "the balancer process is gone: requests are placed by this worker alone until there is another"
                logger.warning(text, extra={"event": "workers", "worker": self._start.index})
            await asyncio.sleep(DIAL_S)

    def pong(self) -> None:
        self._heard_at = self._loop.time()

    def settle(self, text: str) -> None:
        self._log_level = None
        self._group.create_task(self._adopt(Text(text, self._start.settings.source)))

    def set_log_level(self, level: str) -> None:
        self._log_level = level
        self._log.reconfigure(self._log_settings())

    def _log_settings(self) -> LogSettings:
        log, level = self._settings.log, self._log_level
        return log if level is None else log.model_copy(update={"level": level})

    async def _adopt(self, settings: Text) -> None:
        await self._use(settings)
        self._runtime.adopted()

    async def _use(self, settings: Text) -> None:
        try:
            wanted, now = dealt(read(settings), self._start.workers), self._settings
            moves = place_of(wanted.listen) != place_of(now.listen)
            wanted = wanted.model_copy(update={"listen": now.listen} if moves else {})
            prepared = await self._plane.prepare(wanted)
        except ConfigError as error:  # the balancer process could read it a moment ago
            text = "this worker keeps its old settings: %s"
            logger.error(text, "; ".join(error.problems[:3]), extra={"event": "reload", "worker": self._start.index})
            return
        self._settings = wanted
        self._plane.adopt(wanted, prepared)
        self._runtime.reconfigure(wanted)
        self._log.reconfigure(self._log_settings())
        if not self._start.index and wanted != now:
            self._plane.warn()

    # Figures

    def _note_lag(self, lag_s: float) -> None:
        if len(self._lags) < MAX_LAGS:
            self._lags.append(lag_s)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            link = self._runtime.link
            if link is None:
                continue
            if self._loop.time() - self._heard_at > SILENT_S and not self._runtime.pulse.stood_still_since(
                self._heard_at
            ):
                text = "the balancer process says nothing for %g s: requests are placed by this worker alone meanwhile"
                logger.error(text, SILENT_S, extra={"event": "workers", "worker": self._start.index})
                self._runtime.detach()
                link.finish()  # what was sent may be read; there is no other link before that
                continue
            link.send(self._beat())

    def _beat(self) -> m.WorkerFigures:
        plane, used = self._plane, resource.getrusage(resource.RUSAGE_SELF)
        lags, self._lags = self._lags, []
        return m.WorkerFigures(
            plane.own_load(),
            running=plane.front.running,
            cpu_s=used.ru_utime + used.ru_stime,
            lags_s=tuple(lags),
            rss_bytes=plane.overload.rss_bytes,
            internal_errors=self._log.internal_errors,
            dropped_lines=self._log.dropped_lines,
            placed_alone=self._runtime.placed_alone,
            stale=tuple(self._loads.stale),
        )


def dealt(settings: Settings, workers: int) -> Settings:
    """The settings of one of so many workers: limits of the whole are dealt out evenly."""
    limits = settings.limits
    memory = limits.memory or Memory.limit_bytes()
    bodies = limits.buffered_bodies or default_bodies(memory)
    share = {
        "connections": ceil(limits.connections / workers),
        # Else a large body could never be taken.
        "buffered_bodies": max(bodies // workers, limits.body + limits.body // BESIDE),
        # The balancer process needs some too: about as much as a worker.
        "memory": None if memory is None else memory // (workers + 1),
    }
    retry = settings.retry
    budget = {"budget_per_second": retry.budget_per_second / workers}
    dealt_out = {"limits": limits.model_copy(update=share), "retry": retry.model_copy(update=budget)}
    return settings.model_copy(update=dealt_out)
