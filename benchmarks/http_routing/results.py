# SPDX-License-Identifier: Apache-2.0
"""From runs to figures: those of HTTP and those of virtual time, of the same arrivals, in the same words.

Both become `lbproxy.sim.fleet.fleet.Served`, so that `lbproxy.sim.figures.report` computes them alike and compares them
by seed. Runs are kept as lines of JSON while they are made, so that a long form can go on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

import orjson

from benchmarks.http_routing.cells import CELLS, MAX_MODEL_LEN, PRESET, arrivals
from benchmarks.http_routing.client import Answer, Call, Counters
from benchmarks.http_routing.trial import MAX_LAG_S, Trial, lateness
from lbproxy.commands.sim import Run, serve_workload
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import Summary, by_phase, summarise
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.catalogue import WARM_UP, make_workload
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.traces import TraceRow
from lbproxy.sim.workloads.workload import Arrival, Job, OpenLoop


class Row(TypedDict):
    """A run's figures, as they are stored."""

    cell: str
    seed: int
    router: str
    short: bool
    rejected: str | None
    """Why it is not believed."""
    digest: str
    summary: dict[str, float]
    """Of `lbproxy.sim.figures.report.Summary`; the hit ratio is of the servers' counters."""
    phases: dict[str, dict[str, float]]
    usage_hit_ratio: float
    """As the answers' usage has it. Unlike the counters it leaves out a warm-up that does not drain, as virtual time
    does."""
    itl_p99: float
    """Seconds between two tokens of an answer."""
    answered: list[int]
    """Requests that each server finished, without the warm-up if it drained."""
    preemptions: int
    shares: list[int]
    """Requests of each of several lbproxies; of one, all; of another router, none."""
    failures: dict[str, int]
    """How often what was wrong."""
    server_lag_s: float
    client_lag_s: float
    router_cpu_s: float
    router_waited_s: float
    servers_cpu_s: float
    client_cpu_s: float
    others_cpu_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Source:
    """Where arrivals come from."""

    rows: tuple[TraceRow, ...] | None
    """Of the Mooncake trace; None: the stand-in."""
    short: bool

    def phases(self, cell: str, seed: int) -> list[list[Arrival]]:
        """The arrivals of a seed."""
        return arrivals(CELLS[cell], seed, self.rows, short=self.short)


def row_of(trial: Trial, source: Source, max_lag_s: float = MAX_LAG_S) -> Row:
    """The figures of a run. It is rejected if its servers or its client were later than this."""
    answer = trial["answer"]
    phases = source.phases(trial["cell"], trial["seed"]) if CELLS[trial["cell"]].api is None else closed_loop(answer)
    done = served(phases, answer["phases"])
    counted = counted_phases(phases)
    begin, end = answer["counters"][counted.start], answer["counters"][counted.stop]
    servers = len(end)
    figures = summarise(done, servers)
    failures: dict[str, int] = {}
    for call in (call for phase in answer["phases"] for call in phase):
        if call["failure"] is not None:
            failures[call["failure"][:120]] = failures.get(call["failure"][:120], 0) + 1
    return Row(
        cell=trial["cell"],
        seed=trial["seed"],
        router=trial["router"],
        short=source.short,
        rejected=lateness(answer, max_lag_s),
        digest=answer["digest"],
        summary=asdict(replace(figures, hit_ratio=share(begin, end))),
        phases={name: asdict(one) for name, one in by_phase(done, servers).items()},
        usage_hit_ratio=figures.hit_ratio,
        itl_p99=answer["gaps_s"]["p99"],
        answered=[round(after["finished"] - before["finished"]) for before, after in zip(begin, end, strict=True)],
        preemptions=round(sum(one["preemptions"] for one in end) - sum(one["preemptions"] for one in begin)),
        shares=trial["shares"],
        failures=failures,
        server_lag_s=answer["server_lag_s"],
        client_lag_s=answer["client_lag_s"],
        router_cpu_s=trial["router_cpu_s"],
        router_waited_s=trial["router_waited_s"],
        servers_cpu_s=trial["servers_cpu_s"],
        client_cpu_s=answer["client_cpu_s"],
        others_cpu_s=trial["others_cpu_s"],
        seconds=trial["seconds"],
    )


