# SPDX-License-Identifier: Apache-2.0
"""The proxy's own life, under load: new settings, a stop, a restart in place: T21 to T23."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.load import Load, how_many, needless, silent, told
from tests.chaos.rig import QUICK, Proxy, Rig, of_config, wait
from tests.chaos.verdict import pick

SETTINGS = QUICK.replace("drain: {deadline: 3s}", "drain: {lame_duck: 1s, deadline: 20s}")


def all_good(rig: Rig, load: Load) -> None:
    """Every request of a load was answered whole."""
    results = load.results()
    rig.case.figure("requests", len(results))
    rig.case.expect("failed", len(results) - how_many(results, "ok"), at_most=0)
    rig.case.expect("UF", needless(results), at_most=0)
    rig.case.expect("SF", silent(results), at_most=0)
    print(told(results))


@pytest.mark.chaos("T21", "settings reloaded under load, every fourth file wrong")
def test_t21_reload(rig: Rig) -> None:
    case = rig.case
    times = pick(8, 20, 20)
    with rig.proxy(SETTINGS) as proxy:
        good = rig.config.read_text()
        without = good.replace(f"  - {rig.servers[0].url}\n", "")
        with rig.load(proxy, workers=20, rate=5.0, tokens=10, streams=0.5) as load:
            load.until(good=50)
            refused = wrong_kept = 0
            for n in range(times):
                wrong = n % 4 == 3
                rig.config.write_text(f"{good}\nbogus: 1\n" if wrong else (without, good)[n % 2])
                before = endpoints(proxy)
                os.kill(proxy.pid, signal.SIGHUP)
                if wrong:
                    wait(lambda: proxy.total("lbproxy_config_reload_success") == 0, "it is refused")
                    refused += 1
                    wrong_kept += endpoints(proxy) == before
                else:
                    expected = 3 if n % 2 == 0 else 4
                    wait(lambda expected=expected: endpoints(proxy) == expected, "it is in force")  # type: ignore[misc]
                    wait(lambda: proxy.total("lbproxy_config_reload_success") == 1, "it is said")
                time.sleep(0.1)
            rig.config.write_text(good)
            os.kill(proxy.pid, signal.SIGHUP)
            wait(lambda: endpoints(proxy) == 4, "all are back")
        case.figure("reloads", times)
        case.expect("wrong files refused, old settings kept", wrong_kept, at_least=refused)
        all_good(rig, load)


def endpoints(proxy: Proxy) -> int:
    return len(proxy.samples("lbproxy_endpoint_up"))


@pytest.mark.chaos("T22", "SIGTERM under keep-alive clients and streams", peers=False)
def test_t22_drain(rig: Rig) -> None:
    case = rig.case
    clients = pick(16, 64, 64)
    with rig.proxy(SETTINGS, settle=False) as proxy:
        streams = rig.load(proxy, workers=clients, count=clients, tokens=150)
        small = rig.load(proxy, workers=clients, tokens=3, streams=0.0, retry=True)
        with streams, small:
            small.until(good=2 * clients)
            wait(lambda: proxy.in_flight() >= clients, "all streams run")
            stopped_at = time.monotonic()
            os.kill(proxy.pid, signal.SIGTERM)
            wait(lambda: not proxy.total("lbproxy_ready") if proxy.samples("lbproxy_ready") else True, "not ready")
            time.sleep(0.5)
            small.finish()
            streams.wait()
            ends = max(one.end for one in streams.results())
            code = proxy.process.process.wait(30)
        case.expect("exit code", code, at_most=0, at_least=0)
        case.time("ended after the last stream", time.monotonic() - ends, at_most=1.0 + 1.0)
        case.figure("longest stream, s", ends - stopped_at)
        case.expect("streams cut", clients - how_many(streams.results(), "ok"), at_most=0)
        all_good(rig, small)
        rig.no_traceback(proxy.process)


@pytest.mark.chaos("T23", "hot restart under new connections, keep-alive and streams")
def test_t23_hot_restart(rig: Rig) -> None:
    case = rig.case
    times = pick(2, 6, 12)
    with rig.proxy(SETTINGS.replace("deadline: 20s", "deadline: 10s"), settle=False) as proxy:
        fresh = rig.load(proxy, workers=8, rate=8.0, tokens=3, streams=0.5, keep_alive=False)
        kept = rig.load(proxy, workers=16, tokens=3, streams=0.5)
        long = rig.load(proxy, workers=8, tokens=100)
        with fresh, kept, long:
            fresh.until(good=20)
            for n in range(times):
                old = proxy.pid
                os.kill(old, signal.SIGUSR2)
                wait(lambda: [pid for pid in of_config(rig.config) if pid != old], f"restart {n}: a successor")  # noqa: B023
                if n == 0:
                    code = proxy.process.process.wait(30)
                    case.expect("exit code of the first", code, at_least=0, at_most=0)
                wait(lambda: not running(old), f"restart {n}: the old one is gone", 90)  # noqa: B023
                (proxy.pid,) = of_config(rig.config)
        case.figure("restarts", times)
        for load in (kept, long, fresh):
            all_good(rig, load)
        case.figure("requests", sum(len(one.results()) for one in (kept, long, fresh)))
        rig.no_traceback(proxy.process)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
