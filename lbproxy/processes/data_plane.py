# SPDX-License-Identifier: Apache-2.0
"""The data plane of one process: the front end, with the limits, files and traces that only it needs.

The only process has one (`app`), and so has each worker process (`processes.worker`), which differ in their runtime.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lbproxy.config.sections.access import ListenSettings
from lbproxy.config.sections.clients import Address
from lbproxy.config.tree import Settings
from lbproxy.control.admin.key_files import Credentials, Files, Watched
from lbproxy.control.families.common import Loads
from lbproxy.control.telemetry.memory import Memory
from lbproxy.core.observed.sink import Sink
from lbproxy.driver.own_load import OwnLoad
from lbproxy.driver.pulse import Pulse
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.driver.runtime import Runtime
from lbproxy.extras.tracing import Tracing
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.listening.sites import is_loopback
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.front.overload import Overload
from lbproxy.proxy.front.server import FrontEnd
from lbproxy.proxy.request.keys import KeyRing

if TYPE_CHECKING:
    from lbproxy.extras.traces import Traces

logger = logging.getLogger("lbproxy")

Loop = tuple[str, Callable[[], Awaitable[None]]]
"""Something that runs for ever, after the name that it has in the log."""


class Prepared(NamedTuple):
    """What was read for settings, and is adopted with them."""

    files: tuple[Sequence[Watched], Credentials]
    traces: Traces | None


class Parts(NamedTuple):
    """What a plane is made of."""

    settings: Settings
    runtime: Runtime
    connections: ConnectionPool
    rng: random.Random
    sinks: list[Sink]
    loads: Loads


class DataPlane:
    """Serves clients in this process. `prepare` and `adopt`, then `accept`; `stop`, then `close`."""

    def __init__(
        self,
        settings: Settings,
        runtime: RequestRuntime,
        connections: ConnectionPool,
        rng: random.Random,
        sinks: list[Sink],
        loads: Loads,
    ) -> None:
        """`sinks`: the runtime's, which traces become one of. `loads`: where it is noted that files cannot be read."""
        self._settings = settings
        self._runtime = runtime
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = connections
        self.memory = Memory()
        self.overload = Overload(settings.limits, self.memory)
        self.overload.relieve = self._relieve
        runtime.pulse.listen(self.overload.tick)
        self.front = FrontEnd(settings, runtime, Exchanger(settings, runtime, connections), rng, self.overload)
        runtime.move_stranded = self.front.move_stranded
        self.tracing = Tracing(self.front.requests, sinks, rng)
        self.files = Files(loads, self._take_keys, self.front.listener.use_tls)

    async def prepare(self, settings: Settings) -> Prepared:
        """Read what settings name, for `adopt`; it changes nothing. Raises ConfigError."""
        return Prepared(await self.files.read(settings), await self.tracing.under(settings))

    def adopt(self, settings: Settings, prepared: Prepared) -> None:
        """Use these settings from now on."""
        if settings is not self._settings:
            self._settings = settings
            self.front.reconfigure(settings)
        self.tracing.adopt(settings, prepared.traces)
        self.files.adopt(prepared.files)

    def set_log_level(self, level: str) -> None:
        """Nothing: no other process logs."""

    async def accept(self, sockets: Sequence[socket.socket]) -> str:
        """Accept clients from now on; returns the URL at which they reach us."""
        listen = self._settings.listen
        self.front.url = listening_url(listen, await self.front.listen(listen.host, listen.port, sockets))
        return self.front.url

    def stop_accepting(self) -> None:
        """Another process has the sockets."""
        self.front.listener.close()

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Those that listen."""
        return self.front.listener.sockets

    def own_load(self) -> OwnLoad:
        """What is open, and what is refused because lbproxy is the bottleneck, now."""
        overload, listener, traces = self.overload, self.front.listener, self.tracing.traces
        return OwnLoad(
            overload.refuses,
            overload.refused,
            listener.refused,
            listener.failed_handshakes,
            overload.ended,
            overload.held_bytes,
            overload.max_held_bytes,
            overload.limit_bytes,
            None if traces is None else traces.results,
            self.front.open_connections,
            self.connections.open_connections,
        )

    def workers(self) -> None:
        """There are none."""

    @property
    def pulse(self) -> Pulse:
        """How late the event loop is."""
        return self._runtime.pulse

    @property
    def keys(self) -> int | None:
        """How many API keys there are; None = clients need none."""
        return None if self.front.requests.keys is None else len(self.front.requests.keys)

    def warn(self) -> None:
        """Say in the log that anyone may use this proxy, if that is so, and which flows nobody has."""
        keys = self.front.requests.keys
        for text in self._settings.flows.unused(set() if keys is None else keys.names):
            logger.warning("%s", text, extra={"event": "start"})
        beyond = [sock.getsockname()[0] for sock in self.front.listener.sockets if not _is_local(sock)]
        if beyond and keys is None:
            text = "%s can be reached from other machines, and no API key is required: set auth.keys or auth.file"
            logger.warning(text, beyond[0], extra={"event": "start"})

    def loops(self) -> list[Loop]:
        """What must run meanwhile."""
        return [("the watch over files", self.files.follow)]

    async def stop(self, *, deadline_s: float, lame_duck_s: float) -> int:
        """Let running requests finish, for `deadline_s` at most; in the first `lame_duck_s` of it requests are served
        as ever, but connections are not kept. Returns how many requests were cut.
        """
        front = self.front
        ends_at = self._runtime.now() + deadline_s
        if lame_duck_s > 0.0:
            await front.lame_duck(min(lame_duck_s, deadline_s), accepting=bool(front.listener.sockets))
        return await front.stop(max(0.0, ends_at - self._runtime.now()))

    def end_within(self, deadline_s: float) -> None:
        """While it stops: running requests get at most this long."""
        self.front.end_within(deadline_s)

    async def close(self) -> None:
        """Let go of everything, at once."""
        self.front.listener.close()
        self.connections.close()
        self.memory.close()
        await self.tracing.close()

    def _take_keys(self, keys: dict[bytes, str]) -> None:
        self.front.requests.keys = KeyRing(keys) if keys else None

    def _relieve(self) -> None:
        task = self._runtime.loop.create_task(asyncio.to_thread(self.memory.relieve))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def listening_url(address: Address, port: int) -> str:
    """How clients write an address that is listened on."""
    if address.unix is not None:
        return str(address)
    host = f"[{address.host}]" if ":" in address.host else address.host
    scheme = "https" if isinstance(address, ListenSettings) and address.tls is not None else "http"
    return f"{scheme}://{host}:{port}"


def place_of(address: Address | None) -> tuple[object, ...] | None:
    """What of a listener's settings a reload cannot change."""
    encrypted = isinstance(address, ListenSettings) and address.tls is not None
    return None if address is None else (str(address), address.mode, encrypted)


def _is_local(sock: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    return sock.family == socket.AF_UNIX or is_loopback([sock])
