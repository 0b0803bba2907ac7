# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ show is true: settings parse, commands run, metrics and log lines are those of a live one.

The word in `<!-- test: WORD -->` above a fence:

- `demo` (sh, python): run before a running `lbproxy demo`, whose addresses stand in for the documented ones; must exit
  with 0 and print something.
- `crash` (sh): run by itself, at other ports.
- `faults` (sh): the same before a running `lbproxy mock`.
- `lora` (sh): before two simulated servers that take adapters, and an lbproxy that lets clients load them.
- `sleep` (sh): before two simulated servers that share a GPU, one of them asleep.
- `start`, `job` (sh): one after the other, with the settings of their page (tests/e2e/test_jobs.py); the second has
  the output below it.
- `keys` (sh): before an lbproxy with the settings above it (tests/e2e/test_docs_examples.py).
- `traces` (sh): before an lbproxy that sends traces to a collector.
- `refused` (yaml): settings that are wrong; the next block of the page is exactly what is said about them.
- `other` (yaml): not lbproxy's settings.
- `log` (json): one log line in each line, with the keys that a live one has.

All other yaml blocks are settings, whole or in part (then an endpoint is added), and must parse.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.config.parse import parse
from lbproxy.config.text import ConfigError
from tests.support.aio import run, until
from tests.support.docs import DOCS, PAGES, ROOT, Block, all_blocks, blocks, expect_generated, family_lines
from tests.support.otlp import Collector
from tests.support.ports import free_port
from tests.support.process import Process, changing, lbproxy, mock
from tests.support.saved import write_state
from tests.support.workers import one_process

LISTEN, ADMIN = "127.0.0.1:8080", "127.0.0.1:9901"
"""The addresses in the docs: the defaults."""
ENVIRON = {
    "GPU_HOST": "gpu-1",
    "LBPROXY_ADMIN_TOKEN": "5f4dcc3b5aa765d61d8327deb882cf99",
    "TEAM_A_KEY": "e0" * 16,
    "SERVER_KEY": "5e" * 16,
    "ANN_KEY": "a0" * 16,
    "NIGHTLY_KEY": "b0" * 16,
    "LBPROXY_KEY": "c0" * 16,
    "REDIS_PASSWORD": "s3cret",
}
"""The variables that the docs speak of."""

BLOCKS = all_blocks()
SETTINGS = [block for block in BLOCKS if block.language == "yaml" and not block.mark]
REFUSED = [block for block in BLOCKS if block.mark == "refused"]
DEMO = [block for block in BLOCKS if block.mark == "demo"]
LORA = [block for block in BLOCKS if block.mark == "lora"]
CRASH = [block for block in BLOCKS if block.mark == "crash"]
FAULTS = [block for block in BLOCKS if block.mark == "faults"]
TRACES = [block for block in BLOCKS if block.mark == "traces"]
SLEEP = [block for block in BLOCKS if block.mark == "sleep"]
LOG = [block for block in BLOCKS if block.mark == "log"]


