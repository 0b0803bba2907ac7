# SPDX-License-Identifier: Apache-2.0
"""The composition root: settings in, a running proxy out. Everything is made here, and nothing is decided.

A `Proxy` is the Balancer with the control plane; clients are served by its `Plane`, in this process or in others.
`serve` runs until it is told to stop. The start: sockets first, so that a bad address fails at once and a proxy with
dead endpoints is there and says so. The stop: no new requests, those that run up to the deadline, then all else.

Reloading: new settings are read and built beside the old ones; if nothing can go wrong any more, all is swapped in one
step without an await. What can take other settings has a `reconfigure`, what cannot is made anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lbproxy import __version__
from lbproxy.config.sections.access import AdminSettings
from lbproxy.config.sections.models import served_names
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.admin.api import Api
from lbproxy.control.admin.changes import ReloadResult, changes
from lbproxy.control.admin.made_token import MadeToken, folders
from lbproxy.control.admin.server import Admin
from lbproxy.control.admin.state import ShownState
from lbproxy.control.discovery.discovery import Discovery, warn_of_unverified
from lbproxy.control.discovery.membership import Loops, Membership, Watches
from lbproxy.control.discovery.overlay import LEASES_LOOK_S, Lease, Overlay
from lbproxy.control.loops import supervise
from lbproxy.control.probing.prober import Prober
from lbproxy.control.probing.roles import RoleWatch
from lbproxy.control.probing.scraper import Scraper, Scraping
from lbproxy.control.saving.keeper import Keeper
from lbproxy.control.saving.usage_file import days_in, first_day, once, rows_of
from lbproxy.control.sleeping.driver import SleepDriver
from lbproxy.control.telemetry.history import History
from lbproxy.control.telemetry.memory import Memory
from lbproxy.control.telemetry.process_log import ProcessLog
from lbproxy.control.telemetry.recent import Recent
from lbproxy.control.telemetry.telemetry import Telemetry
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.engines.dialects import Engines
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.observed.sink import Sink
from lbproxy.core.policies.registry import make_policy
from lbproxy.driver.runtime import Runtime, logger
from lbproxy.extras.kv_events import KvEvents, find_kv_events
from lbproxy.extras.replication import make_replication
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.listening.bind import open_sockets
from lbproxy.net.listening.inherit import HandedOver, Inherited, hand_over
from lbproxy.net.listening.notify import Notifier
from lbproxy.processes import process
from lbproxy.processes.data_plane import DataPlane, Loop, Parts, listening_url, place_of

if TYPE_CHECKING:
    from lbproxy.processes.plane import WorkersPlane

Plane: TypeAlias = "DataPlane | WorkersPlane"
"""What serves clients: this process, or others. What `prepare` returns is for `adopt` alone."""

SUCCESSOR_WAITS_S = 3.0
"""How long a successor waits for its first endpoint before it accepts: its predecessor serves meanwhile."""
MAX_PROBLEMS_LOGGED = 100
STOPPING = "stopping: %d running requests have up to %g s"
STOPPED = "stopped: %d requests were ended before they were complete"


class Listening(NamedTuple):
    """Where a running proxy is reached."""

    url: str
    admin_url: str | None


class _Drivers(NamedTuple):
    """What reads or changes servers beside their probes."""

    kv_events: KvEvents
    sleep: SleepDriver


@dataclass
class Orders:
    """What a running proxy is told from outside. Made inside the running loop."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """With `stop`: without the lame duck's time."""
    reload: asyncio.Event = field(default_factory=asyncio.Event)
    restart: asyncio.Event = field(default_factory=asyncio.Event)
    read_settings: Callable[[], Settings] | None = None
    """The settings again. Raises ConfigError, OSError. None = there is nothing to reload."""
    reloaded: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Called when settings that were read again are in force; the reload ends when it returns."""
    overlaid: Callable[[], None] = lambda: None
    """Called when `Proxy.overlay` or what is drained changed in between."""
    command: list[str] | None = None
    """What starts the same program again. None = it cannot be restarted."""
    exiting: Callable[[], None] = lambda: None
    """Set by who is given the orders; called before the process exits without a stop."""


async def serve(settings: Settings, *, orders: Orders, on_ready: Callable[[Listening], None]) -> None:
    """Run until `orders.stop` is set. `on_ready` is called once, when both listeners accept.

    Raises OSError if an address cannot be listened on, ConfigError if keys or a certificate cannot be read, or a
    package that the settings need is missing.
    """
    process.prepare()
    Memory.tune()
    inherited = Inherited.from_environment(os.environ)
    overlay, settings = Overlay.inherited(settings, inherited.leased, time.monotonic())
    proxy = Proxy(settings, Notifier.from_environment(os.environ))
    proxy.overlay = overlay
    try:
        await proxy.run(inherited, orders, on_ready)
    finally:
        inherited.close()
        await proxy.close()


class Proxy:
    """Everything that runs. `run`, then `close`."""

    def __init__(
        self,
        settings: Settings,
        notifier: Notifier,
        make_plane: Callable[[Parts], Plane] | None = None,
        first_uid: int = 0,
        log: ProcessLog | None = None,
    ) -> None:
        """`make_plane`: clients are served in this process unless it is given. `first_uid`: see Balancer."""
        self.notifier = notifier
        self.settings = settings
        """The settings that hold now."""
        self.rng = rng = random.Random()  # noqa: S311 - spreads load and retries; nothing secret hangs on it
        self.telemetry = Telemetry(log or ProcessLog(settings.log))
        balancer = Balancer(make_policy(settings.routing, rng), settings.balancing, rng=rng, first_uid=first_uid)
        balancer.explain(settings.explain.wanted)
        self.recent = Recent(settings.explain.requests, time.monotonic, self._running_records, balancer.unavailable)
        sinks: list[Sink] = [self.telemetry, self.recent, *([self.telemetry.log] if make_plane is None else [])]
        self.runtime = runtime = Runtime(balancer, sinks)
        self.connections = ConnectionPool(runtime.pulse)
        runtime.pulse.listen(notifier.beat)
        parts = Parts(settings, runtime, self.connections, rng, sinks, self.telemetry.loads)
        self.plane: Plane = DataPlane(*parts) if make_plane is None else make_plane(parts)
        self.telemetry.watch(runtime)
        self.telemetry.models = served_names(settings.models)
        watched = self.telemetry.watched
        watched.load, watched.workers = self.plane.own_load, self.plane.workers
        self.plane.pulse.listen(self.telemetry.lag.observe)
        self.scraping = Scraping(self.connections, settings.scrape, Engines(settings.engines), rng, self._found_ranks)
        self.keeper = Keeper(balancer, settings.state, self.telemetry.loads.state, runtime.now)
        self.replication = make_replication(settings.replicas, balancer, runtime)
        if self.replication is not None:
            watched.replicas = self.replication.facts
        self.drivers = _Drivers(KvEvents(balancer, runtime), SleepDriver(balancer, runtime, self.connections, rng))
        watched.kv_events, watched.sleeping = self.drivers.kv_events.stats, self.drivers.sleep
        self.discovery = watched.sources = Discovery(settings, rng)
        every = balancer.endpoints.every
        self.history = History(self.telemetry.totals, every, lambda: balancer.queue(now=runtime.now()))
        self.overlay = Overlay()
        self._handed_over = asyncio.Event()
        """A successor has the listening sockets."""
        self._changing = asyncio.Lock()
        """Held while the settings change."""
        self._orders = Orders()
        """Orders for `run`."""
        self.admin = None if settings.admin is None else self._make_admin(settings.admin)
        self.sources: list[asyncio.Task[None]] = []
        """The loops of `discovery`."""

    def _make_admin(self, admin: AdminSettings) -> Admin:
        """The listener, with all that it shows."""
        runtime, front, telemetry = self.runtime, self.plane.front, self.telemetry
        state = ShownState(
            runtime, front, self.recent, settings=lambda: self.settings, origin=self.origin, loads=telemetry.loads
        )
        state.workers = self.plane.workers
        state.lease = lambda name: self.overlay.rest_s(name, runtime.now())
        state.replicas = None if self.replication is None else self.replication.facts
        state.made = MadeToken(folders(os.environ, self.settings.state.file))
        return Admin(runtime, front, telemetry, admin.token, Api(runtime, state, self.history, self), state.made)

    def _running_records(self) -> Iterable[RequestRecord]:
        return self.plane.front.running_records()

    async def run(self, inherited: Inherited, orders: Orders, on_ready: Callable[[Listening], None]) -> None:
        """Until it is told to stop, and has."""
        await asyncio.to_thread(find_kv_events, self.settings.endpoints)
        prepared: Any = await self.plane.prepare(self.settings)
        self.plane.adopt(self.settings, prepared)
        self.runtime.pulse.start()
        self._orders = orders
        sockets = await self._sockets(inherited)
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks
            self.members = Membership(self.runtime, Watches(tasks, self._loops, self.rng))
            self.runtime.drained |= {*inherited.drained}
            self.members.begin(self.discovery.endpoints())
            self._start_sources()
            self.keeper.has_predecessor |= inherited.has_predecessor
            await self.keeper.restore(None if self.replication is None else await self.replication.join())
            if inherited.has_predecessor:
                await self.endpoint_comes_up(SUCCESSOR_WAITS_S)
            listening = await self._listen(sockets)
            logger.info(_banner(self.settings, listening, self.plane.keys), extra={"event": "start"})
            self._warn()
            process.settle()
            on_ready(listening)
            self.notifier.ready(self.status())
            inherited.ready()
            inherited.close()
            running: list[Loop] = [
                ("the watch over endpoints", self.runtime.keep_checking),
                ("the history", self.history.run),
                ("the watch over roles", RoleWatch(self.runtime, lambda: self.settings).run),
                ("the driver of servers that sleep", self.drivers.sleep.run),
                ("reloading", partial(self._follow_reloads, orders)),
                ("restarting", partial(self._follow_restarts, orders)),
                *self.plane.loops(),
                *([] if self.replication is None else [("the exchange with other replicas", self.replication.run)]),
                ("the state file", self.keeper.follow),
                ("the leases of endpoints", self._follow_leases),
            ]
            loops = [tasks.create_task(supervise(name, run, self.rng)) for name, run in running]
            ends = [tasks.create_task(one.wait()) for one in (orders.stop, self._handed_over)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._stop(orders, tasks)
            for loop in (*ends, *loops, *self.sources):
                loop.cancel()
            self.members.watches.close()

    async def close(self) -> None:
        """Let go of everything, at once."""
        self.runtime.pulse.close()
        self.discovery.close()
        if self.admin is not None:
            await self.admin.close()
        await self.plane.close()
        self.connections.close()
        self.telemetry.log.close()
        self.drivers.kv_events.close()

    # Listening

    async def _sockets(self, inherited: Inherited) -> dict[str, list[socket.socket]]:
        """Both listeners' sockets, inherited or opened: nothing is accepted yet."""
        sockets: dict[str, list[socket.socket]] = {}
        try:
            for key, address in (("listen", self.settings.listen), ("admin", self.settings.admin)):
                if address is not None and (key != "listen" or self.plane.sockets is not None):
                    sockets[key] = await inherited.take(key, address) or await open_sockets(address, key)
        except OSError:
            for sock in sockets.get("listen", []):
                sock.close()
            raise
        return sockets

    async def _listen(self, sockets: dict[str, list[socket.socket]]) -> Listening:
        """Accept on both."""
        url, admin = await self.plane.accept(sockets.get("listen", [])), self.settings.admin
        if self.admin is None or admin is None:
            return Listening(url, None)
        port = await self.admin.start(admin.host, admin.port, sockets["admin"])
        return Listening(url, listening_url(admin, port))

    async def endpoint_comes_up(self, within_s: float) -> None:
        """Wait until an endpoint takes requests, or so long."""
        deadline = self.runtime.now() + within_s
        while not self.runtime.any_up() and self.runtime.now() < deadline:  # noqa: ASYNC110 - once per restart
            await asyncio.sleep(0.01)

    # The loops

    def _loops(self, endpoint: Endpoint) -> Loops:
        """Those that look after one server, by the settings of now: of its ranks the first stands for all, except for
        KV events.
        """
        follow, wanted = partial(self.drivers.kv_events.follow, endpoint), endpoint.kv_events is not None
        feeds: list[Loop] = [(f"reader of KV events of {endpoint.name}", follow)] if wanted else []
        if endpoint.rank:
            return feeds
        if endpoint.sleep is not None and endpoint.sleep.wake:
            feeds.append((f"sleep watch of {endpoint.name}", partial(self.drivers.sleep.follow, endpoint)))
        prober = Prober(endpoint, self.runtime, self.connections, self.settings.health, self.rng)
        scraper = Scraper(endpoint, self.runtime, self.scraping)
        self.telemetry.watch_scrapes(scraper)
        return [(f"prober of {endpoint.name}", prober.run), (f"scraper of {endpoint.name}", scraper.run), *feeds]

    def _found_ranks(self, endpoint: Endpoint, ranks: int) -> None:
        self.members.found_ranks(endpoint, ranks)

    def _start_sources(self) -> None:
        self.sources = [
            self.tasks.create_task(supervise(name, run, self.rng))
            for name, run in self.discovery.loops(self.runtime, self.members.adopt_soon)
        ]

    # Reloading

    async def _follow_reloads(self, orders: Orders) -> None:
        while True:
            await orders.reload.wait()
            orders.reload.clear()
            await self.reload()

    def status(self) -> str:
        """One line for the service manager."""
        return f"{len(self.members)} endpoints by {self.settings.routing.policy}"

    async def reload(self) -> ReloadResult | None:
        if self._orders.read_settings is None:
            return None
        async with self._changing:
            self.notifier.reloading()
            result = await self._reload(self._orders.read_settings)
            self.notifier.ready(self.status())
            return result

    async def _reload(self, read: Callable[[], Settings]) -> ReloadResult:
        loads, before = self.telemetry.loads, self.settings
        result = ReloadResult([], [], [])
        try:
            settings = await asyncio.to_thread(read)
            overlay, settings = self.overlay.over(self.settings, settings)
            settings, fixed = await self._take_over(settings)
            self.overlay = overlay
        except ConfigError as error:
            result = result._replace(problems=list(error.problems[:MAX_PROBLEMS_LOGGED]))
            text = "the settings are refused, and the old ones stay in force: %s"
            extra = {"event": "reload", "problems": result.problems}
            logger.error(text, str(error).partition("\n")[0], extra=extra)
        except OSError as error:
            result = result._replace(problems=[str(error)])
            text = "the settings cannot be read, and the old ones stay in force: %s"
            logger.error(text, error, extra={"event": "reload", "problems": result.problems})
        else:
            result = result._replace(changed=changes(before, settings), at_next_start=fixed)
            await self._orders.reloaded()
            loads.succeeded_at = time.time()
            _log_reload(settings, len(self.members), result)
        loads.succeeded = not result.problems
        return result

    async def _take_over(self, settings: Settings) -> tuple[Settings, list[str]]:
        """Returns what holds now, and the keys that cannot be changed and would be. Raises ConfigError."""
        own = {key: getattr(self.settings, key) for key in ("listen", "admin")}
        kept = {key: value for key, value in own.items() if place_of(getattr(settings, key)) != place_of(value)}
        problems = [
            f"endpoints: {one.url} leads to lbproxy's own {key}, which a reload does not change"
            for one in settings.endpoints
            for key, address in kept.items()
            if address is not None and one.leads_to(address)
        ]
        if problems:
            raise ConfigError("settings", problems)
        fixed: dict[str, object] = {**kept}
        for key in ("workers", "replicas"):
            if getattr(settings, key) != getattr(self.settings, key):
                fixed[key] = getattr(self.settings, key)
        settings = settings.model_copy(update=fixed)
        await asyncio.to_thread(find_kv_events, settings.endpoints)
        prepared: Any = await self.plane.prepare(settings)
        discovery = await self.discovery.under(settings)
        self._adopt(settings, discovery)
        self.plane.adopt(settings, prepared)
        if self.admin is not None:
            await self.admin.settle_token()
        self._warn()
        return settings, list(fixed)

    def _warn(self) -> None:
        """Say in the log what an operator may not have meant."""
        self.plane.warn()
        warn_of_unverified(self.settings.endpoints)
        if self.admin is not None:
            self.admin.warn_if_fixed()

    def _adopt(self, settings: Settings, discovery: Discovery) -> None:
        """Swap everything, in one step."""
        old, self.settings = self.settings, settings
        policy = None if settings.routing == old.routing else make_policy(settings.routing, self.rng)
        self.scraping = Scraping(
            self.connections, settings.scrape, Engines(settings.engines), self.rng, self._found_ranks
        )
        self.telemetry.log.reconfigure(settings.log)
        self.telemetry.models = served_names(settings.models)
        self.recent.reconfigure(settings.explain.requests)
        if self.admin is not None and settings.admin is not None:
            self.admin.access.token = settings.admin.token
        self.runtime.reconfigure(policy, settings)
        self.keeper.reconfigure(settings.state)
        self._find_by(discovery)
        if (settings.health, settings.scrape, settings.engines) != (old.health, old.scrape, old.engines):
            self.members.watches.restart()

    def _find_by(self, discovery: Discovery) -> None:
        for source in self.sources:
            source.cancel()
        self.discovery.replaced_by(discovery)
        self.discovery = self.telemetry.watched.sources = discovery
        self.members.adopt(discovery.endpoints())
        self._start_sources()

    async def _exchange(self, settings: Settings, overlay: Overlay, *, by_operator: bool = False) -> None:
        """Take over settings that have other endpoints, and nothing else: what operators do counts at once, the rest
        may wait for others (`Membership.adopt_soon`). Raises ConfigError.
        """
        await asyncio.to_thread(find_kv_events, settings.endpoints[-1:])
        if not self.discovery.readdress(settings):
            self._find_by(await self.discovery.under(settings))
        elif by_operator:
            self.members.adopt(self.discovery.endpoints())
        else:
            self.members.adopt_soon(self.discovery.endpoints)
        self.settings, self.overlay = settings, overlay
        self._orders.overlaid()

    # Steering: see control.admin.api

    async def add_endpoint(self, entry: Mapping[str, object], *, keep: bool) -> str:
        async with self._changing:
            overlay, settings = self.overlay.add(self.settings, entry, keep=keep)
            await self._exchange(settings, overlay, by_operator=True)
            warn_of_unverified(settings.endpoints[-1:])
            return settings.endpoints[-1].name

    async def remove_endpoint(self, name: str, *, registered_by: str | None = None) -> bool:
        async with self._changing:
            if registered_by is not None:
                self.overlay.check_registered(self.settings, name, registered_by)
            from_file = name not in self.overlay.added
            overlay, settings = self.overlay.remove(self.settings, name)
            await self._exchange(settings, overlay, by_operator=registered_by is None)
        await self.members.settled()  # its server stops now
        return from_file

    async def register_endpoint(self, entry: Mapping[str, object], *, ttl_s: float) -> tuple[str, bool]:
        if (name := self.overlay.renew(self.settings, entry, ttl_s, self.runtime.now())) is not None:
            return name, False
        async with self._changing:
            lease = Lease.begin(ttl_s, self.runtime.now())
            overlay, settings, is_new = self.overlay.register(self.settings, entry, lease)
            await self._exchange(settings, overlay)
            warn_of_unverified(settings.endpoints[-1:])
            name = settings.endpoints[-1].name
            logger.warning("endpoint %s registered for %g s", name, ttl_s, extra={"event": "admin"})
            return name, is_new

    async def _follow_leases(self) -> None:
        looked_at = self.runtime.now()
        while True:
            await asyncio.sleep(LEASES_LOOK_S)
            before, looked_at = looked_at, self.runtime.now()
            if self.overlay.ended(looked_at, before):
                await self._end_leases()

    async def _end_leases(self) -> None:
        """Remove those that were not renewed, also while this waited for another change."""
        async with self._changing:
            now = self.runtime.now()
            names = self.overlay.ended(now, now)
            if not names:
                return
            try:
                overlay, settings = self.overlay.remove(self.settings, *names)
                await self._exchange(settings, overlay)
            except ConfigError as error:  # a certificate that another one needs is gone
                for name in names:
                    self.overlay.prolong(name, now)
                logger.error("endpoints whose leases ended cannot be removed: %s", error, extra={"event": "admin"})
                return
        logger.warning("not renewed, and removed: endpoint %s", ", ".join(names), extra={"event": "admin"})

    def drain(self, uid: EndpointUid, *, draining: bool, move_after_s: float = inf) -> None:
        self.runtime.drain(uid, draining=draining, move_after_s=move_after_s)
        self._orders.overlaid()

    def set_log_level(self, level: str) -> None:
        log = self.settings.log.model_copy(update={"level": level})
        self.settings = self.settings.model_copy(update={"log": log})
        self.telemetry.log.reconfigure(log)
        self.plane.set_log_level(level)

    async def usage(self, days: int, *, own: bool) -> dict[str, object]:
        kept, uses = await self.keeper.usage()
        replication, lines = self.replication, None
        if replication is not None and not own:
            lines = await replication.days(first_day(days))
        others = await asyncio.to_thread(days_in, b"".join(lines)) if lines else []
        is_sum = replication is None or lines is not None
        return {"kept": kept, "all_replicas": is_sum, "rows": rows_of(once([*others, *uses]), days)}

    def origin(self, name: str) -> str:
        added = self.overlay.added.get(name)
        if added is not None:
            return "registered" if added.lease else "added, kept by a reload" if added.keep else "added"
        return "settings" if any(one.name == name for one in self.settings.endpoints) else "discovery"

    def set_awake(self, uid: EndpointUid, awake: bool) -> str | None:
        return self.drivers.sleep.ask(uid, awake=awake)

    # Stopping

    async def _follow_restarts(self, orders: Orders) -> None:
        await hand_over(orders.restart, orders.command, self._before_restart, self.notifier)
        self.keeper.hand_over()
        self.plane.stop_accepting()
        if self.admin is not None:
            self.admin.stop_accepting()
        self._handed_over.set()

    async def _before_restart(self) -> HandedOver:
        await self.keeper.write_now()
        sockets: dict[str, Sequence[socket.socket]] = {"listen": self.plane.sockets or ()}
        if self.admin is not None and self.admin.listener is not None:
            sockets["admin"] = self.admin.listener.sockets
        return HandedOver(sockets, sorted(self.runtime.drained), self.overlay.leased)

    async def _stop(self, orders: Orders, tasks: asyncio.TaskGroup) -> None:
        """SIGTERM's supervisor waits for us, so `drain.deadline` counts from it; nobody waits for who handed over."""
        drain, running = self.settings.drain, self.plane.front.running
        self.drivers.sleep.close()
        # Without sockets this is the balancer process, and our supervisor logs the same, for all processes.
        level = logging.DEBUG if self.plane.sockets is None else logging.INFO
        deadline_s = drain.deadline if orders.stop.is_set() else drain.restart_deadline
        logger.log(level, STOPPING, running, deadline_s, extra={"event": "stop"})
        self.notifier.stopping(f"{running} running requests")
        sooner = tasks.create_task(self._stop_sooner(orders))
        lame_duck_s = 0.0 if orders.hurry.is_set() else min(drain.lame_duck, drain.deadline)
        cut = await self.plane.stop(deadline_s=deadline_s, lame_duck_s=lame_duck_s)
        sooner.cancel()
        await self.keeper.stop()
        if self.replication is not None:
            await self.replication.leave()
        logger.log(level, STOPPED, cut, extra={"event": "stop"})

    async def _stop_sooner(self, orders: Orders) -> None:
        await orders.stop.wait()
        self.plane.end_within(self.settings.drain.deadline)


def _log_reload(settings: Settings, endpoints: int, result: ReloadResult) -> None:
    if result.at_next_start:
        text = "%s cannot be changed by a reload: restart for that"
        logger.warning(text, " and ".join(result.at_next_start), extra={"event": "reload"})
    text = "settings reloaded: %d endpoints by %s"
    extra = {"event": "reload", "endpoints": endpoints, "changed": result.changed}
    logger.info(text, endpoints, settings.routing.policy, extra=extra)


def _banner(settings: Settings, listening: Listening, keys: int | None) -> str:
    names = [endpoint.name for endpoint in settings.endpoints]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    resolved = sum(endpoint.is_name for endpoint in settings.endpoints)
    files = sum(endpoint.is_file for endpoint in settings.endpoints)
    dns = f" and the addresses of {resolved} DNS names" if resolved else ""
    dns += f" and what {files} files list" if files else ""
    return (
        f"lbproxy {__version__} listens on {listening.url}, admin on {listening.admin_url or 'nothing'}; "
        f"balances {len(names) - resolved - files} endpoints{dns} ({shown}) by {settings.routing.policy}; "
        + ("no API keys: open to every client" if keys is None else f"requires one of {keys} API keys")
    )
