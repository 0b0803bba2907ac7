# SPDX-License-Identifier: Apache-2.0
"""An endpoint's connection after it switched to WebSocket."""

from __future__ import annotations

import asyncio

from lbproxy.net.connections.corked import Corked
from lbproxy.net.connections.pool import Connection
from lbproxy.proxy.sockets.socket_relay import CLOSE_S, SocketOwner, SocketRelay


class ServerEnd(asyncio.Protocol):
    """Takes a connection over from the pool, which continues to count it until it is lost."""

    relay: SocketRelay
    """Set before anything is received."""

    def __init__(self, connection: Connection, owner: SocketOwner) -> None:
        self._connection = connection
        self._owner = owner
        self.transport: Corked | None
        """None: it is lost."""
        self.transport, self.early = connection.switch(self)

    def close(self, *, at_once: bool) -> None:
        """Close it when everything is sent, or `at_once`; after CLOSE_S in any case."""
        transport = self.transport
        if transport is None or at_once:
            self._connection.abort()
        elif not transport.is_closing():
            transport.resume_reading()  # else its end would not be noticed
            transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._connection.abort)

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._owner.guarded(self.relay.from_server, data)

    def pause_writing(self) -> None:
        self._owner.guarded(self.relay.write_paused, self.relay.server)

    def resume_writing(self) -> None:
        self._owner.guarded(self.relay.write_resumed, self.relay.server)

    def eof_received(self) -> None:
        """See asyncio.Protocol: None closes our side too."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._connection.abort()
        origin = self._connection.origin
        problem = f"{origin}: connection lost: {exc}" if exc else f"{origin}: closed without a close frame"
        self._owner.guarded(self.relay.server_lost, problem)
