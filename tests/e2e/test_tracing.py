# SPDX-License-Identifier: Apache-2.0
"""Traces of the product as installed: from a client's traceparent to spans at a collector; and that off is off."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from lbproxy.extras.installing import needs
from tests.e2e.test_product import gauge
from tests.support.aio import run, until
from tests.support.endpoint import OK, ScriptedEndpoint, answer
from tests.support.otlp import CLIENT, SERVER, Collector, Span
from tests.support.process import LBPROXY, Process, children_of, lbproxy, lbproxy_beside, mock

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
BODY = {"model": "sim", "prompt": "the words of a prompt", "max_tokens": 5, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


PROTOBUF = "_upb"
"""In the name of the library that spans are encoded by."""


def placed(span: Span) -> bool:
    return span.kind == SERVER and "lbproxy.endpoint" in span.attributes


def mapped(process: Process) -> str:
    """The libraries in its memory; Python's modules cannot be seen from outside."""
    pid = process.process.pid
    return "".join(Path(f"/proc/{one}/maps").read_text() for one in (pid, *children_of(pid)))


def test_a_clients_trace_goes_through_to_the_spans_of_a_stream(tmp_path: Path) -> None:
    with (
        Collector() as collector,
        mock("--speed", "20") as (_, server),
        lbproxy(tmp_path, [server], f"traces: {{endpoint: '{collector.url}'}}") as (process, url, admin),
    ):
        process.wait_for("serves sim")
        reply = httpx.post(f"{url}/v1/completions", json={**BODY, **USAGE}, headers=HEADERS)
        assert reply.status_code == 200
        (root,) = run(collector.has(1, placed))
        (attempt,) = (span for span in collector.spans if span.parent_id == root.span_id)
        assert (root.trace_id, root.parent_id, root.state) == (TRACE, SPAN, "a=1")
        assert (attempt.kind, attempt.trace_id) == (CLIENT, TRACE)
        assert PROTOBUF in mapped(process)
        assert root.begin_ns <= attempt.begin_ns <= attempt.events["first token"] <= attempt.end_ns == root.end_ns
        assert root.attributes["gen_ai.usage.output_tokens"] == 5
        assert root.attributes["lbproxy.request_id"] == reply.headers["x-request-id"]
        assert attempt.attributes["url.full"] == f"{server}/v1/completions"
        assert "words" not in repr(collector.spans), "no text of a prompt"
        run(until(lambda: gauge(admin, "lbproxy_traces_total").get('{result="sent"}') == 1, "it is counted"))
        run(until(lambda: process.lines("request"), "it is logged"))
        assert process.lines("request")[0]["trace_id"] == TRACE


def test_a_retry_shows_both_attempts_and_each_server_its_own_parent(tmp_path: Path) -> None:
    """The two servers answer in this loop; lbproxy is a process."""

    async def main() -> None:
        healthy = {"/health": OK, "/v1/models": answer(b'{"data":[{"id":"sim"}]}')}
        async with (
            ScriptedEndpoint({**healthy, "/v1/completions": answer(status=503)}) as bad,
            ScriptedEndpoint({**healthy, "/v1/completions": OK}) as good,
        ):
            more = f"traces: {{endpoint: '{collector.url}'}}\nrouting: {{policy: round-robin}}"
            async with lbproxy_beside(tmp_path, [bad.url, good.url], more) as (process, url, _):
                for server in (bad, good):
                    name = server.url.removeprefix("http://")
                    await until(lambda: f"{name} serves sim" in process.read(), "served", within_s=30.0)  # noqa: B023
                async with httpx.AsyncClient() as client:
                    for _ in range(2):  # one of the two goes to the bad one first
                        reply = await client.post(f"{url}/v1/completions", json=BODY, headers=HEADERS)
                        assert reply.status_code == 200
                await collector.has(2, placed)
            retried = next(one for one in collector.spans if one.attributes.get("lbproxy.attempts") == 2)
            attempts = [span for span in collector.spans if span.parent_id == retried.span_id and span.kind == CLIENT]
            assert [(span.failed, span.attributes["http.response.status_code"]) for span in attempts] == [
                (True, 503),
                (False, 200),
            ]
            for server, attempt in zip((bad, good), attempts, strict=True):
                told = [one.field("traceparent") for one in server.requests if one.path == "/v1/completions"]
                assert f"00-{TRACE}-{attempt.span_id}-01" in told

    with Collector() as collector:
        run(main())


