# SPDX-License-Identifier: Apache-2.0
"""The page, read by prometheus_client's parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.engines.orca import LoadReport, read_report
from lbproxy.sim.engine.engine import EngineGauges
from lbproxy.sim.mock.exposition import Page, load_report, render

GAUGES = EngineGauges(3, 5, 0.25, 1000, 400, 2, 900, 700)


def samples(page: Page) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(render(page).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_current_names_are_those_of_the_vllm_row() -> None:
    page = samples(Page(model="m", kv_blocks=100, ranks=[GAUGES], finished={"stop": 4}))
    who = {"engine": "0", "model_name": "m"}
    assert page["vllm:num_requests_waiting"] == [(who, 3)]
    assert page["vllm:num_requests_running"] == [(who, 5)]
    assert page["vllm:kv_cache_usage_perc"] == [(who, 0.25)]
    assert page["vllm:prefix_cache_queries_total"] == [(who, 1000)]
    assert page["vllm:prefix_cache_hits_total"] == [(who, 400)]
    assert page["vllm:num_preemptions_total"] == [(who, 2)]
    assert page["vllm:prompt_tokens_total"] == [(who, 900)]
    assert page["vllm:generation_tokens_total"] == [(who, 700)]
    assert ({**who, "finished_reason": "stop"}, 4) in page["vllm:request_success_total"]
    [(config, value)] = page["vllm:cache_config_info"]
    assert (config["block_size"], config["num_gpu_blocks"], value) == ("16", "100", 1)


def test_old_names_are_those_of_vllm_0_8() -> None:
    page = samples(Page(model="m", kv_blocks=100, ranks=[GAUGES], old_names=True))
    assert page["vllm:gpu_cache_usage_perc"] == [({"model_name": "m"}, 0.25)]
    assert page["vllm:gpu_prefix_cache_hits_total"] == [({"model_name": "m"}, 400)]
    assert not {"vllm:kv_cache_usage_perc", "vllm:num_requests_waiting_by_reason"} & page.keys()


def test_lag_is_on_the_page() -> None:
    page = samples(Page(model="m", kv_blocks=1, ranks=[GAUGES], lag_max_s=0.5, lag_p99_s=0.25))
    assert page["lbproxy_mock_step_lag_seconds"] == [({"stat": "max"}, 0.5), ({"stat": "p99"}, 0.25)]


def test_model_names_are_escaped() -> None:
    name = 'a"b\\c\nd'
    page = samples(Page(model=name, kv_blocks=1, ranks=[GAUGES]))
    assert page["vllm:num_requests_running"][0][0]["model_name"] == name


def test_adapters_are_named_on_servers_that_have_some() -> None:
    page = samples(Page(model="m", kv_blocks=1, ranks=[GAUGES], max_loras=2, adapters={"a,b": 1.7e9, "": 1.8e9}))
    labels = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "a,b"}
    idle = {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert page["vllm:lora_requests_info"] == [(labels, 1.7e9), (idle, 1.8e9)]
    assert "vllm:lora_requests_info" not in samples(Page(model="m", kv_blocks=1, ranks=[GAUGES]))


def test_the_start_is_on_the_page_of_a_server_that_has_one() -> None:
    """By it a restart is noticed."""
    assert samples(Page(model="m", kv_blocks=1, ranks=[GAUGES], started_at=1.7e9))["process_start_time_seconds"] == [
        ({}, 1.7e9)
    ]
    assert "process_start_time_seconds" not in samples(Page(model="m", kv_blocks=1, ranks=[GAUGES]))


def test_load_reports_have_vllms_words() -> None:
    text, whole = load_report("TEXT", GAUGES), load_report("json", GAUGES)
    assert text == "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25"
    assert whole == 'JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.25}}'
    assert read_report(text.encode()) == read_report(whole.encode()) == LoadReport(3.0, None, 0.25)
    assert load_report("BIN", GAUGES) is None


@pytest.mark.parametrize("caches", [True, False])
def test_whether_prompts_are_cached_is_said(caches: bool) -> None:
    page = samples(Page(model="m", kv_blocks=1, ranks=[GAUGES], prefix_cache=caches))
    [(config, _)] = page["vllm:cache_config_info"]
    assert config["enable_prefix_caching"] == str(caches)
