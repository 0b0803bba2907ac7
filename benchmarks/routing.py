# SPDX-License-Identifier: Apache-2.0
"""How policies compare on simulated fleets, in virtual time: `make bench-routing`.

Every cell of `cells.py` with every policy and seed, spread over processes. Equal seeds are equal arrivals for every
policy, and the simulation is deterministic, so a figure can be had again, digit by digit, on any machine.

    python -m benchmarks.routing --short              # at most 10 minutes on two cores
    python -m benchmarks.routing                      # all cells, policies and seeds: hours
    python -m benchmarks.routing --gates              # does the simulated fleet behave like published ones?
    python -m benchmarks.routing --robustness         # what wrong sizes and late gauges cost
    python -m benchmarks.routing --lora               # adapters: loads, and what affinity is worth
    python -m benchmarks.routing --agents             # coding agents: every policy, three seeds
    python -m benchmarks.routing --published          # the traffic that other services published
    python -m benchmarks.routing --targets            # what routing has to reach, and what it does

Without the traces (paths by option) the replays run on stand-ins with their statistics, and the tables say so. Writes
`results/routing-short.json` or `-full.json` and the tables to `ROUTING.md`; each option its page. --targets,
--robustness, --agents and --published run in one process, keep every run in `results` as it is done, and go on where
they were stopped.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import agents
from benchmarks.cells import AGENTS, CELLS, GIE_LORA, LORA, LORA_CAPACITY, PUBLISHED, ROBUSTNESS, Cell
from benchmarks.page import AGENTS_PAGE, PUBLISHED_PAGE
from benchmarks.targets import Found, Kept, Runner, chosen_parts, found_of, run_parts
from benchmarks.verdicts import mean, page, ratio, shown
from lbproxy import __version__
from lbproxy.commands.sim import Comparison, Result, Run, label, run_all, runs_of
from lbproxy.config.scenario import Scenario
from lbproxy.core.policies.registry import POLICIES
from lbproxy.sim.figures.report import Summary, markdown

HERE = Path(__file__).parent
OURS = "adaptive"
SHORT_POLICIES = ["round-robin", "least-request", "gie", "llm-d", "cache-aware", OURS]
SHORT_SEEDS, FULL_SEEDS, AGENT_SEEDS = 2, 5, 3


@dataclass(frozen=True)
class Table:
    """A cell's results, by policy in the order of the seeds."""

    name: str
    cell: Cell
    runs: dict[str, list[Summary]]


def scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """The chosen cells, as scenarios."""
    policies = args.policies or (SHORT_POLICIES if args.short else [name for name in POLICIES if name != "weighted"])
    seeds = args.seeds or (SHORT_SEEDS if args.short else FULL_SEEDS)
    traces = {"mooncake": args.mooncake, "azure": args.azure}
    chosen: dict[str, Scenario] = {}
    for name, cell in CELLS.items():
        if args.cells and not any(word in name for word in args.cells):
            continue
        if args.short and cell.short is None and not args.cells:
            continue
        keys = cell.scenario(policies, seeds, short=args.short, trace=traces.get(cell.workload))
        chosen[name] = Scenario.model_validate(keys)
    return chosen


def plan(chosen: Mapping[str, Scenario]) -> list[tuple[str, Run]]:
    """All simulations, the cells that take longest first, so that no process is left with them at the end."""
    lines = {path: Path(path).read_text("utf-8").splitlines() for path in {_trace(s) for s in chosen.values()} if path}
    runs = [
        (name, run)
        for name, scenario in chosen.items()
        for run in runs_of(scenario, source=name, trace=lines.get(_trace(scenario) or ""))
    ]
    heavy = ("ladder", "mooncake")
    return sorted(runs, key=lambda pair: pair[1].scenario.sources[0].name not in heavy)


def _trace(scenario: Scenario) -> str | None:
    return scenario.sources[0].trace


