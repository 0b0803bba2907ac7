# SPDX-License-Identifier: Apache-2.0
"""The HTTP routing benchmark's own parts: what is asked, what is read of the answers, and what becomes of the figures.

What it measures is not looked at here: that takes minutes and a quiet machine (`make bench-routing-http`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
import pytest

from benchmarks.http_routing import pages
from benchmarks.http_routing.cells import CELLS, Cell, arrivals, body, digest, thinned, window
from benchmarks.http_routing.client import Answer, Call, Client, Counters, Reading, Request, counters
from benchmarks.http_routing.results import Row, Source, believed, keep, paired_seeds, read, row_of, simulated
from benchmarks.http_routing.routers import local, names, routers
from benchmarks.http_routing.trial import MAX_LAG_S, Trial, lateness
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.mock.text import block_hashes, render_chat
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.traces import TraceRow, mooncake_like
from lbproxy.sim.workloads.workload import Job
from tests.benchmarks.trials import one_trial
from tests.support.aio import run

TINY = Cell("tiny", "ladder", 1, {"groups": 2, "shared_tokens": 640, "question_tokens": 64, "output_tokens": 5})
TINY_RATES = {"warm_up_s": 0.5, "step_s": 1, "first_rate": 10, "last_rate": 10}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a cell of a second or two."""
    monkeypatch.setitem(CELLS, "tiny", replace(TINY, parameters={**TINY.parameters, **TINY_RATES}))
    return "tiny"


# What is asked


def test_thinning_keeps_conversations_whole() -> None:
    """Thinned by rows, a trace would lose the reuse of prefixes that it is replayed for."""
    rows = mooncake_like(1, requests=3000)
    some = thinned(rows, 0.5)
    kept = {row.blocks[1] for row in some if len(row.blocks) > 1}
    assert [row for row in rows if len(row.blocks) > 1 and row.blocks[1] in kept] == [
        row for row in some if len(row.blocks) > 1
    ]
    assert 0.4 < len(some) / len(rows) < 0.6
    assert thinned(rows, 1.0) == rows


def test_thinning_more_leaves_a_part_of_thinning_less() -> None:
    rows = mooncake_like(1, requests=500)
    assert set(thinned(rows, 0.3)) < set(thinned(rows, 0.6))


def test_a_window_is_a_stretch_of_the_trace_at_its_own_pace() -> None:
    rows = [TraceRow(float(at), 600, 5, (0, at + 1)) for at in range(1000)]
    some = window(rows, 50, seed=3)
    assert len(some) == 50
    assert 0 <= some[0].at_s < 1
    assert all(later.at_s - earlier.at_s == pytest.approx(1) for earlier, later in pairwise(some))
    assert window(rows, 50, seed=4)[0].blocks != some[0].blocks


@pytest.mark.parametrize("cell", CELLS)
def test_equal_seeds_ask_the_same(cell: str) -> None:
    rows = mooncake_like(1, requests=4000)
    asked = [arrivals(CELLS[cell], seed, rows, short=True) for seed in (1, 1, 2)]
    first, again, other = ([(at, job.id, job.session) for phase in one for at, job in phase] for one in asked)
    assert first == again != other
    assert all(session for _, _, session in first)


def test_only_the_beginning_of_a_trace_is_a_warm_up() -> None:
    cell = CELLS["mooncake"]
    (phase,) = arrivals(cell, 1, mooncake_like(1), short=False)
    warm_up_s = min(cell.warm_up_s, cell.parameters["duration_s"] / 3)
    assert all((job.phase != "") == (at < warm_up_s) for at, job in phase)


def test_equal_beginnings_of_prompts_are_equal_blocks_of_bodies() -> None:
    """The servers must find in their caches over HTTP what they find in virtual time."""

    def blocks(*pieces: Piece) -> list[int]:
        fields = orjson.loads(body(Job("1", pieces, Piece(9, 5))))
        return block_hashes(render_chat((message["role"], message["content"]) for message in fields["messages"]))

    one, other = blocks(Piece(1, 512), Piece(2, 512), Piece(3, 100)), blocks(Piece(1, 512), Piece(2, 512), Piece(4, 90))
    same = sum(a == b for a, b in zip(one, other, strict=False))
    assert same == 1024 // 16


def test_the_digest_is_of_every_byte_and_time() -> None:
    phase = [(0.5, Job("1", (Piece(1, 40), Piece(2, 10)), Piece(3, 5), session="1"))]
    later = [(0.6, phase[0][1])]
    longer = [(0.5, Job("1", (Piece(1, 40), Piece(2, 11)), Piece(3, 5), session="1"))]
    assert len({digest([phase]), digest([later]), digest([longer])}) == 3


# What is read


