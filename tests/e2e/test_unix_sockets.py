# SPDX-License-Identifier: Apache-2.0
"""lbproxy between Unix sockets: clients, operators and the model server all come by paths, a restart included."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.aio import run, until
from tests.support.endpoint import OK, ScriptedEndpoint, answer
from tests.support.process import LBPROXY, Process

PAGE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 3\nvllm:kv_cache_usage_perc 0.5\n"
COMPLETION = answer(b'{"id":"1","object":"text_completion","choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}')


def model_server(path: Path) -> ScriptedEndpoint:
    models = answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    scripts = {
        "/health": OK,
        "/v1/models": models,
        "/metrics": answer(PAGE, kind="text/plain"),
        "/v1/completions": COMPLETION,
    }
    return ScriptedEndpoint({**scripts}, path=str(path))


@contextmanager
def lbproxy(folder: Path) -> Iterator[Process]:
    config = folder / "cfg.yaml"
    config.write_text(
        f"listen: unix:{folder}/lb.sock\nadmin: {{unix: {folder}/admin.sock, mode: 0600}}\n"
        f"drain: {{lame_duck: 0s}}\nendpoints: [unix:{folder}/vllm.sock]\n"
    )
    with Process("--config", str(config)) as process:
        yield process


def over(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://localhost")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LBPROXY, *arguments], capture_output=True, text=True, check=False, timeout=30)


def test_requests_health_and_metrics_go_by_paths_and_so_do_the_operators_commands(tmp_path: Path) -> None:
    async def main() -> None:
        async with model_server(tmp_path / "vllm.sock") as server, over(tmp_path / "lb.sock") as client:
            with lbproxy(tmp_path) as process:
                listens = f"listens on unix:{tmp_path}/lb.sock, admin on unix:{tmp_path}/admin.sock"
                await asyncio.to_thread(process.wait_for, listens)
                assert (tmp_path / "lb.sock").stat().st_mode & 0o777 == 0o660
                assert (tmp_path / "admin.sock").stat().st_mode & 0o777 == 0o600
                await until(lambda: server.asked("/metrics") > 2, "its metrics are read")
                reply = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
                assert (reply.status_code, reply.headers["x-lbproxy-endpoint"]) == (200, "vllm.sock")
                assert reply.json()["choices"][0]["text"] == "hi"
                assert {one.field("host") for one in server.requests} == {"localhost"}
                assert server.asked("/health")
                async with over(tmp_path / "admin.sock") as admin:
                    state = (await admin.get("/admin/state")).json()
                    assert state["listen"] == f"unix:{tmp_path}/lb.sock"
                    assert state["endpoints"][0]["url"] == f"unix:{tmp_path}/vllm.sock"
                    assert state["endpoints"][0]["running"] == 3
                shown = await asyncio.to_thread(command, "status", "--admin", f"unix:{tmp_path}/admin.sock")
                assert (shown.returncode, "vllm.sock" in shown.stdout) == (0, True), shown
                checked = await asyncio.to_thread(command, "check", "--config", str(tmp_path / "cfg.yaml"))
                assert "1 of 1 endpoints can be used." in checked.stdout, checked
                await until(lambda: process.lines("request"), "it is logged")
                assert process.lines("request")[0]["client"] == "unix:"
                assert await asyncio.to_thread(process.stop) == 0

    run(main())


def test_a_restart_hands_both_sockets_over_and_a_second_lbproxy_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with model_server(tmp_path / "vllm.sock"), over(tmp_path / "lb.sock") as client:
            with lbproxy(tmp_path) as process:
                await asyncio.to_thread(process.wait_for, "listens on unix:")
                second = await asyncio.to_thread(command, "--config", str(tmp_path / "cfg.yaml"))
                assert second.returncode != 0
                wrong = f"cannot listen on unix:{tmp_path}/lb.sock (listen): another process listens there"
                assert wrong in second.stdout + second.stderr
                inode = (tmp_path / "lb.sock").stat().st_ino
                process.process.send_signal(signal.SIGUSR2)
                successor, asked = None, 0
                try:
                    while process.process.poll() is None:  # one connection after the other, all the time
                        reply = await client.post(
                            "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"connection": "close"}
                        )
                        assert reply.status_code == 200, reply.text
                        asked += 1
                        successor = successor or _successor(process)
                    assert successor is not None
                    assert asked > 5
                    assert (tmp_path / "lb.sock").stat().st_ino == inode
                    reply = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
                    assert reply.status_code == 200
                    async with over(tmp_path / "admin.sock") as admin:
                        assert (await admin.get("/readyz")).status_code == 200
                finally:
                    if successor is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(successor, signal.SIGKILL)

    run(main())


def _successor(process: Process) -> int | None:
    for line in process.read().splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("event") == "restart" and "pid" in found:
                return int(found["pid"])
    return None


def test_what_a_killed_lbproxy_left_behind_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with model_server(tmp_path / "vllm.sock"), over(tmp_path / "lb.sock") as client:
            for _ in range(2):
                with lbproxy(tmp_path) as process:  # killed at its end
                    await asyncio.to_thread(process.wait_for, "listens on unix:")
                    assert (await client.get("/v1/models")).status_code == 200
                assert (tmp_path / "lb.sock").exists()

    run(main())
