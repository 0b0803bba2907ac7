# SPDX-License-Identifier: Apache-2.0
"""What a response says that it used: the one reader of it, for streams and whole bodies, by each engine's convention.

    usage                                   OpenAI's APIs, but the events of ...
    response.usage                          ... /v1/responses; and of /v1/messages: the first event has
    message.usage                           the prompt, the last ones `usage` with the rest
    meta_info                               SGLang's /generate: one, or a list of them; in a stream of the text so far
    tokens_evaluated, tokens_predicted      llama.cpp's /completion and /infill
    prompt_eval_count, eval_count           Ollama's API: in the last line of a stream

The value is read where it belongs, not where the text `"usage"` occurs: clients choose what many fields of a response
say. What is nearly always the case costs little: the object is the last of its text that is named so, and what follows
it closes just the outermost object. Anything else is walked (`json_walk`). No engine writes the key with escapes.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

from lbproxy.core.requests.outline import is_light
from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.json_walk import JsonWalk

USAGE_KEY: Final = b'"usage"'
_KEY_BYTES: Final = len(USAGE_KEY)
_TOO_MANY: Final = 1_000_000_000
NATIVE_BYTES: Final = 1 << 20
"""A longer body of an engine's own API is not read: 2 ms of the event loop."""
_DECODER: Final = json.JSONDecoder()


def read_usage(body: bytes, *, native: bool = False) -> Usage | None:
    """Return the usage of a response that arrived in one piece; None if there is none. `native`: it may be in an
    engine's own API.
    """
    said = _usage_at_end(body)
    if said is None and native and len(body) <= NATIVE_BYTES:
        return read_native_body(body)
    if said is None and body.find(USAGE_KEY) >= 0:
        walk = JsonWalk(b"usage")
        walk.feed(body)
        said = _first_object(walk.value)
    return None if said is None else _counts(said)


def read_value(text: bytes) -> Usage | None:
    """Return the usage that a text begins with; None if it begins with none."""
    said = _first_object(text)
    return None if said is None else _counts(said)


def _usage_at_end(text: bytes) -> dict[str, Any] | None:
    """The object `usage`, if it is the last that is named so and the text after it closes one object: then it is a
    member of the outermost.
    """
    at = text.rfind(USAGE_KEY)
    if at < 0 or text[at - 1] == 92:  # the end of a longer key
        return None
    try:
        if text.endswith(b"}}") and text[at + _KEY_BYTES] == 58:  # mostly nothing follows
            said = orjson.loads(text[at + _KEY_BYTES + 1 : -1])
        else:
            said = orjson.loads(b"{" + text[at:])["usage"]
    except orjson.JSONDecodeError:
        return None
    return said if type(said) is dict else None


