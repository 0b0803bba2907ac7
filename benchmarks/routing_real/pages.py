# SPDX-License-Identifier: Apache-2.0
"""Tables of the runs: `benchmarks/ROUTING_REAL.md`, `ROUTING_GPU.md`.

Figures are medians over rounds, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TypedDict

from benchmarks.http_routing.pages import table
from benchmarks.http_routing.routers import OURS
from benchmarks.routing_real.cells import Cell, CellFields, cell_of
from benchmarks.routing_real.fleet import Facts
from benchmarks.routing_real.results import MAX_WAITING, Row, believed, comparable
from lbproxy.sim.figures.report import RESAMPLES, Estimate, percentile

METHOD = """\
`{command}`, {date}, {machine}: {runs} runs in {minutes:.0f} minutes.

{where}
"""
WHERE = """\
{count} servers, {engine}, with {model} on {hardware}: {cache}, contexts of at most {max_model_len:,}{more}. Within a \
round routers take turns, each started anew {fresh}, with the same recorded sessions in a closed loop. Hits are the \
engines'. Figures are medians of the rounds, with 95 % bootstrap intervals. A random choice finds the right one of \
{count} servers one time in {count}."""
CORES = """
**Two cores run everything**: the servers used {least:.0%} to {most:.0%} of them, and what a router uses is taken from
them. Runs in which more than {waiting:g} of their threads waited for a core on average were done again.
"""
ONE_GPU = """
**The servers share one GPU**, so that the work which a hit saves one of them is time for both.
"""
MAX_FAILED = 0.01
"""Of requests: a router that fails more of them in a cell is compared with none there."""
Figure = Callable[[Row], float]
JUDGED: dict[str, tuple[str, int]] = {
    "ttft_mean": ("TTFT mean", -1),
    "ttft_p90": ("TTFT p90", -1),
    "e2e_mean": ("E2E mean", -1),
    "hit_ratio": ("hits", 1),
    "output_tokens_s": ("tokens a second", 1),
}
"""Figure: its heading, and whether more (1) or less (-1) of it is better."""


class Stored(TypedDict):
    """What `benchmarks/results/routing-real.json` and `routing-gpu.json` hold."""

    command: str
    servers: Facts
    cells: dict[str, CellFields]
    """As they were asked."""
    date: str
    machine: str
    """Of client and router."""
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


def per_request(cell: Cell, row: Row, cpu_s: float) -> float:
    """Milliseconds for each request. CPU is of the whole replay, and so are requests, roughly: by time."""
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
    """All of it; cells without a complete round are not in it."""
    rows = stored["runs"]
    asked = {name: cell_of(fields) for name, fields in stored["cells"].items()}
    cells = {
        name: runs
        for name in asked
        if (found := believed(rows).get(name)) and any((runs := comparable(found)).values())
    }
    parts = ["# Routing, before real engines\n", *about(stored)]
    parts += ["\n## lbproxy against the best other router of each figure\n", against_best(cells)]
    parts.append("Medians of the rounds' ratios. Below 1 is better; of hits and tokens, above 1.")
    for name, runs in cells.items():
        parts += [f"\n## {name}\n\n{described(asked[name], len(next(iter(runs.values()))))}\n", times(runs)]
        parts += ["\nWhere time and work went:\n", work(asked[name], runs)]
        if len(asked[name].kinds) > 1:
            parts += ["\nBy kind of user:\n", kinds(asked[name], runs)]
    parts.append("\n## Not in the tables\n\n" + "\n".join(f"- {line}" for line in stored["outside"]))
    return "\n".join(parts) + "\n"


def described(cell: Cell, rounds: int) -> str:
    """Who asks how much."""
    users = ", ".join(f"{who.users} {kind}" for kind, who in cell.kinds.items())
    longest = max(who.max_context for who in cell.kinds.values()) * cell.tokens_per_word
    times = f"{rounds} round{'s' if rounds > 1 else ''} of {cell.duration_s:.3g} s"
    times += f", the first {cell.warm_up_s:.2g} of which do not count"
    if cell.most_per_s:
        full = f"with whom the servers are full, at {cell.most_per_s:.0f} responses a second"
        users += f" ({cell.load:g} of those {full})"
    return f"{cell.title}; users: {users}; contexts up to {longest:,.0f} tokens; {times}."


def about(stored: Stored) -> list[str]:
    """How the figures came about."""
    rows, facts = stored["runs"], stored["servers"]
    busy = sorted(row["servers_cpu_s"] / facts["count"] / row["seconds"] for row in rows) or [0.0]
    tokens = facts["cache_tokens"]
    where = WHERE.format(
        **facts,
        cache=f"a prefix cache of {tokens:,} tokens each" if tokens else "prefix caches of unknown size",
        fresh="on empty caches" if facts["emptied"] else "with words that no run before had",
    )
    method = METHOD.format(
        command=stored["command"],
        date=stored["date"],
        machine=stored["machine"],
        runs=len(rows),
        minutes=sum(row["seconds"] for row in rows) / 60,
        where=textwrap.fill(where, 120),
    )
    if facts["shared"]:
        method += ONE_GPU
    elif facts["emptied"]:
        method += CORES.format(least=busy[0], most=busy[-1], waiting=MAX_WAITING)
    return [method, *(f"- {line}" for line in stored["versions"])]


