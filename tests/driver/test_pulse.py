# SPDX-License-Identifier: Apache-2.0
"""The pulse: nobody else is blamed for the time in which our own loop stood still."""

from __future__ import annotations

import asyncio
import time

import pytest

from lbproxy.driver.pulse import STILL_S, Pulse
from tests.support.aio import run, until
from tests.support.garbage import left_by

STALL_S = 0.4


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_standstill_is_known_to_whichever_timer_comes_first(plain: bool) -> None:
    """A time-out that was due before the tick fires before it: it must hear of the standstill all the same."""

    async def main() -> None:
        pulse = Pulse()
        pulse.start()
        lags: list[float] = []
        pulse.listen(lags.append)
        await until(lambda: lags, "it ticks")
        heard: list[bool] = []
        began_at = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, lambda: heard.append(pulse.stood_still_since(began_at)))
        loop.call_soon(time.sleep, STALL_S)
        ticks = len(lags)
        await until(lambda: heard and len(lags) > ticks, "both fired")
        assert heard == [True]
        assert max(lags[ticks:]) > STILL_S
        assert pulse.stood_still_since(began_at), "and who asks later hears it too"
        pulse.close()

    run(main(), plain=plain)


def test_who_began_after_the_standstill_is_not_excused() -> None:
    """Otherwise one slow moment would excuse every time-out that follows it."""

    async def main() -> None:
        pulse = Pulse()
        pulse.start()
        lags: list[float] = []
        pulse.listen(lags.append)
        before = time.monotonic()
        time.sleep(STALL_S)  # noqa: ASYNC251 - the loop is to stand still
        await until(lambda: lags, "the late tick")
        assert lags[0] > STILL_S
        assert pulse.stood_still_since(before)
        pulse.close()
        assert not pulse.stood_still_since(time.monotonic())

    run(main())


def test_without_a_ticker_nothing_is_excused() -> None:
    async def main() -> None:
        pulse = Pulse()
        time.sleep(2 * STILL_S)  # noqa: ASYNC251
        assert not pulse.stood_still_since(0.0)
        pulse.close()

    run(main())


def test_what_was_slept_is_added_up() -> None:
    async def main() -> None:
        pulse = Pulse()
        pulse.start()
        lags: list[float] = []
        pulse.listen(lags.append)
        assert pulse.stalled_s() == 0.0
        time.sleep(STALL_S)  # noqa: ASYNC251 - the loop is to stand still
        during = pulse.stalled_s()
        assert during >= STALL_S - STILL_S, "also before the tick that is late"
        await until(lambda: lags, "the late tick")
        assert pulse.stalled_s() >= during
        pulse.close()

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_timeout_leaves_nothing_to_the_garbage_collector(plain: bool) -> None:
    """Each probe of each endpoint uses three, and a collection holds up the event loop."""

    async def main() -> None:
        pulse = Pulse()

        async def in_time() -> None:
            async with pulse.timeout(10.0):
                await asyncio.sleep(0)

        async def too_late() -> None:
            with pytest.raises(TimeoutError):
                async with pulse.timeout(0.0):
                    await asyncio.Event().wait()

        assert await left_by(in_time) == 0
        assert await left_by(too_late) == 0
        pulse.close()

    run(main(), plain=plain)
