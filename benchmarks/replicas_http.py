# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies as processes over a real Redis server: what clients notice of it, and what it costs.

Before simulated servers, as compiled or interpreted as lbproxy is here:

    python -m benchmarks.replicas_http limit        # 3 minutes: a limit of 100 requests a minute over three
    python -m benchmarks.replicas_http failures     # 2 minutes: latencies of requests while Redis fails
    python -m benchmarks.replicas_http traffic      # 1 minute: bytes to and from Redis, and CPU, per request
    python -m benchmarks.replicas_http routing      # 12 minutes: TTFT and hits beside one lbproxy (replicas_routing.py)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from benchmarks import replicas_routing
from lbproxy.processes.process import is_compiled
from lbproxy.sim.figures.report import as_table, percentile
from tests.support.redis_failures import FAILURES
from tests.support.redis_server import RedisServer
from tests.support.replica_pool import NOTICED_S, One, pool

LIMIT, MINUTES = 100, 3
OFFERED_PER_S = 9.0
LATENCY_S, CLIENTS = 8.0, 4
TRAFFIC_S, TRAFFIC_PER_S = 20.0, 300.0
BODY = {"model": "sim", "prompt": "Once", "max_tokens": 3}


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="lbproxy-replicas-"))


async def limit() -> str:
    """Each request comes to one of three lbproxies at random, five times as many as may pass."""
    settings = f"flows: {{header: true, default: {{requests_per_minute: {LIMIT}}}}}\nlog: {{access: false}}\n"
    rng = random.Random(1)
    passed: list[float] = []

    async def ask(client: httpx.AsyncClient, one: One, began: float) -> None:
        at = time.monotonic()
        response = await client.post(f"{one.url}/v1/completions", json=BODY, headers={"x-lbproxy-flow": "a"})
        if response.status_code == 200:
            passed.append(at - began)

    with pool(folder(), 3, settings) as it:
        async with httpx.AsyncClient(timeout=30.0) as client, asyncio.TaskGroup() as tasks:
            began = time.monotonic()
            while time.monotonic() - began < 60.0 * MINUTES:
                tasks.create_task(ask(client, rng.choice(it.members), began))
                await asyncio.sleep(rng.expovariate(OFFERED_PER_S))
    minutes = [sum(60.0 * n <= at < 60.0 * (n + 1) for at in passed) for n in range(MINUTES)]
    rows = [[str(n + 1), str(LIMIT if n else 2 * LIMIT), str(count)] for n, count in enumerate(minutes)]
    offered = f"{60 * OFFERED_PER_S:.0f} offered"
    about = f"{LIMIT} requests a minute over 3 replicas, {offered}. A minute's worth may come at once."
    return f"{about}\n\n" + as_table(["minute", "allowed", "passed"], rows)


async def _latencies(urls: Sequence[str], seconds: float) -> tuple[list[float], int]:
    """Milliseconds of requests one after the other, `CLIENTS` at each; and how many failed."""
    times: list[float] = []
    failed = 0
    end = time.monotonic() + seconds

    async def ask(url: str, client: httpx.AsyncClient) -> None:
        nonlocal failed
        while time.monotonic() < end:
            at = time.monotonic()
            status = 0
            with suppress(httpx.HTTPError):
                status = (await client.post(f"{url}/v1/completions", json=BODY)).status_code
            failed += status != 200
            times.append(1000.0 * (time.monotonic() - at))

    async with httpx.AsyncClient(timeout=30.0) as client, asyncio.TaskGroup() as tasks:
        for url in urls:
            for _ in range(CLIENTS):
                tasks.create_task(ask(url, client))
    return sorted(times), failed


async def failures() -> str:
    """Each failure after, and before, a time with a Redis that works."""
    rows = []
    with pool(folder(), 2, "log: {access: false}\n") as it:
        urls = [one.url for one in it.members]
        await _latencies(urls, 2.0)
        for name, (fail, mend) in FAILURES.items():
            before, failed_before = await _latencies(urls, LATENCY_S)
            fail(it.redis)
            during, failed = await _latencies(urls, LATENCY_S)
            mend(it.redis)
            await _reconnected(it.members)
            figures = [percentile(times, share) for share in (50, 99) for times in (before, during)]
            rows.append([name, *(f"{one:.1f}" for one in figures), str(failed_before + failed)])
    heads = ["Redis", "p50 before, ms", "p50 while it fails", "p99 before, ms", "p99 while it fails", "failed requests"]
    return f"{2 * CLIENTS} clients of two lbproxies, {LATENCY_S:g} s each.\n\n" + as_table(heads, rows)


async def _reconnected(members: Sequence[One]) -> None:
    for _ in range(round(NOTICED_S / 0.1)):
        if all(one.is_connected() and one.others() for one in members):
            return
        await asyncio.sleep(0.1)


def _bytes(redis: RedisServer) -> tuple[int, int, int]:
    with redis.client() as client:
        info = client.info()
    assert isinstance(info, dict)
    return info["total_net_input_bytes"], info["total_net_output_bytes"], info["used_memory"]


def _cpu_s(one: One) -> float:
    """CPU time of its process, user and system."""
    lines = httpx.get(f"{one.admin}/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith("process_cpu_seconds_total"))


async def traffic() -> str:
    """Requests at one of two lbproxies: what the other one pays to hear of them."""
    rows = []
    with pool(folder(), 2, "log: {access: false}\n") as it:
        busy, _ = it.members
        for name, rate in (("idle", 0.0), ("busy", TRAFFIC_PER_S)):
            await asyncio.sleep(1.0)
            first = _bytes(it.redis)
            cpu = [_cpu_s(one) for one in it.members]
            began = time.monotonic()
            done = await _offer(busy.url, rate, TRAFFIC_S)
            spent = [_cpu_s(one) - before for one, before in zip(it.members, cpu, strict=True)]
            took_s = time.monotonic() - began
            last = _bytes(it.redis)
            sent, read = (last[n] - first[n] for n in (0, 1))
            shown = [f"{done / took_s:.0f}", f"{sent / took_s / 1e3:.1f}", f"{read / took_s / 1e3:.1f}"]
            busy_share = [f"{100 * one / took_s:.1f}" for one in spent]
            rows.append([name, *shown, *busy_share, f"{last[2] / 1e6:.1f}"])
    heads = [
        "",
        "requests/s",
        "KB/s to Redis",
        "KB/s from it",
        "CPU of the one that serves, %",
        "of the other, %",
        "Redis, MB",
    ]
    return f"{TRAFFIC_S:g} s each, {'compiled' if is_compiled() else 'as Python'}.\n\n" + as_table(heads, rows)


async def _offer(url: str, rate: float, seconds: float) -> int:
    """Requests at a steady rate for so long; how many succeeded."""
    done = 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal done
        response = await client.post(f"{url}/v1/completions", json=BODY)
        done += response.status_code == 200

    async with httpx.AsyncClient(timeout=30.0) as client, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        sent = 0
        while (passed_s := time.monotonic() - began) < seconds:
            for _ in range(int(rate * passed_s) - sent):
                tasks.create_task(ask(client))
                sent += 1
            await asyncio.sleep(0.005)
    return done


PARTS = {"limit": limit, "failures": failures, "traffic": traffic}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in PARTS:
        parts.add_parser(name)
    replicas_routing.add_options(parts.add_parser("routing"))
    args = parser.parse_args()
    if args.part == "routing":
        return replicas_routing.main(args)
    print(asyncio.run(PARTS[args.part]()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
