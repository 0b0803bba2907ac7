# SPDX-License-Identifier: Apache-2.0
"""Recommended endpoints against the least number that is enough, and a fleet that follows them through a day.

Virtual time, simulated servers (docs/simulator.md). For each workload and load the least number of servers is searched
at which 95 % of the requests have their first token within the target and none is refused; then the same load is sent
to too few, enough and too many servers, and what each of these fleets recommends at its end is compared. After that a
fleet follows the recommendation through a day and through steps, beside one that follows the queue and one that
knows.

    python -m benchmarks.autoscaling                # writes AUTOSCALING.md; some 15 minutes on two cores
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from lbproxy import __version__
from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.observing import AutoscalingSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.scaling.advice import ModelScaling
from lbproxy.sim.engine.presets import PRESETS, Preset
from lbproxy.sim.figures.report import as_table
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import BASE_MODEL, FleetOptions, QueueSample, Served, SimulatedServer
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Arrival, Job, OpenLoop, fresh_ids, lognormal

PAGE = Path(__file__).parent / "AUTOSCALING.md"
TARGET_S: Final = 2.0
LATE: Final = 0.05
RUN_S: Final = 150.0
WARM_UP_S: Final = 50.0
WINDOW_S: Final = 45.0
"""Of the recommendation, in runs at one load: so that its start is over at their end."""
START_S: Final = 60.0
"""From the decision to have one more server until it serves."""
STOP_AFTER_S: Final = 300.0
"""Rules that look at the queue remove a server after so long without one."""
MOST: Final = 12
"""Servers in a fleet that follows something."""


LLAMA: Final = PRESETS["llama-8b-h100"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent to which servers. Lengths are medians of lognormals."""

    name: str
    prompt: int
    output: int
    spread: float
    rates: tuple[float, ...]
    """Requests a second."""
    server: Preset = LLAMA
    shared: int = 0
    """Tokens of the prompt that all requests of one of eight groups have in common."""


WORKLOADS: Final = (
    Workload("slots", 300, 300, 0.6, (8.0, 25.0), replace(LLAMA, max_sequences=16)),
    Workload("prefill", 12_000, 30, 0.4, (3.0, 12.0)),
    Workload("cache", 8000, 400, 0.4, (3.0, 6.0), replace(LLAMA, kv_tokens=100_000)),
    Workload("decode", 100, 1000, 0.4, (15.0,)),
    Workload("mix", 3000, 300, 0.8, (10.0, 20.0)),
    Workload("shared prefixes", 6000, 500, 0.4, (8.0,), shared=5000),
)


class Shape(NamedTuple):
    """A load that changes: `rate_at` is the share of the workload's highest rate."""

    name: str
    duration_s: float
    rate_at: Callable[[float], float]


def _wave(at: float) -> float:
    """A day in an hour: from a fifth at night to all of it."""
    return 0.6 - 0.4 * math.cos(2.0 * math.pi * at / 3600.0)


