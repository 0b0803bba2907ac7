# SPDX-License-Identifier: Apache-2.0
"""What this process asks of Python and of the system before it serves, and once it does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import resource
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
NOT_COMPILED = (
    "lbproxy is not compiled: a small request takes twice the CPU. An editable install, such as that of `make run`,"
    " never is. Install a wheel for this Python and system, or the source (`pip install .`) where there is a C"
    " compiler and Python's headers"
)
COLLECT_AFTER = 5_000, 2, 1_000
"""New objects that begin a collection; how many such until one looks at their survivors, too; how many of these until
one looks at all objects, which takes 0.1 s for a thousand endpoints. See `settle`."""
SWITCH_S = 0.0005
"""How long another thread may run while the event loop has something to do. Python's 5 ms is paid at each call into
the kernel: while the resolver read an answer of 1,000 addresses, requests stood still for up to 30 ms."""


class Threads(ThreadPoolExecutor):
    """For `asyncio.to_thread`: a thread for each call, which no end waits for. A pool's own threads are joined when the
    loop is closed and again when Python exits, so that one call on a disk that does not respond holds a stop for ever.
    """

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        future: Future[T] = Future()
        Thread(target=_call, args=(future, fn, args, kwargs), name="lbproxy-thread", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: what runs ends by itself, or with the process."""


def _call(future: Future[T], function: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def run(main: Coroutine[object, object, T]) -> T:
    """Run the event loop that is fastest here."""

    async def with_threads() -> T:
        asyncio.get_running_loop().set_default_executor(Threads())
        return await main

    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(with_threads())
    return uvloop.run(with_threads())


def prepare() -> None:
    """Before anything is opened."""
    _raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)


def is_compiled() -> bool:
    """Whether the hot path runs as C: an installed wheel's does, unless there was no compiler (setup.py)."""
    found = importlib.util.find_spec("lbproxy.core.balancer")
    return found is not None and found.origin is not None and not found.origin.endswith(".py")


def settle() -> None:
    """What is there now stays: walking it again and again, mostly modules, is 5 % of the CPU time of a small request.

    Neither requests nor probes leave cycles behind, so few collections are needed, and the oldest generation holds what
    lives long: waiting requests, connections, endpoints. A collection of the others looks at 20,000 objects at most,
    which holds the event loop up for 5 to 10 ms: a thousand endpoints that join are 100,000 objects.
    """
    gc.collect()
    gc.freeze()
    gc.enable()  # see cli
    gc.set_threshold(*COLLECT_AFTER)


def _raise_descriptor_limit() -> None:
    """A proxy needs two descriptors for each request; the usual soft limit of 1,024 is for programs that use few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems call the hard limit infinite and mean it not
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
