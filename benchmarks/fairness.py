# SPDX-License-Identifier: Apache-2.0
"""What flows, priorities and deadlines change on a simulated fleet, in virtual time: `python -m benchmarks.fairness`.

Each experiment is a scenario as `lbproxy sim` reads it, in variants that differ in one setting; equal seeds are equal
arrivals in each. Writes `FAIRNESS.md`, but for the part of `benchmarks.fairness_http`. On two cores about two minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lbproxy import __version__
from lbproxy.commands.sim import runs_of, serve
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import as_table, estimate
from lbproxy.sim.figures.sharing import REFUSED, by_flow
from lbproxy.sim.fleet.fleet import Served

HERE = Path(__file__).parent
PAGE = HERE / "FAIRNESS.md"
BEGIN, END = "<!-- generated: over HTTP -->", "<!-- end -->"
"""Around the page's last part, which is `benchmarks.fairness_http`'s."""
SECONDS = 45
QUEUE = {"queue_requests": 1024, "queue_timeout": 30}
"""The balancer's defaults, which a scenario would leave out."""


def flow(name: str, rate: float, prompt: int, answer: int, **more: object) -> dict[str, object]:
    """Clients that send Poisson arrivals, lengths lognormal around these."""
    parameters = {"rate": rate, "duration_s": SECONDS, "prompt_tokens": prompt, "output_tokens": answer, "spread": 0.5}
    return {"name": "own", "flow": name, "parameters": parameters, **more}


HEAVY = {"prefill": flow("heavy", 40, 2000, 150), "decode": flow("heavy", 75, 60, 300)}
"""Three times what two servers can do: with prompts, and with short prompts of long answers."""
LIGHT = flow("light", 0.3, 500, 100, copies=9)
"""Together about a twentieth of it."""
SERVERS = {
    "prefill": [{"count": 2}],
    # Room for some 130 requests at a time, so that the cache is full long before a prefill queue is.
    "decode": [{"count": 2, "kv_tokens": 40_000}],
}


def scenario(kind: str, workloads: Sequence[object], order: str = "shortest", **more: object) -> dict[str, object]:
    """On two servers, with the default policy."""
    return {
        "fleet": SERVERS[kind],
        "workloads": list(workloads),
        "policies": ["adaptive"],
        "admission": {**QUEUE, "order": order, "hold": True},
        **more,
    }


def crowd(kind: str, order: str, *, fair: bool) -> dict[str, object]:
    """A heavy flow and nine light ones."""
    return scenario(kind, [HEAVY[kind], LIGHT], order, fair=fair)


WEIGHTED = scenario(
    "prefill",
    [flow("one", 20, 2000, 150), flow("three", 20, 2000, 150)],
    flows={"named": {"three": {"weight": 3}}},
)
LEVELS = {"above": 1, "usual": 0, "below-zero": -1}
PRIORITIES = scenario(
    "prefill",
    [flow(name, 9, 2000, 150, priority=number) for name, number in LEVELS.items()],
    admission={**QUEUE, "queue_requests": 100},
)
"""Twice the capacity, in equal parts, before a queue that holds a hundred."""
SLO_S = 3.0


def deadline(slo_s: float | None) -> dict[str, object]:
    """One flow at one and a half times the capacity."""
    return scenario("prefill", [flow("one", 20, 2000, 150, **({"slo_ttft": slo_s} if slo_s else {}))])


EXPERIMENTS: dict[str, dict[str, object]] = {
    **{
        f"{kind}, {order}, {'flows' if fair else 'one flow'}": crowd(kind, order, fair=fair)
        for kind in HEAVY
        for order in ("fcfs", "shortest")
        for fair in (False, True)
    },
    "alone": scenario("prefill", [LIGHT]),
    "weights": WEIGHTED,
    "priorities": PRIORITIES,
    "deadlines": deadline(SLO_S),
    "no deadlines": deadline(None),
}