def _first_object(text: bytes) -> dict[str, Any] | None:
    """The object with which a text begins."""
    try:
        said, _ = _DECODER.raw_decode(text.lstrip().decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _counts(said: dict[str, Any]) -> Usage | None:
    """The counts of a `usage`. None if it has none."""
    prompt, completion = said.get("prompt_tokens"), said.get("completion_tokens")
    details = said.get("prompt_tokens_details")
    is_usual = (
        type(prompt) is int and type(completion) is int and 0 <= prompt < _TOO_MANY and 0 <= completion < _TOO_MANY
    )
    if is_usual and details is None and "cached_tokens" not in said:
        return tuple.__new__(Usage, (prompt, None, completion, None, False))  # a constructor takes as long as the rest
    if prompt is None:
        prompt = said.get("input_tokens")
    if completion is None:
        completion = said.get("output_tokens")
    if details is None:
        details = said.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else None
    written = None
    if cached is None:
        cached = said.get("cached_tokens")
    if "cache_read_input_tokens" in said or "cache_creation_input_tokens" in said:
        cached = said.get("cache_read_input_tokens") if cached is None else cached
        written = _count(said.get("cache_creation_input_tokens")) or 0
    prompt, completion, cached = _count(prompt), _count(completion), _count(cached)
    if prompt is None and completion is None and cached is None:
        return None
    return Usage(prompt, cached, completion, written)


def _count(value: object) -> int | None:
    """A number of tokens; None if it is none."""
    if type(value) is int:
        return value if 0 <= value < _TOO_MANY else None
    return int(value) if type(value) is float and 0.0 <= value < _TOO_MANY else None


# Engines' own APIs


def read_native_body(body: bytes) -> Usage | None:
    """Return the usage of a body of an engine's own API: of several responses the sum. None if it takes too long to
    read.
    """
    if not is_light(body):
        return None
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    total: Usage | None = None
    for one in said if type(said) is list else [said]:
        total = added(total, read_native(one) if type(one) is dict else None)
    return total


def added(one: Usage | None, other: Usage | None) -> Usage | None:
    """The sum of two usages."""
    if one is None or other is None:
        return other if one is None else one
    return Usage(
        _sum(one.prompt_tokens, other.prompt_tokens),
        _sum(one.cached_tokens, other.cached_tokens),
        _sum(one.completion_tokens, other.completion_tokens),
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None and other is None else (one or 0) + (other or 0)


def read_native(said: dict[str, Any]) -> Usage | None:
    """Return the usage of one response, or of an event, of an engine's own API."""
    meta = said.get("meta_info")
    if type(meta) is dict:
        return _counts(meta)
    prompt, completion = _count(said.get("tokens_evaluated")), _count(said.get("tokens_predicted"))
    if prompt is None and completion is None:
        prompt, completion = _count(said.get("prompt_eval_count")), _count(said.get("eval_count"))
        if prompt is not None or completion is not None:
            return Usage(prompt, None, completion)
        usage = said.get("usage")
        return _counts(usage) if type(usage) is dict else None
    timings = said.get("timings")
    return Usage(prompt, _count(timings.get("cache_n")) if type(timings) is dict else None, completion)


# Streams


class StreamUsage:
    """The usage of an event stream, from those of its lines that may have one."""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = None
        """The first such object, once another follows: in Anthropic's streams only the first may have the prompt."""
        self._last: dict[str, Any] | None = None
        self._walk: JsonWalk | None = None
        """The walk of the line that the last piece began."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        if self._walk is not None:
            until = data.find(b"\n", start, end)
            self._walk.feed(data[start : end if until < 0 else until])
            if until < 0:
                return
            self._note(_first_object(self._walk.value))
            self._walk = None
            start = until + 1
        complete = data.rfind(b"\n", start, end) + 1 or start
        at = data.find(USAGE_KEY, start, complete)
        while at >= 0:
            until = data.find(b"\n", at, complete)
            begin = max(start, data.rfind(b"\n", start, at) + 1)
            self._read_line(data[begin:until])
            at = data.find(USAGE_KEY, until, complete)
        if complete < end:
            self._walk = JsonWalk(b"usage")
            self._walk.feed(data[complete:end])

    def _read_line(self, line: bytes) -> None:
        said = _usage_at_end(line)
        if said is None:
            walk = JsonWalk(b"usage")
            walk.feed(line)
            said = _first_object(walk.value)
        self._note(said)

    def _note(self, said: dict[str, Any] | None) -> None:
        if said is not None:
            self._first = self._last if self._first is None else self._first
            self._last = said

    @property
    def usage(self) -> Usage | None:
        """The usage so far; None if there was none."""
        if self._walk is not None:  # the stream ended in the middle of this line
            self._note(_first_object(self._walk.value))
            self._walk = None
        usage = None if self._last is None else _counts(self._last)
        if usage is None or self._first is None or (usage.prompt_tokens is not None and usage.written_tokens is None):
            return usage
        first = _counts(self._first)
        return usage if first is None else _merged(first, usage)


class MessageUsage:
    """The usage of messages of JSON, each of which may report that of another response: their sum."""

    def __init__(self) -> None:
        self.total: Usage | None = None
        """None if none was reported."""
        self._walk: JsonWalk | None = None
        """The walk of a message that came in pieces."""

    def feed(self, piece: bytes, *, ends: bool) -> Usage | None:
        """The next piece of a message, which `ends` with it. Returns what the message reports, once it ended."""
        walk, self._walk = self._walk, None
        if walk is None and ends:
            usage = read_usage(piece)
        else:
            walk = walk or JsonWalk(USAGE_KEY[1:-1])
            walk.feed(piece)
            if not ends:
                self._walk = walk
                return None
            usage = read_value(walk.value)
        self.total = added(self.total, usage)
        return usage


def _merged(first: Usage, last: Usage) -> Usage:
    """Merge the first and last report of a stream that reports its prompt at the beginning and the rest at the end.
    vLLM's first report has the complete prompt; its last one has the parts of it.
    """
    prompt, cached, completion, written, _ = last
    if prompt is None:
        cached = first.cached_tokens if cached is None else cached
        completion = first.completion_tokens if completion is None else completion
        return Usage(first.prompt_tokens, cached, completion, first.written_tokens if written is None else written)
    if written is not None and first.prompt_tokens == prompt + (cached or 0) + written:
        return Usage(first.prompt_tokens, cached, completion)
    return last
