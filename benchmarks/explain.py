# SPDX-License-Identifier: Apache-2.0
"""What it costs to remember every request with the decision about it.

    .venv/bin/python -m benchmarks.explain

CPU of the Balancer's part in a request and of keeping its record, with decisions explained and not, in turns: the
median of the rounds, and what a remembered request takes of memory. Each request has a prompt of four blocks.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections import deque

from benchmarks.decision import fill, fleet, prompt_of, table
from lbproxy.core.balancer import Balancer
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest

POLICIES = ("adaptive", "least-request")
ENDPOINTS = (3, 16, 100)
ROUNDS = 11
REQUESTS = 4_000
RATE = 10_000.0
"""Requests a second."""
KEPT = 1_000


class Side:
    """One balancer, and the records that are kept."""

    def __init__(self, policy: str, count: int, *, explained: bool) -> None:
        rng = random.Random(1)
        self.balancer: Balancer = fleet(policy, count, rng)
        fill(self.balancer, count, self.balancer.block_bytes or 1024, rng)
        self.balancer.explain(explained)
        self.kept: deque[RequestRecord] = deque(maxlen=KEPT)
        self.now = 1e6
        self.times: list[float] = []

    def serve(self, requests: list[InferenceRequest]) -> None:
        """Some requests, one after the other."""
        begin = time.process_time_ns()
        for n in range(REQUESTS):
            self.now += 1.0 / RATE
            ticket = self.balancer.submit(requests[n % len(requests)], now=self.now)
            self.balancer.first_byte(ticket, now=self.now)
            record = RequestRecord("id", "POST", "/v1/completions", "127.0.0.1", self.now)
            record.decision = ticket.decision
            self.balancer.close(ticket, Outcome.COMPLETED, now=self.now)
            self.kept.append(record)
        self.times.append((time.process_time_ns() - begin) / (1000 * REQUESTS))


def row(policy: str, count: int) -> list[str]:
    off, on = (Side(policy, count, explained=explained) for explained in (False, True))
    rng = random.Random(3)
    size = off.balancer.block_bytes or 1024
    requests = [prompt_of([rng.getrandbits(64) for _ in range(4)], size) for _ in range(50)]
    for _ in range(ROUNDS):
        off.serve(requests)
        on.serve(requests)
    without, with_ = statistics.median(off.times), statistics.median(on.times)
    rounds = zip(off.times, on.times, strict=True)
    more = sorted(after - before for before, after in rounds)
    spread = f"{more[1]:.1f} to {more[-2]:.1f}"
    return [policy, str(count), f"{without:.1f}", f"{with_:.1f}", f"{with_ - without:.1f}", spread, f"{memory(on):.1f}"]


def memory(side: Side) -> float:
    """KB of a remembered request, as far as nothing else has it: what is freed when all are forgotten."""
    side.kept.clear()
    gc.collect()
    tracemalloc.start()
    rng = random.Random(4)
    side.serve([prompt_of([rng.getrandbits(64) for _ in range(4)], side.balancer.block_bytes or 1024)])
    held = tracemalloc.get_traced_memory()[0]
    side.kept.clear()
    gc.collect()
    freed = held - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return freed / KEPT / 1000


def main() -> None:
    head = ["policy", "endpoints", "not explained, us", "explained, us", "more", "of most rounds", "KB a request"]
    print(table([head, *(row(policy, count) for policy in POLICIES for count in ENDPOINTS)]))


if __name__ == "__main__":
    main()
