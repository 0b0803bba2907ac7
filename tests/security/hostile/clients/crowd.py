# SPDX-License-Identifier: Apache-2.0
"""Many hostile clients, in a process of their own on a core of their own.

    python -m tests.security.hostile.clients.crowd PLAN      PLAN: `Plan` as JSON

It writes a JSON line of `Counts` each second, and ends with its stdin. What a connection does depends on the seed, its
place in the crowd, and how many came before it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import uvloop

from tests.security.hostile.clients import admin, answers, asking, bodies, drawn, frames, heads
from tests.security.hostile.clients.wire import Attacker, Counts, Kind, Prey

MODULES = (heads, bodies, answers, frames, admin, drawn, asking)
KINDS: dict[str, Kind] = {one.__name__: one for module in MODULES for one in module.KINDS}
NICE = 10
"""Behind friends and lbproxy."""
PAUSE_S = 0.01
"""Between two lives: a kind that is refused at once shall not be all that the core does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a crowd does."""

    prey: Prey
    kinds: Sequence[str]
    """Each life is one of them, by chance."""
    models: Sequence[str]
    """And asks one of these."""
    connections: int
    seed: int
    core: int | None


async def _slot(plan: Plan, number: int, counts: Counts) -> None:
    """One place in the crowd: life after life."""
    life = 0
    while True:
        rng = random.Random(f"{plan.seed}/{number}/{life}")
        name = rng.choice(list(plan.kinds))
        try:
            prey = replace(plan.prey, model=rng.choice(list(plan.models)))
            await KINDS[name](Attacker(prey, rng, counts))
        except* (OSError, EOFError):
            pass
        except* Exception as errors:  # noqa: BLE001
            counts.faults[f"{name}: {errors.exceptions[0]!r}"] += 1
            if sum(counts.faults.values()) < 5:
                traceback.print_exception(errors)
        life += 1
        await asyncio.sleep(PAUSE_S)


async def _tell(counts: Counts) -> None:
    while True:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(counts.plain()), flush=True)
        await asyncio.sleep(1.0)


async def run(plan: Plan) -> None:
    """Until the end of stdin. Connections that are open then are closed as their process ends."""
    counts = Counts()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    tasks = [asyncio.create_task(_slot(plan, number, counts)) for number in range(plan.connections)]
    teller = asyncio.create_task(_tell(counts))
    await ended
    for one in (*tasks, teller):
        one.cancel()
    await asyncio.gather(*tasks, teller, return_exceptions=True)
    print(json.dumps(counts.plain()), flush=True)


def settle(core: int | None) -> None:
    """On that core, behind everybody else there."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    os.nice(NICE)


def main(argument: str) -> None:
    known = json.loads(argument)
    plan = Plan(**{**known, "prey": Prey(**known["prey"])})
    settle(plan.core)
    uvloop.run(run(plan))


if __name__ == "__main__":
    main(sys.argv[1])
