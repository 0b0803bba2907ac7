# SPDX-License-Identifier: Apache-2.0
"""The addresses of endpoints whose host is a name, as dials use them.

Once a name was resolved no request waits for a nameserver any more. A dial uses the known addresses, and if they are
older than `FRESH_S`, they are resolved again in parallel. A failure changes nothing, so that an unreachable nameserver
does no harm to names that were ever resolved. Only a first resolution is awaited. Probes dial every endpoint every few
seconds, so that addresses are hardly ever older than that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final, TypeAlias

Address: TypeAlias = tuple[int, int, int, str, tuple[object, ...]]
"""What getaddrinfo returns for each: family, type, protocol, canonical name, what connect(2) takes."""
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[Address]]]
FRESH_S: Final = 5.0
MAX_NAMES: Final = 4096


class _Known:
    """One host and port."""

    __slots__ = ("addresses", "asked_at", "host", "is_name", "port", "resolving")

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.is_name = not _is_address(host)
        self.addresses: Sequence[Address] = ()
        """As of the last successful resolution."""
        self.asked_at = float("-inf")
        self.resolving: asyncio.Task[None] | None = None
        """The resolution in progress."""


class Names:
    """The known addresses, by host and port."""

    def __init__(self, loop: asyncio.AbstractEventLoop, resolve: Resolve | None = None) -> None:
        """`resolve`: raises OSError if it finds none. None = as the system does."""
        self._loop = loop
        self._resolve = resolve or self._ask_system
        self._known: dict[tuple[str, int], _Known] = {}

    async def addresses(self, host: str, port: int) -> Sequence[Address]:
        """The addresses of `host`, at least one. Raises OSError if none are known, nor can be resolved."""
        known = self._known.get((host, port))
        if known is None:
            if len(self._known) >= MAX_NAMES:
                self._known.pop(next(iter(self._known)))
            known = self._known[host, port] = _Known(host, port)
        if not known.addresses:
            await asyncio.shield(self._resolution(known))  # which other dials may await too
        elif known.is_name and self._loop.time() - known.asked_at >= FRESH_S:
            self._resolution(known)
        return known.addresses

    def refresh(self, host: str, port: int) -> None:
        """Resolve again: no address responded, so they may have changed."""
        known = self._known.get((host, port))
        if known is not None and known.is_name:
            self._resolution(known)

    def close(self) -> None:
        for known in self._known.values():
            if known.resolving is not None:
                known.resolving.cancel()

    def _resolution(self, known: _Known) -> asyncio.Task[None]:
        """The resolution in progress, or a new one."""
        if known.resolving is None:
            known.asked_at = self._loop.time()
            known.resolving = self._loop.create_task(self._ask(known))
            known.resolving.add_done_callback(lambda task: _resolved(known, task))
        return known.resolving

    async def _ask(self, known: _Known) -> None:
        found = await self._resolve(known.host, known.port)
        if not found:
            raise OSError(f"{known.host} has no address")
        known.addresses = found

    async def _ask_system(self, host: str, port: int) -> Sequence[Address]:
        return await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _resolved(known: _Known, task: asyncio.Task[None]) -> None:
    known.resolving = None
    if not task.cancelled():
        task.exception()  # dials that waited got it


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
