# SPDX-License-Identifier: Apache-2.0
"""One connection between two of lbproxy's processes: messages both ways, many in one write.

Theory of operation. What is sent in one turn of the event loop goes out together, at its end: a write wakes a process
that sleeps, which costs more than everything else about a message. A frame is its length in four bytes, then a msgpack
array of messages. Invariants:

- Messages arrive in the order in which they were sent, or the link is lost; `lost` is called once, unless we closed it.
- Memory is bounded: a frame over `MAX_FRAME_BYTES`, or as much unsent because the peer does not read, ends the link.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec

from lbproxy.config.text import encodable

logger = logging.getLogger("lbproxy")

MAX_FRAME_BYTES: Final = 64 << 20
_SIZE: Final = 4
_pack_size: Final = struct.Struct("<I").pack_into

Received = TypeVar("Received")
Sent: TypeAlias = msgspec.Struct | tuple[object, ...]
"""A message, or its tag and the first of its fields if the others are as by default."""


class Link(Generic[Received]):
    """Has the methods of an asyncio.Protocol, but is compiled. `kinds`: the union of the messages that arrive."""

    def __init__(self, kinds: Any, received: Callable[[list[Received]], None], lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._decode: Callable[[bytes], list[Received]] = msgspec.msgpack.Decoder(list[kinds]).decode
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._received = received
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        """The beginning of a frame."""
        self._wanted_bytes = _SIZE
        """So many of it are needed to go on."""
        self._unsent: list[Sent] = []
        self._scheduled = False
        """`flush` will be called, at the end of this turn or of what arrived."""
        self.sent = self.arrived = 0
        """Messages."""

    def protocol(self) -> asyncio.Protocol:
        """The link, as asyncio's types want it."""
        return cast(asyncio.Protocol, self)

    def send(self, message: Sent) -> None:
        """Send at the end of this turn of the loop or, in `data_received`, of what arrived; not at all if the link is
        lost."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    @property
    def last(self) -> Sent | None:
        """The last message that is to be sent."""
        return self._unsent[-1] if self._unsent else None

    def take_back(self) -> None:
        """Do not send the last message: another one says it, too."""
        self._unsent.pop()

    def flush(self) -> None:
        """Send now what is to be sent."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if not unsent or transport is None or transport.is_closing():
            return
        frame = bytearray(_SIZE)
        try:
            self._encode_into(unsent, frame, _SIZE)
        except (UnicodeError, OverflowError):  # one of them has what a client or an endpoint sent
            frame = bytearray(_SIZE)
            self._encode_into([encodable(one) for one in unsent], frame, _SIZE)
        except TypeError as error:  # a defect of ours; later messages may refer to what is lost
            self._fail(str(error))
            return
        size = len(frame) - _SIZE
        _pack_size(frame, 0, size)
        transport.write(frame)
        self.sent += len(unsent)
        if max(size, transport.get_write_buffer_size()) > MAX_FRAME_BYTES:
            self._fail("the other process does not read")

    def finish(self) -> None:
        """Send what is to be sent, and end; `lost` is called when the peer has all of it, or is gone."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """The same, but `lost` is not called."""
        self._lost = lambda: None
        self.finish()

    def abort(self) -> None:
        """End at once; `lost` is called in a later turn."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio. What is sent because of it leaves at once: to schedule that for the end of the turn was a
        twentieth of the balancer process's instructions for a request.
        """
        if self._scheduled:
            self._take(data)
            return
        self._scheduled = True
        try:
            self._take(data)
        finally:
            self.flush()

    def _take(self, data: bytes) -> None:
        """Most often whole frames arrive, which are read where they are."""
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._wanted_bytes:
                return
            data = bytes(buffer)
            buffer.clear()
        start, end = 0, len(data)
        while end - start >= _SIZE:
            size = data[start] | data[start + 1] << 8 | data[start + 2] << 16 | data[start + 3] << 24
            if size > MAX_FRAME_BYTES:
                self._fail("a message is too large")
                return
            stop = start + _SIZE + size
            if stop > end:
                self._wanted_bytes = stop - start
                break
            try:
                messages = self._decode(data[start + _SIZE : stop])
            except msgspec.MsgspecError as error:
                self._fail(str(error))
                return
            start = stop
            self._received(messages)
            self.arrived += len(messages)
        else:
            self._wanted_bytes = _SIZE
        if start < end:
            buffer += data[start:]

    def pause_writing(self) -> None:
        """See asyncio. `flush` bounds what is unsent."""

    def resume_writing(self) -> None:
        """See asyncio."""

    def eof_received(self) -> bool | None:
        """See asyncio: the link ends."""
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self._lost()

    def _fail(self, why: str) -> None:
        logger.error("a link between two processes of lbproxy ends: %s", why, extra={"event": "workers"})
        self.abort()
