# SPDX-License-Identifier: Apache-2.0
"""What a method and path ask for, and how it is placed. Pure.

Everything under /v1/ is forwarded, so that future routes of model servers work today; outside it only known routes of
model servers. Route names are few: they are metric labels.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import unquote

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.prompts import (
    PromptFormat,
    chat_prompt,
    completion_prompt,
    generate_prompt,
    infill_prompt,
    messages_prompt,
    responses_prompt,
)


class Body(Enum):
    """How the body is read."""

    JSON = "json"
    """Must be a JSON object; placed by its `model`."""
    BY_TYPE = "by type"
    """As its Content-Type says: JSON and multipart are placed by `model`, anything else on any endpoint."""
    ANY = "any"
    """Not read; any endpoint."""


JSON_BODY: Final = Body.JSON
ANY_BODY: Final = Body.ANY
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
    is_inference: bool = True
    """Its POST requests name a model, which is required, or inserted where only one is served; and they may be retried,
    as they change nothing. For other routes neither is known: files and batches, or the cancelling of a response."""
    is_native: bool = False
    """An engine's own API: usage is reported in its own way."""


_PASSED_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_POST = frozenset({"POST", "OPTIONS"})
_GET = frozenset({"GET", "HEAD", "OPTIONS"})

_MODELS = Route("models", Body.ANY, _GET, ours=True)
HEALTH_PATH: Final = "/health"
HEALTH: Final = Route("health", Body.ANY, frozenset({"GET", "HEAD"}), ours=True)
"""Of lbproxy, without a key, as model servers have it: clients and load balancers in front know no other path."""
_OTHER = Route("other", Body.BY_TYPE, _PASSED_METHODS, is_inference=False)
_INFERENCE = _OTHER._replace(is_inference=True)
ADAPTERS = Route("adapters", Body.JSON, frozenset({"POST"}), ours=True)
"""lbproxy makes these calls at every endpoint of a base model, if the settings allow it: see
proxy/exchange/adapter_calls.py."""
_LORA_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_ROUTES = {
    "/v1/completions": Route("completions", Body.JSON, _POST, flatten=completion_prompt, is_common=True),
    "/v1/chat/completions": Route(
        "chat_completions", Body.JSON, _POST, flatten=chat_prompt, is_common=True, role_events=1
    ),
    "/v1/models": _MODELS,
    HEALTH_PATH: HEALTH,
    "/v1/embeddings": Route("embeddings", Body.JSON, _POST),
    "/v1/responses": Route("responses", Body.BY_TYPE, _PASSED_METHODS, flatten=responses_prompt, skips_preamble=True),
    "/v1/messages": Route("messages", Body.BY_TYPE, _PASSED_METHODS, flatten=messages_prompt, skips_preamble=True),
    "/generate": Route("generate", Body.BY_TYPE, _PASSED_METHODS, flatten=generate_prompt, is_native=True),
    "/completion": Route("completion", Body.BY_TYPE, _PASSED_METHODS, flatten=completion_prompt, is_native=True),
    "/infill": Route("infill", Body.BY_TYPE, _PASSED_METHODS, flatten=infill_prompt, is_native=True),
    "/v1/realtime": Route("realtime", Body.BY_TYPE, _PASSED_METHODS),
    **{
        f"/{name}": Route(name, Body.BY_TYPE, _PASSED_METHODS)
        for name in ("tokenize", "detokenize", "rerank", "score", "pooling", "classify")
    },
    "/v2/rerank": Route("rerank", Body.BY_TYPE, _PASSED_METHODS),
    **{
        f"/v1/{name}": _INFERENCE
        for name in (
            *("audio/speech", "audio/transcriptions", "audio/translations", "classify", "images/edits"),
            *("images/generations", "images/variations", "messages/count_tokens", "moderations", "pooling", "rerank"),
            "score",
        )
    },
}


def find_route(method: str, path: str, *, lora_management: bool = False) -> Route:
    """Find the route of a request. `path` begins with a slash and has no query; `lora_management` as configured.

    Raises LbError BAD_REQUEST, UNKNOWN_URL, FORBIDDEN or METHOD_NOT_ALLOWED.
    """
    if method == "CONNECT":
        raise LbError(Outcome.BAD_REQUEST, "This is not a forward proxy.")
    route = _ROUTES.get(path)
    if route is None:
        canonical = _canonical(path)
        if not path.startswith("/v1/") or canonical is None:
            raise LbError(Outcome.UNKNOWN_URL)
        if canonical in _LORA_PATHS:
            if not lora_management or path != canonical:
                raise LbError(Outcome.FORBIDDEN, "Adapters cannot be loaded or unloaded through the load balancer.")
            route = ADAPTERS
        else:
            route = _MODELS if path.startswith("/v1/models/") else _OTHER
    if method not in route.methods:
        raise LbError(Outcome.METHOD_NOT_ALLOWED, allow=", ".join(sorted(route.methods)))
    return route


_STORED: Final = re.compile(r"/v1/(?:responses|chat/completions)/([A-Za-z0-9_-]{1,160})(?:/[a-z_]+)?")


def stored_response(path: str) -> str | None:
    """The id of the stored response that a path is about; None: of none."""
    found = _STORED.fullmatch(path)
    return None if found is None else found[1]


def _canonical(path: str) -> str | None:
    """The path as a server may read it: escapes decoded, parameters and empty segments dropped. None if it has dot
    segments, which could lead to other paths, or characters that no path needs.
    """
    plain = unquote(path).replace("\\", "/")
    segments = [segment.partition(";")[0].strip() for segment in plain.split("/")]
    if not plain.isprintable() or any(segment in {".", ".."} for segment in segments):
        return None
    return "/" + "/".join(filter(None, segments))
