"""The OpenAPI 3.1 document of the admin API, made from the table of its routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Protocol

from lbproxy import __version__

ALWAYS = (400, 401, 403, 500)
"""What every path may answer besides."""
WITH_BODY = (408, 413, 415)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "problems": {"type": "array", "items": {"type": "string"}},
            },
        }
    },
}


class Described(Protocol):
    """A route, as far as the document tells of it."""

    @property
    def method(self) -> str: ...  # noqa: D102

    @property
    def path(self) -> str: ...  # noqa: D102

    @property
    def summary(self) -> str: ...  # noqa: D102

    @property
    def statuses(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def query(self) -> Mapping[str, dict[str, object]]: ...  # noqa: D102

    @property
    def body(self) -> dict[str, object] | None: ...  # noqa: D102


def document(routes: Iterable[Described]) -> dict[str, object]:
    """The document."""
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lbproxy admin API", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }


def _operation(route: Described) -> dict[str, object]:
    names = re.findall(r"{(\w+)}", route.path)
    parameters: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    statuses = [*route.statuses, *ALWAYS, *(WITH_BODY if route.body is not None else ())]
    operation: dict[str, object] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method} {route.path}".lower()).strip("_"),
        "summary": route.summary,
        "responses": {str(status): _response(status, route.path) for status in sorted(set(statuses))},
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        required = "required" in route.body
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": route.body}}}
    return operation


def _response(status: int, path: str) -> dict[str, object]:
    if status >= 400:
        schema: dict[str, object] = {"$ref": "#/components/schemas/Error"}
    else:
        schema = {"type": "object"}
    kind = "text/event-stream" if path == "/admin/events" and status == 200 else "application/json"
    content = {kind: {"schema": schema} if kind == "application/json" else {}}
    return {"description": HTTPStatus(status).phrase, "content": content}
