# SPDX-License-Identifier: Apache-2.0
"""A proxy for which time passes without it: T28 and T29. Its own standing still is no fault of the servers."""

from __future__ import annotations

import os
import signal
import time

import orjson
import pytest

from tests.chaos.load import needless, silent, told
from tests.chaos.rig import Proxy, Rig, wait
from tests.chaos.tools import skip
from tests.chaos.verdict import pick

EAGER = """
health: {interval: 200ms, timeout: 500ms, fall: 2, rise: 2}
timeouts: {connect: 1s, first_byte: 20s, stream_idle: 3s}
log: {access: false}
"""


def downs(proxy: Proxy) -> float:
    return proxy.total("lbproxy_endpoint_transitions_total", 'to="down"')


@pytest.mark.chaos("T28", "the proxy itself is stopped for a while (SIGSTOP), and goes on")
def test_t28_stopped(rig: Rig) -> None:
    case = rig.case
    seconds = pick(4, 8, 30)
    with rig.proxy(EAGER, lag_ms=1000.0 * (seconds + 1)) as proxy:
        with rig.load(proxy, workers=16, tokens=20, streams=0.5, deadline_s=seconds + 12.0) as load:
            load.until(good=40)
            before = downs(proxy)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in proxy.pids:
                    os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(seconds)
            went_on = time.monotonic()
            time.sleep(2.5)
            case.expect("endpoints taken out", downs(proxy) - before, at_most=0)
        results = load.results()
        case.figure("requests", len(results))
        later = [one for one in results if one.at > went_on + 1.0]
        case.expect("failed from 1 s on", sum(one.how != "ok" for one in later), at_most=0)
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        case.figure("streams broken", sum(one.how in {"told", "cut", "reset"} for one in results))
        print(told(results))


@pytest.mark.chaos("T28b", "the wall clock jumps an hour forward, two back, and forward again")
def test_t28_clock_jumps(rig: Rig) -> None:
    """Only what a human reads goes by it."""
    case = rig.case
    settings = f"{EAGER.replace('access: false', 'access: true')}\ndns: {{interval: 200ms}}\n"
    port = rig.servers[0].port
    endpoints = [f"dns+http://localhost:{port}", *(server.url for server in rig.servers[1:])]
    with rig.proxy(settings, endpoints=endpoints) as proxy:
        if not proxy.sights():
            skip("LBPROXY_COMMAND runs without the ticker that sets its clock")
        wait(lambda: proxy.total("lbproxy_endpoint_up") == len(rig.servers), "all are up")
        with rig.load(proxy, workers=16, tokens=20, streams=0.5) as load:
            load.until(good=40)
            before = proxy.total("lbproxy_endpoint_transitions_total")
            for ahead_s in (3600.0, -7200.0, 3600.0):
                proxy.jump(ahead_s)
                time.sleep(pick(5, 10, 30) / 10)
            case.expect("endpoints that changed", proxy.total("lbproxy_endpoint_transitions_total") - before, at_most=0)
        results = load.results()
        lines = [orjson.loads(line) for line in proxy.process.read().splitlines() if line[:1] + line[-1:] == "{}"]
        times = [(key, value) for line in lines for key, value in line.items() if key.endswith(("_s", "_ms"))]
        case.figure("requests", len(results))
        case.expect("durations told", len(times), at_least=len(results))
        case.expect("of them negative, or of an hour", sum(not 0 <= value < 3e6 for _, value in times), at_most=0)
        case.expect("failed", sum(one.how != "ok" for one in results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        print(told(results))


@pytest.mark.chaos("T29", "the event loop is blocked for 2 s")
def test_t29_blocked(rig: Rig) -> None:
    case = rig.case
    with rig.proxy(EAGER, lag_ms=2500.0) as proxy:
        if not proxy.sights():
            skip("LBPROXY_COMMAND runs without the ticker that can block it")
        with rig.load(proxy, workers=16, tokens=20, streams=0.5) as load:
            load.until(good=40)
            before = downs(proxy)
            for _ in range(pick(1, 3, 3)):
                proxy.block(2.0)
                time.sleep(3.0)
            case.expect("endpoints taken out", downs(proxy) - before, at_most=0)
        results = load.results()
        case.figure("requests", len(results))
        case.expect("longest request, ms", 1000 * max(one.seconds for one in results), at_least=1500)
        case.expect("failed", sum(one.how != "ok" for one in results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        print(told(results))
