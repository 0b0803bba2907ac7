# SPDX-License-Identifier: Apache-2.0
"""No example of the documentation is without a test: every fence is run, compared with something live, or named here.

Most of the tests are in tests/e2e/test_docs.py. Here are those of commands that cannot be run to their end (they serve,
take minutes, or need root), whose programs, modules, targets and options must exist, and of answers in JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from lbproxy.commands.cli import _parser
from lbproxy.config.sections.access import read_key_file
from lbproxy.control.admin.openapi import COMPONENTS
from tests.support.docs import ROOT, Block, all_blocks
from tests.support.process import Process, lbproxy, mock

BLOCKS = all_blocks()
ANSWERS = {
    ("README.md", '{"id":"chatcmpl-'),
    ("README.md", "f7abd9805ae37611e086e08f  "),
    ("admin.md", '{"name":"gpu-2","draining":true'),
    ("operations.md", '{"ready":true'),
    ("failures.md", '{"error":{"message":"The model `nope`'),
    ("failures.md", "HTTP/1.1 429"),
    ("failures.md", 'data: {"error"'),
    ("fairness.md", "HTTP/1.1 429"),
    ("lora.md", '{"object": "list"'),
    ("configuration.md", "# who may"),
}
"""What a test below holds against a live one: the page, and how it begins."""
ELSEWHERE = {
    ("agents.md", "export ANTHROPIC_BASE_URL"): "tests/clients/test_agents.py",
    ("agents.md", 'model = "MODEL"'): "tests/clients/test_agents.py",
    ("agents.md", '{\n  "provider"'): "tests/clients/test_agents.py",
    ("agents.md", "claude -p"): "tests/clients/test_agents.py: each calls its tool",
    ("agents.md", "export OPENAI_API_BASE"): "tests/clients/test_agents.py",
    ("realtime.md", "new WebSocket"): "a browser's; tests/proxy/request/test_handshake.py: what it sends",
    ("discovery.md", '{"time"'): "tests/e2e/test_dns.py",
    ("engines.md", "# TYPE requests gauge"): "tests/test_docs_engines.py",
    ("engines.md", "cfg.yaml: 3 problems"): "tests/e2e/test_docs.py, with the refused settings before it",
    ("engines.md", "endpoint-load-metrics:"): "tests/proxy/exchange/test_load_reports.py",
    ("configuration.md", "cfg.yaml: 6 problems"): "tests/e2e/test_docs.py, with the refused settings before it",
    ("configuration.md", "OPTIONS /v1"): "tests/proxy/request/test_cors.py",
    ("configuration.md", "HTTP/1.1 204"): "tests/proxy/request/test_cors.py",
    ("configuration.md", "curl --unix-socket"): "tests/e2e/test_unix_sockets.py: a client that asks by the path",
    ("docker.md", "docker compose"): "tests/test_deploy.py: its files and services exist",
    ("docker.md", "MODEL="): "tests/test_deploy.py: its files and services exist",
    ("docker.md", "docker build"): "tests/test_deploy.py: its services run that image",
    ("docker.md", "docker run"): "tests/test_deploy.py: hadolint reads the Dockerfile; there is no docker here",
    ("replicas.md", "docker build"): "tests/test_deploy_replicas.py: its files and services exist",
    ("replicas.md", "vrrp_script"): "tests/test_deploy_replicas.py: keepalived reads it",
    ("replicas.md", "save"): "tests/extras/test_redis_permissions.py: a server with these options",
    ("replicas.md", "ACL SETUSER"): "tests/extras/test_redis_permissions.py",
    ("traces.md", "docker build"): "tests/test_deploy.py: which lock that argument installs",
    (
        "autoscaling.md",
        "wanted=$(lbproxy status",
    ): "tests/control/admin/test_api.py: `models` of the state; the rest needs jq",
    ("benchmarks.md", "vllm serve"): "tests/benchmarks/test_routing_servers.py has simulated servers in their place",
    ("disaggregation.md", "vllm serve"): "tests/real/test_disaggregation.py starts vLLM with these roles",
    ("sleep.md", "VLLM_SERVER_DEV_MODE"): "another program's; tests/control/sleeping/test_sleep_calls.py: its API",
    ("agents-at-home.md", "export ANTHROPIC_BASE_URL"): "tests/clients/test_agents.py: the same of agents.md",
    ("replace-nginx.md", "events {}"): "tests/e2e/test_jobs.py: the settings beside it have the same",
    ("README.md", "python3 -m venv"): "tests/test_compiled.py: what of it is compiled; the rest needs a network",
    ("operations.md", "python3 -m venv /opt"): "tests/test_deploy.py: the unit; the rest needs root and systemd",
    (
        "operations.md",
        "[Service]",
    ): "tests/test_deploy.py: what it changes is in the unit; the rest needs root and systemd",
}
"""How a block begins, and what looks at the same thing."""
PICTURES = {
    ("architecture.md", "lbproxy/"),
    ("architecture.md", "config <-"),
    ("routing.md", "request ──▶"),
    ("scale.md", "supervisor: listening"),
    ("replicas.md", "clients ─▶"),
    ("disaggregation.md", "1 prompt, one token"),
    ("disaggregation.md", "whole, on a decode server:"),
    ("admin.md", "lbproxy 0.2.0"),  # what `lbproxy status` drew: tests/commands/test_operate.py
}
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?(make|lbproxy|python|pip) ", re.MULTILINE)


def begins(block: Block, known: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(page, text) for page, text in known if block.page.name == page and block.text.lstrip().startswith(text)}


def is_generated(block: Block) -> bool:
    """Whether a test writes it, and so compares it."""
    before = "\n".join(block.page.read_text().splitlines()[: block.line - 1])
    return before.rfind("<!-- generated: ") > before.rfind("<!-- end -->")


def is_command(block: Block) -> bool:
    return (
        not block.mark
        and not begins(block, PICTURES)
        and block.language in {"", "sh"}
        and COMMAND.match(block.text) is not None
    )


COMMANDS = [block for block in BLOCKS if is_command(block)]


def test_every_block_is_run_or_named_here() -> None:
    named = {*ELSEWHERE, *PICTURES, *ANSWERS}
    used, alone = set[tuple[str, str]](), list[str]()
    before = list[Block]()
    for block in BLOCKS:
        # Marked ones, settings and queries are those of tests/e2e/test_docs.py, which knows all marks.
        follows_job = any(one.mark == "job" and one.page == block.page and one.line < block.line for one in before)
        before = [block]
        if block.mark or follows_job or block.language in {"yaml", "promql"} or is_generated(block):
            continue
        found = begins(block, named)
        used |= found
        if not found and not is_command(block):
            alone.append(f"{block}: {block.text[:60]!r}")
    assert not alone, "nothing runs these: give them a mark, or name what looks at them"
    assert used == named, f"no such blocks: {named - used}"
    for where in ELSEWHERE.values():
        for file in re.findall(r"tests/\S+\.py", where):
            assert (ROOT / file).exists(), file


# --- Commands ---------------------------------------------------------------------------------------------------------


def lines(block: Block) -> list[list[str]]:
    """Its commands, in words: what begins with `$ `, if anything does; continued lines in one."""
    text = block.text.replace("\\\n", " ")
    prompted = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in prompted or text.splitlines()]
    return [words for line in found for words in split(line) if words]


def split(words: list[str]) -> list[list[str]]:
    """At `&&`; without `exec` and settings of the environment."""
    if "&&" in words:
        at = words.index("&&")
        return [*split(words[:at]), *split(words[at + 1 :])]
    while words and (words[0] == "exec" or re.match("[A-Z_]+=", words[0])):
        words = words[1:]
    return [words]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_exist(block: Block) -> None:
    """What cannot be run to its end here is at least spelt right."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *arguments in lines(block):
        name = Path(program).name
        if name == "make":
            assert {word for word in arguments if "=" not in word} <= targets, arguments
        elif name.startswith("python"):
            assert arguments[0] == "-m"
            assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
            assert_options(arguments[1], arguments[2:])
        elif name == "pip":
            extras = re.findall(r"\.\[([\w-]+)\]", " ".join(arguments))
            assert extras, arguments
            assert {*extras} <= {
                *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            }
        elif name == "lbproxy":
            _parser().parse_args([word for word in arguments if word != "..."])
        else:
            assert name in {"curl", "kill", "rm", "cp", "source"}, f"{name}: what is that?"


