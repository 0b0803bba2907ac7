# SPDX-License-Identifier: Apache-2.0
"""Scripted servers of a test, on an event loop of their own in a thread, so that the test itself may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import uvloop


class Entered(Protocol):
    """What `async with` takes, and yields: itself."""

    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *error: object) -> object: ...


S = TypeVar("S", bound=Entered)


@contextmanager
def threaded(make: Callable[[], S]) -> Iterator[S]:
    """What `make()` makes, entered, running in another thread until the block ends."""
    ready = threading.Event()
    made: list[S] = []
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        it = make()
        async with it:
            made.append(it)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(main()), daemon=True)
    thread.start()
    assert ready.wait(20), "the scripted server did not start"
    try:
        yield made[0]
    finally:
        ends[0]()
        thread.join(20)
