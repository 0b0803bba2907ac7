# SPDX-License-Identifier: Apache-2.0
"""Which engine a page is of, where engines' pages stand, and what the settings make of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.engines import MetricRatio, MetricSpec
from lbproxy.core.engines.dialects import ENGINES, SIGNALS, Engines, EngineTable, MetricsLocation
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.readings import PageReader, PageReading

FIXTURES = Path(__file__).parents[2] / "fixtures" / "metrics"
PAGES = sorted(FIXTURES.rglob("*.prom"))
BUILT_IN = Engines()


def engines(text: str) -> Engines:
    return Engines(parse(f"endpoints: ['http://a']\nengines:\n{text}", environ={}).engines)


def read(page: str, table: EngineTable) -> PageReading:
    return PageReader(table, keep_s=0.0).read(page.encode(), scraped_at=1.0, wall_time=1e9)


# --- Which engine it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_page_is_recognised(path: Path) -> None:
    """By the load it shows, or, of an engine that shows none, by the names of what else it shows."""
    named = {"llama.cpp": "llamacpp", "trtllm": "trtllm-serve", "triton": "triton-tensorrt-llm"}
    begin = path.stem.partition("-")[0]
    assert BUILT_IN.detect(path.read_bytes()) == named.get(begin, begin)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>vllm:num_requests_waiting 1</html>\n",
        b"process_cpu_seconds_total 1\n",
        b"# vllm:num_requests_waiting 1\n",
    ],
)
def test_other_pages_are_of_no_engine_and_a_failed_scrape(page: bytes) -> None:
    assert BUILT_IN.detect(page) is None
    assert read(page.decode(), ENGINES["vllm"]) == PageReading(None, SIGNALS)


def test_on_the_endpoint_s_own_port_every_engine_is_recognised_whatever_the_path() -> None:
    """Triton's OpenAI frontend has its page at the endpoint's own /metrics, and so has TensorRT-LLM behind Dynamo."""
    pages = {
        "vllm": b"vllm:num_requests_waiting 1\n",
        "triton-tensorrt-llm": b"nv_trt_llm_request_metrics 1\n",
        "trtllm-serve": b"trtllm_request_success_total 1\n",
    }
    for name, page in pages.items():
        assert BUILT_IN.detect(page, MetricsLocation()) == name
        assert BUILT_IN.detect(page, MetricsLocation("/prometheus/metrics")) == name


def test_an_engine_whose_place_the_settings_say_is_recognised_only_there() -> None:
    own = engines("  mine: {queued: q, metrics_port: 99}\n  vllm: {metrics_path: /m}")
    assert own.detect(b"q 1\n", MetricsLocation()) is None
    assert own.detect(b"q 1\n", MetricsLocation(port=99)) == "mine"
    assert own.detect(b"vllm:num_requests_waiting 1\n", MetricsLocation()) is None
    assert own.detect(b"vllm:num_requests_waiting 1\n", MetricsLocation("/m")) == "vllm"


def test_on_another_port_only_the_engine_is_recognised_that_usually_stands_there() -> None:
    """On port 8002 of the same host there may be another endpoint, whose load is not this one's."""
    vllm, triton = b"vllm:num_requests_waiting 1\n", b"nv_trt_llm_request_metrics 1\n"
    neighbour = MetricsLocation(port=8002)
    assert BUILT_IN.detect(vllm, MetricsLocation()) == "vllm"
    assert BUILT_IN.detect(vllm, neighbour) is None
    assert BUILT_IN.detect(triton, neighbour) == "triton-tensorrt-llm"
    assert BUILT_IN.detect(triton, None) == "triton-tensorrt-llm", "the settings say that it is here"


def test_usual_places() -> None:
    assert BUILT_IN.locations("auto") == [
        MetricsLocation(),
        MetricsLocation("/prometheus/metrics"),
        MetricsLocation(port=8002),
    ]
    assert BUILT_IN.locations("trtllm-serve") == [MetricsLocation("/prometheus/metrics")]
    own = engines("  mine: {queued: q, metrics_path: /load, metrics_port: 99}\n  vllm: {metrics_port: 98}")
    assert own.locations("auto") == [
        MetricsLocation(),
        MetricsLocation("/load", 99),
        MetricsLocation(port=98),
        MetricsLocation("/prometheus/metrics"),
        MetricsLocation(port=8002),
    ]
    assert own.locations("vllm") == [MetricsLocation(port=98)]


