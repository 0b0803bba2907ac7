# SPDX-License-Identifier: Apache-2.0
"""The ZMQ sockets over which engines publish KV events: the one module that knows pyzmq.

libzmq has a thread of its own for the network. What it may hold for one publisher are `QUEUED` messages of frames up to
`MAX_FRAME_BYTES`; when these are there, it stops reading, and the publisher drops. At a larger frame it closes the
connection and, unlike after other ends, does not dial again: so a subscription that was disconnected is made anew, and
that is what its monitor is for. The number of frames in one message is not limited by libzmq: a publisher that never
ends its message fills the memory. Only engines of one's own should be read.
"""

from __future__ import annotations

import asyncio
from typing import Final

import zmq

from lbproxy.core.engines.kv_events import MAX_FRAME_BYTES

QUEUED: Final = 64
MAX_SOCKETS: Final = 4096
RECONNECT_MS, RECONNECT_MAX_MS = 100, 3_000
HEARTBEAT_MS, DEAD_MS = 5_000, 15_000
"""A connection whose other end does not respond for so long is dialled again."""


class KvSocketError(Exception):
    """A socket cannot be used. The text says why, on one line."""


class KvDisconnectedError(KvSocketError):
    """The connection of a socket was closed, and the socket is of no more use."""


class ZmqSockets:
    """Makes them."""

    def __init__(self) -> None:
        self._context = zmq.Context(1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)

    def subscribe(self, url: str, *, bind: bool) -> ZmqSocket:
        """Everything that is published at a URL. Raises KvSocketError."""
        return ZmqSocket(self._context, zmq.SUB, url, bind=bind)

    def dial(self, url: str) -> ZmqSocket:
        """A socket that asks for a replay. Raises KvSocketError."""
        return ZmqSocket(self._context, zmq.DEALER, url, bind=False)

    def close(self) -> None:
        """Let go of all of them, at once."""
        self._context.destroy(linger=0)


class ZmqSocket:
    """One of them. `close` it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, url: str, *, bind: bool) -> None:
        try:
            self._socket = context.socket(kind)
        except zmq.ZMQError as error:
            raise KvSocketError(str(error)) from None
        options = {
            zmq.LINGER: 0,
            zmq.RCVHWM: QUEUED,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.IPV6: 1,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: DEAD_MS,
        }
        try:
            for option, value in options.items():
                self._socket.set(option, value)
            if kind == zmq.SUB:
                self._socket.subscribe(b"")
            self._monitor = None if bind else self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            if bind:
                self._socket.bind(url)
            else:
                self._socket.connect(url)
            self._sockets = [one for one in (self._socket, self._monitor) if one is not None]
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise KvSocketError(f"{url}: {error}") from None

    def send(self, frames: list[bytes]) -> None:
        """Send one message, or drop it if it cannot be sent now."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise KvSocketError(str(error)) from None

    def receive(self) -> tuple[bytes, bool] | None:
        """The next frame, and whether it is the last of its message; None = nothing is there. Does not wait."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
            return frame, not self._socket.get(zmq.RCVMORE)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise KvSocketError(str(error)) from None

    async def readable(self) -> None:
        """Wait until a frame is there. Raises KvDisconnectedError if there is none, and no connection any more."""
        # ZMQ's descriptors tell of events, and not of messages: whether one is there says EVENTS alone.
        loop = asyncio.get_running_loop()
        while not _has_message(self._socket):
            if self._monitor is not None and _has_message(self._monitor):
                raise KvDisconnectedError("the connection was closed")
            woken = asyncio.Event()
            descriptors = [int(one.get(zmq.FD)) for one in self._sockets]
            for one in descriptors:
                loop.add_reader(one, woken.set)
            try:
                if not any(map(_has_message, self._sockets)):
                    await woken.wait()
            finally:
                for one in descriptors:
                    loop.remove_reader(one)

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
