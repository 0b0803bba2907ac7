# SPDX-License-Identifier: Apache-2.0
"""Each process of an lbproxy with workers is killed, or told something, under streams and requests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lbproxy.processes.balancing import COUNT_EVERY_S
from lbproxy.workers.succession import RETURN_S
from tests.support.aio import run, until
from tests.support.load import load
from tests.support.process import Process, changing, children_of, exists, lbproxy, mock
from tests.support.rig import RawClient, post

WORKERS = 2
STREAMS = 12
SETTINGS = f"""
workers: {WORKERS}
health: {{interval: 500ms}}
"""
DRAIN = "drain: {deadline: %s, restart_deadline: 20s, lame_duck: 0s}\n"
DONE = b"data: [DONE]"
SPEED = 0.4
"""Of the servers: a token each 20 ms, nearly."""
SHORT, LONG = 300, 20_000
"""Tokens: a stream of 6 s, and one that lasts longer than its test."""
FEW = 1
"""Requests a minute: longer than a balancer process takes to come back."""
SILENT = "the balancer process says nothing"
PLACES = "a new balancer process places this worker's requests"


class Cluster:
    """An lbproxy with workers."""

    def __init__(self, process: Process, url: str, admin: str, config: Path) -> None:
        self.process = process
        self.url = url
        self.config = config
        self.admin_url = admin
        self.admin = httpx.Client(base_url=admin, timeout=10.0)

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.process.pid

    def state(self) -> dict[str, Any]:
        """GET /admin/state; empty while no balancer process responds."""
        try:
            return cast(dict[str, Any], self.admin.get("/admin/state").json())
        except httpx.TransportError:
            return {}

    def workers(self) -> dict[int, int]:
        """Their pids, by index."""
        return {one["index"]: one["pid"] for one in self.state().get("workers", ())}

    def balancer(self) -> int:
        """The pid of the balancer process."""
        return int(self.state()["pid"])

    def running(self) -> dict[int, int]:
        """Requests that run, by worker."""
        return {one["index"]: one["running"] for one in self.state().get("workers", ())}

    def in_flight(self) -> int | None:
        """At all endpoints; None: no balancer process responds."""
        endpoints = self.state().get("endpoints")
        return None if endpoints is None else sum(one["in_flight"] for one in endpoints)

    def metric(self, name: str) -> float:
        page = self.admin.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

    def close(self) -> None:
        self.admin.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    options = "--model", "sim", "--speed", str(SPEED)
    with mock(*options) as (_, one), mock(*options) as (_, two):
        yield [one, two]


@contextmanager
def cluster(folder: Path, servers: list[str], more: str = "", *, deadline: str = "20s") -> Iterator[Cluster]:
    """`deadline`: of a drain."""
    with lbproxy(folder, servers, SETTINGS + DRAIN % deadline + more) as (process, url, admin):
        process.wait_for("2 workers accept connections")
        it = Cluster(process, url, admin, folder / "cfg.yaml")
        try:
            run(until(lambda: len(it.workers()) == WORKERS and it.state()["endpoints"][-1]["health"] == "up", "all up"))
            yield it
            assert "Traceback" not in process.read()
        finally:
            it.close()


class Stream:
    """A stream that runs through one of the workers."""

    def __init__(self, client: RawClient) -> None:
        self.client = client

    async def goes_on(self) -> bool:
        """Whether more events arrive; False: the connection broke."""
        try:
            async with asyncio.timeout(20.0):
                await self.client.reader.read(1 << 26)  # what arrived before
                await self.client.reader.readuntil(b"data: ")
        except (ConnectionError, asyncio.IncompleteReadError):
            return False
        return True

    async def ends(self) -> bool:
        """Read it to its end: whether it is complete."""
        try:
            async with asyncio.timeout(30.0):
                return DONE in (await self.client.reply()).body
        except (ConnectionError, asyncio.IncompleteReadError):
            return False


@asynccontextmanager
async def streams(it: Cluster, tokens: int) -> AsyncIterator[list[Stream]]:
    """That many, each of which has begun; each worker has some. Broken at the end, if they still run."""
    body = b'{"model":"sim","prompt":"x","stream":true,"ignore_eos":true,"max_tokens":%d}' % tokens
    opened: list[Stream] = []
    try:
        await _open(it, body, opened)
        yield opened
    finally:
        for one in opened:
            one.client.writer.transport.abort()


async def _open(it: Cluster, body: bytes, opened: list[Stream]) -> None:
    address = httpx.URL(it.url)
    while len(opened) < STREAMS or not all(it.running().values()):
        client = RawClient(*await asyncio.open_connection(address.host, address.port))
        client.send(post(body, "/v1/completions"))
        opened.append(Stream(client))
        if len(opened) >= STREAMS:  # the figures of workers arrive twice a second
            await until(lambda: sum(it.running().values()) == len(opened), "all run")
        assert len(opened) < 10 * STREAMS, "one worker gets no connections"


@pytest.mark.parametrize("index", range(WORKERS))
def test_a_killed_worker_breaks_its_own_streams_alone(index: int, servers: list[str], tmp_path: Path) -> None:
    """Its requests are nobody's any more at once, and another worker takes its place."""

    async def body(it: Cluster) -> None:
        async with streams(it, LONG) as opened:
            its_own, pid = it.running()[index], it.workers()[index]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.in_flight() == len(opened) - its_own, "what it had is not in flight")
            async with load(it.url, keep=2, fresh=2) as clients:
                await until(lambda: it.workers().get(index, pid) != pid, "another one is there")
                await until(lambda done=clients.done: clients.done > done + 20)  # type: ignore[misc]
            assert clients.failed == []
            alive = [one for one in opened if await one.goes_on()]
            assert len(alive) == len(opened) - its_own
            await until(lambda: it.in_flight() == len(alive))
        await until(lambda: it.in_flight() == 0)

    with cluster(tmp_path, servers) as it:
        run(body(it))
        (line,) = [line for line in it.process.lines("workers") if "was killed" in str(line["message"])]
        assert str(line["message"]).startswith(f"worker {index} was killed by SIGKILL")


