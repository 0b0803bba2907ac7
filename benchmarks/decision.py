"""What one routing decision costs: hashing a prompt, matching and pricing it, and all of the Balancer's part in it.

    .venv/bin/python -m benchmarks.decision [--policy adaptive] [--write]

Prints tables of CPU microseconds (the least of many rounds on this machine) and the memory that an endpoint and a
block take; --write puts them into DECISIONS.md. Every endpoint has a full cache of `BLOCKS` blocks and eight requests
in flight; half of each prompt is a system prompt that a quarter of the endpoints have, and the second half is new.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lbproxy import __version__
from lbproxy.config import AdmissionSettings, HealthSettings, RetrySettings, RoutingSettings, ScrapeSettings
from lbproxy.core.admission import WORK_S
from lbproxy.core.balancer import Balancer
from lbproxy.core.estimate import PoolModel
from lbproxy.core.policy import make_policy
from lbproxy.core.prefix import PrefixIndex, hash_prompt
from lbproxy.core.types import EndpointSpec, InferenceRequest, LoadMetrics, Outcome, Ticket

ENDPOINTS = (8, 32, 100, 1000)
SIZES = {"1 KB": 1 << 10, "8 KB": 8 << 10, "32 KB": 32 << 10, "128 KB": 128 << 10, "1 MB": 1 << 20}
BLOCKS = 1200
"""Of 256 tokens: the cache of a 32B model on two H100."""
CACHED = (120, 1_200, 12_000, 120_000)
WAITING = (1, 10, 100, 1_000, 10_000)
ABOUT = """\
Microseconds of CPU on one core, the least of many rounds. First figure: the price of all candidates; second: all of
the Balancer's part in a request (submit with placement, first byte, end).
"""
ABOUT_PLANS = """\
A plan goes over the queue after each arrival, first byte and end, at most once per turn of the event loop. It ends at
once if no endpoint has room; else it orders the queue and prices the first of it. Nothing known: half a second has
passed since the least work of the requests was looked up, for all of them at the same time.
"""
UNBOUNDED = AdmissionSettings(queue_requests=1_000_000, queue_bytes=1024 * 1024**3)


def micros(call: Callable[[], object], rounds: int, calls: int = 5) -> float:
    """The CPU time of one call: the least of many rounds of a few calls, which is what it costs undisturbed."""
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        for _ in range(calls):
            call()
        times.append((time.process_time_ns() - begin) / (1000 * calls))
    return min(times)


def fleet(policy: str, count: int, rng: random.Random, blocks: int = BLOCKS) -> Balancer:
    balancer = Balancer(
        make_policy(RoutingSettings.model_validate({"policy": policy}), rng),
        admission=AdmissionSettings(),
        health=HealthSettings(),
        scrape=ScrapeSettings(),
        retry=RetrySettings(),
        rng=rng,
    )
    specs = [EndpointSpec(name=f"e{n}", base_url=f"http://10.0.{n >> 8}.{n & 255}:8000") for n in range(count)]
    for endpoint in balancer.set_endpoints(specs, now=0.0).added:
        balancer.report_health(endpoint.uid, True, "", now=0.0)
        scrape = LoadMetrics(scraped_at=0.0, waiting=0.0, running=8.0, block_size_tokens=256, kv_blocks=blocks)
        balancer.report_scrape(endpoint.uid, scrape)
    return balancer


def fill(balancer: Balancer, count: int, block_bytes: int, rng: random.Random, blocks: int = BLOCKS) -> None:
    """Full caches, and eight streams on each endpoint."""
    now = 0.0
    for _ in range(count * 12):
        now += 1.0
        keys = [rng.getrandbits(64) for _ in range(blocks // 10)]
        ticket = balancer.submit(prompt_of(keys, block_bytes), now=now)
        balancer.first_byte(ticket, now=now + 0.5)
        balancer.close(ticket, Outcome.COMPLETED, now=now + 0.9)
    for _ in range(count * 8):
        now += 1.0
        ticket = balancer.submit(prompt_of([rng.getrandbits(64) for _ in range(8)], block_bytes), now=now)
        balancer.first_byte(ticket, now=now + 0.5)


def prompt_of(keys: list[int], block_bytes: int) -> InferenceRequest:
    size = len(keys) * block_bytes
    return InferenceRequest("id", None, True, size, size, keys, 200)


def decide(balancer: Balancer, request: InferenceRequest) -> None:
    """The whole of a request, as far as the Balancer sees it."""
    ticket = balancer.submit(request, now=1e6)
    balancer.first_byte(ticket, now=1e6)
    balancer.close(ticket, Outcome.COMPLETED, now=1e6)


def cell(balancer: Balancer, size: int, rng: random.Random) -> str:
    """What a prompt of `size` bytes costs: pricing, and everything."""
    candidates = balancer._endpoints.candidates(None, now=0.0)
    block_bytes = balancer.block_bytes or 1024
    half = size // block_bytes // 2
    shared = [rng.getrandbits(64) for _ in range(half)]
    if balancer.block_bytes is not None:
        for state in candidates[::4]:
            state.load.end(state.load.place(prompt_of(shared, block_bytes), 1e6), None, 1e6)
    new = [rng.getrandbits(64) for _ in range(size // block_bytes - half)]
    request = prompt_of([*shared, *new], block_bytes)
    price = partial(balancer._choice.policy.price, request, candidates, plan=None, now=1e6)
    rounds = 40 if len(candidates) < 1000 else 10
    return f"{micros(price, rounds):.1f}, {micros(partial(decide, balancer, request), rounds):.1f}"


def decisions(policy: str) -> str:
    rows = [["endpoints", *SIZES]]
    for count in ENDPOINTS:
        rng = random.Random(1)
        balancer = fleet(policy, count, rng)
        fill(balancer, count, balancer.block_bytes or 1024, rng)
        rows.append([f"{count:,}", *(cell(balancer, size, rng) for size in SIZES.values())])
    return table(rows)


def hashing() -> str:
    times = [
        f"{micros(partial(hash_prompt, random.Random(2).randbytes(size), model='m'), 40):.1f}"
        for size in SIZES.values()
    ]
    return table([["", *SIZES], ["hashing", *times]])


def caches(policy: str) -> str:
    """The same decision beside caches of other sizes."""
    rows = [["cached blocks on each of 8 endpoints", "in all", "32 KB"]]
    for blocks in CACHED:
        rng = random.Random(4)
        balancer = fleet(policy, 8, rng, blocks)
        fill(balancer, 8, balancer.block_bytes or 1024, rng, blocks)
        states = balancer._endpoints.candidates(None, now=0.0)
        held = sum(state.load.cache.size for state in states) if balancer._pool is not None else 0
        rows.append([f"{blocks:,}", f"{held:,}", cell(balancer, 32 << 10, rng)])
    return table(rows)


def queues(policy: str) -> str:
    """What each event costs while so many requests wait."""
    rows = [
        ["waiting", "endpoints", "one comes and leaves", "plan, no room", "plan, places", "the same, nothing known"]
    ]
    for count in (8, 100):
        rows += [[f"{waiting:,}", str(count), *queued(policy, count, waiting)] for waiting in WAITING]
    return table(rows)


def queued(policy: str, count: int, waiting: int) -> list[str]:
    rng = random.Random(5)
    balancer = fleet(policy, count, rng)
    balancer._queue.reconfigure(UNBOUNDED, now=0.0)
    block_bytes = balancer.block_bytes or 1024
    pending: list[Ticket] = []
    now = 1.0

    def submit() -> Ticket:
        ticket = balancer.submit(prompt_of([rng.getrandbits(64) for _ in range(32)], block_bytes), now=now)
        if ticket.placed_on is not None:
            pending.append(ticket)
        return ticket

    def plan() -> float:
        begin = time.process_time_ns()
        pending.extend(ticket for ticket in balancer.poll(now=now) if ticket.placed_on is not None)
        return (time.process_time_ns() - begin) / 1000

    def come_and_go() -> None:
        balancer.close(submit(), Outcome.CLIENT_CLOSED, now=now)

    while not balancer._queue:
        submit()
    times: dict[str, list[float]] = {"no room": [], "places": [], "anew": []}
    for kind, step_s in (("no room", 0.0), ("places", 1e-4), ("anew", 2 * WORK_S)) * 6:
        while len(balancer._queue) < waiting:
            submit()
        now += step_s
        if step_s:
            # One endpoint gets through with all it had.
            chosen = pending[0].placed_on
            done = [ticket for ticket in pending if ticket.placed_on is chosen]
            pending[:] = [ticket for ticket in pending if ticket.placed_on is not chosen]
            for ticket in done:
                balancer.first_byte(ticket, now=now)
        balancer._plan_at = now
        times[kind].append(plan())
    arrival = micros(come_and_go, 40)
    return [f"{arrival:.1f}", *(f"{min(times[kind]):.1f}" for kind in ("no room", "places", "anew"))]


def memory() -> str:
    gc.collect()
    tracemalloc.start()
    pool = PoolModel(1024)
    before = tracemalloc.get_traced_memory()[0]
    loads = [pool.join() for _ in range(200)]
    each = (tracemalloc.get_traced_memory()[0] - before) / len(loads)
    index, rng = PrefixIndex(), random.Random(3)
    cache = index.join()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(200):
        keys = [rng.getrandbits(64) for _ in range(100)]
        cache.unpin(keys, cache.pin(keys)[1])
    block = (tracemalloc.get_traced_memory()[0] - before) / 20_000
    tracemalloc.stop()
    return f"{each:.0f} bytes an endpoint, {block:.0f} bytes a cached block on one endpoint.\n"


def table(rows: list[list[str]]) -> str:
    """In Markdown."""
    rule = ["---:"] * len(rows[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--write", action="store_true", help="into benchmarks/DECISIONS.md as well")
    args = parser.parse_args()
    command = "python -m benchmarks.decision" + (" --write" if args.write else "")
    about = f"lbproxy {__version__}, policy {args.policy}, Python {platform.python_version()}, {processor()}"
    parts = [f"# What a decision costs\n\n`{command}`, {about}.\n{ABOUT}"]
    parts += ["\n## By endpoints and size of the prompt\n\n", decisions(args.policy)]
    parts += ["\nTo be added, once a request:\n\n", hashing()]
    parts += ["\n## By what is remembered\n\n", caches(args.policy)]
    parts += [f"\n## By how many wait\n\n{ABOUT_PLANS}\n", queues(args.policy)]
    parts += ["\n## Memory\n\n", memory()]
    text = "".join(parts)
    print(text)
    if args.write:
        (Path(__file__).parent / "DECISIONS.md").write_text(text, "utf-8")


def processor() -> str:
    """The machine's, as far as it says."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
