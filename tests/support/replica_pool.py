# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies as processes over a real Redis server, before two simulated model servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx

from tests.support.process import Process, lbproxy, mock
from tests.support.redis_server import RedisServer, redis_server

NOTICED_S = 30.0
"""Within this time, also on a busy machine, they know of each other."""


class One(NamedTuple):
    """One lbproxy."""

    process: Process
    url: str
    admin: str

    def state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", httpx.get(f"{self.admin}/admin/state", timeout=10.0).json())

    def others(self) -> int:
        return len(self.state()["replicas"]["others"])

    def elsewhere(self) -> int:
        return sum(one["elsewhere"] for one in self.state()["endpoints"])

    def is_connected(self) -> bool:
        return bool(self.state()["replicas"]["connected"])


class Pool(NamedTuple):
    redis: RedisServer
    servers: list[str]
    members: list[One]


@contextmanager
def pool(folder: Path, count: int, more: str = "") -> Iterator[Pool]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        servers = [stack.enter_context(mock("--model", "sim", "--speed", "0.5"))[1] for _ in range(2)]
        members = []
        for number in range(count):
            (folder / f"lb{number}").mkdir()
            settings = f"replicas: {{url: '{redis.url}', name: lb{number}}}\ndrain: {{lame_duck: 0s}}\n{more}"
            one = One(*stack.enter_context(lbproxy(folder / f"lb{number}", servers, settings)))
            one.process.wait_for(r"(?s)serves sim.*serves sim")
            members.append(one)
        for one in members:
            one.process.wait_for("connected to")
        end = time.monotonic() + NOTICED_S
        while any(one.others() != count - 1 for one in members):
            assert time.monotonic() < end, "they do not know of each other"
            time.sleep(0.05)
        yield Pool(redis, servers, members)
        for one in members:
            assert "Traceback" not in one.process.read()
