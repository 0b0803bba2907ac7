# SPDX-License-Identifier: Apache-2.0
"""What `lbproxy check` says of settings that the chosen policy does not read."""

from __future__ import annotations

from typing import get_args

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.policies.ignored import ignored_settings

POLICIES = [name for name in get_args(RoutingSettings.model_fields["policy"].annotation) if name != "weighted"]
BY_WEIGHT = {"adaptive", "least-request", "random", "p2c", "min-ttft"}
COUNTING = {"least-request", "round-robin", "random", "p2c"}
"""They know neither work nor caches."""
WEIGHTS = "endpoints: [{url: 'http://a', weight: 2}, 'http://b']\n"


def ignored(text: str, *found: EndpointSpec) -> list[str]:
    text = text if "endpoints" in text else f"{text}\nendpoints: ['http://a', 'http://b']\n"
    return [key for key, _ in ignored_settings(parse(text, environ={}), found)]


@pytest.mark.parametrize("policy", POLICIES)
def test_weights(policy: str) -> None:
    expected = [] if policy in BY_WEIGHT else ["endpoints[].weight"]
    assert ignored(f"routing: {{policy: {policy}}}\n{WEIGHTS}") == expected


def test_equal_weights_say_nothing_anyway() -> None:
    equal = "endpoints: [{url: 'http://a', weight: 2}, {url: 'http://b', weight: 2}]\n"
    assert ignored(f"routing: {{policy: round-robin}}\n{equal}") == []


def test_weights_of_srv_records_are_weights() -> None:
    found = [EndpointSpec(name=f"e{n}", base_url=f"http://e{n}:80", weight=n) for n in (1, 2)]
    assert ignored("routing: {policy: round-robin}", *found) == ["endpoints[].weight"]
    assert ignored("routing: {policy: least-request}", *found) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_for_policies_that_follow_caches_and_work(policy: str) -> None:
    text = (
        f"routing: {{policy: {policy}, prefix_memory: 100MiB}}\nadmission: {{order: shortest}}\n"
        "state: {file: /tmp/state}\n"
        "endpoints: [{url: 'http://a', kv_cache_tokens: 100000}]\n"
    )
    cached = ["endpoints[].kv_cache_tokens", "routing.prefix_memory", "state.file", "admission.order"]
    assert ignored(text) == (cached if policy in COUNTING else [])


@pytest.mark.parametrize("more", ["tokens_per_day: 9", "requests_per_minute: 9", "wake: true"])
def test_a_state_file_is_for_limits_and_wakes_too(more: str) -> None:
    text = f"routing: {{policy: round-robin}}\nstate: {{file: /tmp/state}}\nendpoints: [{{url: 'http://a', {more}}}]\n"
    assert ignored(text) == []
    assert ignored(text.replace(more, "max_in_flight: 9")) == ["state.file"]


@pytest.mark.parametrize("policy", POLICIES)
def test_holding_back(policy: str) -> None:
    expected = [] if policy == "adaptive" else ["admission.hold"]
    assert ignored(f"routing: {{policy: {policy}}}\nadmission: {{hold: true}}") == expected
    assert ignored(f"routing: {{policy: {policy}}}\nadmission: {{hold: false, order: fcfs}}") == []


@pytest.mark.parametrize(("scorer", "expected"), [("queue", ["routing.prefix_memory"]), ("prefix", [])])
def test_a_mix_of_scorers_is_judged_by_its_scorers(scorer: str, expected: list[str]) -> None:
    assert ignored(f"routing: {{policy: weighted, scorers: {{{scorer}: 1}}, prefix_memory: 100MiB}}") == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_defaults_are_not_reported(policy: str) -> None:
    assert ignored(f"routing: {{policy: {policy}}}") == []
