# SPDX-License-Identifier: Apache-2.0
"""One engine, two drivers: the HTTP server's and the fleet's give the same times, token by token.

The HTTP server's driver is an asyncio timer. Here its loop has virtual time: it never waits, but moves its clock to the
next timer. So no token is late, and the times can be compared exactly. Requests take the server's own path from the
text on: parsed, planned, hashed; only the socket is left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest

from lbproxy.sim.engine.engine import Engine
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.fleet import FleetOptions, SimulatedServer
from lbproxy.sim.mock.apis.call import plan
from lbproxy.sim.mock.apis.chat import parse_completion
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.mock.serving.driver import Flight
from lbproxy.sim.workloads.prompts import Piece, prompt_text
from lbproxy.sim.workloads.workload import Arrival, Job, OpenLoop
from tests.sim.fleet.test_cluster import run
from tests.support.aio import virtually

PRESET = dataclasses.replace(PRESETS["llama-8b-h100"], kv_tokens=8_000)
"""A cache that is too small, so that requests wait, and some are preempted."""


def arrivals() -> list[Arrival]:
    """Forty requests in 0.4 s, in four groups that share 900 tokens."""
    found = []
    for n in range(40):
        prompt = (Piece(n % 4, 900), Piece(100 + n, 30 + 37 * n % 400))
        found.append((0.01 * n, Job(str(n), prompt, Piece(1000 + n, 5 + 29 * n % 90))))
    return found


async def over_http(jobs: list[Arrival], times: dict[str, tuple[float, float, int]]) -> None:
    """Drive a server as its handlers do; notes (first token, last token, cached tokens) of each job."""
    server = MockServer(MockOptions(preset="llama-8b-h100"))
    server.driver.engine = Engine(PRESET)  # without jitter
    loop = asyncio.get_running_loop()

    async def client(at: float, job: Job) -> None:
        await asyncio.sleep(at - loop.time())
        fields: Mapping[str, object] = {
            "prompt": prompt_text(job.prompt).decode(),
            "max_tokens": job.answer.tokens,
            "ignore_eos": True,
            "stream": True,
        }
        call, _ = parse_completion(dict(fields))
        choices = plan(call, max_model_len=131_072, seed=0)
        flight = Flight(choices, per_call=1, every_token=True)
        server.driver.submit(flight)
        await flight.news()
        first_at = loop.time()
        got = 0
        while flight.left or flight.tokens:
            await flight.news()
            got += len(flight.tokens)
            flight.tokens.clear()
        assert got == job.answer.tokens
        times[job.id] = (first_at, loop.time(), flight.cached_tokens)

    async with server, asyncio.TaskGroup() as clients:
        for at, job in jobs:
            clients.create_task(client(at, job))


def test_both_drivers_give_the_same_times() -> None:
    jobs = arrivals()
    over: dict[str, tuple[float, float, int]] = {}
    virtually(over_http(jobs, over))
    options = FleetOptions(servers=(SimulatedServer(PRESET),), network_s=0.0, jitter=False)
    served = run("random", OpenLoop([jobs]), options)
    assert len(over) == len(served) == 40
    for one in served:
        first_at, ended_at, cached = over[one.job.id]
        assert (one.first_at, one.ended_at) == pytest.approx((first_at, ended_at), abs=1e-6)
        assert one.cached_tokens == cached
    # It was not trivial: prefixes were hit, and requests had to wait.
    assert sum(one.cached_tokens > 0 for one in served) > 20
    assert max((one.first_at or 0) - one.submitted_at for one in served) > 0.3