PARTS = re.compile(r"^from benchmarks import (\w+)$", re.MULTILINE)


def assert_options(module: str, arguments: list[str]) -> None:
    """Those of our own modules stand in the module's text."""
    if module == "pytest":
        return
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    package = found.submodule_search_locations is not None
    files = Path(found.origin).parent.glob("*.py") if package else [Path(found.origin)]
    text = "".join(file.read_text() for file in files)
    # A part of a command may stand in a module of its own.
    parts = [ROOT / "benchmarks" / f"{name}.py" for name in PARTS.findall(text)]
    text += "".join(part.read_text() for part in parts if part.exists())
    for word in arguments:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{module} has no {word}"


def test_a_command_that_is_spelt_wrong_is_seen() -> None:
    wrong = Block(Path("x.md"), 1, "sh", "", "$ .venv/bin/python -m benchmarks.explain --nothing\n")
    with pytest.raises(AssertionError, match="has no --nothing"):
        test_commands_exist(wrong)
    with pytest.raises(SystemExit):
        test_commands_exist(wrong._replace(text="lbproxy mock --nothing\n"))


# --- Answers ----------------------------------------------------------------------------------------------------------


def documented(page: str, beginning: str) -> str:
    assert (page, beginning) in ANSWERS
    (found,) = (one for one in BLOCKS if begins(one, {(page, beginning)}))
    return found.text


