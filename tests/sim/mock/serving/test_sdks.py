# SPDX-License-Identifier: Apache-2.0
"""The server as the SDKs of OpenAI and Anthropic see it, on every API that they have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam, ToolParam
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.responses import ResponseInputParam
from openai.types.responses import ToolParam as ResponseTool
from pydantic import BaseModel

from lbproxy.sim.mock.http import MockServer
from tests.sim.mock.serving.served import idle, served

SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: ChatCompletionToolUnionParam = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSE_TOOL: ResponseTool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
ANTHROPIC_TOOL: ToolParam = {"name": "weather", "input_schema": SCHEMA}
LONG = "Tell me a long story. " * 40


@asynccontextmanager
async def sdk(server: MockServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def claude(server: MockServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_responses_streamed_say_what_others_say() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            whole = await client.responses.create(model="sim", input="Hello")
            assert whole.output_text
            assert (whole.status, whole.object, whole.id[:5]) == ("completed", "response", "resp_")
            events = [one async for one in await client.responses.create(model="sim", input="Hello", stream=True)]
            assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
            last = events[-1]
            assert last.type == "response.completed"
            assert last.response.output_text == whole.output_text
            assert last.response.usage
            assert last.response.usage.output_tokens == len(events) - 8
            cut = await client.responses.create(model="sim", input="Hello", max_output_tokens=3)
            assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )

    served(test)


def test_a_second_turn_by_previous_response_id_finds_the_first_in_the_cache() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            first = await client.responses.create(model="sim", input=LONG, instructions="Be kind.")
            second = await client.responses.create(
                model="sim", input="Go on", instructions="Be kind.", previous_response_id=first.id
            )
            assert first.usage
            assert second.usage
            computed = first.usage.total_tokens - 1
            assert second.usage.input_tokens_details.cached_tokens == computed // 16 * 16
            assert second.previous_response_id == first.id
            items: ResponseInputParam = [
                {"role": "user", "content": LONG},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "Go on"},
            ]
            spelled = await client.responses.create(model="sim", input=items, instructions="Be kind.")
            assert spelled.output_text == second.output_text

    served(test)


def test_the_same_conversation_is_cached_across_the_apis() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client, claude(server) as other:
            first = await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": LONG}])
            said = first.choices[0].message.content or ""
            turns: list[MessageParam] = [
                {"role": "user", "content": LONG},
                {"role": "assistant", "content": [{"type": "text", "text": said}]},
                {"role": "user", "content": "Go on"},
            ]
            second = await other.messages.create(model="sim", max_tokens=5, messages=turns)
            assert first.usage
            cached = second.usage.cache_read_input_tokens or 0
            assert cached == (first.usage.total_tokens - 1) // 16 * 16
            counted = await other.messages.count_tokens(model="sim", messages=turns)
            assert counted.input_tokens == cached + second.usage.input_tokens

    served(test)


def test_responses_are_remembered_unless_they_are_not_to_be() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            kept = await client.responses.create(model="sim", input="Hello")
            assert (await client.responses.retrieve(kept.id)).output_text == kept.output_text
            dropped = await client.responses.create(model="sim", input="Hello", store=False)
            for unknown in (dropped.id, "resp_nothing"):
                with pytest.raises(openai.NotFoundError, match=f"Response with id '{unknown}' not found"):
                    await client.responses.retrieve(unknown)
                with pytest.raises(openai.NotFoundError, match="not found"):
                    await client.responses.create(model="sim", input="x", previous_response_id=unknown)
            with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
                await client.responses.cancel(kept.id)
            # vLLM has neither.
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_items.list(kept.id)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.responses.delete(kept.id)
            assert caught.value.status_code == 405

    served(test)


def test_a_response_in_the_background_goes_on_and_can_be_cancelled() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            begun = await client.responses.create(model="sim", input="Hello", background=True)
            assert begun.status in ("queued", "in_progress")
            while (found := await client.responses.retrieve(begun.id)).status != "completed":
                assert found.status in ("queued", "in_progress")
            assert found.output_text
            endless = await client.responses.create(
                model="sim", input="x", background=True, extra_body={"ignore_eos": True}
            )
            assert (await client.responses.cancel(endless.id)).status == "cancelled"
            await idle(server)
            assert (await client.responses.retrieve(endless.id)).status == "cancelled"

    served(test, speed=5.0)


def test_a_forced_tool_round_trip_through_chat() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            asked = [{"role": "user", "content": "Rain?"}]
            kind: dict[str, object] = {"model": "sim", "messages": asked, "tools": [CHAT_TOOL]}
            whole = await client.chat.completions.create(**kind, tool_choice="required")  # type: ignore[call-overload]
            (call,) = whole.choices[0].message.tool_calls
            assert whole.choices[0].finish_reason == "tool_calls"
            assert call.function.name == "weather"
            stream = await client.chat.completions.create(**kind, tool_choice="required", stream=True)  # type: ignore[call-overload]
            pieces = [one.choices[0] async for one in stream]
            deltas = [one.delta.tool_calls[0] for one in pieces if one.delta.tool_calls]
            assert "".join(one.function.arguments or "" for one in deltas) == call.function.arguments
            assert (deltas[0].function.name, pieces[-1].finish_reason) == ("weather", "tool_calls")
            named = {"type": "function", "function": {"name": "weather"}}
            other = await client.chat.completions.create(**kind, tool_choice=named)  # type: ignore[call-overload]
            assert other.choices[0].finish_reason == "stop"
            answered = [*asked, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
            kind["messages"] = answered
            last = await client.chat.completions.create(**kind)  # type: ignore[call-overload]
            assert last.choices[0].message.content
            # The call itself came back as the tokens that had been computed for it.
            assert last.usage.prompt_tokens_details.cached_tokens == (whole.usage.total_tokens - 1) // 16 * 16

    served(test)


def test_a_forced_tool_round_trip_through_responses() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            whole = await client.responses.create(
                model="sim", input="Rain?", tools=[RESPONSE_TOOL], tool_choice={"type": "function", "name": "weather"}
            )
            (call,) = whole.output
            assert call.type == "function_call"
            stream = await client.responses.create(
                model="sim", input="Rain?", tools=[RESPONSE_TOOL], tool_choice="required", stream=True
            )
            events = [one async for one in stream]
            pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
            assert "".join(pieces) == call.arguments
            assert events[-1].type == "response.completed"
            last = await client.responses.create(
                model="sim",
                tools=[RESPONSE_TOOL],
                previous_response_id=whole.id,
                input=[{"type": "function_call_output", "call_id": call.call_id, "output": "yes"}],
            )
            assert last.output_text
            assert whole.usage
            assert last.usage
            assert last.usage.input_tokens_details.cached_tokens == (whole.usage.total_tokens - 1) // 16 * 16

    served(test)


def test_a_forced_tool_round_trip_through_messages() -> None:
    async def test(server: MockServer) -> None:
        async with claude(server) as client:
            asked: MessageParam = {"role": "user", "content": "Rain?"}
            async with client.messages.stream(
                model="sim", max_tokens=100, messages=[asked], tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}
            ) as stream:
                streamed = await stream.get_final_message()
            whole = await client.messages.create(
                model="sim", max_tokens=100, messages=[asked], tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}
            )
            (call,), (same,) = whole.content, streamed.content
            assert call.type == same.type == "tool_use"
            assert (call.input, whole.stop_reason, streamed.stop_reason) == (same.input, "tool_use", "tool_use")
            last = await client.messages.create(
                model="sim",
                max_tokens=20,
                tools=[ANTHROPIC_TOOL],
                messages=[
                    asked,
                    {"role": "assistant", "content": whole.content},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "yes"}]},
                ],
            )
            assert last.content[0].type == "text"
            assert last.usage.cache_read_input_tokens

    served(test)


def test_messages_streamed_say_what_others_say() -> None:
    async def test(server: MockServer) -> None:
        async with claude(server) as client:
            asked: list[MessageParam] = [{"role": "user", "content": "Hello"}]
            whole = await client.messages.create(model="sim", max_tokens=30, messages=asked)
            async with client.messages.stream(model="sim", max_tokens=30, messages=asked) as stream:
                streamed = await stream.get_final_message()
            assert whole.content[0].type == streamed.content[0].type == "text"
            assert whole.content[0].text == streamed.content[0].text
            assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 30)
            word = whole.content[0].text[8:16]
            stopped = await client.messages.create(model="sim", max_tokens=30, messages=asked, stop_sequences=[word])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.create(model="other", max_tokens=30, messages=asked)
            assert caught.value.body == {
                "type": "error",
                "error": {"type": "NotFoundError", "message": "The model `other` does not exist."},
            }

    served(test)


class Place(BaseModel):
    """A schema with a reference and an enum."""

    city: Literal["Paris"]
    near: list[Literal["river", "tower"]]


def test_structured_outputs_fit_their_schema() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            asked: Any = [{"role": "user", "content": "Where?"}]
            parsed = await client.chat.completions.parse(model="sim", messages=asked, response_format=Place)
            place = parsed.choices[0].message.parsed
            assert place is not None
            assert parsed.choices[0].finish_reason == "stop"
            async with client.chat.completions.stream(model="sim", messages=asked, response_format=Place) as stream:
                streamed = (await stream.get_final_completion()).choices[0].message.parsed
            assert streamed == place
            responded = await client.responses.parse(model="sim", input="Where?", text_format=Place)
            assert responded.output_parsed is not None
            assert responded.output_parsed.city == "Paris"
            free = await client.chat.completions.create(
                model="sim", messages=asked, response_format={"type": "json_object"}
            )
            assert free.choices[0].message.content == "{}"
            wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": "none"}}
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await client.chat.completions.create(model="sim", messages=asked, response_format=wrong)

    served(test)


def test_audio_in_and_out() -> None:
    async def test(server: MockServer) -> None:
        async with sdk(server) as client:
            speech = await client.audio.speech.create(model="sim", voice="alloy", input="Hello, who is there?")
            wave = speech.content
            assert wave[:4] == b"RIFF"
            assert int.from_bytes(wave[4:8], "little") == len(wave) - 8
            heard = await client.audio.transcriptions.create(model="sim", file=("a.wav", wave))
            assert heard.text
            assert heard.usage is not None
            assert heard.usage.to_dict() == {"type": "duration", "seconds": 2}
        async with httpx.AsyncClient(base_url=server.url) as raw:
            # Not through the SDK, where translations are deprecated.
            english = await raw.post("/v1/audio/translations", data={"model": "sim"}, files={"file": ("a.wav", wave)})
            assert list(english.json()) == ["text"]
            assert english.json()["text"] != heard.text
            form = {"model": "sim", "stream": "true", "stream_include_usage": "true"}
            said = await raw.post("/v1/audio/transcriptions", data=form, files={"file": ("a.wav", wave)})
            assert said.text.endswith("data: [DONE]\n\n")
            assert '"object":"transcription.chunk"' in said.text
            assert '"usage":{"prompt_tokens":' in said.text
            assert (await raw.post("/v1/audio/transcriptions", data={"model": "sim"})).status_code == 400

    served(test)


def test_what_reads_and_does_not_write() -> None:
    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as raw:
            ranked = (await raw.post("/rerank", json={"query": "q", "documents": ["a", "b", "c"], "top_n": 2})).json()
            assert len(ranked["results"]) == 2
            assert ranked["results"][0]["relevance_score"] >= ranked["results"][1]["relevance_score"]
            scored = (await raw.post("/v1/score", json={"text_1": "q", "text_2": ["a", "b", "c"]})).json()
            found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
            assert all(scored["data"][index]["score"] == score for index, score in found.items())
            assert scored["usage"]["prompt_tokens"] == ranked["usage"]["prompt_tokens"] > 0
            assert (await raw.post("/score", json={"text_1": ["a", "b"], "text_2": ["a"]})).status_code == 400
            classes = (await raw.post("/classify", json={"input": ["a", "b"]})).json()
            assert [sum(one["probs"]) for one in classes["data"]] == [1, 1]
            pooled = (await raw.post("/pooling", json={"input": "a"})).json()
            assert len(pooled["data"][0]["data"]) == 16
            assert (await raw.post("/v1/moderations", json={"input": "a"})).status_code == 404
            for path in ("/generate", "/completion", "/api/chat"):
                assert (await raw.post(path, json={"text": "x"})).status_code == 404

    served(test)


def test_the_own_apis_of_sglang_and_llamacpp() -> None:
    async def sglang(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as raw:
            body: dict[str, object] = {"text": "four" * 64, "sampling_params": {"max_new_tokens": 5}}
            first = (await raw.post("/generate", json=body)).json()
            second = (await raw.post("/generate", json=body)).json()
            assert first["text"] == second["text"]
            assert [one["meta_info"]["cached_tokens"] for one in (first, second)] == [0, 48]
            assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
            several = (await raw.post("/generate", json={"input_ids": [[1, 2], [3]]})).json()
            assert [one["meta_info"]["prompt_tokens"] for one in several] == [2, 1]
            streamed = (await raw.post("/generate", json={**body, "stream": True})).text
            *events, last, done = streamed.strip().split("\n\n")
            assert (len(events), done) == (4, "data: [DONE]")
            assert first["text"] in last

    async def llamacpp(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as raw:
            said = (await raw.post("/completion", json={"prompt": "four", "n_predict": 3})).json()
            assert (said["stop_type"], said["tokens_predicted"], said["tokens_evaluated"]) == ("limit", 3, 1)
            streamed = (await raw.post("/completion", json={"prompt": "four", "n_predict": 3, "stream": True})).text
            assert streamed.count("data: ") == 4
            filled = (await raw.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})).json()
            assert filled["stop"] is True

    served(sglang, engine="sglang")
    served(llamacpp, engine="llamacpp")


def test_token_ids_in_and_token_ids_out() -> None:
    """What a turn generated is cached for the next one, which has it as a part of its prompt."""

    async def test(server: MockServer) -> None:
        async with httpx.AsyncClient(base_url=server.url) as raw:
            ids, options = list(range(1, 65)), {"max_tokens": 17, "ignore_eos": True}
            body = {"model": "sim", "token_ids": ids, "sampling_params": options}
            first = (await raw.post("/inference/v1/generate", json=body)).json()
            (said,) = first["choices"]
            assert (len(said["token_ids"]), said["finish_reason"]) == (17, "length")
            assert first["usage"]["prompt_tokens"] == 64
            more = {
                "token_ids": [*ids, *said["token_ids"], 7],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            streamed = (await raw.post("/inference/v1/generate", json=body | more)).text
            *events, used, done = [one.removeprefix("data: ") for one in streamed.strip().split("\n\n")]
            assert (len(events), done) == (17, "[DONE]")
            assert json.loads(used)["usage"]["prompt_tokens_details"] == {"cached_tokens": 80}
            wrongs: list[dict[str, object]] = [{"token_ids": []}, {"token_ids": ["a"]}, {"sampling_params": None}]
            for wrong in wrongs:
                assert (await raw.post("/inference/v1/generate", json=body | wrong)).status_code == 400

    served(test)


def test_clients_that_leave_a_stream_abort_their_work_on_each_api() -> None:
    async def test(server: MockServer) -> None:
        bodies: dict[str, dict[str, object]] = {
            "/v1/responses": {"input": "x", "ignore_eos": True},
            "/v1/messages": {"model": "sim", "max_tokens": 50_000, "messages": [{"role": "user", "content": "x"}]},
        }
        async with httpx.AsyncClient(base_url=server.url) as raw:
            for path, body in bodies.items():
                async with raw.stream("POST", path, json={**body, "stream": True}) as stream:
                    lines = stream.aiter_lines()
                    while not (await anext(lines)).endswith(".delta") and path == "/v1/responses":
                        pass
                    assert server.driver.engine.gauges().running == 1
                await idle(server)

    served(test, speed=1.0)
