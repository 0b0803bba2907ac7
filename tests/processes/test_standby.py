# SPDX-License-Identifier: Apache-2.0
"""A process waits, and takes the place of the next one that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from lbproxy.processes.control import Child
from lbproxy.processes.standby import Standby
from tests.support.aio import run, until
from tests.support.endpoint import OK, STREAM_HEAD, Received, Script, ScriptedEndpoint, Wire, answer, event
from tests.support.process import children_of, exists, lbproxy, lbproxy_beside, mock
from tests.support.rig import RawClient, post

WORKERS = 2
MODELS = answer(b'{"object":"list","data":[{"id":"sim","object":"model"}]}')


def test_the_standby_takes_the_place_of_what_dies(tmp_path: Path) -> None:
    """One that was killed is replaced; and none is left when the supervisor is gone."""
    with mock("--model", "sim") as (_, server), lbproxy(tmp_path, [server], f"workers: {WORKERS}") as started:
        process, url, admin = started
        pid = process.process.pid

        def working() -> list[int]:
            """The pids of the balancer process and of worker 0 and 1; empty if not all are there."""
            try:
                state = httpx.get(f"{admin}/admin/state", timeout=10.0).json()
            except httpx.TransportError:
                return []
            workers = sorted(state["workers"], key=lambda one: int(one["index"]))
            return [state["pid"], *(one["pid"] for one in workers)] if len(workers) == WORKERS else []

        def standby(*not_these: int) -> int:
            """Its pid; 0 = there is none."""
            pids = working()
            return next((one for one in children_of(pid) if pids and one not in {*pids, *not_these}), 0)

        def waits(*not_these: int) -> int:
            run(until(lambda: standby(*not_these), "there is a standby", within_s=60.0, every_s=0.1))
            return standby(*not_these)

        first = waits()
        os.kill(first, signal.SIGKILL)
        following = waits(first)
        (line,) = process.lines("workers")
        assert line["message"] == "no standby: it ended by itself; another one starts in 1 s"
        for place in (0, 1):
            victim = working()[place]
            os.kill(victim, signal.SIGKILL)
            run(until(lambda one=following: one in working(), "it works", within_s=60.0, every_s=0.05))  # type: ignore[misc]
            assert working()[place] == following
            assert httpx.get(f"{url}/v1/models", timeout=10.0).status_code == 200
            following = waits(victim)
        children = children_of(pid)
        assert len(children) == 2 + WORKERS
        os.kill(pid, signal.SIGKILL)
        run(until(lambda: not any(map(exists, children)), "no process is left", within_s=60.0, every_s=0.1))
        assert "Traceback" not in process.read()


def test_no_standby_is_started_during_a_stop(tmp_path: Path) -> None:
    """It would have the sockets open, which are closed."""

    async def script(wire: Wire, _: Received) -> None:
        await wire.send(STREAM_HEAD + event("1"))
        await wire.watch()

    async def main() -> None:
        more = f"workers: {WORKERS}\ndrain: {{deadline: 3s, lame_duck: 0s}}"
        scripts: dict[str, Script] = {"/health": OK, "/v1/models": MODELS, "/v1/completions": script}
        async with ScriptedEndpoint(scripts) as it, lbproxy_beside(tmp_path, [it.url], more) as (process, url, _):
            pid = process.process.pid
            client = RawClient(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))
            client.send(post(b'{"model":"sim","stream":true}', "/v1/completions"))
            await client.head()
            await until(lambda: len(children_of(pid)) == 2 + WORKERS, "there is a standby", within_s=60.0)
            os.kill(pid, signal.SIGTERM)
            await until(lambda: process.lines("stop"), "it stops")
            seen = set()
            while process.process.poll() is None:
                seen.add(len(children_of(pid)))
                await asyncio.sleep(0.02)
            assert process.process.returncode == 0
            assert max(seen) <= 2 + WORKERS
            assert process.lines("workers") == []
            assert "Traceback" not in process.read()
            client.writer.close()

    run(main())


def test_one_that_cannot_be_started_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[str] = []

    async def launch(_: Child, role: str, __: object) -> None:
        launched.append(role)
        raise OSError("out of memory")

    async def main() -> None:
        monkeypatch.setattr(Child, "launch", launch)
        standby = Standby(lambda _: None)
        for _ in range(5):
            await standby.refresh({})
        assert launched == ["standby"]
        assert caplog.messages == ["no standby: out of memory; another one starts in 1 s"]
        standby = Standby(lambda _: None)
        standby.end()
        await standby.refresh({})
        assert launched == ["standby"]
        assert standby.take() is None

    run(main())
