# SPDX-License-Identifier: Apache-2.0
"""Pages of metrics become load by each engine's table; what a page does not say stays unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.config.sections.engines import MetricRatio, MetricSpec, Signal
from lbproxy.core.engines.dialects import ENGINES, SIGNALS, EngineTable
from lbproxy.core.engines.exposition import Sample
from lbproxy.core.engines.load_metrics import LoadMetrics, LoraMetrics
from lbproxy.core.engines.readings import MAX_LORA, PageReader, PageReading, select

FIXTURES = Path(__file__).parents[2] / "fixtures" / "metrics"
VLLM = ENGINES["vllm"]
WALL_TIME = 1795230000.0
"""An hour and more after all recordings of vLLM."""


def recorded(name: str) -> bytes:
    return (FIXTURES / f"{name}.prom").read_bytes()


def signal(*texts: str, label: str | None = None) -> Signal:
    return tuple(MetricSpec.parse(text, value_label=label) for text in texts)


TABLE = EngineTable(
    waiting=signal("q", "q_old"),
    running=signal("r{kind=run}"),
    kv_utilization=signal("kv"),
    block_size_tokens=signal("cfg", label="size"),
    kv_blocks=signal("cfg", label="blocks"),
    each_series_is_total=True,
    lora=signal("lora"),
)
KEEP_S = 2.0
STATES = ("asleep", "work", "lora", "started_at")


def changed(**signals: Signal) -> EngineTable:
    return dataclasses.replace(TABLE, **signals)  # type: ignore[arg-type]


def read(page: str, table: EngineTable = TABLE, earlier: Iterable[tuple[float, str]] = ()) -> PageReading:
    """What a page says at 10 s, read after others."""
    reader = PageReader(table, keep_s=KEEP_S)
    for at, before in earlier:
        reader.read(before.encode(), scraped_at=at, wall_time=WALL_TIME)
    return reader.read(page.encode(), scraped_at=10.0, wall_time=WALL_TIME)


def metrics(page: str, table: EngineTable = TABLE, earlier: Iterable[tuple[float, str]] = ()) -> LoadMetrics:
    got = read(page, table, earlier).metrics
    assert got is not None
    return got


# --- Recorded and documented pages ------------------------------------------------------------------------------------


def of_page(name: str, engine: str) -> PageReading:
    """Of the server, without what is optional, which the expected load of so many pages would only repeat."""
    got = PageReader(ENGINES[engine], keep_s=0.0).read(recorded(name), scraped_at=5.0, wall_time=WALL_TIME)
    if got.metrics is None:
        return got
    bare = dataclasses.replace(got.metrics, work=None, stated_tokens=None, deferred=None, slots=None)
    return PageReading(bare, got.missing)


@pytest.mark.parametrize(
    ("name", "engine", "work"),
    [
        ("vllm-0.32.0-load-lora-t0", "vllm", 2738.0),
        ("vllm-0.32.0-dp2-load", "vllm", 691.0 + 680.0),
        ("vllm-0.33.0-load", "vllm", 2772.0),
        ("sglang-0.5.23-load", "sglang", 1246.0 + 2700.0 + 224.0),
        ("llama.cpp-b11434-load", "llamacpp", 571.0),
        ("documented/trtllm-serve", "trtllm-serve", None),
        ("rendered/lmdeploy-0.18.0", "lmdeploy", 1234.0),
    ],
)
def test_what_an_engine_counts_while_it_works(name: str, engine: str, work: float | None) -> None:
    got = PageReader(ENGINES[engine], keep_s=0.0).read(recorded(name), scraped_at=5.0, wall_time=WALL_TIME)
    assert got.metrics is not None
    assert got.metrics.work == work


def test_a_counter_of_work_may_be_larger_than_any_gauge_and_must_be_finite() -> None:
    page = "vllm:num_requests_running 1\nvllm:generation_tokens_total %s\n"
    assert metrics(page % "5e12", VLLM).work == 5e12
    assert metrics(page % "+Inf", VLLM).work is None
    assert metrics(page % "NaN", VLLM).work is None


def load(
    waiting: float | None,
    running: float | None,
    kv: float | None,
    size: int | None,
    blocks: int | None,
    *,
    lora: LoraMetrics | None = None,
    started_at: float | None = None,
) -> LoadMetrics:
    return LoadMetrics(
        scraped_at=5.0,
        waiting=waiting,
        running=running,
        kv_utilization=kv,
        block_size_tokens=size,
        kv_blocks=blocks,
        lora=lora,
        started_at=started_at,
    )


def lora(*names: str) -> LoraMetrics:
    """vLLM shows the same set under both labels."""
    return LoraMetrics(frozenset(names), frozenset(names), 2)


FIRST, SECOND, THIRD, FOURTH = 1.79522408092e09, 1.79522494123e09, 1.79599020351e09, 1.79599075854e09
"""When recorded vLLM servers say they were started."""
LMDEPLOY = 1.79599013623e09


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm-0.32.0-idle-before-first-request", load(0.0, 0.0, 0.0, 32, 100, started_at=FIRST)),
        ("vllm-0.32.0-idle-after-requests", load(0.0, 0.0, 0.0, 32, 100, lora=lora(), started_at=FIRST)),
        (
            "vllm-0.32.0-load-lora-t0",
            load(14.0, 8.0, 0.8080808080808081, 32, 100, lora=lora("a", "b"), started_at=FIRST),
        ),
        (
            "vllm-0.32.0-load-lora-t1",
            load(7.0, 8.0, 0.7272727272727273, 32, 100, lora=lora("b", "c"), started_at=FIRST),
        ),
        (
            "vllm-0.32.0-load-lora-t2",
            load(0.0, 6.0, 0.5454545454545454, 32, 100, lora=lora("a", "b"), started_at=FIRST),
        ),
        ("vllm-0.32.0-after-prefix-hit", load(0.0, 0.0, 0.0, 32, 100, lora=lora(), started_at=FIRST)),
        ("vllm-0.32.0-load-lora-t3", load(0.0, 2.0, 0.18181818181818177, 32, 100, lora=lora("c"), started_at=FIRST)),
        ("vllm-0.32.0-busy-2-running-rejecting", load(0.0, 2.0, 0.5641025641025641, 32, 40, started_at=SECOND)),
        ("vllm-0.33.0-load", load(8.0, 6.0, 0.9090909090909091, 32, 100, started_at=THIRD)),
        ("vllm-0.33.0-hybrid-load", load(8.0, 6.0, 0.4983314794215795, 32, 900, started_at=FOURTH)),
        ("documented/vllm-0.8.5", load(3.0, 4.0, 0.25, 16, 27000)),
        ("documented/vllm-dp2-hybrid", load(2.0, 4.0, 0.375, 4, 9000)),
    ],
)
def test_vllm(name: str, expected: LoadMetrics) -> None:
    assert of_page(name, "vllm") == PageReading(expected, ())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sglang-0.5.23-idle", load(0.0, 0.0, 0.0, 16, 256)),
        ("sglang-0.5.23-load", load(1.0, 15.0, 0.87890625, 16, 256)),
        ("sglang-0.5.23-after-prefix-hit", load(0.0, 0.0, 0.05859375, 16, 256)),
        ("documented/sglang-0.5.10", load(9.0, 6.0, 0.75, 64, 512)),
        ("rendered/sglang-0.5.23-hybrid", load(0.0, 4.0, 0.25, 1, 200_000)),  # not .95, that of sliding windows
        ("rendered/sglang-0.5.23-dp2-pp2-tp4", load(2.0, 6.0, 0.5, 16, 512)),  # 6 run, not the sum of 16 schedulers
    ],
)
def test_sglang(name: str, expected: LoadMetrics) -> None:
    """0.5.10 says the block facts in labels, and each priority beside the total: added up, that would be doubled."""
    assert of_page(name, "sglang") == PageReading(expected, ())


@pytest.mark.parametrize(
    ("name", "engine", "expected"),
    [
        ("documented/trtllm-serve", "trtllm-serve", load(2.0, 7.0, 0.5, 32, 2000)),
        ("documented/triton-tensorrt-llm", "triton-tensorrt-llm", load(3.0, 8.0, 0.4, 64, 4000)),
        ("rendered/lmdeploy-0.18.0", "lmdeploy", load(8.0, 6.0, 0.75, None, None, started_at=LMDEPLOY)),
        ("llama.cpp-b11434-idle", "llamacpp", load(0.0, 0.0, None, None, None)),
        ("llama.cpp-b11434-load", "llamacpp", load(3.0, 2.0, None, None, None)),
    ],
)
def test_other_engines(name: str, engine: str, expected: LoadMetrics) -> None:
    """Triton's two models: 0.5 of 3,000 blocks and 0.1 of 1,000 are 0.4 of 4,000."""
    assert of_page(name, engine) == PageReading(expected, ())


