# SPDX-License-Identifier: Apache-2.0
"""What a method and path ask for, how it is placed, and what its server will read of it. Pure.

Everything under /v1/ is forwarded, so that future routes of model servers work today; outside it only known routes of
model servers. Route names are few: they are metric labels.

Whatever lbproxy decides or checks (routes, limits, models, fields that clients may not set, calls for adapters) is
decided by what the *server* will read, and only here is said what that is (docs/decisions/0054). Invariants:

- A path means the same to every server that gets it: one that some server would decode to a path with a meaning of its
  own is refused.
- A body that a server could parse as JSON is parsed here too, whatever its method and content type, or it is refused.
- JSON is UTF-8. A parser that guesses encodings, as Python's does, gets nothing to guess.

The JSON itself is read by `core.requests.openai.read_json_body`, a form by `core.requests.forms`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from lbproxy.config.sections.clients import path_pattern
from lbproxy.config.sections.engines import OLLAMA
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.prompts import (
    PromptFormat,
    chat_prompt,
    completion_prompt,
    generate_prompt,
    infill_prompt,
    messages_prompt,
    ollama_chat_prompt,
    ollama_generate_prompt,
    responses_prompt,
    tokens_prompt,
)


class Body(Enum):
    """What a route takes as a body."""

    JSON = "json"
    """A JSON object, whatever its content type says: servers differ in whether they look at that."""
    BY_TYPE = "by type"
    """As its content type says: a form, JSON, or anything else; without one, JSON if it begins like a JSON object."""
    ANY = "any"
    """It is not read."""


class Form(Enum):
    """How a body is read."""

    JSON = "json"
    MAYBE_JSON = "maybe json"
    """JSON if it begins like an object: its content type is none by which servers refuse to parse it."""
    MULTIPART = "multipart"
    """A form with parts: RFC 7578."""
    OPAQUE = "opaque"
    """Audio, images, and whatever else servers take as bytes."""


JSON_BODY: Final = Body.JSON
"""A look-up in the Enum costs more, and each request needs it."""


class Route(NamedTuple):
    """One kind of request."""

    name: str
    body: Body
    methods: frozenset[str]
    ours: bool = False
    """lbproxy responds itself."""
    flatten: PromptFormat | None = None
    """Reads the prompt in its body, if it has one that the prefix cache knows."""
    is_common: bool = False
    """Every model server has it."""
    skips_preamble: bool = False
    """Its streams begin with events that stand for no token."""
    role_events: int = 0
    """With so many beside those: in a chat the first event may have nothing but the role."""
    continues: bool = False
    """Its streams of text can go on at another endpoint."""
    is_inference: bool = True
    """Its POST requests name a model, which is required, or inserted where only one is served; and they may be retried,
    as they change nothing. For other routes neither is known: files and batches, or the cancelling of a response."""
    is_native: bool = False
    """An engine's own API: usage is reported in its own way."""
    engine: str | None = None
    """It is in this engine's own API, which only its endpoints have."""
    pattern: re.Pattern[str] | None = None
    """Of `inference_paths`: matches the request target."""


_PASSED_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_POST = frozenset({"POST", "OPTIONS"})
_GET = frozenset({"GET", "HEAD", "OPTIONS"})

