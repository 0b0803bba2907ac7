# SPDX-License-Identifier: Apache-2.0
"""The balancer process: the Balancer and the control plane for all workers, an `app.Proxy` without own clients."""

from __future__ import annotations

import asyncio
import logging
import time

from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.discovery.overlay import Addition, Changes, Overlay, UnknownEntryError
from lbproxy.control.loops import supervise
from lbproxy.control.telemetry.memory import Memory
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.core.saved.reading import Saved, SavedError, read_lines
from lbproxy.net.listening.inherit import Inherited
from lbproxy.net.listening.notify import Notifier
from lbproxy.processes import app, process
from lbproxy.processes.control import (
    Adopt,
    Counted,
    Draining,
    Ready,
    Reload,
    Reloaded,
    Reloading,
    Save,
    Start,
    Stop,
    Text,
    ToChild,
)
from lbproxy.processes.data_plane import Parts
from lbproxy.processes.plane import WorkersPlane
from lbproxy.processes.settings_file import parse_text, read_text
from lbproxy.processes.supervised import SupervisorLink, read

logger = logging.getLogger("lbproxy")

UIDS: int = 1 << 32
"""How many uids of endpoints each balancer process has for itself."""
WELCOME_WITHIN_S = app.SUCCESSOR_WAITS_S
"""A balancer process after another decides once an endpoint is up, or after this long. Until then workers do; or, in a
restart, the old lbproxy, as workers accept connections once this process decides."""

COUNT_EVERY_S = 1.0
"""What was used of limits in about so long is not counted if the balancer process dies."""


async def run_balancer(supervisor: SupervisorLink, start: Start) -> None:
    """Decide until the supervisor says otherwise, or is gone with all workers. Raises ConfigError, OSError."""
    process.prepare()
    Memory.tune()
    await Balancing(supervisor, start).run()


class _Told(Notifier):
    """Tells the supervisor what would be told systemd."""

    def __init__(self, supervisor: SupervisorLink) -> None:
        super().__init__(None)
        self._supervisor = supervisor
        self._reloads = False

    def reloading(self) -> None:
        self._reloads = True
        self._supervisor.send(Reloading())

    def ready(self, status: str) -> None:
        """See Notifier. That of the start is the supervisor's own, when all processes are ready."""
        if self._reloads:
            self._reloads = False
            self._supervisor.send(Reloaded(status))

    def beat(self, lag_s: float = 0.0) -> None:
        self._supervisor.beat(lag_s)


class Balancing:
    """One balancer process."""

    def __init__(self, supervisor: SupervisorLink, start: Start) -> None:
        self._supervisor = supervisor
        self._start = start
        self._in_force = start.settings
        self._read = ""
        """The text that was read last, whether it is in force or not."""
        self._orders = app.Orders(read_settings=self._read_again, reloaded=self._reloaded, overlaid=self._adopted)
        overlay, settings = _as_before(start.settings)
        first_uid = start.generation * UIDS
        self._running: list[asyncio.Task[None]] = []
        self._log = ProcessLog(settings.log, shared=True)
        self._proxy = app.Proxy(settings, _Told(supervisor), self._make_plane, first_uid, self._log)
        self._proxy.overlay = overlay
        self._proxy.keeper.counted = _counted(start.counted)
        self._proxy.keeper.has_predecessor = start.succeeds and not start.generation

    async def run(self) -> None:
        """Until it is told to stop."""
        supervisor = self._supervisor
        supervisor.on_message = self._on_message
        inherited = Inherited.of_descriptors(self._start.descriptors, self._start.settings.drained)
        try:
            await self._proxy.run(inherited, self._orders, self._on_ready)
        finally:
            await self._proxy.close()

    def _make_plane(self, parts: Parts) -> WorkersPlane:
        self._plane = plane = WorkersPlane(
            parts,
            self._start.path,
            self._start.url,
            self._start.workers,
            begins=not (self._start.generation or self._start.succeeds),
        )
        plane.server.succession.lost.log = self._log.ended
        return plane

    def _on_ready(self, at: app.Listening) -> None:
        tasks = self._proxy.tasks
        counting = supervise("the count of limits", self._count, self._proxy.rng)
        works = self._welcome(), self._end_with_the_workers(), counting
        self._running = [tasks.create_task(work) for work in works]
        self._supervisor.send(Ready(self._proxy.status(), at.admin_url))

    async def _welcome(self) -> None:
        """Take over from the workers."""
        if self._start.generation or self._start.succeeds:
            await self._proxy.endpoint_comes_up(WELCOME_WITHIN_S)
        self._plane.server.ready()

    def _on_message(self, message: ToChild) -> None:
        if isinstance(message, Reload):
            self._orders.reload.set()
        elif isinstance(message, Draining):
            self._plane.front.draining = True
            if message.handed_over:
                self._proxy.keeper.hand_over()
                if self._proxy.admin is not None:
                    self._proxy.admin.stop_accepting()
        elif isinstance(message, Save):
            self._proxy.tasks.create_task(self._proxy.keeper.write_now())
        elif isinstance(message, Stop):
            for task in self._running:
                task.cancel()
            self._orders.hurry.set()
            self._orders.stop.set()

    async def _count(self) -> None:
        """Have the supervisor, while there is one, know what was used of limits, for the next balancer process."""
        said = b""
        while not self._supervisor.gone.is_set():
            await asyncio.sleep(COUNT_EVERY_S)
            counted = await self._proxy.keeper.count()
            if counted or said:
                self._supervisor.send(Counted(counted))
            said = counted

    async def _end_with_the_workers(self) -> None:
        """Without a supervisor: end once no worker is left."""
        await self._supervisor.gone.wait()
        logger.error("the supervisor is gone: this process ends with the workers", extra={"event": "workers"})
        self._plane.front.draining = True
        while self._plane.server.sessions:  # noqa: ASYNC110 - once in a lifetime
            await asyncio.sleep(0.1)
        self._orders.stop.set()

    # Settings

    def _read_again(self) -> Settings:
        """Called in a thread; `_reloaded` follows if the settings are in force then."""
        source = self._start.settings.source
        self._read = read_text(source)
        return parse_text(self._read, source)

    async def _reloaded(self) -> None:
        self._in_force = Text(self._read, self._in_force.source)
        self._adopted()
        await self._plane.server.settle(self._in_force.text)

    def _adopted(self) -> None:
        """Have the supervisor start the next balancer process with what is in force now."""
        added, removed = self._proxy.overlay.changes
        text, source = self._in_force.text, self._in_force.source
        lines = tuple(one.to_text() for one in added)
        in_force = Text(text, source, lines, removed, tuple(sorted(self._proxy.runtime.drained)))
        self._supervisor.send(Adopt(in_force, self._proxy.status()))
        self._supervisor.link.flush()  # before the client of the admin API gets its response


def _counted(lines: bytes) -> Saved | None:
    """What the balancer process before this one counted of limits."""
    try:
        return read_lines(lines.splitlines()) if lines else None
    except SavedError as error:
        logger.error("limits begin anew: what was used of them cannot be read: %s", error, extra={"event": "workers"})
        return None


def _as_before(text: Text) -> tuple[Overlay, Settings]:
    """The settings that were in force, with what the admin API changed. Raises ConfigError."""
    settings = read(text)
    added = tuple(Addition.from_text(one, time.monotonic()) for one in text.added)
    try:
        return Overlay.again(settings, Changes(added, text.removed))
    except (ConfigError, UnknownEntryError) as error:  # the environment that the settings refer to is another one
        logger.error("the endpoints of the admin API are lost: %s", error, extra={"event": "workers"})
        return Overlay(), settings
