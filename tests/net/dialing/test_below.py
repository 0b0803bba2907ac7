# SPDX-License-Identifier: Apache-2.0
"""Paths below an endpoint's URL, as the SDKs of providers expect them."""

from __future__ import annotations

import pytest

from lbproxy.net.dialing.above import below


@pytest.mark.parametrize(
    ("base_url", "chat", "health"),
    [
        ("http://gpu-1:8000", "/v1/chat/completions", "/health"),
        ("http://gpu-1:8000/v1", "/v1/chat/completions", "/health"),
        ("http://gpu-1:8000/gpu-1", "/gpu-1/v1/chat/completions", "/gpu-1/health"),
        ("https://api.example.com:443/openai/v1", "/openai/v1/chat/completions", "/openai/health"),
        ("https://api.example.com:443/api/paas/v4", "/api/paas/v4/chat/completions", "/api/paas/health"),
        ("https://g.example:443/v1beta/openai", "/v1beta/openai/chat/completions", "/v1beta/openai/health"),
        ("unix:/run/vllm/v1", "/v1/chat/completions", "/health"),
    ],
)
def test_where_paths_go(base_url: str, chat: str, health: str) -> None:
    assert below(base_url, "/v1/chat/completions") == chat
    assert below(base_url, "/v1/chat/completions?a=/v1/b") == f"{chat}?a=/v1/b"
    assert below(base_url, "/health") == health
