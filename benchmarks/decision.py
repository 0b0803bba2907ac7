"""What one routing decision costs: hashing a prompt, matching and pricing it, and all of the Balancer's part in it.

    .venv/bin/python -m benchmarks.decision [--policy adaptive]

Prints tables of CPU microseconds (the median of many rounds on this machine) and the memory that an endpoint and a
block take. Every endpoint has a full cache of `BLOCKS` blocks and eight requests in flight; half of each prompt is a
system prompt that a quarter of the endpoints have, and the second half is new.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from lbproxy.config import AdmissionSettings, HealthSettings, RetrySettings, RoutingSettings, ScrapeSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.estimate import PoolModel
from lbproxy.core.policy import make_policy
from lbproxy.core.prefix import PrefixIndex, hash_prompt
from lbproxy.core.types import EndpointSpec, InferenceRequest, LoadMetrics, Outcome

ENDPOINTS = (8, 32, 100, 1000)
SIZES = {"1 KB": 1 << 10, "8 KB": 8 << 10, "32 KB": 32 << 10, "128 KB": 128 << 10, "1 MB": 1 << 20}
BLOCKS = 1200
"""Of 256 tokens: the cache of a 32B model on two H100."""


def micros(call: Callable[[], object], rounds: int) -> float:
    """The median CPU time of one call, over rounds of a few calls each."""
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        for _ in range(5):
            call()
        times.append((time.process_time_ns() - begin) / 5000)
    return statistics.median(times)


def fleet(policy: str, count: int, rng: random.Random) -> Balancer:
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
        scrape = LoadMetrics(scraped_at=0.0, waiting=0.0, running=8.0, block_size_tokens=16, kv_blocks=19200)
        balancer.report_scrape(endpoint.uid, scrape)
    return balancer


def fill(balancer: Balancer, count: int, block_bytes: int, rng: random.Random) -> None:
    """Full caches, and eight streams on each endpoint."""
    now = 0.0
    for _ in range(count * 12):
        now += 1.0
        keys = [rng.getrandbits(64) for _ in range(BLOCKS // 10)]
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


def decisions(policy: str) -> None:
    print(f"\n| endpoints | {' | '.join(SIZES)} |")
    print(f"| --- |{' --- |' * len(SIZES)}")
    for count in ENDPOINTS:
        rng = random.Random(1)
        balancer = fleet(policy, count, rng)
        fill(balancer, count, balancer.block_bytes or 1024, rng)
        print(f"| {count} | {' | '.join(cell(balancer, size, rng) for size in SIZES.values())} |")


def hashing() -> None:
    print("\n| prompt | hash |\n| --- | --- |")
    for name, size in SIZES.items():
        prompt = random.Random(2).randbytes(size)
        print(f"| {name} | {micros(partial(hash_prompt, prompt, model='m'), 40):.1f} |")


def memory() -> None:
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
    print(f"\nMemory: {each:.0f} bytes an endpoint, {block:.0f} bytes a cached block on one endpoint.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="adaptive")
    policy = parser.parse_args().policy
    print(f"Policy {policy}; CPU microseconds: the price of all candidates, and submit + first byte + close.")
    decisions(policy)
    hashing()
    memory()


if __name__ == "__main__":
    main()
