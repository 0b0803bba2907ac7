# SPDX-License-Identifier: Apache-2.0
"""What the fairness benchmark asks over HTTP, what it reads there, and that its page is of its runs."""

from __future__ import annotations

import pytest

from benchmarks.fairness import PAGE, inversions
from benchmarks.fairness_http import (
    FLOWS,
    PRIORITIES,
    RESULTS,
    STAMP_S,
    arrivals,
    by_client,
    by_log,
    read_log,
    rendered,
    run_of,
    settings,
    waiting,
)
from benchmarks.http_routing.client import Call
from lbproxy.config.parse import parse
from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job

LOG = b"""\
{"event":"ready","time":"2026-01-01T00:00:00.000Z"}
not of ours
{"event":"request","id":"low","time":"2026-01-01T00:00:10.000Z","duration_ms":9000.0,"queue_ms":2000.0}
{"event":"request","id":"high","time":"2026-01-01T00:00:10.000Z","duration_ms":%s,"queue_ms":%s}
"""
NEW_YEAR = 1767225600.0


def call(request_id: str, failure: str | None) -> Call:
    return Call(id=request_id, due=5.0, sent=0.0, first=1.0, ended=2.0, cached_tokens=3, failure=failure)


def job(request_id: str, priority: int | None = None) -> Job:
    return Job(request_id, (Piece(0, 10),), Piece(1, 10), priority=priority)


@pytest.mark.parametrize(
    ("duration_ms", "queue_ms", "count"),
    [
        (b"8000.0", b"4000.0", 1),  # came at 2 s, placed at 6 s: the other was placed at 3 s
        (b"8000.0", b"null", 1),  # refused after 8 s
        (b"8000.0", b"1040.0", 0),  # within the grace
        (b"6999.0", b"4000.0", 0),  # came afterwards
        (b"7001.0", b"4000.0", 0),  # came before by less than the log can tell
    ],
)
def test_the_access_log_tells_who_was_passed_over(duration_ms: bytes, queue_ms: bytes, count: int) -> None:
    sent = [(0.0, job("low")), (1.0, job("high", 1))]
    served = by_log(sent, read_log(LOG % (duration_ms, queue_ms)), NEW_YEAR)
    assert (served[0].submitted_at, served[0].placed_at) == pytest.approx((1.0, 3.0))
    assert inversions(served, STAMP_S) == count


def test_a_refusal_is_no_failure() -> None:
    failures = {"done": None, "told": 'status 429: b"..."', "broken": "cut off"}
    served = by_client([(3.0, job(one)) for one in failures], [call(*one) for one in failures.items()])
    assert [one.outcome for one in served] == [Outcome.COMPLETED, Outcome.SATURATED, Outcome.UPSTREAM_BROKE]
    assert [(one.submitted_at, one.first_at, one.ended_at) for one in served] == [(3.0, 4.0, 5.0)] * 3


def test_the_queue_is_read_of_the_metrics() -> None:
    assert waiting(b"# TYPE lbproxy_waiting_requests gauge\nlbproxy_waiting_requests 17.0\n") == 17


def test_flows_and_priorities_are_those_of_the_keys() -> None:
    for name in (FLOWS, PRIORITIES):
        run = run_of(name, 1, 20.0)
        found = parse(settings(run, 8080, 9901, ["http://127.0.0.1:1"]), environ={})
        flows = {one.flow for _, one in arrivals(run)}
        assert flows < {one.name for one in found.auth.keys}
        assert found.admission == run.scenario.admission.model_copy(update={"hold": None})
        wanted = {one.flow: one.priority for one in run.scenario.workloads if one.priority is not None}
        assert {flow: rules.priority for flow, rules in found.flows.named.items()} == wanted


def test_the_page_is_of_the_runs() -> None:
    text = PAGE.read_text("utf-8")
    assert text.endswith(f"\n\n{rendered(RESULTS.read_bytes())}")
