# SPDX-License-Identifier: Apache-2.0
"""What the runs of `targets.py` say: each target with what was wanted and what was measured, and the page.

A ratio is of means over the seeds that both ran, with a 95 % bootstrap interval over those seeds (paired: equal seeds
are equal arrivals). "Best" is the best of all baselines that ran in full, for each figure by itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.oracle import ORACLES
from benchmarks.targets import BOUND, FLOOR, LEAST, OURS, PARTS, TOP, Found, Part
from lbproxy import __version__
from lbproxy.sim.figures.report import RESAMPLES, Estimate, Summary, markdown, percentile

NO_LOSS: Mapping[str, tuple[str, bool]] = {
    "ttft_mean": ("TTFT", False),
    "ttft_p50": ("p50", False),
    "ttft_p90": ("p90", False),
    "e2e_mean": ("E2E", False),
    "tpot_mean": ("TPOT", False),
    "tpot_p99": ("TPOT p99", False),
    "output_tokens_s": ("tokens/s", True),
    "goodput": ("goodput", True),
}
"""Figures in which ours may not be worse than least-request by more than 5 %: heading, and whether more is better."""

ABOUT = """\
Ratios are of means over seeds, paired, with 95 % bootstrap intervals. The best baseline of a cell is the best, figure
by figure, of those that ran in full: least-request, those named, and the best of all 13 when asked once in short.
"""
ABOUT_ORACLES = """\
`oracle` places each request at once where its first token would truly come first; `oracle, late` holds back as adaptive
does. Neither looks at what a placement costs others, so that below 1x (goodput: above) adaptive is better than greed
with perfect knowledge.

"""

RATIOS = (f"TTFT, {OURS} / {ORACLES[0]}", "E2E", "goodput")

Runs = Mapping[str, Sequence[Found]]


@dataclass(frozen=True)
class Verdict:
    """One target on one cell."""

    cell: str
    wanted: str
    measured: str
    met: bool


def summaries(runs: Sequence[Found], seeds: int | None = None) -> list[Summary]:
    return [found.summary for found in runs[:seeds]]


def mean(runs: Sequence[Found], figure: str) -> float:
    return fmean(getattr(found.summary, figure) for found in runs)


def ratio(ours: Sequence[Found], theirs: Sequence[Found], figure: str) -> Estimate:
    """Ours over theirs, over the seeds that both ran."""
    pairs = [(getattr(a.summary, figure), getattr(b.summary, figure)) for a, b in zip(ours, theirs, strict=False)]
    rng = random.Random(f"{len(pairs)}:ratio")

    def of(drawn: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in drawn) / (sum(b for _, b in drawn) or 1.0)

    drawn = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES if len(pairs) > 1 else 1))
    return Estimate(of(pairs), percentile(drawn, 2.5), percentile(drawn, 97.5))


def shown(found: Estimate) -> str:
    return f"{found.mean:.3g}x [{found.low:.3g}, {found.high:.3g}]"


def best(runs: Runs, figure: str, *, most: bool = False) -> str:
    """The baseline with the least (or the most) of a figure."""
    baselines = [policy for policy in runs if policy != OURS and policy not in ORACLES]
    return (max if most else min)(baselines, key=lambda policy: mean(runs[policy], figure))


def at_most(runs: Runs, cell: str, figure: str, limit: float, *, against: str | None = None) -> Verdict:
    """Ours is at most `limit` times the best baseline's, or that of `against`."""
    policy = against or best(runs, figure)
    found = ratio(runs[OURS], runs[policy], figure)
    name = {"ttft_mean": "mean TTFT", "e2e_mean": "mean E2E", "ttft_p50": "median TTFT"}[figure]
    which = "" if against else "the best's, "
    return Verdict(cell, f"{name} <= {limit:g}x {which}{policy}", shown(found), found.mean <= limit)


def at_least(runs: Runs, cell: str, figure: str, limit: float, *, against: str | None = None) -> Verdict:
    """Ours is at least `limit` times the best baseline's, or that of `against`."""
    policy = against or best(runs, figure, most=True)
    found = ratio(runs[OURS], runs[policy], figure)
    name = {"output_tokens_s": "output tokens/s", "goodput": "goodput"}[figure]
    which = "" if against else "the best's, "
    return Verdict(cell, f"{name} >= {limit:g}x {which}{policy}", shown(found), found.mean >= limit)


def never_worse(runs: Runs, cell: str) -> list[Verdict]:
    seeds = min(len(runs[OURS]), len(runs["gie"]))
    each = [ratio(runs[OURS][n : n + 1], runs["gie"][n : n + 1], "ttft_mean").mean for n in range(seeds)]
    worse = sum(one > 1.0 for one in each)
    wanted = f"mean TTFT <= 1x gie's in each of {seeds} seeds"
    return [
        Verdict(cell, wanted, f"worse in {worse}, at worst {max(each):.3g}x", not worse),
        at_most(runs, cell, "ttft_p50", 1.03, against="gie"),
    ]


