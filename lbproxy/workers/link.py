# SPDX-License-Identifier: Apache-2.0
"""One connection between two of lbproxy's processes: messages both ways, many in one write.

Theory of operation. What is sent in one turn of the event loop goes out together, at its end: a write wakes a process
that sleeps, which costs more than everything else about a message. A frame is its length in four bytes, then a msgpack
array of messages. Invariants:

- Messages arrive in the order in which they were sent, or the link is lost; `lost` is called once, unless we closed it.
- A message that is too large, or cannot be encoded, is lost alone: another link would have to carry it again.
- Frames are small, so that neither end's loop stands still for one; only one message may make a larger one.
- Memory is bounded: whatever there is much of is fed, and waits for the peer to read. As much as `MAX_UNSENT_BYTES` of
  other messages, which a peer that does not read leaves unsent, ends the link.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec

from lbproxy.core.requests.encodable import encodable

logger = logging.getLogger("lbproxy")

MAX_FRAME_BYTES: Final = 16 << 20
"""The largest message is the text of settings, with 4 MiB at most."""
FRAME_BYTES: Final = 256 << 10
"""The size of a frame of several messages: it takes about a millisecond to read."""
MAX_UNSENT_BYTES: Final = 64 << 20
_SIZE: Final = 4
_pack_size: Final = struct.Struct("<I").pack_into
_size_of: Final = struct.Struct("<I").pack
_array_of: Final = struct.Struct(">BI").pack
_ARRAY: Final = 0xDD
"""Msgpack's for an array, before its length in four bytes, the highest first."""
_encode: Final = msgspec.msgpack.Encoder().encode
_encode_into: Final = msgspec.msgpack.Encoder().encode_into
_CANNOT = (UnicodeError, OverflowError, TypeError, RecursionError)
"""What msgspec raises for values that it cannot encode."""

_MAX_WHY_CHARS: Final = 200

Received = TypeVar("Received")
Sent: TypeAlias = msgspec.Struct | tuple[object, ...]
"""A message, or its tag and the first of its fields if the others are as by default."""


def _ignore(message: Sent) -> None:
    pass


class Link(Generic[Received]):
    """Has the methods of an asyncio.Protocol, but is compiled. `kinds`: the union of the messages that arrive."""

    def __init__(self, kinds: Any, received: Callable[[list[Received]], None], lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._decode: Callable[[bytes], list[Received]] = msgspec.msgpack.Decoder(list[kinds]).decode
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
        self._fed: deque[Iterator[Sent]] = deque()
        self._full = False
        """The peer has to read before more is fed."""
        self._pumping = False
        """`_pump` will be called."""
        self.dropped: Callable[[Sent], None] = _ignore
        """Called with each message that is lost alone."""
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
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if not unsent or transport is None or transport.is_closing():
            return
        frame = bytearray(_SIZE)
        try:
            _encode_into(unsent, frame, _SIZE)
        except _CANNOT:  # one of them has what a client or an endpoint sent
            self._write_each(unsent)
            return
        size = len(frame) - _SIZE
        if size > FRAME_BYTES:
            self._write_each(unsent)
            return
        _pack_size(frame, 0, size)
        transport.write(frame)
        self.sent += len(unsent)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("the other process does not read")

    def feed(self, messages: Iterator[Sent]) -> None:
        """Send as many messages as there may be: as fast as the peer reads them, in several turns of the loop. Each is
        made when it can be sent, so that it may leave after others that were sent later.
        """
        self._fed.append(messages)
        self._pump()

    def _pump(self) -> None:
        """Send one more frame of what is fed."""
        self._pumping = False
        self.flush()  # it was sent before
        transport = self._transport
        if transport is None or transport.is_closing():
            self._fed.clear()
            return
        encoded: list[bytes] = []
        size = 0
        while self._fed and not self._full and size < FRAME_BYTES:
            message = next(self._fed[0], None)
            if message is None:
                self._fed.popleft()
            elif (one := self._encoded(message)) is not None:
                encoded.append(one)
                size += len(one)
        if encoded:
            self._write(encoded)
        if self._fed and not self._full and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _write_each(self, messages: list[Sent]) -> None:
        """Send messages in as many frames as it takes, without those that cannot be sent."""
        encoded: list[bytes] = []
        size = 0
        for message in messages:
            one = self._encoded(message)
            if one is None:
                continue
            if encoded and size + len(one) > FRAME_BYTES:
                self._write(encoded)
                encoded, size = [], 0
            encoded.append(one)
            size += len(one)
        if encoded:
            self._write(encoded)

    def _write(self, encoded: list[bytes]) -> None:
        """Send one frame, of messages that are encoded."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        head = _array_of(_ARRAY, len(encoded))
        transport.write(b"".join((_size_of(len(head) + sum(map(len, encoded))), head, *encoded)))
        self.sent += len(encoded)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("the other process does not read")

    def _encoded(self, message: Sent) -> bytes | None:
        """One message; None: it is lost."""
        try:
            encoded = _encode(message)
        except _CANNOT:
            try:
                encoded = _encode(encodable(message))
            except _CANNOT as error:  # a defect of ours
                self._drop(message, str(error))
                return None
        if len(encoded) >= MAX_FRAME_BYTES:
            self._drop(message, f"it has {len(encoded)} bytes")
            return None
        return encoded

    def _drop(self, message: Sent, why: str) -> None:
        text = "a message between two processes of lbproxy is lost: %s: %s"
        logger.error(text, type(message).__name__, why[:_MAX_WHY_CHARS], extra={"event": "workers"})
        self.dropped(message)

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
        """See asyncio. Only what is fed waits; `flush` bounds the rest."""
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._fed and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def eof_received(self) -> bool | None:
        """See asyncio: the link ends."""
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fed.clear()
        self._lost()

    def _fail(self, why: str) -> None:
        logger.error("a link between two processes of lbproxy ends: %s", why, extra={"event": "workers"})
        self.abort()
