# SPDX-License-Identifier: Apache-2.0
"""The scraper: pages of metrics become reports, and whatever else comes becomes a counted failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import time
from pathlib import Path

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.control.probing import scraper as module
from lbproxy.control.probing.scraper import metrics_targets
from lbproxy.core.endpoints.endpoint import EndpointSpec, EndpointUid
from lbproxy.core.engines.dialects import SIGNALS, Engines
from lbproxy.core.engines.handover import Handover, Role
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.requests.outcome import Outcome
from tests.control.rig import FAST_SCRAPE, Rig, page, rig, running, scraped, spec
from tests.support.aio import run, until
from tests.support.compiled import interpreted
from tests.support.endpoint import NOT_FOUND, Received, Script, ScriptedEndpoint, Wire, answer, hang, reset
from tests.support.pool import request

FIXTURES = Path(__file__).parents[2] / "fixtures" / "metrics"
PAGE = (FIXTURES / "vllm-0.32.0-busy-2-running-rejecting.prom").read_bytes()
GOOD = page(PAGE)
IMPATIENT = ScrapeSettings(interval=0.01, timeout=0.05)
SCRAPES_OF_A_NEIGHBOUR = 20
"""How long "never" is: until another endpoint was scraped this often."""


def test_a_real_page_becomes_load() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server)) as r, scraped(r) as scraper:
            await until(lambda: r.seen().metrics)
            seen = r.seen()
            assert seen.metrics is not None
            assert (seen.metrics.waiting, seen.metrics.running) == (0.0, 2.0)
            assert seen.metrics.kv_utilization == pytest.approx(0.5641, abs=1e-4)
            assert seen.metrics.block_size_tokens == 32
            assert not seen.stale
            assert scraper.status.engine == "vllm"
            assert scraper.status.missing == dict.fromkeys(SIGNALS, False)
            assert scraper.status.results["ok"] >= 1
            assert b"Accept-Encoding" not in server.requests[0].head

    run(main())


@interpreted
def test_gauges_are_dated_by_when_the_scrape_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the Balancer is told at that moment, so that it knows which of the load is our own."""
    sent: list[EndpointUid] = []
    told: list[int] = []

    async def serve(wire: Wire, _: Received) -> None:
        told.append(len(sent))
        await wire.send(GOOD)

    async def main() -> None:
        def scrape_sent(uid: EndpointUid) -> None:
            sent.append(uid)
            tell(uid)

        async with ScriptedEndpoint(serve) as server, rig(spec(server)) as r:
            r.bring_up()
            tell = r.runtime.balancer.scrape_sent
            monkeypatch.setattr(r.runtime.balancer, "scrape_sent", scrape_sent)
            async with running(r.scraper(r.endpoints[0]).run):
                await until(lambda: r.seen().metrics)
            metrics = r.seen().metrics
            assert metrics is not None
            assert told[0] == 1
            assert metrics.scraped_at <= server.requests[-1].at

    run(main())


