# SPDX-License-Identifier: Apache-2.0
"""Do the APIs of coding agents route alike? The same sessions through each of them, in virtual time.

    .venv/bin/python -m benchmarks.agent_apis [--sessions 26] [--seeds 3]

The fleet and the sessions are those of `benchmarks.routing --agents`. But what the balancer is told of each request is
read from a request body, by the code that reads it in the proxy: the job is written as the API's client writes it
(`benchmarks.http_routing.apis`: with Claude Code's billing header and moving `cache_control`, or as Codex's items),
flattened and hashed. The engines always see the same prompts. So what differs between two rows is what lbproxy reads,
and nothing else. `previous_response_id` is not here: such a request goes to the endpoint that stores the response, by a
rule and not by a prediction.

`home` is the share of requests, of conversations of over 8 KB, that went to the server that had the request before.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import orjson

from benchmarks.cells import Cell
from benchmarks.http_routing.apis import APIS, prompt_of, written
from lbproxy.commands.sim import fleet_of, runs_of, workload_of
from lbproxy.config.scenario import Scenario
from lbproxy.core.queue.flow import ANONYMOUS
from lbproxy.core.requests.openai import read_json_body
from lbproxy.core.requests.prompt_keys import BLOCK_BYTES, hash_prompt
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.proxy.request.routes import find_route
from lbproxy.sim.figures.report import Summary, as_table, paired, summarise
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.workload import Job

SERVERS = 4
STATELESS = [name for name, api in APIS.items() if not api.stateful]
LARGE_TOKENS = 2048
"""8 KB."""
KEYS = "keys of the simulation"
"""The row of a balancer that is told the prompts' keys themselves."""


class Reader:
    """Reads jobs as the proxy reads requests of one API."""

    def __init__(self, api: str, seed: int) -> None:
        self._api = APIS[api]
        route = find_route("POST", self._api.path, lora_management=False)
        assert route.flatten is not None
        self._flatten = route.flatten
        self._seed = seed

    def read(self, job: Job, request: InferenceRequest) -> InferenceRequest:
        """What the balancer is told of the body of this job."""
        body = orjson.dumps(self._api.body(prompt_of(job, written), job, self._seed))
        facts = read_json_body(body)
        prompt = self._flatten(facts.fields)
        return request._replace(
            body_bytes=len(body),
            prompt_bytes=len(prompt.text),
            block_keys=hash_prompt(prompt.text, model=facts.model, block_bytes=BLOCK_BYTES),
            max_tokens=facts.max_tokens,
            media_tokens=prompt.media_tokens,
            flow=ANONYMOUS,
        )


def conversation(job: Job) -> str:
    """Whose turn it is: a session's or a sub-agent's."""
    return job.id.rpartition("-")[0]


class Result(NamedTuple):
    """Of one run."""

    summary: Summary
    home: float


def measure(api: str | None, seed: int, parameters: Mapping[str, float]) -> Result:
    """One run. `api`: of `STATELESS`; None = the balancer is told the prompts' keys."""
    cell = Cell("coding-agents", parameters, servers=SERVERS)
    scenario = Scenario.model_validate(cell.scenario(["adaptive"], 1, short=False, trace=None))
    run = replace(runs_of(scenario, source="coding agents")[0], seed=seed)
    served = fleet_of(run, workload_of(run), None if api is None else Reader(api, seed).read).run()
    return Result(summarise(served, SERVERS), home(served))


def home(served: Sequence[Served]) -> float:
    """See the module."""
    last: dict[str, int | None] = {}
    stayed = turns = 0
    for one in served:
        name = conversation(one.job)
        if name in last and one.job.prompt_tokens >= LARGE_TOKENS and not one.job.phase:
            turns += 1
            stayed += one.server == last[name]
        last[name] = one.server
    return stayed / turns if turns else 0.0


def table(found: Mapping[str, Sequence[Result]]) -> str:
    """A row for each API; TTFT and hits beside chat's, paired over seeds."""
    rows = []
    chat = [result.summary for result in found["chat"]]
    for name, results in found.items():
        runs = [result.summary for result in results]
        row = [name, f"{min(result.home for result in results):.1%}"]
        row += [f"{fmean(run.ttft_mean for run in runs):.3f}", f"{fmean(run.hit_ratio for run in runs):.3f}"]
        for figure in ("ttft_mean", "hit_ratio"):
            change = paired(runs, chat, figure)
            row.append("" if name == "chat" else f"{change.mean:+.1%} [{change.low:+.1%}, {change.high:+.1%}]")
        rows.append(row)
    return as_table(
        ["API", "home (worst seed)", "TTFT mean, s", "hits", "TTFT against chat", "hits against chat"], rows
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="The sessions of coding agents through each API, in virtual time.")
    parser.add_argument("--sessions", type=int, default=26)
    parser.add_argument("--duration", type=float, help="of the sessions, in virtual seconds; a third is the warm-up")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    parameters: dict[str, float] = {"sessions": args.sessions}
    if args.duration:
        parameters |= {"duration_s": args.duration, "warm_up_s": args.duration / 3}
    seeds = range(1, args.seeds + 1)
    found = {name: [measure(name, seed, parameters) for seed in seeds] for name in STATELESS}
    found[KEYS] = [measure(None, seed, parameters) for seed in seeds]
    print(table(found))


if __name__ == "__main__":
    main()
