# SPDX-License-Identifier: Apache-2.0
"""What is written in one turn of the event loop is sent together at its end.

A send wakes up a reader that sleeps, and that takes longer than everything else about a small write: 10 to 20 µs on a
virtual machine. If the writes of a turn are sent one by one between 50 µs of other work, each finds its reader asleep
again; sent in a row, they find it awake. That was a third of the CPU time of a request (decision 26). In a turn with
one request only, its bytes are sent as soon as before. Invariants: bytes are sent in the order in which they were
written, and before anything else is done to their transport; at most `BATCH` transports hold bytes. Only bytes that
need a peer that is silent are not sent if it is not: all peers are looked at together, right before the bytes go.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Iterable
from typing import Final

BATCH: Final = 32
"""Transports that hold bytes at a time: about 2 ms of a busy loop, the longest delay by batching."""
_POLLIN: Final = select.POLLIN


class Cork:
    """The transports of an event loop that have bytes to send."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Corked] = []
        self.silent: dict[int, Corked] = {}
        """Those of them whose peers must have sent nothing, by descriptor: see `send_if_silent`."""

    def send_if_silent(self, transport: Corked, descriptor: int) -> None:
        """Have a transport, which is about to hold its first bytes of this turn, send them only if nothing of its peer
        waits in the kernel, not even a close; else it is aborted. What came before the loop last polled has been told
        to its protocol; this is about the time since. Of TLS it sees records.
        """
        self.silent[descriptor] = transport

    def add(self, transport: Corked) -> None:
        """Add a transport that holds its first bytes of this turn."""
        due = self._due
        if not due:
            self._loop.call_soon(self.flush)
        due.append(transport)
        if len(due) >= BATCH:
            self.flush()

    def flush(self) -> None:
        due, self._due = self._due, []
        if self.silent:
            self._drop_those_that_are_not()
        for transport in due:
            try:
                transport.flush()
            except Exception as error:  # noqa: BLE001 - one that fails must not hold back the bytes of others
                context = {"message": "a transport failed to send", "exception": error, "transport": transport}
                self._loop.call_exception_handler(context)

    def _drop_those_that_are_not(self) -> None:
        """One system call for all: one for each would cost a request 0.5 µs."""
        silent, self.silent = self.silent, {}
        look = select.poll()
        register = look.register
        for descriptor in silent:
            register(descriptor, _POLLIN)
        for descriptor, _ in look.poll(0):
            silent[descriptor].drop()


class Corked:
    """A transport (with the methods of asyncio.Transport) that holds what is written until the turn of the loop
    ends.
    """

    def __init__(self, inner: asyncio.Transport, cork: Cork) -> None:
        self._inner = inner
        self._cork = cork
        self._held: list[bytes | bytearray | memoryview] = []
        self.on_reading: Callable[[bool], None] | None = None
        """Called whenever it is to be read from now on, or is not."""

    def flush(self) -> None:
        """Send what is held; nothing if the connection is closing."""
        held = self._held
        if held:
            self._held = []
            if not self._inner.is_closing():
                if len(held) == 1:
                    self._inner.write(held[0])
                else:
                    self._inner.writelines(held)

    def drop(self) -> None:
        """Abort it, without sending what is held."""
        self._held = []
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        held = self._held
        held.append(data)
        if len(held) == 1:
            self._cork.add(self)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        """Bytes that are held, and bytes that the transport could not send yet."""
        held = 0
        for data in self._held:
            held += len(data)
        return held + self._inner.get_write_buffer_size()

    def write_eof(self) -> None:
        self.flush()
        self._inner.write_eof()

    def close(self) -> None:
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        """See asyncio.WriteTransport. What was written before is sent as far as possible."""
        self.flush()
        self._inner.abort()

    # Everything else is passed on to the transport.

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def pause_reading(self) -> None:
        self._inner.pause_reading()
        if self.on_reading is not None:
            self.on_reading(False)

    def resume_reading(self) -> None:
        self._inner.resume_reading()
        if self.on_reading is not None:
            self.on_reading(True)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._inner.get_write_buffer_limits()

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()
