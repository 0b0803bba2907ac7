# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's SDK sends on routes that need no model, through lbproxy: it arrives as it was sent."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable

import openai
import pytest

from tests.support.aio import run
from tests.support.endpoint import Received, ScriptedEndpoint, answer
from tests.support.pool import card
from tests.support.rig import rig

OBJECT = answer(b'{"id":"made-1","object":"made"}')


async def create_file(client: openai.AsyncOpenAI) -> object:
    return await client.files.create(file=("in.jsonl", b'{"custom_id":"1"}\n'), purpose="batch")


async def create_batch(client: openai.AsyncOpenAI) -> object:
    return await client.batches.create(input_file_id="file-1", endpoint="/v1/chat/completions", completion_window="24h")


async def create_conversation(client: openai.AsyncOpenAI) -> object:
    return await client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])


async def cancel_response(client: openai.AsyncOpenAI) -> object:
    return await client.responses.cancel("resp_1")


def sent(request: Received) -> tuple[str, str, bytes]:
    """The request line, the content type and the body, with a boundary that is the same for all forms."""
    kind = request.field("content-type") or ""
    boundary = re.search(r"boundary=(\S+)", kind)
    if boundary is None:
        return request.line, kind, request.body
    return request.line, kind.replace(boundary[1], "B"), request.body.replace(boundary[1].encode(), b"B")


@pytest.mark.parametrize("models", [["m"], ["m", "n"]], ids=["one model", "two"])
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (create_file, "POST /v1/files HTTP/1.1"),
        (create_batch, "POST /v1/batches HTTP/1.1"),
        (create_conversation, "POST /v1/conversations HTTP/1.1"),
        (cancel_response, "POST /v1/responses/resp_1/cancel HTTP/1.1"),
    ],
    ids=["files.create", "batches.create", "conversations.create", "responses.cancel"],
)
def test_calls_without_a_model_arrive_as_the_sdk_sent_them(
    call: Callable[[openai.AsyncOpenAI], Awaitable[object]], line: str, models: list[str]
) -> None:
    """No model is demanded, which would be a 400, and none is inserted where only one is served."""

    async def main() -> None:
        async with ScriptedEndpoint(OBJECT) as endpoint, rig(endpoint.url) as it:
            it.runtime.report_models(it.endpoints[0].uid, [card(model) for model in models])
            await it.settle()
            for url in (endpoint.url, f"http://127.0.0.1:{it.port}"):
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                    made = await call(client)
                    assert getattr(made, "id", None) == "made-1"
            direct, through = (sent(request) for request in endpoint.requests)
            assert through == direct
            assert through[0] == line
            assert b'name="model"' not in through[2]
            if "json" in through[1] and through[2]:
                assert "model" not in json.loads(through[2])

    run(main())
