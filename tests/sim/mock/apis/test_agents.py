# SPDX-License-Identifier: Apache-2.0
"""The simulated model as agents meet it: it ends by itself, calls a tool when it is asked to, and thinks aloud if it is
to. An agent hangs at a model that does not (with a limit of 32,000 tokens, minutes for each turn).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from lbproxy.sim.mock.apis import chat, messages, responses
from lbproxy.sim.mock.apis.call import ENOUGH_TOKENS, GenerationCall, Identity, PlannedChoice, Writer, plan
from lbproxy.sim.mock.apis.fields import Json

SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ME = Identity("id", 0, "m")


def chat_of(said: object, **more: object) -> Json:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("read_file", "Bash")]
    history = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return {"messages": history, "tools": tools, **more}


def message_of(said: object, **more: object) -> Json:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("read_file", "Bash")]
    history = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return {"model": "m", "max_tokens": 32_000, "messages": history, "tools": tools, **more}


def response_of(said: object, **more: object) -> Json:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("read_file", "Bash")]
    return {"input": said, "tools": tools, **more}


def planned(call: GenerationCall) -> PlannedChoice:
    return plan(call, max_model_len=100_000, seed=0)[0]


def by_chat(said: object, **more: object) -> tuple[PlannedChoice, dict[str, Any], Writer]:
    call, form = chat.parse_chat(chat_of(said, **more))
    choice = planned(call)
    writer = chat.ChatWriter(ME, form)
    return choice, orjson.loads(writer.whole([choice], 0))["choices"][0], writer


def by_messages(said: object, **more: object) -> tuple[PlannedChoice, dict[str, Any], Writer]:
    choice = planned(messages.parse(message_of(said, **more)))
    writer = messages.MessageWriter(ME)
    return choice, orjson.loads(writer.whole([choice], 0)), writer


def by_responses(said: object, **more: object) -> tuple[PlannedChoice, dict[str, Any], Writer]:
    asked = responses.parse(response_of(said, **more))
    choice = planned(asked.call)
    writer = responses.ResponseWriter(ME, asked, 100_000)
    return choice, writer.body(choice, "completed"), writer


def events(choice: PlannedChoice, writer: Writer) -> list[Any]:
    """The bodies of all events of a stream."""
    stream = writer.opening([choice])
    for position in range(choice.answer.tokens):
        stream += writer.token(choice, 0, position)
    stream += writer.closing([choice], 0)
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("by", "limit", "ends"),
    [
        (by_chat, "max_tokens", ("finish_reason", "stop")),
        (by_messages, "max_tokens", ("stop_reason", "end_turn")),
        (by_responses, "max_output_tokens", ("status", "completed")),
    ],
)
def test_a_limit_that_means_enough_is_not_reached(
    by: Callable[..., tuple[PlannedChoice, dict[str, Any], Writer]], limit: str, ends: tuple[str, str]
) -> None:
    choice, body, _ = by("Hello", **{limit: 32_000})
    assert (body[ends[0]], choice.answer.tokens < 200) == (ends[1], True)
    assert by("Hello", **{limit: ENOUGH_TOKENS})[0].answer.text == choice.answer.text


def test_a_lower_limit_is_a_length_and_so_is_any_with_ignore_eos() -> None:
    assert by_messages("Hello", max_tokens=ENOUGH_TOKENS - 1)[0].answer.tokens == ENOUGH_TOKENS - 1
    choice, body, _ = by_chat("Use the Bash tool", max_tokens=5000, ignore_eos=True)
    assert (choice.answer.tokens, body["finish_reason"]) == (5000, "length")


@pytest.mark.parametrize(
    ("said", "name", "command"),
    [
        ("Use the Bash tool to run `ls -l`, please.", "Bash", "ls -l"),
        ("now call `read_file` on `a b.txt`", "read_file", "a b.txt"),
        ("Invoke the tool bash.", "Bash", None),
        ("<system-reminder>\nUse the Bash tool.\n</system-reminder>\nRun read_file", "read_file", None),
        ("How do I use bash_history? What is Bash?", None, None),
        ("<reminder>call Bash</reminder>Hello", None, None),
        ("x" * 5000 + " call Bash</reminder>Hello", None, None),
    ],
)
def test_a_tool_is_called_when_the_user_names_it(said: str, name: str | None, command: str | None) -> None:
    for choice, body, _ in (by_chat(said), by_messages(said), by_responses(said)):
        assert (choice.call and choice.call.name) == name
        if choice.call is not None:
            assert command in (None, orjson.loads(choice.whole(choice.call))["command"])
            assert {"tool_calls", "tool_use", "completed"} & {
                body.get("finish_reason"), body.get("stop_reason"), body.get("status")
            }  # fmt: skip
    choice, _, _ = by_chat(said, tool_choice="none")
    assert choice.call is None


def test_after_the_result_of_a_tool_comes_text() -> None:
    call = {"id": "1", "function": {"name": "Bash", "arguments": "{}"}}
    asked = {"role": "user", "content": "Use the Bash tool"}
    by = by_chat([asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}])
    assert (by[0].call, by[1]["finish_reason"]) == (None, "stop")
    use = {"type": "tool_use", "id": "1", "name": "Bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    reminder = {"type": "text", "text": "<system-reminder>Use the Bash tool</system-reminder>"}
    turns = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result, reminder]}]
    assert by_messages([*turns, {"role": "system", "content": "x"}])[1]["stop_reason"] == "end_turn"
    items = [asked, {"type": "function_call", "name": "Bash"}, {"type": "function_call_output", "output": "ok"}]
    assert [one["type"] for one in by_responses(items)[1]["output"]] == ["message"]


@pytest.mark.parametrize("said", ["Hello", "Use the Bash tool"])
def test_reasoning_is_streamed_as_it_stands_in_the_whole_response(said: str) -> None:
    choice, body, writer = by_chat(said, reasoning_effort="high")
    deltas = [one["choices"][0]["delta"] for one in events(choice, writer)]
    message = body["message"]
    assert "".join(one.get("reasoning", "") for one in deltas) == message["reasoning"] != ""
    assert "".join(one.get("content", "") for one in deltas) == (message["content"] or "")
    calls = [one["tool_calls"][0]["function"] for one in deltas if "tool_calls" in one]
    expected = [one["function"] for one in message.get("tool_calls", [])]
    assert "".join(one["arguments"] for one in calls) == "".join(one["arguments"] for one in expected)
    assert [one["name"] for one in calls if "name" in one] == [one["name"] for one in expected]

    choice, body, writer = by_messages(said, thinking={"type": "adaptive"})
    stream = events(choice, writer)
    begun = [(one["index"], one["content_block"]["type"]) for one in stream if one["type"] == "content_block_start"]
    assert begun == [(n, one["type"]) for n, one in enumerate(body["content"])]
    assert begun[0] == (0, "thinking")
    thinking = [one["delta"].get("thinking", "") for one in stream if one["type"] == "content_block_delta"]
    assert "".join(thinking) == body["content"][0]["thinking"] != ""
    assert sum(one["type"] == "content_block_stop" for one in stream) == 2

    choice, body, writer = by_responses(said, reasoning={"summary": "auto"})
    stream = events(choice, writer)
    done = [one["item"] for one in stream if one["type"] == "response.output_item.done"]
    assert done == body["output"] == stream[-1]["response"]["output"]
    assert done[0]["type"] == "reasoning"
    thinking = [one["delta"] for one in stream if one["type"] == "response.reasoning_text.delta"]
    assert "".join(thinking) == done[0]["content"][0]["text"] != ""
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_reasoning_that_comes_back_is_the_text_that_was_computed() -> None:
    call, form = chat.parse_chat(chat_of("Hello", reasoning_effort="low"))
    choice = planned(call)
    message = orjson.loads(chat.ChatWriter(ME, form).whole([choice], 0))["choices"][0]["message"]
    asked = {"role": "user", "content": "Hello"}
    (after,) = chat.parse_chat(chat_of([asked, message, asked]))[0].prompts
    assert after.startswith(call.prompts[0] + choice.answer.computed)


def test_a_limit_within_the_reasoning_cuts_there() -> None:
    choice, body, writer = by_messages("Hello", max_tokens=7, thinking={"type": "enabled"})
    assert (choice.answer.tokens, body["stop_reason"]) == (7, "max_tokens")
    assert [one["type"] for one in body["content"]] == ["thinking"]
    assert len(events(choice, writer)) > 4
    choice, body, _ = by_messages("Hello", max_tokens=60, thinking={"type": "enabled"})
    assert (choice.answer.tokens, [one["type"] for one in body["content"]]) == (60, ["thinking", "text"])
