"""Pages of metrics become load by each engine's table; what a page does not say stays unknown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.engines import ENGINES, SIGNALS, EngineTable, MetricSpec, Reading, detect, read_metrics
from lbproxy.core.exposition import Sample
from lbproxy.core.types import LoadMetrics

FIXTURES = Path(__file__).parents[1] / "fixtures" / "metrics"
VLLM = ENGINES["vllm"]


def recorded(name: str) -> bytes:
    return (FIXTURES / f"vllm-0.32.0-{name}.prom").read_bytes()


def spec(text: str, *, value_label: str | None = None, per_cent: bool = False) -> MetricSpec:
    parsed = MetricSpec.parse(text, value_label=value_label, per_cent=per_cent)
    assert parsed is not None
    return parsed


TABLE = EngineTable(
    waiting=(spec("q"), spec("q_old")),
    running=(spec("r{kind=run}"),),
    kv_utilization=(spec("kv"),),
    block_size_tokens=(spec("cfg", value_label="size"),),
    kv_blocks=(spec("cfg", value_label="blocks"),),
)


def read(page: str, table: EngineTable = TABLE, previous: LoadMetrics | None = None) -> Reading:
    return read_metrics(page.encode(), table, scraped_at=10.0, previous=previous)


def metrics(page: str, table: EngineTable = TABLE, previous: LoadMetrics | None = None) -> LoadMetrics:
    got = read(page, table, previous).metrics
    assert got is not None
    return got


# --- Recorded vLLM pages ----------------------------------------------------------------------------------------------


def vllm(name: str) -> Reading:
    return read_metrics(recorded(name), VLLM, scraped_at=5.0, previous=None)


def load(waiting: float | None, running: float | None, kv: float | None, blocks: int) -> LoadMetrics:
    return LoadMetrics(
        scraped_at=5.0, waiting=waiting, running=running, kv_utilization=kv, block_size_tokens=32, kv_blocks=blocks
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("idle-before-first-request", load(0.0, 0.0, 0.0, 100)),
        ("idle-after-requests", load(0.0, 0.0, 0.0, 100)),
        ("load-lora-t0", load(16.0, 8.0, 0.8080808080808081, 100)),
        ("busy-2-running-rejecting", load(0.0, 2.0, 0.5641025641025641, 40)),
    ],
)
def test_recorded_vllm_page(name: str, expected: LoadMetrics) -> None:
    assert vllm(name) == Reading(expected, ())


def test_data_parallel_ranks_are_summed_and_their_blocks_are_not() -> None:
    """4 + 4 run and 6 + 6 wait. Each rank's series already says 120 blocks for both, of 60 each."""
    assert vllm("dp2-load") == Reading(load(12.0, 8.0, 0.4067796610169492, 120), ())


def test_data_parallel_page_before_the_first_step_has_no_gauges() -> None:
    """A rank shows its gauges after its first step only. That is unknown, not idle."""
    assert vllm("dp2-idle") == Reading(load(None, None, None, 120), ("waiting", "running", "kv_utilization"))


OLD_NAMES = """\
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:num_requests_running{model_name="m"} 4.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
"""


def test_old_names_of_vllm_still_read() -> None:
    got = read_metrics(OLD_NAMES.encode(), VLLM, scraped_at=5.0, previous=None)
    assert got.metrics == LoadMetrics(
        scraped_at=5.0, waiting=3.0, running=4.0, kv_utilization=0.25, block_size_tokens=16, kv_blocks=None
    )
    assert got.missing == ("kv_blocks",)


def test_new_name_wins_over_the_old_one() -> None:
    page = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n"
    assert metrics(page, VLLM).kv_utilization == 0.1


@pytest.mark.parametrize("name", ["idle-after-requests", "dp2-idle"])
def test_vllm_is_detected(name: str) -> None:
    assert detect(recorded(name)) == "vllm"


@pytest.mark.parametrize("page", [b"", b"<html>vllm:num_requests_waiting 1</html>\n", b"process_cpu_seconds_total 1\n"])
def test_other_pages_are_of_no_engine_and_a_failed_scrape(page: bytes) -> None:
    assert detect(page) is None
    assert read_metrics(page, VLLM, scraped_at=5.0, previous=None) == Reading(None, SIGNALS)


def test_signals_are_fields_of_load_metrics() -> None:
    fields = [field.name for field in dataclasses.fields(LoadMetrics)]
    assert fields == ["scraped_at", *SIGNALS, "started_at"]
    assert set(SIGNALS) <= {field.name for field in dataclasses.fields(EngineTable)}


# --- Rule 1: what is missing ------------------------------------------------------------------------------------------

FULL = 'q 1\nr{kind="run"} 2\nkv 0.5\ncfg{size="16",blocks="100"} 1\n'
KNOWN = LoadMetrics(scraped_at=3.0, waiting=7.0, running=8.0, kv_utilization=0.9, block_size_tokens=16, kv_blocks=100)


def test_missing_gauge_is_unknown_at_once_and_others_count() -> None:
    """Kept under the new scraped_at it would look fresh, and 7 waiting would be believed for ever."""
    got = read('r{kind="run"} 2\nkv 0.5\ncfg{size="16",blocks="100"} 1\n', previous=KNOWN)
    assert got.missing == ("waiting",)
    assert got.metrics == dataclasses.replace(KNOWN, scraped_at=10.0, waiting=None, running=2.0, kv_utilization=0.5)