def execute(runs: Sequence[tuple[str, Run]], processes: int) -> dict[str, dict[str, list[Result]]]:
    """By cell, by policy, in the order of the seeds."""
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(runs))
        done = run_all([run for _, run in runs], processes=processes, on_done=lambda: progress.advance(task))
    found: dict[str, dict[str, list[Result]]] = {}
    for (name, run), result in zip(runs, done, strict=True):
        found.setdefault(name, {}).setdefault(label(run.routing), []).append(result)
    return found


# Against the best


def against_best(tables: Sequence[Table]) -> str:
    """Ours against the baseline with the least mean time to first token, cell by cell."""
    rows = [["cell", "best baseline", "TTFT mean", "E2E mean", "tokens/s", "goodput, ours / its", "TTFT p99"]]
    for table in tables:
        ours = table.runs.get(OURS)
        baselines = {policy: runs for policy, runs in table.runs.items() if policy != OURS}
        if ours is None or not baselines:
            continue
        best = min(baselines, key=lambda policy: _mean(baselines[policy], "ttft_mean"))
        ratios = [
            f"{_mean(ours, figure) / (_mean(baselines[best], figure) or 1):.2f}x"
            for figure in ("ttft_mean", "e2e_mean", "output_tokens_s", "ttft_p99")
        ]
        goodput = f"{_mean(ours, 'goodput'):.2f} / {_mean(baselines[best], 'goodput'):.2f}"
        rows.append([table.name, best, *ratios[:3], goodput, ratios[3]])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    """In Markdown. The first two columns are text, the others figures."""
    rule = ["---", "---"] + ["---:"] * (len(rows[0]) - 2)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]) + "\n"


def _mean(runs: Sequence[Summary], figure: str) -> float:
    return fmean(getattr(run, figure) for run in runs)


# Gates


def gates(found: Mapping[str, Comparison]) -> list[tuple[bool, str]]:
    """What simulator and policies have to show on the ladder: (passed, what was measured)."""
    comparison = found["b2b ladder"]
    checks: list[tuple[bool, str]] = []
    steps = comparison.phases()
    loaded = {name: runs for name, runs in steps.items() if int(name.removesuffix("/s")) >= 20}
    for policy in ("round-robin", "least-request"):
        rates = [_mean(runs[policy], "output_tokens_s") for runs in loaded.values()]
        waits = [_mean(runs[policy], "ttft_p90") for runs in loaded.values()]
        plateau = f"{min(rates):.0f} to {max(rates):.0f} output tokens/s from 20 requests/s on"
        checks.append((min(rates) >= 5000 and max(rates) <= 7500, f"{policy}: {plateau} (5,000 to 7,500)"))
        checks.append((min(waits) > 20, f"{policy}: TTFT p90 at least {min(waits):.1f} s there (above 20)"))
    top = list(steps.values())[-1]
    ratio = {
        policy: _mean(runs, "output_tokens_s") / _mean(top["round-robin"], "output_tokens_s")
        for policy, runs in top.items()
    }
    best = max(ratio, key=lambda policy: ratio[policy])
    checks.append((ratio[best] >= 2.1, f"{best}: {ratio[best]:.2f}x round robin's tokens/s at the top step (2.1)"))
    return checks


def run_gates(args: argparse.Namespace) -> int:
    """Print each gate; 0 if all passed."""
    policies = args.policies or ["round-robin", "least-request", "gie", "cache-aware", OURS]
    keys = CELLS["b2b ladder"].scenario(policies, args.seeds or 1, short=False, trace=None)
    chosen = {"b2b ladder": Scenario.model_validate(keys)}
    results = execute(plan(chosen), args.processes)
    checks = gates({name: Comparison(chosen[name], found) for name, found in results.items()})
    for passed, text in checks:
        print(f"{'pass' if passed else 'FAIL'}  {text}")
    return 0 if all(passed for passed, _ in checks) else 1


# Robustness