def test_no_request_fails_because_the_balancer_process_died(servers: list[str], tmp_path: Path) -> None:
    """Workers place requests meanwhile; its successor counts what runs."""

    async def body(it: Cluster) -> None:
        async with streams(it, LONG) as opened:
            async with load(it.url, keep=3, fresh=3) as clients:
                await until(lambda: clients.done > 20)
                for _ in range(2):
                    pid, done = it.balancer(), clients.done
                    os.kill(pid, signal.SIGKILL)
                    await until(lambda done=done: clients.done > done + 20, "requests are served meanwhile")  # type: ignore[misc]
                    await until(lambda: it.in_flight() is not None, "another one is there", within_s=30.0)
                    await until(lambda: len(it.workers()) == WORKERS)
                    await until(lambda: (it.in_flight() or 0) >= len(opened), "it knows what runs")
            assert clients.failed == []
            assert all([await one.goes_on() for one in opened])
            await until(lambda: it.in_flight() == len(opened), "it counts what runs, and nothing else")
            assert it.metric("lbproxy_internal_errors_total") == 0
        await until(lambda: it.in_flight() == 0)

    with cluster(tmp_path, servers) as it:
        run(body(it), timeout_s=100.0)
        assert "requests are placed by this worker alone" in it.process.read()


def test_each_request_is_counted_once_though_the_balancer_process_stood_still(
    servers: list[str], tmp_path: Path
) -> None:
    """Workers end their links to it and go on alone, and so do the streams; then it goes on."""

    async def body(it: Cluster) -> None:
        async with streams(it, 2 * SHORT) as opened:
            balancer = it.balancer()
            os.kill(balancer, signal.SIGSTOP)
            try:
                async with load(it.url, keep=1, fresh=1) as clients:
                    await until(lambda: len(silent(it)) == WORKERS, "both ended their links")
                    await until(lambda done=clients.done: clients.done > done + 20, "requests are served meanwhile")  # type: ignore[misc]
            finally:
                os.kill(balancer, signal.SIGCONT)
            went_on = asyncio.get_running_loop().time()
            assert clients.failed == []
            await until(lambda: len(it.workers()) == WORKERS, "they are back")
            assert it.balancer() == balancer
            assert all(await asyncio.gather(*(one.ends() for one in opened)))
        await until(lambda: it.in_flight() == 0)
        served = len(opened) + clients.done
        await until(lambda: it.metric("lbproxy_requests_total{") >= served, "all are counted")
        await asyncio.sleep(max(0.0, went_on + RETURN_S + 0.5 - asyncio.get_running_loop().time()))
        assert it.metric("lbproxy_requests_total{") == served
        logged = Counter(line["id"] for line in it.process.lines("request"))
        assert len(logged) == served
        assert set(logged.values()) == {1}
        assert {line["outcome"] for line in it.process.lines("request")} == {"completed"}

    def silent(it: Cluster) -> set[object]:
        """Workers that noticed."""
        return {line["worker"] for line in it.process.lines("workers") if SILENT in str(line["message"])}

    with cluster(tmp_path, servers) as it:
        run(body(it), timeout_s=100.0)


