# SPDX-License-Identifier: Apache-2.0
"""Aider's own way to a model: `aider.models.Model`, with OPENAI_API_BASE as its documentation says."""

from __future__ import annotations

import os

from checks import DESCRIPTION, MAX_TOKENS, QUESTION, SCHEMA, UNKNOWN, arguments, check_that, expect, first, run

URL, MODEL = arguments()
os.environ |= {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "true"}

import litellm  # noqa: E402 - it reads its settings when it is imported
from aider.models import Model  # noqa: E402

ASKED = [{"role": "user", "content": QUESTION}]


def model(name=MODEL):
    it = Model(f"openai/{name}")
    it.extra_params = {"max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0}
    return it


def complete():
    text = model().simple_send_with_retries(ASKED)
    check_that(text, text)


def streamed():
    _, chunks = model().send_completion(ASKED, functions=None, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    check_that(text and text.strip() == model().simple_send_with_retries(ASKED).strip(), text)


def tools():
    """Aider demands the one function that it gives; it has no second turn."""
    function = {"name": "weather", "description": DESCRIPTION, "strict": True, "parameters": SCHEMA}
    _, completion = model().send_completion(ASKED, functions=[function], stream=False)
    call = first(completion.choices[0].message.tool_calls)
    check_that("Paris" in call.function.arguments, call)


def unknown():
    model(UNKNOWN).send_completion(ASKED, functions=None, stream=False)


run(
    "aider-chat",
    {
        "chat": complete,
        "chat, streamed": streamed,
        "chat, tools": tools,
        "chat, error": lambda: expect(litellm.NotFoundError, unknown),
    },
)
