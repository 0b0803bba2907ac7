# SPDX-License-Identifier: Apache-2.0
"""Roles, connectors and the rule for splitting: in the settings, in endpoint files, of DNS names."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from lbproxy.config.parse import json_schema, parse, parse_endpoints, without_secrets
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.text import ConfigError
from lbproxy.control.discovery.discovery import NO_CERTIFICATES, MemberSpecs, spec_of
from lbproxy.control.discovery.known_names import NameMember
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.handover import CONNECTORS, Role

ENTRY = "role: prefill, connector: mooncake, bootstrap_port: 9100"


def entry(keys: str, url: str = "http://10.0.0.1:8000") -> EndpointSettings:
    (one,) = parse(f"endpoints: [{{url: '{url}', {keys}}}]", environ={}).endpoints
    return one


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, environ={})
    return str(caught.value)


def handed_over(spec: EndpointSpec) -> tuple[Role | None, str | None, int | None]:
    return spec.role, spec.connector, spec.bootstrap_port


def test_an_entry_has_a_role_a_connector_and_a_port() -> None:
    one = entry(ENTRY)
    assert handed_over(spec_of(one, one.name, NO_CERTIFICATES)) == (Role.PREFILL, "mooncake", 9100)
    one = entry("weight: 1")
    assert handed_over(spec_of(one, one.name, NO_CERTIFICATES)) == (None, None, None), "the engine decides"
    one = entry("role: both")
    assert handed_over(spec_of(one, one.name, NO_CERTIFICATES)) == (Role.BOTH, None, None)


def test_an_endpoint_with_its_own_name_of_the_model_serves_whole_requests() -> None:
    said = problem("endpoints: [{url: 'http://10.0.0.1:8000', models: [m], model: its-m, role: prefill}]")
    assert "endpoints[0].role" in said
    assert "beside `model`" in said
    assert entry("models: [m], model: its-m, role: both").model == "its-m"


def test_members_of_a_name_have_those_of_its_entry() -> None:
    one = entry(ENTRY, "dns+http://prefill.test:8000")
    members = [
        MemberSpecs(one, NO_CERTIFICATES)(NameMember(f"10.0.0.{n}:8000", 1.0, "prefill.test"), ()) for n in (1, 2)
    ]
    assert [handed_over(member) for member in members] == [(Role.PREFILL, "mooncake", 9100)] * 2


def test_an_endpoint_file_has_the_same_keys() -> None:
    settings = parse("endpoints: ['file:fleet.yaml']", environ={})
    decode = "- {url: 'http://10.0.0.2:8000', role: decode, connector: mooncake}"
    text = f"- {{url: 'http://10.0.0.1:8000', {ENTRY}}}\n{decode}\n"
    found = parse_endpoints(text, environ={}, source="fleet.yaml", folder="", settings=settings)
    assert [(one.role, one.connector) for one in found] == [("prefill", "mooncake"), ("decode", "mooncake")]
    with pytest.raises(ConfigError, match="role"):
        parse_endpoints(text.replace("decode", "decoder"), environ={}, source="f", folder="", settings=settings)
    assert "only url and name with a file" in problem(f"endpoints: [{{url: 'file:fleet.yaml', {ENTRY}}}]")


@pytest.mark.parametrize("connector", CONNECTORS)
def test_every_connector_can_be_named(connector: str) -> None:
    one = entry(f"role: decode, connector: {connector}")
    assert spec_of(one, one.name, NO_CERTIFICATES).connector == connector


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("role: prefil", "prefill"),
        ("role: [prefill]", "role"),
        ("role: null", "role"),
        ("role: prefill, connector: nix", "nixl"),
        ("role: both, connector: nixl", "unless role is prefill or decode"),
        ("connector: nixl", "unless role is prefill or decode"),
        ("role: decode, connector: sglang, engine: vllm", "a connector of vllm"),
        ("role: decode, connector: nixl, engine: sglang", "a connector of sglang"),
        ("role: prefill, bootstrap_port: 0", "bootstrap_port"),
        ("role: prefill, bootstrap_port: 65536", "bootstrap_port"),
        ("role: prefill, bootstrap_port: true", "bootstrap_port"),
        ("rolle: prefill", "did you mean role"),
    ],
)
def test_what_is_wrong_is_said(keys: str, why: str) -> None:
    said = problem(f"endpoints: [{{url: 'http://10.0.0.1:8000', {keys}}}]")
    assert why in said


@pytest.mark.parametrize(
    ("rule", "above"), [("priced", -1.0), ("always", 0.0), ("never", inf), ("4000", 4000.0), ("1", 1.0)]
)
def test_the_rule_for_splitting(rule: str, above: float) -> None:
    settings = parse(f"endpoints: ['http://10.0.0.1:8000']\nrouting: {{split: {rule}}}", environ={})
    assert settings.routing.split == above


@pytest.mark.parametrize("rule", ["sometimes", "0", "-1", "1.5", "true", "null", "[always]", ".inf", ".nan", "1e99"])
def test_a_rule_that_is_none(rule: str) -> None:
    said = problem(f"endpoints: ['http://10.0.0.1:8000']\nrouting: {{split: {rule}}}")
    assert "routing.split" in said
    assert "priced, always, never" in said


def test_the_schema_knows_them() -> None:
    text = json.dumps(json_schema())
    for word in ("bootstrap_port", "shared-storage", '"prefill"', '"never"'):
        assert word in text


@pytest.mark.parametrize("rule", ["priced", "always", "never", "4000"])
def test_the_settings_are_shown_as_json(rule: str) -> None:
    """JSON has no infinity."""
    settings = parse(f"endpoints: [{{url: 'http://10.0.0.1:8000', {ENTRY}}}]\nrouting: {{split: {rule}}}", environ={})
    shown: dict[str, Any] = without_secrets(settings)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