_MODELS = Route("models", Body.ANY, _GET, ours=True)
HEALTH_PATH: Final = "/health"
HEALTH: Final = Route("health", Body.ANY, frozenset({"GET", "HEAD"}), ours=True)
"""Of lbproxy, without a key, as model servers have it: clients and load balancers in front know no other path."""
OTHER: Final = "other"
_OTHER = Route(OTHER, Body.BY_TYPE, _PASSED_METHODS, is_inference=False)
_INFERENCE = _OTHER._replace(body=Body.JSON, is_inference=True)
_UPLOAD = _INFERENCE._replace(body=Body.BY_TYPE)
CUSTOM = Route("custom", Body.BY_TYPE, frozenset({"GET", "HEAD", "POST", "OPTIONS"}))
"""A path of `inference_paths`."""
ADAPTERS = Route("adapters", Body.JSON, frozenset({"POST"}), ours=True)
"""lbproxy makes these calls at every endpoint of a base model, if the settings allow it: see
proxy/front/adapter_calls.py."""
_OLLAMA = Route("ollama", Body.ANY, _GET, is_inference=False, engine=OLLAMA)
"""What one of Ollama's servers says of all."""
_OLLAMA_EMBED = Route("ollama_embed", Body.JSON, _POST, is_native=True, engine=OLLAMA)
OLLAMA_LISTS = Route("models", Body.ANY, _GET, ours=True, engine=OLLAMA)
"""lbproxy merges these lists: see proxy/front/ollama_lists.py."""
_OLLAMA_CHANGES: Final = re.compile(r"/api/(?:pull|push|create|copy|delete|blobs/.*)")
_LORA_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_ROUTES = {
    "/v1/completions": Route(
        "completions", Body.JSON, _POST, flatten=completion_prompt, is_common=True, continues=True
    ),
    "/v1/chat/completions": Route(
        "chat_completions", Body.JSON, _POST, flatten=chat_prompt, is_common=True, role_events=1, continues=True
    ),
    "/v1/models": _MODELS,
    HEALTH_PATH: HEALTH,
    "/v1/embeddings": Route("embeddings", Body.JSON, _POST),
    "/v1/responses": Route("responses", Body.JSON, _PASSED_METHODS, flatten=responses_prompt, skips_preamble=True),
    "/v1/messages": Route("messages", Body.JSON, _PASSED_METHODS, flatten=messages_prompt, skips_preamble=True),
    "/generate": Route("generate", Body.JSON, _PASSED_METHODS, flatten=generate_prompt, is_native=True),
    "/inference/v1/generate": Route("token_generate", Body.JSON, _POST, flatten=tokens_prompt),
    "/completion": Route("completion", Body.JSON, _PASSED_METHODS, flatten=completion_prompt, is_native=True),
    "/infill": Route("infill", Body.JSON, _PASSED_METHODS, flatten=infill_prompt, is_native=True),
    "/": _OLLAMA,
    "/api/version": _OLLAMA,
    "/api/show": _OLLAMA_EMBED._replace(name="ollama"),
    "/api/tags": OLLAMA_LISTS,
    "/api/ps": OLLAMA_LISTS,
    "/api/chat": _OLLAMA_EMBED._replace(name="ollama_chat", flatten=ollama_chat_prompt),
    "/api/generate": _OLLAMA_EMBED._replace(name="ollama_generate", flatten=ollama_generate_prompt),
    "/api/embed": _OLLAMA_EMBED,
    "/api/embeddings": _OLLAMA_EMBED,
    "/v1/realtime": Route("realtime", Body.BY_TYPE, _PASSED_METHODS),
    **{
        f"/{name}": Route(name, Body.JSON, _PASSED_METHODS)
        for name in ("tokenize", "detokenize", "rerank", "score", "pooling", "classify")
    },
    "/v2/rerank": Route("rerank", Body.JSON, _PASSED_METHODS),
    **{
        f"/v1/{name}": _INFERENCE
        for name in (
            *("audio/speech", "classify", "images/generations", "messages/count_tokens", "moderations", "pooling"),
            *("rerank", "score"),
        )
    },
    **{
        f"/v1/{name}": _UPLOAD
        for name in ("audio/transcriptions", "audio/translations", "images/edits", "images/variations")
    },
}
_STORED: Final = re.compile(r"/v1/(?:responses|chat/completions)/([A-Za-z0-9_-]{1,160})(?:/[a-z_]+)?/?")
_GENERATED: Final = ("/v1/responses/", "/v1/chat/completions/")
_OF_ANY_MODEL: Final = re.compile(
    r"/v1/(?:(?:messages/)?batch|realtime/calls).*|.*/(?:models?|loras?|engines|deployments)(?:/.*)?"
)
_READS: Final = frozenset({"GET", "HEAD"})
_OF_IDS: Final = re.compile(r"/v1/(?:responses|chat/completions|models)/")
"""Paths that are about something with an id."""


