# SPDX-License-Identifier: Apache-2.0
"""Pydantic AI: its models for /v1/chat/completions, /v1/responses and /v1/messages."""

from __future__ import annotations

import asyncio
from typing import Literal

import anthropic
import openai
from checks import DESCRIPTION, MAX_TOKENS, QUESTION, RESULT, UNKNOWN, arguments, check_that, expect, run
from pydantic_ai import Agent, Tool
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = arguments()
SETTINGS = {"temperature": 0, "max_tokens": MAX_TOKENS}
CALLED: list[str] = []


def weather(city: Literal["Paris"]) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return RESULT


def chat(name=MODEL):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


def responses(name=MODEL):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    return OpenAIResponsesModel(name, provider=OpenAIProvider(openai_client=client))


def messages(name=MODEL):
    client = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
    return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))


def settings_of(context):
    """A tool is demanded in the first turn only: then the model is free to say something."""
    return {**SETTINGS, "tool_choice": "required" if context.run_step <= 1 else "none"}


def complete(model):
    result = Agent(model(), model_settings=SETTINGS).run_sync(QUESTION)
    check_that(result.output and result.usage.output_tokens > 0, result)


def streamed(model):
    async def main():
        async with Agent(model(), model_settings=SETTINGS).run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    text = asyncio.run(main())
    check_that(text and text.strip() == Agent(model(), model_settings=SETTINGS).run_sync(QUESTION).output.strip(), text)


def tools(model):
    CALLED.clear()
    tool = Tool(weather, description=DESCRIPTION, strict=True)
    result = Agent(model(), tools=[tool], model_settings=settings_of).run_sync(QUESTION)
    check_that(set(CALLED) == {"Paris"} and result.output, (CALLED, result))


def checks_of(name, model):
    return {
        name: lambda: complete(model),
        f"{name}, streamed": lambda: streamed(model),
        f"{name}, tools": lambda: tools(model),
        f"{name}, error": lambda: expect(ModelHTTPError, lambda: Agent(model(UNKNOWN)).run_sync(QUESTION)),
    }


run(
    "pydantic-ai-slim",
    {**checks_of("chat", chat), **checks_of("responses", responses), **checks_of("messages", messages)},
)
