# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: which requests are split, by prices and by rules, and against servers that do both.

Virtual time: `nixl`'s hand-over between simulated servers (docs/simulator.md). For each workload, number of servers,
way to part them and load: goodput and latencies under each rule of `routing.split`. The first requests do not count, as
nothing is learned yet.

    python -m benchmarks.disaggregation --mooncake conversation_trace.jsonl     # writes DISAGGREGATION.md

Half an hour on two cores for each seed. Each run is kept as it ends (results/disaggregation.jsonl): `--resume` does
those that are not there, and `--render` writes the page of what there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import orjson

from lbproxy import __version__
from lbproxy.commands.sim import Run, fleet_of, runs_of, workload_of
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import as_table, percentile
from lbproxy.sim.fleet.fleet import Served

PAGE = Path(__file__).parent / "DISAGGREGATION.md"
KEPT = Path(__file__).parent / "results" / "disaggregation.jsonl"
"""A line a run."""
GOOD_TTFT_S: Final = 2.0
GOOD_TPOT_S: Final = 0.025
WARM_UP_S: Final = 20.0
REQUESTS: Final = 1600
"""About so many count."""
DRAIN_S: Final = 20.0
"""After the last arrival; what has no first token then is late, and what has not ended is no good request."""
WITHIN: Final = 0.98
"""Of the best rule's goodput: as good as that."""
RULES: Final[Sequence[object]] = ("priced", "always", 2000, 8000, "never")
SHAPES: Final[Mapping[int, Sequence[tuple[int, int]]]] = {4: ((1, 3), (2, 2)), 8: ((2, 6), (4, 4))}
"""By the number of servers: prefill and decode."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, to which servers."""

    name: str
    preset: str
    loads: tuple[float, ...]
    """For four servers; eight get twice as much."""
    unit: str
    key: str
    """The parameter that `loads` are of."""
    rate: float
    """Requests a second at a load of 1."""
    parameters: Mapping[str, float]


WORKLOADS: Final[Mapping[str, Workload]] = {
    "Mooncake conversation": Workload("mooncake", "qwen-32b-2xh100", (0.3, 0.6, 0.9, 1.2), "x", "speedup", 3.4, {}),
    "long prompts": Workload(
        "long-prompts",
        "llama-8b-h100",
        (0.6, 1.2, 1.8, 2.4),
        "/s",
        "rate",
        1.0,
        {"share": 1.0, "shortest": 8000, "longest": 64_000, "output_tokens": 200},
    ),
}


class Cell(NamedTuple):
    """What one rule is measured in."""

    workload: str
    load: float
    prefill: int
    """Servers; 0: all serve whole requests."""
    decode: int

    @property
    def servers(self) -> int:
        """All of them."""
        return self.prefill + self.decode

    @property
    def duration_s(self) -> float:
        """Of the arrivals."""
        return WARM_UP_S + REQUESTS / (WORKLOADS[self.workload].rate * self.load)


class Figures(NamedTuple):
    """Of one cell and rule: of one run, or means over several."""

    rate: float
    """Good requests a second."""
    goodput: float
    """Their share."""
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    split: float
    """Share of the requests that were split."""
    refused: float
    """Share of the requests that waited too long, or came when too many did."""


def cells(only: str) -> list[Cell]:
    """All whose workload begins with `only`."""
    found = []
    for name, workload in WORKLOADS.items():
        for servers, shapes in SHAPES.items():
            for load in workload.loads:
                for prefill, decode in ((0, servers), *shapes):
                    if name.startswith(only):
                        found.append(Cell(name, load * servers / 4, prefill, decode))
    return found


def rules_of(cell: Cell) -> Sequence[object]:
    """Those that differ there."""
    return RULES if cell.prefill else RULES[:1]


def scenario(cell: Cell, rule: object, seeds: int, trace: str | None) -> Scenario:
    """As a file of `lbproxy sim` would have it."""
    workload = WORKLOADS[cell.workload]
    server = {"preset": workload.preset, "max_model_len": 131_072}
    roles = [("prefill", cell.prefill), ("decode" if cell.prefill else "both", cell.decode)]
    return Scenario.model_validate(
        {
            "fleet": [{**server, "role": role, "count": count} for role, count in roles if count],
            "workload": {
                "name": workload.name,
                "parameters": {**workload.parameters, workload.key: cell.load, "duration_s": cell.duration_s},
                "trace": trace if workload.name == "mooncake" else None,
            },
            "policies": [{"policy": "adaptive", "split": rule}],
            "seeds": seeds,
            "admission": {},
        }
    )


