# SPDX-License-Identifier: Apache-2.0
"""What a WebSocket's messages report to have used is what it counts for limits, and in its record."""

from __future__ import annotations

import json

import pytest

from lbproxy.proxy.sockets.frames import Frame, Opcode
from lbproxy.proxy.sockets.served import ServedMessages
from tests.support.aio import run, until
from tests.support.endpoint import ScriptedEndpoint, Wire
from tests.support.rig import Rig, rig
from tests.support.sockets import BINARY, CONT, TEXT, after_switch, close, frame, raw_socket

DELTA = b'{"type":"response.output_text.delta","delta":" \\"usage\\": {\\"input_tokens\\":90000}"}'


@pytest.fixture(autouse=True)
def way() -> str:
    """Upgrades never come by the fast lane."""
    return "aiohttp"


def done(prompt: int, completion: int, text: str = "") -> bytes:
    """As OpenAI's realtime API, and its responses over WebSockets, end a response."""
    used = {"input_tokens": prompt, "output_tokens": completion, "input_tokens_details": {"cached_tokens": 64}}
    return json.dumps({"type": "response.done", "response": {"output": [text], "usage": used}}).encode()


def transcribed(prompt: int, completion: int) -> bytes:
    """As vLLM ends a transcription."""
    used = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return json.dumps({"type": "transcription.done", "text": "a", "usage": used}).encode()


MESSAGES = {
    "one response": ([(TEXT, True, DELTA)] * 30 + [(TEXT, True, done(5000, 40))], 5040),
    "two, of a session that goes on": (
        [(TEXT, True, done(5000, 40)), (TEXT, True, DELTA), (TEXT, True, done(5100, 900)), *[(TEXT, True, DELTA)] * 7],
        5040 + 6000 + 7,
    ),
    "a transcription": (
        [(TEXT, True, b'{"type":"transcription.delta","delta":"a"}'), (TEXT, True, transcribed(700, 9))],
        709,
    ),
    "in fragments": (
        [
            (TEXT, False, done(5000, 40)[:60]),
            (CONT, False, done(5000, 40)[60:100]),
            (CONT, True, done(5000, 40)[100:]),
            (BINARY, False, done(7000, 1)),
            (CONT, True, b""),
        ],
        5040,
    ),
    "larger than a piece": ([(TEXT, True, done(5000, 40, "x" * 200_000))], 5040),
    "none": ([(TEXT, True, DELTA)] * 30, 30),
}


def counted(it: Rig) -> float:
    """Of the endpoint's day, which does not refill while a test runs."""
    state = it.balancer.endpoints.get(it.endpoints[0].uid)
    assert state is not None
    assert state.allowance is not None
    day = state.allowance.use(it.runtime.now()).day
    assert day is not None
    return sum(day.amounts)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(("said", "used"), MESSAGES.values(), ids=MESSAGES)
def test_what_messages_report_counts(said: list[tuple[int, bool, bytes]], used: int, leaves: bool) -> None:
    """Hours of a WebSocket counted as many tokens as it had messages, and its prompts nothing."""

    async def main() -> None:
        async def script(wire: Wire) -> None:
            for opcode, fin, payload in said:
                await wire.send(frame(opcode, payload, fin=fin))
            await wire.send(frame(TEXT, b"that is all"))
            if not leaves:
                await wire.send(close(1000))

        own = "tokens_per_day: 1000000"
        async with ScriptedEndpoint(after_switch(script)) as endpoint, rig((endpoint.url, own)) as it:
            client = await raw_socket(it)
            await client.reader.readuntil(b"that is all")
            if leaves:
                client.writer.transport.abort()
            else:
                client.send(close(1000, masked=True))
            await until(lambda: bool(it.records.requests), "it is over")
            await it.settle()
            rest = 0 if len(said) == 30 else 1
            assert used <= counted(it) <= used + 1 + rest
            usage = it.records.requests[0].usage
            assert (usage is None) is (used == 30)

    run(main())


def test_what_is_generated_is_told_while_it_goes_on() -> None:
    served = ServedMessages()
    for _ in range(3):
        served.note(Frame(Opcode.TEXT, DELTA))
    assert (served.take(), served.take(), served.usage) == (3, 0, None)
    served.note(Frame(Opcode.TEXT, done(5000, 40)))
    assert served.take() == 37, "of 40 tokens three messages were told"
    served.note(Frame(Opcode.TEXT, b'{"type":"rate_limits.updated"}'))
    assert served.usage is not None
    assert (served.usage.prompt_tokens, served.usage.completion_tokens, served.usage.cached_tokens) == (5000, 40, 64)