NONSENSE = b"".join(
    b"vllm:num_requests_%s %s\n" % (name, value)
    for name in (b"running", b"waiting")
    for value in (b"NaN", b"+Inf", b"-Inf", b"-1", b"1e400", b"1e10", b"x")
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"


async def endless(wire: Wire, _: Received) -> None:
    """A page without end."""
    with contextlib.suppress(RuntimeError, ConnectionError):  # of uvloop and asyncio: the scraper hung up
        await wire.send(HEAD)
        while not wire.writer.is_closing():
            await wire.send(b"vllm:num_requests_running 1\n" * 1000)


async def trickle(wire: Wire, _: Received) -> None:
    """One byte, and then another, and so on."""
    with contextlib.suppress(RuntimeError, ConnectionError):
        await wire.send(HEAD)
        while not wire.writer.is_closing():
            await wire.send(b"#")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "result"),
    [
        (answer(status=500), "status"),
        (answer(b"", status=204), "status"),
        (answer(status=302, more="Location: /elsewhere\r\n"), "status"),
        (answer(PAGE, kind="text/html; charset=utf-8"), "not_metrics"),
        (answer(b"{}"), "not_metrics"),
        (page(b"# nothing here\n"), "unknown_engine"),
        (page(gzip.compress(PAGE)), "unknown_engine"),
        (answer(gzip.compress(bytes(1 << 20)), kind="text/plain", more="Content-Encoding: gzip\r\n"), "unknown_engine"),
        (page(NONSENSE), "no_load"),
        (page(b"vllm:num_requests_running" * 80_000), "no_load"),
        (endless, "protocol"),
        (trickle, "timeout"),
        (page(PAGE * 50), "protocol"),
        (GOOD[:-10], "timeout"),
        (b"garbage\r\n\r\n", "protocol"),
        (hang, "timeout"),
        (reset, "reset"),
    ],
    ids=[
        *("500", "204", "redirect", "html", "json", "no load", "gzip", "gzip bomb", "nonsense", "one line", "endless"),
        *("trickle", "too large", "short", "garbage", "hang", "reset"),
    ],
)
def test_what_is_no_page_is_counted_and_the_old_gauges_age(
    script: Script, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": GOOD, "/elsewhere": GOOD}) as server,
            rig(spec(server), scrape=IMPATIENT) as r,
            scraped(r) as scraper,
        ):
            await until(lambda: r.seen().metrics)
            server.scripts["/metrics"] = script
            await until(lambda: scraper.status.results.get(result, 0) >= 2)
            metrics = r.seen().metrics
            assert metrics is not None, "what was known is kept"
            await until(lambda: scraper.status.results[result] >= 4)
            again = r.seen().metrics
            assert again is metrics, "and it was not renewed"
            assert server.asked("/elsewhere") == 0
            server.scripts["/metrics"] = GOOD
            await until(lambda: r.seen().metrics is not metrics)

    run(main())


def test_scrapes_of_one_endpoint_never_overlap() -> None:
    """A server that answers slowly must not be asked by more and more connections."""

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": hang}) as slow, ScriptedEndpoint({"/metrics": GOOD}) as quick:
            scrape = FAST_SCRAPE.model_copy(update={"timeout": 3600.0})
            async with rig(spec(slow, "slow"), spec(quick, "quick"), scrape=scrape) as r:
                r.bring_up()
                async with running(*(r.scraper(one).run for one in r.endpoints)):
                    await until(lambda: quick.asked("/metrics") >= SCRAPES_OF_A_NEIGHBOUR)
                    assert slow.asked("/metrics") == 1
                    assert len(slow.wires) == 1

    run(main())


def test_only_endpoints_that_are_up_are_scraped() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": GOOD}) as server,
            ScriptedEndpoint({"/metrics": GOOD}) as other,
            rig(spec(server), spec(other, "e2")) as r,
        ):
            r.bring_up()
            r.take_down(r.endpoints[0])
            async with running(*(r.scraper(one).run for one in r.endpoints)):
                await until(lambda: other.asked("/metrics") >= SCRAPES_OF_A_NEIGHBOUR)
                assert server.asked("/metrics") == 0
                r.bring_up()
                r.bring_up()
                await until(lambda: server.asked("/metrics"))

    run(main())


@pytest.mark.parametrize("first", ["starting", "down"])
def test_an_endpoint_that_comes_up_is_scraped_at_once(first: str) -> None:
    """Not an interval later: until then only our own requests there are known."""

    async def main() -> None:
        slow = ScrapeSettings(interval=60.0, stale_after=120.0)
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server), scrape=slow) as r:
            if first == "down":
                r.bring_up()
                r.take_down(r.endpoints[0])
            async with running(r.scraper(r.endpoints[0]).run):
                await asyncio.sleep(0.05)
                assert server.asked("/metrics") == 0
                for _ in range(r.health.rise):
                    r.runtime.report_health(r.endpoints[0].uid, True, "test")
                await until(lambda: server.asked("/metrics"))

    run(main())


def test_an_endpoint_without_metrics_ends_its_scraper() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({}) as server, rig(spec(server, metrics=None)) as r:
            r.bring_up()
            await r.scraper(r.endpoints[0]).run()
            assert not server.requests

    run(main())


