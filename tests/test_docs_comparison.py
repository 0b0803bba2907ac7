# SPDX-License-Identifier: Apache-2.0
"""docs/comparison.md: each claim about lbproxy has a test that is there, each claim about others has its source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.docs import DOCS, ROOT, cells

SECTIONS = {
    part.partition("\n")[0]: part for part in (DOCS / "comparison.md").read_text(encoding="utf-8").split("\n## ")[1:]
}
SECTIONS.pop("What lbproxy does not do")
CLAIMS: dict[str, tuple[str, ...]] = {
    "predicts the cost of a request on each server routing.md": (
        "tests/core/policies/test_adaptive.py::test_the_price_of_a_random_state_is_the_formula",
    ),
    "holds requests while their best server is full routing.md#room": (
        "tests/core/queue/test_held_requests.py::test_what_waits_is_counted_in_lines_and_nothing_stays_behind",
    ),
    "explains each decision admin.md": ("tests/e2e/test_steering.py::test_a_request_can_be_explained",),
    "kills, hangs and drains of servers fail no request that another can serve failures.md": (
        "tests/chaos/test_servers.py::test_t01_one_of_four_is_killed",
        "tests/chaos/test_servers.py::test_t03_one_freezes",
    ),
    "never lets a response that breaks off look complete": (
        "tests/proxy/exchange/test_exchange.py::test_a_stream_that_breaks_never_looks_whole",
    ),
    "lets a stream go on at another server, or another model serve failures.md": (
        "tests/proxy/exchange/test_continuation.py::test_it_goes_on_where_it_broke",
        "tests/e2e/test_continuation_product.py::test_no_stream_breaks_and_each_says_what_it_would_have_said",
        "tests/e2e/test_fallback_product.py::test_a_model_whose_server_died_is_served_by_another_one",
    ),
    "ends the engine's work when a client disconnects": (
        "tests/e2e/test_product.py::test_a_client_that_leaves_ends_the_work_in_the_engine",
    ),
    "shares, priorities, limits and deadlines for API keys fairness.md": (
        "tests/core/queue/test_flows.py::test_weights_are_shares",
        "tests/e2e/test_flows_product.py::test_flows_of_keys_from_the_client_to_the_dashboard",
    ),
    "balances over different engines together, and over servers without metrics engines.md": (
        "tests/e2e/test_all_engines.py::test_a_mixed_pool_follows_its_gauges",
        "tests/e2e/test_without_metrics.py::test_caches_of_servers_without_metrics_are_known_before_the_first_request",
    ),
    "reads prompts of OpenAI's and Anthropic's APIs, and finds stored responses agents.md": (
        "tests/proxy/exchange/test_agents_apis.py::test_the_next_turn_of_a_conversation_returns_home",
        "tests/proxy/exchange/test_agents_apis.py::test_a_thousand_responses_over_four_endpoints_are_each_found_at_their_owner",
    ),
    "forwards bytes unchanged, but for a model's name": (
        "tests/proxy/exchange/test_exchange.py::test_a_request_and_its_answer_pass_unchanged",
        "tests/proxy/request/test_aliases.py::test_only_the_models_name_changes",
    ),
    "other names of models, and splits between models configuration.md#models": (
        "tests/proxy/request/test_aliases.py::test_a_split_over_two_endpoints_keeps_sessions_together",
    ),
    "relays WebSockets realtime.md": ("tests/e2e/test_realtime.py::test_many_websockets_through_one_lbproxy",),
    "keeps LoRA adapters on few servers, and loads them at run time lora.md": (
        "tests/e2e/test_lora_e2e.py::test_an_adapter_is_usable_as_soon_as_it_is_loaded_and_gone_as_soon_as_it_is_unloaded",
    ),
    "makes each data-parallel rank an endpoint ranks.md": (
        "tests/e2e/test_ranks_e2e.py::test_conversations_return_to_their_ranks",
    ),
    "splits requests between prefill and decode servers disaggregation.md": (
        "tests/e2e/test_apart_e2e.py::test_a_split_request_gets_the_response_of_one_whole_server",
        "tests/core/policies/test_split.py::test_a_long_prompt_is_split_and_a_short_one_is_not",
    ),
    "learns from KV events that a cache was cleared kv-events.md": (
        "tests/e2e/test_kv_events_e2e.py::test_a_conversation_leaves_a_server_whose_cache_was_cleared",
    ),
    "overflows to a second cluster or a provider overflow.md": (
        "tests/e2e/test_overflow_e2e.py::test_more_than_the_first_tier_takes_in_time_goes_to_the_provider",
        "tests/e2e/test_overflow_e2e.py::test_while_the_first_tier_fails_in_every_way_no_request_fails_and_private_ones_never_leave",
    ),
    "wakes sleeping servers, and swaps models that share a GPU sleep.md": (
        "tests/e2e/test_sleep_e2e.py::test_two_models_on_one_gpu_are_never_both_awake_and_no_request_is_lost",
        "tests/e2e/test_sleep_e2e.py::test_a_webhook_starts_a_server_that_is_not_there",
    ),
    "has models loaded on demand sleep.md": (
        "tests/e2e/test_models_on_demand.py::test_models_are_loaded_where_there_is_room_and_warm_ones_are_used",
    ),
    "says how many servers each model needs autoscaling.md": (
        "tests/benchmarks/test_autoscaling_bench.py::test_a_fleet_that_follows_grows_and_shrinks",
        "tests/test_docs_autoscaling.py::test_the_autoscaler_of_kubernetes_takes_its_file",
    ),
    "finds servers by DNS and files discovery.md": (
        "tests/e2e/test_dns.py::test_an_address_added_and_removed_under_load",
        "tests/e2e/test_sources.py::test_a_file_changes_under_load",
    ),
    "relays with several processes, decides in one scale.md": (
        "tests/processes/test_together.py::test_a_conversation_finds_its_prompt_whichever_worker_it_comes_through",
    ),
    "several share placements and limits replicas.md": (
        "tests/e2e/test_replicas.py::test_a_limit_of_requests_holds_over_replicas",
        "tests/e2e/test_replicas.py::test_no_client_notices_that_redis_fails",
    ),
    "reloads and upgrades without a failed request, and keeps what it learned operations.md": (
        "tests/e2e/test_operations.py::test_restarts_are_not_noticed",
        "tests/e2e/test_state_file.py::test_the_next_process_knows_what_the_last_one_learned",
    ),
    "metrics with alerts metrics.md, and traces traces.md": (
        "tests/test_prometheus_rules.py::test_every_alert_is_made_to_fire",
        "tests/e2e/test_tracing.py::test_a_clients_trace_goes_through_to_the_spans_of_a_stream",
    ),
}
"""What the page says that lbproxy has, with where it is described: the tests that show it."""
PAGE = re.compile(r"\]\(([a-z-]+\.md)")


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_about_lbproxy_has_tests_that_exist(claim: str) -> None:
    for one in CLAIMS[claim]:
        path, _, name = one.partition("::")
        assert name in functions(path), one


@pytest.mark.parametrize("section", SECTIONS)
def test_a_claim_about_others_has_a_source_and_what_lbproxy_has_is_tested(section: str) -> None:
    """Ours is "no", or leads to a page of something whose tests are named above."""
    claimed = {page for what in CLAIMS for page in re.findall(r"[a-z-]+\.md", what)}
    rows = cells(SECTIONS[section])
    assert rows
    for what, theirs, ours in rows:
        assert "](http" in theirs, f"no source: {what}"
        pages = set(PAGE.findall(ours))
        assert pages or ours.startswith(("no", "HTTP/1.1")), f"{what}: {ours}"
        assert pages <= claimed, f"{what}: {pages - claimed}"


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_says_when_to_choose_them(section: str) -> None:
    """With the row of the first table that leads there."""
    assert re.search(r"\*\*Choose (it|them)\s+instead\*\*", SECTIONS[section])
    anchor = re.sub(r"[^a-z0-9 -]", "", section.lower()).replace(" ", "-")
    assert f"](#{anchor})" in (DOCS / "comparison.md").read_text(encoding="utf-8").partition("\n## ")[0]
