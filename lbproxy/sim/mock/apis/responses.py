# SPDX-License-Identifier: Apache-2.0
"""/v1/responses. Shapes are those recorded from vLLM 0.32 (its own fields and nulls are kept), and of function calls
those of its source.

A response that is stored keeps the turns of its conversation, without `instructions`: those hold for one request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, at_least_one
from lbproxy.sim.mock.apis.conversation import ConversationTurn, Turns, called, render, thought
from lbproxy.sim.mock.apis.fields import (
    EngineError,
    Json,
    boolean,
    dump,
    integer,
    invalid,
    model_of,
    number,
    objects,
    required,
    shown,
    text_of,
    typed,
)
from lbproxy.sim.mock.apis.tools import Forced, Tool, forced_by, schema_of, tool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall:
    """A request that is well-formed."""

    call: GenerationCall
    turns: tuple[ConversationTurn, ...]
    """The conversation up to the response, without instructions."""
    fields: Json
    """What the response object repeats of the request."""
    store: bool
    background: bool

    def remembered(self, choice: PlannedChoice) -> tuple[ConversationTurn, ...]:
        """The conversation with its response, for the next request."""
        return (*self.turns, ConversationTurn("assistant", choice.answer.text))


def parse(fields: Json, former: Sequence[ConversationTurn] = ()) -> ResponsesCall:
    """A body of POST /v1/responses. `former`: the conversation of `previous_response_id`."""
    tools = [tool for tool in map(_tool, objects(fields, "tools")) if tool is not None]
    forced = _forced(fields, tools)
    instructions = text_of(fields, "instructions")
    turns = tuple(_read(required(fields, "input"), former).turns)
    system = [ConversationTurn("system", instructions.encode())] if instructions else []
    limit = at_least_one(integer(fields, "max_output_tokens"))
    text = typed(fields, "text", dict, "dictionary")
    call = GenerationCall(
        model=model_of(fields),
        prompts=(render([*system, *turns], tools),),
        max_tokens=limit,
        ignore_eos=boolean(fields, "ignore_eos"),
        seed=integer(fields, "seed"),
        stream=boolean(fields, "stream"),
        forced=forced,
        schema=schema_of(text.get("format"), "text.format") if text else None,
    )
    store = typed(fields, "store", bool, "boolean")
    background = boolean(fields, "background")
    return ResponsesCall(
        call=call, turns=turns, fields=_repeated(fields), store=store is not False, background=background
    )


def previous_id(fields: Json) -> str | None:
    """The response that a request continues."""
    return text_of(fields, "previous_response_id")


def not_found(response_id: str) -> EngineError:
    """vLLM's words for a response that it does not have."""
    return EngineError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")