def test_marks_are_known_and_used() -> None:
    """A misspelt mark must not switch a test off."""
    kinds = {(block.mark, block.language) for block in BLOCKS if block.mark}
    known = {
        ("demo", "sh"),
        ("demo", "python"),
        ("crash", "sh"),
        ("faults", "sh"),
        ("keys", "sh"),
        ("lora", "sh"),
        ("traces", "sh"),
        ("sleep", "sh"),
        ("start", "sh"),
        ("job", "sh"),
        ("refused", "yaml"),
        ("other", "yaml"),
        ("log", "json"),
    }
    assert kinds <= known
    marks = sum(len(re.findall("^<!-- test: ", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert marks == sum(bool(block.mark) for block in BLOCKS), "a mark that is not right above a fence"
    assert {block.language for block in DEMO} == {"sh", "python"}


# --- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_settings_parse(block: Block) -> None:
    whole = re.search("^endpoints:", block.text, re.MULTILINE)
    parse(block.text if whole else f"{block.text}\nendpoints: [http://gpu-1:8000]\n", environ=ENVIRON)


@pytest.mark.parametrize("block", REFUSED, ids=str)
def test_refused_settings_say_what_the_page_says(block: Block) -> None:
    texts = [other.text for other in blocks(block.page)]
    said = texts[texts.index(block.text) + 1]
    with pytest.raises(ConfigError) as error:
        parse(block.text, environ=ENVIRON, source="cfg.yaml")
    assert f"{error.value}\n" == said


# --- Commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, str]]:
    """A running demo that has answered one request and scraped its servers; host:port of both listeners."""
    with Process("demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") as process:
        listen = process.wait_for(r"lbproxy is at http://(\S+),")[1]
        admin = process.wait_for(r"http://(\S+)/metrics")[1]
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"http://{listen}/v1/completions", json=body).status_code == 200
        end = time.monotonic() + 20
        while httpx.get(f"http://{admin}/metrics").text.count('kv_utilization{endpoint="sim-') < 3:
            assert time.monotonic() < end, "its servers were not scraped"
            time.sleep(0.02)
        yield listen, admin


@pytest.mark.parametrize("block", DEMO, ids=str)
def test_commands_run(block: Block, demo: tuple[str, str], tmp_path: Path) -> None:
    text = block.text.replace(LISTEN, demo[0]).replace(ADMIN, demo[1]).replace(".venv/bin/", "")
    assert '"error"' not in printed(block.language, text, tmp_path, LBPROXY_ADMIN=demo[1])


def printed(language: str, text: str, folder: Path, **environ: str) -> str:
    """What a command prints; it must end well."""
    shell = ["bash", "-euo", "pipefail", "-c", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        shell if language == "sh" else [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environ, "PATH": path},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it printed nothing"
    return done.stdout


@pytest.mark.parametrize("block", CRASH, ids=str)
def test_a_killed_server_costs_no_client_a_request(block: Block, tmp_path: Path) -> None:
    text = block.text.replace("PATH=$PWD/.venv/bin:$PATH; ", "").replace("do sleep 1", "do sleep 0.1")
    assert text != block.text
    for port in ("8001", "8002", "8003"):
        text = text.replace(port, str(free_port()))
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = f"{{listen: '{listen}', admin: '{admin}', endpoints:"
    text = text.replace("{endpoints:", settings).replace(LISTEN, listen).replace(ADMIN, admin)
    said = printed("sh", text, tmp_path, TMPDIR=str(tmp_path))
    assert re.findall(r"^ *\d+ \d+$", said, re.MULTILINE) == [said.splitlines()[-1]]
    assert said.split()[-2:] == ["40", "200"]
    (log,) = (one.read_text() for one in tmp_path.glob("*/three.log"))
    assert '"to":"down"' in log
    assert '"attempts":2' in log, "nothing was in flight there"


@pytest.mark.parametrize("block", FAULTS, ids=str)
def test_faults_break_what_the_page_says(block: Block, tmp_path: Path) -> None:
    with mock() as (_, url):
        text = printed(block.language, block.text.replace("http://127.0.0.1:8000", url), tmp_path)
    assert "curl ended with 18" in text
    assert text.count("\n\n") == 2
    assert text.startswith('[{"fault":"break at=chunk events=2"')
    assert text.endswith("[]")


@pytest.mark.parametrize("block", LORA, ids=str)
def test_adapters_come_and_go_as_the_page_says(block: Block, tmp_path: Path) -> None:
    with (
        mock("--lora-updates") as (_, one),
        mock("--lora-updates") as (_, two),
        lbproxy(tmp_path, [one, two], "lora_management: true") as (process, url, _),
    ):
        for server in (one, two):
            process.wait_for(f"{server.removeprefix('http://')} serves sim")
        text = printed(block.language, block.text.replace(f"http://{LISTEN}", url), tmp_path)
    assert text.count('"status":200') == 4
    assert '"model":"sql"' in text


@pytest.mark.parametrize("block", SLEEP, ids=str)
def test_a_model_wakes_as_the_page_says(block: Block, tmp_path: Path) -> None:
    gpu = ("--sleep-mode", "--gpu", f"docs_{os.getpid()}", "--speed", "10")
    with mock("--model", "chat", *gpu) as (_, chat), mock("--model", "code", "--asleep", *gpu) as (_, code):
        endpoints = [
            f"{{url: '{url}', name: {name}, wake: true, host: gpu-1}}" for name, url in (("chat", chat), ("code", code))
        ]
        with lbproxy(tmp_path, endpoints) as (process, url, admin):
            process.wait_for("code is asleep")
            text = block.text.replace(f"http://{LISTEN}", url).replace(f"http://{ADMIN}", admin)
            said = printed("sh", text, tmp_path)
    assert '"text_completion"' in said
    assert 'lbproxy_endpoint_sleep_state{endpoint="code",state="awake"} 1.0' in said
    assert 'lbproxy_endpoint_sleep_state{endpoint="chat",state="asleep"} 1.0' in said


@one_process("figures of workers arrive twice a second")
@pytest.mark.parametrize("block", TRACES, ids=str)
def test_a_request_is_traced_as_the_page_says(block: Block, tmp_path: Path) -> None:
    with (
        Collector() as collector,
        mock() as (_, server),
        lbproxy(tmp_path, [server], f"traces: {{endpoint: '{collector.url}'}}") as (process, url, admin),
    ):
        process.wait_for("serves sim")
        text = printed("sh", block.text.replace(f"http://{LISTEN}", url).replace(f"http://{ADMIN}", admin), tmp_path)
        assert '"text_completion"' in text
        assert 'lbproxy_traces_total{result="sent"}' in text
        spans = run(collector.has(2))
        assert {span.trace_id for span in spans} <= set(re.findall("[0-9a-f]{32}", block.text))


# --- What it shows ----------------------------------------------------------------------------------------------------


def live_page(folder: Path) -> str:
    """The metrics of an lbproxy to which everything happened that makes a series."""
    with mock("--model", "m", "--max-num-seqs", "1") as (_, url):
        endpoints = [f"'{url}'", "{url: 'http://127.0.0.1:9', name: dead, health: null}"]
        state = write_state(folder / "state")
        more = f"traces: {{endpoint: 'http://127.0.0.1:9'}}\nstate: {{file: {state}, interval: 1s}}\n"
        more += "models: {big: {fallback: [m]}}"
        with lbproxy(folder, endpoints, more) as (process, listen, admin):
            process.wait_for("serves m")
            for _ in range(4):
                body = {"model": "m", "prompt": "x", "max_tokens": 1}
                assert httpx.post(f"{listen}/v1/completions", json=body).status_code == 200
                assert httpx.get(f"{listen}/v1/files").status_code == 404
            assert httpx.post(f"{listen}/v1/completions", json=body | {"model": "big"}).status_code == 200
            with ThreadPoolExecutor() as pool:  # more than it runs at once
                for _ in range(4):
                    pool.submit(httpx.post, f"{listen}/v1/completions", json=body | {"max_tokens": 100}, timeout=60)
                seen = "lbproxy_endpoint_request_limit{"
                run(until(lambda: seen in httpx.get(f"{admin}/metrics").text, "it was scraped while some waited"))
            seen = "lbproxy_recommended_endpoints{"
            run(until(lambda: seen in httpx.get(f"{admin}/metrics").text, "the models were looked at"))
            seen = 'lbproxy_state_writes_total{result="written"} 0.0'
            run(until(lambda: seen not in httpx.get(f"{admin}/metrics").text, "the state file was written"))
            return httpx.get(f"{admin}/metrics").text


@one_process("workers have families of their own")
def test_metrics_has_every_family_of_a_live_page(tmp_path: Path) -> None:
    """By type, labels and meaning; in the order of the page."""
    live = text_string_to_metric_families(live_page(tmp_path))
    lines = family_lines(family for family in live if family.name.startswith("lbproxy_"))
    expect_generated(DOCS / "metrics.md", "families", lines)


def test_queries_use_families_that_exist(demo: tuple[str, str]) -> None:
    live = httpx.get(f"http://{demo[1]}/metrics").text
    queries = [block.text for block in blocks(DOCS / "metrics.md") if block.language == "promql"]
    assert len(queries) >= 3
    for name in re.findall(r"\blbproxy_\w+", "".join(queries)):
        assert re.search(rf"^{name}(\{{| )", live, re.MULTILINE), name


def test_admin_has_every_path(demo: tuple[str, str]) -> None:
    """As the OpenAPI document of a running one says."""
    document = httpx.get(f"http://{demo[1]}/admin/openapi.json").json()
    lines = "".join(
        f"- `{method.upper()} {path}`: {operation['summary']}.\n"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    expect_generated(DOCS / "admin.md", "paths", lines)


def test_log_lines_have_the_keys_of_live_ones(tmp_path: Path) -> None:
    """One server that answers, one without metrics, one that is not there: between them every event."""
    with mock("--model", "m", "--lora-updates") as (_, url):
        endpoints = [f"{{url: '{url}', metrics: /nothing}}", "{url: 'http://127.0.0.1:9', health: null}"]
        state = f"state: {{file: {write_state(tmp_path / 'state')}}}"
        with lbproxy(tmp_path, endpoints, f"lora_management: true\n{state}") as (process, listen, admin):
            process.wait_for('"event":"scrape"')
            process.wait_for('"event":"transition"')
            httpx.put(f"{admin}/admin/log-level", json={"level": "info"}, headers=changing(admin))
            for model in ("m", "nope"):
                httpx.post(f"{listen}/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})
            httpx.post(f"{listen}/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/sql"})
            config = tmp_path / "cfg.yaml"
            keys = tmp_path / "keys"
            keys.write_text("0123456789abcdef\n")
            traces = "traces: {endpoint: 'http://127.0.0.1:9', timeout: 100ms}"
            more = f"routing: {{policy: adaptive}}\nauth: {{file: {keys}}}\n{traces}\n"
            config.write_text(config.read_text().replace(state, "state: {file: /nowhere/state}") + more)
            process.process.send_signal(signal.SIGHUP)
            process.wait_for("settings reloaded")
            httpx.get(f"{listen}/v1/models")
            process.wait_for('"event":"traces"')
            keys.write_text("team-b: fedcba9876543210\n")
            process.wait_for("API keys read again")
            config.write_text("endpoints: 5\n")
            process.process.send_signal(signal.SIGHUP)
            process.wait_for("the settings are refused")
            process.wait_for("/nowhere/state cannot be written")
            process.stop()
            live = [json.loads(line) for line in process.output.splitlines()]
    documented = [json.loads(line) for block in LOG for line in block.text.splitlines()]
    assert {line["event"] for line in documented} == {line["event"] for line in live}
    shapes = {(line["event"], *line) for line in live}
    for line in documented:
        assert (line["event"], *line) in shapes, f"no live {line['event']} line has these keys: {list(line)}"


# --- Links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub("^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKED = [*PAGES, *ROOT.glob("benchmarks/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub("^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match("[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.is_relative_to(ROOT), f"{link} leads out of the project"
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"
