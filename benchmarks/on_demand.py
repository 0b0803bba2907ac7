# SPDX-License-Identifier: Apache-2.0
"""Boxes that load models on demand (Ollama): what routing by what is loaded is worth. Writes benchmarks/ON_DEMAND.md.

    python -m benchmarks.on_demand [--seconds 900] [--seeds 3] [--cells N] [--processes 2]
    python -m benchmarks.on_demand --example

The second prints what is at the top of the page, in half a minute: four boxes, eight models, one seed, 300 s.

Simulated boxes (`sim.engine.on_demand`), in virtual time, under rules that differ in what they know: `least` asks the
box with the fewest requests, as Olla and other balancers do that only know which boxes list a model; `divided` asks the
one box that the settings name for a model, as llama-swap is set up; `warm` asks a box that has the model loaded, the
one with the fewest requests first, and knows that at once and exactly. `best` is the best of 11
assignments of models to boxes for lbproxy that were tried with the very requests that come: found by search, so it can
be had, and is no bound. It begins with all models at all boxes, and with each at one box, by how often it is asked for
or by that times its load; then, from the best so far on, a box at random is to have, or not to have, a model at random
(`TRIES`). It is told how many models fit, which lbproxy has to see.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.routing import AdmissionSettings, RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import LoadSpec
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.policies.policy import Context, Policy, Prices
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.sim.engine.fixed import FixedTimes
from lbproxy.sim.engine.on_demand import Loading, OnDemandEngine
from lbproxy.sim.engine.presets import PRESETS
from lbproxy.sim.fleet.cluster import Fleet
from lbproxy.sim.fleet.fleet import FleetOptions, SimulatedServer
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import ANSWER_IDS, Job, OpenLoop

PAGE = Path(__file__).parent / "ON_DEMAND.md"
LOADS_S = (5.0, 8.0, 12.0, 20.0, 30.0)
"""Loads take one of these, by model."""
TIMES = FixedTimes(ttft_s=0.3, ttft_spread=0.3, token_s=0.012)
SLOTS = 4
"""Requests that a loaded model computes at a time."""
TRIES = 8
"""Changes to an assignment that `best` tries."""
TIMEOUT_S = 600.0
RULES = ("lbproxy", "warm", "divided", "least")


@dataclass(frozen=True)
class Cell:
    """Boxes, models and what is asked for."""

    boxes: int
    models: int
    most: int
    """Models in memory of a box at a time."""
    rate: float
    """Requests per second."""
    shift_s: float = 0.0
    """Other models are the popular ones every so often; 0 = never."""

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.models)]

    @property
    def title(self) -> str:
        shifts = f", others popular every {self.shift_s:g} s" if self.shift_s else ""
        return f"{self.boxes} boxes with {self.most}, {self.models} models, {self.rate:g}/s{shifts}"


CELLS = (
    Cell(2, 4, 1, 0.5),
    Cell(2, 6, 2, 1.0),
    Cell(4, 8, 2, 2.0, 300.0),
    Cell(4, 12, 1, 1.0),
    Cell(4, 16, 2, 1.5),
    Cell(4, 16, 2, 1.5, 200.0),
    Cell(8, 16, 2, 4.0, 300.0),
)
EXAMPLE = Cell(4, 8, 2, 1.0)


class Figures(NamedTuple):
    """What became of a run."""

    mean_s: float
    """To the first token."""
    p99_s: float
    rarest: float
    """p99 of the model that is asked for least, in its loads."""
    loads: int
    failed: int


class Warm(Policy):
    """The fewest requests among boxes that have the model; else among all."""

    def __init__(self) -> None:
        self.engines: dict[str, OnDemandEngine] = {}

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        costs = [float(state.requests) for state in candidates]
        for number, state in enumerate(candidates):
            if request.model not in self.engines[state.endpoint.name].resident():
                costs[number] += 1e6
        return Prices(costs)


class Divided(Policy):
    """Each model at its box."""

    def price(self, request: InferenceRequest, candidates: Sequence[EndpointState], context: Context) -> Prices:
        home = f"s{int((request.model or 'm0')[1:]) % len(candidates)}"
        return Prices([0.0 if state.endpoint.name == home else inf for state in candidates])


def asked(cell: Cell, seconds: float, seed: int) -> list[tuple[float, Job]]:
    """Poisson arrivals; models by Zipf's law."""
    rng, at = random.Random(f"on demand:{seed}"), 0.0
    jobs: list[tuple[float, Job]] = []
    shares = [1.0 / (rank + 1) for rank in range(cell.models)]
    while (at := at + rng.expovariate(cell.rate)) < seconds:
        rank = rng.choices(range(cell.models), shares)[0]
        turn = int(at // cell.shift_s) if cell.shift_s else 0
        number = len(jobs)
        tokens = max(10, int(rng.lognormvariate(4.6, 0.5)))
        job = Job(
            f"j{number}",
            (Piece(number, 500),),
            Piece(ANSWER_IDS + number, tokens),
            cell.names[(rank + 3 * turn) % cell.models],
        )
        jobs.append((at, job))
    return jobs


def loads_of(cell: Cell) -> dict[str, float]:
    rng = random.Random("loads")
    return {name: rng.choice(LOADS_S) for name in cell.names}


def run(cell: Cell, rule: str, seconds: float, seed: int, told: tuple[LoadSpec, ...] = ()) -> Figures:
    """One run. `told`: what lbproxy's settings say of each box."""
    load_s = loads_of(cell)
    preset = replace(PRESETS["qwen-32b-2xh100"], max_sequences=SLOTS)
    box = SimulatedServer(preset, times=TIMES, loading=Loading(load_s=load_s, most=cell.most), metrics=False)
    jobs = asked(cell, seconds, seed)
    own: Policy | None = Warm() if rule == "warm" else Divided() if rule == "divided" else None
    routing = RoutingSettings(policy="adaptive" if rule == "lbproxy" else "least-request")
    settings = BalancingSettings(AdmissionSettings(queue_timeout=TIMEOUT_S))
    fleet = Fleet(
        FleetOptions(
            servers=(box,) * cell.boxes,
            scrape_interval_s=None,
            follows_loads=rule == "lbproxy",
            loading=told,
        ),
        OpenLoop([jobs]),
        lambda rng: Balancer(own or make_policy(routing, rng), settings, rng=rng),
        seed=seed,
    )
    engines = {f"s{number}": one for number, one in enumerate(fleet.engines()) if isinstance(one, OnDemandEngine)}
    if isinstance(own, Warm):
        own.engines = engines
    served = fleet.run(until_s=seconds + TIMEOUT_S)
    waits = [(one.job.model or "", (one.first_at or seconds + TIMEOUT_S) - one.submitted_at) for one in served]
    rarest = min(Counter(model for model, _ in waits).items(), key=lambda one: one[1])[0]
    return Figures(
        statistics.fmean(wait for _, wait in waits),
        _p99([wait for _, wait in waits]),
        _p99([wait for model, wait in waits if model == rarest]) / load_s[rarest],
        sum(engine.loads for engine in engines.values()),
        sum(one.first_at is None for one in served),
    )


def best(cell: Cell, seconds: float, seed: int, tries: int = TRIES) -> Figures:
    """What could be had, by the mean, if it was known what will be asked for. The module says how it is found."""
    counts, load_s = Counter(job.model or "" for _, job in asked(cell, seconds, seed)), loads_of(cell)

    def figures(boxes: Sequence[frozenset[str]]) -> Figures:
        never = [frozenset(cell.names) - box for box in boxes]
        return run(cell, "lbproxy", seconds, seed, tuple(LoadSpec(most=cell.most, never=one) for one in never))

    everywhere = [frozenset(cell.names)] * cell.boxes
    by_load = {name: count * load_s[name] for name, count in counts.items()}
    found, boxes = min((figures(one), one) for one in (everywhere, divided(cell, counts), divided(cell, by_load)))
    rng = random.Random(f"best:{seed}")
    for _ in range(tries):
        box, model = rng.randrange(cell.boxes), rng.choice(cell.names)
        changed = [one ^ {model} if number == box else one for number, one in enumerate(boxes)]
        if all(any(name in one for one in changed) for name in counts):
            found, boxes = min((found, boxes), (figures(changed), changed))
    return found


def divided(cell: Cell, weights: Mapping[str, float]) -> list[frozenset[str]]:
    """Each model at one box, the heaviest first, at that which is lightest so far."""
    load = [0.0] * cell.boxes
    boxes = [frozenset[str]()] * cell.boxes
    for model in sorted(weights, key=lambda one: -weights[one]):
        lightest = load.index(min(load))
        load[lightest] += weights[model]
        boxes[lightest] |= {model}
    return boxes


def example() -> list[str]:
    """What it is worth, in short."""
    lines = [f"{EXAMPLE.title}, for 300 s:", f"{'rule':8} {'mean, s':>8} {'p99, s':>8} {'loads':>6}"]
    for rule in RULES:
        one = run(EXAMPLE, rule, 300.0, 1)
        lines.append(f"{rule:8} {one.mean_s:8.1f} {one.p99_s:8.1f} {one.loads:6}")
    return lines


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _median(runs: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*runs, strict=True)))


