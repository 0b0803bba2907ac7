"""A TCP connection to an endpoint: the first of its addresses that answers in time, tuned for streams."""

from __future__ import annotations

import asyncio
import os
import socket

from lbproxy.net.tls import handshake_problem
from lbproxy.net.vanished import find_vanished
from lbproxy.pulse import Pulse

USER_TIMEOUT_S = 30.0
RECEIVE_BUFFER_BYTES = 64 << 10
"""SO_RCVBUF: a slow client stops the endpoint after this and the client's own buffers, not after the kernel's 6 MB."""


def reason(error: OSError) -> str:
    """Why there is no connection, in short: without the address, which asyncio repeats."""
    if (problem := handshake_problem(error)) is not None:
        return problem
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def open_socket(
    loop: asyncio.AbstractEventLoop, pulse: Pulse, host: str, port: int, timeout_s: float
) -> socket.socket:
    """A connected socket to the first address of `host` that answers. Raises OSError; TimeoutError after `timeout_s`.

    Each address gets an equal share of the time that is left, so that a silent one does not eat it all.
    """
    deadline = loop.time() - pulse.stalled_s() + timeout_s
    async with pulse.timeout(timeout_s):
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    error: OSError | None = None
    for tried, (family, kind, protocol, _, address) in enumerate(addresses):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as problem:
            error = problem
            continue
        try:
            _tune(sock)
            left_s = max(0.0, deadline + pulse.stalled_s() - loop.time())
            async with pulse.timeout(left_s / (len(addresses) - tried)):
                await loop.sock_connect(sock, address)
        except OSError as problem:  # TimeoutError is one
            sock.close()
            error = problem
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error or OSError(f"{host} has no address")


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    find_vanished(sock, USER_TIMEOUT_S)
