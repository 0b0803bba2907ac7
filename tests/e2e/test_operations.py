# SPDX-License-Identifier: Apache-2.0
"""Changing a running lbproxy: reloads, restarts, stops, under clients that tolerate nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_product import client_of, gauge
from tests.support.aio import run, until
from tests.support.endpoint import (
    LAST,
    NOT_FOUND,
    OK,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEndpoint,
    Wire,
    answer,
    event,
)
from tests.support.load import load
from tests.support.process import LBPROXY, LISTEN, TOKENS, Process, changing, lbproxy, lbproxy_beside, mock
from tests.support.workers import one_process, with_workers

MODELS = answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[str]]:
    """Two simulated servers."""
    with mock("--speed", "20") as (_, one), mock("--speed", "20") as (_, two):
        yield [one, two]


def settings(folder: Path, endpoints: list[str], more: str = "") -> None:
    """Write the settings file anew."""
    listing = "".join(f"  - {url}\n" for url in endpoints)
    text = f"{LISTEN}\nadmin: 127.0.0.1:0\n{more}\nendpoints:\n{listing}"
    (folder / "cfg.yaml").write_text(with_workers(text))


def events(process: Process, event: str) -> list[dict[str, object]]:
    """The log's lines of one kind; also those of a successor, and other output, may be there."""
    found = []
    for line in process.read().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and line.get("event") == event]


# --- Reload -----------------------------------------------------------------------------------------------------------


def test_reloads_under_load_are_not_noticed_and_bad_ones_change_nothing(fleet: list[str], tmp_path: Path) -> None:
    """Ten, each third invalid, in four different ways."""
    policies = ["least-request", "adaptive", "p2c", "round-robin"]
    bad = ["routing: {polcy: x}", "routing: [", "endpoints: 5\n", "health: {fall: 0}\nretry: {attempts: 0}"]

    async def main(process: Process, url: str, admin: str) -> None:
        async with load(url) as clients:
            good, refused = 0, 0
            for n in range(10):
                if n % 3 == 2:
                    (tmp_path / "cfg.yaml").write_text(f"{bad[refused]}\n")
                    refused += 1
                else:
                    settings(tmp_path, fleet[: 1 + n % 2], f"routing: {{policy: {policies[n % 4]}}}")
                    good += 1
                process.process.send_signal(signal.SIGHUP)
                await until(lambda: len(events(process, "reload")) == good + refused, "it was read")  # noqa: B023
                success = await asyncio.to_thread(gauge, admin, "lbproxy_config_reload_success")
                assert success == {"": float(n % 3 != 2)}
                now = clients.done
                await until(lambda: clients.done > now + 20, "the load goes on")  # noqa: B023
        assert clients.failed == []

    more = "scrape: {interval: 50ms}"
    with lbproxy(tmp_path, fleet, more) as (process, url, admin):
        run(main(process, url, admin))
        problems = [line["problems"] for line in events(process, "reload") if line["level"] == "error"]
        assert problems[0] == ["endpoints: required, but not there", "routing.polcy: unknown key, did you mean policy?"]
        assert len(problems) == 3
        assert process.process.poll() is None
        assert "Traceback" not in process.read()