def test_a_page_of_no_known_engine_is_asked_for_rarely() -> None:
    """Five times a second would be a waste; never again would need a restart when the server is replaced."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": page(b"some_metric 1\n")}) as server,
            ScriptedEndpoint({"/metrics": GOOD}) as other,
            rig(spec(server), spec(other, "e2")) as r,
        ):
            r.bring_up()
            async with running(*(r.scraper(one).run for one in r.endpoints)):
                await until(lambda: other.asked("/metrics") >= SCRAPES_OF_A_NEIGHBOUR)
                assert server.asked("/metrics") == 1

    run(main())


def test_a_server_that_was_replaced_is_recognised_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of the old one (its block size) do not stick to the new one."""
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server)) as r, scraped(r) as scraper:
            await until(lambda: r.seen().metrics)
            server.scripts["/metrics"] = page(b"another_engine 1\n")
            await until(lambda: scraper.status.engine is None)
            assert scraper.status.missing == {}
            server.scripts["/metrics"] = page(b"vllm:num_requests_running 3\n")
            await until(lambda: scraper.status.engine == "vllm")
            metrics = r.seen().metrics
            assert metrics is not None
            assert (metrics.running, metrics.waiting, metrics.block_size_tokens) == (3.0, None, None)

    run(main())


@pytest.mark.parametrize("is_down", [False, True])
def test_the_connector_of_a_server_that_was_started_anew_is_known_again(
    is_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process said of itself ends with it, also by the page that shows its successor: that said it, too."""
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    def of_start(at: int) -> Script:
        return page(b"process_start_time_seconds %d\nvllm:nixl_xfer_time_seconds_count 0\n" % at + PAGE)

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": of_start(2_000_000_001)}) as server,
            rig(spec(server)) as r,
            scraped(r) as scraper,
        ):
            await until(lambda: r.seen().reported_handover)
            if is_down:  # for so long that its page is looked for anew
                server.scripts["/metrics"] = answer(status=500)
                await until(lambda: scraper.status.results.get("status", 0) > module.FAILURES_UNTIL_SLOW)
            server.scripts["/metrics"] = of_start(2_000_000_002)
            await until(lambda: (metrics := r.seen().metrics) is not None and metrics.started_at == 2_000_000_002.0)
            await until(lambda: r.seen().reported_handover == Handover(Role.BOTH, "nixl"))

    run(main())


def test_missing_signals_are_logged_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A signal that a new engine version renamed must not go unnoticed: routing would silently do without."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": page(b"vllm:num_requests_running 3\n")}) as server,
            rig(spec(server)) as r,
            scraped(r) as scraper,
        ):
            await until(lambda: scraper.status.results.get("ok", 0) >= 3)
            assert scraper.status.missing == {name: name != "running" for name in SIGNALS}

    run(main())
    assert caplog.messages == [
        f"the metrics of e1 lack {name}, which vllm should export" for name in SIGNALS if name != "running"
    ]


def test_a_broken_page_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    async def main() -> None:
        async with ScriptedEndpoint({}) as server, rig(spec(server)) as r, scraped(r) as scraper:
            await until(lambda: scraper.status.results.get("status", 0) >= 3)
            server.scripts["/metrics"] = GOOD
            await until(lambda: scraper.status.results.get("ok", 0) >= 3)

    caplog.set_level("INFO", "lbproxy")
    run(main())
    begins, ends = caplog.messages
    assert begins.startswith("the metrics of e1 cannot be read, so only lbproxy's own requests there count: ")
    assert begins.endswith("GET /metrics returned 404")
    assert ends == "the metrics of e1 can be read again"


def test_one_slow_scrape_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Under load a page comes late now and then; only gauges that are too old to be believed are news."""

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": hang}) as server:
            scrape = IMPATIENT.model_copy(update={"stale_after": 3600.0})
            async with rig(spec(server), scrape=scrape) as r, scraped(r) as scraper:
                await until(lambda: scraper.status.results.get("timeout", 0) >= 3)

    run(main())
    assert caplog.messages == []


def test_metrics_may_stand_on_another_port() -> None:
    """Triton serves them on 8002; the endpoint itself is then never asked."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({}) as server,
            ScriptedEndpoint({"/load": GOOD}) as metrics,
            rig(spec(server, metrics=f"{metrics.url}/load?all=1")) as r,
        ):
            async with scraped(r):
                await until(lambda: r.seen().metrics)
            assert metrics.requests[0].line == "GET /load?all=1 HTTP/1.1"
            assert not server.requests

    run(main())


def places(metrics: str | None, engine: str = "auto") -> list[str]:
    endpoint = EndpointSpec(name="e", base_url="http://gpu-1:8000", metrics=metrics, engine=engine)
    return [str(target) for target in metrics_targets(endpoint, Engines())]


def test_where_metrics_may_stand() -> None:
    own = "http://gpu-1:8000"
    assert places("auto") == [f"{own}/metrics", f"{own}/prometheus/metrics", "http://gpu-1:8002/metrics"]
    assert places("auto", "sglang") == [f"{own}/metrics"]
    assert places("auto", "triton-tensorrt-llm") == ["http://gpu-1:8002/metrics"]
    assert places("/prometheus/metrics?a=b") == [f"{own}/prometheus/metrics?a=b"]
    assert places("http://gpu-1:8002") == ["http://gpu-1:8002/"]
    assert places("http://[::1]:8002/m?x", "vllm") == ["http://[::1]:8002/m?x"]
    assert places(None) == []


def test_no_page_is_asked_for_twice() -> None:
    """An endpoint that is on an engine's own port, or on a Unix socket, which has no ports."""
    own = EndpointSpec(name="e", base_url="http://gpu-1:8002")
    assert [str(one) for one in metrics_targets(own, Engines())] == [
        "http://gpu-1:8002/metrics",
        "http://gpu-1:8002/prometheus/metrics",
    ]
    unix = EndpointSpec(name="e", base_url="unix:/run/a")
    assert [one.path for one in metrics_targets(unix, Engines())] == ["/metrics", "/prometheus/metrics"]
    triton = EndpointSpec(name="e", base_url="unix:/run/a", engine="triton-tensorrt-llm")
    assert [one.path for one in metrics_targets(triton, Engines())] == ["/metrics"]


# --- Engines ----------------------------------------------------------------------------------------------------------

SGLANG = page((FIXTURES / "sglang-0.5.23-load.prom").read_bytes())
LLAMA_CPP = page((FIXTURES / "llama.cpp-b11434-load.prom").read_bytes())
TRTLLM = page((FIXTURES / "documented" / "trtllm-serve.prom").read_bytes())
TRITON = page((FIXTURES / "documented" / "triton-tensorrt-llm.prom").read_bytes())


def load_of(r: Rig) -> LoadMetrics:
    metrics = r.seen().metrics
    assert metrics is not None
    return metrics


def own_engines(text: str) -> Engines:
    return Engines(parse(f"endpoints: ['http://a']\nengines: {text}", environ={}).engines)


def test_a_mixed_pool() -> None:
    """Each endpoint is recognised by itself; trtllm-serve's /metrics is JSON, and its page stands elsewhere."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": GOOD}) as vllm,
            ScriptedEndpoint({"/metrics": SGLANG}) as sglang,
            ScriptedEndpoint({"/metrics": answer(b"[]"), "/prometheus/metrics": TRTLLM}) as trtllm,
            ScriptedEndpoint({"/metrics": LLAMA_CPP}) as llama_cpp,
            ScriptedEndpoint({"/metrics": page(b"wait 4\nbusy 5\n")}) as own,
        ):
            servers = {"vllm": vllm, "sglang": sglang, "trtllm-serve": trtllm, "llamacpp": llama_cpp, "mine": own}
            async with rig(*(spec(server, name) for name, server in servers.items())) as r:
                r.scraping.engines = own_engines("{mine: {queued: wait, running: busy}}")
                r.bring_up()
                scrapers = [r.scraper(one) for one in r.endpoints]
                async with running(*(one.run for one in scrapers)):
                    await until(lambda: all(r.seen(name).metrics for name in servers))
                assert [one.status.engine for one in scrapers] == list(servers)
                loads = {name: r.seen(name).metrics for name in servers}
                assert {name: (one.waiting, one.running) for name, one in loads.items() if one} == {
                    "vllm": (0.0, 2.0),
                    "sglang": (1.0, 15.0),
                    "trtllm-serve": (2.0, 7.0),
                    "llamacpp": (3.0, 2.0),
                    "mine": (4.0, 5.0),
                }
                assert trtllm.asked("/metrics") == 1, "once found, the page is asked for where it is"
                assert "unknown_engine" not in scrapers[2].status.results
                assert not any(scrapers[3].status.missing.values()), "what an engine does not have is not missing"

    run(main())


HTML = answer(b"<html>", kind="text/html")


@pytest.mark.parametrize(
    "missing", [NOT_FOUND, answer(b"[]"), HTML, page(b"up 1\n")], ids=["404", "JSON", "HTML", "other"]
)
@pytest.mark.parametrize("engine", ["trtllm-serve", "triton-tensorrt-llm"])
def test_pages_of_tensorrt_llm_are_found_and_recognised_where_they_are(missing: Script, engine: str) -> None:
    """At /metrics of the endpoint itself, at /prometheus/metrics, and the one of Triton also on its own port."""
    served = TRTLLM if engine == "trtllm-serve" else TRITON

    async def found(scripts: dict[str, Script], engines: Engines) -> str | None:
        async with ScriptedEndpoint(scripts) as server, rig(spec(server)) as r:
            r.scraping.engines = engines
            async with scraped(r) as scraper:
                await until(lambda: scraper.status.results)
            return scraper.status.engine

    async def main() -> None:
        assert await found({"/metrics": served}, Engines()) == engine
        assert await found({"/metrics": missing, "/prometheus/metrics": served}, Engines()) == engine
        async with ScriptedEndpoint({"/metrics": served}) as aside:
            beside = own_engines(f"{{triton-tensorrt-llm: {{metrics_port: {aside.port}}}}}")
            expected = engine if engine == "triton-tensorrt-llm" else None  # another endpoint may listen there
            assert await found({"/metrics": missing}, beside) == expected

    run(main())


def test_an_engines_own_port_is_tried_but_not_believed_to_be_a_neighbours() -> None:
    """There another endpoint may listen: only the engine that usually stands on that port counts."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({}) as server,
            ScriptedEndpoint({"/metrics": TRITON}) as aside,
            rig(spec(server)) as r,
        ):
            r.scraping.engines = own_engines(f"{{triton-tensorrt-llm: {{metrics_port: {aside.port}}}}}")
            async with scraped(r) as scraper:
                await until(lambda: r.seen().metrics)
                assert scraper.status.engine == "triton-tensorrt-llm"
                before = load_of(r)
                aside.scripts["/metrics"] = GOOD
                await until(lambda: scraper.status.results.get("unknown_engine", 0))
                await until(lambda: scraper.status.engine is None)
                assert dataclasses.replace(load_of(r), scraped_at=before.scraped_at) == before

    run(main())


