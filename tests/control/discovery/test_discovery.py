# SPDX-License-Identifier: Apache-2.0
"""Settings become endpoints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lbproxy.config.parse import parse, with_endpoints
from lbproxy.config.text import ConfigError
from lbproxy.control.discovery.discovery import Discovery
from lbproxy.control.discovery.dns_answers import EMPTY, DnsAnswer, Lookup, answer
from lbproxy.control.discovery.known_names import KnownName
from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.endpoints.endpoint import EndpointSpec
from tests.support.aio import run
from tests.support.certificates import CA, OTHER_CA

TEXT = """
endpoints:
  - http://gpu-1:8000
  - {url: "http://gpu-2:8000", name: two, engine: vllm, metrics: /load, health: null, weight: 2.5, api_key: sk-1,
     kv_cache_tokens: 307200}
  - {url: "https://gpu-3", models: [a, b], tls: {server_name: three.test}}
"""


def test_the_settings_endpoints_keep_their_order_and_every_key() -> None:
    assert Discovery(parse(TEXT, environ={}), random.Random(1)).endpoints() == [
        EndpointSpec(name="gpu-1:8000", base_url="http://gpu-1:8000", engine="auto", metrics="auto", health="/health"),
        EndpointSpec(
            name="two",
            base_url="http://gpu-2:8000",
            engine="vllm",
            metrics="/load",
            health=None,
            weight=2.5,
            kv_cache_tokens=307_200,
            api_key=ApiKey("sk-1"),
        ),
        EndpointSpec(
            name="gpu-3:443", base_url="https://gpu-3:443", models=("a", "b"), tls=Tls(server_name="three.test")
        ),
    ]


def test_of_endpoints_that_stay_as_they_are_nothing_is_made_anew() -> None:
    """One that registers beside 1,000 others took 37 ms, 11 of them for the specs of the others."""
    settings = parse(TEXT, environ={})
    discovery = Discovery(settings, random.Random(1))
    before = discovery.endpoints()
    other = {"url": "http://gpu-2:8000", "name": "other"}
    grown = with_endpoints(settings, [settings.endpoints[2], other, settings.endpoints[0]], source="test")

    async def change() -> None:
        third, second, first = (await discovery.under(grown)).endpoints()
        assert (first is before[0], third is before[2]) == (True, True)
        assert second == EndpointSpec(name="other", base_url="http://gpu-2:8000")

    run(change())


def test_other_addresses_beside_the_same_names_need_no_other_discovery() -> None:
    """An endpoint that registers had all names resolved anew, and all loops that follow them."""
    settings = parse(TEXT + "  - dns+http://localhost:9\n", environ={})
    discovery = Discovery(settings, random.Random(1))
    before, (name,) = discovery.endpoints(), discovery.names
    first, *rest = settings.endpoints
    new = with_endpoints(settings, [*rest, "http://new"], source="test")
    assert discovery.readdress(new)
    assert [one.name for one in discovery.endpoints()] == ["two", "gpu-3:443", "new:80"]
    assert (discovery.endpoints()[0] is before[1], discovery.names[0] is name) == (True, True)
    for others in ([*rest, "dns+http://other"], [first]):
        assert not discovery.readdress(with_endpoints(new, others, source="test"))
    assert [one.name for one in discovery.endpoints()] == ["two", "gpu-3:443", "new:80"]


def test_certificates_are_read_once_each_and_part_of_the_endpoint(tmp_path: Path) -> None:
    """So that a reload after a change of the file makes new connections."""
    (tmp_path / "ca.pem").write_text(CA.read_text())
    text = "endpoints: [{url: 'https://a', tls: {ca: ca.pem}}, {url: 'https://b', tls: {ca: ca.pem}}, 'https://c']"
    settings = parse(text, environ={}, folder=str(tmp_path))
    discovery = Discovery(settings, random.Random(1))
    first, second, third = discovery.endpoints()
    assert first.tls == second.tls == Tls(CA.read_text())
    assert third.tls == Tls()
    (tmp_path / "ca.pem").write_text(OTHER_CA.read_text())
    assert discovery.endpoints()[0] == first

    async def reload() -> None:
        successor = await discovery.under(settings)
        assert successor.endpoints()[0].tls == Tls(OTHER_CA.read_text())

    run(reload())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "it cannot be read: no such file or directory"),
        ("", "it holds no certificates in PEM form"),
        ("-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n", "it holds no certificates in PEM form"),
        ("#" * (4 << 20) + "#", "it is larger than 4 MiB"),
    ],
    ids=["absent", "empty", "garbage", "huge"],
)
def test_bad_certificates_are_a_problem_of_the_settings(tmp_path: Path, content: str | None, why: str) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    text = "endpoints: ['http://x', {url: 'https://a', tls: {ca: ca.pem}}]"
    settings = parse(text, environ={}, folder=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        Discovery(settings, random.Random(1))
    (problem,) = error.value.problems
    assert problem.startswith(f"endpoints[1].tls.ca: expected a file of certificates, but {why}")
    assert problem.endswith(f"got '{tmp_path}/ca.pem'")


def test_the_addresses_of_a_name_must_have_its_certificate() -> None:
    text = "endpoints: [{url: 'dns+https://VLLM.test.:8443'}, {url: 'dns+https://b', tls: {server_name: c.test}}]"
    discovery = Discovery(parse(text, environ={}), random.Random(1))
    for name in discovery.names:
        assert isinstance(name, KnownName)
        name.hear(Lookup(answer(["10.0.0.1"]), DnsAnswer(EMPTY)), tuple)
    assert [(one.base_url, one.tls) for one in discovery.endpoints()] == [
        ("https://10.0.0.1:8443", Tls(server_name="vllm.test")),
        ("https://10.0.0.1:443", Tls(server_name="c.test")),
    ]
