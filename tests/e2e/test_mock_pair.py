# SPDX-License-Identifier: Apache-2.0
"""Simulated servers in processes of their own hand over the KV of prompts, with the options of the command line."""

import httpx

from tests.support.aio import run, until
from tests.support.process import mock

BODY = {"prompt": "Once upon a time. " * 20, "max_tokens": 12, "ignore_eos": True}
PREFILL = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def is_empty(url: str) -> bool:
    """Whether no request has blocks there."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return any("kv_cache_usage_perc{" in line and line.endswith(" 0.0") for line in lines)


def test_one_process_prefills_and_another_decodes() -> None:
    options = ("--speed", "20", "--connector", "nixl", "--role")
    with mock(*options, "prefill", "--kv-lease", "20") as (_, first), mock(*options, "decode") as (_, second):
        whole = httpx.post(f"{second}/v1/completions", json=BODY).json()["choices"][0]["text"]
        params = httpx.post(f"{first}/v1/completions", json=BODY | PREFILL).json()["kv_transfer_params"]
        body = BODY | {"kv_transfer_params": params, "prompt": BODY["prompt"]}
        split = httpx.post(f"{second}/v1/completions", json=body)
        assert split.json()["choices"][0]["text"] == whole
        assert "vllm:nixl_num_descriptors_count" in httpx.get(f"{second}/metrics").text
        run(until(lambda: is_empty(first)))
