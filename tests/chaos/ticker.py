# SPDX-License-Identifier: Apache-2.0
"""A ticker on an event loop: how late the loop is, how much CPU time its turns take, how many tasks it has.

Every 100 ms a line is added to FILE: time, the worst lag since the last line, the worst that is our own, the most CPU
time that the thread used between two ticks, tasks. The ticker fires every 5 ms. A lag is our own where no thread was
merely waiting for a CPU that others had, which Linux tells in /proc (schedstat); without it both are the same. What
a hypervisor takes counts as our own; CPU time does not depend on it. If FILE.block exists the loop is blocked for the
seconds in it, once; if FILE.jump does, the wall clock, as Python tells it, jumps by the seconds in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from lbproxy.processes import process

T = TypeVar("T")
TICK_S = 0.005


def watch(path: str) -> None:
    """Have the event loop that this process will run watched."""
    run = process.run

    async def both(main: Coroutine[object, object, T]) -> T:
        ticker = asyncio.ensure_future(Ticker(path).run())
        try:
            return await main
        finally:
            ticker.cancel()

    def watched(main: Coroutine[object, object, T]) -> T:
        return run(both(main))

    process.run = watched


class Waited:
    """How long the threads of this process were ready to run, and did not, so far. Of all of them: who waits for the
    interpreter waits for the thread that has it.
    """

    def __init__(self) -> None:
        self._by_thread: dict[str, int] = {}
        """In ns, also of threads that have ended."""

    def seconds(self) -> float:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that ends
            for thread in os.listdir("/proc/self/task"):
                self._by_thread[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1])
        return sum(self._by_thread.values()) / 1e9


class Ticker:
    """Writes what it sees until cancelled."""

    def __init__(self, path: str) -> None:
        self._block_order, self._jump_order = Path(f"{path}.block"), Path(f"{path}.jump")
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._waited_s = Waited().seconds

    async def run(self) -> None:
        worst = own = most_cpu = 0.0
        last, waited, cpu, written = time.monotonic(), self._waited_s(), time.thread_time(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now, waited_now, cpu_now = time.monotonic(), self._waited_s(), time.thread_time()
            lag = now - last - TICK_S
            worst, own = max(worst, lag), max(own, lag - (waited_now - waited))
            most_cpu = max(most_cpu, cpu_now - cpu)
            if now - written > 0.1:
                self._file.write(b"%.3f %.4f %.4f %.4f %d\n" % (now, worst, own, most_cpu, len(asyncio.all_tasks())))
                worst = own = most_cpu = 0.0
                written = now
                self._obey()
                # A lag that was ordered is none.
                now, waited_now, cpu_now = time.monotonic(), self._waited_s(), time.thread_time()
            last, waited, cpu = now, waited_now, cpu_now

    def _obey(self) -> None:
        if self._block_order.exists():
            seconds = float(self._block_order.read_text())
            self._block_order.unlink()
            time.sleep(seconds)
        if self._jump_order.exists():
            told, ahead = time.time, float(self._jump_order.read_text())
            time.time = lambda: told() + ahead
            self._jump_order.unlink()
