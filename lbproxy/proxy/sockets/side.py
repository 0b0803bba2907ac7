# SPDX-License-Identifier: Apache-2.0
"""One of the two peers of a relayed WebSocket: what it sends, and whether it is read."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

from lbproxy.proxy.sockets.frames import Frame, FrameReader

_GONE: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""Not every system tells that the peer sends nothing more."""


class Side:
    """A client or an endpoint. It is read only as long as the other side reads what it is sent."""

    def __init__(self, transport: Callable[[], asyncio.Transport | None], *, masked: bool, max_bytes: int) -> None:
        """`transport`: None once it is lost. `masked`: its frames are, so it is a client. `max_bytes`: of a frame."""
        self.reader = FrameReader(masked=masked, max_bytes=max_bytes)
        self.heard_at = 0.0
        """When something last arrived from it."""
        self.is_full = False
        """Its buffer is full."""
        self.has_backlog = False
        """Frames of it arrived that were not passed on yet."""
        self.close_received = False
        """Its close frame was passed on."""
        self.close_sent = False
        """A close frame was sent to it, ours or the other side's."""
        self.is_paused = False
        """It is not read."""
        self.go_on: Callable[[], None] = lambda: None
        """Passes more of what arrived on."""
        self._transport = transport
        self._masks = not masked

    def walk_on(self) -> None:
        self.go_on()

    def send(self, frame: Frame) -> int:
        """Write a frame, if the connection is open. Returns its size in bytes."""
        data = frame.serialize(mask=self._masks)
        transport = self._transport()
        if transport is None or transport.is_closing():
            return 0
        transport.write(data)
        return len(data)

    def read(self, wanted: bool) -> None:
        """Read from it from now on, or do not."""
        transport = self._transport()
        if self.is_paused is not wanted or transport is None or transport.is_closing():
            return
        self.is_paused = not wanted
        if wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def abort_if_gone(self) -> bool:
        """Abort the connection if its peer has closed it, which is not noticed while nothing is read. Returns whether
        that was done.
        """
        transport = self._transport()
        if transport is None or transport.is_closing():
            return False
        look = select.poll()
        look.register(transport.get_extra_info("socket"), _GONE)
        if not look.poll(0):
            return False
        transport.abort()
        return True