def test_states_and_errors_are_as_shown(tmp_path: Path) -> None:
    with mock() as (_, url), lbproxy(tmp_path, [url]) as (process, listen, admin):
        process.wait_for("serves sim")
        ready = httpx.get(f"{admin}/readyz").json()
        unknown = httpx.post(f"{listen}/v1/completions", json={"model": "nope", "prompt": "x"}).json()
    shown = json.loads(documented("operations.md", '{"ready":true'))
    assert [*shown] == [*ready]
    assert [*shown["endpoints"]] == [*ready["endpoints"]]
    assert json.loads(documented("failures.md", '{"error":{"message":"The model `nope`')) == unknown
    assert [*json.loads(documented("admin.md", '{"name":"gpu-2","draining":true'))] == COMPONENTS["Drain"]["required"]


def test_a_stream_that_breaks_ends_as_shown(tmp_path: Path) -> None:
    fault = ("--fault", "break at=event events=5")
    with mock(*fault) as (_, url), lbproxy(tmp_path, [url]) as (process, listen, _):
        process.wait_for("serves sim")
        body = {"model": "sim", "prompt": "x", "max_tokens": 50, "stream": True}
        seen = ""
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{listen}/v1/completions", json=body, timeout=60) as answer,
        ):
            for piece in answer.iter_text():
                seen += piece
    numbers = re.compile(r"\d+ events")
    last = next(line for line in reversed(seen.splitlines()) if line)
    assert numbers.sub("N events", last) == numbers.sub("N events", documented("failures.md", 'data: {"error"').strip())


