# SPDX-License-Identifier: Apache-2.0
"""What a request is for the engine, whichever API it came by: prompts, limits, and what each choice will say.

Parsing (in the module of each API) is where untrusted input is checked and bounded; what leaves it as a
`GenerationCall` needs no more checks but the model's length, which `plan` checks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Protocol

import xxhash

from lbproxy.sim.engine.engine import SimRequest
from lbproxy.sim.mock.apis.conversation import THOUGHT_BEGINS, thought
from lbproxy.sim.mock.apis.fields import EngineError, Json, bad_request, canonical, invalid, refused, required, shown
from lbproxy.sim.mock.apis.tools import Forced, SaidPart, choose, example
from lbproxy.sim.mock.text import (
    TOKEN_BYTES,
    PlannedAnswer,
    answer,
    begun,
    block_hashes,
    from_token_ids,
    pad,
    reflection,
    rest_of,
    token_count,
)

MAX_SEQUENCES = 2048
"""Prompts times choices in one call: OpenAI's limit for batched inputs."""
MAX_CALL_TOKENS = 2**22
"""Tokens of all prompts and choices in one call: what the server works out at once must not hold up its clock."""
ENOUGH_TOKENS = 4096
"""Who sets a lower limit gets as many tokens: load generators count on it, and most APIs have no `ignore_eos`. A limit
from here on means "as many as it takes", as agents send it, and the response ends by itself."""

