# SPDX-License-Identifier: Apache-2.0
"""Whether adaptive finds out that it is wrong: fleets and traffic that contradict its model, in virtual time.

Every cell of `surprise_cells.py` under adaptive and under rules of a few lines, with equal arrivals seed by seed.

    python -m benchmarks.surprises                          # all cells, five seeds; prints the table
    python -m benchmarks.surprises --quick                  # those that contradict most, one seed
    python -m benchmarks.surprises "hot prompt" gauges      # cells that have one of the texts in their names
    python -m benchmarks.surprises --baselines FILE         # the rules' runs are kept there, and not run again
    python -m benchmarks.surprises --write                  # SURPRISES.md as well

A cell is right if mean TTFT and mean E2E are at most 1.1 times and the p99 of TTFT at most 1.25 times (twice where the
mean is at most .7 times) those of the best rule, and at most 1 % of the requests are refused where any rule answers
98 % within 5 s. The best rule is that with the least mean TTFT of those that serve as much in time: whose requests with
a first token within 5 s are at most 2 % fewer than adaptive's. Ratios are medians over the seeds, paired.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import orjson

from benchmarks.surprise_cells import SURPRISES, Surprise
from lbproxy import __version__
from lbproxy.commands.sim import runs_of, serve
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import as_table, percentile
from lbproxy.sim.figures.sharing import REFUSED
from lbproxy.sim.fleet.fleet import Served

PAGE = Path(__file__).parent / "SURPRISES.md"
OURS = "adaptive"
RULES = ("least-request", "lmetric", "gie", "preble")
SEEDS = 5
FEWER_IN_TIME = 0.02
E2E, P99, P99_OF_BETTER, BETTER = 1.1, 1.25, 2.0, 0.7
ENOUGH_IN_TIME, REFUSED_AT_MOST = 0.98, 0.01


@dataclass(frozen=True)
class Crowd:
    """What came of the requests of a run that count. Seconds, of those that were served to the end."""

    requests: int
    refused: float
    """Share of the requests."""
    in_time: float
    """Share of the requests that were served, with a first token in time: within 5 s, if the cell says nothing else."""
    ttft_mean: float
    ttft_p99: float
    e2e_mean: float


def crowd(cell: Surprise, served: Sequence[Served]) -> Crowd:
    """Of the requests that count in a cell."""
    counted = [
        one for one in served if one.submitted_at >= cell.counted_from and one.job.prompt_tokens > cell.longer_than
    ]
    ended = [(one, one.first_at) for one in counted if one.outcome is Outcome.COMPLETED]
    ttfts = sorted(first_at - one.submitted_at for one, first_at in ended if first_at is not None)
    return Crowd(
        requests=len(counted),
        refused=sum(one.outcome in REFUSED for one in counted) / max(1, len(counted)),
        in_time=sum(ttft <= cell.in_time_s for ttft in ttfts) / max(1, len(counted)),
        ttft_mean=fmean(ttfts) if ttfts else float("inf"),
        ttft_p99=percentile(ttfts, 99) if ttfts else float("inf"),
        e2e_mean=fmean(one.ended_at - one.submitted_at for one, _ in ended) if ended else float("inf"),
    )


@dataclass(frozen=True)
class Task:
    """One run to do."""

    cell: Surprise
    policy: str
    seed: int

    @property
    def key(self) -> str:
        """By which it is kept: what is simulated, and what it is called."""
        return f"{self.cell.name} | {self.policy} | {self.seed} | {_mark(self.cell, self.policy)}"


def _mark(cell: Surprise, policy: str) -> str:
    """Another for everything else that is simulated."""
    scenario = cell.scenario(policy).model_dump(mode="json", exclude_defaults=True)
    told = [scenario, cell.counted_from, *((cell.longer_than, cell.in_time_s) if cell.longer_than else ())]
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]


def do(task: Task) -> Crowd:
    """In whichever process. Deterministic."""
    (run,) = runs_of(task.cell.scenario(task.policy), source=task.cell.name)
    return crowd(task.cell, serve(replace(run, seed=task.seed)))


class Kept:
    """The runs of the rules, in a file, if there is one: they do not change while adaptive does."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._runs: dict[str, Crowd] = {}
        if file is not None and file.exists():
            self._runs = {key: Crowd(**found) for key, found in orjson.loads(file.read_bytes()).items()}

    def found(self, task: Task) -> Crowd | None:
        """What came of it; adaptive is always run anew."""
        return None if task.policy == OURS else self._runs.get(task.key)

    def keep(self, task: Task, found: Crowd) -> None:
        """For later; written by `write`."""
        if task.policy != OURS:
            self._runs[task.key] = found

    def write(self) -> None:
        """All that is kept."""
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(
                orjson.dumps({key: asdict(one) for key, one in self._runs.items()}, option=orjson.OPT_INDENT_2)
            )
            fresh.replace(self._file)


