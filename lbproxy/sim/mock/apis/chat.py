# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions and /v1/completions. Shapes are those recorded from vLLM 0.32; fields that are always null there
are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from lbproxy.sim.mock.apis.call import (
    MAX_SEQUENCES,
    GenerationCall,
    Identity,
    PlannedChoice,
    Writer,
    at_least_one,
    output_tokens_of,
    prompt_tokens_of,
    prompts_in,
)
from lbproxy.sim.mock.apis.conversation import Turns, asked, called, render, thought
from lbproxy.sim.mock.apis.fields import (
    Json,
    bad_request,
    boolean,
    integer,
    invalid,
    model_of,
    objects,
    refused,
    required,
    server_event,
    shown,
    stops,
    text_of,
    typed,
)
from lbproxy.sim.mock.apis.tools import Forced, Tool, forced_by, schema_of, tool_of

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's and vLLM's default for completions; chat has none."""
FINGERPRINT = "lbproxy-mock"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What of a request decides the form of its response, and not its work."""

    chat: bool
    n: int = 1
    include_usage: bool = False
    named_tool: bool = False
    """vLLM then ends with `stop`, and with `tool_calls` after any other tool call."""


def parse_chat(fields: Json) -> tuple[GenerationCall, ResponseForm]:
    """A body of /v1/chat/completions."""
    limit = integer(fields, "max_completion_tokens")
    if limit is None:
        limit = integer(fields, "max_tokens")
    begun = _begun(fields)
    prompt, forced = chat_prompt(fields if begun is None else fields | {"messages": objects(fields, "messages")[:-1]})
    call, form = _call(fields, chat=True, prompts=(prompt,), max_tokens=limit, forced=forced)
    return replace(call, begun=begun or b""), form


def _begun(fields: Json) -> bytes | None:
    """The beginning of the response, if the last message is to be continued."""
    if not boolean(fields, "continue_final_message"):
        return None
    if fields.get("add_generation_prompt") is not False:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    last = (objects(fields, "messages") or [{}])[-1]
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        return None
    return content.encode()


def parse_completion(fields: Json) -> tuple[GenerationCall, ResponseForm]:
    """A body of /v1/completions."""
    limit = integer(fields, "max_tokens")
    if limit is None:
        limit = DEFAULT_COMPLETION_TOKENS
    call, form = _call(fields, chat=False, prompts=prompts_in(fields, "prompt"), max_tokens=limit, forced=None)
    return replace(call, begun=None), form


def chat_prompt(fields: Json) -> tuple[bytes, Forced | None]:
    """The prompt of a body with messages and tools, and the tool that the client forces."""
    tools = [_tool(tool) for tool in objects(fields, "tools")]
    turns = read_messages(required(fields, "messages")).turns
    words = "" if boolean(fields, "ignore_eos") else asked(turns)
    return render(turns, tools), _forced(fields, tools, words)


def read_messages(messages: object) -> Turns:
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", shown(messages))
    turns = Turns()
    for position, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise invalid("missing", f"body.messages.{position}.role", "Field required", shown(message))
        content = thought(message.get("reasoning") or message.get("reasoning_content"))
        content += turns.content(message.get("content"), f"body.messages.{position}.content")
        turns.add(role, content + _calls(message.get("tool_calls"), position))
    return turns


def _calls(given: object, position: int) -> bytes:
    """The tool calls of one message."""
    if given is None:
        return b""
    where = f"body.messages.{position}.tool_calls"
    if not isinstance(given, list):
        raise invalid("list_type", where, "Input should be a valid list", shown(given))
    found: list[bytes] = []
    for one in given:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict):
            raise invalid("missing", f"{where}.function", "Field required", shown(one))
        found.append(called(function.get("name"), function.get("arguments")))
    return b"".join(found)


def _tool(tool: Json) -> Tool:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid("missing", "body.tools.function", "Field required", shown(tool))
    return tool_of(function.get("name"), function.get("description"), function.get("parameters"))


def _forced(fields: Json, tools: Sequence[Tool], words: str) -> Forced | None:
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return forced_by(str(choice or "auto"), tools, asked=words)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        message = "Input should be 'none', 'auto', 'required' or a named function"
        raise invalid("literal_error", "body.tool_choice", message, shown(choice))
    return forced_by("named", tools, function.get("name"), asked=words)


def _reasons(fields: Json) -> bool:
    """Is reasoning asked for, in one of the ways in which clients of vLLM do?"""
    template = typed(fields, "chat_template_kwargs", dict, "dictionary") or {}
    by_template = any(template.get(name) is True for name in ("enable_thinking", "thinking"))
    return by_template or text_of(fields, "reasoning_effort") not in (None, "none")


def _call(
    fields: Json, *, chat: bool, prompts: tuple[bytes, ...], max_tokens: int | None, forced: Forced | None
) -> tuple[GenerationCall, ResponseForm]:
    at_least_one(max_tokens)
    n = integer(fields, "n")
    n = 1 if n is None else n
    if not 1 <= n * len(prompts) <= MAX_SEQUENCES:
        raise refused(f"n must be at least 1, and at most {MAX_SEQUENCES} with all prompts, got {n}.", "n", n)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("model_type", "body.stream_options", "Input should be a valid dictionary", shown(options))
    call = GenerationCall(
        model=model_of(fields),
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        stop=stops(fields),
        ignore_eos=boolean(fields, "ignore_eos"),
        seed=integer(fields, "seed"),
        stream=boolean(fields, "stream"),
        forced=forced,
        schema=schema_of(fields.get("response_format"), "response_format") if chat else None,
        reasons=chat and _reasons(fields),
    )
    return call, ResponseForm(chat, n, boolean(options, "include_usage"), forced is not None and forced.named)


