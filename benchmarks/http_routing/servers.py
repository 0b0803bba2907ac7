# SPDX-License-Identifier: Apache-2.0
"""The servers' process: simulated vLLM servers on ports of their own, as `lbproxy mock` runs one, in one event loop.

    python -m benchmarks.http_routing.servers COUNT SEED

Prints their ports on one line, and runs until its standard input closes. Each server has its own seed, so that
their steps vary independently; how late they are stands on each one's /metrics.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from contextlib import AsyncExitStack

import uvloop

from benchmarks.http_routing.cells import MAX_MODEL_LEN, MODEL, PRESET
from lbproxy.sim.mock.http import MockOptions, MockServer


async def run(count: int, seed: int) -> None:
    """Serve until standard input closes."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                MockServer(
                    MockOptions(
                        model=MODEL,
                        preset=PRESET,
                        max_model_len=MAX_MODEL_LEN,
                        seed=1000 * seed + number,
                        # Longer than a run: whether a router keeps its connections is not what is asked here.
                        keep_alive_s=600,
                    )
                )
            )
            for number in range(count)
        ]
        # What is there now stays: full collections of it would be lag that no server has.
        gc.collect()
        gc.freeze()
        print(*(server.port for server in servers), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    # Some routers look first whether a server speaks HTTP/2, which aiohttp would report with a traceback.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2])))
