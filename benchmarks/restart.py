# SPDX-License-Identifier: Apache-2.0
"""What a restart of lbproxy costs under load, with and without a state file: the b2b workload in virtual time.

Eight simulated servers (Qwen3-32B on two H100 each), the b2b workload of docs/benchmarks.md at one rate, policy
adaptive. The balancer is restarted in the middle: *hot* (SIGUSR2: the old process finishes its requests, the state is
new) or by a *crash* (requests in flight are sent again, the state is 30 s old). Compared is the mean time to the first
token of the requests sent in the minute before with those sent in the first minute after.

    python -m benchmarks.restart                      # 10 requests a second, 5 seeds: 4 minutes on one core
    python -m benchmarks.restart --rate 15            # nearly all that the fleet can do
    python -m benchmarks.restart --changed            # engines become slower and their caches smaller at the restart
    python -m benchmarks.restart --cost               # what an export costs, and how long it holds up the event loop
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

from benchmarks.restarted_fleet import NewEngine, Restart, RestartedFleet, mean_ttft
from lbproxy import __version__
from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.control.saving.keeper import TURN_S
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.saved.reading import encode, read_lines
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, Served, SimulatedServer
from lbproxy.sim.workloads.catalogue import LADDER_RATES, make_workload
from lbproxy.sim.workloads.workload import Workload

QWEN = replace(PRESETS["qwen-32b-2xh100"], max_model_len=131_072)
SERVERS = 8
AT_S = 150.0
UNTIL_S = 270.0
PATIENT = AdmissionSettings(queue_requests=100_000, queue_bytes=2**34, queue_timeout=86_400)
NOTHING = Restart(at_s=AT_S, saved=False)
VARIANTS: Mapping[str, Restart | None] = {
    "no restart": None,
    **{
        f"{kind}, {how}": replace(restart, crash=crash, age_s=age_s)
        for kind, crash, age_s in (("hot", False, 0.0), ("crash", True, 30.0))
        for how, restart in (
            ("no file", NOTHING),
            ("prefixes: false", Restart(at_s=AT_S, prefixes=False)),
            ("prefixes: true", Restart(at_s=AT_S)),
        )
    },
}


def balancer(rng: random.Random) -> Balancer:
    return Balancer(make_policy(RoutingSettings(), rng), BalancingSettings(admission=PATIENT), rng=rng)


def workload(rate: float, seed: int) -> Workload:
    ladder = {"first_rate": rate, "last_rate": rate, "step_s": UNTIL_S, "warm_up_s": 0}
    return make_workload("ladder", ladder, seed=seed)


def run(restart: Restart | None, rate: float, seed: int, *, gauges: bool = True) -> list[Served]:
    options = FleetOptions(servers=(SimulatedServer(QWEN),) * SERVERS, scrape_interval_s=0.2 if gauges else None)
    made: Fleet
    if restart is None:
        made = Fleet(options, workload(rate, seed), balancer, seed=seed)
    else:
        made = RestartedFleet(options, workload(rate, seed), balancer, seed=seed, restart=restart)
    return made.run(until_s=UNTIL_S)


def table(rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def row(name: str, runs: list[list[Served]], before_s: float | None) -> list[str]:
    """Means over the seeds; ratios are of these means. `before_s`: of the minute before, from the run without a
    restart, which is the same until then: what waits at the restart would be in both minutes. None = from this run.
    """
    minutes = [(AT_S - 60.0, AT_S), (AT_S, AT_S + 10.0), (AT_S, AT_S + 60.0), (AT_S + 60.0, AT_S + 120.0)]
    before, *after = (fmean(mean_ttft(one, *span, end_s=UNTIL_S) for one in runs) for span in minutes)
    before = before if before_s is None else before_s
    times = [f"{value:.3f}" for value in (before, *after)]
    return [name, *times, f"{after[1] / before:.2f}x", f"{after[2] / before:.2f}x"]


HEADS = [
    *("restart", "minute before, s", "first 10 s", "first minute", "second minute"),
    *("first minute / before", "second / before"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a restart costs, with and without a state file.")
    parser.add_argument(
        "--rate", type=float, default=10.0, choices=LADDER_RATES, help="requests per second; a step of the b2b ladder"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--changed", action="store_true", help="one engine is another one after the restart")
    parser.add_argument("--cost", action="store_true", help="time export and restoration instead")
    args = parser.parse_args()
    if args.cost:
        print(table(cost_rows()))
        return
    command = " ".join(["python -m benchmarks.restart", *sys.argv[1:]])
    print(f"`{command}`, lbproxy {__version__}, {args.rate:g} requests/s, {args.seeds} seeds\n")
    variants: Mapping[str, Restart | None] = changed() if args.changed else VARIANTS
    rows, before_s = [HEADS], None
    for name, restart in variants.items():
        simulate = partial(run, restart, args.rate, gauges="no metrics" not in name)
        runs = [simulate(seed) for seed in range(1, args.seeds + 1)]
        if restart is None:
            before_s = fmean(mean_ttft(one, AT_S - 60.0, AT_S, end_s=UNTIL_S) for one in runs)
        rows.append(row(name, runs, before_s))
    print(table(rows))


def changed() -> dict[str, Restart]:
    """At the restart one server, or each of them, starts again half as fast and with a quarter of the cache."""
    small = replace(QWEN, kv_tokens=QWEN.kv_tokens // 4)
    variants = {}
    for which, servers in (("one", range(1)), ("all", range(SERVERS))):
        for metrics, reports_start in (("start reported", True), ("start not reported", False), ("no metrics", False)):
            engine = NewEngine(server=0, preset=small, speed=0.5, reports_start=reports_start)
            engines = tuple(replace(engine, server=number) for number in servers)
            for how, restart in (("no file", NOTHING), ("file", Restart(at_s=AT_S))):
                variants[f"{which}, {metrics}, {how}"] = replace(restart, engines=engines)
    return variants


# What it costs


def cost_rows() -> list[list[str]]:
    """Export, reading and restoration of an index of 1,000,000 blocks, in long and in short prompts."""
    gc.disable()  # as in the proxy, where what lives long is frozen
    heads = ["prompts", "operation", "total, ms", "longest turn, ms", "per block, us", "MB"]
    rows = [heads]
    for shape in ((100_000, 10), (7_800, 128), (1_000_000, 1)):
        rows += _cost_of(*shape)
        gc.collect()
    return rows


def _cost_of(prompts: int, blocks: int) -> list[list[str]]:
    old, new = (_with_endpoints() for _ in range(2))
    loads = [state.load for state in old._endpoints.members()]
    keys = random.Random(1)
    for number in range(prompts):
        cache = loads[number % len(loads)].kv.cache
        cache.unpin(cache.pin(tuple(keys.getrandbits(64) for _ in range(blocks)))[1])
    lines: list[bytes] = []
    steps = old.restarts.save(saved_at=1.0, prefixes=True, now=0.0)

    def export() -> bool:
        piece = next(steps, None)
        if piece is not None:
            lines.append(encode(piece))
        return piece is None or piece["kind"] != "end"

    name = f"{prompts:,} of {blocks}"
    size = f"{prompts * blocks:,}"
    rows = [[name, "export", *_timed(export, prompts * blocks), f"{sum(map(len, lines)) / 1e6:.1f}"]]
    began_at = time.perf_counter()
    saved = read_lines(lines)
    total_s = time.perf_counter() - began_at
    rows.append([name, "read (in a thread)", f"{1e3 * total_s:.0f}", "", f"{1e6 * total_s / prompts / blocks:.2f}", ""])
    restoring = new.restarts.restore(saved, age_s=0.0, now=0.0)
    assert restoring is not None
    rows.append([name, "restore", *_timed(restoring.step, prompts * blocks), ""])
    assert restoring.prompts == prompts, size
    return rows


def _timed(step: Callable[[], bool], blocks: int) -> list[str]:
    """Run steps until one returns False, as many in a turn as the proxy does."""
    turns: list[float] = [0.0]
    is_more = True
    while is_more:
        began_at = time.perf_counter()
        is_more = step()
        took_s = time.perf_counter() - began_at
        turns[-1] += took_s
        if turns[-1] > TURN_S:
            turns.append(0.0)
    total_s = sum(turns)
    return [f"{1e3 * total_s:.0f}", f"{1e3 * max(turns):.1f}", f"{1e6 * total_s / blocks:.2f}"]


def _with_endpoints() -> Balancer:
    made = balancer(random.Random(1))
    made.set_endpoints([EndpointSpec(name=f"s{n}", base_url=f"http://s{n}:80") for n in range(SERVERS)], now=0.0)
    return made


if __name__ == "__main__":
    main()