# Responses.


def usage(choices: Sequence[PlannedChoice], n: int, cached_tokens: int) -> Json:
    """The usage object of a finished call; `cached_tokens` over all of its prompts."""
    prompt_tokens = prompt_tokens_of(choices, n)
    completion_tokens = output_tokens_of(choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _whole_choice(identity: Identity, form: ResponseForm, index: int, choice: PlannedChoice) -> Json:
    said: Json = {"text": choice.answer.text[choice.answer.begun :].decode("ascii")}
    if form.chat:
        parts = {part.kind: choice.whole(part) for part in choice.parts}
        text = parts.get("text", "" if form.named_tool else None)
        message: Json = {"role": "assistant", "content": text, "refusal": None, "function_call": None}
        if choice.call is not None:
            function = {"name": choice.call.name, "arguments": parts["call"]}
            message["tool_calls"] = [
                {"id": identity.part("chatcmpl-tool-", index), "type": "function", "function": function}
            ]
        said = {"message": message | {"reasoning": parts.get("reasoning")}}
    return {
        "index": index,
        **said,
        "logprobs": None,
        "finish_reason": _finish_reason(form, choice),
        "stop_reason": choice.answer.stop_reason,
        "token_ids": None,
    }


def _finish_reason(form: ResponseForm, choice: PlannedChoice) -> str:
    reason = choice.answer.finish_reason
    return "tool_calls" if choice.call is not None and reason == "stop" and not form.named_tool else reason


class ChatWriter(Writer):
    """Streamed, an event for each token, fast enough for hundreds of streams; or, after the first, for `interval`
    tokens.
    """

    def __init__(self, identity: Identity, form: ResponseForm, interval: int = 1) -> None:
        self._interval = interval
        self._identity = identity
        self._form = form
        self._kind = "chat.completion.chunk" if form.chat else "text_completion"
        head = orjson.dumps(identity.head(self._kind))[:-1]
        self._before_index = b"data: " + head + b',"choices":[{"index":'
        if form.chat:
            self._before_text = b',"delta":{"content":'
            self._after_text = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        else:
            self._before_text = b',"text":'
            self._after_text = (
                b',"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
            )

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        identity, form = self._identity, self._form
        body = identity.head("chat.completion" if form.chat else "text_completion")
        body["choices"] = [_whole_choice(identity, form, index, choice) for index, choice in enumerate(choices)]
        used = usage(choices, form.n, cached_tokens)
        body |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": used, "kv_transfer_params": None}
        return orjson.dumps(body)

    def opening(self, choices: Sequence[PlannedChoice]) -> bytes:
        """What goes before the first token: the roles in a chat, nothing in a completion."""
        if not self._form.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(choices))
        )

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        if choice.is_last(position) or choice.marked:
            return self._slow_token(choice, index, position)
        if position % self._interval:
            return b""
        text = orjson.dumps(choice.answer.token(position, position - self._interval))
        return b"%b%d%b%b%b" % (self._before_index, index, self._before_text, text, self._after_text)

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The event that `include_usage` asks for, and the end."""
        if not self._form.include_usage:
            return DONE
        used = usage(choices, self._form.n, cached_tokens)
        return self._event([], usage=used, system_fingerprint=FINGERPRINT) + DONE

    def _slow_token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        said: Json = {"text": choice.answer.token(position, (position - 1) // self._interval * self._interval)}
        last = choice.is_last(position)
        if self._form.chat:
            delta = self._delta(choice, index, position) if choice.marked else {"content": said["text"]}
            if delta is None:
                if not last:
                    return b""
                delta = {} if choice.call is not None else {"content": ""}
            said = {"delta": delta}
        body: Json = {"index": index, **said, "logprobs": None, "finish_reason": None, "token_ids": None}
        if not last:
            return self._event([body])
        del body["token_ids"]
        body |= {
            "finish_reason": _finish_reason(self._form, choice),
            "stop_reason": choice.answer.stop_reason,
            "token_ids": None,
        }
        return self._event([body], system_fingerprint=FINGERPRINT)

    def _delta(self, choice: PlannedChoice, index: int, position: int) -> Json | None:
        """What one token adds, None if nothing: to a call the tool's name with the first, then pieces of arguments."""
        number, piece = choice.piece(position)
        part = choice.parts[number]
        if part.kind != "call":
            return {"content" if part.kind == "text" else "reasoning": piece} if piece else None
        call: Json = {"index": 0}
        function: Json = {"arguments": piece}
        if choice.begins(position):
            call = {"id": self._identity.part("chatcmpl-tool-", index), "type": "function", "index": 0}
            function = {"name": part.name} | function
        elif not piece:
            return None
        return {"tool_calls": [call | {"function": function}]}

    def _event(self, choices: list[Json], **more: object) -> bytes:
        return server_event(self._identity.head(self._kind) | {"choices": choices} | more)
