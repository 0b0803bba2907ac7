# SPDX-License-Identifier: Apache-2.0
"""OpenAI's wire formats, as far as a balancer must read or write them: request bodies, model lists, error bodies.

Everything read here comes from outside and is not trusted. What is wrong with it is raised as an `LbError`; nothing
else is raised. Bodies are never changed, except that `Naming` splices in a model name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import (
    MAX_DEPTH,
    MAX_MODEL_KEYS,
    MODEL_KEY,
    PARSE_AT_ONCE_BYTES,
    STRING,
    LargeJson,
    Outline,
    is_light,
    load_json,
    not_an_object,
    too_deep,
)

MAX_MODEL_CHARS: Final = 256
REASON_FIELD: Final = "x-lbproxy-reason"
"""Carries the `code` on every error of lbproxy itself, for clients that do not read the body."""
MAX_MODEL_CARDS: Final = 10_000
MAX_CARD_BYTES: Final = 16 << 10
"""vLLM's have about 700. Of a larger one only the names are kept."""
MAX_TOKENS: Final = 1 << 31


@dataclass(frozen=True)
class ModelCard:
    """One entry of an endpoint's /v1/models."""

    id: str
    raw: bytes
    """The entry's JSON as the endpoint sent it, with all of its fields."""
    parent: str | None = None
    """The base model, if this entry is a LoRA adapter."""
    context_tokens: int | None = None
    """The longest prompt and response together; None: not known."""
    context_is_of_prompt: bool = False
    """`context_tokens` is for the prompt alone: a response that reaches it just ends."""
    engine: str | None = None
    """The engine, if that was found out by its own API."""


class BodyFacts(NamedTuple):
    """What routing needs from a request body."""

    model: str | None
    stream: bool = False
    max_tokens: int | None = None
    """The longest response that the client accepts; None = not given, or not a number."""
    cache_salt: str | None = None
    """vLLM's parameter: requests share cached prefixes only with requests that have the same salt."""
    fields: Mapping[str, object] = MappingProxyType({})
    """The complete parsed body; empty unless it is JSON."""


def read_json_body(body: bytes, large: LargeJson | None = None) -> BodyFacts:
    """Read what routing needs from a JSON request body. Of duplicate keys the last one counts, as in Python's json.

    `large`: the body as it was parsed in turns; without it, a large body is parsed here at once. Raises LbError
    INVALID_JSON (not JSON, not an object, too deep, too much structure) or MISSING_MODEL (a `model` that is not a
    usable name). A missing `model` is not an error here.
    """
    if large is None and len(body) > PARSE_AT_ONCE_BYTES:
        large = LargeJson(body)
        while large.step():
            pass
    fields = load_json(body) if large is None else large.value
    if not isinstance(fields, dict):
        raise not_an_object()
    if (large is None or large.outline is None) and len(body) > 2 * MAX_DEPTH and _is_too_deep(fields, body):
        raise too_deep()
    model = fields.get("model")
    if "model" in fields:
        check_model_name(model)
    elif any(name.lower() == "model" for name in fields):
        raise LbError(Outcome.MISSING_MODEL, "The name of the field is `model`, in lower case.", param="model")
    limit = _greatest_limit(fields)
    salt = fields.get("cache_salt")
    stream = fields.get("stream") is True
    # Without the constructor of the NamedTuple, which takes as long again: one is made for every request.
    return tuple.__new__(BodyFacts, (model, stream, limit, salt if isinstance(salt, str) else None, fields))


_LIMITS: Final = ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "sampling_params"]
"""Fields that limit the response: of the OpenAI APIs, llama.cpp, and SGLang's object with its own. A server knows some
of them, so that only the greatest is certain to hold; the object counts as no limit."""


def _greatest_limit(fields: dict[str, Any]) -> int | None:
    """The greatest of the limits, among which a null says nothing; None if there is none, or one is no limit."""
    greatest = 0
    for name in _LIMITS:
        if name in fields:
            limit = fields[name]
            if type(limit) is int and 0 < limit < MAX_TOKENS:
                greatest = limit if limit > greatest else greatest
            elif limit is not None:
                return None
    return greatest or None


def check_model_name(model: object, field: str = "model") -> None:
    """Raise LbError MISSING_MODEL unless `model`, the value of `field`, is a string that can be the name of one."""
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARS or not model.isprintable():
        text = f"`{field}` must be a string of 1 to {MAX_MODEL_CHARS} printable characters."
        raise LbError(Outcome.MISSING_MODEL, text, param=field)


def _is_too_deep(fields: dict[str, Any], text: bytes) -> bool:
    """Whether lists and objects are nested more than `MAX_DEPTH` levels deep. `text`: the JSON that was parsed.

    It goes level by level: bodies have few lists and objects, so visiting them costs less than counting brackets in a
    long prompt. With many values, such as token ids, the brackets are counted first.
    """
    level: list[Any] = [fields]
    counted = False
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if len(one) > _MANY_VALUES and not counted:
                counted = True
                if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
                    return False
            values = one.values() if type(one) is dict else one
            inner += [each for each in values if type(each) is dict or type(each) is list]
        if not inner:
            return False
        level = inner
    return True


