# SPDX-License-Identifier: Apache-2.0
"""Listening sockets inherited from another process, or passed to one: a restart in which the address is never closed.

They are inherited as systemd passes them (sd_listen_fds(3)): from descriptor 3 on, `LISTEN_FDS` of them, with names in
`LISTEN_FDNAMES`, and meant for this process if `LISTEN_PID` is its own. A successor gets them in the same way, except
for `LISTEN_PID`: the parent cannot know the pid in advance, so `LBPROXY_PREDECESSOR` has the parent's. It also gets a
pipe, `LBPROXY_READY_FD`, on which it reports that it accepts; if the pipe closes without a message, it never did. And
it gets a file without a name, `LBPROXY_ENDPOINTS_FD`, with the endpoints that an operator drained, which it drains as
well, and those that registered themselves: they may have keys, which others could read in a variable.

Invariants: a socket that is not used is closed; the variables are removed from the environment, so that no child
process takes them for its own; a successor that is not ready in time is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import orjson

from lbproxy.config.sections.clients import Address
from lbproxy.net.listening.bind import addresses, socket_address
from lbproxy.net.listening.notify import Notifier

logger = logging.getLogger("lbproxy")

FIRST_FD = 3
MAX_SOCKETS = 64
Sockets = Mapping[str, Sequence[socket.socket]]
"""Listening sockets, by the setting that they are for."""
READY_WITHIN_S = 60.0
"""Longer than a slow machine takes to start Python."""
_TEMPORARY_FD = 64
"""Descriptors are moved above this before they are put in place, so that none is overwritten."""
_READY = b"ready"
MEMORY = hasattr(os, "memfd_create")
"""Files may be in memory."""


class HandedOver(NamedTuple):
    """What a successor gets."""

    sockets: Sockets
    drained: Sequence[str] = ()
    """Keys of endpoints that an operator drained."""
    leased: Sequence[str] = ()
    """Endpoints that registered themselves, each as a line."""


class Inherited:
    """What this process inherited. `take` what is needed, then `close` the rest."""

    def __init__(
        self,
        sockets: Sequence[tuple[str, socket.socket]] = (),
        ready_fd: int | None = None,
        drained: Sequence[str] = (),
        leased: Sequence[str] = (),
    ) -> None:
        self.drained, self.leased = tuple(drained), tuple(leased)
        """Of the process before this one: see HandedOver."""
        self._sockets = list(sockets)
        self._ready_fd = ready_fd

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Inherited:
        """Read `environ`, and remove the variables."""
        variables = {name: environ.pop(name, "") for name in _VARIABLES}
        succeeds = variables["LBPROXY_PREDECESSOR"] == str(os.getppid())
        if not (succeeds or variables["LISTEN_PID"] == str(os.getpid())) or not variables["LISTEN_FDS"].isdecimal():
            return cls()
        names = variables["LISTEN_FDNAMES"].split(":")
        sockets = []
        for index in range(min(int(variables["LISTEN_FDS"]), MAX_SOCKETS)):
            sock = _listening(FIRST_FD + index)
            if sock is not None:
                sockets.append((names[index] if index < len(names) else "", sock))
        ready_fd, endpoints_fd = variables["LBPROXY_READY_FD"], variables["LBPROXY_ENDPOINTS_FD"]
        if not succeeds or not ready_fd.isdecimal():
            return cls(sockets)
        os.set_inheritable(int(ready_fd), False)
        return cls(sockets, int(ready_fd), *_read_endpoints(endpoints_fd))

    @classmethod
    def of_descriptors(cls, descriptors: Mapping[str, Sequence[int]], drained: Sequence[str] = ()) -> Inherited:
        """Sockets of the process that started this one, by the setting that they are for."""
        found = [(name, _listening(fd)) for name, group in descriptors.items() for fd in group]
        return cls([(name, sock) for name, sock in found if sock is not None], drained=drained)

    @property
    def has_predecessor(self) -> bool:
        """Another process serves until this one reports that it is ready."""
        return self._ready_fd is not None

    async def take(self, key: str, wanted: Address) -> list[socket.socket]:
        """Return the sockets for a setting, `listen` or `admin`: those on its address. A socket with the name of
        another setting is none; port 0 is any port, but then the name must match. Raises OSError if the host cannot be
        resolved.
        """
        if not self._sockets:
            return []
        hosts = set() if wanted.unix is not None else {at for _, at, _ in await addresses(wanted.host)}
        taken: list[tuple[str, socket.socket]] = []
        rest: list[tuple[str, socket.socket]] = []
        for name, sock in self._sockets:
            is_named = name in {"listen", "admin"}
            if sock.family == socket.AF_UNIX:
                fits = sock.getsockname() == wanted.unix and _is_reached(sock)
            else:
                own_host, own_port = sock.getsockname()[:2]
                fits = own_host in hosts and (own_port == wanted.port or (is_named and wanted.port == 0))
            (taken if fits and (name == key or not is_named) else rest).append((name, sock))
        self._sockets = rest
        if wanted.unix is not None and taken and self.has_predecessor:  # systemd has a setting of its own for that
            os.chmod(wanted.unix, wanted.file_mode)
        return [sock for _, sock in taken]

    def ready(self) -> None:
        """Report to the predecessor, if there is one, that this process accepts."""
        if self._ready_fd is not None:
            with contextlib.suppress(OSError):  # the predecessor has ended already
                os.write(self._ready_fd, _READY)

    def close(self) -> None:
        """Close what was not taken."""
        for name, sock in self._sockets:
            text = "an inherited socket fits no setting and is closed: %s (%s)"
            logger.warning(text, socket_address(sock), name or "unnamed", extra={"event": "start"})
            sock.close()
        if self._ready_fd is not None:
            os.close(self._ready_fd)
        self._sockets, self._ready_fd = [], None


def _is_reached(sock: socket.socket) -> bool:
    """Whether the file of a Unix socket still exists: without it no client can connect."""
    return os.path.exists(sock.getsockname())


def _listening(fd: int) -> socket.socket | None:
    """The socket at `fd`, if it is a listening TCP or Unix socket."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return None
    is_stream = sock.family in {socket.AF_INET, socket.AF_INET6, socket.AF_UNIX} and sock.type == socket.SOCK_STREAM
    if not is_stream or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        return None
    sock.set_inheritable(False)
    return sock


