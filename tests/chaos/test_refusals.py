# SPDX-License-Identifier: Apache-2.0
"""Servers that answer errors: T11 to T14. What it costs is counted at the servers' doors, by lbproxy's attempts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.chaos.client import Result
from tests.chaos.load import Load, needless, silent, told
from tests.chaos.rig import QUICK, Proxy, Rig, Server
from tests.chaos.verdict import PROXY, pick

SECONDS = pick(4, 6, 10)
RATE = 100.0


def steady(rig: Rig, proxy: Proxy, **plan: object) -> Load:
    """100 small requests a second."""
    return rig.load(proxy, **{"workers": 20, "rate": RATE / 20, "tokens": 3, "streams": 0.5, **plan})


def spent(proxy: Proxy, results: Sequence[Result]) -> tuple[float, float]:
    """Attempts so far, and how many there may be by the retry budget."""
    seconds = max(one.end for one in results) - min(one.at for one in results)
    return proxy.total("lbproxy_attempts_total"), 1.2 * len(results) + 10 * seconds


@pytest.mark.chaos("T11", "one of four servers answers 503", peers=True)
def test_t11_one_answers_503(rig: Rig) -> None:
    case = rig.case
    bad = rig.servers[0]
    with rig.proxy() as proxy:
        with steady(rig, proxy) as load:
            load.until(good=50)
            bad.fault(f"status code=503 for={SECONDS}")
            began = time.monotonic()
            time.sleep(1.0)
            early = failed_on(proxy, bad)
            time.sleep(SECONDS - 1.0)
            late = failed_on(proxy, bad)
        results = load.results()
        case.figure("requests", len(results))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        if PROXY == "lbproxy":
            made, allowed = spent(proxy, results)
            case.expect("attempts", made, at_most=allowed)
            # Left alone for 1, 2, 4, 8 s: so many looks, each with what was already under way.
            then = sum(began + 1.0 < one.at < began + SECONDS for one in results)
            case.expect(
                "share of the bad one after 1 s, %", round(100 * (late - early) / then, 2), at_most=pick(3, 1, 1)
            )
            case.expect("still up", proxy.up(bad), at_least=1)
        print(told(results))


def failed_on(proxy: Proxy, server: Server) -> float:
    if PROXY != "lbproxy":
        return 0.0
    return proxy.total("lbproxy_endpoint_failed_attempts_total", f'endpoint="{server.name}"')


@pytest.mark.chaos("T12", "all four servers answer 503", peers=True)
def test_t12_all_answer_503(rig: Rig) -> None:
    case = rig.case
    with rig.proxy() as proxy:
        with steady(rig, proxy) as load:
            load.until(good=50)
            for server in rig.servers:
                server.fault(f"status code=503 for={SECONDS}")
            began = time.monotonic()
            time.sleep(SECONDS + 2.5)
        results = load.results()
        during = [one for one in results if began + 0.2 < one.at < began + SECONDS - 0.2]
        case.figure("requests", len(results))
        case.expect("SF", silent(results), at_most=0)
        own_words = sum((one.status, one.code) == (503, "503") for one in during)
        case.expect("not in the server's own words", len(during) - own_words, at_most=0)
        bad = [one.end for one in results if one.how != "ok" and one.at > began + SECONDS - 0.2]
        case.time("last refusal after the end", max(0.0, max(bad, default=0.0) - (began + SECONDS)), at_most=1.0)
        if PROXY == "lbproxy":
            made, allowed = spent(proxy, results)
            case.expect("attempts", made, at_most=allowed)
            case.expect("still up", proxy.total("lbproxy_endpoint_up"), at_least=4)
        print(told(results))


@pytest.mark.chaos("T13", "a fail-fast black hole: one answers 500 at once, the others in 200 ms", peers=True)
def test_t13_fail_fast(rig: Rig) -> None:
    case = rig.case
    hole = rig.servers[0]
    with rig.proxy() as proxy:
        with rig.load(proxy, workers=20, tokens=10, streams=0.5) as load:
            load.until(good=40)
            before = failed_on(proxy, hole)
            began = time.monotonic()
            hole.fault("status code=500")
            time.sleep(SECONDS)
            landed = failed_on(proxy, hole) - before
        results = [one for one in load.results() if one.at > began]
        case.figure("requests", len(results))
        case.expect("UF", needless(results), at_most=0)
        case.expect("SF", silent(results), at_most=0)
        if PROXY == "lbproxy":
            # It is tried anew by the clock, and a busy machine answers fewer requests meanwhile.
            case.expect("landed on it", landed, at_most=pick(10, 5, 5) + 0.01 * len(results))
        print(told(results))


@pytest.mark.chaos("T14", "a poison request: 500 from whoever gets it, in normal traffic", peers=True)
def test_t14_poison(rig: Rig) -> None:
    case = rig.case
    count = pick(50, 100, 100)
    for server in rig.servers:
        server.fault("status code=500 having=poison")
    with rig.proxy(QUICK) as proxy:
        with steady(rig, proxy) as load:
            load.until(good=50)
            poison = rig.load(proxy, workers=4, rate=5.0, count=count, extra={"user": "poison"})
            with poison:
                poisoned = poison.wait()
        results = load.results()
        case.figure("poisoned", len(poisoned))
        case.expect("UF of the others", needless(results), at_most=0)
        case.expect("SF", silent([*results, *poisoned]), at_most=0)
        case.expect("poisoned not answered 500", sum(one.status != 500 for one in poisoned), at_most=0)
        if PROXY == "lbproxy":
            case.expect("attempts of a poisoned one, most", max(one.attempts for one in poisoned), at_most=2)
            down = proxy.total("lbproxy_endpoint_transitions_total", 'to="down"')
            case.expect("endpoints taken out", down, at_most=1)
