# SPDX-License-Identifier: Apache-2.0
"""Clients in numbers that do nothing, come slowly, read slowly, or vanish: T17 to T20."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.chaos.firehose import Firehose
from tests.chaos.load import how_many, needless, quantile, silent, told
from tests.chaos.rig import QUICK, Proxy, Rig, Server, wait
from tests.chaos.threads import threaded
from tests.chaos.verdict import lenient, pick
from tests.support.docs import ROOT


class Crowd:
    """Many clients of one kind, in their process."""

    def __init__(self, kind: str, count: int, url: str, output: IO[str]) -> None:
        self._output = Path(output.name)
        command = [sys.executable, "-m", "tests.chaos.idle", kind, str(count), url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, cwd=ROOT)

    def ready(self) -> None:
        wait(lambda: self._output.read_text().startswith("ready"), "the clients are there", 60)

    def ended(self) -> list[float]:
        """How long those connections lasted that the proxy ended."""
        return [float(line) for line in self._output.read_text().split()[1:]]

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def crowd(rig: Rig, proxy: Proxy, kind: str, count: int) -> Iterator[Crowd]:
    with (rig.folder / f"{kind}.txt").open("w") as output:
        it = Crowd(kind, count, proxy.url, output)
        try:
            it.ready()
            yield it
        finally:
            it.leave()


STALL_S = pick(4, 12, 12)
"""Longer than it takes to start all slow readers."""


@pytest.mark.chaos("T17", "8,900 idle clients beside live streams")
def test_t17_idle_clients(rig: Rig) -> None:
    case = rig.case
    count = pick(2000, 8900, 8900)
    with rig.proxy(lag_ms=pick(250, 100, 100)) as proxy:
        with rig.load(proxy, workers=16, tokens=20) as load:
            load.until(good=50)
            alone = [one.seconds for one in load.results()[16:]]
            before = proxy.rss_mib()
            with crowd(rig, proxy, "idle", count) as idle:
                began = time.monotonic()
                time.sleep(3.0)
                connections = proxy.total("lbproxy_client_connections")
                grown = proxy.rss_mib() - before
                beside = [one.seconds for one in load.results() if one.at > began]
                case.expect("idle clients", connections, at_least=count)
                case.expect("cut", len(idle.ended()), at_most=0)
            wait(lambda: proxy.total("lbproxy_client_connections") < 100, "they are gone")
        case.expect("memory for each, KiB", round(1024 * grown / count, 1), at_most=120 * 1024 / 8900)
        case.figure("streams' p99 alone, ms", 1000 * quantile(alone, 0.99))
        case.time("streams' p99 added", quantile(beside, 0.99) - 1.2 * quantile(alone, 0.99), at_most=0.02)
        case.expect("UF", needless(load.results()), at_most=0)
        case.expect("SF", silent(load.results()), at_most=0)


@pytest.mark.chaos("T18", "slowloris: heads and bodies that never end, beside honest clients")
def test_t18_slow_requests(rig: Rig) -> None:
    case = rig.case
    count = pick(200, 500, 2000)
    settings = QUICK.replace("timeouts: {", "timeouts: {client_head: 2s, client_body: 3s, ")
    with rig.proxy(settings) as proxy:
        before = proxy.rss_mib()
        with rig.load(proxy, workers=16, rate=4.0, tokens=5, streams=0.5) as load:
            load.until(good=30)
            with crowd(rig, proxy, "heads", count) as heads, crowd(rig, proxy, "bodies", count) as bodies:
                wait(lambda: len(heads.ended()) == len(bodies.ended()) == count, "all were closed", 90)
                grown = proxy.rss_mib() - before
                case.time("heads closed after, last", max(heads.ended()), at_most=2.0 + 1.2)
                case.time("bodies closed after, last", max(bodies.ended()), at_most=3.0 + 1.2)
                case.time("heads closed too early by", max(0.0, 2.0 - min(heads.ended())), at_most=lenient(0.5))
        case.expect("memory grown, MiB", round(grown, 1), at_most=60)
        case.expect("honest requests failed", len(load.results()) - how_many(load.results(), "ok"), at_most=0)
        case.figure("honest requests", len(load.results()))


def kernel_tcp_mib() -> float:
    """What the kernel's TCP buffers take, of this whole network namespace."""
    pages = re.findall(r"TCP:.* mem (\d+)", Path("/proc/net/sockstat").read_text())[0]
    return int(pages) * 4096 / 2**20


@pytest.mark.chaos("T19", "readers that do not read, of streams as fast as can be")
def test_t19_slow_readers(rig: Rig) -> None:
    case = rig.case
    count = pick(100, 500, 500)
    settings = QUICK.replace("timeouts: {", f"timeouts: {{client_stall: {STALL_S}s, ")
    with ExitStack() as stack:
        source = stack.enter_context(threaded(hose))
        proxy = stack.enter_context(rig.proxy(settings, endpoints=[source.url, *(one.url for one in rig.servers)]))
        wait(lambda: proxy.total("lbproxy_endpoint_up") == 5, "all are up")
        load = stack.enter_context(rig.load(proxy, workers=8, tokens=10))
        load.until(good=20)
        alone = [one.seconds for one in load.results()[8:]]
        before, kernel = proxy.rss_mib(), kernel_tcp_mib()
        with crowd(rig, proxy, "readers", count):
            wait(lambda: len(source.sent) >= count, "they are there", 60)
            wait(lambda: still(source), "every source stands still", 90)
            grown, kernel_grown = proxy.rss_mib() - before, kernel_tcp_mib() - kernel
            began = time.monotonic()
            time.sleep(1.0)
            beside = [one.seconds for one in load.results() if one.at > began]
            wait(lambda: not source.running, "all were cut", 40)
            case.time("cut after", time.monotonic() - began, at_most=STALL_S + 2.0)
        case.figure("readers", count)
        case.expect("memory for each, KiB", round(1024 * grown / count, 1), at_most=256)
        case.expect("kernel memory for each, KiB", round(1024 * kernel_grown / count), at_most=1024 * 320 / 500)
        case.expect("a source is ahead by, KiB", round(max(source.sent) / 1024), at_most=1024)
        case.time("other streams' p99 added", quantile(beside, 0.99) - quantile(alone, 0.99), at_most=0.05)
        case.expect("UF of the others", needless(load.finish()), at_most=0)


def hose() -> Firehose:
    return Firehose(100 * 2**20)


def still(source: Firehose) -> bool:
    before = list(source.sent)
    time.sleep(0.5)
    return source.sent == before


@pytest.mark.chaos("T20", "clients vanish in the middle of their streams: RST and FIN")
def test_t20_clients_vanish(rig: Rig) -> None:
    case = rig.case
    count = pick(50, 100, 200)

    def running() -> float:
        return sum(asking.map(Server.running, rig.servers))

    with rig.proxy() as proxy, ThreadPoolExecutor() as asking:
        for how in ("vanish-rst", "vanish-fin"):
            with crowd(rig, proxy, how, count) as clients:
                wait(lambda: running() == count, "all are computed")
                clients.leave()
                case.time(
                    f"{how.removeprefix('vanish-')}: work ended after",
                    wait(lambda: not running(), "all ended"),
                    at_most=0.1,
                )
        gone = proxy.total("lbproxy_requests_total", "client_closed_request")
        case.expect("counted as the client's", gone, at_least=2 * count, at_most=2 * count)
        case.expect("work left on the servers", running(), at_most=0)
        with rig.load(proxy, workers=8, count=40, tokens=5) as load:
            case.expect("good answers after it", how_many(load.wait(), "ok"), at_least=40)
        print(told(load.results()))