def _steps(at: float) -> float:
    """Ten minutes each."""
    return (0.3, 1.0, 0.5, 0.8, 0.2)[int(at // 600.0) % 5]


SHAPES: Final = (Shape("a day in an hour", 3600.0, _wave), Shape("steps", 3000.0, _steps))


def arrivals(
    workload: Workload, seed: int, peak: float, duration_s: float, share: Callable[[float], float]
) -> OpenLoop:
    """Poisson arrivals at `peak` times the share at that moment."""
    rng = random.Random(f"{seed}:{workload.name}")
    ids = fresh_ids()
    found: list[Arrival] = []
    at = rng.expovariate(peak)
    while at < duration_s:
        if rng.random() < share(at):
            private = Piece(ids(), lognormal(rng, workload.prompt - workload.shared, workload.spread, at_most=60_000))
            shared = (Piece(rng.randrange(8), workload.shared),) if workload.shared else ()
            answer = Piece(ids(), lognormal(rng, workload.output, workload.spread, at_most=4000))
            found.append((at, Job(str(len(found)), (*shared, private), answer)))
        at += rng.expovariate(peak)
    return OpenLoop([found])


class Watched:
    """A fleet whose balancer can be asked."""

    def __init__(self, workload: Workload, jobs: OpenLoop, servers: int, *, seed: int, window_s: float) -> None:
        made: list[Balancer] = []

        def make(rng: random.Random) -> Balancer:
            settings = BalancingSettings(autoscaling=AutoscalingSettings(ttft=TARGET_S, window=window_s))
            made.append(Balancer(make_policy(RoutingSettings(), rng), settings, rng=rng))
            return made[-1]

        server = SimulatedServer(workload.server)
        self.fleet = Fleet(FleetOptions(servers=(server,) * servers), jobs, make, seed=seed)
        self.balancer = made[0]

    def advice(self) -> ModelScaling:
        """What is recommended now."""
        return next(one for one in self.balancer.snapshot(now=self.fleet.now).models if one.model == BASE_MODEL)


class Result(NamedTuple):
    """Of a run at one load."""

    late: float
    """Share of the requests without a first token in time."""
    refused: float
    ttft_p95_s: float
    recommended: int

    @property
    def is_enough(self) -> bool:
        """Whether so many servers meet the target."""
        return self.late <= LATE and not self.refused


def at_load(workload: Workload, rate: float, servers: int, seed: int = 1) -> Result:
    """One run at a constant load."""
    jobs = arrivals(workload, seed, rate, RUN_S, lambda _: 1.0)
    watched = Watched(workload, jobs, servers, seed=seed, window_s=WINDOW_S)
    served = watched.fleet.run(until_s=RUN_S)
    late, refused, p95 = judged([one for one in served if WARM_UP_S <= one.submitted_at < RUN_S - TARGET_S])
    return Result(late, refused, p95, watched.advice().recommended or 0)


def judged(served: Sequence[Served]) -> tuple[float, float, float]:
    """Share that is late, share that is refused, and the 95th percentile of the time to the first token."""
    times = sorted(one.first_at - one.submitted_at if one.first_at is not None else math.inf for one in served)
    late = sum(time > TARGET_S for time in times) / len(served)
    refused = sum(one.outcome not in {None, Outcome.COMPLETED} for one in served) / len(served)
    return late, refused, times[int(0.95 * len(times))]


class Compared(NamedTuple):
    """One load: the least number that is enough, and what fleets of several sizes recommend."""

    workload: str
    rate: float
    least: int
    least_p95_s: float
    by_size: Mapping[int, int]
    """Size -> recommended."""

    @property
    def worst(self) -> int:
        """The largest deviation."""
        return max((found - self.least for found in self.by_size.values()), key=abs)


def compared(workload: Workload, rate: float) -> Compared:
    """Search the least number, and ask fleets of about half, of as many, and of half again as many."""
    results: dict[int, Result] = {}

    def run(servers: int) -> Result:
        if servers not in results:
            results[servers] = at_load(workload, rate, servers)
        return results[servers]

    size = 1
    while not run(size).is_enough:
        size = max(size + 1, min(2 * size, run(size).recommended))
    while size > 1 and run(size - 1).is_enough:
        size -= 1
    sizes = dict.fromkeys([max(1, size // 2), max(1, size - 1), size, size + 1, math.ceil(1.5 * size)])
    found = {servers: run(servers).recommended for servers in sizes}
    return Compared(workload.name, rate, size, results[size].ttft_p95_s, found)


# A fleet that follows


class Followed(NamedTuple):
    """A run in which the number of servers changed."""

    rule: str
    late: float
    refused: float
    hours: float
    """Of servers, starting ones included."""
    changes: int
    """How often the wanted number changed."""
    least: int
    most: int


Rule = Callable[["Follower", float], int]
"""The wanted number of servers, of the follower at a time."""


class Follower:
    """Starts and drains servers as a rule says, every 5 s."""

    def __init__(self, watched: Watched, rule: Rule, first: int) -> None:
        self.watched = watched
        self.wanted = first
        self.quiet_since = 0.0
        """Since when no request waits."""
        self._rule = rule
        self._uids = [state.endpoint.uid for state in watched.balancer.endpoints.members()]
        self._ready_at = [0.0] * first + [math.inf] * (MOST - first)
        self.counts: list[int] = []
        for uid in self._uids[first:]:
            watched.balancer.drain(uid)
        watched.fleet.watch(5.0, self._look)

    def _look(self, sample: QueueSample) -> None:
        now, balancer = sample.at, self.watched.balancer
        if sample.waiting:
            self.quiet_since = now
        self.wanted = max(1, min(MOST, self._rule(self, now)))
        for number, uid in enumerate(self._uids):
            if number >= self.wanted and self._ready_at[number] < math.inf:
                self._ready_at[number] = math.inf
                balancer.drain(uid)
            elif number < self.wanted:
                if self._ready_at[number] == math.inf:
                    self._ready_at[number] = now + START_S
                if self._ready_at[number] <= now:
                    balancer.drain(uid, draining=False)
        self.counts.append(self.wanted)

    @property
    def serving(self) -> int:
        """Servers that serve or start."""
        return sum(at < math.inf for at in self._ready_at)


def by_advice(follower: Follower, _: float) -> int:
    """What lbproxy recommends."""
    return follower.watched.advice().recommended or 0


def by_queue(follower: Follower, now: float) -> int:
    """The usual rule: one more while more than five requests wait, one fewer after a time without any."""
    watched = follower.watched
    if watched.advice().waiting > 5:
        return watched.advice().endpoints + 1 if follower.serving == watched.advice().endpoints else follower.wanted
    if now - follower.quiet_since > STOP_AFTER_S:
        follower.quiet_since = now
        return follower.wanted - 1
    return follower.wanted


def by_knowledge(least: Mapping[float, int], peak: float, shape: Shape, _: Follower, now: float) -> int:
    """Who knows the load of the next minute, and how many are enough for it: the least of the next higher load."""
    rate = peak * max(shape.rate_at(now + ahead) for ahead in range(0, int(START_S) + 10, 5))
    return next((count for known, count in sorted(least.items()) if known >= rate), max(least.values()))


def follow(workload: Workload, shape: Shape, name: str, rule: Rule, first: int) -> Followed:
    """One run."""
    peak = workload.rates[-1]
    jobs = arrivals(workload, 1, peak, shape.duration_s, shape.rate_at)
    watched = Watched(workload, jobs, MOST, seed=1, window_s=300.0)
    follower = Follower(watched, rule, first)
    served = watched.fleet.run(until_s=shape.duration_s)
    late, refused, _ = judged([one for one in served if one.submitted_at < shape.duration_s - TARGET_S])
    counts = follower.counts
    changes = sum(one != other for one, other in pairwise(counts))
    return Followed(name, late, refused, sum(counts) * 5.0 / 3600.0, changes, min(counts), max(counts))


FOLLOWING: Final = ("cache",)
"""Workloads for which fleets follow something: a run takes a minute."""


def least_by_rate(workload: Workload) -> dict[float, int]:
    """How many servers are enough, at five loads up to the highest."""
    peak = workload.rates[-1]
    found: dict[float, int] = {}
    size = 1
    for step in range(1, 6):
        rate = peak * step / 5
        while not at_load(workload, rate, size).is_enough:
            size += 1
        found[rate] = size
    return found


def followed(workload: Workload, number: int) -> list[Followed]:
    """All rules, under one of the `SHAPES`."""
    shape = SHAPES[number]
    least = least_by_rate(workload)
    peak = workload.rates[-1]
    knows = partial(by_knowledge, least, peak, shape)
    first = next(count for rate, count in sorted(least.items()) if rate >= peak * shape.rate_at(0.0))
    rules: list[tuple[str, Rule]] = [("recommended", by_advice), ("queue > 5", by_queue), ("knows the load", knows)]
    return [follow(workload, shape, name, rule, first) for name, rule in rules]


# The page


def page(every: Sequence[Compared], runs: Mapping[tuple[str, str], Sequence[Followed]]) -> str:
    """As Markdown."""
    rows = []
    for one in every:
        sizes = ", ".join(f"{size}: {found}" for size, found in one.by_size.items())
        rows.append([one.workload, f"{one.rate:g}", str(one.least), f"{one.least_p95_s:.2f}", sizes, f"{one.worst:+d}"])
    asked = [(found - one.least) for one in every for found in one.by_size.values()]
    within = sum(abs(off) <= 1 for off in asked)
    heads = ["workload", "requests/s", "least", "its TTFT p95 (s)", "fleet: recommended", "worst"]
    what = (
        f"`python -m benchmarks.autoscaling`, lbproxy {__version__}, virtual time. *Least*: servers at which "
        f"95 % of the first tokens come within {TARGET_S:g} s and none is refused. *Fleet: recommended*: what so many "
        f"servers [recommend](../docs/autoscaling.md) after {RUN_S / 60:g} minutes."
    )
    rules_text = (
        f"A server takes {START_S:g} s to start. *Queue > 5* starts one while more than five requests wait and none "
        f"starts, and drains one after {STOP_AFTER_S / 60:g} minutes without any; *knows the load* has what the next "
        "minute needs."
    )
    result = f"**{within} of {len(asked)} fleets recommend the least number, or one more or less.**"
    parts = ["# Recommended endpoints", what, result, as_table(heads, rows), "## Fleets that follow", rules_text]
    for (workload, shape), rules in runs.items():
        lines = [
            [
                one.rule,
                f"{100.0 * (1.0 - one.late):.1f} %",
                f"{100.0 * one.refused:.2f} %",
                f"{one.hours:.1f}",
                str(one.changes),
                f"{one.least} to {one.most}",
            ]
            for one in rules
        ]
        parts += [
            f"### {workload}, {shape}",
            as_table(["rule", "first token in time", "refused", "server hours", "changes", "servers"], lines),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="workloads whose name begins with this; writes no page")
    options = parser.parse_args()
    workloads = [one for one in WORKLOADS if one.name.startswith(options.only)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        cells = [pool.submit(compared, one, rate) for one in workloads for rate in one.rates]
        days = {
            (one.name, shape.name): pool.submit(followed, one, number)
            for one in workloads
            if one.name in FOLLOWING
            for number, shape in enumerate(SHAPES)
        }
        for cell in as_completed(cells):
            print(cell.result(), flush=True)
        for day in days.values():
            print(day.result(), flush=True)
        every = [cell.result() for cell in cells]
        runs = {name: day.result() for name, day in days.items()}
    text = page(every, runs)
    if options.only:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
