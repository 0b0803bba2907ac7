# SPDX-License-Identifier: Apache-2.0
"""The supervisor: it holds the listening sockets, starts the other processes, and starts again what dies.

Theory of operation. The balancer process is started first, then all workers, each with a `_Post` that keeps one process
in its place: when that ends without having been told to, the next one takes its place after a back-off, which grows
while processes end soon. It is the `Standby`, if there is one. Stopping goes the other way: workers first, so that
requests can end, then the balancer process. What cannot start with the settings of the start ends everything, as in a
single process. A stop during the start kills what is not ready, and lets requests of workers that are ready finish.
Invariants:

- The supervisor has the listening sockets open until it stops, so that no connection is refused while another process
  starts; it never accepts. When it stops, only those that accept have them: what the last of these does not accept any
  more is refused, where otherwise it would wait in the kernel's queue, and be reset.
- A child that shows no sign of life for `SILENT_S` is killed, and so replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal

from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.admin.made_token import folders
from lbproxy.control.discovery.overlay import Addition, Overlay
from lbproxy.control.telemetry.memory import Memory
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.net.listening.bind import bound_port, open_sockets
from lbproxy.net.listening.inherit import HandedOver, Inherited, hand_over
from lbproxy.net.listening.notify import Notifier
from lbproxy.processes import app, process
from lbproxy.processes.control import (
    BALANCER,
    LISTENERS,
    SHARES,
    WORKER,
    Adopt,
    Child,
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
    ToSupervisor,
)
from lbproxy.processes.data_plane import listening_url
from lbproxy.processes.standby import Standby
from lbproxy.workers.shares import MAX_WORKERS, Shares

logger = logging.getLogger("lbproxy")

READY_WITHIN_S: Final = 60.0
"""Longer than a slow machine takes to start Python."""
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 10.0
STEADY_S: Final = 5.0
"""A process that ran this long starts again without a back-off; when all have, there is a standby."""
SETTLED_S: Final = 1.0
"""After a death: in this time a process has caught up with what came meanwhile, and the next standby can start."""
SILENT_S: Final = 15.0
WATCH_S: Final = 0.5
SAYS_WITHIN_S: Final = 1.0
"""How long a stop waits for workers to say how many requests they have; it goes on without those that hang."""
ENDS_WITHIN_S: Final = 10.0
"""After the deadline of a drain: what is left is killed."""


def worker_count(settings: Settings) -> int:
    """How many worker processes the settings ask for; 1 = a single process does everything."""
    cores = min(float(len(os.sched_getaffinity(0))), Memory.cpus())
    return settings.workers or max(1, min(MAX_WORKERS, ceil(cores) - 1))


def make_folder() -> str:
    """A folder of our own, with mode 0700, for what the processes share: in the first place that can be written, as
    containers often have a read-only root. Raises OSError.
    """
    for place in (None, *folders(os.environ, None), "/dev/shm"):  # noqa: S108 - in a folder with a name of its own
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="lbproxy-", dir=place)
    raise OSError("several processes need a folder, and none can be written: mount a tmpfs at /tmp, or set TMPDIR")


async def supervise(
    settings: Settings, text: Text, *, orders: app.Orders, on_ready: Callable[[app.Listening], None]
) -> None:
    """Like `app.serve`, with several processes. `text`: what `settings` were read from."""
    process.prepare()
    inherited = Inherited.from_environment(os.environ)
    log = ProcessLog(settings.log, shared=True)
    supervisor = Supervisor(settings, text, Notifier.from_environment(os.environ))
    try:
        await supervisor.run(inherited, orders, on_ready)
    finally:
        inherited.close()
        supervisor.close()
        log.close()


class _Post:
    """The place of one process: the process that is there now."""

    def __init__(self, role: str, index: int) -> None:
        self.role = role
        self.index = index
        self.name = "the balancer process" if role == BALANCER else f"worker {index}"
        self.child: Child | None = None
        self.ready = asyncio.Event()
        """A process was ready here."""
        self.generation = 0
        self.counted = b""
        """What the balancer process that was here last counted of limits."""
        self.ending = asyncio.Event()
        """The process is told to end, and is not replaced."""
        self.task: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """A process is here that does its work."""
        return self.child is not None and self.child.ready_at is not None

    def is_steady(self, now: float) -> bool:
        """A process has done its work here for some time: a short one after a death, as deaths come in series."""
        child, least_s = self.child, SETTLED_S if self.generation else STEADY_S
        if child is None or child.ready_at is None or not child.is_alive:
            return False
        return now - child.ready_at >= least_s

    def kill(self) -> None:
        """End what is here, or is about to start."""
        self.ending.set()
        if self.child is not None:
            self.child.kill()


class Supervisor:
    """All processes. `run`, then `close`."""

    def __init__(self, settings: Settings, text: Text, notifier: Notifier) -> None:
        self._settings = settings
        self._text = text
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._sockets: dict[str, Sequence[socket.socket]] = {}
        self._folder = make_folder()
        self._shares = Shares(Path(self._folder) / SHARES)
        self._at = app.Listening("", None)
        self._succeeds = False
        """Another lbproxy serves until all processes are ready."""
        self._status = ""
        workers = [_Post(WORKER, index) for index in range(worker_count(settings))]
        self._posts = [_Post(BALANCER, 0), *workers]
        self._standby = Standby(self._received)
        self._handed_over = asyncio.Event()
        self._failed: asyncio.Future[None] = self._loop.create_future()

    @property
    def _balancer(self) -> _Post:
        return self._posts[0]

    @property
    def _workers(self) -> list[_Post]:
        return self._posts[1:]

    async def run(self, inherited: Inherited, orders: app.Orders, on_ready: Callable[[app.Listening], None]) -> None:
        """Until it is told to stop, and has. Raises ConfigError, OSError if the first processes cannot start."""
        orders.exiting = self._kill_all
        await self._listen(inherited)
        self._succeeds = inherited.has_predecessor
        overlay, _ = Overlay.inherited(self._settings, inherited.leased, self._loop.time())
        self._text.drained, self._text.added = inherited.drained, tuple(overlay.leased)
        unfit: ConfigError | OSError | None = None
        async with asyncio.TaskGroup() as self._group:
            running: list[asyncio.Task[Any]] = []
            try:
                ends = [self._group.create_task(one.wait()) for one in (orders.stop, self._handed_over)]
                running += ends
                if await self._start_all(ends[0]):
                    on_ready(self._at)
                    self._notifier.ready(self._status)
                    inherited.ready()
                    inherited.close()
                    works = (
                        self._watch(),
                        self._stand_by(),
                        self._follow_reloads(orders),
                        self._follow_restarts(orders),
                    )
                    running += [self._group.create_task(work) for work in works]
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                else:
                    orders.hurry.set()  # nobody was told that we serve
                await self._stop(orders)
            except (ConfigError, OSError) as error:
                unfit = error  # not as a part of a group
            finally:
                for task in running:
                    task.cancel()
                self._kill_all()
        if unfit is not None:
            raise unfit

    async def _start_all(self, stop: asyncio.Task[Literal[True]]) -> bool:
        """The balancer process, then the workers. False: `stop` came before. Raises ConfigError, OSError."""
        for posts in ([self._balancer], self._workers):
            for post in posts:
                self._man(post)
            if not await self._ready(posts, stop):
                return False
        logger.info("%d workers accept connections", len(self._workers), extra={"event": "start"})
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._close_sockets()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_sockets(self) -> None:
        for listening in self._sockets.values():
            for sock in listening:
                sock.close()

    async def _listen(self, inherited: Inherited) -> None:
        """Open both listeners' sockets, or take those that are inherited. Raises OSError."""
        settings = self._settings
        for key, address in (("listen", settings.listen), ("admin", settings.admin)):
            if address is not None:
                self._sockets[key] = await inherited.take(key, address) or await open_sockets(address, key)
        self._at = app.Listening(listening_url(settings.listen, bound_port(self._sockets["listen"])), None)

    # Processes

    def _kill_all(self) -> None:
        for post in self._posts:
            if post.task is not None:
                post.task.cancel()
            post.kill()
        self._standby.end()

    def _man(self, post: _Post) -> None:
        post.task = self._group.create_task(self._keep(post))

    async def _keep(self, post: _Post) -> None:
        """Have a process in this place until it is told to end."""
        backoff_s = BACKOFF_FIRST_S
        while not post.ending.is_set():
            began_at = self._loop.time()
            standby = self._standby.take()
            post.child = child = standby or Child(post.name, self._received)
            try:
                if standby is None:
                    await child.launch(post.role, self._sockets_of(post))
                child.begin(post.name, self._start_of(post), post.ready.set)
                if post.ending.is_set():
                    child.kill()
                code = await child.ended()
            except OSError as error:
                child.problems = [str(error)]
                code = 1
            if post.ending.is_set():
                return
            if not post.ready.is_set():
                self._fail(child)
                return
            post.generation += 1
            if post.role == WORKER:
                self._shares.set(post.index, None)
            ran_s = self._loop.time() - began_at
            backoff_s = BACKOFF_FIRST_S if ran_s >= STEADY_S else min(BACKOFF_MAX_S, 2.0 * backoff_s)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            why = "".join(f": {one}" for one in child.problems[:3])
            extra = {"event": "workers", "pid": child.pid, "code": code}
            logger.error("%s %s%s; another one starts in %.2g s", post.name, how, why, backoff_s, extra=extra)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await post.ending.wait()

    async def _stand_by(self) -> None:
        """Have a standby, but not while another process begins, which needs the CPU."""
        while True:
            await asyncio.sleep(WATCH_S)
            if all(post.is_steady(self._loop.time()) for post in self._posts):
                await self._standby.refresh(self._sockets)

    def _start_of(self, post: _Post) -> Start:
        path = os.path.join(self._folder, "balancer.sock")
        workers, generation = len(self._workers), post.generation
        succeeds, text, url = self._succeeds, self._text, self._at.url
        return Start(post.role, post.index, workers, generation, succeeds, text, path, url, {}, [], post.counted)

    def _sockets_of(self, post: _Post) -> Mapping[str, Sequence[socket.socket]]:
        key = LISTENERS[post.role]
        return {key: self._sockets[key]} if key in self._sockets else {}

    def _fail(self, child: Child) -> None:
        if not self._failed.done():
            problems = child.problems or [f"{child.name} cannot start"]
            self._failed.set_exception(ConfigError("settings", problems))

    async def _ready(self, posts: Sequence[_Post], stop: asyncio.Task[Literal[True]]) -> bool:
        """Wait until all of them work, or `stop` is done. Raises ConfigError if one cannot start."""

        async def all_ready() -> None:
            for post in posts:
                await post.ready.wait()

        waiting = self._group.create_task(all_ready())
        either: set[asyncio.Future[Any]] = {waiting, self._failed, stop}
        done, _ = await asyncio.wait(either, timeout=READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._failed in done:
            self._failed.result()
        if not done:
            raise OSError(f"{posts[0].name} is not ready after {READY_WITHIN_S:g} s")
        return waiting in done

    def _received(self, message: ToSupervisor) -> None:
        if isinstance(message, Ready):
            if message.url is not None:
                self._at = self._at._replace(admin_url=message.url)
            self._status = message.status or self._status
        elif isinstance(message, Reloading):
            self._notifier.reloading()
        elif isinstance(message, Adopt):
            self._text, self._status = message.settings, message.status
        elif isinstance(message, Counted):
            self._balancer.counted = message.lines
        elif isinstance(message, Reloaded):
            self._notifier.ready(message.status)

    async def _watch(self) -> None:
        """Beat for the service manager while we live, and kill those that show no sign of life."""
        looked_at = self._loop.time()
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._loop.time()
            stood_still, looked_at = now - looked_at > 2 * WATCH_S, now
            for child in [post.child for post in self._posts if post.child is not None]:
                if stood_still:  # all processes did, or what they said is not read yet
                    child.beat_at = now
                elif now - child.beat_at > SILENT_S:
                    logger.error("%s shows no sign of life: it is killed", child.name, extra={"event": "workers"})
                    child.kill()
                    child.beat_at = now
            self._notifier.beat()

    # Orders

    async def _follow_reloads(self, orders: app.Orders) -> None:
        while True:
            await orders.reload.wait()
            orders.reload.clear()
            if self._balancer.child is not None:
                self._balancer.child.link.send(Reload())

    async def _follow_restarts(self, orders: app.Orders) -> None:
        await hand_over(orders.restart, orders.command, self._before_restart, self._notifier)
        self._handed_over.set()

    async def _before_restart(self) -> HandedOver:
        if self._balancer.child is not None:
            self._balancer.child.link.send(Save())  # it is done before a process has started
        added = (Addition.from_text(one, 0.0) for one in self._text.added)
        return HandedOver(self._sockets, self._text.drained, [one.to_text() for one in added if one.lease is not None])

    async def _stop(self, orders: app.Orders) -> None:
        """Workers first: see `app.Proxy`."""
        drain, handed_over = self._settings.drain, self._handed_over.is_set()
        deadline_s = drain.deadline if orders.stop.is_set() else drain.restart_deadline
        lame_duck_s = 0.0 if orders.hurry.is_set() else min(drain.lame_duck, drain.deadline)
        sooner = self._group.create_task(self._stop_sooner(orders)) if not orders.stop.is_set() else None
        self._end_unready()
        self._standby.end()
        self._close_sockets()
        if self._balancer.child is not None:
            self._balancer.child.link.send(Draining(handed_over))
        workers = self._tell_workers(Stop(deadline_s, lame_duck_s, not handed_over))
        running = await _count(workers)
        logger.info(app.STOPPING, running, deadline_s, extra={"event": "stop"})
        self._notifier.stopping(f"{running} running requests")
        await self._end(self._workers, deadline_s + ENDS_WITHIN_S)
        if sooner is not None:
            sooner.cancel()
        if self._balancer.child is not None:
            self._balancer.child.link.send(Stop(0.0, 0.0, False))
        await self._end([self._balancer], ENDS_WITHIN_S)
        logger.info(app.STOPPED, sum(one.cut for one in workers), extra={"event": "stop"})

    def _end_unready(self) -> None:
        """Nothing is replaced from now on. What has not begun to work is killed; but a balancer process that workers
        wait for gets the records of their requests.
        """
        for post in self._posts:
            post.ending.set()
        for post in self._workers:
            if not post.is_serving:
                post.kill()
        if not any(post.is_serving for post in self._posts):
            self._balancer.kill()

    async def _stop_sooner(self, orders: app.Orders) -> None:
        await orders.stop.wait()
        self._tell_workers(Stop(self._settings.drain.deadline, 0.0, False))

    def _tell_workers(self, stop: Stop) -> list[Child]:
        """Returns those that were told."""
        told = [post.child for post in self._workers if post.child is not None and post.is_serving]
        for child in told:
            child.link.send(stop)
        return told

    @staticmethod
    async def _end(posts: Sequence[_Post], within_s: float) -> None:
        """Wait for the ends of processes; kill what is left."""
        tasks = [post.task for post in posts if post.task is not None]
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=within_s)
        for post in posts:
            if post.task in left:
                post.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_WITHIN_S):
                await asyncio.gather(*left, return_exceptions=True)


async def _count(workers: Sequence[Child]) -> int:
    """The requests that run in workers that were told to stop, as far as they say so in time."""
    if workers:
        await asyncio.wait([one.running_requests for one in workers], timeout=SAYS_WITHIN_S)
    return sum(one.running_requests.result() for one in workers if one.running_requests.done())
