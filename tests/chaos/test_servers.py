# SPDX-License-Identifier: Apache-2.0
"""Servers that die, freeze, vanish, refuse: T01 to T05."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.chaos.load import how_many, needless, quantile, silent, told
from tests.chaos.rig import Rig, Server, wait
from tests.chaos.tools import packets
from tests.chaos.verdict import PROXY, pick

STREAMS = pick(40, 50, 200)


def busy(server: Server) -> None:
    """Wait for a moment in which it computes some of the streams."""
    wait(lambda: server.metric("vllm:num_requests_running") > STREAMS / 10, "it is busy")


@pytest.mark.chaos("T01", "kill -9 one of four servers under streams, and start it again", peers=True)
def test_t01_one_of_four_is_killed(rig: Rig) -> None:
    case = rig.case
    victim = rig.servers[0]
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=STREAMS) as load:
            load.until(good=STREAMS)
            calm = max(one.gap_s for one in load.results())
            busy(victim)
            killed_at = time.monotonic()
            victim.kill()
            time.sleep(2.0)
            victim.launch()
            victim.ready()
            if PROXY == "lbproxy":
                before = proxy.answered(victim)
                back_s = wait(lambda: proxy.up(victim), "it is up again")
                served_s = wait(lambda: proxy.answered(victim) > before, "it serves again", 60)
                case.figure("of it until it served, s", served_s)
                case.time("back after", back_s + served_s - 1.0, at_most=2.0)  # a request takes 1 s
            else:
                time.sleep(2.0)
        results = load.results()
        broken = [one for one in results if one.how in {"cut", "reset", "told"}]
        case.figure("requests", len(results))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        case.expect("streams broken", len(broken), at_least=1, at_most=STREAMS)
        case.time("error after", max(one.end - killed_at for one in broken), at_most=1.0)
        others = [one for one in results if one.how == "ok" and one.at < killed_at < one.end]
        case.figure("longest gap of other streams, ms", 1000 * max(one.gap_s for one in others))
        case.figure("longest gap before, ms", 1000 * calm)


@pytest.mark.chaos("T02", "kill -9 all four servers, and start them again", peers=True)
def test_t02_all_four_are_killed(rig: Rig) -> None:
    case = rig.case
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=STREAMS, tokens=20) as load:
            load.until(good=STREAMS)
            for server in rig.servers:
                server.kill()
            if PROXY == "lbproxy":
                wait(lambda: not proxy.total("lbproxy_endpoint_up"), "all are down")
            time.sleep(1.0)
            dark_at = time.monotonic()
            time.sleep(pick(1, 2, 10))
            start_at = time.monotonic()
            completed = proxy.total("lbproxy_requests_total", '"completed"') if PROXY == "lbproxy" else 0.0
            for server in rig.servers:
                server.launch()
            rig.servers[0].ready()
            up_at = time.monotonic()
            if PROXY == "lbproxy":
                wait(lambda: proxy.total("lbproxy_requests_total", '"completed"') > completed, "a good answer")
            else:
                time.sleep(3.0)
        results = load.results()
        dark = [one for one in results if dark_at < one.at < start_at]
        case.figure("requests", len(results))
        case.expect("SF", silent(results), at_most=0)
        case.figure("refused while all were dead", len(dark))
        case.expect("hung", how_many(results, "hung"), at_most=0)
        if PROXY == "lbproxy":
            refused = [one for one in dark if (one.status, one.code) == (503, "no_endpoints")]
            other = len(dark) - sum(bool(one.retry_after) for one in refused)
            case.expect("of them not 503 no_endpoints with Retry-After", other, at_most=0)
        case.time("refusal p99 in", quantile([one.seconds for one in dark], 0.99), at_most=0.05)
        first = min((one.end for one in results if one.how == "ok" and one.at > dark_at), default=float("inf"))
        case.time("first good answer after start", max(0.0, first - up_at), at_most=2.0)


@pytest.mark.chaos("T03", "freeze one of four servers (SIGSTOP) under streams", peers=True)
def test_t03_one_freezes(rig: Rig) -> None:
    case = rig.case
    victim = rig.servers[0]
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=STREAMS) as load:
            load.until(good=STREAMS)
            busy(victim)
            frozen_at = time.monotonic()
            victim.stop()
            if PROXY == "lbproxy":
                case.time("down after", wait(lambda: not proxy.up(victim), "it is down"), at_most=5.0)
            time.sleep(max(0.0, frozen_at + 5.5 - time.monotonic()))
        results = load.results()
        victim.go_on()
        hit = [one for one in results if one.how in {"cut", "reset", "told"}]
        case.figure("requests", len(results))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        case.expect("streams hung", how_many(results, "hung"), at_most=0)
        case.expect("streams broken", len(hit), at_least=1, at_most=STREAMS)
        case.time("error after", max((one.gap_s for one in hit), default=0.0), at_most=4.0)
        firsts = [one.first_s for one in results if one.first_s is not None and one.at > frozen_at]
        case.time("longest wait for a first byte", max(firsts), at_most=5.5)


@pytest.mark.chaos("T04", "one of four servers vanishes (packets dropped)", peers=True)
def test_t04_one_vanishes(rig: Rig) -> None:
    case = rig.case
    victim = rig.servers[0]
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=16, tokens=5, streams=0.5) as load:
            load.until(good=50)
            calm = [one.seconds for one in load.results() if one.how == "ok"]
            victim.harm()
            with packets(victim.port, to="DROP"):
                dropped_at = time.monotonic()
                time.sleep(pick(5, 6, 10))
                late = time.monotonic() - 1.5
        results = load.results()
        after = [one for one in results if one.at > dropped_at]
        case.figure("requests", len(results))
        case.expect("UF", needless(after), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        case.figure("longest request, ms", 1000 * max(one.seconds for one in after))
        settled = [one.seconds for one in after if late < one.at]
        case.time("added p99 once it is known", quantile(settled, 0.99) - quantile(calm, 0.5), at_most=0.15)


@pytest.mark.chaos("T05", "one of four servers refuses connections (REJECT with RST)", peers=True)
def test_t05_one_refuses(rig: Rig) -> None:
    case = rig.case
    victim = rig.servers[0]
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=16, tokens=5, streams=0.5) as load:
            load.until(good=100)
            calm = [one.seconds for one in load.results() if one.how == "ok"]
            victim.harm()
            with packets(victim.port, to="REJECT --reject-with tcp-reset"):
                refused_at = time.monotonic()
                time.sleep(3.0)
        after = [one for one in load.results() if one.at > refused_at]
        case.figure("requests", len(load.results()))
        case.expect("UF", needless(after), at_most=0)
        case.expect("SF", silent(load.results()), at_most=0)
        case.time("added p99", quantile([r.seconds for r in after], 0.99) - quantile(calm, 0.99), at_most=0.02)
        assert httpx.get(f"{victim.url}/health").status_code == 200
        print(told(after))
