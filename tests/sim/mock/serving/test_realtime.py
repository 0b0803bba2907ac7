# SPDX-License-Identifier: Apache-2.0
"""The WebSocket /v1/realtime in both of its dialects."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from lbproxy.sim.mock.apis.fields import Json
from lbproxy.sim.mock.http import MockOptions, MockServer
from tests.sim.mock.serving.served import idle, served


@asynccontextmanager
async def connected(server: MockServer, query: str = "") -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.url}/v1/realtime{query}") as socket,
    ):
        yield socket


async def until(socket: aiohttp.ClientWebSocketResponse, last: str) -> list[Json]:
    """Events up to one of a type."""
    events: list[Json] = []
    while not events or events[-1]["type"] != last:
        events.append(await socket.receive_json())
    return events


def test_a_conversation_in_openais_form() -> None:
    async def test(server: MockServer) -> None:
        async with connected(server, "?model=sim") as socket:
            created = await socket.receive_json()
            assert (created["type"], created["session"]["model"]) == ("session.created", "sim")
            await socket.send_json({"type": "session.update", "session": {"instructions": "Be short."}})
            assert (await socket.receive_json())["type"] == "session.updated"
            texts = []
            for _ in range(2):
                content = [{"type": "input_text", "text": "Hello"}]
                item = {"type": "message", "role": "user", "content": content}
                await socket.send_json({"type": "conversation.item.create", "item": item})
                await socket.send_json({"type": "response.create"})
                events = await until(socket, "response.done")
                deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
                done = events[-1]["response"]
                assert isinstance(done, dict)
                assert done["output"][0]["content"][0]["text"] == "".join(map(str, deltas))
                assert done["usage"]["output_tokens"] == len(deltas)
                texts.append((done["usage"]["input_tokens"], done["usage"]["input_token_details"]["cached_tokens"]))
            # The second turn has the first as its prefix.
            assert texts[1][0] > texts[0][0]
            assert texts[1][1] >= texts[0][0] // 16 * 16

    served(test)


def test_a_transcription_in_vllms_form() -> None:
    async def test(server: MockServer) -> None:
        async with connected(server) as socket:
            assert set(await socket.receive_json()) >= {"type", "id", "created"}
            await socket.send_json({"type": "input_audio_buffer.commit"})
            assert (await socket.receive_json())["code"] == "model_not_validated"
            await socket.send_json({"type": "session.update", "model": "other"})
            assert (await socket.receive_json())["code"] == "model_not_found"
            await socket.send_json({"type": "session.update", "model": "sim"})
            await socket.send_json({"type": "input_audio_buffer.commit"})
            audio = base64.b64encode(b"\1\2" * 8000).decode()
            await socket.send_json({"type": "input_audio_buffer.append", "audio": audio})
            await socket.send_json({"type": "input_audio_buffer.commit", "final": True})
            events = await until(socket, "transcription.done")
            text = "".join(str(one["delta"]) for one in events[:-1])
            assert events[-1]["text"] == text
            assert events[-1]["usage"]

    served(test)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ('{"type":"nothing"}', "unknown_event"),
        ('{"type":"session.update"}', "invalid_event"),
        ('{"type":"input_audio_buffer.append","audio":"!"}', "invalid_audio"),
        ('{"type":"response.create","response":{"max_output_tokens":0}}', "processing_error"),
    ],
)
def test_bad_events_are_refused_and_the_session_goes_on(message: str, code: str) -> None:
    async def test(server: MockServer) -> None:
        async with connected(server) as socket:
            await socket.receive_json()
            await socket.send_str(message)
            assert (await socket.receive_json())["code"] == code
            await socket.send_json({"type": "response.create"})
            await until(socket, "response.done")

    served(test)


def test_close_codes() -> None:
    async def test(server: MockServer) -> None:
        async with connected(server, "?model=other") as socket:
            assert (await socket.receive_json())["code"] == "model_not_found"
            await socket.receive()
            assert socket.close_code == 1008
        async with connected(server) as socket:
            await socket.receive_json()
            await socket.send_bytes(b"x")
            await socket.receive()
            assert socket.close_code == 1003

    served(test)


def test_pings_are_answered_while_a_response_is_written_and_one_that_leaves_aborts_it() -> None:
    async def test(server: MockServer) -> None:
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(f"{server.url}/v1/realtime", autoping=False)
            await socket.receive()
            endless = {"type": "response.create", "response": {"max_output_tokens": 50_000}}
            await socket.send_json(endless)
            await until(socket, "response.output_text.delta")
            await socket.send_json(endless)
            refused = (await until(socket, "error"))[-1]
            assert refused["code"] == "conversation_already_has_active_response"
            await socket.send_json({"type": "response.cancel"})
            await idle(server)
            await socket.send_json(endless)
            await until(socket, "response.created")
            await until(socket, "response.output_text.delta")
            await socket.ping(b"there?")
            kinds: list[aiohttp.WSMsgType] = []
            while not kinds or kinds[-1] != aiohttp.WSMsgType.PONG:
                kinds.append((await socket.receive()).type)
            assert server.driver.engine.gauges().running == 1
            await socket.close()
            await idle(server)

    served(test, speed=1.0)


def test_a_server_that_dies_closes_without_a_word() -> None:
    async def main() -> None:
        server = MockServer(MockOptions())
        await server.start()
        async with connected(server) as socket:
            await socket.receive_json()
            await server.close()
            message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.ERROR)

    asyncio.run(main())