def test_a_budget_survives_the_balancer_process(servers: list[str], tmp_path: Path) -> None:
    """Without a state file: the supervisor knows what was used. What runs meanwhile is not counted twice."""
    share = 'lbproxy_endpoint_limit_used_ratio{endpoint="own"'
    listed = [f"{{url: {servers[0]}, name: own, tokens_per_day: 100000}}"]

    async def body(it: Cluster) -> None:
        async with load(it.url) as clients:
            await until(lambda: clients.done > 5)
        assert clients.failed == []
        async with streams(it, LONG):
            await asyncio.sleep(COUNT_EVERY_S)
            told = it.metric(share)
            assert told > 0.0
            await asyncio.sleep(2 * COUNT_EVERY_S)  # until then the supervisor knows it
            used = it.metric(share)
            pid = it.balancer()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.process.read().count(PLACES) == WORKERS, "another one decides", within_s=30.0)
            # The streams go on, and what they wrote after the last count before the end is lost.
            assert told <= it.metric(share) < 2 * used

    with cluster(tmp_path, listed) as it:
        run(body(it), timeout_s=100.0)


def test_limits_of_flows_survive_the_balancer_process(servers: list[str], tmp_path: Path) -> None:
    """Without a state file: the supervisor knows what was used."""

    async def status(it: Cluster, client: httpx.AsyncClient, flow: str) -> int:
        body = {"model": "sim", "prompt": "a", "max_tokens": 1}
        return (await client.post(f"{it.url}/v1/completions", json=body, headers={"x-lbproxy-flow": flow})).status_code

    async def body(it: Cluster) -> None:
        async with httpx.AsyncClient(timeout=20.0) as client:
            for _ in range(FEW):
                assert await status(it, client, "ada") == 200
            assert await status(it, client, "ada") == 429
            await asyncio.sleep(2 * COUNT_EVERY_S)
            pid = it.balancer()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: it.process.read().count(PLACES) == WORKERS, "another one decides", within_s=30.0)
            assert it.balancer() != pid
            assert [await status(it, client, flow) for flow in ("ada", "bob")] == [429, 200]

    limits = f"flows: {{default: {{requests_per_minute: {FEW}}}}}"
    with cluster(tmp_path, servers, limits) as it:
        run(body(it), timeout_s=100.0)


def test_endpoints_of_the_admin_api_survive_the_balancer_process(servers: list[str], tmp_path: Path) -> None:
    """Also those that were removed or drained, a second death, and a reload after it, which keeps those that are to be
    kept.
    """
    names = [one.removeprefix("http://") for one in servers]

    def shown(it: Cluster) -> list[tuple[str, str]]:
        return [(one["name"], one["from"]) for one in it.state().get("endpoints", ())]

    async def is_up(it: Cluster) -> None:
        """So that the workers know it, too, when they place requests alone."""

        def health() -> list[str]:
            return [one["health"] for one in it.state().get("endpoints", ()) if one["name"] == "kept"]

        await until(lambda: health() == ["up"], "it is up")

    async def dies(it: Cluster) -> None:
        pid = it.balancer()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(it.workers()) == WORKERS and it.balancer() != pid, "another is there", within_s=30.0)
        await is_up(it)

    async def body(it: Cluster) -> None:
        kept, other = {"url": servers[1], "name": "kept", "keep": True}, {"url": "http://127.0.0.1:9", "name": "other"}
        json = changing(it.admin_url)
        for entry in (kept, other):
            assert it.admin.post("/admin/endpoints", json=entry, headers=json).status_code == 201
        assert it.admin.delete(f"/admin/endpoints/{names[0]}", headers=json).status_code == 200
        assert it.admin.post("/admin/endpoints/other/drain", headers=json).status_code == 200
        await is_up(it)
        for _ in range(2):
            await dies(it)
            assert shown(it) == [("kept", "added, kept by a reload"), ("other", "added")]
            assert [one["draining"] for one in it.state()["endpoints"]] == [False, True]
        async with load(it.url) as clients:
            await until(lambda: clients.done > 10)
        assert clients.failed == []
        os.kill(it.pid, signal.SIGHUP)
        after = [(names[0], "settings"), ("kept", "added, kept by a reload")]
        await until(lambda: shown(it) == after, "it is reloaded")
        await dies(it)
        assert shown(it) == after

    with cluster(tmp_path, servers[:1]) as it:
        run(body(it), timeout_s=100.0)