def test_a_removed_endpoint_s_streams_finish_and_it_gets_no_more(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, fleet) as (process, url, admin), client_of(url) as client:
        streams = [
            client.completions.with_raw_response.create(
                model="sim", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(4)
        ]
        names = [one.removeprefix("http://") for one in fleet]
        assert {stream.headers["x-lbproxy-endpoint"] for stream in streams} == set(names)
        settings(tmp_path, fleet[:1])
        process.process.send_signal(signal.SIGHUP)
        run(until(lambda: events(process, "reload"), "reloaded"))
        up = gauge(admin, "lbproxy_endpoint_draining{")
        assert up == {f'endpoint="{names[0]}"}}': 0.0, f'endpoint="{names[1]}"}}': 1.0}
        for _ in range(5):
            answer = client.completions.with_raw_response.create(model="sim", prompt="x", max_tokens=1)
            assert answer.headers["x-lbproxy-endpoint"] == names[0]
        for stream in streams:
            *_, last = stream.parse()
            assert last.choices[0].finish_reason == "length"
        run(until(lambda: len(gauge(admin, "lbproxy_endpoint_up{")) == 1, "it is forgotten"))


def test_a_size_in_the_settings_counts_more_than_metrics_until_a_reload_takes_it_away(
    fleet: list[str], tmp_path: Path
) -> None:
    """The size of an endpoint's KV cache: said, said anew, said no more."""

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{admin}/admin/state").json()["endpoints"][0]
        return found

    def believed() -> object:
        return shown()["learned"]["capacity_tokens"]

    sized = "{url: '%s', kv_cache_tokens: %d}"
    with lbproxy(tmp_path, [sized % (fleet[0], 99_000)]) as (process, _, admin):
        run(until(lambda: shown()["metrics_age_s"] is not None, "scraped"))
        assert believed() == 99_000
        settings(tmp_path, [sized % (fleet[0], 55_000)])
        process.process.send_signal(signal.SIGHUP)
        run(until(lambda: believed() == 55_000, "reloaded"))
        settings(tmp_path, fleet[:1])
        process.process.send_signal(signal.SIGHUP)
        run(until(lambda: believed() == 432_000, "what the server's metrics say"))


def test_what_a_reload_cannot_change_is_said_once_and_the_rest_is_changed(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, fleet[:1]) as (process, url, admin):
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        assert "x-lbproxy-endpoint" in httpx.post(f"{url}/v1/completions", json=body).headers
        listing = "expose_endpoint: false\nlog: {level: warning}\nlimits: {json_body: 1KiB}"
        text = f"listen: 127.0.0.1:1\nadmin: null\nworkers: 3\n{listing}\nendpoints: ['{fleet[0]}']\n"
        (tmp_path / "cfg.yaml").write_text(text)
        process.process.send_signal(signal.SIGHUP)
        run(until(lambda: events(process, "reload"), "reloaded"))
        (line,) = events(process, "reload")
        assert line["message"] == "listen and admin and workers cannot be changed by a reload: restart for that"
        assert gauge(admin, "lbproxy_config_reload_success") == {"": 1.0}
        assert "x-lbproxy-endpoint" not in httpx.post(f"{url}/v1/completions", json=body).headers
        large = {**body, "prompt": "x" * 2000}
        assert httpx.post(f"{url}/v1/completions", json=large).status_code == 413


def test_the_command_to_reload_returns_when_the_settings_are_in_force(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, fleet[:1]) as (process, url, admin):
        file = tmp_path / "cfg.yaml"

        def reload() -> subprocess.CompletedProcess[str]:
            command = [*LBPROXY, "reload", "--admin", admin]
            environ = {**os.environ, "XDG_RUNTIME_DIR": TOKENS.name}
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)

        file.write_text(f"{file.read_text()}expose_endpoint: false\nworkers: 7\n")
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        assert "x-lbproxy-endpoint" in httpx.post(f"{url}/v1/completions", json=body).headers
        done = reload()
        said = "the settings are reloaded:\n  expose_endpoint: false, was true\nonly a restart changes workers\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
        assert "x-lbproxy-endpoint" not in httpx.post(f"{url}/v1/completions", json=body).headers
        assert events(process, "reload")[-1]["changed"] == ["expose_endpoint: false, was true"]
        file.write_text(f"{file.read_text()}policy: rr\n")
        done = reload()
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith("policy: unknown key, did you mean routing.policy?\n")


# --- Stop and restart -------------------------------------------------------------------------------------------------


def test_a_lame_duck_serves_everybody_keeps_nobody_and_says_that_it_is_not_ready(
    fleet: list[str], tmp_path: Path
) -> None:
    async def main(process: Process, url: str, admin: str) -> None:
        async with load(url) as clients:
            await until(lambda: clients.done > 20, "the load runs")
            process.process.send_signal(signal.SIGTERM)
            await until(lambda: events(process, "stop"), "it stops")
            ready = await asyncio.to_thread(httpx.get, f"{admin}/readyz")
            assert (ready.status_code, ready.json()["draining"]) == (503, True)
            now = clients.done
            await until(lambda: clients.done > now + 50, "everybody is served")
        assert clients.failed == []

    with lbproxy(tmp_path, fleet, "drain: {lame_duck: 3s}") as (process, url, admin):
        run(main(process, url, admin))
        assert process.process.wait(20) == 0


def successors(process: Process) -> list[int]:
    return [int(str(line["pid"])) for line in events(process, "restart") if "pid" in line]


