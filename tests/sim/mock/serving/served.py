# SPDX-License-Identifier: Apache-2.0
"""A simulated server for one test."""

import asyncio
from collections.abc import Awaitable, Callable

from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.support.aio import until


def served(test: Callable[[MockServer], Awaitable[None]], **options: object) -> None:
    """The test against a server of its own, fifty times as fast as its hardware unless told otherwise."""

    async def main() -> None:
        async with asyncio.timeout(60), MockServer(MockOptions(**{"speed": 50.0, **options})) as server:  # type: ignore[arg-type]
            await test(server)

    asyncio.run(main())


async def idle(server: MockServer) -> None:
    """Wait until nothing is at the engine."""
    gauges = server.driver.engine.gauges
    await until(lambda: gauges().running + gauges().waiting == 0)