# Verdicts


@dataclass(frozen=True)
class Verdict:
    """Adaptive beside the best rule in one cell."""

    cell: Surprise
    rule: str
    ours: Crowd
    """Medians over the seeds, each figure by itself."""
    theirs: Crowd
    ttft: float
    """Median of the ratios over the seeds, as those that follow."""
    p99: float
    e2e: float
    can_serve: bool
    """Whether a rule answers nearly all in time."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is too much: some of ttft, p99, e2e, refused."""
        p99 = P99_OF_BETTER if self.ttft <= BETTER else P99
        too_much = {
            "ttft": self.ttft > self.cell.mean_at_most,
            "p99": self.p99 > p99,
            "e2e": self.e2e > E2E,
            "refused": self.can_serve and self.ours.refused > REFUSED_AT_MOST,
        }
        return tuple(name for name, is_wrong in too_much.items() if is_wrong)


def verdict(cell: Surprise, runs: Mapping[str, Sequence[Crowd]]) -> Verdict:
    """`runs`: by policy, in the order of the seeds; adaptive and at least one rule."""
    middle = {policy: _median(found) for policy, found in runs.items()}
    ours = middle[OURS]
    rules = {policy: found for policy, found in middle.items() if policy != OURS}
    as_much = {policy: one for policy, one in rules.items() if one.in_time >= (1 - FEWER_IN_TIME) * ours.in_time}
    best = min(as_much or rules, key=lambda policy: rules[policy].ttft_mean)

    def ratio(figure: Callable[[Crowd], float]) -> float:
        pairs = zip(runs[OURS], runs[best], strict=True)
        return median(figure(mine) / figure(its) for mine, its in pairs)

    return Verdict(
        cell,
        best,
        ours,
        rules[best],
        ttft=ratio(lambda one: one.ttft_mean),
        p99=ratio(lambda one: one.ttft_p99),
        e2e=ratio(lambda one: one.e2e_mean),
        can_serve=any(one.in_time >= ENOUGH_IN_TIME for one in rules.values()),
    )


def _median(runs: Sequence[Crowd]) -> Crowd:
    middle = {name: median(getattr(run, name) for run in runs) for name in Crowd.__dataclass_fields__}
    return Crowd(**{**middle, "requests": int(middle["requests"])})


HEADS = [
    "cell",
    "best rule",
    "TTFT",
    "p99",
    "E2E",
    "TTFT s",
    "its",
    "p99 s",
    "its",
    "refused",
    "in time",
    "its",
    "right",
]


