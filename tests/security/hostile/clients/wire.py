# SPDX-License-Identifier: Apache-2.0
"""One hostile connection, of which a kind decides every byte, pause and end; and what all of them did together."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeAlias

PIECE = 256 << 10
TINY_BUFFER = 2048
"""The least that Linux gives: who reads nothing shall not have the kernel read for them."""


@lru_cache(maxsize=64)
def _block(piece: bytes) -> bytes:
    return piece * max(1, PIECE // len(piece))


@dataclass(slots=True)
class Counts:
    """What a crowd did so far."""

    connections: int = 0
    refused: int = 0
    sent: int = 0
    """Bytes that the kernel took."""
    received: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """How responses began; those that came behind others in one read are not seen."""
    faults: Counter[str] = field(default_factory=Counter)
    """Ends that no kind intends: a mistake of the generator."""

    def plain(self) -> dict[str, Any]:
        """For JSON; `asdict` makes nothing of a Counter."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def add(self, more: Counts) -> None:
        self.connections += more.connections
        self.refused += more.refused
        self.sent += more.sent
        self.received += more.received
        self.statuses.update(more.statuses)
        self.faults.update(more.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prey:
    """Where to, as whom."""

    port: int
    admin_port: int
    key: str | None
    """None: the hostile ones know none, and lbproxy wants one."""
    model: str = "sim"
    send_rate: float = 0.0
    """Bytes a second of each connection, for those that are no enemies (`asking.ballast`)."""
    receive_rate: float = 0.0

    @property
    def credentials(self) -> str:
        """A field line, or nothing."""
        return f"Authorization: Bearer {self.key}\r\n" if self.key else ""


class Connection:
    """A socket, without anything between the kind and the kernel."""

    def __init__(self, sock: socket.socket, counts: Counts) -> None:
        self._sock = sock
        self._counts = counts
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        """All of it, as fast as lbproxy takes it."""
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            await self._loop.sock_sendall(self._sock, piece)
            self._counts.sent += len(piece)

    async def fill(self, piece: bytes, size: int) -> None:
        """`size` bytes at least, of the same piece again and again; all connections share what is sent."""
        block = _block(piece)
        for _ in range(-(-size // len(block))):
            await self.send(block)

    async def send_pieces(self, pieces: Iterable[bytes], pause_s: float = 0.0) -> None:
        """Each in a packet of its own, with a pause behind it."""
        for piece in pieces:
            await self.send(piece)
            await asyncio.sleep(pause_s)

    async def read(self, size: int = PIECE) -> bytes:
        """What is there, at least a byte; b"" at the end."""
        data = await self._loop.sock_recv(self._sock, size)
        self._counts.received += len(data)
        if data.startswith(b"HTTP/1.1 "):
            self._counts.statuses[data[9:12].decode("latin-1")] += 1
        return data

    async def read_to_end(self) -> None:
        """Until lbproxy closes."""
        while await self.read():
            pass

    async def read_until(self, text: bytes) -> bytes:
        """Everything up to the read that brought it. Raises EOFError."""
        data = b""
        while text not in data:
            piece = await self.read()
            if not piece:
                raise EOFError
            data += piece
        return data

    async def read_some(self, seconds: float) -> None:
        """Whatever comes in this time, or until the end."""
        try:
            async with asyncio.timeout(seconds):
                await self.read_to_end()
        except TimeoutError:
            pass

    def half_close(self) -> None:
        """FIN; the other direction stays open."""
        self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """RST."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


@dataclass(slots=True)
class Attacker:
    """What a kind is given: chance, whom to attack, and connections."""

    prey: Prey
    rng: random.Random
    counts: Counts

    @asynccontextmanager
    async def connect(self, *, admin: bool = False, tiny: bool = False) -> AsyncIterator[Connection]:
        """A connection. `tiny`: its receive buffer is as small as can be."""
        sock = socket.socket()
        sock.setblocking(False)
        if tiny:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, TINY_BUFFER)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            port = self.prey.admin_port if admin else self.prey.port
            try:
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            except OSError:
                self.counts.refused += 1
                raise
            self.counts.connections += 1
            yield Connection(sock, self.counts)

    def often(self, low: float, high: float) -> float:
        """A number between these, small ones as often as large ones."""
        return low * float((high / low) ** self.rng.random())


Kind: TypeAlias = Callable[[Attacker], Awaitable[None]]
"""One life of one connection. It may raise OSError and EOFError, and is cancelled at the end of the phase."""
