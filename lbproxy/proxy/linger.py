"""The end of a client's connection after its last response: our side is closed, what still comes is dropped.

A close with bytes unread is a reset, and a reset can overtake the response: the client would see a broken connection
instead of the 400 that says why (RFC 9112, section 9.6). So we say that we are done, and wait for the client to be.

TLS can close both sides only, and gives up soon what its peer does not take (`net.listener`, GOODBYE_S). There the end is
said when the client's host has taken everything.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import Final

LINGER_S = 2.0
"""How long what comes is dropped, after the response is out."""
FIRST_LOOK_S: Final = 0.05
"""With TLS: then half as often each time, up to `LINGER_S`."""
_INT: Final = struct.Struct("i")


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the client's host has not taken yet of what was written, as far as the system says so."""
    held = transport.get_write_buffer_size()
    sock: socket.socket | None = transport.get_extra_info("socket")
    if held or sock is None:
        return held
    try:  # what a TLS transport handed on counts for the system
        count: int = _INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _INT.pack(0)))[0]
    except OSError:
        return 0
    return count


class Linger(asyncio.Protocol):
    """Takes a connection over from `protocol`, which is told when it is lost, and nothing else."""

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol, stall_s: float) -> None:
        """`stall_s`: how long the client may take nothing of the response."""
        self._transport = transport
        self._protocol = protocol
        self._stall_s = stall_s
        self._half_closes = transport.can_write_eof()
        self._unsent = unsent_bytes(transport)
        self._stalled_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._wait_s = LINGER_S if self._half_closes else FIRST_LOOK_S
        self._timer = self._loop.call_later(self._wait_s, self._look)
        transport.set_protocol(self)
        if self._half_closes:
            transport.write_eof()
        transport.resume_reading()  # no-op if it was not paused

    def close(self) -> None:
        """Do not wait: what is not sent yet may still be."""
        self._transport.close()

    def _look(self) -> None:
        """Now and then: a response that is out is waited for no longer, one that is not as long as it goes on."""
        before, self._unsent = self._unsent, unsent_bytes(self._transport)
        self._stalled_s = self._stalled_s + self._wait_s if self._unsent == before else 0.0
        if not self._half_closes and not self._unsent:
            self._transport.close()
        elif not before or self._stalled_s >= self._stall_s:
            self._transport.abort()
        else:
            self._wait_s = min(LINGER_S, 2.0 * self._wait_s)
            self._timer = self._loop.call_later(self._wait_s, self._look)

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol: dropped."""

    def eof_received(self) -> None:
        """See asyncio.Protocol: None closes our side too."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._timer.cancel()
        self._protocol.connection_lost(exc)
