# SPDX-License-Identifier: Apache-2.0
"""Routing by several lbproxies over HTTP, beside one that gets all: `python -m benchmarks.replicas_http routing`.

Servers, client and measures are those of `benchmarks.http_routing`; the lbproxies are processes that accept on one port
(`http_routing.several`), with a redis-server or valkey-server to share over, or without. The kernel gives each
connection, of which each request has its own, to one of them. A seed's arrivals are the same for all, and some runs of
a seed go on side by side, so that what else the machine does is done to all alike. Each is simulated, too.

Runs are kept in .bench/http-replicas.jsonl; `--write` makes `results/replicas-http.json` and the last part of
REPLICAS.md of them. An interruption ends it after the runs in progress.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmarks.http_routing import trial
from benchmarks.http_routing.__main__ import prepare
from benchmarks.http_routing.cells import CELLS
from benchmarks.http_routing.results import Row, Source, believed, read, row_of, simulated, summary
from benchmarks.http_routing.routers import OURS, SEVERAL, STORES
from benchmarks.http_routing.runs import measure
from benchmarks.http_routing.trial import Task
from benchmarks.overhead.load import BENCH
from benchmarks.overhead.plan import machine
from lbproxy import __version__
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.processes.process import is_compiled
from lbproxy.sim.figures.report import Estimate, Summary, as_table, estimate
from lbproxy.sim.workloads.traces import read_mooncake

HERE = Path(__file__).parent
PAGE = HERE / "REPLICAS.md"
RESULTS = HERE / "results" / "replicas-http.json"
STORE = BENCH / "http-replicas.jsonl"
HEADING = "## Over HTTP"
SEEDS = 3
AT_A_TIME = 5
MAX_LATE_S = 0.01
"""How late a client's clock may tick, at the 99th percentile, in a run that counts. How late the servers' tokens leave
is shown and not limited: that figure is of a minute, which here holds the start of all clients and routers at once.
`http_routing`, where a run has the machine, allows 5 ms each.
"""
ROUTED = ("b2b", "mooncake, x1.5")


def names(stores: Sequence[str]) -> list[str]:
    """What is measured: one lbproxy, then several, shared over these stores and unshared."""
    return [OURS, *(one.name for one in SEVERAL if one.store is None or one.store in stores)]


# Running


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--cells", nargs="+", metavar="NAME", choices=ROUTED, default=ROUTED, help=", ".join(ROUTED))
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES[:1], help="what to share over")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation_trace.jsonl; else a stand-in")
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME, metavar="N", help="runs side by side, of a seed")
    parser.add_argument("--resume", action="store_true", help="keep what earlier runs have measured")
    parser.add_argument("--render", action="store_true", help="measure nothing: the tables of what there is")
    parser.add_argument("--write", action="store_true", help="write results and the last part of REPLICAS.md")


def main(args: argparse.Namespace) -> int:
    """Measure what is asked for, and print or write the tables of all that there is."""
    rows = None if args.mooncake is None else tuple(read_mooncake(Path(args.mooncake).read_text().splitlines()))
    source = Source(rows, short=False)
    if not args.render:
        absent = [one for one in args.stores if shutil.which(one) is None]
        if absent:
            raise SystemExit(f"no {' and no '.join(absent)} on the path: make test-tools")
        prepare()
        if not args.resume:
            STORE.unlink(missing_ok=True)
        tasks = [
            Task(cell, seed, name)
            for seed in range(1, args.seeds + 1)
            for cell in args.cells
            for name in names(args.stores)
        ]
        measure(tasks, partial(run, trace=args.mooncake, source=source), STORE, at_a_time=args.at_a_time)
    data = results(judged(read(STORE)), source, trace=args.mooncake is not None, at_a_time=args.at_a_time)
    text = rendered(data)
    print(text)
    if args.write:
        RESULTS.write_bytes(data)
        PAGE.write_text(with_part(PAGE.read_text("utf-8"), text), "utf-8")
    return 0


def run(task: Task, number: int = 0, *, trace: str | None, source: Source) -> Row:
    """Do one; all that run side by side have the same cores. Raises TrialError, StartError."""
    (row,) = judged([row_of(trial.run(task, short=False, trace=trace), source)])
    return row


def judged(rows: Sequence[Row]) -> list[Row]:
    """These, each rejected if its client was too late for this benchmark."""
    return [
        {
            **row,
            "rejected": f"client {1000 * late_s:.1f} ms late" if (late_s := row["client_lag_s"]) > MAX_LATE_S else None,
        }
        for row in rows
    ]


# What is kept


def results(rows: Sequence[Row], source: Source, *, trace: bool, at_a_time: int) -> bytes:
    """All that the tables are made of, as JSON: the runs that are believed, and the same in virtual time."""
    found = believed(rows)
    cells: dict[str, dict[str, Any]] = {}
    for cell in (one for one in ROUTED if one in found):
        of_cell = found[cell]
        cells[cell] = {
            name: {
                "runs": [of_cell[name][seed] for seed in sorted(of_cell[name])],
                "virtual": [asdict(_virtual(cell, seed, name, source)) for seed in sorted(of_cell[name])],
            }
            for name in names(STORES)
            if name in of_cell
        }
    late = sum(row["rejected"] is not None for row in rows)
    about = {"lbproxy": __version__, "compiled": is_compiled(), "machine": machine(), "trace": trace}
    about |= {"stores": _versions(), "at_a_time": at_a_time, "late": late}
    return orjson.dumps({"about": about, "cells": cells})


def _virtual(cell: str, seed: int, name: str, source: Source) -> Summary:
    """With stores that differ, the same."""
    keys: dict[str, object] = {}
    for one in SEVERAL:
        if one.name == name:
            interval_s = ReplicasSettings().interval
            keys = {"balancers": one.count, "exchange": None if one.store is None else {"interval": interval_s}}
    return simulated(cell, seed, "adaptive", source, keys)


def _versions() -> dict[str, str]:
    """Of the stores that are installed."""
    found = {}
    for program in filter(shutil.which, STORES):
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"\bv=(\S+)", said)
        found[program] = version[1] if version else "unknown"
    return found


# The page's part


@dataclass(frozen=True, slots=True)
class Runs:
    """Of one row of a table, in the order of seeds."""

    name: str
    rows: list[Row]
    virtual: list[Summary]

    def of(self, figure: str) -> float:
        """The mean over seeds."""
        return fmean(row["summary"][figure] for row in self.rows)

    def hits(self) -> float:
        """As the servers report in each response, without the warm-up."""
        return fmean(row["usage_hit_ratio"] for row in self.rows)

    def share_of_core(self, *figures: str) -> float:
        """Of the time of a run, over which figures in CPU seconds are added."""
        return fmean(sum(row[figure] for figure in figures) / row["seconds"] for row in self.rows)  # type: ignore[literal-required]


def against(runs: Runs, one: Runs) -> tuple[Estimate, Estimate]:
    """Mean TTFT over that of one lbproxy, seed by seed: over HTTP and in virtual time, of the seeds that both have."""
    base = {row["seed"]: (row, virtual) for row, virtual in zip(one.rows, one.virtual, strict=True)}
    both = [(row, virtual, *base[row["seed"]]) for row, virtual in zip(runs.rows, runs.virtual, strict=True)]
    assert all(row["digest"] == other["digest"] for row, _, other, _ in both), "all are asked the same"
    real = [row["summary"]["ttft_mean"] / other["summary"]["ttft_mean"] for row, _, other, _ in both]
    return estimate(real), estimate([mine.ttft_mean / theirs.ttft_mean for _, mine, _, theirs in both])


def rendered(data: bytes) -> str:
    """The last part of REPLICAS.md, of the results."""
    found = orjson.loads(data)
    about = found["about"]
    cells = {
        cell: [Runs(name, its["runs"], [summary(one) for one in its["virtual"]]) for name, its in of_cell.items()]
        for cell, of_cell in found["cells"].items()
    }
    parts = [f"{HEADING}\n\n{_about(about)}"]
    for cell, runs in cells.items():
        title = f"### {cell}\n\n{CELLS[cell].title}; {CELLS[cell].servers} servers."
        parts.append(f"{title}\n\n{routing_table(runs)}\n{load_table(runs)}")
    return "\n".join(parts)


def _about(about: Mapping[str, Any]) -> str:
    trace = "its published trace" if about["trace"] else "rows with the statistics of its trace"
    option = " --mooncake FILE" if about["trace"] else ""
    stores = " or ".join(f"{name} {version}" for name, version in about["stores"].items())
    return (
        f"`python -m benchmarks.replicas_http routing{option} --write`, lbproxy "
        f"{about['lbproxy']}{', compiled' if about['compiled'] else ', as Python'}, {about['machine']}.\n"
        f"Each request reaches one of the lbproxies at random; those that share do so over a {stores} of their own,\n"
        f"every {1000 * ReplicasSettings().interval:.0f} ms. Servers and client: [routing over HTTP]"
        f"(../docs/benchmarks.md#routing-over-http); Mooncake: {trace}. Ratios are means over\nseeds, with 95 % "
        "intervals; *in virtual time*: of a simulation of the same arrivals.\n\n"
        f"{about['at_a_time']} runs of a seed go on side by side on two cores. *CPU* is of one run, in percent of "
        "a core; *late* how late tokens left the\nservers, and the client's clock ticked (99th percentiles). Runs "
        f"whose client was over {1000 * MAX_LATE_S:.0f} ms late were repeated: {about['late']}.\nRows of fewer seeds "
        "ran beside fewer others, which favours them.\n"
    )


def routing_table(cell: Sequence[Runs]) -> str:
    """A row for one lbproxy and for each way to have several."""
    (one,) = [runs for runs in cell if runs.name == OURS]
    rows = []
    for runs in cell:
        real, virtual = against(runs, one)
        alone = runs is one
        interval = "" if alone or len(runs.rows) < 2 else f" [{real.low:.2f}, {real.high:.2f}]"
        rows.append(
            [
                shown(runs.name),
                str(len(runs.rows)),
                f"{runs.of('ttft_mean'):.3f}",
                f"{real.mean:.2f}x{interval}",
                f"{virtual.mean:.2f}x",
                f"{runs.of('ttft_p99'):.2f}",
                f"{runs.hits():.3f}",
                f"{sum(row['summary']['failed'] for row in runs.rows):.0f}",
            ]
        )
    heads = ["lbproxies", "seeds", "TTFT mean, s", "of one lbproxy", "in virtual time", "p99, s", "hit ratio", "failed"]
    return as_table(heads, rows)


def load_table(cell: Sequence[Runs]) -> str:
    """What each row's runs took of the machine, and how requests fell to the lbproxies."""
    rows = []
    for runs in cell:
        least, most = (fmean(pick(row["shares"]) / sum(row["shares"]) for row in runs.rows) for pick in (min, max))
        late = [max(row[who] for row in runs.rows) for who in ("server_lag_s", "client_lag_s")]
        rows.append(
            [
                shown(runs.name),
                f"{100 * least:.0f} to {100 * most:.0f}",
                f"{100 * runs.share_of_core('router_cpu_s'):.1f}",
                f"{100 * runs.share_of_core('servers_cpu_s', 'client_cpu_s'):.1f}",
                " / ".join(f"{1000 * one:.1f}" for one in late),
            ]
        )
    heads = ["lbproxies", "requests at each, %", "their CPU, %", "CPU of servers and client, %", "late, ms"]
    return as_table(heads, rows)


def shown(name: str) -> str:
    """A router's name as a row has it."""
    if name == OURS:
        return "one"
    (several,) = [one for one in SEVERAL if one.name == name]
    return f"{several.count}, {several.store or 'unshared'}"


def with_part(page: str, part: str) -> str:
    """A page with this as its last part."""
    return f"{without_part(page)}\n\n{part}"


def without_part(page: str) -> str:
    """What is before it."""
    return page.partition(HEADING)[0].rstrip()


def part_of(page: str) -> str:
    """The part, to be kept by who writes the rest; empty: there is none."""
    _, heading, rest = page.partition(HEADING)
    return f"\n{heading}{rest}" if heading else ""