@pytest.mark.parametrize(
    ("name", "engine", "deferred", "slots", "kv_tokens"),
    [
        ("vllm-0.32.0-load-lora-t0", "vllm", 2.0, None, 3200),
        ("vllm-0.32.0-dp2-load", "vllm", 0.0, None, 120 * 32),  # 1,920 of each rank
        ("vllm-0.33.0-load", "vllm", 0.0, None, 3200),
        ("vllm-0.33.0-hybrid-load", "vllm", 0.0, None, 4738),  # not 900 blocks of 32
        ("documented/vllm-dp2-hybrid", "vllm", 7.0, None, 2 * 204_800),  # not 9,000 blocks of 4
        ("documented/vllm-0.8.5", "vllm", None, None, 27_000 * 16),
        ("sglang-0.5.23-load", "sglang", None, None, 4096),
        ("rendered/sglang-0.5.23-hybrid", "sglang", None, None, 200_000),
        ("rendered/sglang-0.5.23-dp2-pp2-tp4", "sglang", None, None, 2 * 4096),
        ("documented/trtllm-serve", "trtllm-serve", None, 64, 64_000),
        ("documented/triton-tensorrt-llm", "triton-tensorrt-llm", None, 1024, 4000 * 64),
    ],
)
def test_what_else_is_read_where_it_is(
    name: str, engine: str, deferred: float | None, slots: int | None, kv_tokens: int | None
) -> None:
    got = PageReader(ENGINES[engine], keep_s=0.0).read(recorded(name), scraped_at=5.0, wall_time=WALL_TIME).metrics
    assert got is not None
    assert (got.deferred, got.slots, got.kv_tokens) == (deferred, slots, kv_tokens)


