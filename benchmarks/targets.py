# SPDX-License-Identifier: Apache-2.0
"""Whether routing meets its targets: which cells, which policies, how often; every run is kept as soon as it is done.

A part is a cell of `cells.py` at full load, some of them cut in time. Who the best baseline of a part is, is first
asked of all baselines, once, in the short form of the cell; the best by mean TTFT, by E2E and by goodput go on to the
full runs, beside those that a target names. Runs are kept in one file by cell, policy, seed and what was simulated, so
a command that was stopped goes on where it was, and one that was changed repeats only what it has to. `--render` makes
the page of what there is.

    python -m benchmarks.routing --targets --seeds 5 [--mooncake FILE] [--azure FILE]

What the figures are held against, and the page, is `verdicts.py`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import orjson

from benchmarks.cells import CELLS, LADDER_SHORT, Cell
from benchmarks.oracle import ORACLES, oracle_fleet
from lbproxy import __version__
from lbproxy.commands.sim import Run, result_of, runs_of, serve, workload_of
from lbproxy.config.scenario import Scenario
from lbproxy.core.policies.registry import POLICIES
from lbproxy.sim.figures.report import Summary

OURS, FLOOR, LEAST = "adaptive", "round-robin", "least-request"
BASELINES = [name for name in POLICIES if name not in {OURS, "weighted"}]
BEST_BY = ("ttft_mean", "e2e_mean", "goodput")


@dataclass(frozen=True)
class Part:
    """What is run of one cell."""

    cell: str
    named: tuple[str, ...] = ()
    """Baselines that run in any case."""
    cut: Mapping[str, float] = field(default_factory=dict)
    """Parameters by which the cell is shorter than its full form."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Policies that run more or less often than asked for."""
    screened: bool = True
    """Whether the best of all baselines are looked for."""
    heavy: bool = False
    """To be run after all others, seed by seed."""
    late: bool = False
    """Whether requests come to wait a second there. Where they do not, both oracles do the same."""

    @property
    def full(self) -> Cell:
        cell = {**CELLS, **MORE_CELLS}[self.cell]
        return replace(cell, parameters={**cell.parameters, **self.cut})

    @property
    def first_look(self) -> Cell:
        cell = CELLS[self.cell]
        return replace(cell, parameters={**cell.parameters, **(cell.short or {})})


SAMPLED = dict(zip(ORACLES, (3, 1), strict=True))
"""Oracles that look ahead over long queues take as long as ten and thirty other runs."""
PARTS = [
    Part("10 % long at 16/s", seeds=SAMPLED, late=True),
    Part("agents, 40 users", cut={"duration_s": 160}, late=True),
    Part("agents, 80 users", cut={"duration_s": 160}, late=True),
    Part("chat, 300 users", cut={"duration_s": 160}),
    Part("chat, 600 users", cut={"duration_s": 160}),
    Part("one prefix", cut={"duration_s": 120}),
    Part("bursts", cut={"count": 2}, late=True),
    Part("Azure x8", cut={"duration_s": 120}),
    Part("half at half speed", cut={"duration_s": 120}),
    Part("15 adapters, 6 x 3", ("gie-tree",), cut={"duration_s": 90}, screened=False),
    Part("15 adapters, 8 x 4", ("gie-tree",), cut={"duration_s": 90}, screened=False),
    Part("15 adapters, 10 x 4", ("gie-tree",), cut={"duration_s": 90}, screened=False),
    Part("one slow for 80 s", cut={"duration_s": 130}, screened=False),
    Part("2 servers", cut={"duration_s": 120}, screened=False),
    Part("b2b, steps of 10 s", ("gie",), seeds={"gie": 10, OURS: 10, LEAST: 0, ORACLES[0]: 0}, screened=False),
    Part("b2b ladder", ("gie", FLOOR), seeds=SAMPLED, screened=False, heavy=True),
    Part("Mooncake x2", ("llm-d", "lmetric"), {"duration_s": 300}, SAMPLED, screened=False, heavy=True, late=True),
]
TOP = "b2b, top steps"
ENDLESS = "b2b, top step, endless caches"
BOUND = {
    TOP: ("the last two steps alone, of 30 s each", (FLOOR, LEAST, "gie", OURS, ORACLES[0])),
    ENDLESS: (
        "servers with caches of 5 million tokens that hold all prompts: nothing is computed twice",
        (LEAST, OURS),
    ),
}
"""What the top step of the ladder gives: by cell, in words and with these policies, three seeds each."""
MORE_CELLS = {
    "b2b, steps of 10 s": Cell("ladder", LADDER_SHORT),
    TOP: Cell("ladder", {"first_rate": 57}),
    ENDLESS: Cell(
        "ladder",
        {"first_rate": 60, "warm_up_s": 400},
        more={"fleet": [{"count": 8, "kv_tokens": 5_000_000, "max_model_len": 131_072}]},
    ),
}
PARTS += [Part(cell, screened=False, heavy=True) for cell in BOUND]
ALWAYS = (LEAST,)
"""In every part: what ours must never lose to."""


@dataclass(frozen=True)
class Found:
    """One kept run."""

    summary: Summary
    steps: Mapping[str, float]
    """Output tokens a second in each phase, where there are several."""


