# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies over HTTP: how runs are grouped, what is read of lbproxies, and that the page is of its runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import orjson
import pytest

from benchmarks import replicas_routing
from benchmarks.http_routing import several, trial
from benchmarks.http_routing.cells import CELLS, arrivals
from benchmarks.http_routing.results import Row, Source, summary
from benchmarks.http_routing.routers import OURS, SEVERAL
from benchmarks.http_routing.trial import Task
from benchmarks.overhead.process import StartError
from benchmarks.replicas_routing import (
    PAGE,
    RESULTS,
    judged,
    names,
    part_of,
    rendered,
    results,
    run,
    with_part,
)
from lbproxy.sim.figures.report import summarise
from lbproxy.sim.workloads.traces import TraceRow
from tests.benchmarks.trials import row

SHARED, UNSHARED = "2 lbproxies, redis-server", "2 lbproxies, unshared"


# Running


def test_a_run_is_judged_by_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    late_s = 0.011
    monkeypatch.setattr(trial, "run", lambda task, **_: row(task.router, task.seed, 0.1, late_s=late_s))
    monkeypatch.setattr(replicas_routing, "row_of", lambda found, _: found)
    asked = partial(run, Task("b2b", 8, SHARED), trace=None, source=Source(None, False))
    assert asked()["rejected"] == "client 11.0 ms late"
    late_s = 0.01
    assert asked()["rejected"] is None, "its servers were 8 ms late"


def test_names_are_of_the_stores_that_are_asked_for() -> None:
    assert names(["valkey-server"]) == [
        OURS,
        "2 lbproxies, valkey-server",
        "2 lbproxies, unshared",
        "3 lbproxies, valkey-server",
        "3 lbproxies, unshared",
    ]
    assert set(names([])) == {OURS, *(one.name for one in SEVERAL if one.store is None)}


def test_a_faster_trace_is_as_long() -> None:
    """Cut before it is sped up, a cell would end early."""
    cell = CELLS["mooncake, x1.5"]
    rows = [TraceRow(at / 2, 600, 5, (0, at)) for at in range(4000)]
    (phase,) = arrivals(cell, 1, rows, short=False)
    last = max(at for at, _ in phase)
    assert 0.9 * cell.parameters["duration_s"] < last <= cell.parameters["duration_s"]
    assert sum(job.phase != "" for _, job in phase) / len(phase) == pytest.approx(1 / 3, abs=0.1)


# The running lbproxies


@contextmanager
def listener(pages: dict[str, bytes]) -> Iterator[str]:
    """The URL of a server with these pages."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + pages[self.path])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def state(others: int | None, *, connected: bool = True) -> dict[str, bytes]:
    replicas: dict[str, object] | None = None
    if others is not None:
        replicas = {"connected": connected, "others": [{}] * others}
    return {"/admin/state": orjson.dumps({"replicas": replicas})}


def test_admin_listeners_are_read_of_what_was_written() -> None:
    said = "lbproxy 0.1.0 listens on http://127.0.0.1:{0}, admin on http://127.0.0.1:{1}; balances 4 endpoints\n"
    output = f'{{"event":"request"}}\n{said.format(80, 81)}nginx: [notice]\n{{"message":"{said.format(80, 82)}"}}'
    assert several.admins(output) == ["http://127.0.0.1:81", "http://127.0.0.1:82"]
    assert several.admins("nginx: started") == []


def test_lbproxies_that_do_not_know_of_each_other_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be measured as if they shared."""
    monkeypatch.setattr(several, "JOINED_S", 0.2)
    with listener(state(1)) as one, listener(state(0)) as alone, listener(state(1, connected=False)) as cut:
        several.wait_until_joined([one, one])
        for urls in ([one, alone], [cut, one], [one], [one] * 3):
            with pytest.raises(StartError, match="do not know"):
                several.wait_until_joined(urls)
    with pytest.raises(StartError, match="does not respond"):
        several.wait_until_joined([one])


def test_those_that_share_nothing_are_not_waited_for() -> None:
    with listener(state(None)) as one:
        several.wait_until_joined([one, one, one])


def test_ended_requests_are_counted_over_all_outcomes() -> None:
    page = b'# TYPE lbproxy_requests_total counter\nlbproxy_requests_total{code="200",route="chat"} 17.0\n'
    page += b'lbproxy_requests_total{code="503",route="chat"} 2.0\nlbproxy_requests_total_other{a="b"} 9.0\n'
    with listener({"/metrics": page}) as one:
        assert several.ended([one, one]) == [19, 19]


# The page


def made(*rows: Row, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The results of these, each twice as slow in virtual time as one lbproxy that takes 1 s."""

    def virtual(cell: str, seed: int, name: str, source: Source) -> object:
        figures = {**asdict(summarise([], 4)), "ttft_mean": 1.0 if name == OURS else 2.0}
        return summary(figures)

    monkeypatch.setattr(replicas_routing, "_virtual", virtual)
    monkeypatch.setattr(replicas_routing, "_versions", lambda: {"redis-server": "7.0.15"})
    return results(judged(rows), Source(None, False), trace=False, at_a_time=5)


def test_ratios_are_of_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(OURS, 1, 0.1), row(OURS, 2, 0.2), row(SHARED, 1, 0.2), row(UNSHARED, 1, 0.4, hits=0.4)]
    rows += [row(UNSHARED, 2, 0.8, hits=0.5), row(SHARED, 2, 9.0, late_s=0.02)]
    text = rendered(made(*rows, monkeypatch=monkeypatch))
    assert "| one | 2 | 0.150 | 1.00x | 1.00x | 0.60 | 0.800 | 3 |" in text
    assert "| 2, redis-server | 1 | 0.200 | 2.00x | 2.00x | 0.80 | 0.800 | 1 |" in text
    assert "| 2, unshared | 2 | 0.600 | 4.00x [4.00, 4.00] | 2.00x | 2.40 | 0.450 | 3 |" in text
    assert "| one | 100 to 100 | 5.0 | 10.0 | 2.0 / 2.0 |" in text
    assert "| 2, unshared | 40 to 60 | 5.0 | 10.0 | 2.0 / 2.0 |" in text
    assert "repeated: 1." in text
    assert text.count("### ") == 1


def test_runs_that_were_not_asked_the_same_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(row(OURS, 1, 0.1), row(SHARED, 1, 0.1, asked="other"), monkeypatch=monkeypatch)
    with pytest.raises(AssertionError, match="asked the same"):
        rendered(data)


def test_the_part_survives_when_the_page_is_written_anew() -> None:
    page = "# Title\n\ntext\n"
    first = with_part(page, "## Over HTTP\n\nold\n")
    assert first == "# Title\n\ntext\n\n## Over HTTP\n\nold\n"
    assert with_part(first, "## Over HTTP\n\nnew\n") == first.replace("old", "new")
    assert page + part_of(first) == first
    assert part_of(page) == ""


def test_the_page_is_of_the_runs() -> None:
    assert part_of(PAGE.read_text("utf-8")).lstrip("\n") == rendered(RESULTS.read_bytes())
