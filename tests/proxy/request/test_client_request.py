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
