# SPDX-License-Identifier: Apache-2.0
"""The supervisor, as a child process sees it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Final

from lbproxy.config.tree import Settings
from lbproxy.processes.control import Beat, Start, Text, ToChild
from lbproxy.processes.settings_file import parse_text
from lbproxy.workers.link import Link
from lbproxy.workers.messages import Message

BEAT_S: Final = 1.0


class SupervisorLink:
    """The supervisor, as a child sees it."""

    def __init__(self) -> None:
        self.link: Link[ToChild] = Link(ToChild, self._received, self._lost)
        self.gone = asyncio.Event()
        """Its process ended."""
        self.on_message: Callable[[ToChild], None] = lambda _: None
        """What follows `Start`."""
        self._beat_at = 0.0
        self._start: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()

    async def started(self) -> Start | None:
        """Connect, and wait to begin; None: the supervisor is gone."""
        sock = socket.socket(fileno=os.dup(0))
        await asyncio.get_running_loop().connect_accepted_socket(self.link.protocol, sock)
        os.set_inheritable(0, False)
        return await self._start

    def send(self, message: Message) -> None:
        """Tell it something."""
        self.link.send(message)

    def beat(self, _: float = 0.0) -> None:
        """Tell it that the event loop runs, once a second: for `Pulse.listen`."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self.link.send(Beat())

    def _received(self, arrived: list[ToChild]) -> None:
        for message in arrived:
            if isinstance(message, Start) and not self._start.done():
                self._start.set_result(message)
            else:
                self.on_message(message)

    def _lost(self) -> None:
        self.gone.set()
        if not self._start.done():
            self._start.set_result(None)


def read(settings: Text) -> Settings:
    """The settings of a text. Raises ConfigError."""
    return parse_text(settings.text, settings.source)
