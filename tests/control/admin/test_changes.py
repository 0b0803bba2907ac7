# SPDX-License-Identifier: Apache-2.0
"""What a reload changed, as it is said to whoever asked for it, and in the log."""

from __future__ import annotations

from lbproxy.config.parse import parse
from lbproxy.config.tree import Settings
from lbproxy.control.admin.changes import MAX_CHANGES, changes

SECRET = "0123456789abcdef"
BEFORE = """
endpoints: [http://a:1, {url: http://b:1, name: b}]
flows: {named: {x: {weight: 2}}}
"""


def read(text: str) -> Settings:
    return parse(text, environ={})


def test_each_change_is_a_line_in_the_order_of_the_settings() -> None:
    after = """
admin: null
endpoints: [{url: http://b:1, name: b, weight: 3, tls: {verify: true}}, {url: http://c:1, name: c}]
models: {fast: m}
routing: {policy: random}
flows: {named: {x: {weight: 2, in_flight: 4}}}
health: {interval: 500ms}
"""
    assert changes(read(BEFORE), read(BEFORE)) == []
    assert changes(read(BEFORE), read(after)) == [
        "admin: null, was a mapping",
        "endpoints.b.weight: 3.0, was 1.0",
        "endpoints.c is new",
        "endpoints['a:1'] is gone",
        "models.fast is new",
        "routing.policy: random, was adaptive",
        "flows.named.x.in_flight: 4, was null",
        "health.interval: 0.5, was 2.0",
    ]


def test_a_key_is_called_as_in_the_settings() -> None:
    """`continue` cannot be the name of a field."""
    before, after = (read(f"{BEFORE}models: {{m: {{fallback: [n]{more}}}}}") for more in ("", ", continue: true"))
    assert changes(before, after) == ["models.m.continue: true, was null"]


def test_another_order_of_endpoints_is_told() -> None:
    assert changes(read("endpoints: [http://a:1, http://b:1]"), read("endpoints: [http://b:1, http://a:1]")) == []


def test_no_secret_is_told() -> None:
    text = """
endpoints: [{{url: 'http://a:1', api_key: {0}, metrics: '/m?key={0}'}}]
auth: {{keys: [{{name: k, key: {0}}}]}}
traces: {{endpoint: 'http://t:1', headers: {{a: {0}}}}}
"""
    told = changes(read(text.format(SECRET)), read(text.format(SECRET[::-1])))
    assert told == [
        "endpoints['a:1'].metrics is another",
        "endpoints['a:1'].api_key is another",
        "auth.keys.k.key is another",
        "traces.headers is another",
    ]


def test_of_a_thousand_the_first_are_told() -> None:
    many = ", ".join(f"http://a{number}:1" for number in range(1000))
    assert len(changes(read(BEFORE), read(f"endpoints: [{many}]"))) == MAX_CHANGES
