# SPDX-License-Identifier: Apache-2.0
"""What lbproxy makes of more requests than its servers can answer, in virtual time: `OVERLOAD.md`.

Four servers that are bound by their slots, by the space in their KV caches, or by prefill; 1.2 to 10 times as many
requests as they can answer; streams or whole responses; with the servers' gauges or without; of one flow, two or ten.
Clients send at their rate whatever happens (open loop, Poisson). lbproxy's queue is as it is without settings.

    python -m benchmarks.overload                            # all cells; goes on where it was stopped
    python -m benchmarks.overload --quick                    # some, cut in time; prints the table, writes no page
    python -m benchmarks.overload --cells "slots 2x streams" "space no-gauges 1"    # those with all words of a text
    python -m benchmarks.overload --policies adaptive adaptive/hold=false least-request
    python -m benchmarks.overload --render                   # the page of what there is

Every run is kept in `results/overload.json` as soon as it is done, by what was simulated; `--again` does them anew.
What the servers can answer (their capacity) is measured once for each kind: responses that end in a second when
`least-request` gives the engines all they get, whose own queues never run dry.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path

import orjson

from lbproxy import __version__
from lbproxy.commands.sim import Run, fleet_of, runs_of, workload_of
from lbproxy.config.scenario import Scenario
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import as_table, percentile
from lbproxy.sim.figures.sharing import REFUSED
from lbproxy.sim.fleet.fleet import QueueSample, Served

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "overload.json", HERE / "OVERLOAD.md"

SOCKETS = "\n## Through real sockets\n"
"""The page's last part begins with it: that of `overload_http.py`."""
SECONDS = 240.0
"""For so long requests arrive."""
WARM_UP_S = 60.0
"""What is not counted at the beginning, or a third of a shorter run."""
LINGER_S = 30.0
"""The simulation goes on for so long, for responses that began in time to end."""
SAMPLE_S = 0.25
GOOD_TTFT_S, BEST_TTFT_S = 5.0, 2.0
ENOUGH = 0.9
"""Of capacity: the goodput that is asked for."""
SMALL_QUEUE = 4
"""Requests in an engine's own queue that are not too many for any engine."""


def changed(changes: str) -> dict[str, object]:
    """Settings of the queue, of `hold=false,queue_requests=64`; what is not named is as in the product."""
    pairs = [one.partition("=") for one in changes.split(",") if one]
    return {key: orjson.loads(value) for key, _, value in pairs}


@dataclass(frozen=True)
class Kind:
    """What the servers are short of."""

    parameters: Mapping[str, float]
    """Of the workload `own`, without rate and duration."""
    server: Mapping[str, object] = field(default_factory=dict)
    """Keys of the servers."""
    probe_rate: float = 25.0
    """More requests a second than four servers can answer."""


SERVERS = 4
ANSWERS = {"prompt_tokens": 350, "output_tokens": 700, "spread": 0.5}
KINDS = {
    "slots": Kind(ANSWERS, {"max_sequences": 64}),
    "space": Kind(ANSWERS, {"kv_tokens": 60_000, "max_sequences": 1024}),
    # Of sizes that differ much, a policy that serves the short ones first answers more than the capacity.
    "prefill": Kind({"prompt_tokens": 6000, "output_tokens": 20, "spread": 0.15}),
}
LOADS = (1.2, 2.0, 3.0, 10.0)
FLOWS = (1, 2, 10)


@dataclass(frozen=True, order=True)
class Conditions:
    """What is asked of which servers."""

    kind: str
    load: float
    """Times what the servers can answer."""
    streams: bool
    gauges: bool
    flows: int