@pytest.mark.parametrize(
    ("blocks", "stated", "tokens"),
    [
        (None, None, None),
        (None, 5000, 5000),
        (100, None, 1600),
        (100, 1599, 1600),  # what a block of the longest request explains
        (100, 1521, 1600),
        (100, 1519, 1519),
        (100, 1681, 1681),
    ],
)
def test_the_size_that_a_page_states_counts_where_blocks_do_not_explain_it(
    blocks: int | None, stated: int | None, tokens: int | None
) -> None:
    got = LoadMetrics(scraped_at=0.0, kv_blocks=blocks, block_size_tokens=16, stated_tokens=stated)
    assert got.kv_tokens == tokens


@pytest.mark.parametrize(
    ("states", "asleep"), [((1,), False), ((0,), True), ((0, 1), False), ((0, 0), True), ((), False)]
)
def test_an_engine_sleeps_if_none_of_its_ranks_is_awake(states: tuple[int, ...], asleep: bool) -> None:
    page = "vllm:num_requests_running 0\n"
    for rank, state in enumerate(states):
        page += f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="awake"}} {state}\n'
        page += f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="weights_offloaded"}} {1 - state}\n'
    assert metrics(page, VLLM).asleep is asleep
    assert not metrics(page.replace("running 0", "running 1"), VLLM).asleep, "what computes does not sleep"


