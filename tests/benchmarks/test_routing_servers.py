# SPDX-License-Identifier: Apache-2.0
"""Servers that somebody else has started (`make bench-gpu SERVERS=...`): what is refused, how loads are found, a page.

Before simulated servers, in a second or two each: what the figures are is not looked at here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.http_routing.client import Call
from benchmarks.routing_real import __main__ as command
from benchmarks.routing_real import load
from benchmarks.routing_real.cells import CELLS, Recorded, chat_body, sized
from benchmarks.routing_real.fleet import UnfitError, look
from benchmarks.routing_real.load import LONGEST, Speed, rate, words_of
from benchmarks.routing_real.results import read
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.workloads.prompts import size

OPTIONS = {
    "one": MockOptions(model="sim", max_model_len=4096, seed=1),
    "two": MockOptions(model="sim", max_model_len=8192, seed=2),
    "other model": MockOptions(model="other"),
    "no metrics": MockOptions(model="sim", engine="sglang"),
    "key": MockOptions(model="sim", provider=True, require_key="secret"),
}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Of simulated servers, by their names in OPTIONS."""
    loop, servers = asyncio.new_event_loop(), {name: MockServer(options) for name, options in OPTIONS.items()}
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for server in servers.values():
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield {name: server.url for name, server in servers.items()}
    for server in servers.values():
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["one"], "at least two servers"),
        (["one", "one"], "at least two servers"),
        (["one", "ftp://box:1"], "is given as http://HOST:PORT"),
        (["one", "http://box:8000/v1"], "is given as http://HOST:PORT"),
        (["one", "http://127.0.0.1:1"], "is the server up"),
        (["one", "other model"], "different models: "),
        (["one", "key"], "without --api-key"),
        (["one", "no metrics"], "/metrics (404) has no vllm:prefix_cache_queries_total"),
    ],
)
def test_servers_that_cannot_be_compared_before_are_refused_in_a_line(
    urls: dict[str, str], names: list[str], why: str
) -> None:
    """Before ten minutes are spent on them."""
    with pytest.raises(UnfitError) as refused:
        look([urls.get(name, name) for name in names], None)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_servers_say_of_themselves(urls: dict[str, str]) -> None:
    servers, facts = look([urls["one"] + "/", urls["two"]], "two cards")
    assert servers.urls == [urls["one"], urls["two"]]
    assert (servers.model, servers.max_model_len, facts["cache_tokens"]) == ("sim", 4096, 27_000 * 16)
    assert "simulated" in facts["hardware"], "whatever the user calls it"


def test_texts_fit_the_models_context_and_speed() -> None:
    """vLLM refuses a prompt that is longer, and a slow GPU would compute nothing else."""
    for limit in (1024, 4096, 32_768):
        words = words_of(Speed(40_000, 1.5), limit, 0.25)
        for cell in CELLS.values():
            made = sized(cell, users=1, words=words, pace=0.25, tokens_per_word=1.5)
            for _, job in Recorded(made, 1).begin(0.0) or ():
                assert 1.5 * size((*job.prompt, job.answer)) < limit - 90
    assert 1.5 * words * LONGEST == pytest.approx(40_000 / 2000 * 0.25 * LONGEST)
    with pytest.raises(UnfitError, match="too short or slow"):
        words_of(Speed(40_000, 1.5), 256, 0.25)


def test_a_run_has_words_that_no_other_had() -> None:
    """Servers go on running: what one router had computed must not be in a cache for the next."""
    (_, job), *_ = Recorded(CELLS["mixed"], 1).begin(0.0) or ()
    one, other = chat_body(job, "m", 1), chat_body(job, "m", 2)
    assert one != other
    assert len(one) == len(other)


def test_the_rate_is_of_the_middle_half() -> None:
    """Nothing comes in the first seconds, and the last responses have servers to themselves."""
    ends = [10.0 + n / 50 for n in range(100)] + [20.0, 30.0]
    calls = [Call(id="0-1", due=0, sent=0, first=1, ended=end, cached_tokens=0, failure=None) for end in ends]
    assert rate(calls) == pytest.approx(50)


@pytest.mark.skipif("LBPROXY_TEST_BENCH" not in os.environ, reason="measures times: by hand, LBPROXY_TEST_BENCH=1")
def test_a_page_of_servers_that_run(
    urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command but for its length: loads are measured, lbproxy runs, the page says before what."""
    for module, name, value in (
        (command, "BENCH", tmp_path),
        (command, "prepare", lambda: None),
        (command, "SHORTEST_S", 1.5),
        (command, "CALIBRATION_S", 30.0),
        (command, "MINUTES", 0.5),
        (load, "STEP_S", 0.6),
        (load, "FULL", 9.9),
    ):
        monkeypatch.setattr(module, name, value)
    line = ["--servers", urls["one"], urls["two"], "--cells", "hot prompt", "--routers", "lbproxy", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["routing_real", *line])
    command.main()
    (row,) = read(tmp_path / "routing-gpu.part.jsonl")
    text = capsys.readouterr().out
    assert row["failures"] == {}
    assert row["summary"]["requests"] > 0
    assert 0.2 < row["summary"]["hit_ratio"] < 1
    assert "on no GPU (they are simulated" in text
    assert "## hot prompt\n" in text
    assert "(0.7 of those with whom the servers are full, at " in text
    assert "## mixed\n" not in text
    assert "servers busy" not in text