def test_a_page_that_moved_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM made way for trtllm-serve at the same address."""
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server)) as r, scraped(r) as scraper:
            await until(lambda: scraper.status.engine == "vllm")
            server.scripts = {"/metrics": answer(b"[]"), "/prometheus/metrics": TRTLLM}
            await until(lambda: scraper.status.engine == "trtllm-serve")
            await until(lambda: load_of(r).kv_blocks == 2000)

    run(main())


def test_an_engine_that_the_settings_name_is_not_mistaken() -> None:
    """And its usual place is the only one that is asked."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": GOOD, "/prometheus/metrics": SGLANG}) as server,
            rig(spec(server, engine="trtllm-serve")) as r,
            scraped(r) as scraper,
        ):
            await until(lambda: scraper.status.results.get("no_load", 0) >= 2)
            assert scraper.status.engine == "trtllm-serve"
            assert scraper.status.missing == dict.fromkeys(SIGNALS, True)
            assert server.asked("/metrics") == 0

    run(main())


def test_adapters_are_read_by_the_wall_clock() -> None:
    text = 'vllm:num_requests_running 1\nvllm:lora_requests_info{{max_lora="x",running_lora_adapters="a"}} {}\n'

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": page(text.format(time.time()).encode())}) as server,
            rig(spec(server)) as r,
            scraped(r) as scraper,
        ):
            await until(lambda: r.seen().metrics)
            assert load_of(r).lora == LoraMetrics(frozenset("a"))
            assert scraper.status.missing["max_lora"] is True

    run(main())