def test_missing_facts_are_kept_from_the_previous_scrape() -> None:
    """Block size and block count cannot change while a server runs, so their age means nothing."""
    got = read("q 1\n", previous=KNOWN)
    assert got.missing == ("running", "kv_utilization", "block_size_tokens", "kv_blocks")
    assert got.metrics == LoadMetrics(scraped_at=10.0, waiting=1.0, block_size_tokens=16, kv_blocks=100)
    assert metrics("q 1\n").kv_blocks is None


def test_facts_of_a_restarted_server_replace_the_old_ones() -> None:
    got = metrics('cfg{size="32",blocks="7"} 1\n', previous=KNOWN)
    assert (got.block_size_tokens, got.kv_blocks) == (32, 7)


def test_page_without_any_signal_is_a_failed_scrape_even_after_a_good_one() -> None:
    assert read("q_by_reason 1\n", previous=KNOWN) == Reading(None, SIGNALS)


@pytest.mark.parametrize("line", ["", "# TYPE q gauge\n", "q NaN\n", 'q_by_reason{r="x"} 4\n', "q x\n"])
def test_family_that_is_missing_empty_or_unusable_is_unknown_not_zero(line: str) -> None:
    got = read(FULL.replace("q 1\n", line))
    assert got.missing == ("waiting",)
    assert got.metrics is not None
    assert got.metrics.waiting is None


def test_signal_that_the_engine_does_not_have_is_not_missing() -> None:
    table = dataclasses.replace(TABLE, kv_utilization=(), kv_blocks=())
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
    table = dataclasses.replace(TABLE, waiting=(spec("q{priority=2}"),))
    assert metrics('q{priority=""} 5\nq{priority="2"} 3\n', table).waiting == 3.0


def test_newest_timestamp_wins() -> None:
    assert metrics('q{a="1"} 5 1000\nq{a="2"} 7 3000\nq{a="3"} 1 3000\nq{a="4"} 9 2000\n').waiting == 8.0
    assert metrics("q 5 1000\nq NaN 3000\n").waiting == 5.0


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
    table = dataclasses.replace(TABLE, kv_utilization=(spec("kv", per_cent=True),))
    assert metrics(f"kv {value}\n", table).kv_utilization == pytest.approx(share)


@pytest.mark.parametrize("text", ["None", "", "16.0", "-16", "0", "1e3", " 16", "16k", "99999999999"])
def test_label_that_is_no_positive_integer_is_unknown(text: str) -> None:
    got = read(f'q 1\ncfg{{size="{text}",blocks="8"}} 1\n')
    assert got.missing == ("running", "kv_utilization", "block_size_tokens")
    assert got.metrics == LoadMetrics(scraped_at=10.0, waiting=1.0, kv_blocks=8)


def test_facts_may_also_be_gauges() -> None:
    table = dataclasses.replace(TABLE, block_size_tokens=(spec("page_size"),), kv_blocks=(spec("pages"),))
    got = metrics("page_size 64\npages 5000\n", table)
    assert (got.block_size_tokens, got.kv_blocks) == (64, 5000)
    assert metrics("q 1\npage_size 64.5\n", table).block_size_tokens is None


# --- Rule 6: specs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("m", ()),
        ("a:m_2{k=v}", (("k", "v"),)),
        ('m{k=v-1/x,label2="v"}', (("k", "v-1/x"), ("label2", "v"))),
        ('m{ k = "a, b}=\\"c\\\\" , l=2 }', (("k", 'a, b}="c\\'), ("l", "2"))),
        ('m{k=""}', (("k", ""),)),
    ],
)
def test_spec_is_read(text: str, labels: tuple[tuple[str, str], ...]) -> None:
    assert spec(text).family == text.partition("{")[0]
    assert spec(text).labels == labels


def test_empty_spec_disables() -> None:
    assert MetricSpec.parse("") is None


def test_wanted_empty_label_also_matches_an_absent_one() -> None:
    """In this format they are the same thing."""
    series = [Sample({}, 1.0), Sample({"k": ""}, 2.0), Sample({"k": "v"}, 4.0)]
    assert [value for _, value in spec('m{k=""}').select(series)] == [1.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        *("m{a=1", "ma=1}", "m{a}", "m{=1}", "m{a=}", "m{a=1}x", "{a=1}"),
        *("m{}", "m{a=1,}", "m{a=1 b=2}", "m{a=1,a=2}", 'm{a="1}', 'm{a="1""}', "m{9=1}", "m{a==1}"),
        *("9m", "m m", " m", "m\n", "m-x"),
    ],
)
def test_bad_spec_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError) as error:
        MetricSpec.parse(text)
    assert repr(text) in str(error.value)


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=30) | st.text('m{}a=1," \\', max_size=30))
def test_any_text_is_a_spec_or_a_value_error(text: str) -> None:
    try:
        parsed = MetricSpec.parse(text)
    except ValueError:
        return
    assert parsed is None or text.startswith(parsed.family)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*'q{}=", 1\n', "kv", "cfg", "\nq ", "size", "blocks", "NaN", "engine", "priority"])))
def test_any_page_keeps_values_in_range(parts: list[str]) -> None:
    got = read("".join(parts) + "\n", previous=KNOWN).metrics
    if got is not None:
        assert got.waiting is None or got.waiting >= 0
        assert got.kv_utilization is None or 0 <= got.kv_utilization <= 1
