# SPDX-License-Identifier: Apache-2.0
"""The end of a client's connection after its last response: our side is closed, and received bytes are dropped.

A close with unread bytes is a reset, and a reset can overtake the response: the client would see a broken connection
instead of the 400 with its reason (RFC 9112, section 9.6). So our side is closed first, and the client's close awaited.

A TLS transport does that itself, and drops unsent bytes when its own time for it has passed: for a client that reads
slowly that cut the end of the response. So it gets far more time than it needs (net.listening.listener, SHUTDOWN_S),
and is watched here like all others, by what the client's host has received.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import Final

from lbproxy.net.listening.deadlines import LEAST_READ_RATE

LINGER_S = 2.0
"""How long received bytes are dropped, after the client's host has received the response."""
TLS_LINGER_S = 10.0
"""The same with TLS: a client with a connection pool may read close_notify only when it wants to reuse the
connection."""
HURRY_S = 0.25
"""How long it lingers during shutdown."""
LOOK_S = 0.25
"""What the client has received is looked at so often."""
_INT: Final = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that were written and that the client's host has not received yet, as far as the system reports it."""
    held = transport.get_write_buffer_size()
    sock: socket.socket | None = transport.get_extra_info("socket")
    if held or sock is None:
        return held
    try:  # what a TLS transport passed on is counted by the system
        count: int = _INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _INT.pack(0)))[0]
    except (OSError, ValueError):  # closed meanwhile, or not known here
        return 0
    return count


class Linger(asyncio.Protocol):
    """Takes a connection over from `protocol`, which is only told when it is lost. If it is already closing, the rest
    of its end is watched.
    """

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol, stall_s: float) -> None:
        """`stall_s`: how long the client may read nothing of the response, or less than `LEAST_READ_RATE`."""
        self._transport = transport
        self._protocol = protocol
        self._stall_s = stall_s
        self._half_closes = transport.can_write_eof()
        self._patience_s = LINGER_S if self._half_closes else TLS_LINGER_S
        self._unsent = unsent_bytes(transport)
        self._left_s = stall_s
        """How long it may go on like this: bytes that it takes earn time, up to `stall_s`."""
        self._waited_s = 0.0
        """Since it has everything."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)
        transport.set_protocol(self)
        if self._half_closes:
            transport.write_eof()
            transport.resume_reading()  # no effect if it was not paused
        elif not transport.is_closing():  # asyncio's treats a second close as an abort
            transport.close()

    def close(self) -> None:
        """Do not wait for the client; unsent bytes may still be sent."""
        self.hurry()
        if self._half_closes:
            self._transport.close()

    def abort(self) -> None:
        """Close, and drop unsent bytes."""
        self._transport.abort()

    @property
    def held_bytes(self) -> int:
        """Bytes that the client's host has not taken yet, in this process."""
        return self._transport.get_write_buffer_size()

    def hurry(self) -> None:
        """Shutdown: do not wait long for a client that has everything."""
        self._patience_s = min(HURRY_S, self._patience_s)

    def _look(self) -> None:
        """Regularly: stop waiting after a response that is out; wait for one that is not as long as the client
        reads.
        """
        before, self._unsent = self._unsent, unsent_bytes(self._transport)
        if self._unsent:
            taken = max(0, before - self._unsent)
            self._left_s = min(self._left_s + taken / LEAST_READ_RATE, self._stall_s) - LOOK_S
        else:
            self._waited_s += LOOK_S
        if self._left_s <= 0.0 or self._waited_s >= self._patience_s:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol: dropped."""

    def eof_received(self) -> None:
        """See asyncio.Protocol: None closes our side too."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._protocol.connection_lost(exc)