def ladder(runs: Runs, cell: str) -> list[Verdict]:
    top = list(runs[OURS][0].steps)[-1]
    at_top = ratio(top_step(runs[OURS], top), top_step(runs[FLOOR], top), "output_tokens_s")
    return [
        *never_worse(runs, cell),
        at_least(runs, cell, "output_tokens_s", 1.85, against=FLOOR),
        Verdict(cell, f"output tokens/s >= 2.1x {FLOOR}'s at the top step", shown(at_top), at_top.mean >= 2.1),
    ]


def top_step(found: Sequence[Found], top: str) -> list[Found]:
    """The runs, with the output tokens a second of one step only."""
    return [replace(one, summary=replace(one.summary, output_tokens_s=one.steps[top])) for one in found]


def long_prompts(runs: Runs, cell: str) -> list[Verdict]:
    ours, other = mean(runs[OURS], "goodput"), best(runs, "goodput", most=True)
    theirs = mean(runs[other], "goodput")
    return [
        Verdict(cell, "goodput >= .7", f"{ours:.2f}", ours >= 0.7),
        Verdict(cell, "goodput of every baseline < .1", f"{theirs:.2f} ({other})", theirs < 0.1),
    ]


def within_3_percent(runs: Runs, cell: str) -> list[Verdict]:
    return [at_most(runs, cell, figure, 1.03) for figure in ("ttft_mean", "e2e_mean")]


def no_prefixes(runs: Runs, cell: str) -> list[Verdict]:
    # Goodput is a count of requests: a twentieth of a percent of them is no difference.
    found = at_least(runs, cell, "goodput", 0.9995)
    return [
        at_most(runs, cell, "ttft_mean", 1.10),
        Verdict(cell, found.wanted.replace("0.9995x", "1x"), found.measured, found.met),
    ]


def adapters(runs: Runs, cell: str) -> list[Verdict]:
    found = ratio(runs[LEAST], runs[OURS], "ttft_mean")
    return [
        at_most(runs, cell, "ttft_mean", 1.0, against="gie-tree"),
        Verdict(cell, f"mean TTFT >= 20x better than {LEAST}, which knows none", shown(found), found.mean >= 20),
    ]


JUDGES: Mapping[str, Callable[[Runs, str], list[Verdict]]] = {
    "b2b ladder": ladder,
    "b2b, steps of 10 s": never_worse,
    "Mooncake x2": lambda runs, cell: [
        at_most(runs, cell, "ttft_mean", 0.25),
        at_least(runs, cell, "output_tokens_s", 1.05),
    ],
    "10 % long at 16/s": long_prompts,
    "chat, 300 users": within_3_percent,
    "chat, 600 users": within_3_percent,
    "agents, 40 users": within_3_percent,
    "agents, 80 users": within_3_percent,
    "one prefix": within_3_percent,
    "bursts": within_3_percent,
    "Azure x8": no_prefixes,
    "half at half speed": lambda runs, cell: [at_most(runs, cell, "e2e_mean", 1.0)],
    "15 adapters, 6 x 3": adapters,
    "15 adapters, 8 x 4": adapters,
    "15 adapters, 10 x 4": adapters,
}


def no_loss(cells: Mapping[str, Runs]) -> tuple[Verdict, str]:
    """Against least-request in every figure but TTFT p99; and the table of all."""
    rows = [["cell", *(heading for heading, _ in NO_LOSS.values())]]
    losses: list[str] = []
    for cell, runs in cells.items():
        if LEAST not in runs:
            continue
        row = [cell]
        for figure, (heading, more) in NO_LOSS.items():
            found = ratio(runs[OURS], runs[LEAST], figure)
            lost = found.mean < 0.95 if more else found.mean > 1.05
            row.append(f"**{found.mean:.2f}x**" if lost else f"{found.mean:.2f}x")
            if lost:
                losses.append(f"{cell}: {heading} {found.mean:.2f}x")
        rows.append(row)
    wanted = f"no figure but TTFT p99 more than 5 % worse than {LEAST}"
    return Verdict("all", wanted, "; ".join(losses) or "none", not losses), table(rows)


def against_oracle(cells: Mapping[str, Runs]) -> tuple[list[Verdict], str]:
    """Against perfect information; and the table of all."""
    first = ORACLES[0]
    rows = [["cell", "seeds", *(f"{name}: TTFT s" for name in (OURS, *ORACLES)), *RATIOS]]
    found: dict[str, float] = {}
    for cell, runs in cells.items():
        if first not in runs:
            continue
        seeds = min(len(runs[OURS]), len(runs[first]))
        times = [f"{mean(runs[name][:seeds], 'ttft_mean'):.3g}" if name in runs else "" for name in (OURS, *ORACLES)]
        to = ratio(runs[OURS], runs[first], "ttft_mean")
        others = [f"{ratio(runs[OURS], runs[first], figure).mean:.3g}x" for figure in ("e2e_mean", "goodput")]
        rows.append([cell, str(seeds), *times, shown(to), *others])
        found[cell] = to.mean
    if not found:
        return [], ""
    worst = max(found, key=lambda cell: found[cell])
    near = sum(one <= 1.1 for one in found.values())
    return [
        Verdict(
            "all", f"mean TTFT <= 1.35x the {first}'s", f"at most {found[worst]:.2f}x ({worst})", found[worst] <= 1.35
        ),
        Verdict("most", f"mean TTFT <= 1.1x the {first}'s", f"{near} of {len(found)} cells", near > len(found) / 2),
    ], table(rows)


