# SPDX-License-Identifier: Apache-2.0
"""The three APIs of coding agents: a job of `coding_agents` as the body of a request, and how its stream is read.

The conversation is the same in each: tools, system prompt, a person's messages, responses with the tool calls that they
made, results. What differs is what the client programs do:

- chat: /v1/chat/completions, `messages` with `tool_calls` and role `tool`.
- messages: /v1/messages as Claude Code sends it. The first text of `system` is its billing header, in which `cch`
  changes with every request (llama.cpp pull request 20623, vLLM pull request 36829 have recorded ones). `cache_control`
  stands on the system prompt and on the last message, so that it moves from message to message (SGLang issue 36877).
- responses: /v1/responses without state, as Codex sends it: `input` has all items so far, `store` is false.
- responses-id: the same with state: `previous_response_id`, and only the items that are new.

Pieces are written as `prompt_text` does, but for responses, which are what the server said. A simulated server says as
many tokens as it may; `ignore_eos`, which asks a real vLLM for that, is in chat completions alone, as routers refuse it
elsewhere (smg 1.13.0, /v1/responses: 400). Pure; no chance but the seed's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import orjson

from benchmarks.http_routing.cells import MODEL
from lbproxy.sim.workloads.coding_agents import AgentRole
from lbproxy.sim.workloads.prompts import Piece, piece_text
from lbproxy.sim.workloads.workload import Job

Json: TypeAlias = dict[str, object]
Text: TypeAlias = Callable[[Piece], str]
"""What a piece says."""

TOOLS = ("Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "TodoWrite", "WebFetch", "WebSearch", "NotebookEdit")
IDENTITY = "You are a coding agent that works in a terminal."
VERSION = "2.1.177.01c"


@dataclass(frozen=True, slots=True)
class Item:
    """One step of a conversation."""

    role: str
    """Of `AgentRole`; tools and system prompt are not among them."""
    text: str
    calls: tuple[str, ...] = ()
    """Of a response: the ids of the tool calls that it made."""
    call: str = ""
    """Of a result: the id of its call."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A job's prompt, as any API has it."""

    tools: str
    system: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Api:
    """How one API is spoken."""

    name: str
    path: str
    body: Callable[[Prompt, Job, int], Json]
    """The request: prompt, job, seed."""
    token: bytes
    """What each event that brings a token begins with; other events do not."""
    ends: tuple[bytes, ...]
    """One of these is in a stream that came to its end."""
    output: re.Pattern[bytes]
    """Where the usage says how many tokens were generated."""
    cached: re.Pattern[bytes]
    """Where it says how many came from the cache."""
    delta: tuple[str | int, ...]
    """Where in such an event the text is."""
    headers: str = ""
    stateful: bool = False
    """It takes `previous_response_id` and the new items."""


@lru_cache(maxsize=8192)
def written(piece: Piece) -> str:
    """What a piece says that nobody generated."""
    return piece_text(piece).decode("ascii")


def prompt_of(job: Job, text: Text) -> Prompt:
    """The conversation of a job, which has `roles`. `text`: what each piece says."""
    assert job.roles[:2] == AgentRole.TOOLS + AgentRole.SYSTEM, "not a job of coding agents"
    items: list[Item] = []
    turn = 0
    for position, (role, piece) in enumerate(zip(job.roles[2:], job.prompt[2:], strict=True), 2):
        if role == AgentRole.ASSISTANT:
            turn = position
            made = len(job.roles) - len(job.roles[position + 1 :].lstrip(AgentRole.RESULT)) - position - 1
            items.append(Item(role, text(piece), tuple(_call_id(job, turn, n) for n in range(made))))
        elif role == AgentRole.RESULT:
            items.append(Item(role, text(piece), call=_call_id(job, turn, position - turn - 1)))
        else:
            items.append(Item(role, text(piece)))
    return Prompt(text(job.prompt[0]), text(job.prompt[1]), tuple(items))


def _call_id(job: Job, turn: int, number: int) -> str:
    """Of the position of the response in the prompt, so that it is the same in every later prompt."""
    return f"call_{job.prompt[turn].id:x}_{number}"


def tool_list(text: str) -> list[tuple[str, str, Json]]:
    """(name, description, schema of the arguments) of each tool; the descriptions are the text, cut in equal parts."""
    part = -(-len(text) // len(TOOLS))
    schema: Json = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "What to work on."}},
        "required": ["input"],
    }
    return [(name, text[n * part : (n + 1) * part], schema) for n, name in enumerate(TOOLS)]


def _arguments(call: str) -> Json:
    return {"input": call.removeprefix("call_")}


def _tool_of(call: str) -> str:
    return TOOLS[int(call.split("_")[1], 16) % len(TOOLS)]


# /v1/chat/completions


def chat_body(prompt: Prompt, job: Job, _: int) -> Json:
    """As OpenAI's SDK sends it."""
    messages: list[Json] = [{"role": "system", "content": f"{IDENTITY}\n{prompt.system}"}]
    for item in prompt.items:
        if item.role == AgentRole.RESULT:
            messages.append({"role": "tool", "tool_call_id": item.call, "content": item.text})
        elif item.role == AgentRole.ASSISTANT:
            messages.append({"role": "assistant", "content": item.text, **_chat_calls(item.calls)})
        else:
            messages.append({"role": "user", "content": item.text})
    functions = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, text, schema in tool_list(prompt.tools)
    ]
    return {
        "model": MODEL,
        "messages": messages,
        "tools": functions,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": job.answer.tokens,
        "ignore_eos": True,
    }


