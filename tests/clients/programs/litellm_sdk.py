# SPDX-License-Identifier: Apache-2.0
"""LiteLLM's SDK as a client of an OpenAI-compatible server: completion() and responses()."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it asks the network otherwise, when it is imported

import litellm
from checks import MAX_TOKENS, QUESTION, RESULT, TOOL, UNKNOWN, arguments, chat_tools, check_that, expect, first, run

URL, MODEL = arguments()
litellm.suppress_debug_info = True
SAME = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "timeout": 60, "temperature": 0}
ASKED = {"role": "user", "content": QUESTION}


def say(**more):
    given = {"model": f"openai/{MODEL}", "max_tokens": MAX_TOKENS, "messages": [ASKED], **more}
    return litellm.completion(**SAME, **given)


def ask(**more):
    given = {"model": f"openai/{MODEL}", "max_output_tokens": MAX_TOKENS, "input": QUESTION, **more}
    return litellm.responses(**SAME, **given)


def chat():
    response = say()
    check_that(response.choices[0].message.content and response.usage.completion_tokens > 0, response)


def chat_stream():
    chunks = list(say(stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    check_that(text and text == say().choices[0].message.content, text)


def responses():
    response = ask()
    check_that(response.output[0].content[0].text, response)


def responses_stream():
    events = list(ask(stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    check_that(text and events[-1].type == "response.completed", events[-1])


def responses_tools():
    tools = [{"type": "function", **TOOL}]
    given = ask(tools=tools, tool_choice="required")
    call = first([item for item in given.output if item.type == "function_call"])
    check_that(json.loads(call.arguments) == {"city": "Paris"}, call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    turn = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    second = ask(input=[ASKED, turn, result], tools=tools, tool_choice="none")
    check_that(second.output[0].content[0].text, second)


run(
    "litellm",
    {
        "chat": chat,
        "chat, streamed": chat_stream,
        "chat, tools": lambda: chat_tools(say),
        "chat, error": lambda: expect(litellm.NotFoundError, lambda: say(model=f"openai/{UNKNOWN}")),
        "responses": responses,
        "responses, streamed": responses_stream,
        "responses, tools": responses_tools,
        "responses, error": lambda: expect(litellm.NotFoundError, lambda: ask(model=f"openai/{UNKNOWN}")),
    },
)
