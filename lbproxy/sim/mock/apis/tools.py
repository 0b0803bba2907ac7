# SPDX-License-Identifier: Apache-2.0
"""Tools: what they are in a prompt, whether the client forces one, and a call with arguments that fit its schema; and
responses that have to fit a schema themselves.

The simulated model calls a tool if it must (`tool_choice` required, any, or a name), or if the user's words name one:
"use the read_file tool", "call weather". What stands there in backticks becomes its arguments. The call is text in the
model's own output, as Hermes and Qwen write it; when the call comes back in the history it becomes the same text, so
that the next turn finds its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import Literal, NamedTuple

from lbproxy.sim.mock.apis.fields import Json, bad_request, canonical

MAX_DEPTH = 6
"""Depth of arguments; below it they are null."""
MAX_PROPERTIES = 64
"""Properties of one object in arguments."""
_ASKS = re.compile(
    r"\b(?:call|invoke|run|try|use)\s+(?:(?:the|a|your)\s+)?(?:(?:function|tool)\s+)?[`\"']?([\w.-]+)[`\"']?",
    re.IGNORECASE | re.ASCII,
)
_QUOTED = re.compile(r"`([^`\n]+)`")
_WORDS = ("alpha", "bravo", "delta", "oscar", "tango", "victor")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    text: str
    """As it stands in the prompt: the same for each API."""
    schema: Json


@dataclass(frozen=True, slots=True)
class Forced:
    """A call is wanted, and no text."""

    tools: tuple[Tool, ...]
    """One of them; not empty."""
    named: bool
    """The client named it. vLLM then ends with `stop`, else with `tool_calls`."""
    words: tuple[str, ...] = ()
    """What the user's words give for its arguments, in the order of the schema."""


class SaidPart(NamedTuple):
    """What a client is told of a stretch of generated text; what stands between parts is markup."""

    kind: Literal["reasoning", "text", "call"]
    place: range
    """Bytes of the text: of a call those of its arguments."""
    name: str = ""
    """The tool's."""


def tool_of(name: object, description: object, schema: object) -> Tool:
    """A tool, checked. A schema without a type is one of an object, as vLLM takes it."""
    if not isinstance(name, str) or not name:
        raise bad_request("A tool must have a name.", "tools")
    if schema is not None and not isinstance(schema, dict):
        raise bad_request(f"The parameters of the tool `{name}` must be a JSON schema.", "tools")
    full = {"type": "object", **(schema or {})}
    text = canonical({"name": name, "description": description, "parameters": full})
    return Tool(name, text, full)


def forced_by(choice: str, tools: Sequence[Tool], name: object = None, *, asked: str) -> Forced | None:
    """What a choice of `auto`, `none`, `required` or `named` asks for. vLLM's words for what cannot be. `asked`: the
    user's words, which count for `auto`.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return _called_for(tools, asked)
    if not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        return Forced(tuple(tools), False)
    for tool in tools:
        if tool.name == name:
            return Forced((tool,), True)
    message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
    raise bad_request(message, "tool_choice")


def _called_for(tools: Sequence[Tool], asked: str) -> Forced | None:
    """The first tool that the words name."""
    by_name = {tool.name.lower(): tool for tool in tools}
    for match in _ASKS.finditer(asked):
        tool = by_name.get(match[1].lower().rstrip("."))
        if tool is not None:
            return Forced((tool,), False, tuple(_QUOTED.findall(asked, match.end())))
    return None


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f"{_before_arguments(name)}{arguments}}}\n</tool_call>"


def _before_arguments(name: str) -> str:
    return f'<tool_call>\n{{"name":{canonical(name)},"arguments":'


def choose(forced: Forced, key: str) -> tuple[str, SaidPart]:
    """The call that is said: the text, and what of it the client is told. The same for the same key."""
    tool = forced.tools[shake_128(key.encode()).digest(1)[0] % len(forced.tools)]
    arguments = canonical(example(tool.schema, key, forced.words))
    begin = len(_before_arguments(tool.name))
    return call_text(tool.name, arguments), SaidPart("call", range(begin, begin + len(arguments)), tool.name)


def schema_of(form: object, where: str) -> Json | None:
    """The JSON schema that a response has to fit, from `response_format` of chat or `text.format` of /v1/responses;
    None: it is free text.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if isinstance(form, dict) and kind == "json_object":
        return {"type": "object"}
    if isinstance(form, dict) and kind == "json_schema":
        inner = form.get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return schema
    message = f"`{where}` must be `text`, `json_object`, or `json_schema` with a schema."
    raise bad_request(message, where)


