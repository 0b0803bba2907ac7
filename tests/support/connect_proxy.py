# SPDX-License-Identifier: Apache-2.0
"""A small forward proxy that understands CONNECT and nothing else, with what it was asked written down."""

from __future__ import annotations

import asyncio
import base64
import contextlib

from tests.support.endpoint import Message
from tests.support.tcp_server import TcpServer


class ConnectProxy(TcpServer):
    """Listens on a free port of 127.0.0.1. `async with` it.

    `user`: `name:password` that it asks for. `script`: instead of connecting, it writes this and then says no more.
    """

    def __init__(self, *, user: str | None = None, script: bytes | None = None) -> None:
        super().__init__()
        self.script = script
        self.asked: list[Message] = []
        """The heads of the CONNECT requests."""
        self._wanted = None if user is None else f"Basic {base64.b64encode(user.encode()).decode()}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await self._reply(reader, writer)
        writer.transport.abort()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = Message(await reader.readuntil(b"\r\n\r\n"), b"")
        self.asked.append(request)
        method, target, _ = request.head.decode().split("\r\n")[0].split(" ")
        if self.script is not None:
            writer.write(self.script)
            await reader.read()
            return
        if self._wanted is not None and request.field("proxy-authorization") != self._wanted:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return
        assert method == "CONNECT"
        host, _, port = target.rpartition(":")
        there, to = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
        try:
            await asyncio.gather(_pipe(reader, to), _pipe(there, writer))
        finally:
            to.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof() if writer.can_write_eof() else writer.close()