def not_cancellable() -> EngineError:
    """vLLM's words for one that has ended, or never ran in the background."""
    return EngineError(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")


def _repeated(fields: Json) -> Json:
    tools = objects(fields, "tools")
    temperature, top_p = number(fields, "temperature"), number(fields, "top_p")
    parallel = typed(fields, "parallel_tool_calls", bool, "boolean")
    return {
        "instructions": fields.get("instructions"),
        "metadata": typed(fields, "metadata", dict, "dictionary"),
        "parallel_tool_calls": parallel is not False,
        "temperature": 1.0 if temperature is None else temperature,
        "tool_choice": fields.get("tool_choice") or "auto" if tools else "none",
        "tools": tools,
        "top_p": 1.0 if top_p is None else top_p,
        "background": boolean(fields, "background"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": integer(fields, "max_tool_calls"),
        "previous_response_id": previous_id(fields),
        "reasoning": typed(fields, "reasoning", dict, "dictionary"),
        "service_tier": text_of(fields, "service_tier") or "auto",
        "text": typed(fields, "text", dict, "dictionary"),
        "top_logprobs": integer(fields, "top_logprobs"),
        "truncation": text_of(fields, "truncation") or "disabled",
        "user": text_of(fields, "user"),
        "presence_penalty": number(fields, "presence_penalty") or 0.0,
        "frequency_penalty": number(fields, "frequency_penalty") or 0.0,
    }


def _tool(tool: Json) -> Tool | None:
    """A function; None for tools of other kinds, which run at the server and which it does not have."""
    if tool.get("type") != "function":
        return None
    return tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _forced(fields: Json, tools: Sequence[Tool]) -> Forced | None:
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return forced_by(str(choice or "auto") if tools else "none", tools)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        message = "Input should be 'none', 'auto', 'required' or a function"
        raise invalid("literal_error", "body.tool_choice", message, shown(choice))
    return forced_by("named", tools, choice.get("name"))


def _read(given: object, former: Sequence[ConversationTurn]) -> Turns:
    turns = Turns(former)
    if isinstance(given, str):
        turns.add("user", given.encode())
        return turns
    if not isinstance(given, list):
        raise invalid("string_type", "body.input", "Input should be a valid string or list", shown(given))
    thinking = b""
    for position, item in enumerate(given):
        if not isinstance(item, dict):
            where = f"body.input.{position}"
            raise invalid("model_type", where, "Input should be a valid dictionary", shown(item))
        thinking = _read_item(turns, item, f"body.input.{position}", thinking)
    return turns


def _read_item(turns: Turns, item: Json, where: str, thinking: bytes) -> bytes:
    """One item of the input; returns the reasoning that belongs to the next one."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        parts = item.get("content")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        return thinking + thought("".join(text for text in texts if isinstance(text, str)))
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise invalid("missing", f"{where}.role", "Field required", shown(item))
        content = turns.content(item.get("content"), f"{where}.content")
        turns.add(role, thinking + content if role == "assistant" else content)
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        turns.add("tool", turns.content(item.get("output"), f"{where}.output"))
    elif isinstance(kind, str) and kind.endswith("_call"):
        arguments = item.get("arguments") or item.get("input") or item.get("action")
        said = called(item.get("name") or kind, arguments)
        if thinking:
            turns.add("assistant", thinking + said)
        else:
            turns.extend_assistant(said)
    return b""


# Responses.


def usage(choice: PlannedChoice, cached_tokens: int) -> Json:
    """The usage object of a finished response."""
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": choice.answer.tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": choice.prompt_tokens + choice.answer.tokens,
    }


class ResponseWriter:
    """The bodies and events of one response."""

    def __init__(self, identity: Identity, request: ResponsesCall, max_model_len: int) -> None:
        self._identity = identity
        self._request = request
        self._max_model_len = max_model_len
        self._events = 0

    def body(self, choice: PlannedChoice, status: str, cached_tokens: int = 0) -> Json:
        """The response object. `status`: queued, in_progress, cancelled; `completed` becomes `incomplete` by itself."""
        done = status == "completed"
        cut = done and choice.answer.finish_reason == "length"
        repeated = self._request.fields
        limit = repeated["max_output_tokens"] or self._max_model_len - choice.prompt_tokens
        return {
            "id": self._identity.id,
            "created_at": self._identity.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": repeated["instructions"],
            "metadata": repeated["metadata"],
            "model": self._identity.model,
            "object": "response",
            "output": [self._item(choice, "completed")] if done else [],
            **{name: repeated[name] for name in ("parallel_tool_calls", "temperature", "tool_choice", "tools")},
            "top_p": repeated["top_p"],
            "background": repeated["background"],
            "max_output_tokens": limit,
            "max_tool_calls": repeated["max_tool_calls"],
            "previous_response_id": repeated["previous_response_id"],
            "prompt": None,
            "reasoning": repeated["reasoning"],
            "service_tier": repeated["service_tier"],
            "status": "incomplete" if cut else status,
            "text": repeated["text"],
            "top_logprobs": repeated["top_logprobs"],
            "truncation": repeated["truncation"],
            "usage": usage(choice, cached_tokens) if done else None,
            "user": repeated["user"],
            "presence_penalty": repeated["presence_penalty"],
            "frequency_penalty": repeated["frequency_penalty"],
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
        }

    def accepted(self, choices: Sequence[PlannedChoice]) -> bytes:
        """The response as it begins: vLLM sends it before anything is computed."""
        begun = self.body(choices[0], "in_progress")
        created = self._event("response.created", {"response": begun})
        return created + self._event("response.in_progress", {"response": begun})

    def opening(self, choices: Sequence[PlannedChoice]) -> bytes:
        """The one item of the output as it begins."""
        (choice,) = choices
        item = self._item(choice, "in_progress")
        events = [self._event("response.output_item.added", {"item": item, "output_index": 0})]
        if choice.call is None:
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            fields = {"content_index": 0, "item_id": self._item_id(choice), "output_index": 0, "part": part}
            events.append(self._event("response.content_part.added", fields))
        return b"".join(events)

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """What one token adds; nothing if it has no text."""
        item_id = self._item_id(choice)
        if choice.call is not None:
            piece = choice.arguments(position)
            fields: Json = {"delta": piece, "item_id": item_id, "output_index": 0}
            return self._event("response.function_call_arguments.delta", fields) if piece else b""
        text = choice.answer.token(position)
        fields = {"content_index": 0, "delta": text, "item_id": item_id, "logprobs": [], "output_index": 0}
        return self._event("response.output_text.delta", fields) if text else b""

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The ends of the text, of the item and of the response."""
        (choice,) = choices
        item = self._item(choice, "completed")
        place: Json = {"item_id": item["id"], "output_index": 0}
        if choice.call is not None:
            arguments: Json = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", arguments | place)]
        else:
            text = choice.answer.text.decode("ascii")
            said: Json = {"content_index": 0, "item_id": item["id"], "logprobs": [], "output_index": 0}
            part = _text_part(text)
            events = [
                self._event("response.output_text.done", said, text=text),
                self._event("response.content_part.done", {"content_index": 0} | place | {"part": part}),
            ]
        events.append(self._event("response.output_item.done", {"item": item, "output_index": 0}))
        whole = self.body(choice, "completed", cached_tokens)
        events.append(self._event("response.completed", {"response": whole}))
        return b"".join(events)

    def _item(self, choice: PlannedChoice, status: str) -> Json:
        """The one item of the output: a message, or a call."""
        done = status == "completed"
        if choice.call is not None:
            return {
                "arguments": choice.all_arguments() if done else "",
                "call_id": self._identity.part("call_"),
                "name": choice.call.name,
                "type": "function_call",
                "id": self._item_id(choice),
                "namespace": None,
                "status": status,
            }
        return {
            "id": self._item_id(choice),
            "content": [_text_part(choice.answer.text.decode("ascii"))] if done else [],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _item_id(self, choice: PlannedChoice) -> str:
        return self._identity.part("msg_" if choice.call is None else "fc_")

    def _event(self, kind: str, fields: Json, **after: object) -> bytes:
        """One event. `after`: fields that stand behind the number."""
        body = fields | {"sequence_number": self._events} | after | {"type": kind}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump(body))


def _text_part(text: str) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def body_bytes(body: Json) -> bytes:
    """A response object as it is sent."""
    return orjson.dumps(body)