def example(schema: object, key: str, words: Sequence[str] = ()) -> object:
    """A value that fits a JSON schema, as far as schemas of tools go: types, required properties, enums, bounds,
    references within the schema. Patterns and formats are not looked at. `words` are its first strings.
    """
    return _Example(schema, key, words).value(schema, (), 0)


class _Example:
    def __init__(self, root: object, key: str, words: Sequence[str]) -> None:
        self._root = root
        self._key = key
        self._words = iter(words)

    def value(self, schema: object, path: tuple[str, ...], depth: int) -> object:
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        options = schema.get("enum")
        if isinstance(options, list) and options:
            return options[self._chance(path) % len(options)]
        if depth >= MAX_DEPTH:
            return None
        kind = _type_of(schema)
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            count = min(max(1, _whole(schema, "minItems", 1)), MAX_PROPERTIES)
            return [self.value(schema.get("items"), (*path, str(n)), depth + 1) for n in range(count)]
        return self._scalar(kind, schema, path)

    def _object(self, schema: Mapping[str, object], path: tuple[str, ...], depth: int) -> Json:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        wanted = schema.get("required")
        names = wanted if isinstance(wanted, list) else list(properties)
        return {
            name: self.value(properties.get(name), (*path, name), depth + 1)
            for name in names[:MAX_PROPERTIES]
            if isinstance(name, str)
        }

    def _scalar(self, kind: str, schema: Mapping[str, object], path: tuple[str, ...]) -> object:
        chance = self._chance(path)
        if kind == "boolean":
            return bool(chance % 2)
        if kind == "integer":
            low, high = _whole(schema, "minimum", 0), _whole(schema, "maximum", 100)
            return low + chance % (high - low + 1) if high >= low else low
        if kind == "number":
            low, high = _whole(schema, "minimum", 0), _whole(schema, "maximum", 100)
            return low + (chance % 100) / 100 * max(0, high - low)
        if kind == "null":
            return None
        given = next(self._words, None)
        if given is not None:
            return given
        word = _WORDS[chance % len(_WORDS)]
        least = min(_whole(schema, "minLength", 0), 1000)
        most = max(0, _whole(schema, "maxLength", 1000))
        return (word * (1 + least // len(word)) if least > len(word) else word)[:most]

    def _resolved(self, schema: object) -> Json:
        """The schema behind references and alternatives, of which the first counts."""
        for _ in range(16):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            inner: object = None
            if isinstance(reference, str):
                inner = self._at(reference)
            else:
                for word in ("anyOf", "oneOf", "allOf"):
                    several = schema.get(word)
                    if isinstance(several, list) and several:
                        inner = several[0]
                        break
            if inner is None:
                return schema
            schema = inner
        return {}

    def _at(self, reference: str) -> object:
        """What a reference like `#/$defs/Name` points to; an empty schema if to nothing."""
        found: object = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def _chance(self, path: Iterable[str]) -> int:
        return int.from_bytes(shake_128("/".join((self._key, *path)).encode()).digest(4), "little")


def _type_of(schema: Mapping[str, object]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "null")
    if isinstance(kind, str):
        return kind
    return "object" if "properties" in schema else "string"


def _whole(schema: Mapping[str, object], name: str, otherwise: int) -> int:
    """A bound of a schema, as a whole number that is not huge."""
    value = schema.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53:
        return int(value)
    return otherwise
