# SPDX-License-Identifier: Apache-2.0
"""More requests than there is room for: T30 and T31."""

from __future__ import annotations

import time

import pytest

from tests.chaos.load import how_many, quantile, silent, told
from tests.chaos.rig import HTTP, QUICK, Rig, wait
from tests.chaos.verdict import pick

ROOM = 8


def settings(queue: int) -> str:
    """Room for few, and a queue."""
    admission = f"{{max_in_flight_per_endpoint: {ROOM}, queue_requests: {queue}, queue_timeout: 5s}}"
    return f"{QUICK}\nadmission: {admission}\n"


@pytest.mark.chaos("T30", "a herd: hundreds of clients come back at the moment of recovery")
def test_t30_herd(rig: Rig) -> None:
    case = rig.case
    clients = pick(200, 500, 1000)
    with rig.proxy(settings(2 * clients)) as proxy:
        for server in rig.servers:
            server.kill()
        wait(lambda: not proxy.total("lbproxy_endpoint_up"), "all are down")
        with rig.load(proxy, workers=clients, tokens=5, pause_s=0.5) as load:
            time.sleep(1.0)
            rig.servers[0].launch()
            rig.servers[0].ready()
            up_at = time.monotonic()
            most = 0.0
            while time.monotonic() < up_at + pick(4, 6, 10):
                most = max(most, proxy.total("lbproxy_endpoint_in_flight", f'"{rig.servers[0].name}"'))
                time.sleep(0.02)
        results = load.results()
        for server in rig.servers[1:]:
            server.launch()
        waits = {one.retry_after for one in results if one.retry_after}
        case.figure("clients", clients)
        case.expect("most at a time on the recovered one", most, at_least=1, at_most=ROOM)
        case.expect("Retry-After spread, s", spread(waits), at_least=2)
        case.expect("SF", silent(results), at_most=0)
        case.expect("good after recovery", sum(one.how == "ok" for one in results), at_least=clients / 2)
        case.expect("left waiting", proxy.total("lbproxy_waiting_requests"), at_most=0)
        print(told(results))


def spread(waits: set[str]) -> int:
    seconds = [int(one) for one in waits]
    return max(seconds) - min(seconds) if seconds else 0


@pytest.mark.chaos("T31", "three times as much as the servers can do")
def test_t31_overload(rig: Rig) -> None:
    case = rig.case
    seconds = pick(3, 8, 30)
    with rig.proxy(settings(4 * ROOM)) as proxy:
        with rig.load(proxy, workers=4 * ROOM, tokens=10, streams=0.5) as fitting:
            fitting.until(good=4 * ROOM)
            began = time.monotonic()
            time.sleep(3.0)
        capacity = sum(began < one.end < began + 3.0 for one in fitting.results() if one.how == "ok") / 3.0
        before = proxy.rss_mib()
        with rig.load(proxy, workers=16 * ROOM, tokens=10, streams=0.5, pause_s=0.1) as load:
            load.until(good=ROOM)
            began = time.monotonic()
            asked = []
            while time.monotonic() < began + seconds:
                for path in ("/healthz", "/metrics"):
                    at = time.monotonic()
                    HTTP.get(proxy.admin + path)
                    asked.append(time.monotonic() - at)
                time.sleep(0.2)
            ended = time.monotonic()
        results = [one for one in load.results() if began < one.end < ended]
        good = how_many(results, "ok") / (ended - began)
        refused = [one.seconds for one in results if (one.status, one.code) == (429, "rejected_saturated")]
        case.figure("capacity, requests/s", round(capacity, 1))
        case.expect("of it in overload, %", round(100 * good / capacity), at_least=pick(50, 90, 90))
        case.figure("refused", len(refused))
        case.time("refusal p99 in", quantile(refused, 0.99), at_most=pick(500, 50, 50) / 1000)
        waits = [one.seconds for one in results if one.how == "ok"]
        case.time("admitted, longest", max(waits), at_most=5.0 + 1.0)
        case.time("/healthz and /metrics, longest", max(asked), at_most=pick(500, 100, 100) / 1000)
        case.expect("memory grown, MiB", round(proxy.rss_mib() - before, 1), at_most=8)
        other = len(results) - how_many(results, "ok") - len(refused)
        case.expect("neither good nor refused", other, at_most=0)
        case.expect("SF", silent(load.results()), at_most=0)
        print(told(results))
