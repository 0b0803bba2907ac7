# SPDX-License-Identifier: Apache-2.0
"""What lbproxy reads of each API of coding agents is as good for routing as the prompts' own keys: in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.agent_apis import STATELESS, Reader, Result, conversation, home, measure, table
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.sim.fleet.fleet import Served
from lbproxy.sim.workloads.catalogue import make_workload
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job

SHORT = {"sessions": 26, "duration_s": 60, "warm_up_s": 20}


@pytest.mark.parametrize("api", STATELESS)
def test_conversations_stay_at_home_and_find_their_prefixes(api: str) -> None:
    """A single run, which says little of TTFT: `python -m benchmarks.agent_apis` does."""
    result = measure(api, 1, SHORT)
    assert result.summary.failed == 0
    assert result.home > 0.9
    assert result.summary.hit_ratio == pytest.approx(measure(None, 1, SHORT).summary.hit_ratio, rel=0.03)


@pytest.mark.parametrize("api", STATELESS)
def test_the_next_turn_has_the_keys_of_the_turn_before(api: str) -> None:
    workload = make_workload("coding-agents", SHORT, seed=1, rows=None)
    arrivals = workload.begin(0.0)
    assert arrivals
    reader = Reader(api, 1)
    compared = 0
    for _, job in list(arrivals):
        before = reader.read(job, request(job))
        for _, then in workload.ended(job, 1.0):
            if conversation(then) != conversation(job):
                continue  # a sub-agent
            after = reader.read(then, request(then))
            assert after.block_keys[: len(before.block_keys) - 1] == before.block_keys[:-1]
            assert after.prompt_bytes > before.prompt_bytes > 50_000
            compared += 1
    assert compared > 15


def request(job: Job) -> InferenceRequest:
    return InferenceRequest(job.id, "m", True, 0, 0, (), None)


def test_home_counts_turns_of_long_conversations() -> None:
    def turn(name: str, server: int, tokens: int = 4000, phase: str = "") -> Served:
        job = make_job(name, tokens, phase)
        return Served(job, 0.0, 0, True, server=server)

    served = [turn("a-1", 0, phase="warm-up"), turn("a-2", 0), turn("a-3", 1), turn("b-1", 1), turn("b-2", 1)]
    assert home(served) == pytest.approx(2 / 3)
    assert home([turn("c-1", 0, 100), turn("c-2", 1, 100)]) == 0.0


def make_job(name: str, tokens: int, phase: str) -> Job:
    return Job(name, (Piece(1, tokens),), Piece(2, 5), phase=phase)


def test_the_table_compares_with_chat() -> None:
    one = measure("chat", 1, {"sessions": 4, "duration_s": 30, "warm_up_s": 10})
    rows = table({"chat": [one, one], "messages": [one, Result(one.summary, 0.5)]}).splitlines()
    assert "+0.0%" in rows[3]
    assert "50.0%" in rows[3]
