# SPDX-License-Identifier: Apache-2.0
"""Names are resolved beside requests: what nameservers do harms nobody whose name was ever resolved."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.names import FRESH_S, MAX_NAMES, Address, Names
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint


def at(port: int) -> Sequence[Address]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


class Nameserver:
    """Answers as the test says; `goes` says whether it answers at all."""

    def __init__(self, found: Sequence[Address] | OSError = ()) -> None:
        self.found = found
        self.asked: list[str] = []
        self.goes = asyncio.Event()
        self.goes.set()

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        await self.goes.wait()
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


class Clock:
    """A loop whose time a test sets."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)


def made(found: Sequence[Address] | OSError = ()) -> tuple[Names, Nameserver, Clock]:
    server, clock = Nameserver(found), Clock()
    return Names(clock, server), server, clock  # type: ignore[arg-type]


def test_a_known_name_is_asked_for_beside_those_who_need_it_and_seldom() -> None:
    async def main() -> None:
        names, server, clock = made(at(1))
        assert await names.addresses("a", 1) == at(1)
        clock.now += FRESH_S - 0.1
        assert await names.addresses("a", 1) == at(1)
        assert len(server.asked) == 1
        clock.now += 0.1
        server.found = at(2)
        server.goes.clear()
        for _ in range(3):
            assert await names.addresses("a", 1) == at(1), "nobody waits"
        await asyncio.sleep(0)
        assert len(server.asked) == 2
        server.goes.set()
        await until(lambda: names._known["a", 1].resolving is None)
        assert await names.addresses("a", 1) == at(2)

    run(main())


@pytest.mark.parametrize("how", ["fails", "finds nothing", "is silent"])
def test_a_nameserver_that_is_gone_changes_nothing(how: str) -> None:
    async def main() -> None:
        names, server, clock = made(at(1))
        await names.addresses("a", 1)
        server.found = () if how == "finds nothing" else OSError("SERVFAIL")
        if how == "is silent":
            server.goes.clear()
        for _ in range(20):
            clock.now += FRESH_S
            assert await names.addresses("a", 1) == at(1)
            await asyncio.sleep(0)
            await until(lambda: how == "is silent" or names._known["a", 1].resolving is None)
        assert len(server.asked) == (2 if how == "is silent" else 21)
        names.close()

    run(main())


def test_a_first_resolution_is_waited_for_by_all_together_and_its_failure_told() -> None:
    async def main() -> None:
        names, server, _ = made(OSError("no such host"))
        server.goes.clear()
        waiting = [asyncio.ensure_future(names.addresses("a", 1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        server.goes.set()
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in told] == [asyncio.CancelledError, OSError, OSError]
        assert len(server.asked) == 1
        server.found = at(1)
        assert await names.addresses("a", 1) == at(1), "at once, once it can be had"

    run(main())


def test_when_nobody_answers_at_its_addresses_they_are_asked_for_at_once() -> None:
    """A container that was made anew has another address."""

    async def main() -> None:
        names, server, _ = made(at(1))
        await names.addresses("a", 1)
        server.found = at(2)
        names.refresh("a", 1)
        await until(lambda: names._known["a", 1].resolving is None)
        assert await names.addresses("a", 1) == at(2)
        names.refresh("never heard of", 1)
        assert server.asked == ["a", "a"]

    run(main())


def test_an_address_is_no_name_and_there_is_a_bound() -> None:
    async def main() -> None:
        names, server, clock = made(at(1))
        for _ in range(3):
            await names.addresses("::1", 1)
            names.refresh("::1", 1)
            clock.now += 2 * FRESH_S
        assert server.asked == ["::1"]
        for n in range(MAX_NAMES + 10):
            await names.addresses("a", n)
        assert len(names._known) == MAX_NAMES

    run(main())


def test_dials_go_on_without_a_nameserver() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            pool, server = ConnectionPool(), Nameserver(at(endpoint.port))
            pool.names = Names(pool.loop, server)
            origin = Origin(("gpu-1.example", 80))
            (await pool.connect(origin, 5.0)).abort()
            server.goes.clear()
            pool.names._known["gpu-1.example", 80].asked_at -= 2 * FRESH_S
            for _ in range(3):
                (await pool.connect(origin, 5.0)).abort()
            assert len(server.asked) == 2
            with pytest.raises(UpstreamError) as caught:
                await pool.connect(Origin(("gpu-2.example", 80)), 0.2)
            assert caught.value.kind is FailureKind.CONNECT
            pool.close()

    run(main())


def test_a_server_that_reads_nothing_for_long_is_not_cut_by_the_kernel_and_a_host_that_vanished_is() -> None:
    """A busy server does not read a large upload: its window is zero, and it is well. TCP_USER_TIMEOUT would cut it.
    It would also be waited for in place of the 30 s of keep-alive.
    """

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint:
            pool = ConnectionPool()
            connection = await pool.connect(Origin(("127.0.0.1", endpoint.port)), 5.0)
            assert connection._transport is not None
            sock: Any = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT
            assert [sock.getsockopt(socket.IPPROTO_TCP, one) for one in options] == [15, 5, 3, 0]
            connection.abort()
            pool.close()

    run(main())
