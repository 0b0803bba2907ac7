# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies before one fleet: what it costs if they share nothing, and what they tell each other.

Virtual time: eight simulated servers (Qwen3-32B on two H100 each), policy adaptive, each request comes to one of R
balancers at random. Compared with one balancer that gets all requests. Batches are those of `core.replicas`, as bytes.

    python -m benchmarks.replicas                       # everything; results that are there already are kept
    python -m benchmarks.replicas --trace FILE          # Mooncake's trace instead of rows with its statistics
    python -m benchmarks.replicas --page                # only write the page anew
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

import orjson

from benchmarks import replicas_cost as costs
from benchmarks.replicas_cost import Busy, Cost
from benchmarks.replicas_routing import part_of
from benchmarks.restarted_fleet import mean_ttft
from lbproxy import __version__
from lbproxy.commands.sim import runs_of, serve
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.processes.process import is_compiled
from lbproxy.sim.figures.report import as_table, summarise
from lbproxy.sim.fleet.fleet import Served

HERE = Path(__file__).parent
PAGE = HERE / "REPLICAS.md"
RESULTS = HERE / "results" / "replicas.json"
SERVERS = 8
SEEDS = 2
REPLICAS = (2, 3, 4, 8)
INTERVALS: Mapping[str, float | None] = {"unshared": None, "50 ms": 0.05, "200 ms": 0.2, "1 s": 1.0}
ALL_SEEN = "one lbproxy"
FIGURES = ("ttft_mean", "ttft_p99", "hit_ratio", "goodput", "failed")
LADDER = {"step_s": 60, "warm_up_s": 20}
WORKLOADS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "b2b, 10 requests/s": ("ladder", {**LADDER, "first_rate": 10, "last_rate": 10}),
    "b2b, 15 requests/s": ("ladder", {**LADDER, "first_rate": 15, "last_rate": 15}),
    "Mooncake x1.5": ("mooncake", {"speedup": 1.5, "duration_s": 120}),
    "agents, 60 users": ("agents", {"users": 60, "duration_s": 60}),
    "chat, 600 users": ("chat", {"users": 600, "duration_s": 40}),
}
FAULTY = "b2b, 15 requests/s"
FAULTS: Mapping[str, Mapping[str, float]] = {
    "none": {},
    "1 % lost": {"lost": 0.01},
    "2 % twice": {"repeated": 0.02},
    "2 % three intervals late": {"late": 0.02},
    "all of these": {"lost": 0.01, "repeated": 0.02, "late": 0.02},
}
FAULTY_REPLICAS, FAULTY_INTERVAL_S = 4, 0.05
DEATH_AT_S, JOIN_AT_S, END_S = 60.0, 90.0, 120.0
DEATH_REPLICAS, DEATH_RATE = 3, 10
LOOK_S = 10.0
"""Before and after."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation, but for its seed."""

    part: str
    workload: str
    kind: str
    """Its column or row in the page."""
    replicas: int
    more: Mapping[str, object] = field(default_factory=dict)
    """Other keys of the scenario."""

    def key(self, seed: int) -> str:
        """Its name in the file of results."""
        return f"{self.part} | {self.workload} | {self.replicas} | {self.kind} | {seed}"


def cases() -> list[Case]:
    """All simulations of the page."""
    found = []
    for workload in WORKLOADS:
        found.append(Case("sharing", workload, ALL_SEEN, 1))
        for replicas in REPLICAS:
            for kind, interval_s in INTERVALS.items():
                exchange = None if interval_s is None else {"interval": interval_s}
                found.append(Case("sharing", workload, kind, replicas, {"exchange": exchange}))
    for kind, faults in FAULTS.items():
        more = {"exchange": {"interval": FAULTY_INTERVAL_S, **faults}}
        found.append(Case("faults", FAULTY, kind, FAULTY_REPLICAS, more))
    death = [{"balancer": 0, "at": DEATH_AT_S, "lasts": JOIN_AT_S - DEATH_AT_S}]
    for kind, interval_s in INTERVALS.items():
        exchange = None if interval_s is None else {"interval": interval_s}
        both: dict[str, object] = {"exchange": exchange, "balancer_faults": death}
        found.append(Case("death", "", kind, DEATH_REPLICAS, both))
    return found


def scenario(case: Case, trace: str | None) -> Scenario:
    """As a file of `lbproxy sim` would have it."""
    ladder = {"first_rate": DEATH_RATE, "last_rate": DEATH_RATE, "step_s": END_S, "warm_up_s": 0}
    name, parameters = ("ladder", ladder) if case.part == "death" else WORKLOADS[case.workload]
    workload = {"name": name, "parameters": dict(parameters), "trace": trace if name == "mooncake" else None}
    return Scenario.model_validate(
        {
            "fleet": [{"count": SERVERS, "max_model_len": 131_072}],
            "workload": workload,
            "policies": ["adaptive"],
            "balancers": case.replicas,
            **case.more,
        }
    )


