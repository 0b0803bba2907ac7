# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 document of the admin API, made from the table of its routes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from lbproxy import __version__
from lbproxy.config.parse import endpoint_schema
from lbproxy.control.admin.schemas import COMPONENTS, FLAG, Schema, ref

ALWAYS = (400, 401, 403, 500)
"""What every path may answer besides."""
WITH_BODY = (408, 413)
EVENTS = "text/event-stream"
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
            "keep": FLAG | {"default": False, "description": "A reload keeps it."},
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