def test_events_are_counted_however_they_are_cut() -> None:
    job = Job("1", (Piece(1, 4),), Piece(2, 3))
    usage = b'{"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'
    text = b'data: {"a"}\n\ndata: {"b"}\n\ndata: {"c"}\n\ndata: ' + usage + b"\n\ndata: [DONE]\n\n"
    whole = Reading()
    whole.feed(text, 1.0)
    for size in (1, 3, 7):
        reading = Reading()
        for number, start in enumerate(range(0, len(text), size)):
            reading.feed(text[start : start + size], 1.0 + number)
        assert 1 + len(reading.gaps_s) == 5
        assert reading.failure(job) is None
        assert reading.cached_tokens() == 2
    assert whole.gaps_s == []
    assert whole.first_at == 1.0


@pytest.mark.parametrize("said", [b"", b'data: {"usage":{"completion_tokens":3}}\n\n', b"data: [DONE]\n\n"])
def test_an_answer_without_its_end_has_failed(said: bytes) -> None:
    reading = Reading()
    reading.feed(said, 1.0)
    assert reading.failure(Job("1", (Piece(1, 4),), Piece(2, 3))) == "cut off"


def test_an_answer_of_another_length_has_failed() -> None:
    reading = Reading()
    reading.feed(b'data: {"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n', 1.0)
    assert reading.failure(Job("1", (Piece(1, 4),), Piece(2, 3))) == "2 of 3 tokens"


def test_a_replay_against_a_server_itself(tiny: str) -> None:
    """The whole client: every request is answered, timed, and counted by the server as it is by the client."""

    async def replay() -> tuple[Answer, Counters]:
        async with MockServer(MockOptions(speed=20, max_model_len=8192)) as server, aiohttp.ClientSession() as http:
            urls = [server.url]
            request = Request(cell=tiny, seed=1, short=False, trace=None, port=server.port, servers=urls)
            answer = await Client(request, http).run()
            async with http.get(f"{server.url}/metrics") as response:
                return answer, counters(await response.read())

    answer, counted = run(replay())
    phases = Source(None, False).phases(tiny, 1)
    assert [len(phase) for phase in answer["phases"]] == [len(phase) for phase in phases]
    calls = [call for phase in answer["phases"] for call in phase]
    assert [call["failure"] for call in calls] == [None] * len(calls)
    assert all(call["first"] is not None and 0 < call["first"] <= call["ended"] for call in calls)
    assert counted["finished"] == len(calls)
    assert counted["hit_tokens"] == sum(call["cached_tokens"] for call in calls) > 0
    assert answer["digest"] == digest(phases)


# What becomes of it


def call(number: str, *, first: float | None = 0.2, ended: float = 1.2, failure: str | None = None) -> Call:
    return Call(id=number, due=10.0, sent=0.0, first=first, ended=ended, cached_tokens=0, failure=failure)


def count(prompt: float, hits: float, finished: float) -> Counters:
    return Counters(prompt_tokens=prompt, hit_tokens=hits, finished=finished, preemptions=0)


def trial_of(cell: str, phases: list[list[Call]], marks: list[list[Counters]], *, lag_s: float = 0.001) -> Trial:
    answer = Answer(
        digest="d",
        phases=phases,
        gaps_s={"mean": 0.02, "p50": 0.02, "p99": 0.05},
        counters=marks,
        server_lag_s=lag_s,
        client_lag_s=0.001,
        client_cpu_s=1.0,
    )
    return one_trial(cell, answer, shares=[9], seconds=60.0)


def test_the_warm_up_counts_nowhere(tiny: str) -> None:
    source = Source(None, False)
    phases = source.phases(tiny, 1)
    calls = [[call(job.id) for _, job in phase] for phase in phases]
    calls[0][0] = call("0", first=None, failure="status 500")
    calls[1][0] = call(calls[1][0]["id"], first=5.0, ended=6.0)
    row = row_of(trial_of(tiny, calls, [[count(0, 0, 0)], [count(100, 0, 9)], [count(300, 150, 19)]]), source)
    counted = len(calls[1])
    assert row["summary"]["requests"] == counted
    assert row["summary"]["failed"] == 0
    assert row["summary"]["ttft_mean"] == pytest.approx((0.2 * (counted - 1) + 5) / counted)
    assert row["summary"]["hit_ratio"] == 0.75
    assert row["answered"] == [10]
    assert row["failures"] == {"status 500": 1}


def test_what_failed_counts_against_goodput_and_as_failed(tiny: str) -> None:
    source = Source(None, False)
    calls = [[call(job.id, ended=0.3) for _, job in phase] for phase in source.phases(tiny, 1)]
    good = row_of(trial_of(tiny, calls, [[count(1, 0, 0)]] * 3), source)["summary"]
    calls[1][0] = call(calls[1][0]["id"], failure="cut off")
    one_failed = row_of(trial_of(tiny, calls, [[count(1, 0, 0)]] * 3), source)["summary"]
    assert good["goodput"] == 1
    assert one_failed["failed"] == 1
    assert one_failed["goodput"] == pytest.approx(1 - 1 / len(calls[1]))


