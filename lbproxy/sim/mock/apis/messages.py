# SPDX-License-Identifier: Apache-2.0
"""Anthropic's /v1/messages and /v1/messages/count_tokens, as vLLM 0.32 serves them.

Usage as vLLM counts it: `message_start` has the complete prompt as `input_tokens`; `message_delta` and the body of a
non-streaming response take what was cached off it (`cache_read_input_tokens`), as Anthropic defines the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, Writer, at_least_one
from lbproxy.sim.mock.apis.conversation import Turns, asked, called, render, thought
from lbproxy.sim.mock.apis.fields import (
    EngineError,
    Json,
    boolean,
    dump,
    integer,
    invalid,
    objects,
    required,
    server_event,
    shown,
    stops,
    text_of,
    typed,
)
from lbproxy.sim.mock.apis.tools import Forced, SaidPart, Tool, forced_by, tool_of

BILLING_HEADER = "x-anthropic-billing-header"
"""What Claude Code puts before its system prompt, different each time; vLLM drops it (its pull request 36829)."""
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""What the events of each kind of part are called, and their field."""
_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def parse(fields: Json) -> GenerationCall:
    """A body of /v1/messages."""
    required(fields, "max_tokens")
    model, prompt, forced = _prompt(fields)
    thinking = typed(fields, "thinking", dict, "dictionary") or {}
    return GenerationCall(
        model=model,
        prompts=(prompt,),
        max_tokens=at_least_one(integer(fields, "max_tokens")),
        stop=stops(fields, "stop_sequences"),
        stream=boolean(fields, "stream"),
        forced=forced,
        reasons=thinking.get("type") in ("enabled", "adaptive"),
    )


def parse_count(fields: Json) -> tuple[str | None, bytes]:
    """A body of /v1/messages/count_tokens: the model and the prompt."""
    model, prompt, _ = _prompt(fields)
    return model, prompt


def error_body(error: EngineError) -> bytes:
    """A refusal in Anthropic's form. Bodies that are not well-formed get vLLM's own: FastAPI refuses them before the
    API that they are for is known.
    """
    if error.kind == "Bad Request":
        return error.body()
    return orjson.dumps({"type": "error", "error": {"type": error.kind, "message": error.message}})


def _prompt(fields: Json) -> tuple[str | None, bytes, Forced | None]:
    required(fields, "model")
    tools = [_tool(tool) for tool in objects(fields, "tools")]
    turns = Turns()
    system = _system_text(turns, fields.get("system"), "body.system")
    if system:
        turns.add("system", system)
    required(fields, "messages")
    for position, message in enumerate(objects(fields, "messages")):
        _read_message(turns, message, f"body.messages.{position}")
    said = turns.turns
    return text_of(fields, "model"), render(said, tools), _forced(fields, tools, asked(said))


def _tool(tool: Json) -> Tool:
    """A tool. Those that Anthropic runs itself have no schema, and are functions without parameters here."""
    return tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _forced(fields: Json, tools: Sequence[Tool], words: str) -> Forced | None:
    given = fields.get("tool_choice")
    kind = given.get("type") if isinstance(given, dict) else "auto" if given is None else None
    if not isinstance(kind, str) or kind not in _CHOICES:
        message = "Input should be 'auto', 'any', 'tool' or 'none'"
        raise invalid("literal_error", "body.tool_choice.type", message, shown(given))
    return forced_by(_CHOICES[kind], tools, given.get("name") if isinstance(given, dict) else None, asked=words)


def _system_text(turns: Turns, given: object, where: str) -> bytes:
    """A system prompt, without parts that change with each request."""
    if isinstance(given, list):
        given = [part for part in given if not _is_billing(part)]
    return turns.content(given, where)


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def _read_message(turns: Turns, message: Json, where: str) -> None:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        message_ = "Input should be 'user', 'assistant' or 'system'"
        raise invalid("literal_error", f"{where}.role", message_, shown(role))
    content = message.get("content")
    if role == "system":
        billing = isinstance(content, str) and content.startswith(BILLING_HEADER)
        text = b"" if billing else _system_text(turns, content, f"{where}.content")
        if text:
            turns.add("system", text)
    elif not isinstance(content, list):
        turns.add(str(role), turns.content(content, f"{where}.content"))
    else:
        _read_blocks(turns, str(role), content, where)