def find_route(method: str, path: str, *, lora_management: bool = False, inference_paths: Sequence[str] = ()) -> Route:
    """Find the route of a request. `path` begins with a slash and has no query; the others as configured.

    Raises LbError BAD_REQUEST, UNKNOWN_URL, FORBIDDEN or METHOD_NOT_ALLOWED.
    """
    if method == "CONNECT":
        raise LbError(Outcome.BAD_REQUEST, "This is not a forward proxy.")
    served = served_path(path)
    if served is None:
        raise LbError(Outcome.UNKNOWN_URL)
    if _OLLAMA_CHANGES.fullmatch(served):
        raise LbError(Outcome.FORBIDDEN, "Models are not changed through the load balancer.")
    route = _ROUTES.get(served)
    if route is None and not path.startswith("/v1/"):
        route = _custom_route(path, inference_paths)
        served = path
    if served in _LORA_PATHS:
        if not lora_management or path != served:
            raise LbError(Outcome.FORBIDDEN, "Adapters cannot be loaded or unloaded through the load balancer.")
        route = ADAPTERS
    elif route is None:
        about = _OF_IDS.match(served)
        if about is not None and not path.startswith(about[0]):
            raise _ambiguous(about[0])
        route = _MODELS if path.startswith("/v1/models/") else _OTHER
    elif path not in {served, f"{served}/"}:
        raise _ambiguous(served)
    if method not in route.methods:
        if served == "/":
            raise LbError(Outcome.UNKNOWN_URL)  # which only one engine has, and only to be read
        raise LbError(Outcome.METHOD_NOT_ALLOWED, allow=", ".join(sorted(route.methods)))
    return route


def _custom_route(path: str, inference_paths: Sequence[str]) -> Route:
    for pattern in map(path_pattern, inference_paths):
        if pattern.fullmatch(path) is not None:
            return CUSTOM._replace(pattern=pattern)
    raise LbError(Outcome.UNKNOWN_URL)


def _ambiguous(served: str) -> LbError:
    return LbError(Outcome.BAD_REQUEST, f"Servers read this path in different ways. Write {served} instead.")


def path_model(route: Route, target: str) -> str | None:
    """The model that servers read in the path of a request target; None: they read none there."""
    found = None if route.pattern is None else route.pattern.fullmatch(target)
    return None if found is None else found.groupdict().get("model")


def with_path_model(route: Route, target: str, model: str) -> str:
    """The request target with this model in its path."""
    found = None if route.pattern is None else route.pattern.fullmatch(target)
    assert found is not None, "its path has a model"
    start, end = found.span("model")
    return target[:start] + quote(model, safe=":@") + target[end:]


def may_generate(method: str, path: str) -> bool:
    """Whether the response may have what a model wrote: of GET only one that was stored, or is still written."""
    return method not in _READS or path.startswith(_GENERATED)


def is_of_any_model(target: str) -> bool:
    """Whether a request target is about batches, whose models are in a file or a list; about OpenAI's calls, where they
    may be in JSON inside a form; or about models, in the ways of some servers besides /v1/models.
    """
    return _OF_ANY_MODEL.fullmatch(served_path(target.partition("?")[0]) or "") is not None


def stored_response(path: str) -> str | None:
    """The id of the stored response that a path is about; None: of none."""
    found = _STORED.fullmatch(path)
    return None if found is None else found[1]


# What a server reads

