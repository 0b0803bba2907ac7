# SPDX-License-Identifier: Apache-2.0
"""Tools: what they are in a prompt, whether the client forces one, and a call with arguments that fit its schema; and
responses that have to fit a schema themselves.

The simulated model calls a tool only if it must (`tool_choice` required, any, or a name). The call is text in the
model's own output, as Hermes and Qwen write it; when the call comes back in the history it becomes the same text, so
that the next turn finds its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128

from lbproxy.sim.mock.apis.fields import EngineError, Json, canonical

MAX_DEPTH = 6
"""Depth of arguments; below it they are null."""
MAX_PROPERTIES = 64
"""Properties of one object in arguments."""
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
    """The client wants a call and no text."""

    tools: tuple[Tool, ...]
    """One of them; not empty."""
    named: bool
    """The client named it. vLLM then ends with `stop`, else with `tool_calls`."""


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A call in a response's text."""

    name: str
    arguments: range
    """Where in the text, in bytes, its arguments stand."""


def tool_of(name: object, description: object, schema: object) -> Tool:
    """A tool, checked. A schema without a type is one of an object, as vLLM takes it."""
    if not isinstance(name, str) or not name:
        raise EngineError(400, "A tool must have a name.", "BadRequestError", "tools")
    if schema is not None and not isinstance(schema, dict):
        raise EngineError(
            400, f"The parameters of the tool `{name}` must be a JSON schema.", "BadRequestError", "tools"
        )
    full = {"type": "object", **(schema or {})}
    text = canonical({"name": name, "description": description, "parameters": full})
    return Tool(name, text, full)


def forced_by(choice: str, tools: Sequence[Tool], name: object = None) -> Forced | None:
    """What a choice of `auto`, `none`, `required` or `named` asks for. vLLM's words for what cannot be."""
    if choice in ("auto", "none"):
        return None
    if not tools:
        raise EngineError(400, "When using `tool_choice`, `tools` must be set.", "BadRequestError", "tool_choice")
    if choice == "required":
        return Forced(tuple(tools), False)
    for tool in tools:
        if tool.name == name:
            return Forced((tool,), True)
    message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
    raise EngineError(400, message, "BadRequestError", "tool_choice")


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f"{_before_arguments(name)}{arguments}}}\n</tool_call>"


def _before_arguments(name: str) -> str:
    return f'<tool_call>\n{{"name":{canonical(name)},"arguments":'


def choose(forced: Forced, key: str) -> tuple[str, SaidCall]:
    """The call that is said: the text, and where what stands in it. The same for the same key."""
    tool = forced.tools[shake_128(key.encode()).digest(1)[0] % len(forced.tools)]
    arguments = canonical(example(tool.schema, key))
    begin = len(_before_arguments(tool.name))
    return call_text(tool.name, arguments), SaidCall(tool.name, range(begin, begin + len(arguments)))


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
    raise EngineError(400, message, "BadRequestError", where)


def example(schema: object, key: str) -> object:
    """A value that fits a JSON schema, as far as schemas of tools go: types, required properties, enums, bounds,
    references within the schema. Patterns and formats are not looked at.
    """
    return _Example(schema, key).value(schema, (), 0)


class _Example:
    def __init__(self, root: object, key: str) -> None:
        self._root = root
        self._key = key

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
