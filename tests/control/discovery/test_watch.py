# SPDX-License-Identifier: Apache-2.0
"""Loops start and end with their endpoints."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

from lbproxy.control.discovery.membership import APART_S, AT_ONCE, Watches
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import Endpoint
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


def test_loops_begin_anew_for_who_is_looked_after_otherwise_and_for_all_when_told() -> None:
    """A reload: the endpoint is the same, and what asks it is another."""
    began: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        began.append(f"{endpoint.name} by {endpoint.health}")
        await asyncio.Event().wait()

    async def main() -> None:
        balancer: Balancer = make_balancer()
        async with asyncio.TaskGroup() as group:
            watches = Watches(group, lambda one: [("loop", partial(loop, one))], random.Random(1))
            watches.follow(balancer.set_endpoints([spec(1), spec(2)], now=0.0))
            await until(lambda: len(began) == 2)
            watches.follow(balancer.set_endpoints([spec(1), replace(spec(2), health="/other")], now=0.0))
            await until(lambda: len(began) == 3)
            assert began[2] == "e2 by /other"
            watches.restart()
            await until(lambda: len(began) == 5)
            assert sorted(began[3:]) == ["e1 by /health", "e2 by /other"]
            assert len(asyncio.all_tasks()) == 3, "the old ones have ended"
            watches.close()

    run(main())


def test_who_leaves_or_changes_before_its_turn_is_watched_as_it_is_then() -> None:
    begun: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        begun.append(f"{endpoint.name} by {endpoint.health}")
        await asyncio.Event().wait()

    async def main() -> None:
        balancer = make_balancer()
        async with asyncio.TaskGroup() as group:
            watches = Watches(group, lambda one: [("loop", partial(loop, one))], random.Random(1))
            many = [spec(n) for n in range(1, 71)]
            watches.follow(balancer.set_endpoints(many, now=0.0))
            watches.follow(balancer.set_endpoints([*many[:68], replace(many[68], health="/other")], now=0.0))
            watches.restart()
            await until(lambda: len(begun) >= 69)
            await asyncio.sleep(2 * APART_S)
            assert begun.count("e69 by /other") == 1
            assert "e70 by /health" not in begun
            assert len(set(begun)) == 69
            assert len(begun) <= 69 + AT_ONCE, "nobody twice but who had begun before the restart"
            watches.close()

    run(main())


def test_many_that_join_together_begin_in_groups() -> None:
    """So that a thousand new addresses do not hold up requests."""
    begun: list[str] = []

    async def loop(name: str) -> None:
        begun.append(name)
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            watches = Watches(group, lambda one: [("prober", lambda: loop(one.name))], random.Random(1))
            watches.follow(make_balancer().set_endpoints([spec(n) for n in range(1, 101)], now=0.0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not begun, "to join that many took long enough for one turn"
            groups = [0]
            while groups[-1] < 100:
                await asyncio.sleep(0)
                if len(begun) != groups[-1]:
                    groups.append(len(begun))
            assert max(after - before for before, after in pairwise(groups)) <= AT_ONCE
            assert sorted(begun) == sorted(f"e{n}" for n in range(1, 101))
            watches.close()

    run(main())
