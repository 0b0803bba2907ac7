# SPDX-License-Identifier: Apache-2.0
"""Everything at random, for long: T40. The same seed is the same faults; LBPROXY_CHAOS_SEED and _SECONDS choose."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.chaos.load import how_many, needless, silent, told
from tests.chaos.rig import QUICK, Rig, Server
from tests.chaos.verdict import pick

SEED = int(os.environ.get("LBPROXY_CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("LBPROXY_CHAOS_SECONDS", pick(60, 60, 1800)))
FAULTS = (
    "status code=503",
    "status code=429 retry-after=1",
    "status code=502 share=0.5",
    "status code=500 share=0.3",
    "break how=rst at=chunk events=3 share=0.3",
    "break how=fin at=line events=7 share=0.3",
    "break framing=close at=line events=2 share=0.2",
    "garbage share=0.3",
    "freeze on=metrics",
    "garbage on=metrics",
    "status code=500 on=metrics",
    "slow-down factor=5",
    "slow-stream every=0.2",
    "slow-head every=0.01",
    "refuse for=1",
)


def killed(server: Server) -> None:
    server.kill()
    time.sleep(1.0)
    server.launch()
    server.ready()


def stopped(server: Server) -> None:
    server.stop()
    time.sleep(3.0)
    server.go_on()


EVENTS: tuple[Callable[[Server], None], ...] = (killed, stopped)


@dataclass
class Memory:
    """What the proxy took, over time."""

    at: list[float]
    mib: list[float]

    def slope(self, after: float) -> float:
        """MiB a minute, by least squares, from `after` on."""
        points = [(t / 60, m) for t, m in zip(self.at, self.mib, strict=True) if t >= after]
        mean_t = sum(t for t, _ in points) / len(points)
        mean_m = sum(m for _, m in points) / len(points)
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        return sum((t - mean_t) * (m - mean_m) for t, m in points) / spread if spread else 0.0


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.chaos("T40", "a soak: one server at a time fails in some way, at random")
def test_t40_soak(rig: Rig) -> None:
    case = rig.case
    rng = random.Random(SEED)
    memory = Memory([], [])
    # A small memory of requests, so that it is full before the slope counts.
    with rig.proxy(f"{QUICK}\nexplain: {{requests: 100}}\n") as proxy:
        with (
            rig.load(proxy, workers=8, tokens=20, streams=0.7) as load,
            rig.load(proxy, workers=4, rate=10.0, tokens=3, streams=0.3, keep_alive=False) as short,
        ):
            load.until(good=20)
            began = time.monotonic()
            faults = 0
            while (now := time.monotonic()) < began + SECONDS:
                memory.at.append(now)
                memory.mib.append(proxy.rss_mib())
                server = rng.choice(rig.servers)
                if rng.random() < 0.15:
                    event = rng.choice(EVENTS)
                    print(f"{now:.1f} {server.name} {event.__name__}")
                    event(server)
                else:
                    fault = rng.choice(FAULTS)
                    print(f"{now:.1f} {server.name} {fault}")
                    server.fault(fault)
                    time.sleep(rng.uniform(0.5, 1.5))
                    server.restore()
                faults += 1
                time.sleep(0.3)
        results = [*load.results(), *short.results()]
        case.figure("seed", SEED)
        case.figure("faults", faults)
        case.figure("requests", len(results))
        case.figure("broken in the middle, told", how_many(results, "told", "cut", "reset"))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        case.expect("error events inside a line", how_many(results, "glued"), at_most=0)
        slope = memory.slope(memory.at[0] + min(60.0, SECONDS / 2))
        case.expect("memory, MiB a minute", round(slope, 2), at_most=pick(8, 8, 1))
        print(told(results))