def figures_of(served: Sequence[Served], duration_s: float) -> Figures:
    """Of one run."""
    counted = [one for one in served if one.submitted_at >= WARM_UP_S]
    done = [one for one in counted if one.outcome is Outcome.COMPLETED and one.first_at is not None]
    until = duration_s + DRAIN_S
    kept = [one for one in counted if one.outcome in {None, Outcome.COMPLETED}]
    ttfts = [(until if one.first_at is None else one.first_at) - one.submitted_at for one in kept]
    tpots = [tpot_s(one) for one in done]
    good = sum((one.first_at or 0.0) - one.submitted_at <= GOOD_TTFT_S and tpot_s(one) <= GOOD_TPOT_S for one in done)
    return Figures(
        rate=good / (duration_s - WARM_UP_S),
        goodput=good / len(counted),
        ttft_p50=percentile(sorted(ttfts), 50),
        ttft_p99=percentile(sorted(ttfts), 99),
        tpot_p99=percentile(sorted(tpots), 99),
        split=sum(one.prefill is not None for one in done) / max(1, len(done)),
        refused=1 - len(kept) / len(counted),
    )


def tpot_s(one: Served) -> float:
    """Mean time of a token after the first."""
    return (one.ended_at - (one.first_at or 0.0)) / max(1, one.job.answer.tokens - 1)


def measure(cell: Cell, run: Run) -> Figures:
    """Simulate."""
    served = fleet_of(run, workload_of(run)).run(until_s=cell.duration_s + DRAIN_S)
    return figures_of(served, cell.duration_s)


def mean(found: Sequence[Figures]) -> Figures:
    """Over the seeds."""
    return Figures(*(fmean(column) for column in zip(*found, strict=True)))


Results = Mapping[tuple[Cell, object], Figures]


def key_of(cell: Cell, rule: object, seed: int) -> str:
    """The name of a run."""
    return f"{cell.workload} {cell.load:g} {cell.prefill}:{cell.decode} {rule} {seed}"


def kept_runs(file: Path) -> dict[str, Figures]:
    """Those that were done, by their names."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return {one.pop("run"): Figures(**one) for one in map(orjson.loads, lines)}


def forget(only: str, file: Path) -> None:
    """Remove the runs of these workloads."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    file.write_bytes(b"".join(line for line in lines if not orjson.loads(line)["run"].startswith(only)))


