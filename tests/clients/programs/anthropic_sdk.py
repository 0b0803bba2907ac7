# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Python SDK: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import anthropic
from checks import DESCRIPTION, MAX_TOKENS, QUESTION, RESULT, SCHEMA, UNKNOWN, arguments, check_that, expect, first, run

URL, MODEL = arguments()
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
ASKED = {"role": "user", "content": QUESTION}
EXACT = {"temperature": 0}
"""The SDK has no parameter for it any more, as the newest models of Anthropic have not."""
SAME = {"model": MODEL, "max_tokens": MAX_TOKENS, "system": "Be brief.", "messages": [ASKED], "extra_body": EXACT}
TOOLS = [{"name": "weather", "description": DESCRIPTION, "strict": True, "input_schema": SCHEMA}]


def say(**more):
    return CLIENT.messages.create(**{**SAME, **more})


def complete():
    message = say()
    check_that(message.content[0].text and message.usage.output_tokens > 0, message)


def streamed():
    with CLIENT.messages.stream(**SAME) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check_that(text and text == final.content[0].text == say().content[0].text, text)
    check_that(final.usage.output_tokens > 0 and final.stop_reason, final)


def tools():
    message = say(tools=TOOLS, tool_choice={"type": "any"})
    use = first([block for block in message.content if block.type == "tool_use"])
    check_that(use.input == {"city": "Paris"}, use)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    turns = [ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    second = say(messages=turns, tools=TOOLS, tool_choice={"type": "none"})
    check_that(second.content[0].text, second)


def tools_streamed():
    with CLIENT.messages.stream(**SAME, tools=TOOLS, tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    use = first([block for block in final.content if block.type == "tool_use"])
    check_that(use.input == {"city": "Paris"}, use)


def count():
    counted = CLIENT.messages.count_tokens(model=MODEL, system="Be brief.", messages=[ASKED])
    check_that(counted.input_tokens > 0, counted)


run(
    "anthropic",
    {
        "messages": complete,
        "messages, streamed": streamed,
        "messages, tools": tools,
        "messages, tools streamed": tools_streamed,
        "messages, error": lambda: expect(anthropic.NotFoundError, lambda: say(model=UNKNOWN)),
        "count_tokens": count,
    },
)