def test_each_rank_has_the_size_that_it_states() -> None:
    page = recorded("documented/vllm-dp2-hybrid")
    got = PageReader(VLLM, keep_s=0.0).read(page, scraped_at=5.0, wall_time=WALL_TIME)
    of_ranks = [(one.waiting, one.deferred, one.kv_tokens) for one in got.ranks]
    assert of_ranks == [(2.0, 7.0, 204_800), (0.0, 0.0, 204_800)]
    page = recorded("vllm-0.33.0-dp2-hybrid-load")
    got = PageReader(VLLM, keep_s=0.0).read(page, scraped_at=5.0, wall_time=WALL_TIME)
    assert [(one.waiting, one.running, one.kv_tokens) for one in got.ranks] == [(0.0, 7.0, 4738), (1.0, 6.0, 4738)]
    page = recorded("rendered/sglang-0.5.23-dp2-pp2-tp4")
    got = PageReader(ENGINES["sglang"], keep_s=0.0).read(page, scraped_at=5.0, wall_time=WALL_TIME)
    assert [(one.waiting, one.running, one.kv_utilization, one.kv_tokens) for one in got.ranks] == [
        (2.0, 4.0, 0.75, 4096),
        (0.0, 2.0, 0.25, 4096),
    ]


@pytest.mark.parametrize("label", ["tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank"])
def test_of_ranks_that_do_not_divide_the_load_the_first_counts(label: str) -> None:
    series = "".join(f'q{{{label}="{n}",m="{m}"}} {10 * m + (n == 2)}\n' for n in (10, 9, 2, 3) for m in (1, 2))
    assert metrics(series).waiting == 11.0 + 21.0
    assert metrics(series.replace('m="', 'pid="1",m="', 3)).waiting == 11.0 + 21.0, "each has a process of its own"
    for dividing in ("dp_rank", "data_parallel_rank", "engine"):
        assert metrics(series.replace(label, dividing)).waiting == 11.0 + 21.0 + 3 * 30.0


def test_triton_whose_labels_shifted_falls_back_to_the_ratio() -> None:
    """64 is no fraction, clamped to 1 it would say that the cache is full; 750 of 3,000 blocks are used."""
    got = of_page("documented/triton-tensorrt-llm-shifted", "triton-tensorrt-llm")
    assert got == PageReading(load(1.0, 5.0, 0.25, None, 3000), ("block_size_tokens",))


def test_trtllm_without_gauges_is_a_failed_scrape() -> None:
    assert of_page("documented/trtllm-serve-1.1-without-gauges", "trtllm-serve") == PageReading(None, SIGNALS)


def test_data_parallel_ranks_are_summed_and_their_blocks_are_not() -> None:
    """4 + 4 run and 6 + 6 wait. Each rank's series already says 120 blocks for both, of 60 each."""
    got = of_page("vllm-0.32.0-dp2-load", "vllm")
    assert got == PageReading(load(12.0, 8.0, 0.4067796610169492, 32, 120, lora=lora("a", "b")), ())


def test_data_parallel_page_before_the_first_step_has_no_gauges() -> None:
    """A rank shows its gauges after its first step only. That is unknown, not idle."""
    got = of_page("vllm-0.32.0-dp2-idle", "vllm")
    assert got == PageReading(load(None, None, None, 32, 120), ("waiting", "running", "kv_utilization"))


def test_new_name_wins_over_the_old_one() -> None:
    page = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n"
    assert metrics(page, VLLM).kv_utilization == 0.1


def test_signals_are_fields_of_load_metrics() -> None:
    fields = [field.name for field in dataclasses.fields(LoadMetrics)]
    assert fields == ["scraped_at", *SIGNALS, "stated_tokens", "deferred", "slots", *STATES]
    assert set(SIGNALS) <= {field.name for field in dataclasses.fields(EngineTable)}


# --- Rule 1: what is missing ------------------------------------------------------------------------------------------

