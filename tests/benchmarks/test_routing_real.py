# SPDX-License-Identifier: Apache-2.0
"""The real servers' routing benchmark: what is asked, and what becomes of the figures.

What it measures is not looked at here: that takes real servers and a quiet machine (`make bench-routing-real`).
"""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
import pytest

from benchmarks.http_routing.client import Answer
from benchmarks.http_routing.results import keep
from benchmarks.routing_real.cells import CELLS, MAX_ANSWER, Cell, Kind, Recorded, chat_body, kind_of
from benchmarks.routing_real.client import RecordedClient
from benchmarks.routing_real.fleet import ServerSet
from benchmarks.routing_real.load import request_of
from benchmarks.routing_real.pages import Stored, medians, page, ratio
from benchmarks.routing_real.results import MAX_WAITING, Row, believed, comparable, read, rejected, row_of
from benchmarks.routing_real.servers import ON_CPU
from benchmarks.routing_real.trial import ROUTERS, Task, Trial, chosen, order
from lbproxy.sim.figures.report import summarise
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.workloads.prompts import size
from lbproxy.sim.workloads.workload import Job
from tests.support.aio import run

SHORT = Cell(
    "short",
    {
        "agents": Kind(
            users=2, heads=1, head_tokens=320, turn_tokens=20, answer_tokens=4, turns=4, max_context=600, think_s=0.05
        ),
        "one-off": Kind(users=1, turn_tokens=100, answer_tokens=4, turns=1, max_context=600, think_s=0.05),
    },
    warm_up_s=0.4,
    duration_s=1.2,
)


def replayed(cell: Cell, seed: int, chance: random.Random) -> dict[str, tuple[Job, float]]:
    """All jobs of a cell by id, with the pauses before them, if responses take times of this chance."""
    workload = Recorded(cell, seed)
    live = [(at, at, job) for at, job in workload.begin(100.0) or ()]
    found = {}
    while live:
        live.sort(key=lambda one: one[0])
        at, pause, job = live.pop(0)
        found[job.id] = job, round(pause, 6)
        end = at + chance.uniform(0.1, 3.0)
        live += [(later, later - end, following) for later, following in workload.ended(job, end)]
    return found


@pytest.mark.parametrize("name", CELLS)
def test_sessions_are_recorded_whatever_the_servers_do(name: str) -> None:
    """Texts, lengths and pauses must be the same for every router; only when a turn is sent may differ."""
    one, other = (replayed(CELLS[name], 1, random.Random(chance)) for chance in (1, 2))
    common = one.keys() & other.keys()
    assert len(common) > 0.5 * len(one)
    for job in common:
        (a, pause), (b, other_pause) = one[job], other[job]
        assert (a.prompt, a.answer, a.session, pause) == (b.prompt, b.answer, b.session, other_pause)
    assert {job.prompt for job, _ in one.values()} != {
        job.prompt for job, _ in replayed(CELLS[name], 2, random.Random(1)).values()
    }


@pytest.mark.parametrize("name", CELLS)
def test_requests_fit_the_servers(name: str) -> None:
    """A server refuses what is longer than its model's context, and the chat template adds some."""
    cell = CELLS[name]
    for job, _ in replayed(cell, 3, random.Random(3)).values():
        who = cell.kinds[job.flow]
        assert size(job.prompt) + job.answer.tokens <= max(
            who.max_context,
            who.head_tokens + who.max_context // 2 + max(MAX_ANSWER, 4 * who.answer_tokens),
        )
        assert size(job.prompt) + job.answer.tokens < ON_CPU.max_model_len - 96
        assert kind_of(cell, job.id) == job.flow


def test_a_session_is_its_system_prompt_and_all_that_was_said() -> None:
    by_session: dict[str, list[Job]] = {}
    for job, _ in replayed(CELLS["mixed"], 1, random.Random(1)).values():
        by_session.setdefault(str(job.session), []).append(job)
    longest = max(by_session.values(), key=len)
    assert len(longest) > 4
    for before, after in pairwise(longest):
        assert after.prompt[: len(before.prompt) + 1] == (*before.prompt, before.answer)
    roles = [message["role"] for message in orjson.loads(chat_body(longest[-1]))["messages"]]
    assert roles == ["system", *(["user", "assistant"] * len(roles))[: len(roles) - 1]]
    heads = {job.prompt[0] for job, _ in replayed(CELLS["system prompts"], 1, random.Random(1)).values()}
    assert len(heads) == CELLS["system prompts"].kinds["apps"].heads


def test_only_what_is_sent_before_the_warm_up_ends_is_a_warm_up() -> None:
    workload = Recorded(SHORT, 1)
    first = workload.begin(50.0) or ()
    assert all(50.0 <= at <= 50.2 and job.phase == "warm-up" for at, job in first)
    ((at, following),) = workload.ended(first[0][1], 50.45)
    assert at > 50.45
    assert following.phase == ""
    assert workload.ended(following, 51.2) == ()
    assert workload.begin(60.0) is None


