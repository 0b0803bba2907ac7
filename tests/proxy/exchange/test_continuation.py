# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on at another server when its own dies, before simulated servers whose text is always the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.sim.mock.http import MockServer
from lbproxy.sim.mock.mock_options import MockOptions
from tests.support.aio import run, until
from tests.support.rig import Reply, Rig, post, rig

CONTINUE = "x-lbproxy-continue: 1\r\n"
WAYS = ["how=fin at=event", "how=rst at=event", "how=rst at=chunk", "how=rst at=line", "how=fin framing=close"]
TOKENS = (4, 7, 8, 11, 13, 16, 19, 23, 29)
"""After so many each server dies, again and again."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def fleet(*faults: str, more: str = "") -> AsyncIterator[tuple[Rig, list[MockServer]]]:
    """A rig before simulated servers, each with a fault, or none."""
    async with AsyncExitStack() as stack:
        options = [MockOptions(model="m", speed=50, faults=(one,) if one else ()) for one in faults]
        servers = [await stack.enter_async_context(MockServer(one)) for one in options]
        entries = [(one.url, "engine: vllm") for one in servers]
        it = await stack.enter_async_context(rig(*entries, more=f"routing: {{policy: round-robin}}\n{more}"))
        yield it, servers


def asked(path: str, number: int = 0, **fields: object) -> bytes:
    text = f"Tell me something about {number}."
    prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    said = {"model": "m", "stream": True, "max_tokens": 30, "stream_options": {"include_usage": True}}
    return json.dumps(said | prompt | fields).encode()


def read(reply: Reply, path: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and its events."""
    lines = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [one["choices"][0] for one in events if one.get("choices")]
    pieces = [one["delta"].get("content") if path == CHAT else one["text"] for one in choices]
    return "".join(one or "" for one in pieces), events


def check_one(reply: Reply, path: str, whole: Reply) -> None:
    """It is one stream, and says what the undisturbed one said."""
    text, events = read(reply, path)
    expected, undisturbed = read(whole, path)
    assert text == expected
    assert len({(one["id"], one["created"], one["model"]) for one in events}) == 1
    assert reply.body.count(b"data: [DONE]") == 1
    reasons = [one["choices"][0]["finish_reason"] for one in events if one["choices"]]
    assert reasons == [*[None] * (len(reasons) - 1), undisturbed[-2]["choices"][0]["finish_reason"]]
    assert sum("role" in one["choices"][0].get("delta", {}) for one in events if one["choices"]) == (path == CHAT)
    used, expected_use = events[-1]["usage"], undisturbed[-1]["usage"]
    assert used["completion_tokens"] == expected_use["completion_tokens"]
    if "prompt_tokens_details" in used:  # else the last server died after all text, and the prompt is estimated
        assert used["total_tokens"] == expected_use["total_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_where_it_broke(path: str, way: str) -> None:
    async def main() -> None:
        async with fleet("") as (it, _):
            wholes = [await it.ask(post(asked(path, number), path)) for number in TOKENS]
        for tokens, whole in zip(TOKENS, wholes, strict=True):
            async with fleet(*[f"break {way} events={tokens + (path == CHAT)}"] * 2) as (it, _):
                reply = await it.ask(post(asked(path, tokens), path, CONTINUE))
                check_one(reply, path, whole)
                await until(lambda: it.records.requests, "it is recorded")
                (record,) = it.records.requests
                assert (record.outcome, record.usage and record.usage.completion_tokens) == (Outcome.COMPLETED, 30)

    run(main())
