# SPDX-License-Identifier: Apache-2.0
"""The deadlines of a client: to complete a head that it began, and to read what it is sent.

One sweep a second checks all connections with a deadline, and none runs without any: a timer for each would cost more
than the precision is worth. So are bodies and frames that arrive (proxy/front/arrivals.py); the idle time-out is
aiohttp's.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from lbproxy.config.sections.clients import TimeoutSettings
from lbproxy.proxy.front.arrivals import Arrivals
from lbproxy.proxy.front.linger import LEAST_READ_RATE
from lbproxy.request_runtime import RequestRuntime

SWEEP_S = 1.0


class WatchedClient(Protocol):
    """A client's connection."""

    transport: asyncio.Transport | None

    def head_is_late(self) -> None:
        """The head that began, or the first one, did not arrive in time: refuse it and close."""
        ...


class Deadlines:
    """The deadlines of all clients. Every method is O(1) except the sweep, which is linear in the watched clients."""

    def __init__(self, runtime: RequestRuntime, timeouts: TimeoutSettings, arrivals: Arrivals) -> None:
        self._loop = runtime.loop
        self._pulse = runtime.pulse
        self._arrivals = arrivals
        arrivals.on_begin = self._arm
        self._armed_at = 0.0
        self._postponed = False
        """The last sweep was postponed, because lbproxy itself was stopped."""
        self.reconfigure(timeouts)
        self._heads: dict[WatchedClient, float] = {}
        self._stalls: dict[WatchedClient, tuple[float, int]] = {}
        """By when more must have been read, and how many bytes were unsent at the last look."""
        self._timer: asyncio.TimerHandle | None = None

    def reconfigure(self, timeouts: TimeoutSettings) -> None:
        """Apply other limits to what begins from now on."""
        self._head_s = timeouts.client_head
        self.stall_s = timeouts.client_stall
        """How long a client may read nothing of what it is sent, or less than `LEAST_READ_RATE`."""

    def head_due(self, client: WatchedClient) -> None:
        """A head began, or a connection did. A repeated call has no effect."""
        self._heads.setdefault(client, self._loop.time() + self._head_s)
        self._arm()

    def head_complete(self, client: WatchedClient) -> None:
        """The head is complete."""
        self._heads.pop(client, None)

    def write_stalled(self, client: WatchedClient) -> None:
        """The client's buffer is full."""
        self._stalls[client] = (self._loop.time() + self.stall_s, _unsent(client))
        self._arm()

    def write_resumed(self, client: WatchedClient) -> None:
        """The client's buffer has room again."""
        self._stalls.pop(client, None)

    def disconnected(self, client: WatchedClient) -> None:
        """The connection is lost: it has no deadlines any more."""
        self.head_complete(client)
        self.write_resumed(client)

    def close(self) -> None:
        """Stop the sweep."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is None:
            self._armed_at = time.monotonic()
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        if self._pulse.stood_still_since(self._armed_at) and not self._postponed:
            self._postponed = True  # what is overdue may be unread in the kernel: read first
            self._arm()
            return
        self._postponed = False
        now = self._loop.time()
        for client, deadline in list(self._heads.items()):
            if now >= deadline:
                self.head_complete(client)
                client.head_is_late()
        for client, (due_at, size) in list(self._stalls.items()):
            unsent = _unsent(client)
            deadline = min(due_at + max(0, size - unsent) / LEAST_READ_RATE, now + self.stall_s)
            self._stalls[client] = (deadline, unsent)
            if now >= deadline:
                self.write_resumed(client)
                if client.transport is not None:
                    client.transport.abort()
        self._arrivals.end_overdue()
        if self._heads or self._stalls or self._arrivals:
            self._arm()


def _unsent(client: WatchedClient) -> int:
    return 0 if client.transport is None else client.transport.get_write_buffer_size()