def against_best(cells: Mapping[str, Mapping[str, Sequence[Row]]]) -> str:
    """Ours beside the best other, figure by figure. Times of a router that fails requests are those of the others."""
    rows = [["cell", *(f"{heading} (best other)" for heading, _ in JUDGED.values())]]
    for name, runs in cells.items():
        others = [router for router in runs if router != OURS and serves(runs[router])]
        if OURS in runs and not serves(runs[OURS]):
            rows.append([name, f"{OURS} fails more than {MAX_FAILED:.0%}", *[""] * (len(JUDGED) - 1)])
        elif OURS in runs and others:
            rows.append([name, *(_judged(runs, others, figure) for figure in JUDGED)])
    return table(rows)


def serves(runs: Sequence[Row]) -> bool:
    """It fails next to no request."""
    return sum(row["summary"]["failed"] for row in runs) <= MAX_FAILED * sum(row["summary"]["requests"] for row in runs)


def _judged(runs: Mapping[str, Sequence[Row]], others: Sequence[str], figure: str) -> str:
    sign = JUDGED[figure][1]
    best = max(others, key=lambda name: sign * median(map(of(figure), runs[name])))
    found = ratio(runs[OURS], runs[best], of(figure))
    return "" if found is None else f"{found.mean:.2f}x [{found.low:.2f}, {found.high:.2f}] ({best})"


def times(runs: Mapping[str, Sequence[Row]]) -> str:
    """What clients see, and hits: a line for each router."""
    columns = {"TTFT mean s": "ttft_mean", "p50": "ttft_p50", "p90": "ttft_p90", "E2E mean s": "e2e_mean"}
    rows = [
        ["router", *columns, "hits", "tokens a second", "requests", "failed", f"TTFT against {OURS}", "E2E against it"]
    ]
    for router, of_router in runs.items():
        ours = runs.get(OURS, of_router)
        against = [ratio(of_router, ours, of(figure)) for figure in ("ttft_mean", "e2e_mean")]
        rows.append(
            [
                router,
                *(shown([of(figure)(row) for row in of_router], ".2f") for figure in columns.values()),
                shown([of("hit_ratio")(row) for row in of_router], ".2f"),
                shown([of("output_tokens_s")(row) for row in of_router], ".0f"),
                f"{sum(row['summary']['requests'] for row in of_router):.0f}",
                f"{sum(sum(row['failures'].values()) for row in of_router)}",
                *(
                    "" if of_router is ours or one is None else f"{one.mean:.2f}x [{one.low:.2f}, {one.high:.2f}]"
                    for one in against
                ),
            ]
        )
    return table(rows)


def work(cell: Cell, runs: Mapping[str, Sequence[Row]]) -> str:
    """How evenly the servers were used, and what routers used; of servers on this machine, how much they worked."""
    local = all(row["servers_cpu_s"] for of_router in runs.values() for row in of_router)
    columns: dict[str, Callable[[Sequence[Row]], str]] = {
        "router CPU ms a request": lambda some: (
            f"{median(per_request(cell, row, row['router_cpu_s']) for row in some):.1f}"
        ),
        "busiest server": lambda some: f"{median(max(row['finished']) / fmean(row['finished']) for row in some):.2f}x",
        "hits by server": lambda some: " ".join(
            f"{median(ratios):.2f}" for ratios in zip(*(row["hit_ratios"] for row in some), strict=True)
        ),
        "preemptions": lambda some: f"{sum(row['preemptions'] for row in some)}",
        "client late p99 ms": lambda some: f"{median(1000 * row['client_lag_s'] for row in some):.0f}",
        "other work, cores": lambda some: f"{median(row['others_cpu_s'] / row['seconds'] for row in some):.2f}",
    }
    if local:
        columns["servers busy"] = lambda some: (
            f"{median(row['servers_cpu_s'] / len(row['finished']) / row['seconds'] for row in some):.0%}"
        )
        columns["router CPU of the servers'"] = lambda some: (
            f"{median(row['router_cpu_s'] / row['servers_cpu_s'] for row in some):.1%}"
        )
    rows = [["router", *columns]]
    rows += [[router, *(shape(some) for shape in columns.values())] for router, some in runs.items()]
    return table(rows)


def kinds(cell: Cell, runs: Mapping[str, Sequence[Row]]) -> str:
    """Mean TTFT and hits of each kind of user; hits, if the servers tell them in responses."""
    told = any(of_kind(kind, "hit_ratio")(row) for some in runs.values() for row in some for kind in cell.kinds)
    figures = {"TTFT s": "ttft_mean", **({"hits": "hit_ratio"} if told else {})}
    rows = [["router", *(f"{kind}: {heading}" for heading in figures for kind in cell.kinds)]]
    for router, some in runs.items():
        columns = [of_kind(kind, figure) for figure in figures.values() for kind in cell.kinds]
        rows.append([router, *(shown([figure(row) for row in some], ".2f") for figure in columns)])
    return table(rows)
