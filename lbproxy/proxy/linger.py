"""The end of a client's connection after its last answer: our side is closed, what still comes is dropped.

A close with bytes unread is a reset, and a reset can overtake the answer: the client would see a broken connection
instead of the 400 that says why (RFC 9112, section 9.6). So we say that we are done, and wait for the client to be.
"""

from __future__ import annotations

import asyncio

LINGER_S = 2.0
"""How long what comes is dropped, after the answer is out."""


class Linger(asyncio.Protocol):
    """Takes a connection over from `protocol`, which is told when it is lost, and nothing else."""

    def __init__(self, transport: asyncio.Transport, protocol: asyncio.Protocol, stall_s: float) -> None:
        """`stall_s`: how long the client may take nothing of the answer."""
        self._transport = transport
        self._protocol = protocol
        self._stall_s = stall_s
        self._unsent = transport.get_write_buffer_size()
        self._stalled_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LINGER_S, self._look)
        transport.set_protocol(self)
        transport.write_eof()
        transport.resume_reading()  # no-op if it was not paused

    def close(self) -> None:
        """Do not wait: what is not sent yet may still be."""
        self._transport.close()

    def _look(self) -> None:
        """Now and then: an answer that is out is waited for no longer, one that is not as long as it goes on."""
        unsent = self._transport.get_write_buffer_size()
        self._stalled_s = self._stalled_s + LINGER_S if unsent == self._unsent else 0.0
        if not self._unsent or self._stalled_s >= self._stall_s:
            self._transport.abort()
            return
        self._unsent = unsent
        self._timer = self._loop.call_later(LINGER_S, self._look)

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol: dropped."""

    def eof_received(self) -> None:
        """See asyncio.Protocol: None closes our side too."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._timer.cancel()
        self._protocol.connection_lost(exc)