def simulate(case: Case, seed: int, trace: str | None) -> dict[str, float]:
    """The figures of one run."""
    found = scenario(case, trace).model_copy(update={"seeds": seed})
    lines = None
    if found.sources[0].trace is not None:
        lines = Path(found.sources[0].trace).read_text("utf-8").splitlines()
    served = serve(runs_of(found, source=case.workload or case.part, trace=lines)[seed - 1])
    return death_figures(served) if case.part == "death" else sharing_figures(served)


def sharing_figures(served: Sequence[Served]) -> dict[str, float]:
    """What the page has of a run."""
    summary = asdict(summarise(served, SERVERS))
    return {name: summary[name] for name in FIGURES}


def death_figures(served: Sequence[Served]) -> dict[str, float]:
    """Mean TTFT around the death and the start of a balancer, and whose requests were cut."""
    end_s = max(one.ended_at for one in served)
    spans = {"before": DEATH_AT_S - LOOK_S, "dead": DEATH_AT_S, "joined": JOIN_AT_S}
    found = {name: mean_ttft(served, at, at + LOOK_S, end_s=end_s) for name, at in spans.items()}
    cut = [one for one in served if one.outcome is Outcome.CUT]
    return {
        **found,
        "cut": len(cut),
        "cut_elsewhere": sum(one.balancer != 0 for one in cut),
        "failed": sum(one.outcome is not Outcome.COMPLETED for one in served) - len(cut),
    }


# The page

Results = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Found:
    """What `replicas_cost` found."""

    cost: Sequence[Cost] = ()
    busy: Sequence[Busy] = ()
    compiled: bool = False
    """When `busy` was measured."""
    version: str = __version__
    """Of the lbproxy that was simulated."""


def mean(results: Results, case: Case, figure: str, seeds: int) -> float:
    """Of a case, over the seeds."""
    return fmean(results[case.key(seed)][figure] for seed in range(1, seeds + 1))


def sharing_table(results: Results, workload: str, seeds: int) -> str:
    """A row for each number of replicas and each interval."""
    rows = []
    one = mean(results, Case("sharing", workload, ALL_SEEN, 1), "ttft_mean", seeds)
    for case in cases():
        if case.part != "sharing" or case.workload != workload:
            continue
        name = case.kind if case.replicas == 1 else f"{case.replicas}, {case.kind}"
        ttft, p99, hits, goodput, failed = (mean(results, case, figure, seeds) for figure in FIGURES)
        more = [f"{ttft / one:.2f}x", f"{p99:.2f}", f"{hits:.3f}", f"{goodput:.3f}", f"{failed:.0f}"]
        rows.append([name, f"{ttft:.3f}", *more])
    return as_table(["replicas", "TTFT mean, s", "of one lbproxy", "p99, s", "hit ratio", "goodput", "failed"], rows)


def faults_table(results: Results, seeds: int) -> str:
    """A row for each fault of the network."""
    rows = []
    for case in cases():
        if case.part == "faults":
            ttft, p99, hits, goodput, _ = (mean(results, case, figure, seeds) for figure in FIGURES)
            rows.append([case.kind, f"{ttft:.3f}", f"{p99:.2f}", f"{hits:.3f}", f"{goodput:.3f}"])
    return as_table(["batches", "TTFT mean, s", "p99, s", "hit ratio", "goodput"], rows)


def death_table(results: Results, seeds: int) -> str:
    """A row for each interval."""
    rows = []
    for case in cases():
        if case.part == "death":
            times = [f"{mean(results, case, figure, seeds):.3f}" for figure in ("before", "dead", "joined")]
            counts = [f"{mean(results, case, figure, seeds):.1f}" for figure in ("cut", "cut_elsewhere", "failed")]
            rows.append([case.kind, *times, *counts])
    heads = ["replicas", "10 s before, s", "10 s after the death", "10 s after the start", "cut", "of others", "failed"]
    return as_table(heads, rows)


def cost_table(found: Sequence[Cost]) -> str:
    """A row for each run of the exchange by itself."""
    rows = [
        [
            one.name,
            f"{one.requests:,}",
            f"{one.batches_per_1000:.0f}",
            f"{one.bytes_per_1000 / 1e3:.1f}",
            f"{one.sent_ms_per_1000:.1f}",
            f"{one.heard_ms_per_1000:.1f}",
            f"{one.largest_batch / 1e3:.1f}",
            f"{one.most_in_flight:,}",
            f"{one.peers_at_end}",
            f"{one.peers_bytes_half / 1e3:.0f}, {one.peers_bytes_end / 1e3:.0f}",
        ]
        for one in found
    ]
    heads = [
        *("run", "requests", "batches", "KB", "CPU to tell, ms", "CPU to hear, ms", "largest batch, KB"),
        *("others in flight, most", "at the end", "KB of Peers at half, at the end"),
    ]
    return as_table(heads, rows)


