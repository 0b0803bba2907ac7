# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies, checked and bounded, and vLLM's words for those that are wrong.

Messages are those recorded from vLLM 0.32. Unknown fields are ignored, as vLLM does.
"""

from __future__ import annotations

import re
from typing import TypeVar

import orjson

MAX_STOPS = 64

Json = dict[str, object]
_T = TypeVar("_T")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class EngineError(Exception):
    """A response other than 200, in vLLM's words."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def load_json(body: bytes) -> Json:
    """The object in a request's body."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        context = f"'input': '<dict of 0 items>', 'ctx': {{'error': {error.msg!r}}}"
        raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", context) from None
    if not isinstance(fields, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary", shown(fields))
    return fields


def canonical(value: object) -> str:
    """JSON in ASCII with sorted keys: equal values are equal text, whoever wrote them. Raises `EngineError` for what is
    nested too deeply (254 levels, orjson's limit).
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        raise bad_request("The JSON is nested too deeply.") from None
    return _NOT_ASCII.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def dump(value: object) -> bytes:
    """A response's JSON, which may repeat what the client sent. Raises `EngineError` as `canonical` does."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise bad_request("The JSON is nested too deeply.") from None


def model_of(fields: Json) -> str | None:
    """The model that a body names."""
    return text_of(fields, "model")


def text_of(fields: Json, name: str) -> str | None:
    """A field that is a string."""
    return typed(fields, name, str, "string")


def boolean(fields: Json, name: str) -> bool:
    """A field that is true or false; false without it."""
    return typed(fields, name, bool, "boolean") or False


def integer(fields: Json, name: str) -> int | None:
    """A field that is a whole number."""
    value = typed(fields, name, int, "integer")
    if isinstance(value, bool):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", shown(value))
    return value


def number(fields: Json, name: str) -> float | None:
    """A field that is a number."""
    value = fields.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise invalid("float_type", f"body.{name}", "Input should be a valid number", shown(value))


def objects(fields: Json, name: str) -> list[Json]:
    """A field that is a list of objects; empty without it."""
    values = typed(fields, name, list, "list") or []
    for position, value in enumerate(values):
        if not isinstance(value, dict):
            where = f"body.{name}.{position}"
            raise invalid("model_type", where, "Input should be a valid dictionary", shown(value))
    return values


def typed(fields: Json, name: str, kind: type[_T], word: str) -> _T | None:
    """A field of a type; `word` is what vLLM calls it."""
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise invalid(f"{word}_type", f"body.{name}", f"Input should be a valid {word}", shown(value))


def required(fields: Json, name: str) -> object:
    """A field that must be there."""
    if fields.get(name) is None:
        raise invalid("missing", f"body.{name}", "Field required", shown(fields))
    return fields[name]


def stops(fields: Json, name: str = "stop") -> tuple[str, ...]:
    """One stop string or several."""
    given = fields.get(name)
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or len(found) > MAX_STOPS or not all(isinstance(s, str) and s for s in found):
        message = f"Input should be a non-empty string or at most {MAX_STOPS} of them"
        raise invalid("string_type", f"body.{name}", message, shown(given))
    return tuple(found)


def server_event(body: object, kind: str = "") -> bytes:
    """A server-sent event. `kind`: its name, if it has one. Raises `EngineError` as `canonical` does."""
    name = f"event: {kind}\n".encode() if kind else b""
    return b"%bdata: %b\n\n" % (name, dump(body))


def invalid(kind: str, location: str, message: str, context: str) -> EngineError:
    """What vLLM makes of a pydantic error."""
    details = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', {context}}}"
    return EngineError(400, f"1 validation error:\n  {details}", "Bad Request", location)


def bad_request(message: str, param: str | None = None) -> EngineError:
    """What vLLM says of a request that is well-formed and cannot be served."""
    return EngineError(400, message, "BadRequestError", param)


def refused(message: str, name: str, value: object) -> EngineError:
    """What vLLM says of a value that is well-formed and cannot be."""
    return bad_request(f"{message} (parameter={name}, value={value})", name)


def shown(value: object) -> str:
    """The input of a validation error; never more of it than helps."""
    if isinstance(value, dict | list):
        return f"'input': '<{type(value).__name__} of {len(value)} items>'"
    return f"'input': {str(value)[:64]!r}"
