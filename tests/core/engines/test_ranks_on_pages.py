# SPDX-License-Identifier: Apache-2.0
"""Pages of servers with data-parallel ranks: the load of each rank alone."""

from __future__ import annotations

import pytest

from lbproxy.core.engines.dialects import ENGINES
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.engines.readings import MAX_RANKS, MAX_SHARED, PageReader
from tests.core.engines.test_readings import WALL_TIME, recorded

PAIR = """vllm:num_requests_waiting{engine="%s",model_name="m"} 1
vllm:num_requests_waiting{engine="%s",model_name="m"} 5
vllm:num_requests_running{engine="%s",model_name="m"} 2
"""


def ranks(page: bytes | str, engine: str = "vllm", reader: PageReader | None = None) -> tuple[LoadMetrics, ...]:
    reader = reader or PageReader(ENGINES[engine], keep_s=0.0)
    text = page if isinstance(page, bytes) else page.encode()
    return reader.read(text, scraped_at=5.0, wall_time=WALL_TIME).ranks


def test_each_rank_has_its_gauges_and_its_blocks() -> None:
    """Recorded: 4 of each run, 6 wait; the page says 120 blocks, the log of each rank 60."""
    got = ranks(recorded("vllm-0.32.0-dp2-load"))
    assert [(one.waiting, one.running, one.kv_blocks, one.block_size_tokens) for one in got] == [(6.0, 4.0, 60, 32)] * 2
    assert [one.work for one in got] == [691.0, 680.0]
    assert [one.lora is not None for one in got] == [True, True], "adapters are named for the server"


def test_ranks_without_gauges_are_seen_all_the_same() -> None:
    """With several API servers vLLM's page has none before the first request."""
    got = ranks(recorded("vllm-0.32.0-dp2-idle"))
    assert [(one.waiting, one.kv_blocks) for one in got] == [(None, 60)] * 2


@pytest.mark.parametrize("name", ["vllm-0.32.0-load-lora-t0", "sglang-0.5.23-load"])
def test_one_engine_has_no_ranks(name: str) -> None:
    assert ranks(recorded(name), name.partition("-")[0]) == ()


def test_a_node_of_several_names_its_ranks_by_their_numbers_among_all() -> None:
    """Hybrid mode: what a request must name is the position, which is that in the result."""
    got = ranks(PAIR % ("11", "9", "11"))
    assert [(one.waiting, one.running) for one in got] == [(5.0, None), (1.0, 2.0)]


def test_sglang_tells_its_ranks_apart_by_another_label() -> None:
    page = "".join(f'sglang:num_running_reqs{{dp_rank="{n}",tp_rank="0"}} {n}\n' for n in range(3))
    assert [one.running for one in ranks(page, "sglang")] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("labels", [("a", "b", "a"), ("0", "-1", "0"), ("0", "1" * 9, "0"), ("0", "01", "0")])
def test_what_is_no_number_is_no_rank(labels: tuple[str, str, str]) -> None:
    assert ranks(PAIR % labels) == ()


def test_so_many_are_no_ranks() -> None:
    page = "".join(f'vllm:num_requests_waiting{{engine="{n}"}} 1\n' for n in range(MAX_RANKS + 1))
    assert ranks(page) == ()
    assert len(ranks(page.rpartition("vllm")[0])) == MAX_RANKS


def test_a_page_with_other_ranks_than_before() -> None:
    reader = PageReader(ENGINES["vllm"], keep_s=100.0)
    assert len(ranks(PAIR % ("0", "1", "0"), reader=reader)) == 2
    assert ranks(PAIR % ("0", "0", "0"), reader=reader) == ()
    assert [one.running for one in ranks(PAIR % ("0", "1", "1"), reader=reader)] == [None, 2.0], "nothing is kept of it"


def test_samples_of_every_rank_are_few() -> None:
    """They are read once for each: 4,000 of them beside 64 ranks took .1 s."""
    ranks = "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(64))
    shared = "".join(f'vllm:num_requests_running{{other="{n}"}} 1\n' for n in range(MAX_SHARED + 1))
    reader = PageReader(ENGINES["vllm"], keep_s=0.0)
    for page, count in ((ranks, 64), (ranks + shared, 0)):
        reading = reader.read(page.encode(), scraped_at=0.0, wall_time=0.0)
        assert len(reading.ranks) == count
        assert reading.metrics is not None
