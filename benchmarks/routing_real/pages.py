# SPDX-License-Identifier: Apache-2.0
"""Tables of the runs: `benchmarks/ROUTING_REAL.md`. Figures are medians over rounds, with 95 % bootstrap intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TypedDict

from benchmarks.http_routing.pages import table
from benchmarks.http_routing.routers import OURS
from benchmarks.routing_real.cells import CELLS
from benchmarks.routing_real.results import MAX_WAITING, Row, believed, comparable
from benchmarks.routing_real.servers import ON_CPU, ON_GPU, SERVERS
from lbproxy.sim.figures.report import RESAMPLES, Estimate, percentile

METHOD = """\
`{command}`, {date}, {machine}, vLLM {vllm} on {where}: {runs} runs in {minutes:.0f} minutes.

{servers} vLLM servers with a random model of {shape}: {slots} slots, a prefix cache of {tokens:,} tokens (blocks of
{block}), {step} tokens of prompts in a step. Within a round routers take turns, each started anew on empty caches, with
the same recorded sessions in a closed loop. Hits are the engines'. Figures are medians of the rounds, with 95 %
bootstrap intervals. Of two servers a random choice finds the right one every second time.

"""
TWO_CORES = """\
**Two cores run everything**: the servers used {least:.0%} to {most:.0%} of them, and what a router uses is taken from
them. Runs in which more than {waiting:g} of their threads waited for a core on average were done again.
"""
ONE_GPU = """\
**The servers share one GPU**, so that the work which a hit saves one of them is time for both.
"""
Figure = Callable[[Row], float]
JUDGED: dict[str, tuple[str, int]] = {
    "ttft_mean": ("TTFT mean", -1),
    "ttft_p90": ("TTFT p90", -1),
    "e2e_mean": ("E2E mean", -1),
    "hit_ratio": ("hits", 1),
}
"""Figure: its heading, and whether more (1) or less (-1) of it is better."""


class Stored(TypedDict):
    """What `benchmarks/results/routing-real.json` and `routing-gpu.json` hold."""

    gpu: str | None
    vllm: str
    """Its version."""
    date: str
    machine: str
    versions: list[str]
    """A line for each router."""
    outside: list[str]
    """Who is not in the tables, and why."""
    runs: list[Row]


def medians(values: Sequence[float]) -> Estimate:
    """Their median, and where it would lie in other rounds: a bootstrap, the same in every process."""
    if len(values) < 2:
        return Estimate(values[0], values[0], values[0])
    rng = random.Random(f"{len(values)}:bootstrap")
    found = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Estimate(median(values), percentile(found, 2.5), percentile(found, 97.5))


def of(figure: str) -> Figure:
    """A figure of a run's summary."""
    return lambda row: row["summary"][figure]


def of_kind(kind: str, figure: str) -> Figure:
    """A figure of one kind of users."""
    return lambda row: row["kinds"][kind][figure]


def per_request(row: Row, cpu_s: float) -> float:
    """Milliseconds for each request. CPU is of the whole replay, and so are requests, roughly: by time."""
    cell = CELLS[row["cell"]]
    counted = (cell.duration_s - cell.warm_up_s) / cell.duration_s
    return 1000 * cpu_s * counted / max(1, row["summary"]["requests"])


def shown(values: Sequence[float], form: str) -> str:
    """A median with its interval."""
    found = medians(values)
    interval = f" [{found.low:{form}}, {found.high:{form}}]" if len(values) > 1 else ""
    return f"{found.mean:{form}}{interval}"


def ratio(runs: Sequence[Row], base: Sequence[Row], figure: Figure) -> Estimate | None:
    """Of a figure to the same of other runs, round by round; None if it is 0 there."""
    below = [figure(row) for row in base]
    return medians([figure(row) / one for row, one in zip(runs, below, strict=True)]) if all(below) else None


def page(stored: Stored) -> str:
    """All of it."""
    rows = stored["runs"]
    cells = {name: comparable(found) for name in CELLS if (found := believed(rows).get(name))}
    parts = ["# Routing, before real engines\n", *about(stored)]
    parts += ["\n## lbproxy against the best other router of each figure\n", against_best(cells)]
    parts.append("Medians of the rounds' ratios. Below 1 is better; of hits, above 1.")
    for name, runs in cells.items():
        rounds = len(next(iter(runs.values())))
        parts.append(f"\n## {name}\n\n{CELLS[name].title}; {rounds} rounds.\n")
        parts += [times(runs), "\nWhere time and work went:\n", work(runs)]
        if len(CELLS[name].kinds) > 1:
            parts += ["\nBy kind of user:\n", kinds(name, runs)]
    parts.append("\n## Not in the tables\n\n" + "\n".join(f"- {line}" for line in stored["outside"]))
    return "\n".join(parts) + "\n"


