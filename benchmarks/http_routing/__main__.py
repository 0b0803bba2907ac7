# SPDX-License-Identifier: Apache-2.0
"""The command line: see `python -m benchmarks.http_routing --help` and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import orjson

from benchmarks import http_routing
from benchmarks.http_routing import trial
from benchmarks.http_routing.cells import CELLS, GROUPS
from benchmarks.http_routing.pages import CellRuns, comparable, page, picture
from benchmarks.http_routing.results import Row, Source, believed, read, row_of, simulated
from benchmarks.http_routing.routers import OURS, Router, routers
from benchmarks.http_routing.runs import ATTEMPTS, measure, order
from benchmarks.http_routing.trial import MAX_LAG_S, Task
from benchmarks.overhead.load import BENCH, ROOT
from benchmarks.overhead.plan import machine
from benchmarks.overhead.process import LOAD_CORE
from lbproxy import __version__
from lbproxy.sim.figures.plots import can_plot
from lbproxy.sim.figures.report import Summary
from lbproxy.sim.workloads.traces import read_mooncake

PAGE = ROOT / "benchmarks/ROUTING_HTTP.md"
RESULTS = ROOT / "benchmarks/results"
SHORT_SEEDS, FULL_SEEDS = 1, 5
OPEN_FILES = 8192


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_routing",
        description=http_routing.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="at most 10 minutes: fewer routers, one seed, shorter")
    parser.add_argument("--cells", nargs="+", metavar="NAME", choices=CELLS, help=f"of {', '.join(CELLS)}")
    parser.add_argument("--group", choices=GROUPS, help="cells that have a page of their own: by default, routing's")
    parser.add_argument("--routers", nargs="+", metavar="WORD", help="only those with one of these in their names")
    parser.add_argument("--seeds", type=int, metavar="N")
    parser.add_argument("--at-a-time", type=int, default=1, metavar="N", help="runs side by side, of a cell and seed")
    late = f"the 99th percentile that a run may have; by default {1000 * MAX_LAG_S:.0f}"
    parser.add_argument("--max-late", type=float, default=1000 * MAX_LAG_S, metavar="MS", help=late)
    parser.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation_trace.jsonl; else a stand-in")
    parser.add_argument("--resume", action="store_true", help="keep what earlier runs of this form have measured")
    parser.add_argument("--render", action="store_true", help="measure nothing: the page, of what there is")
    parser.add_argument("--write", action="store_true", help="write page and results even if cells or routers are few")
    parser.add_argument("--keep-late", action="store_true", help="debugging: count runs that should be rejected")
    return parser


def prepare() -> None:
    """Check what cannot be done without, and give this process and its children room. May end the program."""
    if shutil.which("taskset") is None:
        raise SystemExit("needs taskset: apt-get install util-linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores: one for the router, one for servers and client")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    for number in (signal.SIGTERM, signal.SIGINT):
        # As an exception, so that whatever runs is ended. SIGINT too: a shell's background job would ignore it.
        signal.signal(number, lambda *_: sys.exit("interrupted; --resume goes on from here"))


def chosen(args: argparse.Namespace) -> tuple[list[str], list[Router]]:
    """Cells and routers; of the latter those that are not installed, too."""
    groups = {CELLS[name].group for name in args.cells or ()} | ({args.group} - {None})
    if len(groups) > 1:
        raise SystemExit(f"each of {', '.join(sorted(groups))} has a page of its own: name cells of one only")
    (args.group,) = groups or {"routing"}
    of_group = [cell for cell in CELLS.items() if cell[1].group == args.group]
    cells = args.cells or [name for name, cell in of_group if (cell.in_short if args.short else cell.in_full)]
    some = [
        router
        for router in routers([])
        if (
            any(word in router.name for word in args.routers)
            if args.routers
            else router.in_short or (router.in_full and not args.short)
        )
    ]
    if not some:
        raise SystemExit(f"no router has such a name: {', '.join(router.name for router in routers([]))}")
    return cells, some


def run(args: argparse.Namespace, source: Source, task: Task, number: int) -> Row:
    """Do one, of those side by side the one with this number. Raises TrialError, StartError."""
    done = trial.run(task, short=args.short, trace=args.mooncake, swapped=number % 2 == 1)
    row = row_of(done, source, args.max_late / 1000)
    if args.keep_late:
        row["rejected"] = None
    return row


def report(cells: Sequence[CellRuns], args: argparse.Namespace, there: Sequence[Router], outside: Sequence[str]) -> str:
    """The page."""
    trace = "the published Mooncake trace" if args.mooncake else "a stand-in for the Mooncake trace"
    own = GROUPS[args.group]
    command = (
        f"python -m benchmarks.http_routing{f' --group {args.group}' * (own is not None)}{' --short' * args.short}"
    )
    asked = f", {trace}" if own is None else ""
    about = [
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {machine()}, lbproxy {__version__}{asked}.",
        "Hits are of the servers' counters; intervals are 95 %, paired over seeds.",
        f"Without runs whose servers or client were more than {args.max_late:g} ms late (99th percentile).",
        *([f"Up to {args.at_a_time} routers at a time, on two cores."] if args.at_a_time > 1 else []),
        "",
        *(
            f"- {router.name} {_version(router)}: {router.subject.note}"
            for router in there
            if any(router.name in cell.runs for cell in cells)
        ),
    ]
    return page(cells, about, outside, *([] if own is None else [f"# {own.over_http}"]))


def _version(router: Router) -> str:
    return router.subject.version() if router.name != OURS else __version__


def write(cells: Sequence[CellRuns], text: str, form: str, group: str) -> None:
    own = GROUPS[group]
    if own is not None:
        own.write_over_http(text)
        return
    RESULTS.mkdir(exist_ok=True)
    data = {cell.name: {router: list(map(asdict, runs)) for router, runs in cell.summaries().items()} for cell in cells}
    (RESULTS / f"routing-http-{form}.json").write_bytes(orjson.dumps(data))  # for the README
    if can_plot():
        for cell in cells:
            name = cell.name.replace(", ", "-")
            (RESULTS / f"routing-http-{name}.png").write_bytes(picture(cell))
            text += f"\n![{cell.name}](results/routing-http-{name}.png)\n"
    else:
        print("no pictures: they need matplotlib (pip install '.[plots]')", file=sys.stderr)
    PAGE.write_text(text, "utf-8")


def simulate(
    source: Source, policies: dict[str, str | None], cell: str, router: str, seeds: Sequence[int]
) -> list[Summary] | None:
    policy = policies[router]
    return None if policy is None else [simulated(cell, seed, policy, source) for seed in seeds]


def main() -> None:
    args = options().parse_args()
    cells, some = chosen(args)
    missing = [f"{router.name}: {why}" for router in some if (why := router.subject.missing())]
    there = [router for router in some if router.subject.missing() is None]
    names = [router.name for router in there]
    form = "short" if args.short else "full"
    store = BENCH / f"http-{args.group}-{form}.jsonl"
    rows = None if args.mooncake is None else tuple(read_mooncake(Path(args.mooncake).read_text().splitlines()))
    source = Source(rows, args.short)
    failed: list[str] = []
    if not args.render:
        prepare()
        if not args.resume:
            store.unlink(missing_ok=True)
        tasks = order(cells, args.seeds or (SHORT_SEEDS if args.short else FULL_SEEDS), names)
        attempts = 1 if args.short else ATTEMPTS  # the short form promises its time
        failed = measure(tasks, partial(run, args, source), store, at_a_time=args.at_a_time, attempts=attempts)
    policies = {router.name: router.simulated for router in there}
    found = comparable(believed(read(store)), names, partial(simulate, source, policies))
    text = report(found, args, there, [*missing, *failed])
    print(text)
    if args.write or not (args.cells or args.routers or args.seeds or args.keep_late):
        write(found, text, form, args.group)


if __name__ == "__main__":
    main()
