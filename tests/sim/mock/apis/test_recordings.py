# SPDX-License-Identifier: Apache-2.0
"""What the simulated server says, field by field against what a real vLLM 0.32 said to the same request."""

from __future__ import annotations

import re
from pathlib import Path

import h11
import httpx
import orjson
import pytest

from lbproxy.sim.mock.http import MockServer
from tests.sim.mock.serving.served import served

FOLDER = Path(__file__).parents[3] / "fixtures" / "http" / "vllm-0.32.0"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "responses-stream": (
        "/v1/responses",
        {"model": "tiny", "input": "Hi", "max_output_tokens": 6, "temperature": 0, "stream": True},
    ),
    "responses-nonstream": (
        "/v1/responses",
        {"model": "tiny", "input": "Hi", "max_output_tokens": 6, "temperature": 0},
    ),
    "anthropic-messages-stream": ("/v1/messages", {**HI, "max_tokens": 6, "stream": True}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "Hello world"}),
    "tokenize-chat": ("/tokenize", {**HI, "return_token_strs": True}),
    "err-missing-prompt-field": ("/v1/chat/completions", {"model": "tiny"}),
    "err-max-tokens-too-big": ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 5000}),
    "err-negative-max-tokens": ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": -3}),
}
VALUES_MAY_DIFFER = {
    *("id", "item_id", "created_at", "text", "delta", "tokens", "token_strs", "count", "sequence_number"),
    *("input_tokens", "total_tokens", "output_index"),
}
"""Ids, times, what the model says, and how its tokenizer counts."""


def recorded(name: str) -> tuple[int, bytes]:
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    client.send(h11.EndOfMessage())
    client.receive_data((FOLDER / f"{name}.response.http").read_bytes())
    client.receive_data(b"")
    status, body = 0, b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
    return status, body


def bodies(text: bytes) -> list[tuple[str, object]]:
    """(event, body) of each event; of a plain body one. Deltas that follow one another are one: their number depends
    on the tokenizer."""
    if not text.startswith(b"event: "):
        return [("", orjson.loads(text))]
    found: list[tuple[str, object]] = []
    for event in text.decode().strip().split("\n\n"):
        match = re.fullmatch(r"event: (\S+)\ndata: (.*)", event)
        assert match
        if not found or match[1] != found[-1][0]:
            found.append((match[1], orjson.loads(match[2])))
    return found


def shape(value: object, name: str = "") -> object:
    """The value, with the order of its fields; what may differ only by its type."""
    if name in VALUES_MAY_DIFFER and not isinstance(value, dict):
        return type(value).__name__
    if isinstance(value, dict):
        return [(key, shape(one, key)) for key, one in value.items()]
    if isinstance(value, list):
        return [shape(one) for one in value]
    return value


@pytest.mark.parametrize("name", REQUESTS)
def test_the_same_fields_in_the_same_order_with_the_same_values(name: str) -> None:
    path, fields = REQUESTS[name]
    status, body = recorded(name)

    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            said = await client.post(path, json=fields)
        assert said.status_code == status
        assert [(event, shape(one)) for event, one in bodies(said.content)] == [
            (event, shape(one)) for event, one in bodies(body)
        ]

    served(test, model="tiny", max_model_len=1024)


def test_numbers_of_events_are_consecutive() -> None:
    async def test(server: MockServer) -> None:
        path, fields = REQUESTS["responses-stream"]
        async with httpx.AsyncClient(base_url=server.url) as client:
            said = await client.post(path, json=fields)
        numbers = [int(one) for one in re.findall(rb'"sequence_number":(\d+)', said.content)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) == 8 + 6

    served(test, model="tiny")
