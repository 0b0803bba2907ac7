# SPDX-License-Identifier: Apache-2.0
"""However much there is to do, the readers of KV events work a little at a time and a fifth of the time."""

from __future__ import annotations

import asyncio

from lbproxy.extras.kv_pace import SHARE, TURN_S, Pace
from tests.support.aio import virtually

STEP_S = 0.0003


class Work:
    """A clock that moves by work as well as by waiting."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        self.turns_s: list[float] = []
        """How long each stretch of work between two pauses took."""

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.worked_s

    async def do(self, pace: Pace, steps: int) -> None:
        async with pace.turn():
            for _ in range(steps):
                self.worked_s += STEP_S
                await pace.spend()


def test_a_flood_takes_a_fifth_of_the_time_in_short_turns() -> None:
    async def main() -> None:
        work = Work()
        pace = Pace(work.now)
        loop = asyncio.get_running_loop()
        stretches, before = [], 0.0

        async def watch() -> None:
            nonlocal before
            while True:
                stretches.append(work.worked_s - before)
                before = work.worked_s
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            floods = [tasks.create_task(work.do(pace, 500)) for _ in range(4)]
            await asyncio.wait(floods)
            watching.cancel()
        assert max(stretches) <= TURN_S + 2 * STEP_S, "all readers together"
        assert work.worked_s / (work.worked_s + loop.time()) < 1.1 * SHARE

    virtually(main())


def test_what_is_seldom_is_not_delayed() -> None:
    async def main() -> None:
        work = Work()
        pace = Pace(work.now)
        waited_s = 0.0
        for _ in range(100):
            before = asyncio.get_running_loop().time()
            await work.do(pace, 5)
            waited_s += asyncio.get_running_loop().time() - before
            await asyncio.sleep(0.1)
        assert waited_s == 0.0

    virtually(main())


def test_many_small_messages_count_like_one_large() -> None:
    """A loop that never yields between messages would not let anybody else work."""

    async def main() -> None:
        work = Work()
        pace = Pace(work.now)
        for _ in range(100):
            await work.do(pace, 1)
        assert asyncio.get_running_loop().time() > 3.0 * work.worked_s

    virtually(main())