class Cell(Conditions):
    """One row of the page."""

    def __str__(self) -> str:
        how = "streams" if self.streams else "whole"
        seen = "gauges" if self.gauges else "no-gauges"
        return f"{self.kind} {self.load:g}x, {how}, {seen}, {self.flows} {'flow' if self.flows == 1 else 'flows'}"

    def scenario(self, variant: str, capacity: float, seconds: float) -> Scenario:
        """As a file of `lbproxy sim` would have it. `variant`: a policy, and what of the queue's settings differs."""
        policy, _, changes = variant.partition("/")
        kind = KINDS[self.kind]
        rate = capacity * self.load / self.flows
        return Scenario.model_validate(
            {
                "fleet": [{"count": SERVERS, "max_model_len": 131_072, **kind.server}],
                "workloads": [
                    {
                        "name": "own",
                        "flow": "clients",
                        "copies": self.flows,
                        "parameters": {**kind.parameters, "rate": rate, "duration_s": seconds},
                    }
                ],
                "policies": [policy],
                "seeds": 1,
                "stream_share": 1.0 if self.streams else 0.0,
                "scrape_interval": ScrapeSettings().interval if self.gauges else None,
                "admission": changed(changes),
            }
        )


CELLS = [Cell(*one) for one in product(KINDS, LOADS, (True, False), (True, False), FLOWS)]
QUICK = [cell for cell in CELLS if cell.load == 2 and cell.flows == 1]
QUICK_SECONDS = 90.0


@dataclass(frozen=True)
class Figures:
    """What came of one run, in the time that counts. Rates a second."""

    throughput: float
    """Responses that ended."""
    good: float
    """Responses whose first token came then, and within 5 s of the request."""
    best: float
    """And within 2 s."""
    refused: float
    """Share of the requests that came then."""
    failed: float
    """Share of these that ended in another bad way."""
    engines: float
    """Requests in an engine's own queue, p95 over servers and time."""
    starts: float
    """Requests that a server begins in half a second, mean."""
    waiting: float
    """Requests in lbproxy's queue, p95."""
    ttft: float
    """Of those that were served, median in seconds."""

    def passes(self, capacity: float) -> bool:
        """Whether it is what is asked for."""
        return self.good >= ENOUGH * capacity and self.engines <= max(SMALL_QUEUE, self.starts)


def run_cell(run: Run, seconds: float) -> Figures:
    """One simulation. Deterministic."""
    samples: list[QueueSample] = []
    fleet = fleet_of(run, workload_of(run))
    fleet.watch(SAMPLE_S, samples.append)
    served = fleet.run(until_s=seconds + LINGER_S)
    return figures(served, samples, min(WARM_UP_S, seconds / 3), seconds)


def figures(served: Sequence[Served], samples: Sequence[QueueSample], begin: float, end: float) -> Figures:
    """Of what happened from `begin` to `end`."""
    came = [one for one in served if begin <= one.submitted_at < end]
    ended = [one for one in served if one.outcome is Outcome.COMPLETED and begin <= one.ended_at < end]
    # What had begun and goes on when the simulation stops has not failed.
    well = {Outcome.COMPLETED, None}
    ttfts = sorted(
        one.first_at - one.submitted_at
        for one in served
        if one.first_at is not None and begin <= one.first_at < end and one.outcome in well
    )
    then = [sample for sample in samples if begin <= sample.at < end]
    queues = sorted(float(gauges.waiting) for sample in then for gauges in sample.gauges)
    servers = len(then[0].gauges) if then else 1
    bad = sum(one.outcome not in well and one.outcome not in REFUSED for one in came)
    return Figures(
        throughput=len(ended) / (end - begin),
        good=sum(ttft <= GOOD_TTFT_S for ttft in ttfts) / (end - begin),
        best=sum(ttft <= BEST_TTFT_S for ttft in ttfts) / (end - begin),
        refused=sum(one.outcome in REFUSED for one in came) / max(1, len(came)),
        failed=bad / max(1, len(came)),
        engines=percentile(queues, 95),
        starts=len(ttfts) / (end - begin) / servers / 2,
        waiting=percentile(sorted(float(sample.waiting) for sample in then), 95),
        ttft=percentile(ttfts, 50),
    )


# Capacity

CAPACITY_S = 300.0
CAPACITY_FROM_S = 100.0
"""By then the first responses, which all began at once, have ended, and those that run are as old as they ever are."""


