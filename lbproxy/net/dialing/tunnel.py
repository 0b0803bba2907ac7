# SPDX-License-Identifier: Apache-2.0
"""CONNECT, sent to a forward proxy on an established connection: RFC 9110, section 9.3.6.

Bounded in bytes here; bounded in time by the caller. With HTTP and TLS the client speaks first, so nothing follows the
head of the proxy's response: if anything does, it is an error.
"""

from __future__ import annotations

import asyncio
import re
import socket
from http import HTTPStatus
from typing import Final

from lbproxy.core.endpoints.credentials import ApiKey

MAX_HEAD_BYTES: Final = 16 << 10
"""The longest head of the proxy's response: a quarter of an endpoint's, since it carries nothing but a status."""
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r\n")


async def ask_for_tunnel(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, target: str, credentials: ApiKey | None
) -> None:
    """Ask the proxy at the other end of `sock` to connect it to `target`, `host:port`.

    Raises OSError with what the proxy did instead. Of what it sent, the text contains only a status.
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
