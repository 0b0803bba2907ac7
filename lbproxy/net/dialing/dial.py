# SPDX-License-Identifier: Apache-2.0
"""A connection to an endpoint, by TCP, a Unix socket or through a forward proxy: to the first of its addresses that
responds in time, with options for streams.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from http import HTTPStatus
from typing import Final

from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy
from lbproxy.driver.pulse import Pulse
from lbproxy.net.dialing.names import Names
from lbproxy.net.dialing.origin import Origin
from lbproxy.net.dialing.tls import handshake_problem

RECEIVE_BUFFER_BYTES = 64 << 10
"""SO_RCVBUF: a slow client stops the endpoint after this and the client's own buffers, not after the kernel's 6 MB."""

OUR_FAULT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connect(2) and socket(2) that are about this process or machine, not about the peer."""
QUEUE_FULL_S = 0.01
"""The delay before a Unix socket whose queue of connections is full is tried again."""
MAX_HEAD_BYTES: Final = 16 << 10
"""The longest head of the proxy's response: a quarter of an endpoint's, since it carries nothing but a status."""
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r\n")


def reason(error: OSError) -> str:
    """Why there is no connection, in short: without the address, which asyncio repeats."""
    if (problem := handshake_problem(error)) is not None:
        return problem
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def open_socket(
    loop: asyncio.AbstractEventLoop, pulse: Pulse, names: Names, origin: Origin, timeout_s: float
) -> socket.socket:
    """Return a socket that is connected to `origin`. Raises OSError; TimeoutError after `timeout_s`.

    A proxy may take as long again for its response to CONNECT.
    """
    if origin[3] is not None:
        return await _open_tunnel(loop, pulse, names, origin[3], Origin((origin[0], origin[1])), timeout_s)
    if origin.socket_path is not None:
        async with pulse.timeout(timeout_s):
            return await _open_unix(origin.socket_path)
    return await _open_tcp(loop, pulse, names, origin[0], origin[1], timeout_s)


async def _open_tunnel(
    loop: asyncio.AbstractEventLoop, pulse: Pulse, names: Names, proxy: ForwardProxy, target: Origin, timeout_s: float
) -> socket.socket:
    """Return a connected socket that a proxy joins to `target`. Raises OSError.

    Its text names the proxy, and its type does not depend on the target: if nothing listens at the proxy's address, the
    endpoint's process may still run.
    """
    try:
        sock = await _open_tcp(loop, pulse, names, proxy.host, proxy.port, timeout_s)
    except TimeoutError:
        raise OSError(f"proxy {proxy}: no connection within {timeout_s:g} s") from None
    except OSError as error:
        if error.errno in OUR_FAULT:
            raise
        raise OSError(f"proxy {proxy}: {reason(error)}") from error
    try:
        async with pulse.timeout(timeout_s):
            await ask_for_tunnel(loop, sock, str(target), proxy.credentials)
    except TimeoutError:
        sock.close()
        raise OSError(f"proxy {proxy}: no response to CONNECT within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        raise OSError(f"proxy {proxy}: {reason(error)}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def open_transport(loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, sock: socket.socket) -> None:
    """Give a connected socket, without TLS, to `protocol`."""
    if sock.family == socket.AF_UNIX:
        await loop.create_unix_connection(lambda: protocol, sock=sock)
    else:
        await loop.create_connection(lambda: protocol, sock=sock)


async def _open_unix(path: str) -> socket.socket:
    """Return a socket that is connected to `path`, once there is room in the listener's queue. Raises OSError."""
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            sock.connect(path)  # at once, or not at all
        except BlockingIOError:  # its queue is full: unlike with TCP, nothing continues in the background
            sock.close()
            await asyncio.sleep(QUEUE_FULL_S)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


async def _open_tcp(
    loop: asyncio.AbstractEventLoop, pulse: Pulse, names: Names, host: str, port: int, timeout_s: float
) -> socket.socket:
    """Return a socket connected to the first address of `host` that responds. Raises OSError; TimeoutError after
    `timeout_s`.

    Each address gets an equal share of the remaining time, so that a silent one does not use it all.
    """
    deadline = loop.time() - pulse.stalled_s() + timeout_s
    async with pulse.timeout(timeout_s):
        addresses = await names.addresses(host, port)
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
    names.refresh(host, port)
    assert error is not None
    try:
        raise error
    finally:
        error = None  # its traceback refers to this frame: only the garbage collector would free both


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def ask_for_tunnel(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, target: str, credentials: ApiKey | None
) -> None:
    """CONNECT, sent to a forward proxy on an established connection: RFC 9110, section 9.3.6.

    Bounded in bytes here; bounded in time by the caller. With HTTP and TLS the client speaks first, so nothing follows
    the head of the proxy's response: if anything does, it is an error.

    Ask the proxy at the other end of `sock` to connect it to `target`, `host:port`. Raises OSError with what the proxy
    did instead. Of what it sent, the text contains only a status.
    """
    shown = "" if credentials is None else f"Proxy-Authorization: {credentials.reveal()}\r\n"
    await loop.sock_sendall(sock, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{shown}\r\n".encode("ascii"))
    head = b""
    while (end := head.find(b"\r\n\r\n") + 4) < 4:
        if not b"HTTP/1.".startswith(head[:7]):
            raise OSError("does not speak HTTP/1.x")
        if len(head) >= MAX_HEAD_BYTES:
            raise OSError(f"the head of its response is larger than {MAX_HEAD_BYTES >> 10} KiB")
        data = await loop.sock_recv(sock, MAX_HEAD_BYTES - len(head))
        if not data:
            raise OSError("closed the connection")
        head += data
    match = _STATUS_LINE.match(head)
    if match is None:
        raise OSError("does not speak HTTP/1.x")
    status = int(match[1])
    if not 200 <= status < 300:
        raise OSError(f"returned {_named(status)} to CONNECT")
    if end < len(head):
        raise OSError("sent more than the head of its response")


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
