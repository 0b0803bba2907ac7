# SPDX-License-Identifier: Apache-2.0
"""/v1/responses. Shapes are those recorded from vLLM 0.32 (its own fields and nulls are kept), and of function calls
those of its source.

A response that is stored keeps the turns of its conversation, without `instructions`: those hold for one request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, Writer, at_least_one
from lbproxy.sim.mock.apis.conversation import ConversationTurn, Turns, asked, called, render, thought
from lbproxy.sim.mock.apis.fields import (
    EngineError,
    Json,
    boolean,
    integer,
    invalid,
    model_of,
    number,
    objects,
    required,
    server_event,
    shown,
    text_of,
    typed,
)
from lbproxy.sim.mock.apis.tools import Forced, SaidPart, Tool, forced_by, schema_of, tool_of
from lbproxy.sim.mock.text import token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall:
    """A request that is well-formed."""

    call: GenerationCall
    turns: tuple[ConversationTurn, ...]
    """The conversation up to the response, without instructions."""
    fields: Json
    """The response object as far as the request says it, in vLLM's order."""
    store: bool
    background: bool

    def remembered(self, choice: PlannedChoice) -> tuple[ConversationTurn, ...]:
        """The conversation with its response, for the next request."""
        return (*self.turns, ConversationTurn("assistant", choice.answer.text))


def parse(fields: Json, former: Sequence[ConversationTurn] = ()) -> ResponsesCall:
    """A body of POST /v1/responses. `former`: the conversation of `previous_response_id`."""
    tools = [tool for tool in map(_tool, objects(fields, "tools")) if tool is not None]
    instructions = text_of(fields, "instructions")
    turns = tuple(_read(required(fields, "input"), former).turns)
    reasoning = typed(fields, "reasoning", dict, "dictionary")
    ignore_eos = boolean(fields, "ignore_eos")
    system = [ConversationTurn("system", instructions.encode())] if instructions else []
    limit = at_least_one(integer(fields, "max_output_tokens"))
    text = typed(fields, "text", dict, "dictionary")
    call = GenerationCall(
        model=model_of(fields),
        prompts=(render([*system, *turns], tools),),
        max_tokens=limit,
        ignore_eos=ignore_eos,
        seed=integer(fields, "seed"),
        stream=boolean(fields, "stream"),
        forced=_forced(fields, tools, "" if ignore_eos else asked(turns)),
        reasons=reasoning is not None and reasoning.get("effort") != "none",
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
        **dict.fromkeys(("id", "created_at", "incomplete_details")),
        "instructions": fields.get("instructions"),
        "metadata": typed(fields, "metadata", dict, "dictionary"),
        "model": None,
        "object": "response",
        "output": [],
        "parallel_tool_calls": parallel is not False,
        "temperature": 1.0 if temperature is None else temperature,
        "tool_choice": fields.get("tool_choice") or "auto" if tools else "none",
        "tools": tools,
        "top_p": 1.0 if top_p is None else top_p,
        "background": boolean(fields, "background"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": integer(fields, "max_tool_calls"),
        "previous_response_id": previous_id(fields),
        "prompt": None,
        "reasoning": typed(fields, "reasoning", dict, "dictionary"),
        "service_tier": text_of(fields, "service_tier") or "auto",
        "status": None,
        "text": typed(fields, "text", dict, "dictionary"),
        "top_logprobs": integer(fields, "top_logprobs"),
        "truncation": text_of(fields, "truncation") or "disabled",
        "usage": None,
        "user": text_of(fields, "user"),
        "presence_penalty": number(fields, "presence_penalty") or 0.0,
        "frequency_penalty": number(fields, "frequency_penalty") or 0.0,
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
    }


def _tool(tool: Json) -> Tool | None:
    """A function; None for tools of other kinds, which run at the server and which it does not have."""
    if tool.get("type") != "function":
        return None
    return tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _forced(fields: Json, tools: Sequence[Tool], words: str) -> Forced | None:
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return forced_by(str(choice or "auto") if tools else "none", tools, asked=words)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        message = "Input should be 'none', 'auto', 'required' or a function"
        raise invalid("literal_error", "body.tool_choice", message, shown(choice))
    return forced_by("named", tools, choice.get("name"), asked=words)


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

_CONTENTS = {"reasoning": ("reasoning_text", "reasoning_part"), "text": ("output_text", "content_part")}
"""What the events of a content, and of the part that holds it, are called."""


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
            "reasoning_tokens": sum(token_count(len(part.place)) for part in choice.parts if part.kind == "reasoning"),
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": choice.prompt_tokens + choice.answer.tokens,
    }


