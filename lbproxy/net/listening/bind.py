# SPDX-License-Identifier: Apache-2.0
"""Opens listening sockets: TCP on every address of a host, or one Unix socket at a path.

Invariants for a Unix socket: a file without a listening process is replaced, as a killed process leaves it behind; a
file with a listening process, or that is not a socket, is kept. No client can connect before the file has its mode. The
file stays when the socket is closed: a successor may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence

from lbproxy.config.sections.clients import Address

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel caps it at net.core.somaxconn."""


async def open_sockets(address: Address, key: str) -> list[socket.socket]:
    """Open sockets on an address. Raises OSError with a text that names the setting to change: `key`."""
    try:
        if address.unix is not None:
            return [bind_unix(address.unix, address.file_mode)]
        return await bind(address.host, address.port)
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        raise OSError(f"cannot listen on {address} ({key}): {why}") from error


async def addresses(host: str) -> list[tuple[socket.AddressFamily, str, int]]:
    """The addresses to listen on for `host`: family, address and scope. `::` is every address of this machine, IPv4
    too. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    named = [(family, str(at[0]), int(at[3]) if len(at) == 4 else 0) for family, *_, at in found]
    if any(address == "::" for _, address, _ in named):
        named.append((socket.AF_INET, "0.0.0.0", 0))  # noqa: S104 - what `::` means
    return list(dict.fromkeys(named))


async def bind(host: str, port: int) -> list[socket.socket]:
    """Open listening sockets on every address of `host`, on one port (0: any free one). Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for family, address, scope in await addresses(host):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT and sockets:
                    continue  # a machine without IPv4
                raise
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            at = address, port or sockets[0].getsockname()[1]
            sock.bind((*at, 0, scope) if family == socket.AF_INET6 else at)
            sock.listen(BACKLOG)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def bind_unix(path: str, mode: int) -> socket.socket:
    """Open a listening socket at `path`, with this file mode. Raises OSError."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(BACKLOG)  # until here every client is refused
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket file that no process listens on. Raises OSError if anything else is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("a file that is no socket is there")
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:  # its queue is full
            pass
    raise OSError("another process listens there")


def bound_port(sockets: Sequence[socket.socket]) -> int:
    """The port of listening sockets; 0 for a Unix socket."""
    return 0 if sockets[0].family == socket.AF_UNIX else int(sockets[0].getsockname()[1])


def socket_address(sock: socket.socket) -> str:
    """The address of a listening socket: `host:port` or `unix:/path`."""
    name = sock.getsockname()
    return f"unix:{name}" if sock.family == socket.AF_UNIX else f"{name[0]}:{name[1]}"
