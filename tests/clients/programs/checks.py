# SPDX-License-Identifier: Apache-2.0
"""What every client's program has in common. Runs in each client's own Python: nothing but the standard library.

A program is run as `python PROGRAM URL MODEL` and prints one line of JSON: the client with its version, and for each of
its checks null, or what went wrong. Nothing stops at the first failure.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

Call = TypeVar("Call")

UNKNOWN = "no-such-model"
QUESTION = "How is the weather in Paris?"
RESULT = "sunny, 21 degrees"
"""What the tool says."""
MAX_TOKENS = 300
"""Enough for a tool call of a model with random weights, which likes white space."""
DESCRIPTION = "The weather in a city."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The arguments of the tool. One city, so that a model with random weights names it, too."""
TOOL = {"name": "weather", "description": DESCRIPTION, "strict": True, "parameters": SCHEMA}
"""As OpenAI's APIs have it."""


def check_that(condition: object, found: object) -> None:
    """AssertionError, with what was found, unless `condition`."""
    assert condition, f"found {found!r}"


def first(calls: Sequence[Call] | None) -> Call:
    """A model with random weights may call the tool again and again, until it has no tokens left."""
    assert calls, "no call"
    return calls[0]


def chat_tools(say: Callable[..., Any]) -> None:
    """A tool is called, and its result becomes a text. `say` is a chat: of QUESTION, unless it is given messages."""
    tools = [{"type": "function", "function": TOOL}]
    message = say(tools=tools, tool_choice="required").choices[0].message
    call = first(message.tool_calls)
    check_that(json.loads(call.function.arguments) == {"city": "Paris"}, call)
    turn = {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    asked = {"role": "user", "content": QUESTION}
    second = say(messages=[asked, turn, result], tools=tools, tool_choice="none")
    check_that(second.choices[0].message.content, second)


def expect(kind: type[BaseException], call: Callable[[], object], status: int | None = 404) -> None:
    """The call must raise this error of the client's own, with the status of an unknown model."""
    try:
        given = call()
    except kind as e:
        found = getattr(e, "status_code", None)
        check_that(status is None or found == status, f"{type(e).__name__} with status {found}: {e}")
        return
    raise AssertionError(f"no error, but {given!r}")


def run(package: str, checks: dict[str, Callable[[], object]]) -> None:
    """Run each check and print what came of them."""
    results: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = None
        except Exception as e:  # noqa: BLE001 - whatever a client raises is the result
            where = traceback.extract_tb(e.__traceback__)[-1]
            results[name] = f"{type(e).__name__}: {e} ({where.name}:{where.lineno})"[:600]
    print(json.dumps({"client": f"{package} {version(package)}", "checks": results}))


def arguments() -> tuple[str, str]:
    """The server's URL without /v1, and the model."""
    return sys.argv[1], sys.argv[2]