def _chat_calls(calls: Sequence[str]) -> Json:
    made = [
        {
            "id": call,
            "type": "function",
            "function": {"name": _tool_of(call), "arguments": orjson.dumps(_arguments(call)).decode()},
        }
        for call in calls
    ]
    return {"tool_calls": made} if made else {}


# /v1/messages

_MARK: Json = {"cache_control": {"type": "ephemeral"}}


def billing_header(job: Job, seed: int) -> str:
    """Another one for every request."""
    cch = random.Random(f"{seed}:{job.id}:cch").randrange(1 << 20)
    return f"x-anthropic-billing-header: cc_version={VERSION}; cc_entrypoint=cli; cch={cch:05x};"


def messages_body(prompt: Prompt, job: Job, seed: int) -> Json:
    """As Claude Code sends it."""
    system = [
        {"type": "text", "text": billing_header(job, seed)},
        {"type": "text", "text": IDENTITY, **_MARK},
        {"type": "text", "text": prompt.system, **_MARK},
    ]
    messages: list[tuple[str, list[Json]]] = []
    for item in prompt.items:
        role = "assistant" if item.role == AgentRole.ASSISTANT else "user"
        if not messages or messages[-1][0] != role:
            messages.append((role, []))
        messages[-1][1].extend(_blocks(item))
    messages[-1][1][-1] = {**messages[-1][1][-1], **_MARK}
    return {
        "model": MODEL,
        "system": system,
        "tools": [
            {"name": name, "description": text, "input_schema": schema}
            for name, text, schema in tool_list(prompt.tools)
        ],
        "messages": [{"role": role, "content": blocks} for role, blocks in messages],
        "stream": True,
        "max_tokens": job.answer.tokens,
    }


def _blocks(item: Item) -> list[Json]:
    if item.role == AgentRole.RESULT:
        return [{"type": "tool_result", "tool_use_id": item.call, "content": item.text}]
    said: list[Json] = [{"type": "text", "text": item.text}]
    return said + [
        {"type": "tool_use", "id": call, "name": _tool_of(call), "input": _arguments(call)} for call in item.calls
    ]


# /v1/responses


def responses_body(prompt: Prompt, job: Job, _: int) -> Json:
    """As Codex sends it."""
    return {
        "model": MODEL,
        "instructions": f"{IDENTITY}\n{prompt.system}",
        "tools": [
            {"type": "function", "name": name, "description": text, "parameters": schema}
            for name, text, schema in tool_list(prompt.tools)
        ],
        "input": [entry for item in prompt.items for entry in _entries(item)],
        "stream": True,
        "store": False,
        "prompt_cache_key": job.session,
        "max_output_tokens": job.answer.tokens,
    }


def stateful_body(prompt: Prompt, job: Job, seed: int) -> Json:
    """With state: the caller adds `previous_response_id`, and leaves in `prompt` the items that are new."""
    return {**responses_body(prompt, job, seed), "store": True}


def _entries(item: Item) -> list[Json]:
    if item.role == AgentRole.RESULT:
        return [{"type": "function_call_output", "call_id": item.call, "output": item.text}]
    by, kind = ("assistant", "output_text") if item.role == AgentRole.ASSISTANT else ("user", "input_text")
    said: list[Json] = [{"type": "message", "role": by, "content": [{"type": kind, "text": item.text}]}]
    return said + [
        {
            "type": "function_call",
            "call_id": call,
            "name": _tool_of(call),
            "arguments": orjson.dumps(_arguments(call)).decode(),
        }
        for call in item.calls
    ]


def _pattern(key: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b": ?(\d+)' % key.encode())


CHAT = Api(
    "chat",
    "/v1/chat/completions",
    chat_body,
    b"data: ",
    (b"data: [DONE]",),
    _pattern("completion_tokens"),
    _pattern("cached_tokens"),
    ("choices", 0, "delta", "content"),
)
_RESPONSES_ENDS = (b"event: response.completed", b"event: response.incomplete")
APIS: Mapping[str, Api] = {
    api.name: api
    for api in (
        CHAT,
        Api(
            "messages",
            "/v1/messages",
            messages_body,
            b"event: content_block_delta",
            (b"event: message_stop",),
            _pattern("output_tokens"),
            _pattern("cache_read_input_tokens"),
            ("delta", "text"),
            headers="anthropic-version: 2023-06-01\r\n",
        ),
        *(
            Api(
                name,
                "/v1/responses",
                body,
                b"event: response.output_text.delta",
                _RESPONSES_ENDS,
                _pattern("output_tokens"),
                _pattern("cached_tokens"),
                ("delta",),
                stateful=stateful,
            )
            for name, body, stateful in (
                ("responses", responses_body, False),
                ("responses-id", stateful_body, True),
            )
        ),
    )
}
"""By name."""


def text_of(api: Api, stream: bytes) -> str:
    """The text of a stream that came to its end."""
    parts: list[str] = []
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {") and b"delta" in line:
            found: object = orjson.loads(line[6:])
            for key in api.delta:
                found = _at(found, key)
            if isinstance(found, str):
                parts.append(found)
    return "".join(parts)


def _at(value: object, key: str | int) -> object:
    if isinstance(key, int):
        return value[key] if isinstance(value, list) and len(value) > key else None
    return value.get(key) if isinstance(value, dict) else None


_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[^"]+)"')


def response_id(stream: bytes) -> str | None:
    """Of /v1/responses: what the response is called."""
    found = _RESPONSE_ID.search(stream)
    return None if found is None else found[1].decode()
