# SPDX-License-Identifier: Apache-2.0
"""A process waits beside the balancer process, and is the next one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.support.aio import run, until
from tests.support.process import children_of, exists, lbproxy, mock

WORKERS = 2


def test_the_standby_is_the_next_balancer_process(tmp_path: Path) -> None:
    """One that was killed is replaced, without a word in the log; and none is left when the supervisor is gone."""
    with mock("--model", "sim") as (_, server), lbproxy(tmp_path, [server], f"workers: {WORKERS}") as started:
        process, _, admin = started
        pid = process.process.pid

        def state() -> dict[str, Any]:
            try:
                return dict(httpx.get(f"{admin}/admin/state", timeout=10.0).json())
            except httpx.TransportError:
                return {}

        def standby(*not_these: int) -> int | None:
            """Its pid, if there is one."""
            now = state()
            working = {now.get("pid"), *(one["pid"] for one in now.get("workers", ()))}
            left = [one for one in children_of(pid) if one not in working | set(not_these)]
            return left[0] if len(working) == 1 + WORKERS and left else None

        run(until(standby, "there is a standby", within_s=60.0, every_s=0.1))
        first = standby()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        run(until(lambda: standby(first), "another one is there", within_s=60.0, every_s=0.1))
        second, balancer = standby(first), state()["pid"]
        assert second is not None
        os.kill(balancer, signal.SIGKILL)
        run(until(lambda: state().get("pid") == second, "it decides", within_s=60.0, every_s=0.05))
        assert len(process.lines("workers")) == 1 + WORKERS  # the supervisor's line, and the workers'
        run(until(lambda: standby(balancer), "the next one waits", within_s=60.0, every_s=0.1))
        children = children_of(pid)
        assert len(children) == 2 + WORKERS
        os.kill(pid, signal.SIGKILL)
        run(until(lambda: not any(map(exists, children)), "no process is left", within_s=60.0, every_s=0.1))
        assert "Traceback" not in process.read()
