# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that is a bad network: latency with jitter, little bandwidth, small packets, slow closing, resets.

In a thread of the test (`threads.py`). Everything is per connection and direction; bytes are never reordered or lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass

from tests.support.tcp_server import TcpServer

PIECE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the network is like. A test may change it at any time, for what comes then."""

    latency_s: float = 0.0
    """One way."""
    jitter_s: float = 0.0
    """More or less by up to this; order is kept."""
    bytes_per_s: float | None = None
    """In each direction of a connection."""
    slice_bytes: int = PIECE
    """Written in pieces of at most this."""
    close_after_s: float = 0.0
    """An end is passed on so late."""
    reset_share: float = 0.0
    """Of the pieces from the server: how many are lost, and the connection reset instead."""


class BadNetwork(TcpServer):
    """Listens on `port`, and passes everything to `target`. `async with`."""

    def __init__(self, target: int, weather: Weather, seed: int = 0) -> None:
        super().__init__()
        self.weather = weather
        self.connections = 0
        self.resets = 0
        self._target = target
        self._rng = random.Random(seed)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writers = [writer]
        try:
            await asyncio.sleep(self._delay_s())
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(back)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, back, may_reset=False))
                both.create_task(self._pass_on(there, writer, may_reset=True))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, may_reset: bool) -> None:
        """One direction: read into a line of what is due when, and write from it."""
        line: deque[tuple[float, bytes]] = deque()
        more = asyncio.Event()

        async def read() -> None:
            loop = asyncio.get_running_loop()
            due = 0.0
            while True:
                data = await source.read(PIECE)
                late = self._delay_s() if data else self.weather.close_after_s + self.weather.latency_s
                due = max(due, loop.time() + late)
                line.append((due, data))
                more.set()
                if not data:
                    return

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await self._write(line, more, sink, may_reset)

    async def _write(
        self,
        line: deque[tuple[float, bytes]],
        more: asyncio.Event,
        sink: asyncio.StreamWriter,
        may_reset: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not line:
                more.clear()
                await more.wait()
            due, data = line.popleft()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                with contextlib.suppress(OSError):
                    sink.write_eof()
                return
            if may_reset and self._rng.random() < self.weather.reset_share:
                self._reset(sink)
            for start in range(0, len(data), self.weather.slice_bytes):
                piece = data[start : start + self.weather.slice_bytes]
                sink.write(piece)
                await sink.drain()
                if self.weather.bytes_per_s is not None:
                    await asyncio.sleep(len(piece) / self.weather.bytes_per_s)

    def _reset(self, sink: asyncio.StreamWriter) -> None:
        """RST towards the balancer; the exception ends the other direction too."""
        self.resets += 1
        sock: socket.socket = sink.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sink.transport.abort()
        raise ConnectionResetError

    def _delay_s(self) -> float:
        weather = self.weather
        return max(0.0, weather.latency_s + self._rng.uniform(-weather.jitter_s, weather.jitter_s))