def stops(process: Process) -> int:
    """How many lbproxys, of one or more processes, ended."""
    return sum(str(line["message"]).startswith("stopped: ") for line in events(process, "stop"))


def test_restarts_are_not_noticed(fleet: list[str], tmp_path: Path) -> None:
    """Neither by clients that keep their connections nor by new ones, nor by a stream that is longer than a restart;
    and who drains an endpoint need not do so again.
    """

    def draining(admin: str) -> list[bool]:
        return [one["draining"] for one in httpx.get(f"{admin}/admin/state").json()["endpoints"]]

    def drain_second(admin: str) -> None:
        name = httpx.get(f"{admin}/admin/state").json()["endpoints"][1]["name"]
        assert httpx.post(f"{admin}/admin/endpoints/{name}/drain", headers=changing(admin)).status_code == 200

    async def main(process: Process, url: str, admin: str) -> None:
        pid = process.process.pid
        drain_second(admin)
        with client_of(url) as client:
            stream = client.completions.create(
                model="sim", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            async with load(url) as clients:
                for n in range(3):
                    now = clients.done
                    await until(lambda: clients.done > now + 20, "the load runs")  # noqa: B023
                    os.kill(pid, signal.SIGUSR2)
                    await until(lambda: len(successors(process)) == n + 1, "it accepts", within_s=30)  # noqa: B023
                    pid = successors(process)[-1]
            assert clients.failed == []
            *_, last = await asyncio.to_thread(list, stream)
            assert last.choices[0].finish_reason == "length"
        assert await asyncio.to_thread(process.process.wait, 90) == 0, "the first has ended"
        assert draining(admin) == [number == 1 for number in range(len(fleet))]
        os.kill(pid, signal.SIGTERM)
        await until(lambda: stops(process) == 4, "all four have stopped")

    with lbproxy(tmp_path, fleet, "drain: {lame_duck: 5s}") as (process, url, admin):
        run(main(process, url, admin))
        assert "Traceback" not in process.read()
        assert all(
            line["message"] != "stopped: 1 requests were ended before they were complete"
            for line in events(process, "stop")
        )


DEADLINE_S = 0.5


@pytest.mark.parametrize("then", ["nothing", "SIGTERM"])
def test_who_handed_over_waits_for_its_streams_until_it_is_told_to_stop(tmp_path: Path, then: str) -> None:
    """`drain.deadline` is how long a supervisor waits, and it does not wait for this process."""
    finish = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD, event('{"choices":[{"index":0,"text":"x","finish_reason":null}]}'))
        await finish.wait()
        await wire.send(event('{"choices":[{"index":0,"text":"","finish_reason":"length"}]}'), event("[DONE]"), LAST)

    async def handed_over(process: Process, url: str) -> None:
        with client_of(url) as client:
            create = client.completions.create
            stream = await asyncio.to_thread(lambda: create(model="m", prompt="x", stream=True))
            received = [await asyncio.to_thread(next, stream)]
            process.process.send_signal(signal.SIGUSR2)
            await until(lambda: successors(process), "it accepts", within_s=30)
            if then == "SIGTERM":
                process.process.send_signal(signal.SIGTERM)
                with pytest.raises(openai.APIError, match="was stopped after"):
                    await asyncio.to_thread(list, stream)
            else:
                await until(lambda: events(process, "stop"), "it waits")
                await asyncio.sleep(DEADLINE_S + 0.2)
                finish.set()
                received += await asyncio.to_thread(list, stream)
                assert received[-1].choices[0].finish_reason == "length"
        assert await asyncio.to_thread(process.process.wait, 90) == 0
        began, cut = (str(line["message"]) for line in events(process, "stop"))
        assert began == "stopping: 1 running requests have up to 3600 s"
        assert cut == f"stopped: {int(then == 'SIGTERM')} requests were ended before they were complete"

    async def main() -> None:
        scripts: dict[str, Script] = {
            "/health": OK,
            "/v1/models": MODELS,
            "/metrics": NOT_FOUND,
            "/v1/completions": script,
        }
        settings = f"drain: {{deadline: {DEADLINE_S}s, lame_duck: 0s}}"
        async with ScriptedEndpoint(scripts) as it, lbproxy_beside(tmp_path, [it.url], settings) as (process, url, _):
            await handed_over(process, url)

    run(main())


