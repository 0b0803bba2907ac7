# SPDX-License-Identifier: Apache-2.0
"""Where requests for adapters go, in virtual time: homes, second homes, and the base model beside them."""

from __future__ import annotations

from collections import Counter

from lbproxy.commands.sim import Run, runs_of, serve, serve_workload
from lbproxy.config.scenario import Scenario
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.figures.report import summarise
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job, OpenLoop, Workload, fresh_ids


def run_of(
    *, servers: int = 3, slots: int = 2, known: bool = True, policy: object = "adaptive", **parameters: float
) -> Run:
    keys = {
        "fleet": [{"count": servers, "max_loras": slots}],
        "workload": {"name": "lora", "parameters": parameters},
        "policies": [policy],
        "seeds": 1,
        "adapters_known": known,
    }
    return runs_of(Scenario.model_validate(keys), source="test")[0]


def homes(served: list[Served]) -> dict[str | None, Counter[int | None]]:
    """By adapter, how many requests each server got."""
    found: dict[str | None, Counter[int | None]] = {}
    for one in served:
        assert one.outcome is Outcome.COMPLETED
        found.setdefault(one.job.model, Counter())[one.server] += 1
    return found


def test_an_adapter_spreads_when_its_home_is_saturated() -> None:
    """One server can do about 14 of these requests a second."""
    served = serve(run_of(adapters=1, rate=30, duration_s=20))
    (counts,) = homes(served).values()
    assert len(counts) == 3
    assert min(counts.values()) > 0.2 * len(served)
    assert summarise(served, 3).ttft_p90 < 1.0
    assert sum(one.loaded_adapter for one in served) == 3, "once on each"


def test_affinity_saves_loads_and_waits() -> None:
    """Also that what the benchmark compares with is without it."""
    on, off = (summarise(serve(run_of(adapters=6, rate=4, duration_s=40, known=known)), 3) for known in (True, False))
    assert off.adapter_loads > 2 * on.adapter_loads
    assert off.ttft_p90 > 2 * on.ttft_p90


def test_the_scorer_keeps_adapters_at_home_under_the_weighted_policy() -> None:
    weights = {"lora": 3, "in-flight": 1}, {"in-flight": 1}
    policies = [{"policy": "weighted", "scorers": scorers} for scorers in weights]
    on, off = (summarise(serve(run_of(adapters=6, rate=4, duration_s=40, policy=policy)), 3) for policy in policies)
    assert off.adapter_loads > 1.5 * on.adapter_loads
    assert off.ttft_mean > 3 * on.ttft_mean


def some_then_the_base_model() -> Workload:
    """A minute of requests for an adapter, each alone, and then of requests for the base model."""
    ids = fresh_ids()
    first = [(n * 6.0, Job(f"a{n}", (Piece(ids(), 500),), Piece(ids(), 50), "adapter-0")) for n in range(10)]
    then = [(80 + n * 0.2, Job(f"b{n}", (Piece(ids(), 500),), Piece(ids(), 100))) for n in range(150)]
    return OpenLoop([[*first, *then]])


def test_an_adapter_stays_at_home_and_the_base_model_does_not_care_where() -> None:
    found = homes(serve_workload(run_of(adapters=1), some_then_the_base_model()))
    assert len(found["adapter-0"]) == 1
    assert min(found[None][server] for server in range(3)) >= 30