ROBUST_POLICIES = [OURS, "gie", "llm-d"]
ABOUT_ROBUSTNESS = """mean TTFT, beside the
undisturbed with a 95 % bootstrap interval (paired over seeds), and goodput. As it is: sizes wrong by up to 15 %, gauges
every 0.2 s and 5 ms old. No gauges: balancers that begin knowing nothing, or nothing but the size of each cache.
"""


def run_robustness(args: argparse.Namespace) -> int:
    """A table of every disturbed cell against the same one undisturbed. Goes on where it was stopped."""
    policies = args.policies or ROBUST_POLICIES
    seeds = args.seeds or FULL_SEEDS
    runner = _runner(args, "robustness")
    found: dict[tuple[str, str, str], list[Found]] = {}
    for seed in range(1, seeds + 1):
        for name, variants in ROBUSTNESS.items():
            for (how, cell), policy in product(variants.items(), policies):
                found.setdefault((name, how, policy), []).append(runner.run(f"{name}, {how}", cell, policy, seed))
    rows = [["cell", "what is wrong", *(f"{policy}: TTFT, goodput" for policy in policies)]]
    for name, variants in ROBUSTNESS.items():
        for how in variants:
            row = [name, how]
            for policy in policies:
                now, before = found[name, how, policy], found[name, next(iter(variants)), policy]
                against = shown(ratio(now, before, "ttft_mean")) if now is not before else "1x"
                row.append(f"{mean(now, 'ttft_mean'):.3g} s ({against}), {mean(now, 'goodput'):.2f}")
            rows.append(row)
    title = (
        f"`python -m benchmarks.routing --robustness`, lbproxy {__version__}, mean of {seeds} seeds: {ABOUT_ROBUSTNESS}"
    )
    text = f"# What wrong sizes and late gauges cost\n\n{title}\n{_table(rows)}"
    (HERE / "ROBUSTNESS.md").write_text(text, "utf-8")
    print(text)
    return 0


# Adapters

BLIND = f"{OURS}, affinity off"
LORA_POLICIES: dict[str, tuple[object, bool]] = {
    "least-request": ("least-request", True),
    "gie, true adapter sets": (GIE_LORA, True),
    BLIND: (OURS, False),
    OURS: (OURS, True),
}
"""By the table's name: the policy, and whether it is told which models are adapters."""
LORA_ABOUT = """15 adapters, of which five get
60 % of the requests, five 30 % and five 10 %. Loading one holds up the server: 0.3 to 1 s the first time, 10 to 30 ms
after that."""
LORA_LEGEND = f"""*times*: as much as with {OURS}. *affinity off*: {OURS}, not told which models are adapters. *true
adapter sets*: the endpoint picker's scorers, which read what is loaded."""


def run_lora(args: argparse.Namespace) -> int:
    """How often adapters are loaded, how soon requests begin, and how much better that is with `OURS`."""
    seeds = args.seeds or FULL_SEEDS
    chosen = {
        f"{name}|{policy}": Scenario.model_validate(
            {**cell.scenario([rule], seeds, short=False, trace=None), "adapters_known": known}
        )
        for name, cell in LORA.items()
        for policy, (rule, known) in LORA_POLICIES.items()
    }
    capacity = LORA_CAPACITY.scenario(["least-request"], 1, short=False, trace=None)
    chosen["capacity"] = Scenario.model_validate(capacity)
    found = {
        name: [result.summary for runs in results.values() for result in runs]
        for name, results in execute(plan(chosen), args.processes).items()
    }
    tokens_s = _mean(found.pop("capacity"), "output_tokens_s")
    limit = tokens_s / 1.08 / 170
    text = (
        f"`python -m benchmarks.routing --lora`, lbproxy {__version__}, mean of {seeds} seeds. {LORA_ABOUT} Eight\n"
        f"servers make {tokens_s:,.0f} tokens a second without adapters, {limit:.0f} requests a second with four in a "
        f"step: 90 are {90 / limit:.0%}.\n{LORA_LEGEND}\n"
    )
    parts = [f"# LoRA adapters, simulated\n\n{text}"]
    parts += [
        f"\n## {name}\n\n" + _adapter_table({policy: found[f"{name}|{policy}"] for policy in LORA_POLICIES})
        for name in LORA
    ]
    (HERE / "LORA.md").write_text("".join(parts), "utf-8")
    print("".join(parts))
    return 0


