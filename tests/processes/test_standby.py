# SPDX-License-Identifier: Apache-2.0
"""A process waits, and takes the place of the next one that dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx

from tests.support.aio import run, until
from tests.support.process import children_of, exists, lbproxy, mock

WORKERS = 2


def test_the_standby_takes_the_place_of_what_dies(tmp_path: Path) -> None:
    """One that was killed is replaced, without a word in the log; and none is left when the supervisor is gone."""
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
        assert process.lines("workers") == []
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
