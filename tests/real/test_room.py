# SPDX-License-Identifier: Apache-2.0
"""A burst over engines with few slots: what they cannot run waits in lbproxy, and every request is completed."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.real.load import Watch, burst, failures, told
from tests.real.servers import SLOTS, Small, wait_until

BURST, TOKENS, LESSON = 48, 60, 32
QUEUE_IS_WANTED = 4
"""So many may always wait in an engine, so that it never runs dry; or those that it starts within START_S."""
START_S = 0.5


def test_a_burst_waits_in_lbproxy(small: Small, found: Callable[[str], None]) -> None:
    """Once lbproxy has seen requests wait in an engine it knows its slots, and holds what comes after."""
    lesson = burst(small.url, LESSON, TOKENS, stream=True)
    found(f"room: a first burst, from which the slots are learned: {told(lesson)}")
    assert failures(lesson) == []
    wait_until(lambda: sum(server.running() for server in small.vllm) == 0, "they are idle")
    began = time.monotonic()
    with Watch(small.vllm) as watch:
        results = burst(small.url, BURST, TOKENS, stream=True)
    took_s = time.monotonic() - began
    assert failures(results) == []
    found(f"room: {BURST} streams at once, {2 * SLOTS} slots, in {took_s:.1f} s: {told(results)}")
    for server in small.vllm:
        readings = watch.readings[server.name]
        waiting = sorted(reading.waiting for reading in readings)
        p95, most = waiting[int(0.95 * (len(waiting) - 1))], waiting[-1]
        rate = sum(one.endpoint == server.name for one in results) / took_s
        running = max(reading.running for reading in readings)
        bound = max(QUEUE_IS_WANTED, rate * START_S)
        found(
            f"room: {server.name}, {len(readings)} readings: at most {running:.0f} running; waiting p95 {p95:.0f}, at "
            f"most {most:.0f}; bound {bound:.1f} ({rate:.1f} started a second)"
        )
        assert running == SLOTS, "it was never full, so this proves nothing"
        assert p95 <= bound
