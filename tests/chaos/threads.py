"""Scripted servers of a test, on an event loop of their own in a thread, so that the test itself may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

import uvloop

T = TypeVar("T")


@contextmanager
def threaded(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `make()` yields, running in another thread until the block ends."""
    ready = threading.Event()
    made: list[T] = []
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with make() as it:
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


@contextmanager
def several(count: int, make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[list[T]]:
    """So many of them in one thread."""

    @asynccontextmanager
    async def all_of_them() -> AsyncIterator[list[T]]:
        async with asyncio.TaskGroup():
            servers = [make() for _ in range(count)]
            entered = [await one.__aenter__() for one in servers]
            try:
                yield entered
            finally:
                for one in servers:
                    await one.__aexit__(None, None, None)

    with threaded(all_of_them) as servers:
        yield servers