_MANY_VALUES: Final = 500


_BEGINNING: Final = 4 << 10


Pieces: TypeAlias = tuple[bytes | memoryview, ...]
"""A body in pieces: views of a large one are sent one after the other, and never joined."""


class Naming(NamedTuple):
    """Where a body names its model: another name can be put there, while all other bytes stay as they are."""

    spans: Sequence[tuple[int, int]]
    """Positions of the name in the body."""
    is_json: bool = True
    """The name is a JSON string; otherwise it stands alone."""
    before: bytes = b""
    """What goes before the name, where the body names none."""
    after: bytes = b""

    def named(self, body: bytes, model: str) -> Pieces:
        """The body, with `model` as the name of its model."""
        name = self.before + (orjson.dumps(model) if self.is_json else model.encode()) + self.after
        view = memoryview(body)  # slices of it are not copies
        pieces: list[bytes | memoryview] = []
        end = 0
        for start, until in self.spans:
            pieces += (view[end:start], name)
            end = until
        return *pieces, view[end:]


NOT_NAMED: Final = Naming(())
"""An outlined body has a `model` that is too long, and cannot be replaced."""


def find_names(body: bytes, outline: Outline | None = None) -> Naming:
    """Where a JSON object body names its model. `outline`: of this body, if it exists.

    Every `model` of the outermost object counts, in each spelling and as often as it occurs, so that every server's
    parser finds the same name. The body must have passed `read_json_body`.

    Raises LbError INVALID_JSON for more than MAX_MODEL_KEYS keys `model` in a body without an outline, and for a
    `model` that is too long in one with an outline.
    """
    if outline is None:
        found = _model_values(body)
        assert found, "it names a model, in UTF-8"
        return Naming(found)
    if outline.has_long_model:
        raise LbError(Outcome.INVALID_JSON, "The JSON body has a `model` that is too long, or too many blanks at one.")
    return Naming(outline.models)


def _model_values(body: bytes) -> list[tuple[int, int]]:
    """Positions of the values of `model` in the outermost object. Linear: strings are skipped, brackets counted."""
    if body.lower().count(b'"model"') == 1 and b"\\u00" not in body:  # the usual case, ten times as fast
        at = body.find(b'"model"', 0, _BEGINNING)  # else it is mostly near the end
        key = MODEL_KEY.search(body, max(body.rfind(b'"model"'), 0) if at < 0 else at)
        value = None if key is None else STRING.match(body, key.end())
        if value is not None:
            return [value.span()]
    found: list[tuple[int, int]] = []
    depth = counted = 0
    for earlier, key in enumerate(MODEL_KEY.finditer(body)):
        if earlier == MAX_MODEL_KEYS:
            raise LbError(Outcome.INVALID_JSON, f"The JSON body has more than {MAX_MODEL_KEYS} keys `model`.")
        between = STRING.sub(b"", body[counted : key.start()])
        depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")
        counted = key.start()
        value = STRING.match(body, key.end())
        if depth == 1 and value is not None:
            found.append(value.span())
    return found


def names_models(body: bytes) -> bool:
    """Whether a JSON object body, of which no outline was made, has more than one `model`. Raises LbError."""
    return len(_model_values(body)) > 1


