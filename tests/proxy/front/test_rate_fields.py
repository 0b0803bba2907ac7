# SPDX-License-Identifier: Apache-2.0
"""What clients are told of the limits per minute of their flow, in the words of each API."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import anthropic
import openai
import pytest

from lbproxy.core.capacity.allowance import Allowance, Bounds
from lbproxy.core.queue.flow import told_flow
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.proxy.request.own_responses import rate_fields
from tests.support.aio import run, until
from tests.support.endpoint import Received, ScriptedEndpoint, Wire, answer
from tests.support.rig import post, rig

USED = b'"usage":{"prompt_tokens":700,"completion_tokens":500,"input_tokens":700,"output_tokens":500}}'
CHAT = b'{"id":"c","object":"chat.completion","model":"m","choices":[],' + USED
MESSAGE = b'{"id":"m","type":"message","role":"assistant","model":"m","content":[],"stop_reason":"end_turn",' + USED
PROVIDERS = (
    "x-ratelimit-limit-requests: 9999\r\nX-RateLimit-Remaining-Tokens: 8888\r\nx-ratelimit-reset-other: 7777\r\n"
    "anthropic-ratelimit-requests-remaining: 9999\r\nanthropic-ratelimit-input-tokens-limit: 8888\r\n"
)
LIMITS = "flows: {default: {requests_per_minute: 2, tokens_per_minute: 1000}}"


def fields_of(bounds: Bounds, requests: float, tokens: float, route: str = "chat_completions") -> dict[str, str]:
    allowance = Allowance(bounds, 0.0)
    allowance.take(requests, tokens, 0.0)
    ticket = Ticket(InferenceRequest("r", "m"), 0.0, 0.0, frozenset())
    ticket.flow = told_flow(allowance.rates(0.0))
    lines = rate_fields(ticket, route, 0.0).split("\r\n")
    assert lines.pop() == ""
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(
    ("limit", "used", "left", "reset"),
    [
        (100, 0, "100", "0s"),
        (100_000, 20, "99980", "12ms"),
        (60, 1, "59", "1s"),
        (100, 34, "66", "21s"),
        (100, 100, "0", "1m0s"),
        (100, 600, "0", "6m0s"),
    ],
)
def test_a_reset_is_when_all_of_the_limit_is_there_again(limit: int, used: int, left: str, reset: str) -> None:
    found = fields_of(Bounds(tokens_per_minute=limit), 0.0, used)
    assert found == {
        "x-ratelimit-limit-tokens": str(limit),
        "x-ratelimit-remaining-tokens": left,
        "x-ratelimit-reset-tokens": reset,
    }


def test_messages_have_times_instead_of_durations() -> None:
    found = fields_of(Bounds(requests_per_minute=60), 30.0, 0.0, "messages")
    assert found["anthropic-ratelimit-requests-limit"] == "60"
    assert found["anthropic-ratelimit-requests-remaining"] == "30"
    reset = found["anthropic-ratelimit-requests-reset"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reset)
    assert datetime.fromisoformat(reset).timestamp() <= time.time() + 31.0
    assert len(found) == 3


def test_sdks_see_the_limits_of_their_flow_and_not_those_of_a_provider() -> None:
    """On the 429 too. What a provider says of limits that the flow has not is passed on."""

    async def script(wire: Wire, received: Received) -> None:
        await wire.send(answer(MESSAGE if received.path == "/v1/messages" else CHAT, more=PROVIDERS))

    async def main() -> None:
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url, more=LIMITS) as it:
            url = f"http://127.0.0.1:{it.port}"
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one,
                anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as two,
            ):
                chat = one.chat.completions.with_raw_response
                said: Any = [{"role": "user", "content": "Hi"}]
                found = (await chat.create(model="m", messages=said)).headers
                assert found.get_list("x-ratelimit-limit-requests") == ["2"]
                assert found["x-ratelimit-remaining-requests"] == "1"
                (left,) = found.get_list("x-ratelimit-remaining-tokens")
                assert 900 < int(left) <= 1000
                assert found["x-ratelimit-reset-other"] == "7777"
                assert "anthropic-ratelimit-requests-remaining" not in found
                with pytest.raises(openai.RateLimitError) as refused:
                    await chat.create(model="m", messages=said)
                assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
                messages = two.messages.with_raw_response
                with pytest.raises(anthropic.RateLimitError) as error:
                    await messages.create(model="m", messages=said, max_tokens=9)
                reset = error.value.response.headers["anthropic-ratelimit-tokens-reset"]
                assert datetime.fromisoformat(reset).timestamp() > time.time()
                headers = {"x-lbproxy-flow": "another"}
                asked = await messages.create(model="m", messages=said, max_tokens=9, extra_headers=headers)
                assert asked.headers.get_list("anthropic-ratelimit-requests-remaining") == ["1"]
                assert asked.headers["anthropic-ratelimit-tokens-limit"] == "1000"
                assert "anthropic-ratelimit-input-tokens-limit" not in asked.headers

    run(main())


def test_a_flow_without_such_limits_gets_those_of_the_provider() -> None:
    async def main() -> None:
        more = "flows: {default: {in_flight: 9}}"
        async with ScriptedEndpoint(answer(CHAT, more=PROVIDERS)) as endpoint, rig(endpoint.url, more=more) as it:
            client = await it.connect()
            client.send(post())
            assert (await client.head()).lower().count(b"ratelimit-") == 5

    run(main())


def test_a_head_before_a_response_and_a_page_of_another_origin_have_them() -> None:
    """Its server has said nothing yet."""

    async def main() -> None:
        async def hang(wire: Wire, _: Received) -> None:
            await wire.watch()

        more = f"cors: {{origins: [https://chat.example]}}\n{LIMITS}"
        async with ScriptedEndpoint(hang) as endpoint, rig(endpoint.url, more=more) as it:
            it.front.requests.reading._keepalive_s = 0.1
            it.front.requests.reading._has_keepalive = True
            client = await it.connect()
            client.send(post(b'{"model":"m","stream":true}', more="Origin: https://chat.example\r\n"))
            await until(lambda: endpoint.requests)
            head = (await client.head()).lower()
            assert b"\r\nx-ratelimit-remaining-requests: 1\r\n" in head
            exposed = next(line for line in head.split(b"\r\n") if line.startswith(b"access-control-expose"))
            assert b"x-ratelimit-reset-tokens" in exposed
            assert b"anthropic-ratelimit-requests-remaining" in exposed

    run(main())
