# SPDX-License-Identifier: Apache-2.0
"""Metrics pages that do harm: T16. What lbproxy reads beside the data path must never reach it."""

from __future__ import annotations

import asyncio
import gzip
import time

import pytest

from tests.chaos.load import needless, quantile, silent, told
from tests.chaos.rig import QUICK, Rig, wait
from tests.chaos.threads import threaded
from tests.chaos.verdict import pick
from tests.support.endpoint import OK, Received, Script, ScriptedEndpoint, Wire, answer

GOOD_PAGE = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="sim"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="sim"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="sim"} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="27000"} 1.0
"""
LINE = b'vllm:num_requests_running{engine="0",model_name="sim"} '


def page(text: bytes, *, status: int = 200, more: str = "") -> bytes:
    return answer(text, status=status, kind="text/plain; version=1.0.0; charset=utf-8", more=more)


def value(text: bytes) -> bytes:
    """The good page with another value of its first gauge."""
    return page(GOOD_PAGE.replace(LINE + b"1.0", LINE + text))


async def silence(wire: Wire, request: Received) -> None:
    await wire.watch()


async def dripping(wire: Wire, request: Received) -> None:
    for byte in page(GOOD_PAGE):
        await wire.send(bytes([byte]))
        await asyncio.sleep(1)


async def endless(wire: Wire, request: Received) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not wire.gone.is_set():
        await wire.send(b"%x\r\n%s\r\n" % (len(GOOD_PAGE), GOOD_PAGE))


def ways(canary: str) -> dict[str, Script]:
    """What a page may be. Those that still say the load are none of the failures."""
    big = GOOD_PAGE * (10 * 2**20 // len(GOOD_PAGE))
    labels = b"".join(b'x_total{n="%d"} 1\n' % n for n in range(50_000))
    return {
        "hangs": silence,
        "1 byte/s": dripping,
        "10 MB": page(big),
        "endless": endless,
        "garbage": b"\x00\xff" * 5000,
        "HTML": answer(b"<html><body>ok</body></html>", kind="text/html"),
        "500": page(b"", status=500),
        "redirect": page(b"", status=302, more=f"Location: {canary}/metrics\r\n"),
        "gzip bomb": page(gzip.compress(big), more="Content-Encoding: gzip\r\n"),
        "NaN": value(b"NaN"),
        "+Inf": value(b"+Inf"),
        "negative": value(b"-5"),
        "1e400": value(b"1e400"),
        "future timestamp": value(b"1 99999999999999"),
        "50,000 series": page(labels + GOOD_PAGE),
        "a line of 1.9 MB": page(b'x{y="' + b"z" * 1_900_000 + b'"} 1\n' + GOOD_PAGE),
        "every series twice": page(GOOD_PAGE * 2),
        "a model's name of 1 MB": page(GOOD_PAGE.replace(b'model_name="sim"', b'model_name="' + b"m" * 2**18 + b'"')),
    }


@pytest.mark.chaos("T16", "a metrics page that hangs, floods, lies or leads elsewhere: 18 ways")
def test_t16_metrics_pages(rig: Rig) -> None:
    case = rig.case
    seconds = pick(6, 20, 50) / 10
    server = rig.servers[0]
    with (
        threaded(lambda: ScriptedEndpoint(page(GOOD_PAGE))) as metrics,
        threaded(lambda: ScriptedEndpoint(OK)) as canary,
    ):
        metrics.scripts = {"/m": page(GOOD_PAGE)}
        endpoints = [f"{{url: '{server.url}', engine: vllm, metrics: '{metrics.url}/m'}}", rig.servers[1].url]
        settings = f"{QUICK}\nscrape: {{interval: 200ms, timeout: 500ms, stale_after: 500ms}}\n"
        with rig.proxy(settings, endpoints=endpoints, lag_ms=pick(100, 20, 20)) as proxy:
            wait(lambda: proxy.total("lbproxy_endpoint_up") == 2, "both are up")
            with rig.load(proxy, workers=8, tokens=5, streams=0.5) as load:
                load.until(good=20)
                calm = quantile([one.seconds for one in load.results()], 0.99)
                before = proxy.rss_mib()
                failing = 0
                for what, script in ways(canary.url).items():
                    metrics.scripts["/m"] = script
                    time.sleep(seconds)
                    shown = any(server.name in one for one in proxy.samples("lbproxy_endpoint_running"))
                    failing += not shown
                    print(
                        f"{what}: {'read' if shown else 'not read'}; {told(load.results())}; {proxy.rss_mib():.0f} MiB"
                    )
                metrics.scripts["/m"] = page(GOOD_PAGE)
                wait(lambda: any(server.name in one for one in proxy.samples("lbproxy_endpoint_running")), "read again")
                up = proxy.total("lbproxy_endpoint_transitions_total", 'to="down"')
            results = load.results()
            case.figure("ways", len(ways("")))
            case.figure("of them unreadable", failing)
            case.figure("requests", len(results))
            case.expect("UF", needless(results), at_most=0)
            case.expect("SF", silent(results), at_most=0)
            case.expect("taken out", up, at_most=0)
            case.expect("requests to where a redirect led", len(canary.requests), at_most=0)
            case.expect("memory grown, MiB", round(proxy.rss_mib() - before, 1), at_most=8)
            case.time("added p99", quantile([r.seconds for r in results], 0.99) - calm, at_most=0.05)