def busy_table(found: Sequence[Busy]) -> str:
    """A row for each size of prompts."""
    rows = [
        [
            str(one.keys),
            f"{one.bytes:.0f}",
            f"{one.alone_us:.1f}",
            f"{one.shared_us - one.alone_us:+.1f}",
            f"{one.tell_us:.1f}",
            f"{one.hear_us:.1f}",
        ]
        for one in found
    ]
    return as_table(["keys of a prompt", "bytes", "decision alone, us", "noted, us", "told, us", "heard, us"], rows)


def page(results: Results, found: Found, seeds: int, trace: str | None) -> str:
    """REPLICAS.md."""
    kept = "the trace" if trace else "rows with the statistics of its trace"
    head = (
        f"# Several lbproxies before one fleet\n\n`python -m benchmarks.replicas --seeds {seeds}"
        f"{' --trace FILE' if trace else ''}`, lbproxy {found.version}, virtual time. Eight servers (Qwen3-32B on two\n"
        "H100 each), policy `adaptive`; each request comes to one of the replicas at random. *Unshared*: they know of\n"
        "others' requests by what servers report, else by batches at the row's interval. Goodput: TTFT within 1 s and\n"
        "TPOT within 50 ms. Close rows are not told apart by so few seeds.\n"
    )
    parts = [head]
    for workload, (name, parameters) in WORKLOADS.items():
        shown = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
        note = f" Mooncake: {kept}." if name == "mooncake" else ""
        parts.append(f"## {workload}\n\n`{name}` ({shown}).{note}\n\n{sharing_table(results, workload, seeds)}")
    parts.append(
        f"## A network with faults\n\n{FAULTY}, {FAULTY_REPLICAS} replicas, {1000 * FAULTY_INTERVAL_S:.0f} ms.\n\n"
        + faults_table(results, seeds)
    )
    parts.append(
        f"## A replica dies, and another one joins\n\n`ladder` at {DEATH_RATE} requests/s for {END_S:g} s,"
        f" {DEATH_REPLICAS} replicas. One dies at {DEATH_AT_S:g} s, which the others notice 3 s later;\nat"
        f" {JOIN_AT_S:g} s a new one starts with what another one knows (unshared: nothing). Mean TTFT; requests "
        "that were *cut*: of the\ndead one; *of others*; *failed*: any other error.\n\n" + death_table(results, seeds)
    )
    parts.append(f"## What it costs\n\n{costs.ABOUT}\n\n{cost_table(found.cost)}")
    how = "compiled" if found.compiled else "as Python and not compiled"
    parts.append(f"{costs.BUSY_ABOUT.format(how=how)}\n\n{busy_table(found.busy)}")
    return "\n".join(parts)


# Running


def load(path: Path, *, trace: bool) -> tuple[dict[str, dict[str, float]], Found]:
    """What was found before. `trace`: Mooncake's trace is replayed, and not rows with its statistics."""
    if not path.exists():
        return {}, Found()
    data = orjson.loads(path.read_bytes())
    runs = data["runs"]
    if data["about"]["trace"] != trace:
        runs = {key: figures for key, figures in runs.items() if "Mooncake" not in key}
    busy = [Busy(**one) for one in data["busy"]]
    return runs, Found([Cost(**one) for one in data["cost"]], busy, data["about"]["compiled"], data["about"]["lbproxy"])


def save(path: Path, results: Results, found: Found, *, trace: bool) -> None:
    """Keep what was found."""
    about = {"lbproxy": found.version, "trace": trace, "compiled": found.compiled}
    data = {
        "about": about,
        "runs": results,
        "cost": list(map(asdict, found.cost)),
        "busy": list(map(asdict, found.busy)),
    }
    path.write_bytes(orjson.dumps(data))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake's conversation trace")
    parser.add_argument("--page", action="store_true", help="write the page from the results that there are")
    parser.add_argument("--anew", action="store_true", help="forget earlier results")
    args = parser.parse_args()
    results, found = ({}, Found()) if args.anew else load(RESULTS, trace=bool(args.trace))
    tasks = [(case, seed) for seed in range(1, args.seeds + 1) for case in cases()]
    missing = [] if args.page else [(case, seed) for case, seed in tasks if case.key(seed) not in results]
    found = replace(found, version=__version__) if missing else found
    random.Random(1).shuffle(missing)  # so that the time that is left can be read from the progress
    for number, (case, seed) in enumerate(missing):
        results[case.key(seed)] = simulate(case, seed, args.trace)
        save(RESULTS, results, found, trace=bool(args.trace))
        print(f"{number + 1}/{len(missing)} {case.key(seed)}", file=sys.stderr, flush=True)
    if not (found.cost and found.busy) and not args.page:
        found = Found(found.cost or costs.measure(), costs.measure_busy(), is_compiled())
        save(RESULTS, results, found, trace=bool(args.trace))
    kept = part_of(PAGE.read_text("utf-8")) if PAGE.exists() else ""
    PAGE.write_text(page(results, found, args.seeds, args.trace) + kept, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
