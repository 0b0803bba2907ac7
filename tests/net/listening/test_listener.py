# SPDX-License-Identifier: Apache-2.0
"""Accepting: bursts, limits, and what happens when descriptors run out. The limits of this very process are lowered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import cast

import pytest

from lbproxy.net.listening.bind import bind
from lbproxy.net.listening.listener import CONNECTIONS, DESCRIPTORS, PAUSE_S, Listener
from tests.support.aio import run, until
from tests.support.limits import descriptors_left

REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Echo(asyncio.Protocol):
    """Says back what it hears."""

    open: list[asyncio.Transport]

    def __init__(self, open_: list[asyncio.Transport]) -> None:
        self.open = open_

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.open.append(self.transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.remove(self.transport)


class Rig:
    """A listener of echoes and its clients, in one process."""

    def __init__(
        self, *, most: int = 1000, refusal: Callable[[], bytes] | None = lambda: REFUSAL, spares: int = 1
    ) -> None:
        self.served: list[asyncio.Transport] = []
        self.listener = Listener(
            lambda: Echo(self.served), room=lambda: len(self.served) < most, refusal=refusal, spares=spares
        )
        self.clients: list[socket.socket] = []

    async def __aenter__(self) -> Rig:
        sockets = await bind("127.0.0.1", 0)
        self.address: tuple[str, int] = sockets[0].getsockname()
        self.listener.start(sockets)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        for client in self.clients:
            client.close()
        await until(lambda: not self.served, "all are closed")

    def prepare(self, count: int) -> None:
        """Clients' sockets, made while there are descriptors."""
        for _ in range(count):
            client = socket.socket()
            client.setblocking(False)
            self.clients.append(client)

    def connect(self, clients: list[socket.socket]) -> None:
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                client.connect(self.address)


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_burst_is_served_and_latency_is_not_traded_for_it(plain: bool) -> None:
    async def main() -> None:
        async with Rig() as it:
            it.prepare(300)
            it.connect(it.clients)
            await until(lambda: len(it.served) == 300, "all were accepted")
            it.clients[0].send(b"hello")
            await until(lambda: _heard(it.clients[0]) == b"hello", "served")
            nodelay = it.served[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert nodelay, "events of a stream go out at once"

    run(main(), plain=plain)


def test_of_a_burst_others_get_their_share_and_what_they_leave_is_accepted() -> None:
    """Where processes share the sockets, a turn accepts as many as it is told to, and then others have a moment."""

    async def main() -> None:
        asked: list[bool] = []

        def batch(waited: bool) -> int:
            asked.append(waited)
            return 3 if waited or len(asked) == 1 else 0

        async with Rig() as it:
            it.listener.batch = batch
            it.prepare(10)
            it.connect(it.clients)
            await until(lambda: len(it.served) == 10, "all were accepted")
        assert asked[:3] == [False, False, True], "three at once, then others first, then what they left"
        assert asked.count(True) == 3

    run(main())


def test_who_is_one_too_many_is_told_so_and_room_is_found_again() -> None:
    async def main() -> None:
        async with Rig(most=2) as it:
            it.prepare(4)
            for n in range(2):
                it.connect([it.clients[n]])
                await until(lambda n=n: len(it.served) == n + 1, "accepted")  # type: ignore[misc]
            it.connect([it.clients[2]])
            await until(lambda: _heard(it.clients[2]) == REFUSAL, "refused")
            assert it.listener.refused == {CONNECTIONS: 1, DESCRIPTORS: 0}
            it.clients[0].close()
            await until(lambda: len(it.served) == 1, "closed")
            it.connect([it.clients[3]])
            await until(lambda: len(it.served) == 2, "there is room again")

    run(main())


def test_without_descriptors_clients_are_refused_nothing_spins_and_accepting_resumes() -> None:
    async def main() -> None:
        async with Rig() as it:
            it.prepare(9)
            with descriptors_left(3):
                it.connect(it.clients[:8])
                await until(lambda: it.listener.refused[DESCRIPTORS] == 5, "the others were told")
                await until(lambda: len(it.served) == 3, "as many as there are descriptors")
                assert [_heard(client) for client in it.clients].count(REFUSAL) == 5
                used, began_at = time.process_time(), time.monotonic()
                await asyncio.sleep(3 * PAUSE_S)
                assert time.process_time() - used < 0.5 * (time.monotonic() - began_at), "it does not spin"
                it.served[0].abort()
                await until(lambda: len(it.served) == 2, "one descriptor is free")
                it.connect(it.clients[8:])
                await until(lambda: len(it.served) == 3, "and is used")

    run(main())


def test_a_listener_without_a_refusal_serves_on_its_spare_descriptors() -> None:
    """So that /metrics answers when clients have taken all others."""

    async def main() -> None:
        async with Rig(refusal=None, spares=2) as it:
            it.prepare(3)
            with descriptors_left(0):
                it.connect(it.clients[:2])
                await until(lambda: len(it.served) == 2, "served")
                it.clients[0].send(b"hello")
                await until(lambda: _heard(it.clients[0]) == b"hello", "served")
                it.connect(it.clients[2:])
                await asyncio.sleep(2 * PAUSE_S)
                assert len(it.served) == 2, "no more spares: the third waits"
                it.served[0].abort()
                await until(lambda: len(it.served) == 2, "then it is its turn")
            assert it.listener.refused == {CONNECTIONS: 0, DESCRIPTORS: 0}

    run(main())


def test_every_address_of_a_name_gets_the_same_port() -> None:
    async def main() -> None:
        sockets = await bind("localhost", 0)
        try:
            assert len({sock.getsockname()[1] for sock in sockets}) == 1
        finally:
            for sock in sockets:
                sock.close()

    run(main())


def test_a_taken_address_leaves_nothing_open() -> None:
    async def main() -> None:
        (first,) = await bind("127.0.0.1", 0)
        with first, pytest.raises(OSError, match="in use"):
            await bind("127.0.0.1", first.getsockname()[1])

    run(main())


def _heard(client: socket.socket) -> bytes | None:
    """What came; b"" if nothing did, None if the other side closed. Looks and takes nothing away."""
    try:
        return client.recv(4096, socket.MSG_PEEK) or None
    except (BlockingIOError, OSError):
        return b""