FULL = 'q 1\nr{kind="run"} 2\nkv 0.5\ncfg{size="16",blocks="100"} 1\n'
PARTIAL = 'r{kind="run"} 3\nkv 0.75\ncfg{size="16",blocks="100"} 1\n'


@pytest.mark.parametrize(("shown_at", "waiting"), [(8.0, 1.0), (7.99, None)])
def test_missing_gauge_is_kept_and_ages_while_others_count(shown_at: float, waiting: float | None) -> None:
    """Kept for longer, it would be believed for ever: the rest of the page makes it look fresh."""
    got = read(PARTIAL, earlier=[(shown_at, FULL), (9.0, PARTIAL)])
    assert got.missing == ("waiting",)
    assert got.metrics == LoadMetrics(
        scraped_at=10.0, waiting=waiting, running=3.0, kv_utilization=0.75, block_size_tokens=16, kv_blocks=100
    )


def test_missing_facts_are_kept_however_old() -> None:
    """Block size and block count cannot change while a server runs, so their age means nothing."""
    got = read("q 1\n", earlier=[(-1000.0, FULL)])
    assert got.missing == ("running", "kv_utilization", "block_size_tokens", "kv_blocks")
    assert got.metrics == LoadMetrics(scraped_at=10.0, waiting=1.0, block_size_tokens=16, kv_blocks=100)
    assert metrics("q 1\n").kv_blocks is None


def test_facts_of_a_restarted_server_replace_the_old_ones() -> None:
    got = metrics('cfg{size="32",blocks="7"} 1\n', earlier=[(9.0, FULL)])
    assert (got.block_size_tokens, got.kv_blocks) == (32, 7)


def test_nothing_is_kept_of_another_process() -> None:
    started = "process_start_time_seconds 5e8\n"
    assert metrics(started + "q 1\n", earlier=[(9.0, started + FULL)]).kv_blocks == 100
    again = metrics("process_start_time_seconds 6e8\nq 1\n", earlier=[(9.0, started + FULL)])
    assert again == LoadMetrics(scraped_at=10.0, waiting=1.0, started_at=6e8)


def test_page_without_any_signal_is_a_failed_scrape_even_after_a_good_one() -> None:
    assert read("q_by_reason 1\n", earlier=[(9.0, FULL)]) == PageReading(None, SIGNALS)
    assert read("process_start_time_seconds 5e8\n").metrics is None


@pytest.mark.parametrize("line", ["", "# TYPE q gauge\n", "q NaN\n", 'q_by_reason{r="x"} 4\n', "q x\n"])
def test_family_that_is_missing_empty_or_unusable_is_unknown_not_zero(line: str) -> None:
    got = read(FULL.replace("q 1\n", line))
    assert got.missing == ("waiting",)
    assert got.metrics is not None
    assert got.metrics.waiting is None


def test_signal_that_the_engine_does_not_have_is_not_missing() -> None:
    table = changed(kv_utilization=(), kv_blocks=())
    assert read('q 1\nr{kind="run"} 2\ncfg{size="16"} 1\n', table).missing == ()


@pytest.mark.parametrize("first", ["", "q NaN\n"])
def test_next_spec_is_tried_when_one_finds_nothing(first: str) -> None:
    assert metrics(first + "q_old 5\n").waiting == 5.0
    assert metrics(first + "q 0\nq_old 5\n").waiting == 0.0


# --- Rules 2 and 3: which series --------------------------------------------------------------------------------------


def test_series_needs_all_wanted_labels_and_may_have_more() -> None:
    page = 'r{kind="run",model="a"} 2\nr{kind="wait"} 30\nr{model="a"} 400\nr 5000\n'
    assert metrics(page).running == 2.0


def test_requests_are_summed_over_series() -> None:
    page = 'q{engine="0",model="a"} 1\nq{engine="1",model="a"} 2\nq{engine="0",model="b"} 4\n'
    assert metrics(page).waiting == 7.0


