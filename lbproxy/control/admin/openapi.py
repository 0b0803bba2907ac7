# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 document of the admin API: made from the table of its routes, with what it answers as JSON schemas,
the `components`.

Every field is `required`, since what is not known is null and not left out. A client must bear fields that it does not
know: a later release may add some.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import TypeAlias

from aiohttp import web

from lbproxy import __version__
from lbproxy.config.parse import endpoint_schema
from lbproxy.control.admin.state import MODEL_STATES
from lbproxy.control.telemetry.recent import DRAINING
from lbproxy.core.endpoints.health import Health
from lbproxy.core.engines.handover import Role
from lbproxy.core.observed.learned import FULL_BY, EndpointLearned, PoolLearned
from lbproxy.core.queue.ticket import Overflow, Wait
from lbproxy.core.sleeping.phase import Phase

Schema: TypeAlias = dict[str, object]

TEXT: Schema = {"type": "string"}
STAMP: Schema = {"type": "string", "format": "date-time"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ALWAYS = (400, 401, 403, 500)
"""What every path may answer besides."""
WITH_BODY = (408, 413)
EVENTS = "text/event-stream"


def ref(name: str) -> Schema:
    """One of `COMPONENTS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(*alike: Mapping[str, Schema], **properties: Schema) -> Schema:
    """An object with these fields. A name that is a keyword of Python ends in an underscore."""
    named = {name: schema for fields_ in alike for name, schema in fields_.items()}
    named |= {name.removesuffix("_"): schema for name, schema in properties.items()}
    return {"type": "object", "required": [*named], "properties": named}


def _all(schema: Schema, names: str) -> dict[str, Schema]:
    """Fields that have the same schema, for `record`."""
    return dict.fromkeys(names.split(), schema)


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _each(schema: Schema) -> Schema:
    """An object whose keys are data."""
    return {"type": "object", "additionalProperties": schema}


def _one_of(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": [*values]}


def _joined(one: Schema, **more: Schema) -> Schema:
    """An object with the fields of `one` and some more, or some changed."""
    properties = one["properties"]
    assert isinstance(properties, Mapping)
    return record(**{**properties, **more})


def _learned(shown: type[EndpointLearned | PoolLearned]) -> Schema:
    """Numbers, unless they are something else, and of how many samples each is: 0 = it is assumed."""
    return record(**{one.name: _LEARNED.get(one.name, NUMBER) for one in fields(shown)})


_FULL_BY = _maybe(_one_of(FULL_BY))
_LEARNED: dict[str, Schema] = {"samples": _each(COUNT), "limit": _maybe(NUMBER), "full_by": _FULL_BY, "held": COUNT}
_HEALTH = _one_of(one.value for one in Health)
_WAKE = record(predicted_ms=_maybe(NUMBER), took_ms=_maybe(NUMBER))
_STANDING = _one_of([*(one.value for one in Health), DRAINING])
_WAIT = _one_of(one.value for one in Wait)

_ERROR = record(message=TEXT, type=TEXT, param=_maybe(TEXT), code=TEXT) | {
    "description": "With `problems` where several things are wrong."
}
_ERROR["properties"] = {**_ERROR["properties"], "problems": _list(TEXT)}  # type: ignore[dict-item]

_SLEEP = record(
    state=_one_of(one.value for one in Phase), for_s=NUMBER, left_s=_maybe(NUMBER), failures=COUNT, host=_maybe(TEXT)
)

_RECENT = record(
    _all(COUNT, "requests failed"),
    _all(_maybe(NUMBER), "first_byte_ms first_byte_off hit_ratio predicted_hit_ratio"),
)

_ENDPOINT = record(
    _all(TEXT, "name url engine from"),
    _all(_maybe(TEXT), "connector reason"),
    _all(COUNT, "tier in_flight awaiting_first_byte elsewhere placed"),
    _all(_maybe(NUMBER), "lease_s waiting running kv_utilization kv_fill metrics_age_s"),
    _all(FLAG, "draining leaving drained backing_off readmitted"),
    role=_one_of(one.value for one in Role),
    limits_used=_each(NUMBER),
    health=_HEALTH,
    share=NUMBER,
    kv_cached_tokens=_maybe(COUNT),
    models=_maybe(_list(TEXT)),
    learned=_maybe(_learned(EndpointLearned)),
    recent=_maybe(_RECENT),
    sleep=_maybe(_SLEEP),
    in_memory=_maybe(_list(record(model=TEXT, state=_one_of(dict.fromkeys(MODEL_STATES.values())), for_s=NUMBER))),
)

_REPLICA = record(
    _all(TEXT, "id name version"),
    _all(COUNT, "resets missed"),
    in_flight=_maybe(COUNT),
    batch_age_s=_maybe(NUMBER),
    complete=FLAG,
)

_REPLICAS = record(
    _all(TEXT, "id name url"),
    connected=FLAG,
    problem=_maybe(TEXT),
    heartbeat_age_s=_maybe(NUMBER),
    others=_list(_REPLICA),
)

_TOKENS = record(
    flow=TEXT, model=_maybe(TEXT), prompt_uncached=COUNT, prompt_cached=COUNT, completion=COUNT, estimated=COUNT
)

_STATE = record(
    _all(TEXT, "version policy"),
    _all(_maybe(TEXT), "listen token_file"),
    _all(COUNT, "pid running client_connections"),
    _all(_list(_TOKENS), "flows tokens"),
    at=STAMP,
    uptime_s=NUMBER,
    stopping=FLAG,
    workers=_list(
        record(
            _all(COUNT, "index pid client_connections upstream_connections running"),
            _all(NUMBER, "cpu_share loop_lag_ms"),
            memory_bytes=_maybe(COUNT),
        )
    ),
    replicas=_maybe(_REPLICAS),
    settings=record(accepted=FLAG, at=STAMP),
    state_file=record(
        age_at_start_s=_maybe(NUMBER), bytes=_maybe(COUNT), written_at=_maybe(STAMP), writes=_each(COUNT)
    ),
    endpoints=_list(ref("Endpoint")),
    models=_list(
        record(
            _all(COUNT, "endpoints waiting"),
            _all(_maybe(NUMBER), "predicted_wait_s room"),
            model=TEXT,
            recommended=_maybe(COUNT),
            recommended_known=FLAG,
        )
    ),
    queue=record(
        _all(COUNT, "waiting bytes"),
        _all(_each(COUNT), "by_priority by_model by_flow by_reason"),
        oldest_s=_maybe(NUMBER),
    ),
    learned=_maybe(_learned(PoolLearned)),
    transitions=_list(record(at=STAMP, endpoint=TEXT, from_=_STANDING, to=_STANDING, reason=TEXT)),
)

_POINT = record(
    _all(COUNT, "requests errors rejected completion_tokens prompt_tokens cached_tokens in_flight waiting"),
    at=STAMP,
    seconds=NUMBER,
    first_byte_ms=record(p50=_maybe(NUMBER), p95=_maybe(NUMBER)),
    waiting_by_reason=_each(COUNT),
)

_REQUEST = record(
    _all(TEXT, "id engine_id outcome"),
    _all(_maybe(TEXT), "model fallback_from endpoint prefill"),
    _all(_maybe(NUMBER), "prefill_ms cost"),
    _all(COUNT, "status attempts"),
    _all(NUMBER, "queue_ms duration_ms"),
    at=STAMP,
    stream=FLAG,
    waited_because=_maybe(_WAIT),
    candidates=_maybe(COUNT),
    predicted=record(first_byte_ms=_maybe(NUMBER), cached_tokens=_maybe(NUMBER)),
    observed=record(
        first_byte_ms=_maybe(NUMBER),
        cached_tokens=_maybe(COUNT),
        prompt_tokens=_maybe(COUNT),
        completion_tokens=_maybe(COUNT),
    ),
)

_CANDIDATE = record(
    endpoint=TEXT,
    decode_on=_maybe(TEXT),
    chosen=FLAG,
    cost=_maybe(NUMBER),
    parts=_each(_maybe(NUMBER)),
    cached_tokens=_maybe(NUMBER),
)

_DECISION = record(
    _all(TEXT, "policy endpoint because"),
    _all(_maybe(TEXT), "decode_on unit"),
    _all(COUNT, "tier candidates"),
    at=STAMP,
    second_leg=FLAG,
    overflow=_maybe(_one_of(one.value for one in Overflow)),
    lowest_costs=record(whole=_maybe(NUMBER), split=_maybe(NUMBER)),
    cost=_maybe(NUMBER),
    shown=_list(_CANDIDATE),
    assumed=_list(TEXT),
    left_out=_list(record(endpoint=TEXT, why=TEXT)),
)

_EXPLAINED = _joined(
    _REQUEST,
    status=_maybe(COUNT),
    outcome=_maybe(TEXT),
    duration_ms=_maybe(NUMBER),
    running=FLAG,
    **_all(TEXT, "method path route client"),
    **_all(_maybe(TEXT), "flow alias error"),
    waited=_maybe(record(because=_WAIT, meaning=TEXT, endpoint=_maybe(TEXT), full_by=_FULL_BY, wake=_maybe(_WAKE))),
    failed=_list(record(endpoint=TEXT, failure=TEXT)),
    decisions=_list(ref("Decision")),
    left_out=_list(record(endpoint=TEXT, why=TEXT)),
    lately=_maybe(_RECENT),
)

_DRAIN = record(name=TEXT, draining=FLAG, leaving=FLAG, in_flight=COUNT, awaiting_first_byte=COUNT, drained=FLAG)

COMPONENTS: dict[str, Schema] = {
    "Error": record(error=_ERROR),
    "Endpoint": _ENDPOINT,
    "Endpoints": record(endpoints=_list(ref("Endpoint"))),
    "Added": record(name=TEXT, keep=FLAG, ttl_s=_maybe(NUMBER), endpoint=_maybe(ref("Endpoint"))),
    "Removed": record(name=TEXT, removed=FLAG, in_flight=COUNT, note=_maybe(TEXT)),
    "Drain": _DRAIN,
    "Sleep": record(name=TEXT, sleep=_maybe(_SLEEP)),
    "State": _STATE,
    "Point": _POINT,
    "Usage": record(kept=FLAG, all_replicas=FLAG, rows=_list(_joined(_TOKENS, day=TEXT))),
    "History": record(points=_list(ref("Point"))),
    "Request": _REQUEST,
    "Requests": record(decisions=_list(ref("Request"))),
    "Decision": _DECISION,
    "Explained": _EXPLAINED,
    "Frame": _joined(_STATE, decisions=_list(ref("Request")), history=_list(ref("Point"))),
    "Settings": OBJECT | {"description": "Every key of the settings file."},
    "Reloaded": record(reloaded=FLAG, endpoints=COUNT, changed=_list(TEXT), at_next_start=_list(TEXT)),
    "LogLevel": record(level=TEXT),
    "Document": OBJECT,
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ENTRY = ref("Entry")
"""An endpoint as the settings file says it."""


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One path with one method."""

    method: str
    path: str
    handler: Handler
    summary: str
    shows: str
    """What a success looks like: one of `COMPONENTS`, or EVENTS."""
    statuses: tuple[int, ...] = (200,)
    """Statuses of this path alone; what every path may answer comes on top."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    """Parameters with their schemas."""
    body: Schema | None = None
    """The schema of what it takes."""


def document(routes: Iterable[AdminRoute]) -> dict[str, object]:
    """The document. Takes tens of milliseconds: it reads sources for what they say of settings."""
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lbproxy admin API", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**COMPONENTS, **_entry()}},
    }


def _entry() -> dict[str, Schema]:
    """What ENTRY refers to, and what that does. Laxer than what reads an entry, which answers 422."""
    keys, parts = endpoint_schema("#/components/schemas/{model}")
    entry: Schema = {
        "type": "object",
        "required": ["url"],
        "additionalProperties": False,
        "properties": {
            **keys,
            "name": {"type": "string", "pattern": r"^[A-Za-z0-9._:\[\]-]{1,64}$"},
            "keep": FLAG | {"default": False, "description": "A reload keeps it. Not beside `ttl`."},
            "ttl": {
                "type": ["string", "number"],
                "description": "It is removed unless the same is sent again within this time, such as 30s (then 200).",
            },
        },
    }
    return {"Entry": entry, **parts}


def _operation(route: AdminRoute) -> dict[str, object]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    statuses = {*route.statuses, *ALWAYS, *(WITH_BODY if route.body is not None else ())}
    operation: dict[str, object] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method} {route.path}".lower()).strip("_"),
        "summary": route.summary,
        "responses": {
            str(status): _response(status, "Error" if status >= 400 else route.shows) for status in sorted(statuses)
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return operation


def _response(status: int, shows: str) -> dict[str, object]:
    phrase = HTTPStatus(status).phrase
    if shows == EVENTS:
        return {"description": f"{phrase}. The data of each event is a Frame.", "content": {EVENTS: {}}}
    return {"description": phrase, "content": {"application/json": {"schema": ref(shows)}}}
