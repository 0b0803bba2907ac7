# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo --replicas 2` over a real Redis, as its text tells a user to try it; and what it leaves behind."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from os import kill
from pathlib import Path

import httpx
import pytest

from tests.support.process import LBPROXY, Process
from tests.support.redis_server import needs_redis

pytestmark = [needs_redis, pytest.mark.timeout(180)]
ANY = "127.0.0.1:0"
BODY = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
WITHIN_S = 90.0


def is_running(pid: int) -> bool:
    """Not one that has ended and whose exit code is not read yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pids: list[int]) -> None:
    end = time.monotonic() + WITHIN_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"processes stayed behind: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_one_is_killed_and_the_other_responds(number: int) -> None:
    with Process("demo", "--replicas", "2", "--listen", ANY, "--admin", ANY) as demo:
        demo.wait_for(r"lbproxy status --admin \S+\n[\s\S]*lbproxy status --admin \S+\n", within_s=90)
        found = re.findall(r"lb-\d  (http://\S+)  dashboard (http://\S+)/dashboard#token=\S+  pid (\d+)", demo.output)
        (store,) = re.findall(r"(?:redis|valkey)-server  redis://\S+  pid (\d+)", demo.output)
        (first, first_admin, first_pid), (second, second_admin, second_pid) = found
        for url in (first, second):
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        for admin, other in ((first_admin, "lb-2"), (second_admin, "lb-1")):
            status = [*LBPROXY, "status", "--admin", admin]
            shown = subprocess.run(status, capture_output=True, text=True, timeout=60, check=True).stdout
            assert "1 other replica" in shown
            assert f"replica {other}" in shown

        kill(int(first_pid), signal.SIGKILL)
        demo.wait_for(r"lb-1 has ended \(SIGKILL\)")
        assert httpx.post(f"{second}/v1/completions", json=BODY).status_code == 200

        code = demo.stop(number)
        assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until_ended([int(second_pid), int(store)])


def test_it_ends_when_no_replica_is_left() -> None:
    with Process("demo", "--replicas", "2", "--listen", ANY, "--admin", ANY) as demo:
        demo.wait_for(r"lbproxy status --admin \S+\n[\s\S]*lbproxy status --admin \S+\n", within_s=90)
        pids = [int(pid) for pid in re.findall(r"  pid (\d+)", demo.output)]
        assert len(pids) == 3
        for pid in pids:
            kill(pid, signal.SIGKILL)
        assert demo.process.wait(WITHIN_S) == 0
        assert "No lbproxy is left" in demo.read()
