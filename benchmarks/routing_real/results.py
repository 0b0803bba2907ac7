# SPDX-License-Identifier: Apache-2.0
"""From runs to figures: rows. They are kept as lines of JSON while they are made (`http_routing.results.keep`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypedDict

import orjson

from benchmarks.http_routing.client import Answer
from benchmarks.http_routing.results import served, share
from benchmarks.routing_real.cells import Cell, kind_of
from benchmarks.routing_real.trial import ROUTERS, Trial
from lbproxy.sim.figures.report import by_phase, summarise
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Arrival, Job

MAX_WAITING = 3.0
"""Threads of the servers, on average, that are ready to run and do not, as something else runs. Two servers, each with
three processes on one core, have one to two such threads of their own doing."""


class Row(TypedDict):
    """A run's figures. What the warm-up asked is in none of them but CPU and seconds."""

    cell: str
    seed: int
    router: str
    digest: str
    """Of the first requests, which do not depend on responses."""
    summary: dict[str, float]
    """Of `lbproxy.sim.figures.report.Summary`; the hit ratio is of the engines' counters."""
    kinds: dict[str, dict[str, float]]
    """The same by kind of user; the hit ratio is of the responses' usage."""
    finished: list[int]
    """By server: requests."""
    hit_ratios: list[float]
    """By server."""
    preemptions: int
    failures: dict[str, int]
    """How often what was wrong."""
    client_lag_s: float
    router_cpu_s: float
    servers_cpu_s: float
    servers_waited_s: float
    client_cpu_s: float
    others_cpu_s: float
    seconds: float


def row_of(trial: Trial) -> Row:
    """The figures of a run."""
    answer, task = trial.answer, trial.task
    calls = answer["phases"][1]
    done = served([arrivals(answer, trial.cell)], [calls])
    begin, end = answer["counters"][1:]
    pairs = list(zip(begin, end, strict=True))
    failures: dict[str, int] = {}
    for call in (call for phase in answer["phases"] for call in phase):
        if call["failure"] is not None:
            failures[call["failure"][:120]] = failures.get(call["failure"][:120], 0) + 1
    return Row(
        cell=task.cell,
        seed=task.seed,
        router=task.router,
        digest=answer["digest"],
        summary=asdict(replace(summarise(done, len(end)), hit_ratio=share(begin, end))),
        kinds={kind: asdict(one) for kind, one in by_phase(done, len(end)).items()},
        finished=[round(after["finished"] - before["finished"]) for before, after in pairs],
        hit_ratios=[share([before], [after]) for before, after in pairs],
        preemptions=round(sum(after["preemptions"] - before["preemptions"] for before, after in pairs)),
        failures=failures,
        client_lag_s=answer["client_lag_s"],
        router_cpu_s=trial.router_cpu_s,
        servers_cpu_s=trial.servers_cpu_s,
        servers_waited_s=trial.servers_waited_s,
        client_cpu_s=answer["client_cpu_s"],
        others_cpu_s=trial.others_cpu_s,
        seconds=trial.seconds,
    )


def rejected(row: Row) -> str | None:
    """Why a run is not believed; None: it is."""
    waited = row["servers_waited_s"] / row["seconds"]
    return f"{waited:.2f} threads of the servers waited for a core" if waited > MAX_WAITING else None


def arrivals(answer: Answer, cell: Cell) -> list[Arrival]:
    """What counts of the requests, as far as figures go by it; a kind of users is a phase."""
    return [
        (
            call["due"],
            Job(
                call["id"],
                (Piece(0, round(prompt * cell.tokens_per_word)),),
                Piece(0, output),
                phase=kind_of(cell, call["id"]),
            ),
        )
        for call, (prompt, output) in zip(answer["phases"][1], answer["asked"][1], strict=True)
    ]


def read(path: Path) -> list[Row]:
    """The runs that were kept, oldest first."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def believed(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """The last run of each that was not rejected: by cell, by router, by seed."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        if rejected(row) is None:
            found.setdefault(row["cell"], {}).setdefault(row["router"], {})[row["seed"]] = row
    return found


def comparable(runs: Mapping[str, Mapping[int, Row]]) -> dict[str, list[Row]]:
    """The runs of a cell in the order of seeds, of the seeds that every router has and was asked the same in."""
    seeds = set.intersection(*(set(of_router) for of_router in runs.values()))
    same = sorted(seed for seed in seeds if len({of_router[seed]["digest"] for of_router in runs.values()}) == 1)
    return {router: [runs[router][seed] for seed in same] for router in ROUTERS if router in runs}
