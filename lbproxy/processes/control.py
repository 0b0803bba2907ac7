# SPDX-License-Identifier: Apache-2.0
"""What the supervisor and its children tell each other, and how a child is started.

A child is `python -m lbproxy.processes.child ROLE`. Its standard input is a socket, the control link; it inherits
listening sockets by their descriptors. It imports what its role needs; the first message on the link, `Start`, has it
begin, which a standby waits for. Invariants:

- A link that ends means that the other process is gone: the supervisor starts a child again, and a child without a
  supervisor finishes what runs, takes nothing new, and ends.
- Children ignore the signals of a terminal or a service manager, which go to all processes of a group: the supervisor
  says what is to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import lbproxy
from lbproxy.workers.link import Link
from lbproxy.workers.messages import Message

BALANCER: Final = "balancer"
WORKER: Final = "worker"
STANDBY: Final = "standby"
"""A process that may become either."""
LISTENERS: Final = {BALANCER: "admin", WORKER: "listen"}
"""The setting of the listener that a role has."""
SHARES: Final = "shares"
"""The file of `workers.shares`, beside the Unix socket."""


class Text(Message):
    """The text of the settings in force."""

    text: str
    source: str
    """Where it was read: the path of a file."""
    added: tuple[str, ...] = ()
    """Endpoints that the admin API added since: see overlay.Addition.to_text. Workers do not need them."""
    removed: tuple[str, ...] = ()
    """Names of endpoints of the text that the admin API removed since."""
    drained: tuple[str, ...] = ()
    """Keys of endpoints that an operator drained."""


class Start(Message, tag=1):
    """To a child: begin."""

    role: str
    index: int
    """The index of a worker: from 0."""
    workers: int
    generation: int
    """How many balancer processes there were before this one."""
    succeeds: bool
    """Another lbproxy serves until this one is ready."""
    settings: Text
    path: str
    """The path of the Unix socket on which the balancer process listens for workers."""
    url: str
    """Where clients connect."""
    descriptors: dict[str, list[int]]
    """Descriptors of listening sockets, by the setting that they are for."""
    unused_descriptors: list[int]
    """Descriptors of listening sockets that are not for this role: to be closed."""
    counted: bytes = b""
    """For a balancer process: the last `Counted` of the one before it; empty = none."""


class Stop(Message, tag=2):
    """To a child: end. A worker may let requests finish; again, with less time, is possible."""

    deadline_s: float
    lame_duck_s: float
    keep_listening: bool
    """During the lame duck's time new connections are accepted."""


class Reload(Message, tag=3):
    """To the balancer process: read the settings again."""


class Adopt(Message, tag=4):
    """To the supervisor, from the balancer process: these settings are in force now."""

    settings: Text
    status: str


class Ready(Message, tag=5):
    """To the supervisor: the child does its work."""

    status: str
    url: str | None
    """The URL of the admin listener."""


class Unfit(Message, tag=6):
    """To the supervisor: the child cannot start with what it was given; one line for each problem."""

    problems: list[str]


class Beat(Message, tag=7):
    """To the supervisor: the child's event loop runs."""


class Draining(Message, tag=8):
    """To the balancer process: workers take no new requests. `handed_over`: another lbproxy has the sockets."""

    handed_over: bool


class Reloading(Message, tag=9):
    """To the supervisor: a reload begins."""


class Reloaded(Message, tag=10):
    """To the supervisor: the reload is over; if it failed, with the settings of before."""

    status: str


class Save(Message, tag=11):
    """To the balancer process: write the state file now, as another lbproxy starts."""


class Stopping(Message, tag=12):
    """To the supervisor, from a worker that was told to stop: requests that run."""

    running: int


class Stopped(Message, tag=13):
    """To the supervisor, from a worker that ends: requests that it cut."""

    cut: int


class Counted(Message, tag=14):
    """To the supervisor, from the balancer process: what was used of limits, for the next balancer process."""

    lines: bytes
    """As in a state file: see core.saved.pieces."""


ToChild: TypeAlias = Start | Stop | Reload | Draining | Save
ToSupervisor: TypeAlias = Adopt | Ready | Unfit | Beat | Reloading | Reloaded | Stopping | Stopped | Counted

LAST_WORDS_S: Final = 1.0
"""How long the end of an ended child's link is waited for. It is there at once, after all that the child sent."""


class Child:
    """A child process, as the supervisor sees it."""

    def __init__(self, name: str, received: Callable[[ToSupervisor], None]) -> None:
        """`received` is called with each message."""
        self.name = name
        self._ready: Callable[[], None] = lambda: None
        self._descriptors: dict[str, list[int]] = {}
        self.beat_at = asyncio.get_running_loop().time()
        self.problems: list[str] = []
        """Why it could not start."""
        self.process: asyncio.subprocess.Process | None = None
        self.ready_at: float | None = None
        self.running_requests: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Requests of a worker that was told to stop."""
        self.cut = 0
        """Requests that it ended before they were complete."""
        self._received = received
        self._lost = asyncio.Event()
        self.link: Link[ToSupervisor] = Link(ToSupervisor, self._on_messages, self._lost.set)

    async def launch(self, role: str, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Start the process, which waits for `begin`. `sockets`: by the setting that they are for. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._descriptors = {key: [one.fileno() for one in listening] for key, listening in sockets.items()}
        folder = str(Path(lbproxy.__file__).parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        environ = {**os.environ, "PYTHONPATH": folder if not inherited else f"{folder}{os.pathsep}{inherited}"}
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "lbproxy.processes.child",
                role,
                stdin=theirs.fileno(),
                pass_fds=[fd for group in self._descriptors.values() for fd in group],
                env=environ,
            )
        await asyncio.get_running_loop().connect_accepted_socket(self.link.protocol, ours)

    def begin(self, name: str, start: Start, ready: Callable[[], None]) -> None:
        """Have the process do its work. `ready` is called when it does."""
        listener = LISTENERS[start.role]
        start.descriptors = {key: fds for key, fds in self._descriptors.items() if key == listener}
        start.unused_descriptors = [fd for key, fds in self._descriptors.items() if key != listener for fd in fds]
        self.name, self._ready = name, ready
        self.beat_at = asyncio.get_running_loop().time()
        self.link.send(start)

    @property
    def is_alive(self) -> bool:
        """Its process was started and has not ended."""
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int:
        """Of the process; 0 before its start."""
        return 0 if self.process is None else self.process.pid

    async def ended(self) -> int:
        """Wait for the end of the process; returns its exit code, or minus the number of the signal that ended it."""
        assert self.process is not None
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._lost.wait()
        self.link.close()
        self._set_running_requests(0)
        return code

    def _set_running_requests(self, count: int) -> None:
        if not self.running_requests.done():
            self.running_requests.set_result(count)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.is_alive:
            self.process.kill()

    def _on_messages(self, arrived: list[ToSupervisor]) -> None:
        self.beat_at = asyncio.get_running_loop().time()
        for message in arrived:
            if isinstance(message, Ready):
                self.ready_at = self.beat_at
                self._ready()
            elif isinstance(message, Stopping):
                self._set_running_requests(message.running)
            elif isinstance(message, Stopped):
                self.cut = message.cut
            elif isinstance(message, Unfit):
                self.problems = message.problems
            self._received(message)
