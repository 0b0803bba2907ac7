# SPDX-License-Identifier: Apache-2.0
"""Clients that ask without a pause and tolerate nothing: what fails for any of them is a failure.

async with load(url, keep=4, fresh=4) as clients:
    ...                              # whatever must not be noticed
assert clients.failed == []
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.support.rig import RawClient, post

PAUSE_S = 0.005
TIMEOUT_S = 30.0
CLOSE_S = 1.0
BODY = b'{"model":"sim","prompt":"Once","max_tokens":3}'


class Load:
    """What became of the requests."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, more: str = "") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.address = (parts.hostname, parts.port)
        self._tls = tls
        self._request = post(BODY, "/v1/completions", more)
        self.done = 0
        self.failed: list[str] = []
        self.stopping = False

    async def client(self, *, keep: bool) -> None:
        """One client: on a connection for as long as the server lets it, or on a new one each time."""
        connection: RawClient | None = None
        while not self.stopping:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if connection is None:
                        connection = RawClient(*await asyncio.open_connection(*self.address, ssl=self._tls))
                    connection.send(self._request)
                    reply = await connection.reply()
            except (OSError, EOFError, TimeoutError) as error:
                self.failed.append(repr(error))
                connection = None
                continue
            if reply.status == 200:
                self.done += 1
            else:
                self.failed.append(f"{reply.status} {reply.body[:200]!r}")
            if not keep or reply.field("connection") == "close":
                await _close(connection)
                connection = None
            await asyncio.sleep(PAUSE_S)
        if connection is not None:
            await _close(connection)


async def _close(client: RawClient) -> None:
    """With TLS it takes until the other side closes, too: a loop that ends before leaves the connection open."""
    client.writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await client.writer.wait_closed()
    client.writer.transport.abort()


@asynccontextmanager
async def load(
    url: str, *, keep: int = 4, fresh: int = 4, tls: ssl.SSLContext | None = None, more: str = ""
) -> AsyncIterator[Load]:
    """So many clients that keep their connections, and so many that do not, until the end of the block.

    `more`: further field lines of each request.
    """
    it = Load(url, tls, more)
    async with asyncio.TaskGroup() as group:
        for n in range(keep + fresh):
            group.create_task(it.client(keep=n < keep))
        try:
            yield it
        finally:
            it.stopping = True