def test_only_the_total_over_priorities_counts() -> None:
    """SGLang 0.5.10 shows the total and its parts in one family: the sum would be doubled."""
    page = (
        'q{priority="",rank="0"} 5\nq{priority="1",rank="0"} 2\nq{priority="2",rank="0"} 3\nq{priority="",rank="1"} 1\n'
    )
    assert metrics(page).waiting == 6.0
    assert read('q{priority="1"} 2\nr{kind="run"} 1\n').missing[0] == "waiting"


def test_spec_that_names_a_priority_gets_it() -> None:
    table = changed(waiting=signal("q{priority=2}"))
    assert metrics('q{priority=""} 5\nq{priority="2"} 3\n', table).waiting == 3.0


def test_newest_timestamp_wins() -> None:
    assert metrics('q{a="1"} 5 1000\nq{a="2"} 7 3000\nq{a="3"} 1 3000\nq{a="4"} 9 2000\n').waiting == 8.0
    assert metrics("q 5 1000\nq NaN 3000\n").waiting == 5.0


def test_a_series_that_stands_twice_counts_once() -> None:
    """A defect of the page, and no second rank: added up, the load would be doubled."""
    assert metrics('q{a="1"} 5\nq{a="1"} 7\n').waiting == 7.0
    assert metrics('q{a="1"} 5\nq{a="2"} 1\nq{a="1"} 7\n').waiting == 8.0
    assert metrics(FULL + FULL) == metrics(FULL)
    assert metrics(2 * recorded("vllm-0.32.0-dp2-load").decode(), VLLM) == metrics(
        recorded("vllm-0.32.0-dp2-load").decode(), VLLM
    )


def test_a_time_in_the_future_is_as_good_as_any() -> None:
    """Each page is read by itself, so it cannot outlive the page."""
    assert metrics("q 5 99999999999999\n").waiting == 5.0
    assert metrics("q 6 1000\n", earlier=[(9.0, "q 5 99999999999999\n")]).waiting == 6.0


def test_sample_without_timestamp_is_of_now() -> None:
    assert metrics("q 5 1000\nq 7\n").waiting == 7.0


def test_utilisation_is_averaged() -> None:
    assert metrics('kv{m="a"} 0.2\nkv{m="b"} 0.6\n').kv_utilization == pytest.approx(0.4)


BLOCKS = 'cfg{engine="0",blocks="300"} 1\ncfg{engine="1",blocks="100"} 1\n'


def test_utilisation_is_weighted_by_the_blocks_of_each_series() -> None:
    """300 blocks at 0.2 and 100 at 0.6 make 120 of 400."""
    page = 'kv{engine="1",m="a"} 0.6\nkv{engine="0",m="a"} 0.2\n' + BLOCKS
    assert metrics(page).kv_utilization == pytest.approx(0.3)


@pytest.mark.parametrize(
    "blocks",
    [
        'cfg{engine="0",blocks="300"} 1\n',
        'cfg{engine="0",blocks="300"} 1\ncfg{engine="1",blocks="None"} 1\n',
        'cfg{engine="0",x="1",blocks="300"} 1\ncfg{engine="0",x="2",blocks="9"} 1\ncfg{engine="1",blocks="100"} 1\n',
        'cfg{rank="0",blocks="300"} 1\ncfg{rank="1",blocks="100"} 1\n',
    ],
    ids=["one is missing", "one is not a number", "two for one series", "no label in common"],
)
def test_utilisation_is_averaged_plainly_when_blocks_are_not_known_for_all(blocks: str) -> None:
    page = 'kv{engine="0"} 0.2\nkv{engine="1"} 0.6\n' + blocks
    assert metrics(page).kv_utilization == pytest.approx(0.4)


def test_blocks_are_summed_unless_each_series_says_all() -> None:
    page = BLOCKS + "kv 0.5\n"
    assert metrics(page).kv_blocks == 300
    assert metrics(page, dataclasses.replace(TABLE, each_series_is_total=False)).kv_blocks == 400


RATIO = changed(
    kv_utilization=(*signal("kv"), MetricRatio(MetricSpec.parse("b{k=used}"), MetricSpec.parse("b{k=max}")))
)


