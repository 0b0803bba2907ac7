# SPDX-License-Identifier: Apache-2.0
"""A short night without Prometheus: a server slows down, another is killed, a third of the fleet is drained.

What `make night` shows at length, in docs/operations.md, with the same fleet, clients and acts; here each step waits
for what it is to bring about, so that a busy machine takes longer and fails nothing.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lbproxy.demo.fleet import DemoFleet, FleetError
from lbproxy.demo.load import DemoLoad, Seen, shares
from lbproxy.demo.timeline import Act, Verb
from lbproxy.demo.traffic import MODEL, mock_arguments
from lbproxy.sim.workloads.mix import everyday
from tests.support import aio
from tests.support.process import Process

RATE = 12.0
WITHIN_S = 60.0
SETTINGS = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nlog: {access: false}\n"


async def until(condition: Callable[[], object], what: str) -> None:
    await aio.until(condition, what, within_s=WITHIN_S)


def share(load: DemoLoad, name: str, among: int) -> float:
    """Of the last so many answers that began."""
    heads = list(load.heads)[-among:]
    return shares(heads, [name], 0.0)[name]


def endpoint(fleet: DemoFleet, name: str) -> dict[str, Any]:
    answer = httpx.get(f"{fleet.admin_url}/admin/endpoints/{name}", trust_env=False)
    return dict(answer.raise_for_status().json())


def explained(fleet: DemoFleet, seen: Seen) -> dict[str, Any]:
    answer = httpx.get(f"{fleet.admin_url}/admin/decisions/{seen.id}", trust_env=False)
    return dict(answer.raise_for_status().json())


def why_not(load: DemoLoad, fleet: DemoFleet, name: str) -> set[str]:
    """Why the last requests that ended were not sent to an endpoint."""
    decisions = [decision for seen in load.seen[-5:] for decision in explained(fleet, seen)["decisions"]]
    return {one["why"] for decision in decisions for one in decision["left_out"] if one["endpoint"] == name}


@pytest.mark.timeout(400)
def test_a_night() -> None:
    aio.run(short_night(), timeout_s=380.0)


async def short_night() -> None:
    mock = mock_arguments(6)
    slow, dead, third = "server-3", "server-5", ("server-1", "server-2")
    async with DemoFleet(tuple(mock), mock=mock, settings=SETTINGS) as fleet, asyncio.TaskGroup() as tasks:
        load = DemoLoad(fleet.url, MODEL, everyday(1, rate=RATE, duration_s=600.0))
        traffic = tasks.create_task(load.run())
        await until(lambda: share(load, slow, 100) > 0.02 and len(load.seen) >= 60, "all is well")
        assert [one for one in load.seen if one.wrong] == []

        # The slow one's share falls, and explain says why: its answers cost more there than elsewhere.
        await fleet.carry_out([Act(Verb.SLOW, (slow,))])
        await until(lambda: share(load, slow, 100) < 0.05, "the slow one's share falls below a third of its fair one")
        await dear(load, fleet, slow)

        # The dead one: what had begun there breaks off, and nobody else notices.
        under_way = endpoint(fleet, dead)["in_flight"]
        await fleet.carry_out([Act(Verb.KILL, (dead,))])
        killed_at = len(load.seen)
        await until(lambda: len(load.seen) >= killed_at + 60, "others go on")
        await until(lambda: endpoint(fleet, dead)["health"] == "down", "it is found dead")
        wrong = [one for one in load.seen if one.wrong]
        assert [one for one in wrong if one.failed] == []
        assert {one.endpoint for one in wrong} <= {dead}
        assert len(wrong) <= under_way + RATE
        await until(lambda: why_not(load, fleet, dead) & {"down", "ejected"}, "explain says that it is dead")

        # It is let in slowly.
        await fleet.carry_out([Act(Verb.WELL, (slow,)), Act(Verb.START, (dead,))])
        await until(lambda: endpoint(fleet, dead)["health"] == "up", "it is up")
        assert endpoint(fleet, dead)["share"] < 1.0

        # A deploy: both run empty, and their restart is seen by nobody.
        done: list[tuple[str, Verb]] = []
        deploy = [Act(verb, third) for verb in (Verb.DRAIN, Verb.RESTART, Verb.UNDRAIN)]
        deploying = tasks.create_task(fleet.carry_out(deploy, lambda name, verb: done.append((name, verb))))
        await until(lambda: "draining" in why_not(load, fleet, third[0]), "explain says that it drains")
        async with asyncio.timeout(2 * WITHIN_S):
            await deploying
        assert len(done) == 6
        restarted_at = len(load.seen)
        await until(lambda: len(load.seen) > restarted_at + 30, "others go on")
        assert [one for one in load.seen if one.wrong and one.endpoint != dead] == []
        assert [one for one in load.seen if one.failed] == []
        traffic.cancel()


async def dear(load: DemoLoad, fleet: DemoFleet, name: str) -> None:
    """Explain says of a request that its answer would have cost half as much again there as where it went.

    Of one of the next: the share falls with the first queue, and what an answer costs is learned from those that last.
    """
    looked = len(load.seen)
    async with asyncio.timeout(WITHIN_S):
        while True:
            for one in load.seen[looked:]:
                shown = explained(fleet, one)["decisions"][-1]["shown"]
                decode = {candidate["endpoint"]: candidate["parts"]["decode"] for candidate in shown}
                if name in decode and decode[name] > 1.5 * decode[str(one.endpoint)]:
                    return
            looked = len(load.seen)
            await asyncio.sleep(0.1)


def children(process: Process) -> set[int]:
    """Processes whose parent it is."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process.process.pid:
            found.add(int(stat.parent.name))
    return found


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_demo_leaves_nothing_behind(number: int) -> None:
    """Ctrl-C ends it with a summary; and if it is killed, its seven processes end too."""
    with Process("demo", "--traffic", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") as demo:
        admin = demo.wait_for(r"browser: (http://\S+)/dashboard", within_s=90)[1]
        started = children(demo)
        assert len(started) == 7
        answers = {"completed": 0.0}
        end = time.monotonic() + WITHIN_S
        while answers["completed"] < 5:
            assert time.monotonic() < end, "traffic"
            found = re.findall(r'^lbproxy_requests_total{.*"completed".*} (.*)$', metrics(admin), re.MULTILINE)
            answers["completed"] = sum(map(float, found))
            time.sleep(0.2)
        code = demo.stop(number)
        assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
        if number == signal.SIGINT:
            assert "what clients see" in demo.output
            assert "0 failed, 0 broke off" in demo.output
        end = time.monotonic() + WITHIN_S
        while not gone(started):
            assert time.monotonic() < end, "processes stayed behind"
            time.sleep(0.1)


def metrics(admin: str) -> str:
    return httpx.get(f"{admin}/metrics", trust_env=False).text


def test_the_demo_says_what_cannot_be() -> None:
    for arguments, said in ((["--rate", "0"], "--rate must be"), (["--duration", "5"], "--duration must be")):
        with Process("demo", "--traffic", *arguments) as demo:
            assert demo.process.wait(30) == 2
            assert said in demo.read()


def test_an_address_that_is_taken_is_said() -> None:
    async def start() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            settings = f"listen: '{host}:{port}'\nadmin: 127.0.0.1:0\n"
            with pytest.raises(FleetError, match="address already in use"):
                async with DemoFleet(("one",), mock={"one": ["--speed", "50"]}, settings=settings):
                    pass

    aio.run(start())
