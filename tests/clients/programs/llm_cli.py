# SPDX-License-Identifier: Apache-2.0
"""`llm` by Simon Willison: its library, with a model as `extra-openai-models.yaml` declares it."""

from __future__ import annotations

import openai
from checks import MAX_TOKENS, QUESTION, RESULT, UNKNOWN, arguments, check_that, expect, run
from llm.default_plugins.openai_models import Chat

URL, MODEL = arguments()
OPTIONS = {"max_tokens": MAX_TOKENS, "temperature": 0}


def model(name=MODEL, **more):
    return Chat(name, key=None, model_name=name, api_base=f"{URL}/v1", **more)


def complete():
    response = model().prompt(QUESTION, stream=False, key="none", **OPTIONS)
    check_that(response.text() and response.usage().output > 0, response.text())


def streamed():
    chunks = list(model().prompt(QUESTION, stream=True, key="none", **OPTIONS))
    whole = model().prompt(QUESTION, stream=False, key="none", **OPTIONS).text()
    check_that(len(chunks) > 1 and "".join(chunks) == whole, chunks)


def tools():
    """It has no way to demand a call: this is a request with a tool, which the model may leave alone."""

    def weather(city: str) -> str:
        """The weather in a city."""
        return RESULT

    chain = model(supports_tools=True).chain(QUESTION, tools=[weather], key="none", options=OPTIONS)
    check_that(chain.text(), chain)


run(
    "llm",
    {
        "chat": complete,
        "chat, streamed": streamed,
        "chat, tools": tools,
        "chat, error": lambda: expect(
            openai.NotFoundError, lambda: model(UNKNOWN).prompt(QUESTION, stream=False, key="none").text()
        ),
    },
)
