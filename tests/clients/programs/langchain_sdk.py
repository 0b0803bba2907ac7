# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI, over /v1/chat/completions and over /v1/responses."""

from __future__ import annotations

from typing import Literal

import openai
from checks import MAX_TOKENS, QUESTION, RESULT, UNKNOWN, arguments, check_that, expect, first, run
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = arguments()


@tool
def weather(city: Literal["Paris"]) -> str:
    """The weather in a city."""
    return RESULT


def model(responses, name=MODEL):
    return ChatOpenAI(
        model=name,
        base_url=f"{URL}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        temperature=0,
        max_tokens=MAX_TOKENS,
        use_responses_api=responses,
        stream_usage=True,
    )


def complete(responses):
    message = model(responses).invoke(QUESTION)
    check_that(message.text and message.usage_metadata["output_tokens"] > 0, message)


def streamed(responses):
    chunks = list(model(responses).stream(QUESTION))
    text = "".join(chunk.text for chunk in chunks)
    check_that(text and text == model(responses).invoke(QUESTION).text, text)
    check_that(any(chunk.usage_metadata for chunk in chunks), "no usage")


def tools(responses):
    asked = HumanMessage(QUESTION)
    message = model(responses).bind_tools([weather], tool_choice="required", strict=True).invoke([asked])
    call = first(message.tool_calls)
    check_that(call["args"] == {"city": "Paris"}, call)
    turn = AIMessage("", tool_calls=[call])
    second = model(responses).bind_tools([weather], tool_choice="none").invoke([asked, turn, weather.invoke(call)])
    check_that(second.text, second)


def checks_of(name, responses):
    return {
        name: lambda: complete(responses),
        f"{name}, streamed": lambda: streamed(responses),
        f"{name}, tools": lambda: tools(responses),
        f"{name}, error": lambda: expect(openai.NotFoundError, lambda: model(responses, UNKNOWN).invoke(QUESTION)),
    }


run("langchain-openai", {**checks_of("chat", False), **checks_of("responses", True)})
