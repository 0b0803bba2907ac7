# SPDX-License-Identifier: Apache-2.0
"""DNS that fails in every way, under load: T15."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chaos.load import how_many, needless, silent, told
from tests.chaos.rig import Rig, wait
from tests.chaos.threads import threaded
from tests.chaos.verdict import pick
from tests.support.dns import DnsServer, Says
from tests.support.process import LBPROXY, Program

NAME = "vllm.test"
A, B = "127.0.0.1", "127.0.0.2"
GOOD = Says(a=[A, B])
SETTINGS = """
dns: {{nameservers: ['{address}'], interval: 500ms, timeout: 300ms}}
health: {{interval: 500ms, timeout: 1s, fall: 2, rise: 1, down_interval: 500ms}}
timeouts: {{connect: 500ms, first_byte: 10s, stream_idle: 5s}}
log: {{access: false}}
"""
SAYINGS: dict[str, Says | None] = {
    "NXDOMAIN": None,
    "SERVFAIL": Says(rcode="SERVFAIL"),
    "silence": Says(silent=True),
    "garbage": Says(garbage=True),
    "no addresses": Says(),
    "late": Says(a=[A, B], delay_s=0.25),
    "duplicates": Says(a=[A, A, B, B, A]),
    "CNAME loop": Says(cname=NAME),
    "1,000 addresses": Says(a=[A, B, *(f"127.0.{n // 250 + 1}.{n % 250 + 1}" for n in range(998))]),
    "AAAA only": Says(aaaa=["::1"]),
}


@contextmanager
def servers(folder: Path) -> Iterator[int]:
    """On two addresses and their like in IPv6, one port."""
    with Program([*LBPROXY, "mock", "--port", "0", "--speed", "0.4"]) as first, ExitStack() as stack:
        port = int(first.wait_for(r"at http://127.0.0.1:(\d+)")[1])
        for host in (B, "::1"):
            other = Program([*LBPROXY, "mock", "--host", host, "--port", str(port), "--speed", "0.4"])
            stack.enter_context(other).wait_for("at http")
        yield port


@pytest.mark.chaos("T15", "DNS: errors, silence, garbage, nobody, a loop, 1,000 addresses, a flapping one")
def test_t15_names(rig: Rig) -> None:
    case = rig.case
    seconds = pick(6, 20, 100) / 10
    with threaded(lambda: DnsServer({NAME: GOOD})) as dns, servers(rig.folder) as port:
        settings = SETTINGS.format(address=dns.address)
        with rig.proxy(settings, endpoints=[f"dns+http://{NAME}:{port}"], lag_ms=pick(250, 20, 20)) as proxy:
            wait(lambda: proxy.total("lbproxy_endpoint_up") == 2, "both are up")
            with rig.load(proxy, workers=8, tokens=10, streams=0.5) as load:
                load.until(good=10)
                for what, says in SAYINGS.items():
                    began = time.monotonic()
                    dns.zone.pop(NAME) if says is None else dns.zone.update({NAME: says})
                    time.sleep(seconds)
                    dns.zone[NAME] = GOOD
                    wait(lambda: proxy.total("lbproxy_endpoint_up") == 2, f"both are up again after {what}")
                    lag_s = max((one.own_lag_s for one in proxy.sights(began)), default=0.0)
                    print(f"{what}: lag {1000 * lag_s:.0f} ms; {told(load.results())}")
                for n in range(int(2 * seconds)):
                    dns.zone[NAME] = Says(a=[(A, B)[n % 2]])
                    time.sleep(0.5)
                dns.zone[NAME] = GOOD
                wait(lambda: proxy.total("lbproxy_endpoint_up") == 2, "both are up again")
            results = load.results()
            case.figure("ways to fail", len(SAYINGS) + 1)
            case.figure("requests", len(results))
            case.expect("UF", needless(results), at_most=0)
            case.expect("SF", silent(results), at_most=0)
            case.expect("streams cut", how_many(results, "told", "cut", "reset"), at_most=0)
            case.time("longest request", max(one.seconds for one in results), at_most=1.5)
