# SPDX-License-Identifier: Apache-2.0
"""`kv_events` of an endpoint: every form, and everything that it cannot be, with the text that says what to write."""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.publishers import read_publisher
from lbproxy.config.text import ConfigError
from lbproxy.control.discovery.discovery import NO_CERTIFICATES, spec_of


def entry(more: str, url: str = "http://gpu-1:8000") -> str:
    return f"endpoints: [{{url: '{url}', {more}}}]"


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={})
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("written", "normal", "url"),
    [
        ("tcp://GPU-1:5557", "tcp://gpu-1:5557", "tcp://gpu-1:5560"),
        ("tcp://[0:0::1]:5557", "tcp://[::1]:5557", "tcp://[::1]:5560"),
        (":5557", ":5557", "tcp://own:5560"),
        ("bind tcp://*:5557", "bind tcp://*:5557", "tcp://*:5560"),
        ("bind  tcp://10.0.0.9:5557", "bind tcp://10.0.0.9:5557", "tcp://10.0.0.9:5560"),
    ],
)
def test_each_form_leads_to_an_address_for_each_rank(written: str, normal: str, url: str) -> None:
    endpoint = parse(entry(f"kv_events: '{written}'"), environ={}).endpoints[0]
    spec = spec_of(endpoint, "e", NO_CERTIFICATES)
    assert spec.kv_events == normal
    read = read_publisher(normal)
    assert read is not None
    assert read.url("own", 3) == url


NONE = (
    *("5557", "gpu-1:5557", "tcp://gpu-1", "tcp://gpu-1:0", "tcp://gpu-1:65536", "tcp://*:5557", "bind :5557", "bind"),
    *("tcp://1.2.3:5557", "ipc:///tmp/x", "udp://gpu-1:1", "tcp://gpu-1:5557/x", "tcp://a b:5557", ""),
)


@pytest.mark.parametrize("written", NONE)
def test_what_is_none_is_refused(written: str) -> None:
    assert "endpoints[0].kv_events: expected tcp://host:port, :port" in problems(entry(f"kv_events: '{written}'"))


def test_of_a_name_each_endpoint_publishes_on_its_own_host() -> None:
    name = "dns+http://gpus:8000"
    assert parse(entry("kv_events: ':5557', kv_events_replay: ':5657'", name), environ={}).endpoints[0].kv_events
    for wrong in ("tcp://gpu-1:5557", "bind tcp://*:5557"):
        assert "expected :port (on the host of each endpoint)" in problems(entry(f"kv_events: '{wrong}'", name))
    wrong = "kv_events: ':5557', kv_events_replay: 'tcp://gpu-1:5558'"
    assert "kv_events_replay: expected :port (on the host of each endpoint)" in problems(entry(wrong, name))


def test_a_unix_socket_has_no_host() -> None:
    said = problems(entry("kv_events: ':5557'", "unix:/run/vllm.sock"))
    assert "expected a host before the port, since the url is a Unix socket" in said
    assert parse(entry("kv_events: 'tcp://127.0.0.1:5557'", "unix:/run/vllm.sock"), environ={})


def test_a_replay_address_needs_events_and_is_never_bound() -> None:
    assert "kv_events_replay: expected nothing here without kv_events" in problems(entry("kv_events_replay: ':5558'"))
    said = problems(entry("kv_events: ':5557', kv_events_replay: 'bind tcp://*:5558'"))
    assert "kv_events_replay: expected tcp://host:port, or :port" in said


@pytest.mark.parametrize(("events", "replay", "ranks"), [(5557, 5557, 1), (5557, 5558, 2), (5560, 5557, 4)])
def test_ports_of_ranks_must_not_meet_those_of_replays(events: int, replay: int, ranks: int) -> None:
    """vLLM's own defaults, 5557 and 5558, collide with two ranks: the engine itself does not start then."""
    said = problems(entry(f"ranks: {ranks}, kv_events: ':{events}', kv_events_replay: ':{replay}'"))
    assert "(a rank has the port above it by its number)" in said
    far = f"ranks: {ranks}, kv_events: ':{events}', kv_events_replay: ':{events + ranks}'"
    assert parse(entry(far), environ={})


def test_each_rank_needs_a_port() -> None:
    assert "a port that leaves one to each rank" in problems(entry("ranks: 2, kv_events: ':65535'"))


def test_two_endpoints_cannot_have_one_publisher() -> None:
    def two(first: str, second: str) -> str:
        return f"endpoints: [{{url: 'http://a:1', {first}}}, {{url: 'http://b:1', {second}}}]"

    for first, second in (
        ("kv_events: 'tcp://a:5557'", "kv_events: 'tcp://a:5557'"),
        ("kv_events: 'bind tcp://*:5557'", "kv_events: 'bind tcp://10.0.0.1:5557'"),
        ("ranks: 4, kv_events: 'tcp://a:5557'", "kv_events: 'tcp://a:5560'"),
    ):
        assert "endpoints[1].kv_events: expected other ports than endpoints[0] has" in problems(two(first, second))
    assert parse(two("kv_events: ':5557'", "kv_events: ':5557'"), environ={})
    assert parse(two("kv_events: 'tcp://a:5557'", "kv_events: 'bind tcp://*:5557'"), environ={})
