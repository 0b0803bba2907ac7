# SPDX-License-Identifier: Apache-2.0
"""An lbproxy with workers that is told to stop while it starts, and one that is started by another."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lbproxy.processes.control import BALANCER, Child, Start, Text
from lbproxy.workers import messages as m
from lbproxy.workers.server import NO_BEAT
from tests.support.aio import run, until
from tests.support.endpoint import LAST, OK, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, event
from tests.support.links import End
from tests.support.process import Process, children_of, exists, lbproxy_beside
from tests.support.rig import RawClient, post

WORKERS = 2
MODELS = answer(b'{"object":"list","data":[{"id":"sim","object":"model"}]}')


def is_child(pid: int) -> bool:
    """Whether it is one of lbproxy's processes already, and not the copy of the supervisor that becomes one."""
    return b"lbproxy.processes.child" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("started", [1, 1 + WORKERS], ids=["balancer process", "workers"])
def test_a_stop_does_not_wait_for_the_start(started: int, tmp_path: Path) -> None:
    """The process that was started last is stopped, so that the start would never be complete."""
    config = tmp_path / "cfg.yaml"
    config.write_text(f"workers: {WORKERS}\nlisten: 127.0.0.1:0\nadmin: null\nendpoints: ['http://127.0.0.1:9']\n")
    with Process("--config", str(config)) as process:
        pid = process.process.pid
        run(until(lambda: sum(map(is_child, children_of(pid))) == started, "they are started", within_s=60.0))
        children = children_of(pid)
        os.kill(children[-1], signal.SIGSTOP)
        assert process.stop() == 0
        assert not any(exists(one) for one in children)
        assert "accept connections" not in process.output
        assert "Traceback" not in process.output
        assert [line["message"] for line in process.lines("stop")] == [
            "stopping: 0 running requests have up to 120 s",
            "stopped: 0 requests were ended before they were complete",
        ]


@pytest.mark.parametrize("deadline", ["100ms", "1h"])
def test_a_stop_says_how_many_requests_run_and_how_many_were_cut(deadline: str, tmp_path: Path) -> None:
    """One log line each, from all processes together, as with one process."""
    finish = asyncio.Event()

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await finish.wait()
        await wire.send(LAST)

    async def main() -> None:
        more = f"workers: {WORKERS}\ndrain: {{deadline: {deadline}, lame_duck: 0s}}"
        scripts: dict[str, Script] = {"/health": OK, "/v1/models": MODELS, "/v1/completions": script}
        async with ScriptedEndpoint(scripts) as it, lbproxy_beside(tmp_path, [it.url], more) as (process, url, _):
            port = int(url.rpartition(":")[2])
            clients = [RawClient(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(5)]
            for client in clients:
                client.send(post(b'{"model":"sim","stream":true}', "/v1/completions"))
                await client.head()
            os.kill(process.process.pid, signal.SIGTERM)
            await until(lambda: process.lines("stop"), "it stops")
            if deadline == "1h":
                finish.set()
            await until(lambda: process.process.poll() is not None, "it ended", within_s=30.0)
            for client in clients:
                client.writer.close()
            cut = 5 if deadline == "100ms" else 0
            began, ended = (str(line["message"]) for line in process.lines("stop"))
            assert began.startswith("stopping: 5 running requests have up to ")
            assert ended == f"stopped: {cut} requests were ended before they were complete"

    run(main())


def test_a_second_signal_ends_all_processes_at_once(tmp_path: Path) -> None:
    """Else workers would finish their requests, as when the supervisor is killed."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await wire.watch()

    async def main() -> None:
        more = f"workers: {WORKERS}\ndrain: {{deadline: 1h, lame_duck: 0s}}"
        scripts: dict[str, Script] = {"/health": OK, "/v1/models": MODELS, "/v1/completions": script}
        async with ScriptedEndpoint(scripts) as it, lbproxy_beside(tmp_path, [it.url], more) as (process, url, _):
            pid, children = process.process.pid, children_of(process.process.pid)
            client = RawClient(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))
            client.send(post(b'{"model":"sim","stream":true}', "/v1/completions"))
            await client.head()
            os.kill(pid, signal.SIGTERM)
            await until(lambda: process.lines("stop"), "it stops")
            os.kill(pid, signal.SIGTERM)
            await until(lambda: process.process.poll() is not None, "it ended", within_s=30.0)
            assert process.process.returncode == 1
            await until(lambda: not any(map(exists, children)), "no process is left")
            client.writer.close()

    run(main())


@pytest.mark.parametrize("succeeds", [False, True])
def test_the_balancer_process_of_a_successor_decides_once_an_endpoint_is_up(succeeds: bool, tmp_path: Path) -> None:
    """Workers accept connections once it decides, and the old lbproxy serves until they do. Without an old one nobody
    would.
    """
    release = asyncio.Event()
    worker: End

    async def health(wire: Wire, _: Received) -> None:
        await release.wait()
        await wire.send(OK)

    def is_there(kind: type[m.Message]) -> bool:
        return any(isinstance(one, kind) for one in worker.arrived)

    async def main() -> None:
        async with ScriptedEndpoint({"/health": health, "/v1/models": MODELS}) as it:
            text = f"listen: 127.0.0.1:0\nadmin: null\nendpoints: ['{it.url}']\n"
            nonlocal worker
            worker = End(m.ToWorker)
            path, ready = str(tmp_path / "balancer.sock"), asyncio.Event()
            child = Child("the balancer process", lambda _: None)
            await child.launch(BALANCER, {})
            start = Start(BALANCER, 0, 1, 0, succeeds, Text(text, "cfg.yaml"), path, "http://x", {}, [])
            child.begin("the balancer process", start, ready.set)
            try:
                await until(ready.is_set, "it is ready", within_s=60.0)
                await asyncio.get_running_loop().create_unix_connection(worker.link.protocol, path)
                worker.link.send(m.Hello(0, os.getpid()))
                worker.link.send(NO_BEAT)
                await until(lambda: is_there(m.Pong), "it has read both")
                assert is_there(m.Welcome) == (not succeeds)
                release.set()
                await until(lambda: is_there(m.Welcome))
            finally:
                worker.link.close()
                child.kill()
                await child.ended()

    run(main())
