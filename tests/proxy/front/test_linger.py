# SPDX-License-Identifier: Apache-2.0
"""The end of a connection takes a bounded time, whatever its client does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lbproxy.net.listening.deadlines import LEAST_READ_RATE
from lbproxy.proxy.front.linger import LINGER_S, LOOK_S, Linger
from tests.support.aio import virtually

STALL_S = 60.0


class Wire(asyncio.Transport):
    """To a client whose host has not taken `unsent(t)` bytes after `t` seconds."""

    def __init__(self, unsent: Callable[[float], float]) -> None:
        super().__init__()
        self._unsent = unsent
        self._loop = asyncio.get_running_loop()
        self.began_at = self._loop.time()
        self.aborted: asyncio.Future[float] = self._loop.create_future()
        self.protocol: asyncio.BaseProtocol | None = None

    def get_write_buffer_size(self) -> int:
        return max(0, int(self._unsent(self._loop.time() - self.began_at)))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Our side is closed."""

    def resume_reading(self) -> None:
        """It was not paused."""

    def abort(self) -> None:
        self.aborted.set_result(self._loop.time() - self.began_at)


async def ended_after_s(unsent: Callable[[float], float], *, drips: bool = False) -> float:
    wire = Wire(unsent)
    linger = Linger(wire, asyncio.Protocol(), STALL_S)
    while not wire.aborted.done():
        if drips:
            linger.data_received(b"x")
        await asyncio.sleep(LOOK_S / 2)
    linger.connection_lost(None)
    return wire.aborted.result()


@pytest.mark.parametrize("drips", [False, True])
def test_a_client_that_has_everything_may_send_on_for_two_seconds(drips: bool) -> None:
    """What it sends is dropped, and prolongs nothing."""
    assert virtually(ended_after_s(lambda _: 0, drips=drips)) == pytest.approx(LINGER_S, abs=2 * LOOK_S)


def test_a_client_that_reads_nothing_is_closed_after_the_stall() -> None:
    assert virtually(ended_after_s(lambda _: 100_000)) == pytest.approx(STALL_S, abs=2 * LOOK_S)


def test_a_client_that_sips_is_closed_soon_too() -> None:
    """A byte now and then kept a connection, and what is left of a response, for days."""
    assert virtually(ended_after_s(lambda t: 100_000 - t)) <= STALL_S + 1.0
    assert virtually(ended_after_s(lambda t: 100_000 - t * LEAST_READ_RATE / 2)) <= 2.0 * STALL_S + 1.0


def test_a_slow_client_gets_all_of_its_response() -> None:
    size, rate = 400_000, 1.1 * LEAST_READ_RATE
    took_s = virtually(ended_after_s(lambda t: size - t * rate))
    assert took_s == pytest.approx(size / rate + LINGER_S, abs=4 * LOOK_S)


def test_a_client_may_stand_still_for_a_while_in_the_middle() -> None:
    took_s = virtually(ended_after_s(lambda t: 50_000 if t < STALL_S - 5.0 else 0))
    assert took_s == pytest.approx(STALL_S - 5.0 + LINGER_S, abs=4 * LOOK_S)