def test_own_engine_wins_a_tie_but_not_against_a_better_fit() -> None:
    own = engines("  mine: {queued: vllm:num_requests_waiting}")
    assert own.detect(b"vllm:num_requests_waiting 1\n") == "mine"
    assert own.detect(b"vllm:num_requests_waiting 1\nvllm:num_requests_running 1\n") == "vllm"


# --- Engines from the settings ----------------------------------------------------------------------------------------


def test_an_engine_of_ones_own() -> None:
    """Whatever families a server has, if they span the load, it works without code."""
    own = engines("""
  my-server:
    queued: 'q{kind=wait}'
    running: [live_requests, 'q{kind="run"}']
    kv_utilization: {used: 'blocks{state=used}', max: 'blocks{state=all}'}
    block_size_tokens: {metric: config, label: page}
""")
    page = 'q{kind="wait"} 3\nq{kind="run"} 2\nblocks{state="used"} 25\nblocks{state="all"} 100\nconfig{page="16"} 1\n'
    assert own.detect(page.encode()) == "my-server"
    assert read(page, own.tables["my-server"]) == PageReading(
        LoadMetrics(scraped_at=1.0, waiting=3.0, running=2.0, kv_utilization=0.25, block_size_tokens=16), ()
    )


def test_an_engine_that_a_reload_took_away_shows_nothing_where_a_file_still_names_it() -> None:
    engine, page = engines("  mine: {running: r}"), "r 3\n"
    assert read(page, engine.tables["mine"]).metrics == LoadMetrics(scraped_at=1.0, running=3.0)
    assert read(page, engine.tables["gone"]).metrics is None
    assert engine.locations("gone") == engine.locations("mine")
    assert "gone" not in engine.tables


def test_a_built_in_engine_keeps_what_the_settings_do_not_say() -> None:
    own = engines("  vllm: {kv_utilization: [new_name, vllm:kv_cache_usage_perc], kv_blocks: ''}").tables["vllm"]
    assert own.waiting == ENGINES["vllm"].waiting
    assert own.lora == ENGINES["vllm"].lora
    assert own.location == MetricsLocation()
    got = read("vllm:num_requests_waiting 1\nvllm:num_requests_running 1\nnew_name 0.25\n", own)
    assert got.metrics is not None
    assert got.metrics.kv_utilization == 0.25
    assert got.missing == ("block_size_tokens",), "what is disabled is not missing"


def test_per_cent_from_the_settings() -> None:
    own = engines("  mine: {running: r, kv_utilization: {metric: kv, above_one: per_cent}}").tables["mine"]
    got = read("kv 57\n", own).metrics
    assert got is not None
    assert got.kv_utilization == pytest.approx(0.57)


def test_tables_want_the_families_of_ratios_and_adapters_too() -> None:
    ratio = MetricRatio(MetricSpec("used"), MetricSpec("max"))
    table = EngineTable(waiting=(MetricSpec("q"),), kv_utilization=(ratio,), lora=(MetricSpec("lora"),))
    assert table.families() == {"q", "used", "max", "lora"}


def test_vllm_is_asked_for_load_reports_where_one_rank_says_it_all() -> None:
    vllm = ENGINES["vllm"]
    assert vllm.wants_load_reports(is_single=True)
    assert not vllm.wants_load_reports(is_single=False)
    assert not any(table.wants_load_reports(is_single=True) for name, table in ENGINES.items() if name != "vllm")
    for said in (True, False):
        table = engines(f"  vllm: {{load_reports: {str(said).lower()}}}").tables["vllm"]
        assert table.wants_load_reports(is_single=False) is table.wants_load_reports(is_single=True) is said


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_of_ranks_and_of_several_processes_are_told_apart(path: Path) -> None:
    """Of vLLM, which is asked for load reports."""
    if path.stem.startswith("vllm"):
        reader = PageReader(ENGINES["vllm"], keep_s=0.0)
        reader.read(path.read_bytes(), scraped_at=0.0, wall_time=0.0)
        assert reader.is_single is ("dp2" not in path.stem and "0.8.5" not in path.stem)