@pytest.mark.parametrize(
    ("interval", "stale_after", "scrapers", "idle", "seconds"),
    [
        (0.2, 2.0, 1, False, 0.2),
        (0.2, 2.0, 100, False, 0.2),
        (0.2, 2.0, 200, False, 0.4),
        (0.2, 2.0, 1024, False, 1.0),
        (0.2, 2.0, 1, True, 0.5),
        (0.2, 2.0, 200, True, 0.5),
        (0.2, 0.2, 1024, True, 0.2),
        (1.0, 2.0, 1, True, 1.0),
        (5.0, 30.0, 1, True, 12.5),
    ],
)
def test_a_large_fleet_and_idle_servers_are_asked_less_often(
    interval: float, stale_after: float, scrapers: int, idle: bool, seconds: float
) -> None:
    """But always twice before their gauges are too old to be believed."""

    async def main() -> None:
        async with rig(scrape=ScrapeSettings(interval=interval, stale_after=stale_after)) as r:
            r.scraping.running = scrapers
            assert r.scraping.interval_s(idle=idle) == pytest.approx(seconds)

    run(main())


def test_scrapers_are_counted_while_they_run() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint({"/metrics": GOOD}) as server,
            rig(spec(server), spec(server, "unscraped", metrics=None)) as r,
        ):
            async with running(*(r.scraper(one).run for one in r.endpoints)):
                await until(lambda: r.scraping.running == 1)
            assert r.scraping.running == 0

    run(main())