def test_a_reload_turns_traces_on_and_off_and_the_end_sends_what_waits(tmp_path: Path) -> None:
    with Collector() as collector, mock("--speed", "20") as (_, server), lbproxy(tmp_path, [server]) as running:
        process, url, admin = running
        config = tmp_path / "cfg.yaml"
        off = config.read_text()

        def ask() -> None:
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers=HEADERS).status_code == 200

        def reload(text: str) -> None:
            before = len(process.lines("reload"))
            config.write_text(text)
            process.process.send_signal(signal.SIGHUP)
            run(until(lambda: len(process.lines("reload")) > before, "it was read"))

        process.wait_for("serves sim")
        ask()
        assert gauge(admin, "lbproxy_traces_total") == {}
        reload(f"{off}\ntraces: {{endpoint: '{collector.url}'}}\n")
        ask()
        run(collector.has(1, placed))
        reload(off)
        ask()
        run(until(lambda: gauge(admin, "lbproxy_traces_total") == {}, "nothing is counted"))
        reload(f"{off}\ntraces: {{endpoint: '{collector.url}'}}\n")
        ask()
        assert process.stop() == 0
        assert sum(map(placed, collector.spans)) == 2, "the last was sent at the end, and those without settings never"


def test_a_collector_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    more = "traces: {endpoint: 'http://127.0.0.1:9', timeout: 100ms, queue_requests: 10}"
    with mock("--speed", "20") as (_, server), lbproxy(tmp_path, [server], more) as (process, url, admin):
        process.wait_for("serves sim")
        with httpx.Client() as client:
            for _ in range(50):
                assert client.post(f"{url}/v1/completions", json=BODY).status_code == 200
        run(until(lambda: gauge(admin, "lbproxy_traces_total").get('{result="failed"}', 0) > 0, "it is counted"))
        process.wait_for("traces cannot be sent, and are lost")
        assert process.stop() == 0


# --- Off, and on without the packages ---------------------------------------------------------------------------------

HERE = """
import sys
from lbproxy.commands import check, cli
from lbproxy.processes import app
from lbproxy.config.parse import parse
from lbproxy.extras.tracing import make_traces
assert make_traces(parse("endpoints: [http://gpu-1:8000]", environ={})) is None
found = [name for name in sys.modules if name.partition(".")[0] in {"opentelemetry", "google", "requests"}]
assert not found, found
print("nothing")
"""


def test_nothing_is_imported_while_traces_are_off() -> None:
    done = subprocess.run([sys.executable, "-c", HERE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("nothing\n", "")


def test_a_running_lbproxy_without_traces_has_none_of_it_in_memory(tmp_path: Path) -> None:
    with mock() as (_, server), lbproxy(tmp_path, [server]) as (process, url, _):
        process.wait_for("serves sim")
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=HEADERS).status_code == 200
        assert PROTOBUF not in mapped(process)


@pytest.mark.parametrize("command", ["run", "check"])
def test_without_the_packages_the_error_says_what_to_install(tmp_path: Path, command: str) -> None:
    """A package of that name that is empty hides the real ones."""
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("")
    config = tmp_path / "cfg.yaml"
    config.write_text(
        "listen: 127.0.0.1:0\nadmin: null\ntraces: {endpoint: http://c:4318}\nendpoints: [http://gpu-1]\n"
    )
    arguments = ["--config", str(config)] if command == "run" else ["check", "--config", str(config)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*LBPROXY, *arguments], capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert f"traces.endpoint: {needs('otel')}" in said
    assert not re.search("Traceback", said)


def test_a_reload_that_lacks_the_packages_is_refused_and_the_old_settings_hold(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "opentelemetry").mkdir(parents=True)
    (hidden / "opentelemetry" / "__init__.py").write_text("")
    config = tmp_path / "cfg.yaml"
    text = "listen: 127.0.0.1:0\nadmin: null\ndrain: {lame_duck: 0s}\nendpoints: [http://127.0.0.1:9]\n"
    config.write_text(text)
    with Process("--config", str(config), env={"PYTHONPATH": str(hidden)}) as process:
        process.wait_for("listens on")
        config.write_text(f"{text}traces: {{endpoint: http://c:4318}}\n")
        process.process.send_signal(signal.SIGHUP)
        process.wait_for(re.escape(needs("otel")))
        assert process.stop() == 0