def test_every_round_has_each_router_once_in_an_order_of_its_own() -> None:
    tasks = order(["mixed"], 6, ROUTERS)
    rounds = [[task.router for task in tasks if task.seed == seed] for seed in range(1, 7)]
    assert all(sorted(one) == sorted(ROUTERS) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 3
    assert [router.name for router in chosen([])] == list(ROUTERS)


def test_a_replay_before_simulated_servers() -> None:
    """The client and what is made of its figures, end to end."""

    async def replay() -> Answer:
        async with MockServer(MockOptions(model="sim")) as server, aiohttp.ClientSession() as http:
            servers = ServerSet([server.url] * 2, "sim", 4096)
            request = request_of("short", SHORT, servers, seed=1, port=server.port, words=0)
            return await RecordedClient(request, http).run()

    answer = run(replay(), timeout_s=30)
    row = row_of(Trial(Task("short", 1, "lbproxy"), SHORT, answer, 0.1, 1.0, 0.1, 0.0, 10.0))
    assert row["failures"] == {}
    assert row["summary"]["requests"] == sum(one["requests"] for one in row["kinds"].values()) > 0
    assert row["kinds"]["agents"]["hit_ratio"] > 0.5 > row["kinds"]["one-off"]["hit_ratio"]
    assert 0 < row["summary"]["hit_ratio"] < 1
    assert min(row["finished"]) > 0, "of the same server, but not read at the same moment"


def row(router: str, seed: int, ttft: float, hits: float = 0.5, **more: object) -> Row:
    summary = {
        **asdict(summarise([], 2)),
        "requests": 10,
        "ttft_mean": ttft,
        "ttft_p90": 2 * ttft,
        "e2e_mean": 1 + ttft,
    }
    summary["hit_ratio"] = hits
    made = Row(
        cell="mixed",
        seed=seed,
        router=router,
        digest="d",
        summary=summary,
        kinds=dict.fromkeys(CELLS["mixed"].kinds, summary),
        finished=[6, 4],
        hit_ratios=[0.5, 0.4],
        preemptions=0,
        failures={},
        client_lag_s=0.002,
        router_cpu_s=0.2,
        servers_cpu_s=40.0,
        servers_waited_s=4.0,
        client_cpu_s=0.3,
        others_cpu_s=0.1,
        seconds=40.0,
    )
    made.update(more)  # type: ignore[typeddict-item]
    return made


def test_runs_beside_other_work_are_not_believed(tmp_path: Path) -> None:
    disturbed = row("smg", 1, 9.0, servers_waited_s=40.0 * MAX_WAITING + 1)
    assert rejected(disturbed) is not None
    for one in (row("smg", 1, 1.0), row("smg", 1, 2.0), disturbed):
        keep(tmp_path / "rows", one)  # type: ignore[arg-type]
    assert believed(read(tmp_path / "rows"))["mixed"]["smg"][1]["summary"]["ttft_mean"] == 2.0


def test_only_rounds_that_all_have_and_were_asked_the_same_in_are_compared() -> None:
    runs = {
        "lbproxy": {seed: row("lbproxy", seed, 1.0) for seed in (1, 2, 3)},
        "smg": {1: row("smg", 1, 1.0), 3: row("smg", 3, 1.0, digest="other")},
    }
    assert {router: [one["seed"] for one in found] for router, found in comparable(runs).items()} == {
        "lbproxy": [1],
        "smg": [1],
    }


def test_figures_are_medians_of_rounds_and_their_ratios() -> None:
    ours = [row("lbproxy", seed, ttft) for seed, ttft in enumerate((1.0, 1.0, 10.0))]
    theirs = [row("smg", seed, ttft) for seed, ttft in enumerate((2.0, 3.0, 10.0))]
    found = ratio(theirs, ours, lambda one: one["summary"]["ttft_mean"])
    assert found is not None
    assert (found.mean, found.low, found.high) == (2.0, 1.0, 3.0)
    assert (
        ratio(theirs, [row("lbproxy", seed, 0.0) for seed in range(3)], lambda one: one["summary"]["ttft_mean"]) is None
    )
    assert medians([3.0]).low == medians([3.0]).high == 3.0
    many = medians([float(number) for number in range(101)])
    assert 30 < many.low < 50 == many.mean < many.high < 70


def test_the_page_tells_who_is_best_and_who_is_missing() -> None:
    runs = [row("lbproxy", seed, 1.0, 0.8) for seed in (1, 2)]
    runs += [row("smg", seed, 2.0, 0.6) for seed in (1, 2)] + [
        row("nginx least_conn", seed, 0.5, 0.4) for seed in (1, 2)
    ]
    about = Stored(
        command="make it",
        servers=ON_CPU.facts(hardware="CPU", model="m", version="1", shared=False),
        cells={"mixed": orjson.loads(orjson.dumps(CELLS["mixed"]))},
        date="today",
        machine="m",
        versions=["smg 1: defaults"],
        outside=["x: none"],
        runs=runs,
    )
    text = page(about)
    assert "Two cores run everything" in text
    assert "4 agents, 7 chat, 1 one-off; contexts up to 3,600 tokens; 2 rounds of 34 s" in text
    assert "share one GPU" in page({**about, "servers": {**about["servers"], "shared": True}})
    assert "| mixed | 2.00x [2.00, 2.00] (nginx least_conn) |" in text
    runs[-1]["summary"] = {**runs[-1]["summary"], "failed": 1}
    assert "| mixed | 0.50x [0.50, 0.50] (smg) |" in page(about), "nginx fails 5 %"
    assert "1.33x [1.33, 1.33] (smg) |" in text
    assert "- smg 1: defaults" in text
    assert "- x: none" in text
    assert "system prompts\n" not in text