def _adapter_table(runs: Mapping[str, Sequence[Summary]]) -> str:
    """A row for each policy, with factors."""
    figures = {"adapter_loads": ".1f", "ttft_p50": ".3f", "ttft_p90": ".3f", "ttft_mean": ".3f"}
    heads = ["loads per 1,000", "TTFT p50 s", "TTFT p90 s", "TTFT mean s"]
    rows = [["policy", *(text for head in heads for text in (head, "times")), "tokens/s", "goodput"]]
    for policy, found in runs.items():
        row = [policy]
        for figure, form in figures.items():
            value, ours = _mean(found, figure), _mean(runs[OURS], figure)
            row += [format(value, form), f"{value / ours:.1f}" if ours else "-"]
        rows.append([*row, f"{_mean(found, 'output_tokens_s'):.0f}", f"{_mean(found, 'goodput'):.2f}"])
    return _table(rows)


# Coding agents


def run_agents(args: argparse.Namespace) -> int:
    """Cell by cell, what is not kept yet; then the page, unless some cells or policies were named. A policy counts that
    has all seeds.
    """
    policies = args.policies or [OURS, *(name for name in POLICIES if name not in {OURS, "weighted"})]
    seeds = range(1, 1 + (args.seeds or AGENT_SEEDS))
    runner = _runner(args, "agents")
    chosen = {name: cell for name, cell in AGENTS.items() if any(word in name for word in args.cells or [""])}
    if not args.render:
        for (name, cell), seed, policy in product(chosen.items(), seeds, policies):
            runner.run(name, cell, policy, seed)
    found: dict[str, dict[str, list[Summary]]] = {}
    for (name, cell), policy in product(chosen.items(), policies):
        runs = [kept for seed in seeds if (kept := runner.kept(name, cell, policy, seed)) is not None]
        if len(runs) == len(seeds):
            found.setdefault(name, {})[policy] = [run.summary for run in runs]
    text = agents.page(found, len(seeds))
    if not (args.cells or args.policies):
        AGENTS_PAGE.write_virtual(text)
    print(text)
    return 0


# Published traffic


def run_published(args: argparse.Namespace) -> int:
    """PUBLISHED.md, of what is not kept yet and what is."""
    policies, seeds = args.policies or SHORT_POLICIES, args.seeds or SHORT_SEEDS
    runner = _runner(args, "published")
    found: dict[str, dict[str, list[Summary]]] = {}
    for (name, cell), seed, policy in product(PUBLISHED.items(), range(1, seeds + 1), policies):
        summary = runner.run(name, cell, policy, seed).summary
        found.setdefault(name, {}).setdefault(policy, []).append(summary)
    title = f"`python -m benchmarks.routing --published`, lbproxy {__version__}, {seeds} seeds a cell."
    tables = [Table(name, PUBLISHED[name], runs) for name, runs in found.items()]
    PUBLISHED_PAGE.write_virtual(_page("Published traffic, simulated", title, tables))
    print(against_best(tables))
    return 0


# Targets


def run_targets(args: argparse.Namespace) -> int:
    """All runs that are not kept yet, then the page."""
    runner = _runner(args, "targets")
    parts, seeds = chosen_parts(args.cells), args.seeds or FULL_SEEDS
    if not args.render:
        run_parts(parts, runner, seeds)
    text = page(found_of(parts, runner, seeds), seeds=seeds, replays=_replays(args))
    print(text)
    if not args.cells:
        (HERE / "TARGETS.md").write_text(text, "utf-8")
    return 0