def steps(runs: Runs) -> str:
    """Output tokens a second of each step of the ladder, beside round robin's."""
    names = list(runs[OURS][0].steps)
    rows = [["policy", *names]]
    base = {name: fmean(found.steps[name] for found in runs[FLOOR]) for name in names}
    for policy, found in runs.items():
        made = {name: fmean(one.steps[name] for one in found) for name in names}
        rows.append([policy, *(f"{made[name]:.0f} ({made[name] / base[name]:.2f}x)" for name in names)])
    return table(rows)


def top_steps(runs: Runs, floor: float | None) -> str:
    """What the last step gave. `floor`: what is 1x."""
    rows = [["policy", "output tokens/s", *([] if floor is None else [f"{FLOOR} = 1x"])]]
    for policy, found in runs.items():
        made = fmean(one.steps[list(one.steps)[-1]] if one.steps else one.summary.output_tokens_s for one in found)
        rows.append([policy, f"{made:.0f}", *([] if floor is None else [f"{made / floor:.2f}x"])])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first column is text."""
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]]) + "\n"


def described(part: Part, runs: Runs) -> str:
    """What of a cell was run, and how often."""
    whole = part.full
    parameters = ", ".join(f"{key} {value:g}" for key, value in whole.parameters.items())
    servers = whole.servers if whole.speeds is None else " + ".join(f"{n} at {s:g}x" for s, n in whole.speeds.items())
    cut = "; shortened" if part.cut else ""
    counts = {policy: len(found) for policy, found in runs.items()}
    usual = Counter(counts.values()).most_common(1)[0][0]
    seeds = ", ".join([str(usual), *(f"{policy} {count}" for policy, count in counts.items() if count != usual)])
    return f"`{whole.workload}`{f' ({parameters})' if parameters else ''}, {servers} servers{cut}. Seeds: {seeds}."


def page(found: Mapping[str, Runs], *, seeds: int, replays: str) -> str:
    """All of it, in Markdown."""
    cells = {cell: runs for cell, runs in found.items() if cell not in BOUND and OURS in runs}
    ran = [part.cell for part in PARTS if {OURS, *part.named} <= set(found.get(part.cell, {}))]
    verdicts = [verdict for cell in ran if cell in JUDGES for verdict in JUDGES[cell](cells[cell], cell)]
    loss, losses = no_loss(cells)
    oracle, oracles = against_oracle(cells)
    verdicts += [loss, *oracle]
    rows = [["cell", "target", OURS, "seeds", "met"]]
    for verdict in verdicts:
        seen = str(len(cells[verdict.cell][OURS])) if verdict.cell in cells else ""
        rows.append([verdict.cell, verdict.wanted, verdict.measured, seen, "yes" if verdict.met else "**no**"])
    parts = [
        "# Targets of routing\n\n",
        f"`python -m benchmarks.routing --targets --seeds {seeds}`, lbproxy {__version__}, virtual time, {replays}.\n",
        ABOUT,
        f"\n{sum(v.met for v in verdicts)} of {len(verdicts)} are met; [why the others are not]",
        "(../docs/decisions/0021-routing-targets.md).\n\n",
        table(rows),
        "\n## Against perfect information\n\n",
        ABOUT_ORACLES,
        oracles,
        "\n## Against least-request\n\nWhat is more than 5 % worse stands out.\n\n",
        losses,
    ]
    if "b2b ladder" in cells:
        parts += ["\n## Output tokens a second on the b2b ladder, beside round-robin's\n\n", steps(cells["b2b ladder"])]
        top = found.get(TOP, {}).get(FLOOR, ())
        floor = fmean(list(one.steps.values())[-1] for one in top) if top else None
        for cell, (words, _) in BOUND.items():
            if cell in found:
                parts.append(f"\nThe top step, {words}:\n\n{top_steps(found[cell], floor)}")
    for part in PARTS:
        if part.cell in cells:
            parts.append(f"\n## {part.cell}\n\n{described(part, cells[part.cell])}\n\n")
            shown_runs = {policy: runs for policy, runs in cells[part.cell].items() if policy not in ORACLES}
            least = min(len(runs) for runs in shown_runs.values())
            parts.append(markdown({policy: summaries(runs, least) for policy, runs in shown_runs.items()}))
    return "".join(parts)