# --- Load reports -----------------------------------------------------------------------------------------------------

VLLM_DP = page((FIXTURES / "vllm-0.32.0-dp2-load.prom").read_bytes())
BARE = page(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
OWN = page(b"wait 4\nbusy 5\n")


@pytest.mark.parametrize(
    ("served", "engines", "asks"),
    [
        (GOOD, "{}", True),
        (VLLM_DP, "{}", False),
        (BARE, "{}", False),
        (SGLANG, "{}", False),
        (GOOD, "{vllm: {load_reports: false}}", False),
        (VLLM_DP, "{vllm: {load_reports: true}}", True),
        (OWN, "{mine: {queued: wait}}", False),
        (OWN, "{mine: {queued: wait, load_reports: true}}", True),
    ],
    ids=["vLLM", "ranks", "processes", "SGLang", "off", "on", "own engine", "own engine, on"],
)
def test_who_is_asked_for_load_reports(served: bytes, engines: str, asks: bool) -> None:
    """vLLM, recognised by its page; not where several ranks or processes answer, of which a report shows one."""

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": served}) as server, rig(spec(server)) as r:
            r.scraping.engines = own_engines(engines)
            async with scraped(r):
                assert not r.seen().asks_load, "nobody knows yet"
                await until(lambda: r.seen().metrics)
                assert r.seen().asks_load is asks

    run(main())


@pytest.mark.parametrize(("engine", "asks"), [("vllm", True), ("sglang", False), ("auto", False)])
def test_an_endpoint_that_is_not_scraped_is_asked_if_the_settings_say_what_it_is(engine: str, asks: bool) -> None:
    async def main() -> None:
        async with ScriptedEndpoint({}) as server, rig(spec(server, metrics=None, engine=engine)) as r:
            await r.scraper(r.endpoints[0]).run()
            assert r.seen().asks_load is asks

    run(main())


def test_another_engine_at_the_same_address_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_INTERVAL_S", 0.01)

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server)) as r, scraped(r):
            await until(lambda: r.seen().asks_load)
            server.scripts["/metrics"] = SGLANG
            await until(lambda: not r.seen().asks_load)

    run(main())


def reported(r: Rig) -> None:
    """A request of ours ends with a report."""
    ticket = r.balancer.submit(request(), now=r.runtime.now())
    r.runtime.report_load(ticket, LoadReport(waiting=3.0))
    r.runtime.close(ticket, Outcome.COMPLETED)


