# SPDX-License-Identifier: Apache-2.0
"""The deadlines of who connects to a listener: to complete a head that it began, and to read what it is sent. And who
is not read itself for long: nothing tells then that it has gone, as its end waits behind all that it sent.

One sweep a second checks all connections with a deadline, and none runs without any: a timer for each would cost more
than the precision is worth. So are clients' bodies that arrive (proxy/front/arrivals.py); the idle time-out
is aiohttp's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from lbproxy.driver.pulse import Pulse

LEAST_READ_RATE: Final = 1 << 10
"""Bytes a second that a client must take on average over `stall_s`: one at a time would take days."""
SWEEP_S = 1.0
UNREAD_S = 10.0
"""From then on a client that is not read may have gone."""


class WatchedClient(Protocol):
    """A connection that was accepted."""

    transport: asyncio.Transport | None

    def head_is_late(self) -> None:
        """The head that began, or the first one, did not arrive in time: refuse it and close."""


class Arriving(Protocol):
    """What else is checked in the sweep: see proxy/front/arrivals.py."""

    on_begin: Callable[[], None]

    def __len__(self) -> int:
        """How many there are."""

    def end_overdue(self) -> None:
        """Give up what is too slow."""


class Deadlines:
    """The deadlines of all clients of a listener. Every method is O(1) except the sweep, which is linear in the watched
    clients.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pulse: Pulse,
        *,
        head_s: float,
        stall_s: float,
        arrivals: Arriving | None = None,
    ) -> None:
        """`head_s`, `stall_s`: see `reconfigure`."""
        self._loop = loop
        self._pulse = pulse
        self._arrivals = arrivals
        if arrivals is not None:
            arrivals.on_begin = self._arm
        self._armed_at = 0.0
        self._postponed = False
        """The last sweep was postponed, because lbproxy itself was stopped."""
        self.reconfigure(head_s=head_s, stall_s=stall_s)
        self._heads: dict[WatchedClient, float] = {}
        self._stalls: dict[WatchedClient, tuple[float, int, asyncio.Transport]] = {}
        """By when more must have been read, how many bytes were unsent at the last look, and the transport, which
        aiohttp may have closed by then: what is unsent keeps it open."""
        self._unread: dict[WatchedClient, tuple[float, Callable[[], None]]] = {}
        """From when on it may have gone, and what finds that out."""
        self._timer: asyncio.TimerHandle | None = None

    def reconfigure(self, *, head_s: float, stall_s: float) -> None:
        """Apply other limits, in seconds, to what begins from now on."""
        self._head_s = head_s
        self.stall_s = stall_s
        """How long a client may read nothing of what it is sent, or less than `LEAST_READ_RATE`."""

    def head_due(self, client: WatchedClient) -> None:
        """A head began, or a connection did. A repeated call has no effect."""
        self._heads.setdefault(client, self._loop.time() + self._head_s)
        self._arm()

    def head_complete(self, client: WatchedClient) -> None:
        self._heads.pop(client, None)

    def write_stalled(self, client: WatchedClient) -> None:
        """The client's buffer is full."""
        transport = client.transport
        if transport is not None:
            self._stalls[client] = (self._loop.time() + self.stall_s, transport.get_write_buffer_size(), transport)
            self._arm()

    def write_resumed(self, client: WatchedClient) -> None:
        """The client's buffer has room again."""
        self._stalls.pop(client, None)

    def unread(self, client: WatchedClient, find_out: Callable[[], None]) -> None:
        """The client is not read from now on. After `UNREAD_S` `find_out` is called about once a second, until it is
        read: has it gone? A repeated call has no effect.
        """
        self._unread.setdefault(client, (self._loop.time() + UNREAD_S, find_out))
        self._arm()

    def read_again(self, client: WatchedClient) -> None:
        """The client is read from now on. A repeated call has no effect."""
        self._unread.pop(client, None)

    def disconnected(self, client: WatchedClient) -> None:
        """The connection is lost: it has no deadlines any more."""
        self.head_complete(client)
        self.write_resumed(client)
        self.read_again(client)

    def close(self) -> None:
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
        for client, (due_at, size, transport) in list(self._stalls.items()):
            unsent = transport.get_write_buffer_size()
            deadline = min(due_at + max(0, size - unsent) / LEAST_READ_RATE, now + self.stall_s)
            self._stalls[client] = (deadline, unsent, transport)
            if now >= deadline:
                self.write_resumed(client)
                transport.abort()
        for may_have_gone_at, find_out in list(self._unread.values()):
            if now >= may_have_gone_at:
                find_out()
        if self._arrivals is not None:
            self._arrivals.end_overdue()
        if self._heads or self._stalls or self._unread or self._arrivals:
            self._arm()
