# SPDX-License-Identifier: Apache-2.0
"""Settings of servers that sleep: what is accepted, and what is said of what is not."""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse, without_secrets
from lbproxy.control.discovery.discovery import NO_CERTIFICATES, spec_of
from lbproxy.core.endpoints.endpoint import LoadSpec
from tests.config.reading import only_problem


def entry(keys: str, more: str = "") -> str:
    return f"endpoints:\n  - {{url: http://gpu-1:8000, {keys}}}\n{more}"


def test_an_endpoint_does_not_sleep_unless_it_is_said() -> None:
    settings = parse("endpoints: [http://gpu-1:8000]", environ={})
    assert spec_of(settings.endpoints[0], "e", NO_CERTIFICATES).sleep is None


def test_all_keys_reach_the_balancer() -> None:
    hook = "cold_start: {url: 'https://h/x', token: t0k}"
    keys = f"wake: true, sleep_after: 10m, sleep_level: 2, host: box, models: [m], {hook}"
    settings = parse(entry(keys, "hosts: {box: {awake: 2, min_awake: 5s}}\n"), environ={})
    sleep = spec_of(settings.endpoints[0], "e", NO_CERTIFICATES).sleep
    assert sleep is not None
    assert sleep.cold_start is not None
    assert sleep.cold_start.token is not None
    assert (sleep.wake, sleep.after_s, sleep.level, sleep.host) == (True, 600.0, 2, "box")
    assert (sleep.cold_start.url, sleep.cold_start.timeout_s) == ("https://h/x", 600.0)
    assert (settings.balancing.hosts["box"].awake, settings.balancing.hosts["box"].min_awake) == (2, 5.0)
    assert "t0k" not in str(without_secrets(settings))


def test_how_many_models_fit_reaches_the_balancer() -> None:
    def loading(keys: str) -> LoadSpec:
        return spec_of(parse(entry(keys), environ={}).endpoints[0], "e", NO_CERTIFICATES).loading

    assert loading("max_loaded_models: 2, keep_loaded: [a]") == LoadSpec(2, frozenset({"a"}))
    sizes = ("a", 1 << 30), ("org/qwen3:8b", 2 << 30)
    assert loading("memory: 2GiB, model_memory: {a: 1GiB, org/qwen3:8b: 2GiB}") == LoadSpec(2 << 30, sizes=sizes)
    assert loading("memory: 2GiB") == LoadSpec(1), "each takes all of it"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("sleep_after: 10m", "sleep_after: expected null, unless wake is true"),
        ("wake: true, sleep_after: 10ms", "sleep_after: expected a duration"),
        ("wake: true, sleep_level: 3", "sleep_level: expected 1 or 2"),
        ("host: box", "cold_start: expected a webhook, or wake: true, with host"),
        ("wake: true, host: 'a b'", "host: expected 1 to 64 letters"),
        ("wake: true, role: prefill, connector: nixl", "wake: expected false with role prefill or decode"),
        ("cold_start: 'http://h/'", "cold_start: expected null, unless models names"),
        ("models: [m], cold_start: 'ftp://h/'", "cold_start.url: expected http://host:port/path"),
        ("models: [m], cold_start: 'http://h:0/'", "cold_start.url: expected http://host:port/path"),
        ('models: [m], cold_start: "http://h/\\r\\nX: y"', "cold_start.url: expected http://host:port/path"),
        ("models: [m], health: null, cold_start: 'http://h/'", "cold_start: expected null, unless the endpoint is one"),
        ("models: [m], cold_start: {url: 'http://h/', token: 'a b'}", "cold_start.token: expected 1 to 1024"),
        ("models: [m], cold_start: {url: 'http://h/', timeout: 1d}", "cold_start.timeout: expected a duration"),
        ("max_loaded_models: 2, memory: 24GiB", "memory: expected nothing here beside max_loaded_models"),
        ("model_memory: {m: 8GiB}", "model_memory: expected nothing here without memory"),
        ("memory: 24GiB, model_memory: {m: 8GB}", "model_memory.m: expected a size"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: str, said: str) -> None:
    assert only_problem(entry(keys)).startswith(f"endpoints[0].{said}")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("{box: {awake: 0}}", "hosts.box.awake: expected a whole number from 1"),
        ("{box: {min_awake: 0s}}", "hosts.box.min_awake: expected a duration"),
        ("{'a b': {}}", "hosts, line 3: expected a plain word"),
        ("{box: {wake: 1}}", "hosts.box.wake: "),
    ],
)
def test_hosts_are_checked(hosts: str, said: str) -> None:
    assert only_problem(entry("wake: true, host: box", f"hosts: {hosts}\n")).startswith(said)


def test_the_addresses_of_a_name_can_sleep_but_not_be_started() -> None:
    text = "endpoints: [{{url: 'dns+http://gpu:8000', {}}}]"
    assert parse(text.format("wake: true"), environ={}).endpoints[0].wake
    assert "cold_start: expected null" in only_problem(text.format("models: [m], cold_start: 'http://h/'"))