def test_scrapes_are_left_out_while_reports_come_and_nothing_grows_too_old() -> None:
    """Each turn of the scraper is driven by hand, and the clock stands still in it."""

    async def main() -> None:
        scrape = ScrapeSettings(interval=0.2, stale_after=2.0, timeout=5.0)
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server), scrape=scrape) as r:
            r.bring_up()
            scraper = r.scraper(r.endpoints[0])
            now = 1000.0
            r.runtime.now = lambda: now
            scraped_at = []
            for turn in range(15):
                reported(r)
                before = server.asked("/metrics")
                await scraper.turn()
                if server.asked("/metrics") > before:
                    scraped_at.append(turn)
                now += 0.19
            assert scraped_at == [0, 5, 10], "at most a second apart, half of stale_after, and not every 0.2 s"
            assert scraper.status.results == {"ok": 3, "left_out": 12}
            now += 0.2
            await scraper.turn()
            now += 0.2
            assert server.asked("/metrics") == 4, "no report since the last turn"
            metrics = r.seen().metrics
            assert metrics is not None
            assert metrics.waiting == 0.0

    run(main())


def test_reports_do_not_stand_in_for_a_page_that_fails() -> None:
    """Whether it can be read again must be found out."""

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server)) as r:
            r.bring_up()
            scraper = r.scraper(r.endpoints[0])
            now = r.runtime.now()
            r.runtime.now = lambda: now
            await scraper.turn()
            server.scripts["/metrics"] = answer(status=500)
            now += 0.02
            await scraper.turn()
            assert scraper.status.results == {"ok": 1, "status": 1}
            for expected in (3, 4):
                reported(r)
                await scraper.turn()
                assert server.asked("/metrics") == expected

    run(main())


@interpreted
def test_another_number_of_ranks_counts_once_several_pages_in_a_row_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But on the first page at once: a server must not be taken for one endpoint while the first requests come."""
    found: list[int] = []
    shown = [1]

    def ranks(count: int) -> bytes:
        return page(b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % n for n in range(count)))

    async def serve(wire: Wire, _: Received) -> None:
        await wire.send(ranks(shown[0]))

    async def main() -> None:
        async with ScriptedEndpoint(serve) as server, rig(spec(server)) as r:
            r.bring_up()
            r.scraping.found_ranks = lambda _, count: found.append(count)
            shown[0] = 4
            scraper = r.scraper(r.endpoints[0])
            await scraper.turn()
            assert found == [4], "the first page of all"
            for count in (1, 8, 1, 8, 8, 1, 2, 8, 1):
                shown[0] = count
                await scraper.turn()
            assert found == [4], "never three in a row"
            for _ in range(module.PAGES_AGREE):
                shown[0] = 8
                await scraper.turn()
            assert found == [4, 8]

    run(main())


@interpreted
def test_what_takes_long_to_read_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server chooses what is on its page, not how much of our processor that takes."""

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": GOOD}) as server, rig(spec(server), scrape=FAST_SCRAPE) as r:
            r.bring_up()
            scraper = r.scraper(r.endpoints[0])
            assert await scraper.turn() - r.runtime.now() < 0.5
            read = scraper._read

            def slowly(page: bytes) -> object:
                time.sleep(0.05)
                return read(page)

            monkeypatch.setattr(scraper, "_read", slowly)
            assert await scraper.turn() - r.runtime.now() > 0.9 * 0.05 / module.READING_SHARE - 0.5

    run(main())


def test_a_page_of_another_engine_each_time_is_logged_once_for_each(caplog: pytest.LogCaptureFixture) -> None:
    pages = [b"vllm:num_requests_running 1\n", b"sglang:num_running_reqs 1\n"]

    async def main() -> None:
        async with ScriptedEndpoint({"/metrics": page(pages[0])}) as server, rig(spec(server)) as r:
            r.bring_up()
            scraper = r.scraper(r.endpoints[0])
            seen = []
            for n in range(20):
                server.scripts["/metrics"] = page(pages[n % 2])
                await scraper.turn()
                seen.append(scraper.status.engine)
            assert seen == ["vllm", "sglang"] * 10
            assert len(caplog.records) <= 8, [one.getMessage() for one in caplog.records]

    run(main())
