# SPDX-License-Identifier: Apache-2.0
"""What the core costs: a decision, hashing a prompt, remembering it, scrapes, changes, planning the queue; and memory.

    .venv/bin/python -m benchmarks.decision [--policy adaptive] [--write]

Prints tables of CPU microseconds (the least of many rounds on this machine) and the memory that an endpoint and a
block take; --write puts them into DECISIONS.md. Every endpoint has a full cache of `BLOCKS` blocks and eight requests
in flight; half of each prompt is a system prompt that a quarter of the endpoints have, and the second half is new.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

from benchmarks.growth import Series, growth_rows, statement
from lbproxy import __version__
from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.caches.prefix_index import EndpointCache, PrefixIndex
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.engines.dialects import ENGINES
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.readings import PageReader
from lbproxy.core.knowledge.load_model import LoadModel
from lbproxy.core.knowledge.pool_model import PoolModel
from lbproxy.core.policies.policy import Context
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.queue.waiting_queue import WORK_S
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.prompt_keys import hash_prompt
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.processes.process import is_compiled

ENDPOINTS = (10, 100, 1000)
SIZES = {"1 KB": 1 << 10, "8 KB": 8 << 10, "32 KB": 32 << 10, "128 KB": 128 << 10, "1 MB": 1 << 20}
BLOCKS = 1200
"""Of 256 tokens: the cache of a 32B model on two H100."""
INDEXED = (1_000, 10_000, 100_000, 1_000_000)
LIMITS_MIB = (8, 16, 24, 30, 48)
PAGE = Path(__file__).parents[1] / "tests/fixtures/metrics/vllm-0.32.0-load-lora-t0.prom"
CACHED = (120, 1_200, 12_000, 120_000)
WAITING = (1, 10, 100, 1_000, 10_000)
ADAPTERS = 200
ABOUT = """\
Microseconds of CPU: the price of all candidates, and all of the Balancer's part in a request.
"""
ABOUT_UPDATES = """\
All blocks are new, and the index is full. Making up random keys stands for the hashing.
"""
ABOUT_SCRAPES = """\
From the page's bytes to the endpoint's state, for every endpoint once.
"""
ABOUT_CHANGES = f"""\
Every endpoint lists {ADAPTERS} adapters. One is drained, looked for, and used again with one more.
"""
ABOUT_PLANS = """\
A plan orders the queue and prices the first of it, if any endpoint has room. Nothing known: all were looked up half a
second ago.
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
        make_policy(RoutingSettings.model_validate({"policy": policy}), rng), BalancingSettings(), rng=rng
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
    return InferenceRequest("id", None, True, size, size, tuple(keys), 200)


def decide(balancer: Balancer, request: InferenceRequest) -> None:
    """The whole of a request, as far as the Balancer sees it."""
    ticket = balancer.submit(request, now=1e6)
    balancer.first_byte(ticket, now=1e6)
    balancer.close(ticket, Outcome.COMPLETED, now=1e6)


def cell(balancer: Balancer, size: int, rng: random.Random) -> tuple[float, float]:
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
    price = partial(balancer._choice.policy.price, request, candidates, Context(1e6))
    rounds = 40 if len(candidates) < 1000 else 10
    return micros(price, rounds), micros(partial(decide, balancer, request), rounds)


def decisions(policy: str) -> tuple[str, list[Series]]:
    """By endpoints and size of the prompt."""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for count in ENDPOINTS:
        rng = random.Random(1)
        balancer = fleet(policy, count, rng)
        fill(balancer, count, balancer.block_bytes or 1024, rng)
        found |= {(count, name): cell(balancer, size, rng) for name, size in SIZES.items()}
    rows = [[f"{count:,}", *(pair(found[count, name]) for name in SIZES)] for count in ENDPOINTS]
    series = []
    for part, what in enumerate(("price of all candidates", "submit, first byte and end")):
        by_count = [(count, found[count, "32 KB"][part]) for count in ENDPOINTS]
        by_size = [(size, found[100, name][part]) for name, size in SIZES.items()]
        series.append(Series(f"{what}, 32 KB", "endpoints", by_count))
        series.append(Series(f"{what}, 100 endpoints", "bytes of prompt", by_size))
    return table([["endpoints", *SIZES], *rows]), series