def test_all_processes_end_after_their_streams_when_the_supervisor_is_killed(
    servers: list[str], tmp_path: Path
) -> None:
    async def body(it: Cluster) -> None:
        async with streams(it, SHORT) as opened:
            children = children_of(it.pid)
            assert len(children) >= WORKERS + 1  # and a standby, once it has run for a while
            os.kill(it.pid, signal.SIGKILL)
            assert all([await one.ends() for one in opened])
            await until(lambda: not any(exists(pid) for pid in children), "no process is left", within_s=30.0)
            address = httpx.URL(it.url)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(address.host, address.port)

    with cluster(tmp_path, servers, deadline="500ms") as it:
        run(body(it), timeout_s=100.0)


def test_sigterm_lets_streams_of_all_workers_finish(servers: list[str], tmp_path: Path) -> None:
    async def body(it: Cluster) -> None:
        async with streams(it, SHORT) as opened:
            os.kill(it.pid, signal.SIGTERM)
            assert all([await one.ends() for one in opened])

    with cluster(tmp_path, servers) as it:
        children = children_of(it.pid)
        run(body(it), timeout_s=100.0)
        assert it.process.process.wait(20) == 0
        assert not any(exists(pid) for pid in children)


def test_connections_after_the_last_worker_stopped_accepting_are_refused(servers: list[str], tmp_path: Path) -> None:
    """Not left in the kernel's queue until the streams have ended, and then reset."""

    async def body(it: Cluster) -> None:
        address = httpx.URL(it.url)

        def refused() -> bool:
            try:
                socket.create_connection((address.host, address.port or 0)).close()
            except ConnectionRefusedError:
                return True
            return False

        async with streams(it, LONG) as opened:
            os.kill(it.pid, signal.SIGTERM)
            await until(refused, "the port is closed", every_s=0.05)
            assert all([await one.goes_on() for one in opened])

    with cluster(tmp_path, servers, deadline="60s") as it:
        run(body(it), timeout_s=100.0)


def test_sighup_has_every_worker_use_the_new_settings(servers: list[str], tmp_path: Path) -> None:
    """A file with a mistake changes nothing."""

    async def statuses(it: Cluster, **headers: str) -> set[int]:
        """Of requests on connections of their own: each worker gets some of them."""
        async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=20.0) as http:
            tasks = [http.get(f"{it.url}/v1/models", headers=headers) for _ in range(20)]
            return {reply.status_code for reply in await asyncio.gather(*tasks)}

    async def body(it: Cluster) -> None:
        async with streams(it, LONG) as opened:
            before = it.config.read_text()
            assert await statuses(it) == {200}
            it.config.write_text(before.replace(f"  - {servers[1]}\n", "") + "auth: {keys: [secret-of-ann-123456]}\n")
            os.kill(it.pid, signal.SIGHUP)
            await asyncio.to_thread(it.process.wait_for, '"event":"reload"')
            assert await statuses(it) == {401}
            assert await statuses(it, Authorization="Bearer secret-of-ann-123456") == {200}
            it.config.write_text("nonsense")
            os.kill(it.pid, signal.SIGHUP)
            await until(lambda: it.metric("lbproxy_config_reload_success") == 0, "it is refused")
            assert await statuses(it) == {401}
            assert all([await one.goes_on() for one in opened])

    with cluster(tmp_path, servers) as it:
        run(body(it), timeout_s=60.0)


def test_sigusr2_hands_over_without_a_failed_request(servers: list[str], tmp_path: Path) -> None:
    """`drain.deadline` is how long a supervisor waits, and none waits for this one."""

    async def body(it: Cluster) -> None:
        async with streams(it, SHORT) as opened:
            async with load(it.url, keep=3, fresh=3) as clients:
                await until(lambda: clients.done > 20)
                drained = it.state()["endpoints"][0]["name"]
                answer = it.admin.post(f"/admin/endpoints/{drained}/drain", headers=changing(it.admin_url))
                assert answer.status_code == 200
                os.kill(it.pid, signal.SIGUSR2)
                match = await asyncio.to_thread(it.process.wait_for, r"accepts connections: process (\d+)")
                successors.append(int(match[1]))
                assert all([await one.ends() for one in opened])
                await until(lambda: it.process.process.poll() is not None, "the old one ends", within_s=30.0)
                await until(lambda done=clients.done: clients.done > done + 20)  # type: ignore[misc]
            assert clients.failed == []
            assert it.process.process.poll() == 0
            await until(lambda: len(it.workers()) == WORKERS)
            assert set(it.workers().values()) < set(children_of(successors[0]))
            assert [one["draining"] for one in it.state()["endpoints"]] == [True, *[False] * (len(servers) - 1)]

    successors: list[int] = []
    with cluster(tmp_path, servers, deadline="500ms") as it:
        try:
            run(body(it), timeout_s=100.0)
        finally:
            for pid in successors:
                for one in (pid, *children_of(pid)):
                    os.kill(one, signal.SIGKILL)