def closed_loop(answer: Answer) -> list[list[Arrival]]:
    """What was asked, as far as figures go by it: a closed loop's requests depend on when responses came."""
    return [
        [
            (call["due"], Job(call["id"], (Piece(0, prompt),), Piece(0, output), phase=phase))
            for call, (prompt, output) in zip(calls, sizes, strict=True)
        ]
        for phase, calls, sizes in zip((WARM_UP, ""), answer["phases"], answer["asked"], strict=True)
    ]


def counted_phases(phases: Sequence[Sequence[Arrival]]) -> range:
    """Which phases' counters tell: those after the ones that are all warm-up."""
    warm = [all(job.phase.startswith("warm-up") for _, job in phase) for phase in phases]
    return range(warm.index(False), len(phases))


def share(begin: Sequence[Counters], end: Sequence[Counters]) -> float:
    """Of the prompt tokens that servers looked up between two looks at their counters, those found in a cache."""
    asked = sum(one["prompt_tokens"] for one in end) - sum(one["prompt_tokens"] for one in begin)
    found = sum(one["hit_tokens"] for one in end) - sum(one["hit_tokens"] for one in begin)
    return found / asked if asked else 0.0


def served(phases: Sequence[Sequence[Arrival]], calls: Sequence[Sequence[Call]]) -> list[Served]:
    """What became of each job, as the simulation says it. Both in the order of arrival."""
    done = []
    for phase, of_phase in zip(phases, calls, strict=True):
        for (_, job), call in zip(phase, of_phase, strict=True):
            assert job.id == call["id"]
            one = Served(job, submitted_at=call["due"], balancer=0, streamed=True)
            one.first_at = None if call["first"] is None else call["due"] + call["first"]
            one.ended_at = call["due"] + call["ended"]
            one.cached_tokens = call["cached_tokens"]
            one.outcome = Outcome.COMPLETED if call["failure"] is None else Outcome.UPSTREAM_BROKE
            done.append(one)
    return done


# Virtual time


def simulated(cell: str, seed: int, policy: str, source: Source, more: Mapping[str, object] | None = None) -> Summary:
    """The same arrivals on the same fleet under a policy, in virtual time; sizes are known as over HTTP: exactly.
    `more`: other keys of the scenario.
    """
    servers = CELLS[cell].servers
    keys = {
        **(more or {}),
        "fleet": [{"count": servers, "preset": PRESET, "max_model_len": MAX_MODEL_LEN}],
        "workload": {"name": "own"},
        "policies": [policy],
        "size_error": 0,
    }
    scenario = Scenario.model_validate(keys)
    run = Run(scenario, scenario.policies[0], seed)
    parameters = CELLS[cell].named(short=source.short)
    workload = (
        OpenLoop(source.phases(cell, seed))
        if CELLS[cell].api is None
        else make_workload(CELLS[cell].workload, parameters, seed=seed)
    )
    done = serve_workload(run, workload)
    return summarise(done, servers)


# Kept runs


def read(path: Path) -> list[Row]:
    """The runs that were kept, oldest first."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def keep(path: Path, row: Row) -> None:
    """Add a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps(row) + b"\n")


def believed(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """The last run of each that was not rejected: by cell, by router, by seed."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        if row["rejected"] is None:
            found.setdefault(row["cell"], {}).setdefault(row["router"], {})[row["seed"]] = row
    return found


def paired_seeds(runs: Mapping[str, Mapping[int, Row]]) -> list[int]:
    """The seeds that every router has, asked the same."""
    seeds = set.intersection(*(set(of_router) for of_router in runs.values()))
    return sorted(seed for seed in seeds if len({(of_router[seed]["digest"]) for of_router in runs.values()}) == 1)


def summary(figures: Mapping[str, float]) -> Summary:
    """As it was before it was stored."""
    return Summary(**figures)  # type: ignore[arg-type]  # mypy takes requests, an int, for a float
