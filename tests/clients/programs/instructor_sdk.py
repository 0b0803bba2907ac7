# SPDX-License-Identifier: Apache-2.0
"""Instructor: typed objects by a tool call and by a JSON schema."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import MAX_TOKENS, QUESTION, UNKNOWN, arguments, check_that, run
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel

URL, MODEL = arguments()


class Place(BaseModel):
    """Where the weather is asked for."""

    city: Literal["Paris"]


def client(mode):
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(plain, mode=mode).chat.completions


def given(model=MODEL):
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "max_retries": 1}


def complete(mode):
    place = client(mode).create(response_model=Place, **given())
    check_that(place.city == "Paris", place)


def streamed(mode):
    places = list(client(mode).create_partial(response_model=Place, **given()))
    check_that(places and places[-1].city == "Paris", places)


def unknown(mode):
    """Instructor wraps what the SDK raises; the SDK's error is the cause."""
    try:
        client(mode).create(response_model=Place, **given(UNKNOWN))
    except InstructorRetryException as e:
        check_that("404" in str(e), e)
        return
    raise AssertionError("no error")


def checks_of(name, mode):
    return {
        name: lambda: complete(mode),
        f"{name}, streamed": lambda: streamed(mode),
        f"{name}, error": lambda: unknown(mode),
    }


run(
    "instructor",
    {**checks_of("tools", instructor.Mode.TOOLS_STRICT), **checks_of("schema", instructor.Mode.JSON_SCHEMA)},
)