class Kept:
    """The runs that were done, in a file that is written after each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._runs: dict[str, dict[str, object]] = orjson.loads(file.read_bytes())["runs"] if file.exists() else {}

    def find(self, key: str) -> Found | None:
        kept = self._runs.get(key)
        if kept is None:
            return None
        return Found(Summary(**kept["summary"]), kept["steps"])  # type: ignore[arg-type]

    def keep(self, key: str, found: Found) -> None:
        self._runs[key] = {"summary": asdict(found.summary), "steps": dict(found.steps)}
        data = {"about": {"lbproxy": __version__}, "runs": self._runs}
        fresh = self._file.with_suffix(".new")
        fresh.write_bytes(orjson.dumps(data))
        fresh.replace(self._file)


class Runner:
    """Does runs that are not kept yet, one after the other."""

    def __init__(self, kept: Kept, traces: Mapping[str, str | None], say: Callable[[str], None]) -> None:
        self._kept = kept
        self._traces = traces
        self._say = say
        self._lines = {path: Path(path).read_text("utf-8").splitlines() for path in traces.values() if path}

    def kept(self, name: str, cell: Cell, policy: str, seed: int) -> Found | None:
        """A run, if it was done before."""
        return self._kept.find(self._prepare(name, cell, policy, seed)[1])

    def run(self, name: str, cell: Cell, policy: str, seed: int) -> Found:
        """One run of a cell, which is called `name` in the file."""
        run, key = self._prepare(name, cell, policy, seed)
        found = self._kept.find(key)
        if found is None:
            of_oracle = policy in ORACLES
            served = oracle_fleet(run, workload_of(run), policy).run() if of_oracle else serve(run)
            result = result_of(run.scenario, served)
            steps = {name: phase.output_tokens_s for name, phase in result.phases.items()}
            found = Found(result.summary, steps if len(steps) > 1 else {})
            self._kept.keep(key, found)
            self._say(f"{key}: TTFT {found.summary.ttft_mean:.3f} s, goodput {found.summary.goodput:.2f}")
        return found

    def _prepare(self, name: str, cell: Cell, policy: str, seed: int) -> tuple[Run, str]:
        trace = self._traces.get(cell.workload)
        keys = cell.scenario(["random" if policy in ORACLES else policy], seed, short=False, trace=trace)
        scenario = Scenario.model_validate(keys)
        lines = self._lines[trace] if trace else None
        run = runs_of(scenario, source=name, trace=lines)[-1]
        # A trace is told from another by what it says, not by where it lies.
        told = scenario.model_dump(
            mode="json", exclude_defaults=True, exclude={"policies": True, "seeds": True, "workload": {"trace"}}
        )
        text = orjson.dumps(told, option=orjson.OPT_SORT_KEYS) + b"".join(line.encode() for line in (lines or ())[:50])
        mark = hashlib.sha256(text).hexdigest()[:8]
        return run, f"{name} | {policy} | {seed} | {mark}"


def chosen_baselines(part: Part, runner: Runner, *, render: bool) -> list[str]:
    """The baselines that the part's full runs are of. `render`: as far as is known."""
    chosen = [*ALWAYS, *part.named]
    if part.screened:
        look = runner.kept if render else runner.run
        looks = {policy: look(f"{part.cell} (first look)", part.first_look, policy, 1) for policy in BASELINES}
        seen = {policy: found.summary for policy, found in looks.items() if found is not None}
        for figure in BEST_BY if seen else ():
            sign = -1 if figure == "goodput" else 1
            chosen.append(min(seen, key=lambda policy: sign * getattr(seen[policy], figure)))
    return list(dict.fromkeys(chosen))


def wanted(part: Part, runner: Runner, seeds: int, *, render: bool) -> Iterator[tuple[str, int]]:
    """Policies and how many seeds each runs."""
    if part.cell in BOUND:
        yield from ((policy, 3) for policy in BOUND[part.cell][1])
        return
    oracles = ORACLES if part.late else ORACLES[:1]
    for policy in (*chosen_baselines(part, runner, render=render), OURS, *oracles):
        yield policy, part.seeds.get(policy, seeds)


def run_parts(parts: Sequence[Part], runner: Runner, seeds: int) -> None:
    """All runs: the light parts one after the other, then their oracles, then the heavy ones seed by seed."""
    for of_oracles in (False, True):
        for part in parts:
            for policy, count in () if part.heavy else wanted(part, runner, seeds, render=False):
                for seed in range(1, count + 1) if (policy in ORACLES) is of_oracles else ():
                    runner.run(part.cell, part.full, policy, seed)
    for seed in range(1, 1 + max(seeds, *(max(part.seeds.values(), default=0) for part in parts))):
        for part in parts:
            for policy, count in wanted(part, runner, seeds, render=False) if part.heavy else ():
                if seed <= count:
                    runner.run(part.cell, part.full, policy, seed)


def found_of(parts: Sequence[Part], runner: Runner, seeds: int) -> dict[str, dict[str, list[Found]]]:
    """What there is: by cell, by policy, in the order of the seeds; a policy without any run is left out."""
    found: dict[str, dict[str, list[Found]]] = {}
    for part in parts:
        for policy, count in wanted(part, runner, seeds, render=True):
            runs = [runner.kept(part.cell, part.full, policy, seed) for seed in range(1, count + 1)]
            done = [run for run in runs[: (*runs, None).index(None)] if run is not None]
            if done:
                found.setdefault(part.cell, {})[policy] = done
    return found


def chosen_parts(words: Sequence[str] | None) -> list[Part]:
    """Those with one of the words in their names; all without."""
    return [part for part in PARTS if not words or any(word in part.cell for word in words)]