def test_a_refusal_is_as_shown(tmp_path: Path) -> None:
    full = "admission: {queue_requests: 0, max_in_flight_per_endpoint: 1}"
    with mock("--speed", "0.2") as (_, url), lbproxy(tmp_path, [url], full) as (process, listen, _):
        process.wait_for("serves sim")
        body = {"model": "sim", "prompt": "x", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{listen}/v1/completions", json=body, timeout=60) as first:
            assert first.status_code == 200
            refused = httpx.post(f"{listen}/v1/completions", json=body, timeout=60)
    head, _, text = documented("failures.md", "HTTP/1.1 429").partition("\n\n")
    shown = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    assert (refused.status_code, refused.text) == (429, text.strip())
    assert {name for name in refused.headers if name not in {"date", "connection", "x-should-retry"}} == {*shown}
    assert all(refused.headers[name] == shown[name] for name in shown if name not in {"x-request-id", "retry-after"})


def test_a_flow_with_a_key_is_refused_as_shown(tmp_path: Path) -> None:
    (commands,) = (one for one in BLOCKS if one.mark == "keys")
    above = [one for one in BLOCKS if one.page == commands.page and one.line < commands.line][-1]
    settings = above.text.replace("endpoints: [http://127.0.0.1:8000]\n", "")
    assert settings != above.text
    with mock() as (_, url), lbproxy(tmp_path, [url], settings) as (process, listen, _):
        process.wait_for("serves sim")
        script = commands.text.replace("http://127.0.0.1:8080", listen)
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=60, check=True)
    replies = [f"HTTP/1.1{one}" for one in done.stdout.replace("\r\n", "\n").split("HTTP/1.1")[1:]]
    assert [reply.split()[1] for reply in replies] == ["200", "200", "429", "200"]
    seconds = re.compile(r"(?<=retry-after: )\d+|\d+(?= s\.)")
    shown, said = (seconds.sub("N", text).strip() for text in (documented("fairness.md", "HTTP/1.1 429"), replies[2]))
    assert "sk-batch" not in done.stdout
    assert {*shown.splitlines()} <= {*said.splitlines()}


def test_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    """But for ids, times, which server it is, and columns of the costs, which come and go with what is measured."""
    commands = [block for block in BLOCKS if block.page.name == "README.md" and block.mark == "demo"]
    with Process("demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") as process:
        listen = process.wait_for(r"lbproxy is at http://(\S+),")[1]
        admin = process.wait_for(r"http://(\S+)/metrics")[1]
        program = f"{sys.executable} -m lbproxy"
        texts = [one.text.replace("127.0.0.1:8080", listen) for one in commands]
        said = [
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text.replace(".venv/bin/lbproxy", program)],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                cwd=tmp_path,
                env={**os.environ, "LBPROXY_ADMIN": admin},
            ).stdout
            for text in texts
        ]
    reply, decision = (documented(page, text) for page, text in sorted(ANSWERS, reverse=True) if page == "README.md")
    assert _without_chance(json.loads(said[0])) == _without_chance(json.loads(reply))
    assert _prose(said[1]) == _prose(decision)


def _without_chance(reply: dict[str, object]) -> dict[str, object]:
    assert {"id", "created"} <= {*reply}
    return {key: value for key, value in reply.items() if key not in {"id", "created"}}


def _prose(decision: str) -> list[str]:
    """Its lines, with N for numbers, without the tables' columns."""
    assert re.search(r"^sim-\d +\d", decision, re.MULTILINE)
    words = re.sub(r"\b[0-9a-f]{24}\b|[\d,.:TZ-]*\d[\d,.:TZ-]*", "N", decision)
    return [line if len(line.split("  ")) == 1 else line.split("  ")[0] for line in words.splitlines() if line.strip()]


def test_what_servers_said_of_an_adapter_is_as_shown(tmp_path: Path) -> None:
    dead = "{url: 'http://127.0.0.1:9', name: gpu-2, models: [sim]}"
    with ExitStack() as stack:
        _, url = stack.enter_context(mock("--lora-updates"))
        endpoints = [f"{{url: '{url}', name: gpu-1}}", dead]
        process, listen, _ = stack.enter_context(lbproxy(tmp_path, endpoints, "lora_management: true"))
        process.wait_for("gpu-1 serves sim")
        process.wait_for("gpu-2 is down")
        body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        answer = httpx.post(f"{listen}/v1/load_lora_adapter", json=body, timeout=60)
    assert answer.json() == json.loads(documented("lora.md", '{"object": "list"'))


def test_a_file_of_keys_is_as_shown() -> None:
    keys = read_key_file(documented("configuration.md", "# who may"), source="keys")
    assert [one.name for one in keys] == ["team-b", "team-c"]
