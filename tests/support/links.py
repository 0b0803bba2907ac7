# SPDX-License-Identifier: Apache-2.0
"""Both ends of a link between two of lbproxy's processes, in one loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from lbproxy.workers import messages as m
from lbproxy.workers.link import Link


class End:
    """One end of a link, with all that it saw."""

    def __init__(
        self,
        kinds: Any,
        received: Callable[[list[Any]], None] = lambda _: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`received`, `lost`: called as well."""
        self.batches: list[list[m.Message]] = []
        self.lost = 0
        self.link: Link[Any] = Link(kinds, self._received, self._lost)
        self._also_received, self._also_lost = received, lost

    def _received(self, arrived: list[m.Message]) -> None:
        self.batches.append(arrived)
        self._also_received(arrived)

    def _lost(self) -> None:
        self.lost += 1
        self._also_lost()

    @property
    def arrived(self) -> list[m.Message]:
        return [message for batch in self.batches for message in batch]


@asynccontextmanager
async def pair(worker: End | None = None, balancer: End | None = None) -> AsyncIterator[tuple[End, End]]:
    """A worker's end and the balancer process's, connected."""
    worker, balancer = worker or End(m.ToWorker), balancer or End(m.FromWorker)
    await connect(worker.link, balancer.link)
    try:
        yield worker, balancer
    finally:
        worker.link.close()
        balancer.link.close()
        await asyncio.sleep(0)


async def connect(*links: Link[Any]) -> None:
    """Connect two links."""
    loop = asyncio.get_running_loop()
    for link, sock in zip(links, socket.socketpair(), strict=True):
        await loop.connect_accepted_socket(link.protocol, sock)