def target(policy: str) -> dict[str, float]:
    """Microseconds of one decision over 100 endpoints with a prompt of 32 KB: hashing and the Balancer's part."""
    rng = random.Random(1)
    balancer = fleet(policy, 100, rng)
    fill(balancer, 100, balancer.block_bytes or 1024, rng)
    price, whole = cell(balancer, 32 << 10, rng)
    hashed = micros(partial(hash_prompt, rng.randbytes(32 << 10), model="m"), 40)
    return {"us": hashed + whole, "hashing_us": hashed, "price_us": price, "balancer_us": whole}


def hashing() -> tuple[str, list[Series]]:
    times = [
        (size, micros(partial(hash_prompt, random.Random(2).randbytes(size), model="m"), 40)) for size in SIZES.values()
    ]
    text = table([["", *SIZES], ["hashing", *(f"{value:.1f}" for _, value in times)]])
    return text, [Series("hashing", "bytes of prompt", times)]


def index_updates() -> tuple[str, list[Series]]:
    """What it takes to remember a new prompt and to forget an old one for it, in a full index."""
    rng, found = random.Random(6), {}
    for blocks in INDEXED:
        index = PrefixIndex(max_entries=blocks)
        cache = index.join()
        for _ in range(blocks // 100 + 1):
            keys = tuple(rng.getrandbits(64) for _ in range(100))
            cache.unpin(cache.pin(keys)[1])
        assert index.entries == blocks
        for name, size in SIZES.items():
            if size >> 10 <= blocks:
                found[blocks, name] = micros(partial(_remember, cache, size >> 10, rng), 20)
    rows = [
        [f"{blocks:,}", *(f"{found[blocks, name]:.1f}" if (blocks, name) in found else "" for name in SIZES)]
        for blocks in INDEXED
    ]
    most = INDEXED[-1]
    by_size = [(size, found[most, name]) for name, size in SIZES.items()]
    by_blocks = [(blocks, found[blocks, "32 KB"]) for blocks in INDEXED]
    return table([["blocks in the index", *SIZES], *rows]), [
        Series(f"a new prompt into {most:,} blocks", "bytes of prompt", by_size),
        Series("a new prompt of 32 KB into the index", "blocks in the index", by_blocks),
    ]


def _remember(cache: EndpointCache, blocks: int, rng: random.Random) -> None:
    keys = tuple(rng.getrandbits(64) for _ in range(blocks))
    cache.unpin(cache.pin(keys)[1])


def scraping(policy: str) -> tuple[str, list[Series]]:
    """One scrape of each endpoint: from the page's bytes to the endpoint's state."""
    page = PAGE.read_bytes()
    times = []
    for count in ENDPOINTS:
        balancer = fleet(policy, count, random.Random(7))
        states = balancer._endpoints.candidates(None, now=0.0)
        readers = [(state.endpoint.uid, PageReader(ENGINES["vllm"], keep_s=2.0)) for state in states]
        times.append((count, micros(partial(_sweep, balancer, readers, page), 5, calls=1)))
    head = ["", *(f"{count:,} endpoints" for count in ENDPOINTS)]
    text = table([head, [f"a page of {len(page) / 1000:.0f} KB from each", *(f"{value:.0f}" for _, value in times)]])
    return text, [Series("scrapes of all endpoints", "endpoints", times, is_one_turn=False)]


def _sweep(balancer: Balancer, readers: list[tuple[EndpointUid, PageReader]], page: bytes) -> None:
    for uid, reader in readers:
        metrics = reader.read(page, scraped_at=1.0, wall_time=1.0).metrics
        assert metrics is not None
        balancer.report_scrape(uid, metrics)


def changes(policy: str) -> tuple[str, list[Series]]:
    """One endpoint drains, or lists other adapters, beside others that list the same."""
    cards = [ModelCard("base", b"{}"), *(ModelCard(f"a{n}", b"{}", "base") for n in range(ADAPTERS + 1))]
    heads = ("a drain", "candidates after it", "undrained", "one adapter more")
    rows, times = [["endpoints", *heads]], []
    for count in ENDPOINTS:
        balancer = fleet(policy, count, random.Random(8))
        for state in balancer._endpoints.members():
            balancer.report_models(state.endpoint.uid, cards[:-1])
        one = next(iter(balancer._endpoints.members())).endpoint.uid
        calls: tuple[Callable[[], object], ...] = (
            partial(balancer.drain, one),
            partial(balancer._endpoints.candidates, "base", now=0.0),
            partial(balancer.drain, one, draining=False),
            partial(balancer.report_models, one, cards),
        )
        least = [inf] * len(calls)
        for _ in range(100):
            for place, call in enumerate(calls):
                least[place] = min(least[place], micros(call, 1, calls=1))
            balancer.report_models(one, cards[:-1])
        rows.append([f"{count:,}", *(f"{value:.1f}" for value in least)])
        times.append((count, least))
    return table(rows), [
        Series(head, "endpoints", [(count, least[place]) for count, least in times]) for place, head in enumerate(heads)
    ]


def caches(policy: str) -> tuple[str, list[Series]]:
    """The same decision beside caches of other sizes."""
    rows, times = [["cached blocks on each of 8 endpoints", "in all", "32 KB"]], []
    for blocks in CACHED:
        rng = random.Random(4)
        balancer = fleet(policy, 8, rng, blocks)
        fill(balancer, 8, balancer.block_bytes or 1024, rng, blocks)
        states = balancer._endpoints.candidates(None, now=0.0)
        held = sum(state.load.kv.cache.size for state in states) if balancer._pool is not None else 0
        took = cell(balancer, 32 << 10, rng)
        rows.append([f"{blocks:,}", f"{held:,}", pair(took)])
        times.append((blocks, took[1]))
    return table(rows), [Series("submit, first byte and end, 32 KB, 8 endpoints", "cached blocks on each", times)]


def queues(policy: str) -> tuple[str, list[Series]]:
    """What each event costs while so many requests wait."""
    heads = ("one comes and leaves", "queue, no room", "queue, places", "the same, nothing known")
    rows, series = [["waiting", "endpoints", *heads]], []
    for count in ENDPOINTS:
        queue = Queue(policy, count)
        found = {waiting: queue.measure(waiting) for waiting in WAITING}
        rows += [[f"{waiting:,}", f"{count:,}", *(f"{one:.1f}" for one in found[waiting])] for waiting in WAITING]
        for place, what in enumerate(heads):
            times = [(waiting, found[waiting][place]) for waiting in WAITING]
            series.append(Series(f"{what}, {count:,} endpoints", "requests that wait", times))
    for place, what in enumerate(heads):
        times = [(int(row[1].replace(",", "")), float(row[2 + place])) for row in rows[1:] if row[0] == "1,000"]
        series.append(Series(f"{what}, 1,000 waiting", "endpoints", times))
    return table(rows), series


class Queue:
    """A fleet that is full, and a queue before it."""

    def __init__(self, policy: str, count: int) -> None:
        self.rng = random.Random(5)
        self.balancer = fleet(policy, count, self.rng)
        self.balancer._queue.reconfigure(UNBOUNDED, now=0.0)
        self.block_bytes = self.balancer.block_bytes or 1024
        self.pending: list[Ticket] = []
        self.now = 1.0
        while not self.balancer._queue:
            self._submit()

    def _submit(self) -> Ticket:
        keys = [self.rng.getrandbits(64) for _ in range(32)]
        ticket = self.balancer.submit(prompt_of(keys, self.block_bytes), now=self.now)
        if ticket.placed_on is not None:
            self.pending.append(ticket)
        return ticket

    def _plan(self) -> float:
        begin = time.process_time_ns()
        placed = self.balancer.poll(now=self.now)
        took = (time.process_time_ns() - begin) / 1000
        self.pending.extend(ticket for ticket in placed if ticket.placed_on is not None)
        return took

    def _come_and_go(self) -> None:
        self.balancer.close(self._submit(), Outcome.CLIENT_CLOSED, now=self.now)

    def measure(self, waiting: int) -> list[float]:
        """An arrival, and looking at the queue: no room, places, places with nothing known."""
        times: dict[str, list[float]] = {"no room": [], "places": [], "anew": []}
        for kind, step_s in (("no room", 0.0), ("places", 1e-4), ("anew", 2 * WORK_S)) * 6:
            while len(self.balancer._queue) < waiting:
                self._submit()
            self.now += step_s
            if step_s and self.pending:
                # One endpoint gets through with all it had.
                chosen = self.pending[0].placed_on
                done = [ticket for ticket in self.pending if ticket.placed_on is chosen]
                self.pending[:] = [ticket for ticket in self.pending if ticket.placed_on is not chosen]
                for ticket in done:
                    self.balancer.first_byte(ticket, now=self.now)
            self.balancer._dispatcher.wake_all()
            times[kind].append(self._plan())
        arrival = micros(self._come_and_go, 40)
        return [arrival, *(min(times[kind]) for kind in ("no room", "places", "anew"))]


def memory() -> str:
    """What an endpoint and a block take, and whether the setting holds."""
    gc.collect()
    tracemalloc.start()
    pool = PoolModel(1024)
    before = tracemalloc.get_traced_memory()[0]
    loads = [LoadModel(pool) for _ in range(200)]
    each = (tracemalloc.get_traced_memory()[0] - before) / len(loads)
    tracemalloc.stop()
    del loads
    rows = [["routing.prefix_memory, MiB", "blocks that came", "remembered", "MiB taken", "bytes a block"]]
    taken = [_fill(mib << 20) for mib in LIMITS_MIB]
    for mib, (came, held, took) in zip(LIMITS_MIB, taken, strict=True):
        rows.append([str(mib), f"{came:,}", f"{held:,}", f"{took / 2**20:.1f}", f"{took / held:.0f}"])
    kept = all(took <= mib << 20 for mib, (_, _, took) in zip(LIMITS_MIB, taken, strict=True))
    default = RoutingSettings().prefix_memory >> 20
    verdict = f"is {'never' if kept else '**sometimes**'} exceeded"
    return (
        f"{each:.0f} bytes an endpoint. What is remembered of prompts is bounded by a setting ({default} MiB), which "
        f"{verdict}:\n\n{table(rows)}"
    )


def _fill(limit_bytes: int) -> tuple[int, int, int]:
    """Blocks that came, blocks that are remembered, and their bytes: with four times what fits."""
    entries = make_policy(RoutingSettings(prefix_memory=limit_bytes)).index_entries
    rng, index = random.Random(3), PrefixIndex(max_entries=entries)
    cache = index.join()
    gc.collect()
    tracemalloc.start()
    for _ in range(4 * entries // 100):
        keys = tuple(rng.getrandbits(64) for _ in range(100))
        cache.unpin(cache.pin(keys)[1])
    del keys
    took = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return 4 * entries // 100 * 100, index.entries, took


def pair(values: tuple[float, float]) -> str:
    """Both figures of a cell."""
    return f"{values[0]:.1f}, {values[1]:.1f}"


def table(rows: list[list[str]]) -> str:
    """In Markdown."""
    rule = ["---:"] * len(rows[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]) + "\n"


def page(policy: str, command: str) -> str:
    """All of it."""
    how = ", compiled" if is_compiled() else ""
    about = f"lbproxy {__version__}{how}, policy {policy}, Python {platform.python_version()}, {processor()}"
    series: list[Series] = []
    parts = [f"\n## Memory\n\n{memory()}"]
    for title, text, measured in (
        ("By endpoints and size of the prompt", "", partial(decisions, policy)),
        ("Hashing a prompt, to be added once a request", "", hashing),
        ("Remembering a prompt", ABOUT_UPDATES, index_updates),
        ("By what is remembered", "", partial(caches, policy)),
        ("Scrapes", ABOUT_SCRAPES, partial(scraping, policy)),
        ("Changes of one endpoint", ABOUT_CHANGES, partial(changes, policy)),
        ("By how many wait", ABOUT_PLANS, partial(queues, policy)),
    ):
        made, found = measured()
        series += found
        parts.insert(-1, f"\n## {title}\n\n{text}{text and chr(10)}{made}")
    verdict = f"\n## How it grows\n\n{statement(series)}\n{table(growth_rows(series))}"
    return "".join([f"# What a decision costs\n\n`{command}`, {about}.\n{ABOUT}", verdict, *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--write", action="store_true", help="into benchmarks/DECISIONS.md as well")
    parser.add_argument("--json", action="store_true", help="nothing but the one decision that has a target")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(target(args.policy)))
        return
    text = page(args.policy, "python -m benchmarks.decision" + (" --write" if args.write else ""))
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
