# SPDX-License-Identifier: Apache-2.0
"""What the test servers that write every byte themselves have in common: a port, and a task for each connection.

Uses nothing of lbproxy, so that whatever judges lbproxy may use it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self


class TcpServer(ABC):
    """Listens on a free port of 127.0.0.1 (or on `port`). `async with` it, also again: the port stays the same."""

    limit_bytes = 1 << 16
    """What a connection's reader holds before it reads no more, as asyncio has it."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        """0 until it listens, unless it was given."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Accept no more, and end what runs."""
        self._refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=self.limit_bytes)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._serve(reader, writer)

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, until it ends. Cancelled by `stop`: it must not raise then, and has to close `writer`."""
