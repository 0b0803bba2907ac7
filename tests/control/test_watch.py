"""Loops start and end with their endpoints."""

from __future__ import annotations

import asyncio
import random

from lbproxy.control.watch import Watches
from lbproxy.core.balancer import Balancer
from lbproxy.core.types import Endpoint
from tests.support.aio import run, until
from tests.support.pool import make_balancer, spec


def test_loops_run_for_the_members_and_for_nobody_else() -> None:
    running: list[str] = []

    async def loop(name: str) -> None:
        running.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # ending takes a moment: it must be waited for
            running.remove(name)

    def loops_of(endpoint: Endpoint) -> list[tuple[str, object]]:
        return [(kind, lambda kind=kind: loop(f"{kind} {endpoint.name}")) for kind in ("prober", "scraper")]

    async def main() -> None:
        balancer: Balancer = make_balancer()
        async with asyncio.TaskGroup() as group:
            watches = Watches(group, loops_of, random.Random(1))  # type: ignore[arg-type]
            watches.follow(balancer.set_endpoints([spec(1), spec(2)], now=0.0))
            await until(lambda: sorted(running) == ["prober e1", "prober e2", "scraper e1", "scraper e2"])
            watches.follow(balancer.set_endpoints([spec(2), spec(3)], now=0.0))
            await until(lambda: sorted(running) == ["prober e2", "prober e3", "scraper e2", "scraper e3"])
            watches.follow(balancer.set_endpoints([spec(2), spec(3)], now=0.0))
            watches.follow(balancer.set_endpoints([spec(3), spec(1)], now=0.0))
            await until(lambda: sorted(running) == ["prober e1", "prober e3", "scraper e1", "scraper e3"])
            watches.close()
        assert running == []
        assert len(asyncio.all_tasks()) == 1

    run(main())
