# SPDX-License-Identifier: Apache-2.0
"""Running asynchronous tests: on the loop that users get, with every lost exception made an error."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[object, object, T], *, timeout_s: float = 120.0, plain: bool = False) -> T:
    """Run a test's body. Fails if a task or callback died unseen, also one that only the garbage collector finds.

    `plain`: on asyncio's own loop, as on systems without uvloop.
    """
    # What other tests left is not looked at again: caches and pytest's own grow to 200,000 objects, 0.1 s a collection.
    gc.collect()
    gc.freeze()
    lost: list[str] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(repr(context)))
        async with asyncio.timeout(timeout_s):
            result = await main
        gc.collect()
        await asyncio.sleep(0)
        return result

    result = asyncio.run(watched()) if plain else uvloop.run(watched())
    assert not lost, lost
    return result


class Timers(selectors.DefaultSelector):
    """Waits for nothing: says how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen"
        self.waited_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves by waiting only."""

    def __init__(self) -> None:
        self._timers = Timers()
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.waited_s


def virtually(main: Coroutine[object, object, T]) -> T:
    """Run a test's body in virtual time, as long as only timers are waited for."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def until(
    condition: Callable[[], object], what: str = "", *, within_s: float = 60.0, every_s: float = 0.005
) -> None:
    """Wait for something that must come true soon, however busy the machine is. `what` says it where the code does not.

    AssertionError if it does not; a test that is not asynchronous writes `run(until(...))`.
    """
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - anything may change it, in another process too
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"did not happen within {within_s} s: {what}") from None


def stand_still(seconds: float) -> None:
    """Have the running loop stand still, soon, in a callback of I/O: all timers of that time fire before other I/O."""
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()

    def stall() -> None:
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)
        time.sleep(seconds)

    loop.add_reader(reading, stall)
    os.write(writing, b"x")
