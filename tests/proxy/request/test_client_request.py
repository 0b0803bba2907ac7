# SPDX-License-Identifier: Apache-2.0
"""What an endpoint gets of a client's head: its own name, and its own key instead of the client's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.proxy.request.client_request import ClientRequest, rank_is_gone
from lbproxy.proxy.request.headers import read_request_fields
from lbproxy.proxy.request.routes import find_route

PATH = "/v1/completions"


def head(endpoint: Endpoint, *fields: tuple[bytes, bytes]) -> list[str]:
    read = read_request_fields([(b"Host", b"lb"), *fields])
    request = ClientRequest("POST", PATH, find_route("POST", PATH), read, b"{}", read.credentials)
    return request.head_for(endpoint, "id-1").decode().split("\r\n")


def endpoint(url: str = "http://10.0.0.1:8000", key: str | None = None, tls: Tls | None = None) -> Endpoint:
    secret = None if key is None else ApiKey(key)
    return Endpoint(uid=EndpointUid(1), name="e1", base_url=url, api_key=secret, tls=tls)


CLIENT = [
    (b"AUTHORIZATION", b"Bearer client"),
    (b"X-A", b"1"),
    (b"authorization", b"Basic x"),
    (b"x-authorization", b"2"),
]


def test_without_a_key_the_clients_credentials_go_on() -> None:
    lines = head(endpoint(), *CLIENT)
    assert lines[:3] == ["POST /v1/completions HTTP/1.1", "Host: 10.0.0.1:8000", "Content-Length: 2"]
    assert [line for line in lines if "uthorization" in line.lower()] == [
        "x-authorization: 2",
        "AUTHORIZATION: Bearer client",
        "authorization: Basic x",
    ]


def test_with_a_key_none_of_the_clients_do() -> None:
    lines = head(endpoint(key="sk-1"), *CLIENT)
    assert [line for line in lines if "uthorization" in line.lower()] == [
        "x-authorization: 2",
        "Authorization: Bearer sk-1",
    ]
    assert "X-A: 1" in lines
    assert "Authorization: Bearer sk-1" in head(endpoint(key="sk-1")), "also if the client showed none"


@pytest.mark.parametrize(("tls", "host"), [(Tls(), "10.0.0.1:8443"), (Tls(server_name="vllm.test"), "vllm.test:8443")])
def test_host_is_the_certificates_name(tls: Tls, host: str) -> None:
    lines = head(endpoint("https://10.0.0.1:8443", tls=tls))
    assert f"Host: {host}" in lines
    assert "x-gateway-destination-endpoint: 10.0.0.1:8443" in lines


def test_a_rank_is_named_once_whatever_the_client_says() -> None:
    client = [(b"x-Data-Parallel-RANK", b"7"), (b"X-A", b"1"), (b"X-data-parallel-rank", b"8")]
    lines = head(replace(endpoint(), rank=3), *client)
    assert [line for line in lines if "rank" in line.lower()] == ["X-data-parallel-rank: 3"]
    assert "X-A: 1" in lines
    assert "x-gateway-destination-endpoint: 10.0.0.1:8000" in lines
    assert [line for line in head(endpoint(), *client) if "rank" in line.lower()] == [
        "x-Data-Parallel-RANK: 7",
        "X-data-parallel-rank: 8",
    ], "a server that is no rank gets what the client wants"


@pytest.mark.parametrize(
    ("body", "gone"),
    [
        (b'{"error":{"message":"data_parallel_rank 5 is out of range [0, 1).","type":"BadRequestError"}}', True),
        (b'{"object":"error","message":"routed_dp_rank=5 out of range [0, 2)","code":400}', True),
        (b'{"error":{"message":"max_tokens is out of range"}}', False),
        (b'{"error":{"message":"data_parallel_rank is not known"}}', False),
        (b'{"error":{"message":"bad `user`: data_parallel_rank 5 is out of range [0, 1)."}}', False),
        (b'{"error":{"message":"bad","param":"data_parallel_rank 5 is out of range"}}', False),
        (b'["data_parallel_rank 5 is out of range"]', False),
        (b"data_parallel_rank is out of range" + b" " * 5000, False),
    ],
)
def test_a_rank_that_is_refused(body: bytes, gone: bool) -> None:
    assert rank_is_gone(replace(endpoint(), rank=5), body) is gone
    assert not rank_is_gone(endpoint(), body), "who named a rank is the client"


ELSEWHERE = replace(endpoint(), tier=2)
PASSES = {
    "accept": "text/event-stream",
    "content-type": "application/json",
    "content-language": "en",
    "user-agent": "sdk/1",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "a",
    "openai-beta": "b",
    "idempotency-key": "c",
}
STAYS = [
    *(
        "Cookie",
        "api-key",
        "x-goog-api-key",
        "Ocp-Apim-Subscription-Key",
        "X-Amzn-Oidc-Data",
        "X-Auth-Request-Access-Token",
    ),
    *("Cf-Access-Jwt-Assertion", "X-Goog-Iap-Jwt-Assertion", "X-Ms-Token-Aad-Access-Token", "X-Amz-Security-Token"),
    *("Proxy-Authorization", "X-Vault-Token", "X-Gitlab-Token", "Referer", "Origin", "Forwarded", "X-Forwarded-For"),
    *("X-Real-Ip", "True-Client-Ip", "Cf-Connecting-Ip", "X-Client-Ip", "X-Envoy-External-Address", "Fastly-Client-Ip"),
    *("X-Session-Id", "Session-Id", "X-Claude-Code-Session-Id", "X-Lbproxy-Flow", "X-Lbproxy-Tier", "From", "Dnt"),
    *("Accept-Language", "Accept-Encoding", "X-Data-Parallel-Rank", "OpenAI-Organization", "X-Stainless-Os", "X-New"),
]


def names(lines: list[str]) -> set[str]:
    return {line.partition(":")[0].lower() for line in lines[1:] if line}


def test_a_provider_gets_what_its_api_needs_and_nothing_else_of_a_client() -> None:
    """It was a list of what must not pass: eleven kinds of credentials and eight of addresses were not on it."""
    client = [(name.title().encode(), value.encode()) for name, value in PASSES.items()]
    client += [(name.encode(), b"1") for name in STAYS]
    lines = head(ELSEWHERE, *client)
    assert names(lines) == {"host", "content-length", "x-request-id", *PASSES}
    for name, value in PASSES.items():
        assert f"{name.title()}: {value}" in lines
    assert {name.lower() for name in STAYS} - {"proxy-authorization", "x-lbproxy-flow", "x-lbproxy-tier"} - {
        *("forwarded", "x-forwarded-for", "x-real-ip")
    } <= names(head(endpoint(), *client)), "on tier 1 all is as it was"


def test_more_of_them_by_the_settings() -> None:
    client = [(b"OpenAI-Organization", b"org-1"), (b"X-New", b"1"), (b"Cookie", b"a=b")]
    lines = head(replace(ELSEWHERE, forward_headers=("openai-organization", "cookie")), *client)
    assert names(lines) == {"host", "content-length", "x-request-id", "openai-organization", "cookie"}


def test_long_heads_are_sorted_too() -> None:
    client = [(b"X-A%d" % n, b"1" * 200) for n in range(60)]
    assert names(head(ELSEWHERE, *client)) == {"host", "content-length", "x-request-id"}


def test_credentials_go_on_only_where_nobody_else_has_a_key_for_it() -> None:
    client = [(b"Authorization", b"Bearer client"), (b"x-api-key", b"client")]
    assert {"Authorization: Bearer client", "x-api-key: client"} <= {*head(ELSEWHERE, *client)}
    lines = head(replace(ELSEWHERE, api_key=ApiKey("sk-1")), *client)
    assert [line for line in lines if "client" in line or "sk-1" in line] == ["Authorization: Bearer sk-1"]


def test_of_the_way_of_a_request_a_provider_sees_lbproxys_alone() -> None:
    """Two that overflow to each other notice by it."""
    ours = "1.1 lbproxy (0123456789ab)"
    lines = head(ELSEWHERE, (b"Via", b"1.1 proxy.corp.example, %b, 1.1 squid" % ours.encode()), (b"Via", b"1.0 fred"))
    assert [line for line in lines if line.startswith("Via")] == [f"Via: {ours}"]


def test_a_rank_of_a_second_cluster_is_still_named() -> None:
    lines = head(replace(ELSEWHERE, rank=1), (b"X-Data-Parallel-Rank", b"7"))
    assert [line for line in lines if "rank" in line.lower()] == ["X-data-parallel-rank: 1"]


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("?api-key=s", ""),
        ("?api-version=1&api_key=s", "?api-version=1"),
        ("?key=s&model=m", "?model=m"),
        ("?access%5Ftoken=s&beta=true", "?beta=true"),
        ("?X-Amz-Signature=s&X-Amz-Credential=c&x=1", "?x=1"),
        ("?subscription-key=s&KEY=s&a=1&sig=2", "?a=1"),
        ("?limit=20&order=desc&include[]=key&after=msg_1", "?limit=20&order=desc&include[]=key&after=msg_1"),
        ("?max_tokens=3", "?max_tokens=3"),
    ],
)
def test_a_key_in_the_query_stays_here(query: str, kept: str) -> None:
    read = read_request_fields([(b"Host", b"lb")])
    asked = ClientRequest("GET", PATH + query, find_route("POST", PATH), read, b"")
    assert asked.head_for(ELSEWHERE, "id").split(b" ")[1].decode() == PATH + kept
    assert asked.head_for(endpoint(), "id").split(b" ")[1].decode() == PATH + query


@pytest.mark.parametrize("tier", [1, 2])
def test_a_bound_of_tiers_goes_with_the_request(tier: int) -> None:
    """An endpoint that is an lbproxy sent to a provider what was not to leave."""
    read = read_request_fields([(b"Host", b"lb"), (b"x-lbproxy-tier", b"7")])
    asked = ClientRequest("POST", PATH, find_route("POST", PATH), read, b"{}")
    there = replace(endpoint(), tier=tier)
    assert b"x-lbproxy-tier" not in asked.head_for(there, "id"), "a client's own goes no further"
    assert asked.head_for(there, "id", max_tier=2).count(b"x-lbproxy-tier: 2\r\n") == 1
    assert b"x-lbproxy-tier" not in asked.head_for(there, "id", max_tier=9)