def measure_all(only: str, seeds: int, trace: str | None, processes: int, file: Path) -> None:
    """Every rule in every cell, as far as `file` does not have it; each run is appended there."""
    kept = kept_runs(file)
    lines = None if trace is None else Path(trace).read_text("utf-8").splitlines()
    runs: dict[tuple[int, str], tuple[Cell, Run]] = {}
    for cell in cells(only):
        for rule in rules_of(cell):
            replays = WORKLOADS[cell.workload].name == "mooncake"
            made = runs_of(scenario(cell, rule, seeds, trace), source=cell.workload, trace=lines if replays else None)
            runs |= {(seed, key_of(cell, rule, seed)): (cell, run) for seed, run in enumerate(made, 1)}
    with (
        file.open("ab", buffering=0) as out,
        ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        by_seed = sorted(runs.items(), key=lambda item: item[0][0])
        futures = {pool.submit(measure, *run): name for (_, name), run in by_seed if name not in kept}
        for future in as_completed(futures):
            line = orjson.dumps({"run": futures[future], **future.result()._asdict()}, option=orjson.OPT_APPEND_NEWLINE)
            out.write(line)
            print(line.decode(), end="", file=sys.stderr, flush=True)


def found_in(file: Path, only: str, seeds: int) -> Results:
    """The means over the seeds.

    Raises:
        KeyError: a run is missing.
    """
    kept = kept_runs(file)
    return {
        (cell, rule): mean([kept[key_of(cell, rule, seed)] for seed in range(1, seeds + 1)])
        for cell in cells(only)
        for rule in rules_of(cell)
    }


# The page


def against_best(results: Results, cell: Cell) -> float:
    """The goodput of prices over that of the best fixed rule."""
    best = max(results[cell, rule].goodput for rule in RULES[1:])
    return results[cell, RULES[0]].goodput / best if best else 1.0


def tables(results: Results, workload: str) -> str:
    """Goodput, and latencies."""
    unit = WORKLOADS[workload].unit
    goodput: list[Sequence[str]] = []
    times: list[Sequence[str]] = []
    for cell in [cell for cell, rule in results if cell.workload == workload and cell.prefill and rule == RULES[0]]:
        whole = results[Cell(workload, cell.load, 0, cell.servers), RULES[0]]
        each = [whole, *(results[cell, rule] for rule in RULES)]
        head = [f"{cell.prefill}:{cell.decode}", f"{cell.load:g}{unit}"]
        against = against_best(results, cell)
        share, mark = results[cell, RULES[0]].split, "" if against >= WITHIN else " **!**"
        shown = [f"{one.goodput:.3f} ({one.rate:.2f})" for one in each]
        goodput.append([*head, *shown, f"{against:.3f}{mark}", f"{share:.2f}"])
        times.append(
            [
                *head,
                *(
                    f"{o.ttft_p50:.2f} / {o.ttft_p99:.1f} / {1e3 * o.tpot_p99:.0f} / {100 * o.refused:.0f}"
                    for o in each
                ),
            ]
        )
    names = ["prefill:decode", "load", "all whole", *(f"`{rule}`" for rule in RULES)]
    return (
        f"## {workload}\n\nGoodput (a second):\n\n"
        + as_table([*names, "priced / best", "split"], goodput, left=2)
        + "\nTTFT p50 / p99 in s / TPOT p99 in ms / refused in %:\n\n"
        + as_table(names, times, left=2)
    )


def page(results: Results, seeds: int, replayed: bool) -> str:
    """DISAGGREGATION.md."""
    apart = [cell for cell, rule in results if cell.prefill and rule == RULES[0]]
    within = sum(against_best(results, cell) >= WITHIN for cell in apart)
    trace = "the published trace" if replayed else "a stand-in with the trace's statistics"
    command = f"python -m benchmarks.disaggregation --seeds {seeds}{' --mooncake FILE' if replayed else ''}"
    about = f"""# Prefill and decode apart

`{command}`, lbproxy {__version__}, virtual time, policy `adaptive`; about {REQUESTS} requests
a row after {WARM_UP_S:.0f} s; means over {seeds} seeds. Good: the first token within {GOOD_TTFT_S:g} s, the others in
at most {1e3 * GOOD_TPOT_S:.0f} ms each on average, and ended {DRAIN_S:.0f} s after the last arrival. `priced`,
`always`, `never` and numbers are values of `routing.split`; with `never` prefill servers are idle. *All whole*: as many
servers without roles. *Split*: the share that `priced` splits. Mooncake: {trace}, so many times as fast, on Qwen3-32B,
two H100 a server. Long prompts: 8,000 to 64,000 tokens, nothing shared, about 200 of response, on Llama 3.1 8B, one
H100. A transfer takes 2 ms and 8 µs a token.

`priced` is the best rule, or within {100 * (1 - WITHIN):.0f} % of the best, in {within} of {len(apart)} rows.

"""
    return about + "\n".join(tables(results, name) for name in dict.fromkeys(cell.workload for cell in apart))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--only", default="", metavar="WORKLOAD", help="how its name begins; the page is printed then")
    parser.add_argument("--resume", action="store_true", help="keep the runs that there are")
    parser.add_argument("--render", action="store_true", help="run nothing; write the page of what there is")
    args = parser.parse_args()
    if not (args.resume or args.render):
        forget(args.only, KEPT)
    if not args.render:
        measure_all(args.only, args.seeds, args.mooncake, args.processes, KEPT)
    text = page(found_in(KEPT, args.only, args.seeds), args.seeds, args.mooncake is not None)
    if args.only:
        print(text)
    else:
        PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