def capacity_scenario(kind: str, seconds: float = CAPACITY_S) -> Scenario:
    """More than the kind's servers can answer, all of it given to them."""
    found = KINDS[kind]
    return Scenario.model_validate(
        {
            "fleet": [{"count": SERVERS, "max_model_len": 131_072, **found.server}],
            "workload": {
                "name": "own",
                "parameters": {**found.parameters, "rate": found.probe_rate, "duration_s": seconds},
            },
            "policies": ["least-request"],
            "seeds": 1,
            "scrape_interval": None,
        }
    )


def capacity_of(kind: str, seconds: float = CAPACITY_S) -> float:
    """Responses a second of the kind's servers when their own queues never run dry."""
    (run,) = runs_of(capacity_scenario(kind, seconds), source=kind)
    served = fleet_of(run, workload_of(run)).run(until_s=seconds)
    begin = seconds * CAPACITY_FROM_S / CAPACITY_S
    return sum(one.outcome is Outcome.COMPLETED and one.ended_at >= begin for one in served) / (seconds - begin)


# Runs that are kept


class Kept:
    """What was measured, in a file that is written after each run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        known = orjson.loads(file.read_bytes()) if file.exists() else {}
        self._capacities: dict[str, float] = known.get("capacity", {})
        self.runs: dict[str, dict[str, float]] = known.get("runs", {})

    def capacity(self, kind: str) -> float | None:
        return self._capacities.get(_capacity_key(kind))

    def keep_capacity(self, kind: str, capacity: float) -> None:
        self._capacities[_capacity_key(kind)] = capacity
        self.write()

    def figures(self, key: str) -> Figures | None:
        found = self.runs.get(key)
        return None if found is None else Figures(**found)

    def keep(self, key: str, found: Figures) -> None:
        self.runs[key] = asdict(found)
        self.write()

    def write(self) -> None:
        data = {"about": {"lbproxy": __version__}, "capacity": self._capacities, "runs": self.runs}
        self._file.parent.mkdir(exist_ok=True)
        fresh = self._file.with_suffix(".new")
        fresh.write_bytes(orjson.dumps(data))
        fresh.replace(self._file)


def _capacity_key(kind: str) -> str:
    return f"{kind} | {_mark(capacity_scenario(kind), CAPACITY_S)}"


def _mark(scenario: Scenario, seconds: float) -> str:
    """Another for everything else that is simulated."""
    told = scenario.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(orjson.dumps([told, seconds], option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]


@dataclass(frozen=True)
class Task:
    """One run to do."""

    name: str
    variant: str
    scenario: Scenario
    seconds: float

    @property
    def key(self) -> str:
        """By which it is kept: what is simulated, and what it is called."""
        return f"{self.name} | {self.variant} | {_mark(self.scenario, self.seconds)}"


def do(task: Task) -> Figures:
    """In whichever process."""
    (run,) = runs_of(task.scenario, source=task.name)
    return run_cell(run, task.seconds)


def do_all(tasks: Sequence[Task], kept: Kept, processes: int) -> None:
    """Those that are given, each kept when it is done."""
    if processes == 1:
        for task in tasks:
            _done(task, do(task), kept)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(do, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                _done(futures[future], future.result(), kept)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _done(task: Task, found: Figures, kept: Kept) -> None:
    kept.keep(task.key, found)
    said = ", ".join(f"{one.name} {getattr(found, one.name):.3g}" for one in fields(found))
    print(f"{task.name}, {task.variant}: {said}", file=sys.stderr, flush=True)


# The page

HEADS = ["cell", "policy", "throughput", "≤ 5 s", "≤ 2 s", "refused", "engines", "starts", "lbproxy", "verdict"]


def rows(tasks: Sequence[Task], kept: Kept) -> Iterator[list[str]]:
    """One for each cell and policy that was run."""
    for task in tasks:
        found, capacity = kept.figures(task.key), kept.capacity(task.name.partition(" ")[0])
        if found is None or capacity is None:
            continue
        yield [
            task.name,
            task.variant,
            *(f"{one / capacity:.2f}" for one in (found.throughput, found.good, found.best)),
            f"{found.refused:.0%}",
            *(f"{one:.1f}" for one in (found.engines, found.starts)),
            f"{found.waiting:.0f}",
            "pass" if found.passes(capacity) else "FAIL",
        ]


def cell_table(tasks: Sequence[Task], kept: Kept) -> str:
    """In Markdown."""
    return as_table(HEADS, list(rows(tasks, kept)), left=2)


ABOUT = """# Overload

