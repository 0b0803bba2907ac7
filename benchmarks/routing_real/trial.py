# SPDX-License-Identifier: Apache-2.0
"""One run: emptied caches or words of its own, one router, one replay. Also: which run follows which.

The servers stay. On CPU each has a core, which it shares with the router or with the client: there are but two. The
router is started for each run and gets small requests until each server has answered one. Whether a run can be
believed is said by `results.rejected`; one that cannot is done again, at most `ATTEMPTS` times in all.
"""

from __future__ import annotations

import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_routing.client import Answer
from benchmarks.http_routing.routers import Router, routers
from benchmarks.http_routing.trial import TrialError, ask_client, get_ready, waited_s
from benchmarks.overhead.load import BENCH
from benchmarks.overhead.process import Proxy, Usage, busy_s
from benchmarks.routing_real.cells import Cell
from benchmarks.routing_real.client import RecordedRequest
from benchmarks.routing_real.fleet import ServerSet
from benchmarks.routing_real.load import CLIENT, request_of
from benchmarks.routing_real.servers import empty, prefer, usage, wait_until_idle

ROUTERS = ("lbproxy", "nginx least_conn", "vllm-router", "sglang-router", "smg")
"""Of `http_routing.routers`: each project's program at its defaults."""
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """A run to be done."""

    cell: str
    seed: int
    """Also the number of the round."""
    router: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that was done. Seconds."""

    task: Task
    cell: Cell
    answer: Answer
    router_cpu_s: float
    servers_cpu_s: float
    """0 of servers that we have not started, as for what follows."""
    servers_waited_s: float
    """Their threads, all together: ready to run, but not running."""
    others_cpu_s: float
    """What else ran on the machine."""
    seconds: float


def order(cells: Sequence[str], seeds: int, names: Sequence[str]) -> list[Task]:
    """All runs: round by round, in each all routers one after the other, in an order drawn for each cell and round."""
    tasks = []
    for seed in range(1, seeds + 1):
        for cell in cells:
            turn = list(names)
            random.Random(f"{seed}:{cell}:order").shuffle(turn)
            tasks += [Task(cell, seed, name) for name in turn]
    return tasks


def chosen(urls: Sequence[str]) -> list[Router]:
    """The routers, installed or not, before these servers."""
    found = {router.name: router for router in routers(urls)}
    return [found[name] for name in ROUTERS]


def run(task: Task, cell: Cell, servers: ServerSet, folder: Path | None = None) -> Trial:
    """Do it once. `folder`: for the router's files and output, kept; else they are deleted. Raises TrialError,
    StartError.
    """
    (router,) = [one for one in chosen(servers.urls) if one.name == task.router]
    BENCH.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=BENCH) as name,
        router.subject.start(0, (folder or Path(name)) / "router") as proxy,
    ):
        prefer(proxy.process.pid)
        get_ready(proxy, servers.urls, servers.model)
        for url in servers.urls:
            wait_until_idle(url)
        for server in servers.started:
            empty(server)
        words = 0 if servers.started else secrets.randbits(60)
        request = request_of(task.cell, cell, servers, seed=task.seed, port=proxy.port, words=words)
        of_router, of_servers = proxy.usage(), usage(servers.started)
        return _replay(task, cell, request, proxy, (of_router, of_servers))


def _replay(task: Task, cell: Cell, request: RecordedRequest, proxy: Proxy, used: tuple[Usage, Usage]) -> Trial:
    of_router, of_servers = used
    begin, busy = time.monotonic(), busy_s()
    router_cpu_s, servers_cpu_s, servers_waited_s = of_router.cpu_s(), of_servers.cpu_s(), waited_s(of_servers.pids)
    answer = ask_client(CLIENT, request)
    if proxy.process.poll() is not None:
        raise TrialError(f"the router ended: {proxy.last_words()}")
    router_cpu_s, servers_cpu_s = of_router.cpu_s() - router_cpu_s, of_servers.cpu_s() - servers_cpu_s
    return Trial(
        task=task,
        cell=cell,
        answer=answer,
        router_cpu_s=router_cpu_s,
        servers_cpu_s=servers_cpu_s,
        servers_waited_s=waited_s(of_servers.pids) - servers_waited_s,
        others_cpu_s=busy_s() - busy - router_cpu_s - servers_cpu_s - answer["client_cpu_s"],
        seconds=time.monotonic() - begin,
    )