def _runner(args: argparse.Namespace, name: str) -> Runner:
    """Runs kept in the file of that name."""
    (HERE / "results").mkdir(exist_ok=True)
    traces = {"mooncake": args.mooncake, "azure": args.azure}
    kept = Kept(HERE / "results" / f"{name}.json")
    return Runner(kept, traces, lambda line: print(time.strftime("%T"), line, file=sys.stderr, flush=True))


def _replays(args: argparse.Namespace) -> str:
    """What stands for the traces."""
    stand_ins = [name for name in ("mooncake", "azure") if getattr(args, name) is None]
    return f"stand-ins instead of the traces of {' and '.join(stand_ins)}" if stand_ins else "the published traces"


# The command


def write(tables: Sequence[Table], args: argparse.Namespace, *, cpu_s: float) -> None:
    """ROUTING.md."""
    seeds = max(len(runs) for table in tables for runs in table.runs.values())
    traces = _replays(args)
    command = f"python -m benchmarks.routing{' --short' if args.short else ''}"
    title = f"`{command}`, lbproxy {__version__}, {seeds} seeds a cell, {traces};"
    title += f" {cpu_s / 60:.0f} minutes of CPU."
    (HERE / "ROUTING.md").write_text(_page("Routing, simulated", title, tables), "utf-8")


def _page(name: str, title: str, tables: Sequence[Table]) -> str:
    title += "\nTTFT against the first policy: paired over seeds, 95 % bootstrap interval."
    parts = [f"# {name}\n\n{title}\n\n## {OURS} against the best baseline of each cell\n\n", against_best(tables)]
    parts += [f"\n## {table.name}\n\n{_described(table.cell)}\n\n{markdown(table.runs)}" for table in tables]
    return "".join(parts)


def _described(cell: Cell) -> str:
    parameters = ", ".join(f"{key} {value:g}" for key, value in cell.parameters.items())
    servers = cell.servers if cell.speeds is None else " + ".join(f"{n} at {s:g}x" for s, n in cell.speeds.items())
    more = ", ".join(f"{key} {value}" for key, value in cell.more.items())
    return (
        f"`{cell.workload}`{f' ({parameters})' if parameters else ''}, {servers} servers{f', {more}' if more else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description="Policies on simulated fleets.")
    parser.add_argument("--short", action="store_true", help="fewer cells, policies and seeds, and shorter")
    parser.add_argument("--gates", action="store_true", help="the acceptance of the fleet simulation instead")
    parser.add_argument("--robustness", action="store_true", help="some cells with wrong sizes and late gauges instead")
    parser.add_argument("--lora", action="store_true", help="what affinity to adapters is worth instead")
    parser.add_argument("--agents", action="store_true", help="coding agents instead, for AGENTS.md")
    parser.add_argument("--published", action="store_true", help="traffic that other services published instead")
    parser.add_argument("--targets", action="store_true", help="what routing has to reach, in one process")
    parser.add_argument(
        "--render", action="store_true", help="with --targets or --agents: the page of the runs that there are"
    )
    parser.add_argument(
        "--cells", nargs="+", metavar="WORD", help="only cells with one of these in their names; writes nothing"
    )
    parser.add_argument("--policies", nargs="+", metavar="NAME", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--seeds", type=int, metavar="N")
    parser.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--azure", metavar="FILE", help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    args = parser.parse_args()
    if args.gates:
        return run_gates(args)
    if args.targets:
        return run_targets(args)
    if args.robustness:
        return run_robustness(args)
    if args.lora:
        return run_lora(args)
    if args.agents:
        return run_agents(args)
    if args.published:
        return run_published(args)
    chosen = scenarios(args)
    if not chosen:
        parser.error("no cell has such a name")
    results = execute(plan(chosen), args.processes)
    tables = [
        Table(name, CELLS[name], {policy: [r.summary for r in found] for policy, found in results[name].items()})
        for name in chosen
    ]
    if args.cells:
        print("\n".join(f"{table.name}\n\n{markdown(table.runs)}" for table in tables))
    else:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        write(tables, args, cpu_s=sum(one.ru_utime + one.ru_stime for one in used))
    print(against_best(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
