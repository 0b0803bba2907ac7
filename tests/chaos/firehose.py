# SPDX-License-Identifier: Apache-2.0
"""A server that streams as fast as it is read, and says how far ahead of its readers it got.

It serves the model `hose`: events of 4 KiB, `size_bytes` in all, through a send buffer of 64 KiB. `sent` counts what
the kernel took, by stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from tests.support.endpoint import NOT_FOUND, OK, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer

EVENT = b"data: " + b"x" * (4096 - 8) + b"\n\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
MODELS = answer(b'{"object":"list","data":[{"id":"hose","object":"model"}]}')


class Firehose(ScriptedEndpoint):
    """`ScriptedEndpoint` with one script."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__({"/health": OK, "/v1/models": MODELS, "/metrics": NOT_FOUND, "/v1/completions": self._stream})
        self._events = size_bytes // len(EVENT)
        self.sent: list[int] = []
        self.running = 0

    async def _stream(self, wire: Wire, request: Received) -> None:
        sock: socket.socket = wire.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        wire.writer.transport.set_write_buffer_limits(64 * 1024)
        number = len(self.sent)
        self.sent.append(0)
        self.running += 1
        try:
            await wire.send(STREAM_HEAD)
            for _ in range(self._events):
                wire.writer.write(CHUNK)
                await wire.writer.drain()
                self.sent[number] += len(CHUNK)
            await wire.send(b"%x\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % 14)
        finally:
            self.running -= 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
