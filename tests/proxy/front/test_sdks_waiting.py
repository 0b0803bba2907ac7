# SPDX-License-Identifier: Apache-2.0
"""What the SDKs of OpenAI and Anthropic make of signs of life before a stream, and of an error after them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.support.aio import run
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk
from tests.support.rig import rig

CHAT = [{"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Hello"}}]}]
TEXT = [{"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "Hello"}]}]
RESPONSE = [{"type": "response.output_text.delta", "delta": "Hello", "item_id": "i", "sequence_number": 1}]
MESSAGE: list[dict[str, Any]] = [
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "message_stop"},
]


class Sdks(NamedTuple):
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def ask(self, api: str) -> list[Any]:
        """All that a stream of this API has."""
        said: Any = [{"role": "user", "content": "Hi"}]
        stream: Any
        if api == "chat":
            stream = await self.openai.chat.completions.create(model="m", messages=said, stream=True)
        elif api == "completions":
            stream = await self.openai.completions.create(model="m", prompt="Hi", stream=True)
        elif api == "responses":
            stream = await self.openai.responses.create(model="m", input="Hi", stream=True)
        else:
            stream = await self.anthropic.messages.create(model="m", messages=said, max_tokens=9, stream=True)
        return [one async for one in stream]


EVENTS: dict[str, list[dict[str, Any]]] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": RESPONSE,
    "messages": MESSAGE,
}


def stream_of(api: str) -> bytes:
    named = api in {"responses", "messages"}
    body = "".join((f"event: {one['type']}\n" if named else "") + f"data: {json.dumps(one)}\n\n" for one in EVENTS[api])
    end = "" if named else "data: [DONE]\n\n"
    return STREAM_HEAD + chunk(f"{body}{end}".encode()) + LAST


@asynccontextmanager
async def sdks(response: bytes) -> AsyncIterator[Sdks]:
    """Of a server that responds when its clients have had some signs of life."""

    async def late(wire: Wire, _: Received) -> None:
        await asyncio.sleep(0.35)
        await wire.send(response)

    async with ScriptedEndpoint(late) as endpoint, rig(endpoint.url) as it:
        it.front.requests.reading._keepalive_s = 0.1
        it.front.requests.reading._has_keepalive = True
        url = f"http://127.0.0.1:{it.port}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as two,
        ):
            yield Sdks(one, two)


@pytest.mark.parametrize("api", EVENTS)
def test_signs_of_life_are_no_events(api: str) -> None:
    async def main() -> None:
        async with sdks(stream_of(api)) as them:
            got = await them.ask(api)
            assert [one.model_dump(exclude_unset=True) for one in got] == EVENTS[api]

    run(main())


REFUSALS = {
    "400": (answer(b'{"error":{"message":"too long","type":"t","code":400}}', status=400), "too long"),
    "503": (answer(b"{}", status=503), "status 503"),
    "JSON": (answer(b'{"choices":[]}'), "no event stream"),
}


@pytest.mark.parametrize("api", EVENTS)
@pytest.mark.parametrize("how", REFUSALS)
def test_an_error_after_them_is_raised(how: str, api: str) -> None:
    response, message = REFUSALS[how]

    async def main() -> None:
        async with sdks(response) as them:
            with pytest.raises((openai.APIError, anthropic.APIError), match=message):
                await them.ask(api)

    run(main())