@pytest.mark.parametrize(
    ("page", "share"),
    [
        ('b{k="used"} 30\nb{k="max"} 120\n', 0.25),
        ('b{k="used"} 300\nb{k="max"} 120\n', 1.0),
        ('b{k="used",m="a"} 30\nb{k="max",m="b"} 300\nb{k="max",m="a"} 100\nb{k="used",m="b"} 90\n', 0.3),
        ('b{k="used",m="a"} 30\nb{k="max",m="a"} 100\nb{k="max",m="b"} 900\n', 0.3),
        ('kv 0.9\nb{k="used"} 30\nb{k="max"} 120\n', 0.9),
        ('kv NaN\nb{k="used"} 0\nb{k="max"} 120\n', 0.0),
        ('b{k="used"} 30\nb{k="max"} 0\n', None),
        ('b{k="used"} 30\n', None),
        ('b{k="used",m="a"} 30\nb{k="max",m="b"} 100\n', None),
    ],
    ids=["one", "clamped", "two models", "one is not used", "not needed", "idle", "of nothing", "of what?", "others"],
)
def test_utilisation_as_a_ratio(page: str, share: float | None) -> None:
    """Of series by series: what one model uses of what it has. A missing half is not 0."""
    assert metrics("q 1\n" + page, RATIO).kv_utilization == (None if share is None else pytest.approx(share))


def test_block_sizes_that_differ_are_unknown() -> None:
    """A hash of the prompt's blocks can be right for one size only."""
    assert read('q 1\ncfg{e="0",size="16"} 1\ncfg{e="1",size="32"} 1\n').missing[2] == "block_size_tokens"
    assert metrics('cfg{e="0",size="16"} 1\ncfg{e="1",size="16"} 1\n').block_size_tokens == 16


# --- Rule 4: which values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "-0.001", "1.1e9", "1e999"])
def test_bad_value_is_as_if_absent(value: str) -> None:
    assert metrics(f'q{{a="1"}} {value}\nq{{a="2"}} 3\n').waiting == 3.0
    assert read(f"q {value}\nkv {value}\n").metrics is None


def test_largest_believable_value_counts() -> None:
    assert metrics("q 1e9\n").waiting == 1e9


@pytest.mark.parametrize(("value", "share"), [("0", 0.0), ("1", 1.0), ("1.0001", 1.0), ("57", 1.0)])
def test_utilisation_is_clamped(value: str, share: float) -> None:
    assert metrics(f"kv {value}\n").kv_utilization == share


@pytest.mark.parametrize(("value", "share"), [("0.5", 0.5), ("1", 1.0), ("57", 0.57), ("100", 1.0), ("250", 1.0)])
def test_per_cent_family_is_divided(value: str, share: float) -> None:
    table = changed(kv_utilization=(MetricSpec.parse("kv", above_one="per_cent"),))
    assert metrics(f"kv {value}\n", table).kv_utilization == pytest.approx(share)


@pytest.mark.parametrize("text", ["None", "", "16.0", "-16", "0", "1e3", " 16", "16k", "99999999999"])
def test_label_that_is_no_positive_integer_is_unknown(text: str) -> None:
    got = read(f'q 1\ncfg{{size="{text}",blocks="8"}} 1\n')
    assert got.missing == ("running", "kv_utilization", "block_size_tokens")
    assert got.metrics == LoadMetrics(scraped_at=10.0, waiting=1.0, kv_blocks=8)


def test_facts_may_also_be_gauges() -> None:
    table = changed(block_size_tokens=signal("page_size"), kv_blocks=signal("pages"))
    got = metrics("page_size 64\npages 5000\n", table)
    assert (got.block_size_tokens, got.kv_blocks) == (64, 5000)
    assert metrics("q 1\npage_size 64.5\n", table).block_size_tokens is None


# --- Adapters, and when the process started ---------------------------------------------------------------------------


def shown(labels: str, at: float) -> str:
    return f"lora{{{labels}}} {at!r}\n"