# --- A successor ------------------------------------------------------------------------------------------------------


_VARIABLES = (
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LBPROXY_PREDECESSOR",
    "LBPROXY_READY_FD",
    "LBPROXY_ENDPOINTS_FD",
)


def own_command() -> list[str]:
    """What started this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def _endpoints_file(handed: HandedOver) -> int:
    """A descriptor of a file without a name, with what is handed over of endpoints."""
    if MEMORY:
        fd = os.memfd_create("endpoints")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.write(fd, orjson.dumps([[*handed.drained], [*handed.leased]]))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_endpoints(descriptor: str) -> tuple[list[str], list[str]]:
    """Of such a file, which is closed."""
    try:
        fd = int(descriptor)
        text = os.read(fd, os.fstat(fd).st_size)
        os.close(fd)
        drained, leased = orjson.loads(text)
    except (OSError, ValueError) as error:
        what = "what the process before this one had of endpoints cannot be read: %s"
        logger.warning(what, error, extra={"event": "restart"})
        return [], []
    return drained, leased


class _Child(NamedTuple):
    pid: int
    ready_fd: int
    """Where it reports that it accepts."""


async def hand_over(
    asked: asyncio.Event,
    command: Sequence[str] | None,
    prepare: Callable[[], Awaitable[HandedOver]],
    notifier: Notifier,
) -> None:
    """Start a successor whenever `asked` is set, and return once one accepts connections. The caller then accepts none.

    `command`: what starts it; None = it cannot be started. `prepare` is called before each start; it returns what to
    hand over.
    """
    while True:
        await asked.wait()
        asked.clear()
        if command is None:
            continue
        logger.info("restarting: the new process is %s", " ".join(command), extra={"event": "restart"})
        handed = await prepare()
        try:
            pid = await start_successor(command, handed)
        except OSError as error:
            logger.error("the new process cannot be started, so we continue: %s", error, extra={"event": "restart"})
            continue
        if pid is None:
            logger.error("the new process accepts no connections, so we continue", extra={"event": "restart"})
            continue
        logger.info("the new process accepts connections: process %d", pid, extra={"event": "restart", "pid": pid})
        notifier.succeeded_by(pid)
        return


async def start_successor(command: Sequence[str], handed: HandedOver) -> int | None:
    """Run `command` with what is handed over, and wait until it accepts.

    Returns its pid; None if it did not accept, and then it was killed. Raises OSError if it cannot be started at all.
    """
    child = _spawn(command, handed)
    try:
        message = await _read_ready(child.ready_fd)
    except BaseException:
        os.kill(child.pid, signal.SIGKILL)
        raise
    finally:
        os.close(child.ready_fd)
    if message == _READY:
        return child.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, child.pid, 0)
    return None


async def _read_ready(fd: int) -> bytes:
    """Read from a pipe; empty if it closes, or nothing arrives in time."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await readable.wait()
        return os.read(fd, len(_READY))
    except TimeoutError:
        return b""
    finally:
        loop.remove_reader(fd)


def _spawn(command: Sequence[str], handed: HandedOver) -> _Child:
    """Use posix_spawn, not fork: this process has threads."""
    sockets = [(key, sock) for key, listening in handed.sockets.items() for sock in listening]
    reading, writing = os.pipe()
    own = (writing, _endpoints_file(handed))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _TEMPORARY_FD) for fd in (*(s.fileno() for _, s in sockets), *own)]
    environ = {
        **os.environ,
        "LISTEN_FDS": str(len(sockets)),
        "LISTEN_FDNAMES": ":".join(name for name, _ in sockets),
        "LBPROXY_PREDECESSOR": str(os.getpid()),
        "LBPROXY_READY_FD": str(FIRST_FD + len(sockets)),
        "LBPROXY_ENDPOINTS_FD": str(FIRST_FD + len(sockets) + 1),
    }
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, FIRST_FD + index) for index, fd in enumerate(moved)]
        pid = os.posix_spawn(command[0], list(command), environ, file_actions=actions)
    except BaseException:
        os.close(reading)
        raise
    finally:
        for fd in (*moved, *own):
            os.close(fd)
    return _Child(pid, reading)