_OPENING: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{[ \t\r\n]*")


def place_for_name(body: bytes) -> Naming:
    """Where a JSON object body without a model gets one, as its new first field.

    The body must have passed `read_json_body`. Servers differ in whether they accept a request without a model.
    """
    opening = _OPENING.match(body)
    assert opening is not None, "it is an object, in UTF-8"
    end = opening.end()
    return Naming([(end, end)], before=b'"model":', after=b"" if body.startswith(b"}", end) else b",")


def read_model_list(page: bytes) -> list[ModelCard] | None:
    """Return the cards of a /v1/models response; None if it is no such list, or takes too long to read. Entries without
    a usable id are skipped.
    """
    if not is_light(page):
        return None
    try:
        listing = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(listing, dict) or not isinstance(listing.get("data"), list):
        return None
    cards = (_model_card(entry) for entry in listing["data"][:MAX_MODEL_CARDS])
    return [card for card in cards if card is not None]


def _model_card(entry: object) -> ModelCard | None:
    if not isinstance(entry, dict):
        return None
    fields: dict[str, Any] = entry
    try:
        check_model_name(fields.get("id"))
    except LbError:
        return None
    parent = fields.get("parent")
    if not isinstance(parent, str) or len(parent) > MAX_MODEL_CHARS:
        parent = None
    try:
        raw = bytes(memoryview(orjson.dumps(entry)))  # a copy: the result of orjson keeps a buffer of 8 KiB
    except orjson.JSONEncodeError:  # nested deeper than orjson writes
        return None
    if len(raw) > MAX_CARD_BYTES:
        raw = synthetic_card(fields["id"], **({} if parent is None else {"parent": parent})).raw
    length = fields.get("max_model_len")
    is_length = type(length) is int and 0 < length < MAX_TOKENS
    return ModelCard(fields["id"], raw, parent, length if is_length else None)


def with_longest_prompt(card: ModelCard, tokens: int) -> ModelCard:
    """The card of a model that takes prompts up to so many tokens, which the engine says elsewhere."""
    raw = orjson.dumps(orjson.loads(card.raw) | {"max_model_len": tokens})
    return ModelCard(card.id, raw, card.parent, tokens, True)


def kept_cards(before: dict[str, ModelCard] | None, cards: Iterable[ModelCard]) -> dict[str, ModelCard]:
    """Cards by their ids. What says the same as before, all cards too, is the same object: engines write the time of a
    question into a card, and new ids of its permissions, and each process is told of what is new.
    """
    known = before or {}
    found: dict[str, ModelCard] = {}
    for card in cards:
        old = known.get(card.id)
        found[card.id] = card if old is None or not _says_same(old, card) else old
    is_same = len(found) == len(known) and all(map(is_, found.values(), known.values()))
    return before if before is not None and is_same else found


def _says_same(one: ModelCard, other: ModelCard) -> bool:
    told = one.parent, one.context_tokens, one.engine
    if told != (other.parent, other.context_tokens, other.engine) or len(one.raw) != len(other.raw):
        return False
    return one.raw == other.raw or _ASKED.sub(b"", one.raw) == _ASKED.sub(b"", other.raw)


_ASKED: Final = re.compile(rb'"created":[0-9]+|"id":"modelperm-[0-9a-f]+"')


def synthetic_card(name: str, **fields: object) -> ModelCard:
    """Return a card for a model that no endpoint listed, but the settings name. `fields`: further fields."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "lbproxy"} | fields
    return ModelCard(name, bytes(memoryview(orjson.dumps(entry))))


def model_list(cards: Iterable[ModelCard]) -> bytes:
    """Return the body of GET /v1/models. Each entry is as its endpoint sent it."""
    return b'{"object":"list","data":[' + b",".join(card.raw for card in cards) + b"]}"


_ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status, as in Anthropic's documentation of errors. Other statuses of 500 and above are `api_error`."""


def error_body(error: LbError, path: str = "") -> bytes:
    """Return the JSON error body of the API to which `path` belongs, OpenAI's or Anthropic's, so that its SDK raises a
    typed exception.
    """
    facts = error.outcome.value
    said = {"message": error.message, "type": facts.error_type, "param": error.param, "code": facts.code}
    return _error_body(said, facts.status, path)


_OLLAMA_PATHS: Final = re.compile(
    r"/api/(?:chat|generate|embed|embeddings|show|tags|ps|version|pull|push|create|copy|delete|blobs/.*)/?"
)


def _error_body(said: Mapping[str, object], status: int, path: str) -> bytes:
    if _OLLAMA_PATHS.fullmatch(path):
        return orjson.dumps({"error": said["message"]})
    if path.startswith(_ANTHROPIC_PATH):
        other = "api_error" if status >= 500 or not status else "invalid_request_error"
        return orjson.dumps({"type": "error", "error": {**said, "type": _ANTHROPIC_TYPES.get(status, other)}})
    return orjson.dumps({"error": said})


def error_event(error: LbError, path: str = "") -> bytes:
    """Return an SSE event, or a line of Ollama's, that makes the SDK of that API raise in the middle of a stream."""
    return _error_event(error_body(error, path), path)


def _error_event(body: bytes, path: str) -> bytes:
    if _OLLAMA_PATHS.fullmatch(path):
        return body + b"\n"
    name = b"event: error\n" if path.startswith(_ANTHROPIC_PATH) else b""
    return b"%bdata: %b\n\n" % (name, body)


def event_of_response(status: int, body: bytes, path: str) -> bytes:
    """The same of a response of an endpoint that is no stream: the error in it, in the form of the API of `path`."""
    message: object = f"The model server returned status {status}, and no event stream."
    said = {"message": message, "type": "server_error", "param": None, "code": status}
    if 400 <= status < 500:
        said["type"] = "invalid_request_error"
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        read = None
    if isinstance(read, dict):  # the object of OpenAI's and Anthropic's APIs, a text, or as vLLM had it, or FastAPI
        found = read.get("error", read if status >= 400 else None)
        fields: dict[str, Any] = found if isinstance(found, dict) else {"message": found}
        message = fields.get("message") or fields.get("detail")
        if isinstance(message, str) and message:
            more = {key: fields[key] for key in ("type", "param", "code") if isinstance(fields.get(key), str | int)}
            said |= {"message": message} | more
    return _error_event(_error_body(said, status if status >= 400 else 502, path), path)
