# SPDX-License-Identifier: Apache-2.0
"""What real prefill servers hand over, as vLLM 0.32.0 with NIXL was recorded (tests/real/record_apart.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lbproxy.core.responses.usage import read_usage
from lbproxy.proxy.request.legs import KV_PARAMS, NIXL_FIRST, Bodies, first_usage, nixl_second

RECORDED = Path(__file__).parents[2] / "fixtures" / "http" / "vllm-0.32.0-nixl"
ROUTES = {"chat": "chat_completions", "completions": "completions", "responses": "responses", "messages": "messages"}
NAMES = [f"{name}{kind}" for name in ROUTES for kind in ("", "-stream")]
NEEDED = {"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"}
"""By decode."""


def body(name: str) -> bytes:
    return (RECORDED / f"{name}.http").read_bytes().partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_hand_overs_are_complete_and_go_on_verbatim(name: str) -> None:
    returned = body(f"{name}-prefill.response")
    params = nixl_second(returned)
    assert params == json.loads(returned)[KV_PARAMS]
    assert params is not None
    assert params.keys() >= NEEDED
    assert json.loads(body(f"{name}-decode.request"))[KV_PARAMS] == params


@pytest.mark.parametrize("name", NAMES)
def test_the_bodies_of_both_legs_are_those_that_the_servers_took(name: str) -> None:
    sent = json.loads(body(f"{name}-decode.request"))
    params = sent.pop(KV_PARAMS)
    bodies = Bodies(ROUTES[name.removesuffix("-stream")], json.dumps(sent).encode())
    assert json.loads(bodies.first(NIXL_FIRST)) == json.loads(body(f"{name}-prefill.request"))
    assert json.loads(bodies.second(params)) == json.loads(body(f"{name}-decode.request"))


@pytest.mark.parametrize("name", [name for name in NAMES if "stream" not in name])
def test_a_prefill_response_is_no_hand_over_by_decode(name: str) -> None:
    """Nothing that decode returns has parameters; its usage counts the same prompt."""
    assert nixl_second(body(f"{name}-decode.response")) is None
    first, second = first_usage(body(f"{name}-prefill.response")), read_usage(body(f"{name}-decode.response"))
    assert first is not None
    assert second is not None
    assert first.resolved(200.0).prompt_tokens == second.resolved(200.0).prompt_tokens
    assert first.completion_tokens is None