def figures_of(cell: Cell, seconds: float, seed: int) -> dict[str, Figures]:
    """By rule."""
    return {rule: run(cell, rule, seconds, seed) for rule in RULES} | {"best": best(cell, seconds, seed)}


def rows(cell: Cell, runs: Sequence[Mapping[str, Figures]]) -> list[str]:
    """Of the page."""
    found = {rule: _median([one[rule] for one in runs]) for rule in runs[0]}
    lines = []
    for rule, one in found.items():
        told = f"{one.mean_s:.1f} | {one.mean_s / found['best'].mean_s:.2f} | {one.p99_s:.0f} | {one.rarest:.1f}"
        lines.append(f"| {rule} | {told} | {one.loads:.0f} | {one.failed:.0f} |")
    return [f"\n## {cell.title}\n", HEAD, *lines]


HEAD = (
    "| rule | mean, s | to best | p99, s | p99 of the rarest, in its loads | loads | without a first token |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
TEXT = """# Models that are loaded on demand

Simulated boxes that load models on demand, as Ollama does ([docs/sleep.md](../docs/sleep.md)): times to the first
token. `python -m benchmarks.on_demand` writes this page, and its docstring says what the rules are. Poisson arrivals,
models by Zipf's law, loads of 5 to 30 s, four requests at a time for each model, responses of 110 tokens in the mean; a
request waits for 600 s. Medians of {seeds} seeds, {seconds:g} virtual seconds each. Prompts, memory and what models
cost one another are not simulated.

`python -m benchmarks.on_demand --example`, one seed:

```text
{example}
```

`best` can be had, it is no bound: of 11 assignments of models to boxes that were tried with the very requests that
come, the one with the least mean. It is told how many models fit; lbproxy has to see that.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--example", action="store_true")
    args = parser.parse_args(arguments)
    shown = "\n".join(example())
    print(shown)
    if args.example:
        return 0
    lines = [TEXT.format(seeds=args.seeds, seconds=args.seconds, example=shown)]
    with ProcessPoolExecutor(args.processes) as pool:
        cells = {
            cell: [pool.submit(figures_of, cell, args.seconds, seed) for seed in range(1, args.seeds + 1)]
            for cell in CELLS[: args.cells]
        }
        for cell, runs in cells.items():
            lines += rows(cell, [one.result() for one in runs])
            print("\n".join(lines[-len(RULES) - 3 :]), flush=True)
    PAGE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