def adapters(page: str) -> LoraMetrics | None:
    return metrics("q 1\n" + page).lora


AB = 'max_lora="4",running_lora_adapters="a, b,",waiting_lora_adapters=" b,,c"'
NONE = 'max_lora="4",running_lora_adapters="",waiting_lora_adapters=""'


def test_newest_series_of_adapters_counts() -> None:
    """vLLM never removes a series: its value is when it was last true."""
    both = LoraMetrics(frozenset("ab"), frozenset("bc"), 4)
    assert adapters(shown(NONE, WALL_TIME - 9) + shown(AB, WALL_TIME - 8)) == both
    assert adapters(shown(AB, WALL_TIME - 9) + shown(NONE, WALL_TIME - 8)) == LoraMetrics(max_lora=4)


@pytest.mark.parametrize(("ahead", "believed"), [(59.0, True), (61.0, False), (1e9, False), (float("inf"), False)])
def test_series_of_the_future_does_not_count(ahead: float, believed: bool) -> None:
    """With several API servers vLLM's times are summed; recorded: 3.59e9."""
    got = adapters(shown(AB, WALL_TIME - 9) + shown(NONE, WALL_TIME + ahead))
    assert got is not None
    assert (not got.running) is believed


def test_recorded_sum_of_times_is_not_believed() -> None:
    got = of_page("vllm-0.32.0-dp2-after-summed-lora-timestamp", "vllm").metrics
    assert got is not None
    assert got.lora == lora("a", "b")


def test_no_adapters_shown_is_no_defect() -> None:
    assert read(FULL).missing == ()
    assert adapters("") is None
    assert adapters(shown(AB, WALL_TIME + 1e6)) is None
    assert adapters(shown(AB, float("nan"))) is None


@pytest.mark.parametrize("text", ["None", "", "2.0", "-1", "0", "99999999999"])
def test_bad_capacity_for_adapters_is_unknown_and_missing(text: str) -> None:
    got = read(FULL + shown(f'max_lora="{text}",running_lora_adapters="a"', WALL_TIME))
    assert got.missing == (MAX_LORA,)
    assert got.metrics is not None
    assert got.metrics.lora == LoraMetrics(frozenset("a"), frozenset(), None)


@pytest.mark.parametrize(
    ("text", "started_at"), [("5e8", 5e8), ("NaN", None), ("0", None), ("-1", None), ("+Inf", None)]
)
def test_when_the_process_started(text: str, started_at: float | None) -> None:
    assert metrics(f"q 1\nprocess_start_time_seconds {text}\n").started_at == started_at


def test_of_several_processes_the_last_start_counts() -> None:
    page = 'q 1\nprocess_start_time_seconds{pid="1"} 7e8\nprocess_start_time_seconds{pid="2"} 6e8\n'
    assert metrics(page).started_at == 7e8


# --- Any page ---------------------------------------------------------------------------------------------------------


def test_wanted_empty_label_also_matches_an_absent_one() -> None:
    """In this format they are the same thing."""
    series = [Sample({}, 1.0), Sample({"k": ""}, 2.0), Sample({"k": "v"}, 4.0)]
    assert [value for _, value in select(MetricSpec.parse('m{k=""}'), {"m": series})] == [1.0, 2.0]


PARTS = [
    *'q{}=", 1\n',
    "kv",
    "cfg",
    "lora",
    "\nq ",
    "size",
    "blocks",
    "NaN",
    "engine",
    "priority",
    "max_lora",
    "1e9",
    "b",
]


@settings(derandomize=True)
@given(st.lists(st.lists(st.sampled_from(PARTS)), max_size=3))
def test_any_pages_keep_values_in_range(pages: list[list[str]]) -> None:
    got = read("".join(pages.pop() if pages else []) + "\n", RATIO, [(9.0, "".join(parts) + "\n") for parts in pages])
    if got.metrics is not None:
        assert got.metrics.waiting is None or got.metrics.waiting >= 0
        assert got.metrics.kv_utilization is None or 0 <= got.metrics.kv_utilization <= 1
