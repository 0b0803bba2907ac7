# SPDX-License-Identifier: Apache-2.0
"""Many simulated servers in one process, for what needs a fleet: `python -m tests.support.fleet COUNT SPEED`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.support.process import Program

MODEL = "qwen3-8b"


@contextmanager
def fleet(count: int, speed: float = 1.0) -> Iterator[list[str]]:
    """The URLs of so many; the third in ten is half as fast."""
    with Program([sys.executable, "-m", "tests.support.fleet", str(count), str(speed)]) as process:
        yield process.wait_for(r"at (.+)\n", within_s=60)[1].split()


async def _run(count: int, speed: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers = [
        MockServer(MockOptions(model=MODEL, seed=n, speed=speed / 2 if n % 10 == 2 else speed)) for n in range(count)
    ]
    for server in servers:
        await server.start()
    print("at", *(server.url for server in servers), flush=True)
    await stop.wait()
    for server in servers:
        await server.close()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1]), float(sys.argv[2])))