def row(one: Verdict) -> list[str]:
    """Of the table."""
    ours, theirs = one.ours, one.theirs
    return [
        one.cell.name,
        one.rule,
        *(f"{ratio:.2f}x" for ratio in (one.ttft, one.p99, one.e2e)),
        *(f"{seconds:.3g}" for seconds in (ours.ttft_mean, theirs.ttft_mean, ours.ttft_p99, theirs.ttft_p99)),
        f"{ours.refused:.1%}",
        f"{ours.in_time:.1%}",
        f"{theirs.in_time:.1%}",
        "no: " + ", ".join(one.wrong) if one.wrong else "yes",
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """In Markdown, with the sum below."""
    right = sum(not one.wrong for one in verdicts)
    return f"{as_table(HEADS, map(row, verdicts), left=2)}\nright in {right} of {len(verdicts)}\n"


def page(verdicts: Sequence[Verdict], seeds: int) -> str:
    """All of it."""
    return f"{ABOUT.format(version=__version__, seeds=seeds)}\n{table(verdicts)}"


ABOUT = """# Where the model is wrong

`python -m benchmarks.surprises --write`, lbproxy {version}, {seeds} seeds: fleets and traffic that contradict what
adaptive takes servers for ([cells](surprise_cells.py)), beside rules of a few lines: `least-request`, `lmetric`, `gie`,
`preble`, in the same lbproxy with its queue as it is without settings. Simulated
([how](../docs/simulator.md#fleets-lbproxy-sim)), equal digit by digit on every machine.

*TTFT*, *p99*, *E2E*: adaptive's mean time to first token, its p99, and the mean time of complete responses, beside the
best rule's: medians of the ratios of equal seeds. *in time*: requests with a first token within 5 s. The best rule is
the one with the least mean TTFT of those with at most 2 % fewer requests in time than adaptive. A cell is right with
1.1x, 1.25x and 1.1x (a p99 of 2x where the mean TTFT is at most 0.7x), and at most 1 % refused where a rule serves 98 %
in time. Of *the long ones* those cells count the long prompts only, which are in time within 30 s; 1.3x is right.
"""


# The command


def run(tasks: Sequence[Task], kept: Kept, processes: int) -> dict[Task, Crowd]:
    """All of them; a line each on stderr."""
    found = {task: one for task in tasks if (one := kept.found(task)) is not None}
    missing = [task for task in tasks if task not in found]
    for task, one in zip(missing, _results(missing, processes), strict=True):
        found[task] = one
        kept.keep(task, one)
        kept.write()
        said = (
            f"TTFT {one.ttft_mean:.3g} s, p99 {one.ttft_p99:.3g} s, E2E {one.e2e_mean:.3g} s, refused {one.refused:.1%}"
        )
        print(f"{task.cell.name}, {task.policy}, seed {task.seed}: {said}", file=sys.stderr, flush=True)
    return found


def _results(tasks: Sequence[Task], processes: int) -> Iterable[Crowd]:
    """In their order, each as soon as it is there."""
    if processes == 1:
        yield from map(do, tasks)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(do, tasks)


def chosen(texts: Sequence[str], *, quick: bool) -> list[Surprise]:
    """Cells that have one of the texts in their names; all without texts. `quick`: of those that contradict most."""
    cells = [cell for cell in SURPRISES if cell.is_quick or not quick]
    return [cell for cell in cells if not texts or any(text in cell.name for text in texts)]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a cell is wrong."""
    args = _parser().parse_args(arguments)
    seeds = args.seeds or (1 if args.quick else SEEDS)
    cells = chosen(args.words, quick=args.quick)
    policies = [OURS, *(policy for policy in args.policies or RULES if policy != OURS)]
    tasks = [Task(cell, policy, seed) for cell in cells for policy in policies for seed in range(1, seeds + 1)]
    found = run(tasks, Kept(args.baselines), args.processes)
    verdicts = []
    for cell in cells:
        runs = {policy: [found[Task(cell, policy, seed)] for seed in range(1, seeds + 1)] for policy in policies}
        verdicts.append(verdict(cell, runs))
    print(table(verdicts))
    if args.write:
        PAGE.write_text(page(verdicts, seeds), "utf-8")
    return int(any(one.wrong for one in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.surprises", description="what contradicts the model")
    parser.add_argument("words", nargs="*", metavar="WORDS", help="cells with one of these texts in their names")
    parser.add_argument("--quick", action="store_true", help="the cells that contradict most, one seed")
    parser.add_argument("--seeds", type=int, help=f"how many (default: {SEEDS})")
    parser.add_argument("--policies", nargs="+", help=f"the rules beside adaptive (default: {' '.join(RULES)})")
    parser.add_argument("-j", "--processes", type=int, default=1)
    parser.add_argument("--baselines", type=Path, metavar="FILE", help="where the rules' runs are kept")
    parser.add_argument("--write", action="store_true", help="write SURPRISES.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
