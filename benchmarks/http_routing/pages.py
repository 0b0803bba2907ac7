# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the runs: `benchmarks/ROUTING_HTTP.md`. Only seeds that every router has are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.http_routing.cells import CELLS
from benchmarks.http_routing.results import Row, paired_seeds, summary
from benchmarks.http_routing.routers import OURS
from lbproxy.sim.figures.plots import plot
from lbproxy.sim.figures.report import LOWER_IS_BETTER, Summary, estimate, paired

JUDGED = {
    "ttft_mean": ("TTFT mean", 1.03),
    "e2e_mean": ("E2E mean", 1.03),
    "goodput": ("goodput", 1.03),
    "hit_ratio": ("hit ratio", 1.03),
    "ttft_p99": ("TTFT p99", 1.4),
}
"""Figure: its heading, and how far from the best lbproxy may be."""


MAX_FAILED = 0.01
"""The share of requests that a router may fail and be compared."""
FULL = 0.5
"""Of a router's core, averaged over a run with its drained phases: more is no rest while requests come."""


@dataclass(frozen=True)
class CellRuns:
    """The runs of a cell that are compared: by router, in the order of `seeds`."""

    name: str
    seeds: list[int]
    runs: dict[str, list[Row]]
    simulated: dict[str, list[Summary]]
    """By router, where a policy has its rule."""

    def summaries(self) -> dict[str, list[Summary]]:
        """By router."""
        return {router: [summary(row["summary"]) for row in rows] for router, rows in self.runs.items()}


def comparable(
    found: Mapping[str, Mapping[str, Mapping[int, Row]]],
    names: Sequence[str],
    simulate: Callable[[str, str, Sequence[int]], list[Summary] | None],
) -> list[CellRuns]:
    """What can be compared. `simulate(cell, router, seeds)`: the same in virtual time, or None."""
    cells = []
    for name in CELLS:
        of_cell = {router: found[name][router] for router in names if router in found.get(name, {})}
        seeds = paired_seeds(of_cell) if of_cell else []
        if seeds:
            runs = {router: [of_router[seed] for seed in seeds] for router, of_router in of_cell.items()}
            virtual = {router: known for router in runs if (known := simulate(name, router, seeds)) is not None}
            cells.append(CellRuns(name, seeds, runs, virtual))
    return cells


# The page


def page(
    cells: Sequence[CellRuns], about: Sequence[str], outside: Sequence[str], title: str = "# Routing, over HTTP"
) -> str:
    """All of it. `about`: how it came about; `outside`: what is not in the tables, and why."""
    parts = [f"{title}\n", *about, "\n## lbproxy against the best other router of each figure\n"]
    parts.append(against_best(cells))
    parts.append(
        "Target: at most 3 % from the best (p99: 1.4x). Below 1 is better; of goodput and hits above 1. Without "
        f"routers that failed over {MAX_FAILED:.0%} of the requests."
    )
    for cell in cells:
        parts.append(f"\n## {cell.name}\n\n{CELLS[cell.name].title}; {CELLS[cell.name].servers} servers, ")
        parts[-1] += f"{len(cell.seeds)} seed{'s' if len(cell.seeds) > 1 else ''}.\n"
        full = [name for name, runs in cell.runs.items() if fmean(map(core_share, runs)) > FULL]
        note = (
            f"\nTheir core was full, so that their figures are not their rule's: {', '.join(full)}.\n" if full else ""
        )
        parts += [routers_table(cell), note + "\nIn virtual time and over HTTP:\n", agreement(cell)]
    if outside:
        parts.append("\n## Not in the tables\n\n" + "\n".join(f"- {line}" for line in outside))
    return "\n".join(parts) + "\n"


def against_best(cells: Sequence[CellRuns]) -> str:
    """Ours beside the best other, figure by figure."""
    rows = [["cell", *(f"{heading} (best other)" for heading, _ in JUDGED.values())]]
    for cell in cells:
        summaries = cell.summaries()
        ours = summaries.pop(OURS, None)
        summaries = {name: runs for name, runs in summaries.items() if served(runs)}
        if ours is not None and summaries:
            rows.append([cell.name, *(_judged(figure, ours, summaries) for figure in JUDGED)])
    return table(rows)


def served(runs: Sequence[Summary]) -> bool:
    """Whether a router served what it was asked: the requests of one that did not had the servers for themselves."""
    return sum(one.failed for one in runs) <= MAX_FAILED * sum(one.requests for one in runs)


