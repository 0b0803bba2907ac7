# SPDX-License-Identifier: Apache-2.0
"""Fleets that are not as a balancer expects, far from overload: they contradict its model of a server. Data, mostly.

A server with room for all whose time to first token is fixed; data-parallel ranks behind one address; the same without
metrics; clients that use the servers directly; 500 endpoints whose contexts come again. Clients with one API key and
with two, as a balancer may treat a shared pool otherwise. What it may cost is seen beside it: the same without holding
requests back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import orjson

from lbproxy.config.scenario import Scenario
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.sim.figures.report import percentile
from lbproxy.sim.figures.sharing import REFUSED
from lbproxy.sim_cli import Run, fleet_of, workload_of

VARIANTS = ("adaptive", "adaptive/hold=false")
MANY = 500
LONG = {"max_model_len": 131_072}


def changed(changes: str) -> dict[str, object]:
    """Settings of the queue, of `hold=false,queue_requests=64`; what is not named is as in the product."""
    pairs = [one.partition("=") for one in changes.split(",") if one]
    return {key: orjson.loads(value) for key, _, value in pairs}


@dataclass(frozen=True)
class Surprise:
    """A fleet, and what clients send."""

    name: str
    servers: Sequence[Mapping[str, object]]
    workload: str
    rate: float
    """Requests a second."""
    parameters: Mapping[str, float]
    flows: int = 1
    seconds: float = 120.0
    """For so long requests arrive."""
    scrape_interval: float = ScrapeSettings().interval
    others: Sequence[Mapping[str, object]] = ()
    """Clients that send directly to the servers."""
    stream_share: float = 1.0

    def scenario(self, variant: str, seconds: float | None = None) -> Scenario:
        """`variant`: a policy, and what of the queue's settings differs."""
        policy, _, changes = variant.partition("/")
        parameters = {**self.parameters, "rate": self.rate / self.flows, "duration_s": seconds or self.seconds}
        return Scenario.model_validate(
            {
                "fleet": self.servers,
                "workloads": [
                    {"name": self.workload, "flow": "clients", "copies": self.flows, "parameters": parameters}
                ],
                "policies": [policy],
                "others": self.others,
                "stream_share": self.stream_share,
                "seeds": 1,
                "scrape_interval": self.scrape_interval,
                "admission": changed(changes),
            }
        )


def _one_key_and_two(
    name: str, server: Mapping[str, object], workload: str, rate: float, parameters: Mapping[str, float]
) -> list[Surprise]:
    """The same of one flow and of two."""
    return [
        Surprise(f"{name}, {flows} {'flow' if flows == 1 else 'flows'}", [server], workload, rate, parameters, flows)
        for flows in (1, 2)
    ]


def _beside_others(name: str, server: Mapping[str, object], rate: float, **theirs: object) -> Surprise:
    """Two servers, both in use by others who do not use the balancer; one request a second of ours."""
    others = [{"server": number, "rate": rate, **theirs} for number in (0, 1)]
    return Surprise(name, [{"count": 2, **server}], "own", 1, SHORT, others=others)


SHORT = {"prompt_tokens": 1000, "output_tokens": 100}
STEADY = {"ttft": 1, "ttft_spread": 0.5}
SLOW = {"ttft": 3, "max_sequences": 128}
RANKS_PROMPTS = {"prompt_tokens": 6000, "output_tokens": 200, "spread": 0.3}
LONG_PROMPTS = {"share": 1, "shortest": 15_000, "longest": 30_000, "output_tokens": 35}
MUTE = {"metrics": False}
SURPRISES = [
    *_one_key_and_two("TTFT 1 s +- 50 %", STEADY, "own", 12, SHORT),
    *_one_key_and_two("TTFT 3 s, 128 slots", SLOW, "own", 15, SHORT),
    *_one_key_and_two("8 ranks", {"ranks": 8}, "own", 6, RANKS_PROMPTS),
    *_one_key_and_two("8 ranks, long prompts", {"ranks": 8, **LONG}, "long-prompts", 1.6, LONG_PROMPTS),
    Surprise("TTFT 1 s +- 50 %, no metrics", [{**STEADY, **MUTE}], "own", 12, SHORT),
    Surprise("TTFT 1 s +- 50 %, no metrics, no streams", [{**STEADY, **MUTE}], "own", 12, SHORT, stream_share=0.0),
    Surprise("TTFT 3 s, 128 slots, no metrics", [{**SLOW, **MUTE}], "own", 15, SHORT),
    Surprise("8 ranks, no metrics", [{"ranks": 8, **MUTE}], "own", 6, RANKS_PROMPTS),
    Surprise("8 ranks, long prompts, no metrics", [{"ranks": 8, **LONG, **MUTE}], "long-prompts", 1.6, LONG_PROMPTS),
    _beside_others("others use all slots", {"max_sequences": 8}, 1.9, prompt_tokens=2000, output_tokens=200),
    _beside_others("others send long prompts", {}, 4, prompt_tokens=4000, output_tokens=20),
    _beside_others("others send a batch", {}, 10, prompt_tokens=4000, output_tokens=20, at=20, lasts=20),
    Surprise(
        "500 endpoints",
        [{"count": MANY, **LONG}],
        "documents",
        140,
        {"documents": 6 * MANY, "shortest": 10_000, "longest": 80_000, "output_tokens": 90},
        seconds=30.0,
        # As the product does with so many.
        scrape_interval=1.0,
    ),
]


@dataclass(frozen=True)
class Crowd:
    """What came of all requests of a run. Seconds, of those that were served."""

    requests: int
    refused: int
    ttft_mean: float
    ttft_p99: float


def run_crowd(run: Run) -> Crowd:
    """One simulation, to its end. Deterministic."""
    served = fleet_of(run, workload_of(run)).run()
    ttfts = sorted(one.first_at - one.submitted_at for one in served if one.first_at is not None)
    return Crowd(
        requests=len(served),
        refused=sum(one.outcome in REFUSED for one in served),
        ttft_mean=fmean(ttfts) if ttfts else 0.0,
        ttft_p99=percentile(ttfts, 99),
    )
