# SPDX-License-Identifier: Apache-2.0
"""Servers that show no metrics, before lbproxy as a user runs it: what it knows of their caches all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock


def endpoints(admin: str) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = httpx.get(f"{admin}/admin/state").json()["endpoints"]
    return shown


def sizes(admin: str) -> list[float]:
    """What each cache is taken to hold."""
    return [one["learned"]["capacity_tokens"] for one in endpoints(admin)]


def all_up(admin: str) -> bool:
    return all(one["health"] == "up" for one in endpoints(admin))


def test_caches_of_servers_without_metrics_are_known_before_the_first_request(tmp_path: Path) -> None:
    """Two SGLangs and a llama.cpp say it elsewhere, and a vLLM, whose metrics nobody may ask for, does not."""
    with (
        mock("--engine", "sglang", "--kv-tokens", "64000", "--speed", "20") as (_, one),
        mock("--engine", "sglang", "--kv-tokens", "128000", "--speed", "20") as (_, two),
        mock("--engine", "llamacpp", "--kv-tokens", "96000", "--max-num-seqs", "4", "--speed", "20") as (_, three),
        mock("--kv-tokens", "160000", "--speed", "20") as (_, four),
        lbproxy(tmp_path, [one, two, three, f"{{url: '{four}', metrics: null}}"]) as (_, url, admin),
    ):
        run(until(lambda: all_up(admin), "all are up"))
        assert sizes(admin) == [64_000, 128_000, 96_000, 2_000_000]
        shown = endpoints(admin)
        assert [one["placed"] for one in shown] == [0, 0, 0, 0]
        assert [one["metrics_age_s"] for one in shown] == [None] * 4
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_a_server_that_is_restarted_with_another_cache_is_known_as_that(tmp_path: Path) -> None:
    with (
        mock("--engine", "sglang", "--kv-tokens", "64000") as (server, url),
        lbproxy(tmp_path, [url], "health: {interval: 100ms, down_interval: 100ms}") as (_, _, admin),
    ):
        run(until(lambda: all_up(admin), "it is up"))
        assert sizes(admin) == [64_000]
        server.stop()
        run(until(lambda: not all_up(admin), "it is gone"))
        with mock("--engine", "sglang", "--kv-tokens", "32000", "--port", url.rpartition(":")[2]):
            run(until(lambda: all_up(admin), "it is back"))
            assert sizes(admin) == [32_000]