`python -m benchmarks.overload`. Four [simulated](../docs/simulator.md#fleets-lbproxy-sim) servers (Qwen3-32B on two
H100 each) with slots for 64 requests (*slots*), a KV cache of 60,000 tokens (*space*), or prompts of 6,000 tokens that
share nothing and responses of 20 (*prefill*); otherwise 350 and 700 (medians, lognormal with sigma 0.5). Poisson
arrivals at 1.2 to 10 times the capacity for 240 s, of which 60 s do not count; the queue is the default.

Beside the capacity: *throughput*, and responses whose first token came within 5 or 2 s (can exceed 1: who is served may
be chosen). *engines*, *lbproxy*: requests in their queues, p95; *starts*: what a server begins in half a second. A cell
passes with 0.9 of the capacity within 5 s, and at most 4 requests, or *starts*, in an engine's queue.
"""


def page(cells: str, capacities: Mapping[str, float]) -> str:
    """All of it."""
    said = ", ".join(f"{kind} {capacity:.2f}" for kind, capacity in capacities.items())
    return f"{ABOUT}\nCapacity, responses a second: {said}.\n\n{cells}"


# The command


def chosen(texts: Sequence[str] | None, cells: Sequence[Cell]) -> list[Cell]:
    """Those whose names have all words of one of the texts; all without texts."""
    if not texts:
        return list(cells)
    return [cell for cell in cells if any(_has(str(cell), text) for text in texts)]


def _has(name: str, text: str) -> bool:
    return set(text.replace(",", " ").split()) <= set(name.replace(",", " ").split())


def cell_tasks(cells: Sequence[Cell], variants: Sequence[str], kept: Kept, seconds: float) -> list[Task]:
    """The runs of cells whose capacity is known."""
    return [
        Task(str(cell), variant, cell.scenario(variant, capacity, seconds), seconds)
        for cell, variant in product(cells, variants)
        if (capacity := kept.capacity(cell.kind)) is not None
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a cell fails."""
    args = _parser().parse_args(arguments)
    kept = Kept(args.results)
    partial = bool(args.quick or args.cells or args.seconds or args.policies)
    seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    cells = chosen(args.cells, QUICK if args.quick else CELLS)
    if not args.render:
        for kind in dict.fromkeys(cell.kind for cell in cells):
            if kept.capacity(kind) is None:
                kept.keep_capacity(kind, capacity_of(kind))
    variants = args.policies or ["adaptive"]
    tasks = cell_tasks(cells, variants, kept, seconds)
    if not args.render:
        do_all([task for task in tasks if args.again or task.key not in kept.runs], kept, args.processes)
    print(cell_table(tasks, kept))
    if not partial:
        all_tasks = cell_tasks(CELLS, ["adaptive"], kept, SECONDS)
        capacities = {kind: found for kind in KINDS if (found := kept.capacity(kind)) is not None}
        _, mark, sockets = args.page.read_text("utf-8").partition(SOCKETS) if args.page.exists() else ("", "", "")
        whole = page(cell_table(all_tasks, kept), capacities)
        args.page.write_text(whole + mark + sockets, "utf-8")
    return int(any(row[-1] == "FAIL" for row in rows(tasks, kept)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description="more requests than answers")
    parser.add_argument("--quick", action="store_true", help="12 cells of 90 s; writes no page")
    parser.add_argument("--cells", nargs="+", metavar="WORDS", help="cells with all words of one of the texts")
    parser.add_argument("--policies", nargs="+", help="such as adaptive, adaptive/hold=false, least-request")
    parser.add_argument("--seconds", type=float, help=f"for how long requests arrive (default: {SECONDS:g})")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--render", action="store_true", help="run nothing; write the page of what there is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where runs are kept")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