@pytest.mark.parametrize("wrong", ["routing: {polcy: x}", "limits: ["])
def test_a_successor_that_cannot_start_leaves_the_old_one_serving(fleet: list[str], tmp_path: Path, wrong: str) -> None:
    async def main(process: Process, url: str) -> None:
        async with load(url, keep=2, fresh=2) as clients:
            process.process.send_signal(signal.SIGUSR2)
            await until(lambda: len(events(process, "restart")) == 2, "it failed", within_s=30)
            now = clients.done
            await until(lambda: clients.done > now + 20, "the load goes on")
        assert clients.failed == []

    with lbproxy(tmp_path, fleet) as (process, url, _):
        settings(tmp_path, fleet, wrong)
        run(main(process, url))
        assert events(process, "restart")[-1]["message"] == "the new process accepts no connections, so we continue"
        assert process.process.poll() is None


ACTIVATE = """
import os, socket, sys
sock = socket.create_server(("127.0.0.1", 0))
config = sys.argv[1]
with open(config) as file:
    text = file.read().replace("PORT", str(sock.getsockname()[1]))
with open(config, "w") as file:
    file.write(text)
if sock.fileno() != 3:
    os.dup2(sock.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "lbproxy.socket"}
os.execv(sys.argv[2], [*sys.argv[2:], "--config", config])
"""


def test_a_socket_from_systemd_is_served(fleet: list[str], tmp_path: Path) -> None:
    """Its address stands in the settings too; what connected before the start waits in it."""
    config = tmp_path / "cfg.yaml"
    config.write_text(f"listen: 127.0.0.1:PORT\nadmin: 127.0.0.1:0\nendpoints: ['{fleet[0]}']\n")
    command = [sys.executable, "-c", ACTIVATE, str(config), *LBPROXY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.search(r"listens on (http://[\w.:]+)", line)
            assert match is not None, line
            assert match[1].endswith(re.search(r"listen: .*:(\d+)", config.read_text())[1])  # type: ignore[index]
            body = {"model": "sim", "prompt": "x", "max_tokens": 1}
            assert httpx.post(f"{match[1]}/v1/completions", json=body).status_code == 200
        finally:
            process.kill()


# --- Limits -----------------------------------------------------------------------------------------------------------


@one_process("the limit is of each process; T25 of tests/chaos has both")
def test_with_few_descriptors_the_excess_is_refused_and_what_runs_goes_on(fleet: list[str], tmp_path: Path) -> None:
    """64 descriptors, far fewer than clients: no stream breaks, no endpoint is blamed, /metrics answers, nothing spins,
    and when the crowd has left, everybody is served again.
    """

    async def main(process: Process, url: str, admin: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        with client_of(url) as client:
            stream = client.completions.create(
                model="sim", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            crowd = [socket.create_connection((host, int(port))) for _ in range(80)]
            refusals = "lbproxy_overload_refusals_total{"
            await until(lambda: sum(gauge(admin, refusals).values()) > 20, "many are refused")
            assert gauge(admin, "lbproxy_client_connections")[""] <= 28
            assert set(gauge(admin, "lbproxy_endpoint_up{").values()) == {1.0}
            *_, last = await asyncio.to_thread(list, stream)
            assert last.choices[0].finish_reason == "length"
            used = _cpu_s(process.process.pid)
            await asyncio.sleep(1.0)
            assert _cpu_s(process.process.pid) - used < 0.5
            for one in crowd:
                one.close()
            await until(lambda: gauge(admin, "lbproxy_client_connections")[""] < 5, "they left")
        async with load(url) as clients:
            await until(lambda: clients.done > 20, "served again")
        assert clients.failed == []

    settings(tmp_path, fleet)
    command = ["prlimit", "--nofile=64", *LBPROXY, "--config", str(tmp_path / "cfg.yaml")]
    with limited(command) as process:
        match = process.wait_for(r"listens on (http://[\w.:]+), admin on (http://[\w.:]+)")
        run(main(process, match[1], match[2]))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def limited(command: list[str]) -> Iterator[Process]:
    """lbproxy started through another command."""
    before = LBPROXY[:]
    LBPROXY[:] = command
    try:
        with Process() as process:
            yield process
    finally:
        LBPROXY[:] = before