def _judged(figure: str, ours: Sequence[Summary], others: Mapping[str, Sequence[Summary]]) -> str:
    best = (min if figure in LOWER_IS_BETTER else max)(others, key=lambda name: mean(others[name], figure))
    theirs = mean(others[best], figure)
    if not theirs:
        return f"{mean(ours, figure):.3g} / 0"
    ratio = mean(ours, figure) / theirs
    change = paired(ours, others[best], figure)
    met = within(figure, ratio)
    interval = f" [{1 + change.low:.2f}, {1 + change.high:.2f}]" if len(ours) > 1 else ""
    return f"{'' if met else '**'}{ratio:.2f}x{'' if met else '**'}{interval} ({best})"


def within(figure: str, ratio: float) -> bool:
    """Whether ours over the best other's is within the target."""
    limit = JUDGED[figure][1]
    return ratio <= limit if figure in LOWER_IS_BETTER else ratio >= 1 / limit


def routers_table(cell: CellRuns) -> str:
    """A line for each router."""
    heads = ["router", "TTFT s", "p50", "p99", "E2E s", "TPOT ms", "ITL p99 ms", "goodput", "hits", "failed"]
    heads += ["busiest server", "CPU ms", f"TTFT against {OURS}", "E2E against it"]
    rows = [heads]
    summaries = cell.summaries()
    ours = summaries.get(OURS)
    for router, runs in cell.runs.items():
        figures = summaries[router]
        rows.append(
            [
                router,
                *(f"{mean(figures, name):.3g}" for name in ("ttft_mean", "ttft_p50", "ttft_p99", "e2e_mean")),
                f"{1000 * mean(figures, 'tpot_mean'):.3g}",
                f"{1000 * fmean(run['itl_p99'] for run in runs):.3g}",
                *(f"{mean(figures, name):.2f}" for name in ("goodput", "hit_ratio")),
                f"{sum(one.failed for one in figures)}",
                f"{fmean(max(run['answered']) / fmean(run['answered']) for run in runs):.2f}x",
                f"{1000 * fmean(run['router_cpu_s'] / run['summary']['requests'] for run in runs):.2g}",
                *(_change(figures, ours, name) for name in ("ttft_mean", "e2e_mean")),
            ]
        )
    return table(rows)


def core_share(row: Row) -> float:
    """Of the router's core, over the whole run."""
    return row["router_cpu_s"] / row["seconds"]


def _change(runs: Sequence[Summary], ours: Sequence[Summary] | None, figure: str) -> str:
    if ours is None or runs is ours:
        return ""
    change = paired(runs, ours, figure)
    return f"{change.mean:+.0%}" + (f" [{change.low:+.0%}, {change.high:+.0%}]" if len(runs) > 1 else "")


def agreement(cell: CellRuns) -> str:
    """How far virtual time's figures are from HTTP's, where a policy of ours has a router's rule."""
    names = {"ttft_mean": "TTFT s", "ttft_p99": "TTFT p99 s", "e2e_mean": "E2E s", "goodput": "goodput"}
    names["hit_ratio"] = "hits"
    rows = [["router", *(f"{heading}, HTTP / virtual" for heading in names.values()), "TTFT, HTTP over virtual"]]
    for router, virtual in cell.simulated.items():
        real = [
            replace(summary(row["summary"]), hit_ratio=row["usage_hit_ratio"])  # which virtual time counts alike
            for row in cell.runs[router]
        ]
        ratio = estimate([a.ttft_mean / b.ttft_mean for a, b in zip(real, virtual, strict=True)])
        interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if len(real) > 1 else ""
        pairs = [f"{mean(real, name):.3g} / {mean(virtual, name):.3g}" for name in names]
        rows.append([router, *pairs, f"{ratio.mean:.2f}x{interval}"])
    return table(rows)


def mean(runs: Sequence[Summary], figure: str) -> float:
    """Of a figure, over seeds."""
    return fmean(getattr(run, figure) for run in runs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the heading."""
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]) + "\n"


# Pictures


def picture(cell: CellRuns) -> bytes:
    """As PNG. Raises ImportError without matplotlib."""
    found = {
        router: [{name: summary(figures) for name, figures in row["phases"].items()} for row in rows]
        for router, rows in cell.runs.items()
    }
    return plot(found, title=f"{cell.name}: {CELLS[cell.name].title}, over HTTP", form="png")
