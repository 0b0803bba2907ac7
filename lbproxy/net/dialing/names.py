"""The addresses of endpoints that the settings know by a host's name, as dials use them.

Once a name was resolved no request waits for a nameserver any more: a dial takes the addresses that are known, and if
they are older than `FRESH_S`, they are asked for anew beside it. A failure changes nothing, so that a nameserver that
is gone harms nobody whose name was ever resolved. Only a first resolution is waited for. Probes dial every endpoint
every few seconds, so that what is known is hardly ever older than that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final, TypeAlias

Address: TypeAlias = tuple[int, int, int, str, tuple[object, ...]]
"""What getaddrinfo returns of each: family, type, protocol, canonical name, what connect(2) takes."""
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
        """As of the last good response."""
        self.asked_at = float("-inf")
        self.resolving: asyncio.Task[None] | None = None
        """The resolution that runs."""


class Names:
    """What is known of names, by host and port."""

    def __init__(self, loop: asyncio.AbstractEventLoop, resolve: Resolve | None = None) -> None:
        """`resolve`: raises OSError if it finds none. None = as the system does."""
        self._loop = loop
        self._resolve = resolve or self._ask_system
        self._known: dict[tuple[str, int], _Known] = {}

    async def addresses(self, host: str, port: int) -> Sequence[Address]:
        """Where `host` is, at least one, as far as known. Raises OSError if nothing is known, nor can be found out."""
        known = self._known.get((host, port))
        if known is None:
            if len(self._known) >= MAX_NAMES:
                self._known.pop(next(iter(self._known)))
            known = self._known[host, port] = _Known(host, port)
        if not known.addresses:
            await asyncio.shield(self._resolution(known))  # which others may wait for too
        elif known.is_name and self._loop.time() - known.asked_at >= FRESH_S:
            self._resolution(known)
        return known.addresses

    def refresh(self, host: str, port: int) -> None:
        """Nobody answered at any of its addresses: they may be others by now."""
        known = self._known.get((host, port))
        if known is not None and known.is_name:
            self._resolution(known)

    def close(self) -> None:
        """Let go of what still resolves."""
        for known in self._known.values():
            if known.resolving is not None:
                known.resolving.cancel()

    def _resolution(self, known: _Known) -> asyncio.Task[None]:
        """The resolution that runs, or one that begins."""
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
        task.exception()  # those who waited were told; nobody else has to know


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