def _read_blocks(turns: Turns, role: str, blocks: list[object], where: str) -> None:
    """A message in blocks, in the order that vLLM gives them: results of tools, thoughts, texts and images, calls."""
    thoughts: list[bytes] = []
    plain: list[object] = []
    calls: list[bytes] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict):
            raise invalid("model_type", f"{where}.content", "Input should be a valid dictionary", shown(block))
        if kind == "thinking":
            thoughts.append(thought(block.get("thinking")))
        elif kind == "tool_use":
            calls.append(called(block.get("name"), block.get("input")))
        elif kind == "tool_result":
            _read_result(turns, block, where)
        else:
            plain.append(block)
    content = b"".join((*thoughts, turns.content(plain, where), *calls))
    if content or role == "assistant":
        turns.add(role, content)


def _read_result(turns: Turns, block: Json, where: str) -> None:
    """A tool's result: its texts are the tool's turn, and its images a turn of the user."""
    given = block.get("content")
    if not isinstance(given, list):
        turns.add("tool", turns.content(given, where))
        return
    texts = [part.get("text") for part in given if isinstance(part, dict) and part.get("type") == "text"]
    turns.add("tool", "\n".join(text for text in texts if isinstance(text, str)).encode())
    images = turns.content([part for part in given if isinstance(part, dict) and part.get("type") == "image"], where)
    if images:
        turns.add("user", images)


# Responses.


def count_body(tokens: int) -> bytes:
    """The body of a counted prompt."""
    return orjson.dumps({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


def usage(choice: PlannedChoice, cached_tokens: int) -> Json:
    """The usage of a finished response."""
    return {
        "input_tokens": choice.prompt_tokens - cached_tokens,
        "output_tokens": choice.answer.tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


def _parsed(arguments: str) -> object:
    """Arguments as an object; empty if the limit of tokens cut them."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


def _block(identity: Identity, part: SaidPart, said: str) -> Json:
    """A block of the content with this said of it so far."""
    if part.kind == "call":
        return {
            "type": "tool_use",
            "id": identity.part("chatcmpl-tool-"),
            "name": part.name,
            "input": _parsed(said),
        }
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": said, "signature": _signature(identity) if said else ""}
    return {"type": "text", "text": said}


def _signature(identity: Identity) -> str:
    """What Anthropic has clients send back with reasoning; nobody checks it here."""
    return identity.part("sig_")


def _stop(choice: PlannedChoice) -> tuple[str, str | None]:
    """Why it ended, and the stop sequence."""
    if choice.answer.finish_reason == "length":
        return "max_tokens", None
    if choice.call is not None:
        return "tool_use", None
    if choice.answer.stop_reason is not None:
        return "stop_sequence", choice.answer.stop_reason
    return "end_turn", None


class MessageWriter(Writer):
    """One message."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._begun: tuple[int, SaidPart] | None = None
        """The block that is being written, and its number."""

    def _message(self, content: list[Json], reason: str | None) -> Json:
        head: Json = {"id": self._identity.id, "type": "message", "role": "assistant", "content": content}
        return head | {"model": self._identity.model, "stop_reason": reason}

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        (choice,) = choices
        reason, stop = _stop(choice)
        body = self._message([_block(self._identity, part, choice.whole(part)) for part in choice.parts], reason)
        return dump(body | ({} if stop is None else {"stop_sequence": stop}) | {"usage": usage(choice, cached_tokens)})

    def opening(self, choices: Sequence[PlannedChoice]) -> bytes:
        """The message as it begins."""
        used = {"input_tokens": choices[0].prompt_tokens, "output_tokens": 0}
        begun = self._message([], None) | {"stop_sequence": None, "usage": used}
        return _event("message_start", {"message": begun})

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """What one token adds; nothing if it has no text."""
        number, piece = choice.piece(position)
        if not piece:
            return b""
        part = choice.parts[number]
        begin = b""
        if self._begun != (number, part):
            block = _block(self._identity, part, "")
            begin = self._ended() + _event("content_block_start", {"content_block": block, "index": number})
            self._begun = number, part
        kind, name = _DELTAS[part.kind]
        return begin + _event("content_block_delta", {"delta": {"type": kind, name: piece}, "index": number})

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The ends of the block and of the message."""
        reason, stop = _stop(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        events = [
            self._ended(),
            _event("message_delta", {"delta": delta, "usage": usage(choices[0], cached_tokens)}),
            _event("message_stop", {}),
        ]
        return b"".join(events)

    def _ended(self) -> bytes:
        """The end of the block that is being written, if any is."""
        if self._begun is None:
            return b""
        number, part = self._begun
        signed = b""
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _signature(self._identity)}
            signed = _event("content_block_delta", {"delta": delta, "index": number})
        return signed + _event("content_block_stop", {"index": number})


def _event(kind: str, fields: Json) -> bytes:
    return server_event({"type": kind} | fields, kind)