class ResponseWriter(Writer):
    """One response."""

    def __init__(self, identity: Identity, request: ResponsesCall, max_model_len: int) -> None:
        self._identity = identity
        self._request = request
        self._max_model_len = max_model_len
        self._events = 0
        self._open = -1
        """The number of the item that is being written."""

    def body(self, choice: PlannedChoice, status: str, cached_tokens: int = 0) -> Json:
        """The response object. `status`: queued, in_progress, cancelled; `completed` becomes `incomplete` by itself."""
        done = status == "completed"
        cut = done and choice.answer.finish_reason == "length"
        asked = self._request.fields
        return asked | {
            "id": self._identity.id,
            "created_at": self._identity.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._identity.model,
            "output": [self._item(choice, part, "completed") for part in choice.parts] if done else [],
            "max_output_tokens": asked["max_output_tokens"] or self._max_model_len - choice.prompt_tokens,
            "status": "incomplete" if cut else status,
            "usage": usage(choice, cached_tokens) if done else None,
        }

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int, status: str = "completed") -> bytes:
        """The response object; `status` as for `body`."""
        return orjson.dumps(self.body(choices[0], status, cached_tokens))

    def accepted(self, choices: Sequence[PlannedChoice]) -> bytes:
        """The response as it begins: vLLM sends it before anything is computed."""
        begun = self.body(choices[0], "in_progress")
        created = self._event("response.created", {"response": begun})
        return created + self._event("response.in_progress", {"response": begun})

    def opening(self, choices: Sequence[PlannedChoice]) -> bytes:
        """The first item of the output as it begins."""
        return self._opened(choices[0], 0)

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """What one token adds; nothing if it has no text."""
        number, piece = choice.piece(position)
        if not piece:
            return b""
        begun = b"" if number == self._open else self._closed(choice) + self._opened(choice, number)
        part = choice.parts[number]
        said: Json = {"delta": piece, "item_id": self._item_id(part)}
        if part.kind == "call":
            said["output_index"] = number
            return begun + self._event("response.function_call_arguments.delta", said)
        fields = {"content_index": 0, **said, **_logprobs(part), "output_index": number}
        return begun + self._event(f"response.{_CONTENTS[part.kind][0]}.delta", fields)

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The ends of the last item and of the response."""
        (choice,) = choices
        whole = self.body(choice, "completed", cached_tokens)
        return self._closed(choice) + self._event("response.completed", {"response": whole})

    def _opened(self, choice: PlannedChoice, number: int) -> bytes:
        """An item as it begins."""
        self._open, part = number, choice.parts[number]
        item = self._item(choice, part, "in_progress")
        added = self._event("response.output_item.added", {"item": item, "output_index": number})
        if part.kind == "call":
            return added
        empty = _content(part.kind, "") | _logprobs(part)
        fields = {"content_index": 0, "item_id": item["id"], "output_index": number, "part": empty}
        return added + self._event(f"response.{_CONTENTS[part.kind][1]}.added", fields)

    def _closed(self, choice: PlannedChoice) -> bytes:
        """The ends of the text and of the item that is being written."""
        number, part = self._open, choice.parts[self._open]
        item = self._item(choice, part, "completed")
        place: Json = {"item_id": item["id"], "output_index": number}
        if part.kind == "call":
            arguments: Json = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", arguments | place)]
        else:
            text, (delta, content) = choice.whole(part), _CONTENTS[part.kind]
            said: Json = {"content_index": 0, "item_id": item["id"], **_logprobs(part), "output_index": number}
            whole = {"content_index": 0} | place | {"part": _content(part.kind, text)}
            events = [
                self._event(f"response.{delta}.done", said, text=text),
                self._event(f"response.{content}.done", whole),
            ]
        events.append(self._event("response.output_item.done", {"item": item, "output_index": number}))
        return b"".join(events)

    def _item(self, choice: PlannedChoice, part: SaidPart, status: str) -> Json:
        """An item of the output: reasoning, a message, or a call."""
        said = choice.whole(part) if status == "completed" else ""
        if part.kind == "call":
            return {
                "arguments": said,
                "call_id": self._identity.part("call_"),
                "name": part.name,
                "type": "function_call",
                "id": self._item_id(part),
                "namespace": None,
                "status": status,
            }
        content = [_content(part.kind, said)] if status == "completed" else []
        if part.kind == "reasoning":
            return {
                "id": self._item_id(part),
                "summary": [],
                "type": "reasoning",
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self._item_id(part),
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _item_id(self, part: SaidPart) -> str:
        return self._identity.part({"reasoning": "rs_", "text": "msg_", "call": "fc_"}[part.kind])

    def _event(self, kind: str, fields: Json, **after: object) -> bytes:
        """One event. `after`: fields that stand behind the number."""
        body = fields | {"sequence_number": self._events} | after | {"type": kind}
        self._events += 1
        return server_event(body, kind)


def _logprobs(part: SaidPart) -> Json:
    """The field that events of text have, and those of reasoning have not."""
    return {"logprobs": []} if part.kind == "text" else {}


def _content(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"text": text, "type": "reasoning_text"}
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
