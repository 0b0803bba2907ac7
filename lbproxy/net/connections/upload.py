# SPDX-License-Identifier: Apache-2.0
"""A large body on its way to an endpoint: a slice in each turn of the loop. Written at once it would block the loop, as
it is copied, or encrypted.
"""

from __future__ import annotations

import asyncio
from typing import Final

from lbproxy.net.connections.corked import Corked

SLICE_BYTES: Final = 256 << 10


class Upload:
    """What one connection has still to write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Corked | None = None
        self.pieces: list[memoryview] = []
        """What is left to write."""
        self.is_full = False

    def begin(self, transport: Corked, pieces: tuple[bytes | memoryview, ...]) -> None:
        """Write the first slice, and the others in later turns."""
        self._transport = transport
        self.pieces = [memoryview(piece) for piece in pieces if len(piece)]
        self._write()

    def resume(self) -> None:
        self.is_full = False
        self._write()

    def drop(self) -> None:
        """Write nothing more: the connection is closed."""
        self._transport = None
        self.pieces = []

    def _write(self) -> None:
        transport, pieces = self._transport, self.pieces
        if transport is None or not pieces or transport.is_closing() or self.is_full:
            return
        piece = pieces[0]
        transport.write(piece[:SLICE_BYTES])
        if len(piece) > SLICE_BYTES:
            pieces[0] = piece[SLICE_BYTES:]
        else:
            del pieces[0]
        if pieces:
            self._loop.call_soon(self._write)