def test_a_late_run_is_rejected() -> None:
    def late(lag_s: float, *most_s: float) -> str | None:
        return lateness(trial_of("b2b", [], [], lag_s=lag_s)["answer"], *most_s)

    assert late(MAX_LAG_S) is None
    assert late(0.0062) == "servers 6.2 ms late"
    assert late(0.0062, 0.01) is None


def test_virtual_time_is_asked_the_same(tiny: str) -> None:
    source = Source(None, False)
    summary = simulated(tiny, 1, "adaptive", source)
    assert summary.requests == len(source.phases(tiny, 1)[1])
    assert summary.failed == 0
    assert summary == simulated(tiny, 1, "adaptive", source)


# Kept runs and tables


def some_row(router: str, seed: int, ttft: float, *, asked: str = "d", rejected: str | None = None) -> Row:
    phases = Source(None, True).phases("b2b", 1)[:2]
    calls = [[call(job.id, first=ttft, ended=ttft + 1) for _, job in phase] for phase in phases]
    marks = [[count(0, 0, 0)] * 4, [count(1, 0, 1)] * 4, [count(2, 1, 2)] * 4]
    row = row_of(trial_of("b2b", calls, marks), Source(None, True))
    return {**row, "router": router, "seed": seed, "digest": asked, "rejected": rejected}


def test_rejected_runs_and_unpaired_seeds_are_not_compared() -> None:
    rows = [
        some_row("lbproxy", 1, 0.1, rejected="late"),
        some_row("lbproxy", 1, 0.2),
        some_row("nginx", 1, 0.3),
        some_row("lbproxy", 2, 0.2),
        some_row("nginx", 2, 0.3, asked="other"),
        some_row("lbproxy", 3, 0.2),
    ]
    runs = believed(rows)["b2b"]
    assert runs["lbproxy"][1]["summary"]["ttft_mean"] == pytest.approx(0.2)
    assert paired_seeds(runs) == [1]


def test_a_router_that_fails_requests_is_not_the_best_of_the_others() -> None:
    """Of 1,000 it served a few, fast."""
    fast = some_row("smg", 1, 0.01)
    fast["summary"] = {**fast["summary"], "requests": 1000, "failed": 11}
    rows = [some_row("lbproxy", 1, 0.2), some_row("nginx", 1, 0.4), fast]
    found = pages.comparable(believed(rows), ["lbproxy", "nginx", "smg"], lambda *_: None)
    text = pages.page(found, ["about"], [])
    assert "0.50x (nginx)" in text
    assert "| smg | 0.01 |" in text, "it is in the table of the cell"


def test_the_page_says_who_is_best_and_marks_what_misses_the_target() -> None:
    rows = [some_row("lbproxy", 1, 0.2), some_row("nginx", 1, 0.1), some_row("smg", 1, 0.4)]
    found = pages.comparable(believed(rows), ["lbproxy", "nginx", "smg", "litellm"], lambda *_: None)
    text = pages.page(found, ["about"], ["litellm: not there"])
    (line,) = [line for line in text.splitlines() if line.startswith("| b2b |")]
    assert "**2.00x** (nginx)" in line
    assert "| smg | 0.4 |" in text
    assert "- litellm: not there" in text


@pytest.mark.parametrize(
    ("figure", "ratio", "met"),
    [
        ("ttft_mean", 1.03, True),
        ("ttft_mean", 1.04, False),
        ("ttft_p99", 1.4, True),
        ("goodput", 0.98, True),
        ("hit_ratio", 0.96, False),
    ],
)
def test_targets(figure: str, ratio: float, met: bool) -> None:
    assert pages.within(figure, ratio) is met


def test_names_of_routers_are_distinct_and_each_gets_every_server() -> None:
    assert len(set(names())) == len(names())
    for router in routers(local([7001, 7002])):
        said = " ".join([*router.subject.command, *router.subject.files.values()])
        assert "127.0.0.1:7001" in said
        assert "127.0.0.1:7002" in said


def test_runs_are_kept_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    rows = [some_row("lbproxy", 1, 0.2), some_row("nginx", 1, 0.3)]
    assert read(path) == []
    for row in rows:
        keep(path, row)
    assert read(path) == rows


def test_a_router_whose_core_was_full_is_named() -> None:
    """Its figures are its CPU's: a table that did not say so would blame its rule."""
    full = some_row("litellm", 1, 2.0)
    full["router_cpu_s"] = 0.9 * full["seconds"]
    rows = [some_row("lbproxy", 1, 0.2), full]
    text = pages.page(pages.comparable(believed(rows), ["lbproxy", "litellm"], lambda *_: None), ["about"], [])
    assert "not their rule's: litellm." in text
