# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Agents SDK, over /v1/responses and over /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Literal

import agents
import openai
from checks import QUESTION, RESULT, UNKNOWN, arguments, check_that, expect, run

URL, MODEL = arguments()
agents.set_tracing_disabled(True)
CALLED: list[str] = []


@agents.function_tool
def weather(city: Literal["Paris"]) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return RESULT


def agent(kind, model=MODEL, choice=None):
    """A new one for each check: each run has an event loop of its own, and connections belong to one."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    settings = agents.ModelSettings(temperature=0, tool_choice=choice)  # a response that is cut off is an error to it
    tools = [weather] if choice else []
    return agents.Agent(
        "brief", instructions="Be brief.", model=kind(model, client), model_settings=settings, tools=tools
    )


def complete(kind):
    check_that(agents.Runner.run_sync(agent(kind), QUESTION).final_output, "no text")


def streamed(kind):
    async def main():
        result = agents.Runner.run_streamed(agent(kind), QUESTION)
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, result.final_output

    text, final = asyncio.run(main())
    check_that(text and text == final, (text, final))


def tools(kind):
    """The second turn is free to say something: the SDK takes the demand for a tool back."""
    CALLED.clear()
    result = agents.Runner.run_sync(agent(kind, choice="required"), QUESTION)
    check_that(set(CALLED) == {"Paris"} and result.final_output, (CALLED, result))


def checks_of(name, kind):
    return {
        name: lambda: complete(kind),
        f"{name}, streamed": lambda: streamed(kind),
        f"{name}, tools": lambda: tools(kind),
        f"{name}, error": lambda: expect(
            openai.NotFoundError, lambda: agents.Runner.run_sync(agent(kind, UNKNOWN), QUESTION)
        ),
    }


run(
    "openai-agents",
    {
        **checks_of("responses", agents.OpenAIResponsesModel),
        **checks_of("chat", agents.OpenAIChatCompletionsModel),
    },
)