# Figures of one run


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run says. By flow; the light ones count as one, by the mean of their means and their worst p99."""

    flows: dict[str, dict[str, float]]
    inversions: int
    """Placements while a more important request waited that came before, and was not placed within `GRACE_S`."""
    longest_queue: int
    in_time: float
    """Share of all requests with a first token within `SLO_S`."""


GRACE_S = 0.05
"""A plan may be so old: who comes between two is not passed over."""


def run_one(task: tuple[str, int]) -> tuple[str, int, Figures]:
    """One experiment with one seed, in whichever process."""
    name, seed = task
    found = Scenario.model_validate({**EXPERIMENTS[name], "seeds": seed})
    return name, seed, figures_of(serve(runs_of(found, source=name)[seed - 1]))


def figures_of(served: Sequence[Served]) -> Figures:
    """What the requests of a run say."""
    flows: dict[str, dict[str, float]] = {}
    groups: dict[str, list[Served]] = {}
    for one in served:
        groups.setdefault(one.job.flow.partition("-")[0] if "light" in one.job.flow else one.job.flow, []).append(one)
    shares = by_flow(served, 2)
    for group, requests in groups.items():
        own = [share for of, share in shares.items() if of == group or of.startswith(f"{group}-")]
        until = max(one.submitted_at for one in served)
        done = [one for one in requests if one.outcome is Outcome.COMPLETED and one.ended_at <= until]
        refused = [one.ended_at - one.submitted_at for one in requests if one.outcome in REFUSED]
        flows[group] = {
            "requests": len(requests),
            "ttft_mean": fmean(share.summary.ttft_mean for share in own),
            "ttft_p99": max(share.summary.ttft_p99 for share in own),
            "refused": len(refused) / len(requests),
            "refused_after": fmean(refused) if refused else 0.0,
            "tokens_share": sum(share.tokens_share for share in own),
            "done_s": len(done) / until,
        }
    good = [one.first_at is not None and one.first_at - one.submitted_at <= SLO_S for one in served]
    return Figures(flows, inversions(served), longest_queue(served), fmean(good))


def inversions(served: Sequence[Served], apart_s: float = 0.0) -> int:
    """From the log of decisions: how often a request was placed though another of a higher priority waited that any
    endpoint could have served (all serve the same model, nothing is shared). One that waits by the policy's choice for
    an endpoint that is busy, while another is free, counts as well. `apart_s`: so much before the placement the other
    must have come, where times are not exact.
    """
    count = 0
    for one in served:
        if one.placed_at is None:
            continue
        priority = one.job.priority or 0
        count += any(
            (other.job.priority or 0) > priority
            and other.submitted_at + apart_s < one.placed_at
            and (other.ended_at if other.placed_at is None else other.placed_at) > one.placed_at + GRACE_S
            for other in served
        )
    return count


def longest_queue(served: Sequence[Served]) -> int:
    """The most requests that waited at a time."""
    changes = []
    for one in served:
        left = one.ended_at if one.placed_at is None else one.placed_at
        if left > one.submitted_at:
            changes += [(one.submitted_at, 1), (left, -1)]
    longest = waiting = 0
    for _, change in sorted(changes):
        waiting += change
        longest = max(longest, waiting)
    return longest


# The page


def cell(runs: Sequence[Figures], of: str, figure: str, form: str = ".2f") -> str:
    """A mean over the seeds with its interval."""
    found = estimate([run.flows[of][figure] for run in runs])
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def page(results: Mapping[str, Sequence[Figures]], seeds: int) -> str:
    """FAIRNESS.md."""
    head = (
        f"# Fairness, simulated and over HTTP\n\n`python -m benchmarks.fairness`, lbproxy {__version__}, {seeds} "
        "seeds with 95 % bootstrap intervals. Two simulated\nservers (Qwen3-32B, two H100 each), "
        f"{SECONDS} s of Poisson arrivals, lengths lognormal. TTFT in seconds; p99 is\nthe worst of the nine light "
        "flows'. *heavy/s*: requests of the heavy flow done in a second.\n"
    )
    parts = [head]
    heads = ["queue's order", "light: TTFT", "p99", "refused", "heavy: TTFT", "heavy/s"]
    about = {
        "prefill": "The heavy flow sends three times what the servers can do, prompts of 2,000 tokens; each light"
        " one a request in three\nseconds. Alone the light ones' TTFT is {alone}, p99 {alone99}.",
        "decode": "Short prompts for long answers, on servers whose cache holds some 130: requests wait for room "
        "in the cache.",
    }
    for kind, template in about.items():
        alone = results["alone"]
        text = template.format(alone=cell(alone, "light", "ttft_mean"), alone99=cell(alone, "light", "ttft_p99"))
        rows = []
        for order in ("fcfs", "shortest"):
            for how in ("one flow", "flows"):
                runs = results[f"{kind}, {order}, {how}"]
                light = [cell(runs, "light", figure) for figure in ("ttft_mean", "ttft_p99", "refused")]
                heavy = [cell(runs, "heavy", "ttft_mean", ".1f"), cell(runs, "heavy", "done_s", ".1f")]
                rows.append([f"{order}, {how}", *light, *heavy])
        parts.append(f"## A heavy flow and nine light ones: {kind}\n\n{text}\n\n{as_table(heads, rows)}")
    weights = results["weights"]
    ratio = estimate([run.flows["three"]["tokens_share"] / run.flows["one"]["tokens_share"] for run in weights])
    parts.append(
        "## Weights\n\nOf two equal flows at three times the capacity one of weight 3 gets "
        f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times the tokens.\n"
    )
    runs = results["priorities"]
    rows = [
        [f"{of}: {LEVELS[of]}", *(cell(runs, of, figure) for figure in ("ttft_mean", "ttft_p99", "refused"))]
        for of in runs[0].flows
    ]
    parts.append(
        "## Strict priority\n\nThree priorities, each two thirds of the capacity, before a queue of 100. "
        f"Placed while a more important one waited:\n{sum(run.inversions for run in runs)} of "
        f"{sum(int(one['requests']) for run in runs for one in run.flows.values())} requests. The longest queue: "
        f"{max(run.longest_queue for run in runs)}.\n\n" + as_table(["priority", "TTFT", "p99", "refused"], rows)
    )
    rows = []
    for name in ("no deadlines", "deadlines"):
        good = estimate([run.in_time for run in results[name]])
        shown = [cell(results[name], "one", figure) for figure in ("refused", "refused_after", "ttft_p99", "done_s")]
        rows.append([name, f"{good.mean:.2f} [{good.low:.2f}, {good.high:.2f}]", *shown])
    heads = ["", f"first token within {SLO_S:g} s", "refused", "told after s", "TTFT p99", "done/s"]
    parts.append(
        f"## Deadlines\n\nOne flow at one and a half times the capacity; with `x-lbproxy-slo-ttft-ms: "
        f"{1000 * SLO_S:.0f}` and without.\n\n{as_table(heads, rows)}"
    )
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description="Flows on a simulated fleet.")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    args = parser.parse_args()
    results: dict[str, list[Figures]] = {}
    tasks = [(name, seed) for name in EXPERIMENTS for seed in range(1, args.seeds + 1)]
    with ProcessPoolExecutor(args.processes) as pool:
        for name, seed, figures in pool.map(run_one, tasks):
            results.setdefault(name, []).append(figures)
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    text = page(results, args.seeds)
    kept = "".join(PAGE.read_text("utf-8").partition(BEGIN)[1:])
    PAGE.write_text(f"{text}\n{kept}" if kept else text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