MAX_DECODINGS: Final = 4
"""How often servers and the proxies before them may decode a path, one after the other."""
_ORDINARY: Final = re.compile(r"(?:/[a-z0-9_-]+)+")
_QUERY: Final = re.compile(r"[?#]")
_MEDIA_TYPE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+/[!#$%&'*+\-.^_`|~0-9a-z]+")
_JSON_TYPE: Final = re.compile(rb"[^/]+/(?:[^/]+\+)?json")
_TEXT_TYPES: Final = (b"text/", b"application/x-www-form-urlencoded")
"""What clients send JSON as when they forget to say so: browsers' fetch, curl -d."""
_CHARSET: Final = re.compile(rb";[ \t]*charset[ \t]*=[ \t]*\"?([^\";]*)")
_LIKE_ASCII: Final = re.compile(rb"utf-?8|(?:us-)?ascii|(?:iso-?8859|windows|cp|latin)-?[0-9-]*[ \t]*")
"""Names of encodings in which the characters of JSON's own syntax are those of ASCII."""
_CHANGES: Final = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose body means something, so that one that says that it is JSON must be."""
_OBJECT: Final = re.compile(rb"[\x00\xef\xbb\xbf\xfe\xff \t\r\n]{0,256}+(?:\{|[\x00\xef\xbb\xbf\xfe\xff \t\r\n])")
"""How a JSON object begins, in every encoding that Python's json detects; or more blanks than are looked at."""


def served_path(path: str) -> str | None:
    """The path as a server may read it: decoded as often as it can be, in lower case, `\\` as `/`, without parameters,
    empty segments and a last slash. Equal to `path` for an ordinary one. None if it has dot segments, which could lead
    to any other path, or characters that no path needs, or escapes that are no UTF-8, or of escapes of escapes.
    """
    if _ORDINARY.fullmatch(path):
        return path
    plain, before, decodings = path, "", 0
    while plain != before:
        before, decodings = plain, decodings + 1
        try:
            plain = unquote_to_bytes(before).decode()
        except UnicodeDecodeError:
            return None
        if not plain.isprintable() or decodings > MAX_DECODINGS:
            return None
    plain = _QUERY.split(plain, maxsplit=1)[0].replace("\\", "/").lower()
    segments = [segment.partition(";")[0].strip() for segment in plain.split("/")]
    if any(segment in {".", ".."} for segment in segments):
        return None
    return "/" + "/".join(filter(None, segments))


@lru_cache(maxsize=256)
def form_of(takes: Body, content_type: bytes) -> Form:
    """How a body is read on a route that takes `takes`. `content_type`: in lower case; empty: there is none.

    Raises LbError BAD_REQUEST for JSON in an encoding that is not UTF-8.
    """
    if takes is Body.ANY:
        return Form.OPAQUE
    media = content_type.partition(b";")[0].strip()
    if takes is not Body.JSON:
        if media == b"multipart/form-data":
            return Form.MULTIPART
        if _MEDIA_TYPE.fullmatch(media) and not media.startswith(_TEXT_TYPES) and not _JSON_TYPE.fullmatch(media):
            return Form.OPAQUE
    charset = _CHARSET.search(content_type)
    if charset is not None and _LIKE_ASCII.fullmatch(charset[1]) is None:
        raise LbError(Outcome.BAD_REQUEST, "JSON is UTF-8 here: the content type has another charset.")
    return Form.JSON if takes is Body.JSON or _JSON_TYPE.fullmatch(media) else Form.MAYBE_JSON


def is_opaque(takes: Body, content_type: bytes, body: bytes) -> bool:
    """Whether no server takes this body for JSON, or for a form. Raises LbError as `form_of`."""
    return form_of(takes, content_type) is Form.OPAQUE and _OBJECT.match(body) is None


def reads_json(takes: Body, method: str, content_type: bytes, body: bytes) -> bool:
    """Whether a server could take this body for JSON, so that it must be read as such. Raises LbError as
    `form_of`.
    """
    form = form_of(takes, content_type)
    if form is Form.JSON and method in _CHANGES:
        return True
    return form in {Form.JSON, Form.MAYBE_JSON} and _OBJECT.match(body) is not None