def about(stored: Stored) -> list[str]:
    """How the figures came about."""
    rows = stored["runs"]
    busy = sorted(row["servers_cpu_s"] / SERVERS / row["seconds"] for row in rows) or [0.0]
    minutes = sum(row["seconds"] for row in rows) / 60
    gpu, size = stored["gpu"], ON_GPU if stored["gpu"] else ON_CPU
    method = METHOD.format(
        command="python -m benchmarks.routing_real --gpu VLLM" if gpu else "make bench-routing-real",
        vllm=stored["vllm"],
        where=f"one {gpu}" if gpu else "CPU",
        shape="24 of Llama 3 8B's layers" if gpu else "six layers",
        date=stored["date"],
        machine=stored["machine"],
        runs=len(rows),
        minutes=minutes,
        servers=SERVERS,
        slots=size.slots,
        tokens=size.blocks * size.block_tokens,
        block=size.block_tokens,
        step=size.step_tokens,
    )
    return [
        method + (ONE_GPU if gpu else TWO_CORES.format(least=busy[0], most=busy[-1], waiting=MAX_WAITING)),
        *(f"- {line}" for line in stored["versions"]),
    ]


def against_best(cells: Mapping[str, Mapping[str, Sequence[Row]]]) -> str:
    """Ours beside the best other, figure by figure."""
    rows = [["cell", *(f"{heading} (best other)" for heading, _ in JUDGED.values())]]
    for name, runs in cells.items():
        others = [router for router in runs if router != OURS]
        if OURS in runs and others:
            rows.append([name, *(_judged(runs, others, figure) for figure in JUDGED)])
    return table(rows)


def _judged(runs: Mapping[str, Sequence[Row]], others: Sequence[str], figure: str) -> str:
    sign = JUDGED[figure][1]
    best = max(others, key=lambda name: sign * median(map(of(figure), runs[name])))
    found = ratio(runs[OURS], runs[best], of(figure))
    return "" if found is None else f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}] ({best})"


def times(runs: Mapping[str, Sequence[Row]]) -> str:
    """What clients see, and hits: a line for each router."""
    columns = {"TTFT mean s": "ttft_mean", "p50": "ttft_p50", "p90": "ttft_p90", "E2E mean s": "e2e_mean"}
    rows = [["router", *columns, "hits", "requests", "failed", f"TTFT against {OURS}", "E2E against it"]]
    for router, of_router in runs.items():
        ours = runs.get(OURS, of_router)
        against = [ratio(of_router, ours, of(figure)) for figure in ("ttft_mean", "e2e_mean")]
        rows.append(
            [
                router,
                *(shown([of(figure)(row) for row in of_router], ".2f") for figure in columns.values()),
                shown([of("hit_ratio")(row) for row in of_router], ".2f"),
                f"{sum(row['summary']['requests'] for row in of_router):.0f}",
                f"{sum(sum(row['failures'].values()) for row in of_router)}",
                *(
                    "" if of_router is ours or one is None else f"{one.mean:.2f}x [{one.low:.2f}, {one.high:.2f}]"
                    for one in against
                ),
            ]
        )
    return table(rows)


def work(runs: Mapping[str, Sequence[Row]]) -> str:
    """Who used the two cores, and how evenly the servers were used."""
    heads = [
        "router",
        "servers busy",
        "router CPU ms a request",
        "of the servers' CPU",
        "busiest server",
        "hits by server",
    ]
    rows = [[*heads, "preemptions", "other work, cores", "client late p99 ms"]]
    for router, of_router in runs.items():
        by_server = [median(row["hit_ratios"][place] for row in of_router) for place in range(SERVERS)]
        rows.append(
            [
                router,
                f"{median(row['servers_cpu_s'] / SERVERS / row['seconds'] for row in of_router):.0%}",
                f"{median(per_request(row, row['router_cpu_s']) for row in of_router):.1f}",
                f"{median(row['router_cpu_s'] / row['servers_cpu_s'] for row in of_router):.1%}",
                f"{median(max(row['finished']) / fmean(row['finished']) for row in of_router):.2f}x",
                " ".join(f"{one:.2f}" for one in by_server),
                f"{sum(row['preemptions'] for row in of_router)}",
                f"{median(row['others_cpu_s'] / row['seconds'] for row in of_router):.2f}",
                f"{median(1000 * row['client_lag_s'] for row in of_router):.0f}",
            ]
        )
    return table(rows)


def kinds(cell: str, runs: Mapping[str, Sequence[Row]]) -> str:
    """Mean TTFT and hits of each kind of user."""
    names = list(CELLS[cell].kinds)
    rows = [["router", *(f"{kind}: TTFT s" for kind in names), *(f"{kind}: hits" for kind in names)]]
    for router, of_router in runs.items():
        found = [
            shown([of_kind(kind, figure)(row) for row in of_router], ".2f")
            for figure in ("ttft_mean", "hit_ratio")
            for kind in names
        ]
        rows.append([router, *found])
    return table(rows)