_GARBLED = bytes.maketrans(
    ascii_letters.encode(),
    (ascii_lowercase[13:] + ascii_lowercase[:13] + ascii_uppercase[13:] + ascii_uppercase[:13]).encode(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A generation request that is well-formed."""

    model: str | None
    """None: not named, which means the served model."""
    prompts: tuple[bytes, ...]
    """Not empty, and none of them is."""
    max_tokens: int | None
    """At least 1; None: to the natural end, or to the model's limit with `ignore_eos`. See ENOUGH_TOKENS."""
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    forced: Forced | None = None
    """The response is a tool call."""
    schema: Json | None = None
    """The response is JSON that fits this schema."""
    reasons: bool = False
    """The response begins with reasoning."""
    begun: bytes | None = b""
    """The beginning of the response, which the client has; None: the prompt may end with it."""


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """One sequence of a call, and what it will say."""

    prompt_tokens: int
    answer: PlannedAnswer
    block_hashes: list[int]
    adapter: str | None = None
    """The LoRA adapter that says it."""
    marked: tuple[SaidPart, ...] = ()
    """Its parts, if it is more than text."""

    def request(self, request_id: str, rank: int | None = None) -> SimRequest:
        """The work that this choice is for the engine. `rank`: the client's."""
        return SimRequest(request_id, self.prompt_tokens, self.answer.tokens, self.block_hashes, self.adapter, rank)

    def is_last(self, position: int) -> bool:
        """Is this token the last one?"""
        return position == self.answer.tokens - 1

    @property
    def parts(self) -> tuple[SaidPart, ...]:
        """What the client is told, in order; not empty."""
        return self.marked or (SaidPart("text", range(self.answer.begun, len(self.answer.text))),)

    @property
    def call(self) -> SaidPart | None:
        """The tool call with which it ends."""
        return self.marked[-1] if self.marked and self.marked[-1].kind == "call" else None

    def piece(self, position: int) -> tuple[int, str]:
        """What one token has of which part: the part's number, and often no text."""
        begin, parts = position * TOKEN_BYTES, self.parts
        number = next((n for n, part in enumerate(parts) if begin < part.place.stop), len(parts) - 1)
        place = parts[number].place
        return number, self.answer.text[max(begin, place.start) : min(begin + TOKEN_BYTES, place.stop)].decode("ascii")

    def begins(self, position: int) -> bool:
        """Is this token the first one of its part, or of the markup before it?"""
        return position == 0 or self.piece(position - 1)[0] != self.piece(position)[0]

    def whole(self, part: SaidPart) -> str:
        """All of a part; cut off if the response was."""
        return self.answer.text[part.place.start : part.place.stop].decode("ascii")


@dataclass(frozen=True, slots=True)
class Identity:
    """What every body and event of one response repeats."""

    id: str
    created: int
    """Unix seconds."""
    model: str

    def head(self, kind: str) -> Json:
        """The fields that every object of OpenAI's older APIs starts with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def part(self, prefix: str, index: int = 0) -> str:
        """An id for a part of the response: a message, a tool call."""
        return f"{prefix}{xxhash.xxh3_64_hexdigest(f'{prefix}:{self.id}:{index}'.encode())}"


def garbled(choice: PlannedChoice) -> PlannedChoice:
    """What a choice says when it was computed from wrong KV: as much, in the same form, and visibly something else."""
    said = choice.answer
    return replace(choice, answer=replace(said, text=said.text.translate(_GARBLED)))


class Writer(Protocol):
    """One response in the form of one API: its body; or its server-sent events or lines, if it is streamed."""

    content_type: str = "text/event-stream; charset=utf-8"

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """The complete body of a response that is not streamed. `cached_tokens`: of all prompts."""

    def failed(self, error: EngineError) -> bytes:
        """As recorded of vLLM whose engine dies: the head has gone out with 200."""
        return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"

    def accepted(self, choices: Sequence[PlannedChoice]) -> bytes:
        """What goes out with the head, before anything is computed."""
        return b""

    def opening(self, choices: Sequence[PlannedChoice]) -> bytes:
        """What goes before the first token."""
        return b""

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        """One token of one choice."""

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        """What follows the last token of the last choice."""


def plan(call: GenerationCall, *, max_model_len: int, seed: int, adapter: str | None = None) -> list[PlannedChoice]:
    """What the server will do for a call: `n` choices for each prompt, in the order of their indexes. Each adapter says
    something else.

    Raises `EngineError` for what does not fit into the model. Linear in the tokens, and so bounded.
    """
    choices: list[PlannedChoice] = []
    tokens = 0
    for prompt in call.prompts:
        prompt_tokens = token_count(len(prompt))
        limit = _output_limit(prompt_tokens, call.max_tokens, max_model_len)
        tokens += (prompt_tokens + limit) * call.n
        if tokens > MAX_CALL_TOKENS:
            raise refused(f"At most {MAX_CALL_TOKENS} tokens in one request, prompts times n included.", "n", call.n)
        for choice in range(call.n):
            key = f"{seed}:{call.seed}:{choice}{'' if adapter is None else f':{adapter}'}"
            size = begun(prompt, key) if call.begun is None else len(call.begun)
            if size:
                choices.append(_go_on(call, prompt, size, key, limit, adapter))
                continue
            said, parts = _say(call, prompt, key, limit)
            hashes = block_hashes(pad(prompt) + said.computed, adapter)
            choices.append(PlannedChoice(prompt_tokens, said, hashes, adapter, parts))
    return choices


def _go_on(call: GenerationCall, prompt: bytes, size: int, key: str, limit: int, adapter: str | None) -> PlannedChoice:
    """The rest of a response of which the client has `size` bytes, with which a completion's prompt ends."""
    if call.begun is None:
        prompt = prompt[:-size]
    tokens = size // TOKEN_BYTES
    asked = None if call.max_tokens is None else call.max_tokens + tokens
    said, _ = _say(replace(call, max_tokens=asked), prompt, key, limit + tokens)
    rest = rest_of(said, size)
    hashes = block_hashes(pad(prompt) + said.computed, adapter)
    return PlannedChoice(token_count(len(prompt)) + tokens, rest, hashes, adapter)


def _say(call: GenerationCall, prompt: bytes, key: str, limit: int) -> tuple[PlannedAnswer, tuple[SaidPart, ...]]:
    """One response of at most `limit` tokens, and its parts."""
    own = f"{key}:{xxhash.xxh3_64_hexdigest(prompt)}"
    reasoning = reflection(own) if call.reasons else b""
    before = thought(reasoning.decode("ascii"))
    room = max(1, limit - len(before) // TOKEN_BYTES)
    part = None
    if call.forced is not None:
        text, part = choose(call.forced, own)
        said = _given_answer(text, room)
    elif call.schema is not None:
        said = _given_answer(canonical(example(call.schema, own)), room)
    else:
        natural_end = not call.ignore_eos and (call.max_tokens is None or call.max_tokens >= ENOUGH_TOKENS)
        said = answer(prompt, key, max_tokens=room, natural_end=natural_end, stop=call.stop)
    if part is None and not before:
        return said, ()
    part = part or SaidPart("text", range(len(said.text)))
    begin = len(THOUGHT_BEGINS)
    place = range(len(before) + part.place.start, len(before) + part.place.stop)
    parts = (SaidPart("reasoning", range(begin, begin + len(reasoning))), part._replace(place=place))[not before :]
    most = limit * TOKEN_BYTES
    if len(before) >= most:
        return PlannedAnswer(before[:most], limit, "length", None, before[:most]), parts[:1]
    tokens = len(before) // TOKEN_BYTES + said.tokens
    joined = replace(said, text=before + said.text, tokens=tokens, computed=before + said.computed)
    return joined, parts


def _given_answer(text: str, limit: int) -> PlannedAnswer:
    said = text.encode("ascii")[: limit * TOKEN_BYTES]
    reason = "stop" if len(said) == len(text) else "length"
    return PlannedAnswer(said, token_count(len(said)), reason, None, said)


def prefills(prompts: Sequence[bytes], *, max_model_len: int, adapter: str | None = None) -> list[PlannedChoice]:
    """What prompts are that are read and answered without text (embeddings, scores): each with the one token that the
    engine cannot do without.
    """
    nothing = PlannedAnswer(b"", 1, "stop", None, b"")
    choices: list[PlannedChoice] = []
    for prompt in prompts:
        prompt_tokens = token_count(len(prompt))
        _output_limit(prompt_tokens, 1, max_model_len)
        choices.append(PlannedChoice(prompt_tokens, nothing, block_hashes(pad(prompt), adapter), adapter))
    return choices


def _output_limit(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    length = f"This model's maximum context length is {max_model_len} tokens. However, "
    if max_tokens is not None and max_tokens > max_model_len:
        message = (
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens."
        )
        raise refused(message, "max_tokens", max_tokens)
    if prompt_tokens >= max_model_len:
        # vLLM stops tokenising one token above the limit, hence "at least".
        least = min(prompt_tokens, max_model_len + 1)
        message = (
            f"{length}your prompt contains at least {least} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt."
        )
        raise refused(message, "input_tokens", least)
    if max_tokens is None:
        return max_model_len - prompt_tokens
    if prompt_tokens + max_tokens > max_model_len:
        message = (
            f"{length}you requested {max_tokens} output tokens and your prompt contains at least {prompt_tokens} input "
            f"tokens, for a total of at least {prompt_tokens + max_tokens} tokens. Please reduce the length of the "
            "input prompt or the number of requested output tokens."
        )
        raise refused(message, "input_tokens", prompt_tokens)
    return max_tokens


def at_least_one(max_tokens: int | None, name: str = "max_tokens") -> int | None:
    """A limit of output tokens, checked."""
    if max_tokens is not None and max_tokens < 1:
        raise refused(f"{name} must be at least 1, got {max_tokens}.", name, max_tokens)
    return max_tokens


def prompts_in(fields: Json, name: str) -> tuple[bytes, ...]:
    """One text, several, the token ids of one, or the token ids of several."""
    given = required(fields, name)
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(several) > MAX_SEQUENCES:
        raise refused(f"At most {MAX_SEQUENCES} prompts in one request.", name, len(several))
    prompts: list[bytes] = []
    for prompt in several:
        if isinstance(prompt, str):
            prompts.append(prompt.encode())
        elif isinstance(prompt, list):
            prompts.append(text_of_ids(prompt, name))
        else:
            raise invalid("string_type", f"body.{name}", "Input should be a valid string", shown(prompt))
    if not all(prompts):
        raise bad_request(f"Either {name} or {name}_embeds must be provided and non-empty.")
    return tuple(prompts)


def text_of_ids(ids: list[object], name: str) -> bytes:
    """The text of token ids, checked."""
    try:
        return from_token_ids(ids)  # type: ignore[arg-type]  # the packing itself is the check
    except struct.error:
        raise invalid("int_type", f"body.{name}", "Input should be valid token ids", shown(ids)) from None


def prompt_tokens_of(choices: Sequence[PlannedChoice], n: int = 1) -> int:
    """Tokens of all prompts: one counts once however many choices were made from it."""
    return sum(choice.prompt_tokens for choice in choices[::n])


def output_tokens_of(choices: Sequence[PlannedChoice]) -> int:
    """Tokens generated."""
    return sum(choice.answer.tokens for choice in choices)
