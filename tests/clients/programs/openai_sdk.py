# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python SDK: /v1/responses and /v1/chat/completions."""

from __future__ import annotations

import json

import openai
from checks import MAX_TOKENS, QUESTION, RESULT, TOOL, UNKNOWN, arguments, chat_tools, check_that, expect, first, run

URL, MODEL = arguments()
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
SAME = {"model": MODEL, "temperature": 0}


def ask(**more):
    return CLIENT.responses.create(**{**SAME, "max_output_tokens": MAX_TOKENS, "input": QUESTION, **more})


def say(**more):
    messages = [{"role": "user", "content": QUESTION}]
    return CLIENT.chat.completions.create(**{**SAME, "max_tokens": MAX_TOKENS, "messages": messages, **more})


def responses():
    response = ask()
    check_that(response.output_text and response.usage.output_tokens > 0, response)


def responses_stream():
    events = list(ask(stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    check_that(events[-1].type == "response.completed", events[-1])
    check_that(text and text == events[-1].response.output_text == ask().output_text, text)


def responses_tools():
    tools = [{"type": "function", **TOOL}]
    given = ask(tools=tools, tool_choice="required")
    call = first([item for item in given.output if item.type == "function_call"])
    check_that(call.name == "weather" and json.loads(call.arguments) == {"city": "Paris"}, call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    asked = {"role": "user", "content": QUESTION}
    second = ask(input=[asked, call.model_dump(exclude_none=True), result], tools=tools, tool_choice="none")
    check_that(second.output_text, second)


def chat():
    response = say()
    check_that(response.choices[0].message.content and response.usage.completion_tokens > 0, response)


def chat_stream():
    chunks = list(say(stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    check_that(text and text == say().choices[0].message.content, text)
    check_that(chunks[-1].usage.completion_tokens > 0, chunks[-1])


run(
    "openai",
    {
        "responses": responses,
        "responses, streamed": responses_stream,
        "responses, tools": responses_tools,
        "responses, error": lambda: expect(openai.NotFoundError, lambda: ask(model=UNKNOWN)),
        "chat": chat,
        "chat, streamed": chat_stream,
        "chat, tools": lambda: chat_tools(say),
        "chat, error": lambda: expect(openai.NotFoundError, lambda: say(model=UNKNOWN)),
    },
)
