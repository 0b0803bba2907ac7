# SPDX-License-Identifier: Apache-2.0
"""The admin API under /admin/: what lbproxy shows of itself, and the few things that can be changed while it runs.

JSON in and out; errors have the shape of the API for clients, with all `problems` where there are several. One table,
`Api.routes`, says which paths there are; the router and /admin/openapi.json are both made from it. It decides nothing:
what is read is `control.admin.state`'s, what is changed the `Steering`'s, who may is `control.admin.access`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NoReturn, Protocol

import orjson
from aiohttp import web

from lbproxy.config.parse import read_ttl, without_secrets
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.admin.changes import ReloadResult
from lbproxy.control.admin.openapi import ENTRY, EVENTS, AdminRoute, document
from lbproxy.control.admin.state import ShownState, drain_progress, sleep_fields
from lbproxy.control.discovery.overlay import NotLeasedError, UnknownEntryError
from lbproxy.control.saving.usage_file import MAX_DAYS
from lbproxy.control.telemetry.history import History
from lbproxy.control.telemetry.recent import MAX_SUMMARIES, Fields
from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.requests.openai import REASON_FIELD
from lbproxy.driver.runtime import Runtime

PERIOD_S = 1.0
MAX_VIEWERS = 20
STALLED_S = 10.0
"""A viewer must take a frame in this time."""
BODY_S = 10.0
"""In which a request's body must come."""
MAX_NAMED = 10
"""Endpoints that are named to whoever named one that is not there."""
LEVELS = ("debug", "info", "warning", "error")
DECISIONS_SHOWN = 20
"""In each frame of the feed."""
BACK = "it is in the settings file, so a reload or a restart restores it"


class Feed:
    """The state once a second as server-sent events, for a dashboard.

    Whoever finds the last frame a second old renders the next one, for all: no viewers, no cost, and twenty cost little
    more than one. A viewer that is slow misses frames; one that takes nothing is let go.
    """

    def __init__(self, render: Callable[[], dict[str, object]]) -> None:
        self._render = render
        self._frame = b""
        self._number = 0
        self._rendered_at = float("-inf")
        self.viewers = 0
        self._closed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """For one more viewer."""
        return self.viewers < MAX_VIEWERS

    def close(self) -> None:
        """Let all viewers go."""
        self._closed.set()

    async def show(self, request: web.Request) -> web.StreamResponse:
        """One viewer, until it leaves."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        )
        self.viewers += 1
        try:
            await response.prepare(request)
            await self._stream(response)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.viewers -= 1
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        seen = 0
        await response.write(b"retry: 1000\n\n")
        while not self._closed.is_set():
            delay_s = self._rendered_at + PERIOD_S - time.monotonic()
            if delay_s <= 0.0:
                self._next()
            elif seen == self._number:
                await self._sleep(delay_s)
                continue
            seen = self._number
            async with asyncio.timeout(STALLED_S):
                await response.write(self._frame)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass

    def _next(self) -> None:
        self._rendered_at = time.monotonic()
        self._number += 1
        data = orjson.dumps(self._render(), option=orjson.OPT_NON_STR_KEYS)
        self._frame = b"event: state\nid: %d\ndata: %b\n\n" % (self._number, data)


logger = logging.getLogger("lbproxy")
DEFAULT_DAYS = 30
LEVEL: Fields = {
    "type": "object",
    "required": ["level"],
    "properties": {"level": {"type": "string", "enum": list(LEVELS)}},
}
USAGE_QUERY: dict[str, Fields] = {
    "days": {"type": "integer", "minimum": 1, "maximum": MAX_DAYS, "default": DEFAULT_DAYS},
    "own": {"enum": ["0", "1"], "default": "0"},
}

MAX_MOVE_AFTER_S = 86_400
DRAIN = "Stop sending new requests to it"
REMOVE = "Remove an endpoint; its requests finish"
REMOVE_QUERY: dict[str, Fields] = {"url": {"type": "string", "description": "Only if it registered itself by this one"}}
DRAIN_QUERY: dict[str, Fields] = {"move_after": {"type": "integer", "minimum": 0, "maximum": MAX_MOVE_AFTER_S}}
"""After so many seconds streams that can go on elsewhere do so."""


class Steering(Protocol):
    """What can be changed: the composition root. What changes the set of endpoints waits for what else changes it."""

    settings: Settings
    """In force."""

    async def reload(self) -> ReloadResult | None:
        """Read the settings again. None: they came from no file."""

    async def add_endpoint(self, entry: Mapping[str, object], *, keep: bool) -> str:
        """One more; returns its name. Raises ConfigError."""

    async def register_endpoint(self, entry: Mapping[str, object], *, ttl_s: float) -> tuple[str, bool]:
        """One that stays so long, unless this is called again; in place of one that registered by its name. Returns its
        name, and whether it is new. Raises ConfigError; NotLeasedError if another has its name.
        """

    async def remove_endpoint(self, name: str, *, registered_by: str | None = None) -> bool:
        """One less, or only if it registered itself by this URL; returns whether the file has it. Raises
        UnknownEntryError; NotLeasedError if it did not; ConfigError if it is the last, without a lease.
        """

    def drain(self, uid: EndpointUid, *, draining: bool, move_after_s: float = inf) -> None:
        """Drain an endpoint, or end that. After so long its streams go on elsewhere, as far as they can."""

    def set_log_level(self, level: str) -> None:
        """Until a reload or a restart."""

    async def usage(self, days: int, *, own: bool) -> Fields:
        """Who used how many tokens in the last days, with all replicas or as far as counted here (`own`); whether that
        is kept, and whether it is of all replicas.
        """

    def origin(self, name: str) -> str:
        """Where an endpoint comes from."""

    def set_awake(self, uid: EndpointUid, awake: bool) -> str | None:
        """Have an endpoint woken, or put to sleep. Returns why that cannot be."""


class ApiError(Exception):
    """A response that is no success."""

    def __init__(self, status: int, code: str, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "permission_error" if status == 403 else "invalid_request_error"
        self.status = status
        self.code = code
        self.error: Fields = {"message": message, "type": kind, "param": None, "code": code}
        if problems is not None:
            self.error["problems"] = problems

    def response(self) -> web.Response:
        """As JSON."""
        answer = _json({"error": self.error}, self.status)
        answer.headers[REASON_FIELD] = self.code
        return answer


class Api:
    """Handlers, and the table of them."""

    def __init__(self, runtime: Runtime, state: ShownState, history: History, steering: Steering) -> None:
        self._runtime = runtime
        self._state = state
        self._history = history
        self._steering = steering
        self.feed = Feed(self._frame)
        self.routes = self._make_routes()
        self._document: dict[str, object] | None = None
        """Made when it is first asked for."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """All routes. A path that ends in a name takes what is percent-encoded too."""
        for route in self.routes:
            path = route.path.replace("{name}", "{name:[^/]+}").replace("{id}", "{id:.+}")
            router.add_route(route.method, path, route.handler)

    def _make_routes(self) -> list[AdminRoute]:
        limit: Fields = {"type": "integer", "minimum": 1, "maximum": MAX_SUMMARIES, "default": 100}
        one = "/admin/endpoints/{name}"
        return [
            AdminRoute("GET", "/admin/state", self._get_state, "The complete state", "State"),
            AdminRoute(
                "GET", "/admin/history", self._get_history, "The last ten minutes in steps of five seconds", "History"
            ),
            AdminRoute("GET", "/admin/usage", self._get_usage, "Who used how many tokens", "Usage", query=USAGE_QUERY),
            AdminRoute(
                "GET",
                "/admin/events",
                self._events,
                "The state once a second, as server-sent events",
                EVENTS,
                (200, 503),
            ),
            AdminRoute("GET", "/admin/endpoints", self._get_endpoints, "All endpoints", "Endpoints"),
            AdminRoute(
                "POST", "/admin/endpoints", self._add, "Add an endpoint", "Added", (200, 201, 409, 422), body=ENTRY
            ),
            AdminRoute("GET", one, self._get_endpoint, "One endpoint", "Endpoint", (200, 404)),
            AdminRoute("DELETE", one, self._remove, REMOVE, "Removed", (200, 404, 409), query=REMOVE_QUERY),
            AdminRoute("POST", f"{one}/drain", self._drain, DRAIN, "Drain", (200, 400, 404), query=DRAIN_QUERY),
            AdminRoute("POST", f"{one}/undrain", self._undrain, "Send requests to it again", "Drain", (200, 404)),
            AdminRoute("POST", f"{one}/wake", self._wake, "Wake it", "Sleep", (200, 404, 409)),
            AdminRoute("POST", f"{one}/sleep", self._sleep, "Put it to sleep", "Sleep", (200, 404, 409)),
            AdminRoute(
                "GET",
                "/admin/decisions",
                self._get_decisions,
                "Recent requests, the newest first",
                "Requests",
                query={"limit": limit, "endpoint": {"type": "string"}},
            ),
            AdminRoute(
                "GET",
                "/admin/decisions/{id}",
                self._explain,
                "Why a request went where it went",
                "Explained",
                (200, 404),
            ),
            AdminRoute("GET", "/admin/config", self._get_config, "The settings in force, without secrets", "Settings"),
            AdminRoute("POST", "/admin/reload", self._reload, "Read the settings again", "Reloaded", (200, 409, 422)),
            AdminRoute("GET", "/admin/log-level", self._get_log_level, "The minimum level of log lines", "LogLevel"),
            AdminRoute(
                "PUT",
                "/admin/log-level",
                self._put_log_level,
                "Change the log level until the next reload",
                "LogLevel",
                (200, 422),
                body=LEVEL,
            ),
            AdminRoute("GET", "/admin/openapi.json", self._openapi, "This document", "Document"),
        ]

    # Reading

    def _frame(self) -> Fields:
        return self._state.everything() | {
            "decisions": self._state.recent.requests(DECISIONS_SHOWN),
            "history": self._history.points,
        }

    async def _get_state(self, _: web.Request) -> web.Response:
        return _json(self._state.everything())

    async def _get_history(self, _: web.Request) -> web.Response:
        return _json({"points": self._history.points})

    async def _get_usage(self, request: web.Request) -> web.Response:
        days = _whole(request, "days", DEFAULT_DAYS, range(1, MAX_DAYS + 1))
        own = request.query.get("own", "0")
        if own not in {"0", "1"}:
            raise ApiError(400, "invalid_own", "own: expected 0 or 1")
        return _json(await self._steering.usage(days, own=own == "1"))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self.feed.has_room:
            raise ApiError(503, "too_many_viewers", f"There are {self.feed.viewers} subscribers already.")
        return await self.feed.show(request)

    async def _get_endpoints(self, _: web.Request) -> web.Response:
        return _json({"endpoints": self._state.endpoints()})

    async def _get_endpoint(self, request: web.Request) -> web.Response:
        found = self._named(request)
        if len(found) > 1:
            raise self._unknown(request.match_info["name"])
        return _json(self._shown(found[0].endpoint.name))

    async def _get_decisions(self, request: web.Request) -> web.Response:
        limit = _whole(request, "limit", 100, range(1, MAX_SUMMARIES + 1))
        found = self._state.recent.requests(limit, endpoint=request.query.get("endpoint"))
        return _json({"decisions": found})

    async def _explain(self, request: web.Request) -> web.Response:
        found = self._state.recent.explain(request.match_info["id"])
        if found is None:
            kept = self._steering.settings.explain.requests
            text = f"There is no request of that id among the last {kept} (explain.requests) and the running ones."
            raise ApiError(404, "unknown_request", text)
        return _json(found)

    async def _get_config(self, _: web.Request) -> web.Response:
        return _json(without_secrets(self._steering.settings))

    async def _get_log_level(self, _: web.Request) -> web.Response:
        return _json({"level": self._steering.settings.log.level})

    async def _openapi(self, _: web.Request) -> web.Response:
        if self._document is None:
            self._document = await asyncio.to_thread(document, self.routes)
        return _json(self._document)

    # Changing

    async def _add(self, request: web.Request) -> web.Response:
        entry = await _read_object(request)
        if "ttl" in entry:
            return await self._register(entry)
        keep = entry.pop("keep", False)
        if not isinstance(keep, bool):
            raise _unacceptable("keep: expected true or false")
        try:
            name = await self._steering.add_endpoint(entry, keep=keep)
        except ConfigError as error:
            raise _unacceptable(*error.problems) from None
        _log("endpoint %s was added", name)
        found = self._state.endpoint(name)
        return _json({"name": name, "keep": keep, "ttl_s": None, "endpoint": found}, 201)

    async def _register(self, entry: dict[str, object]) -> web.Response:
        """An endpoint that says again and again that it is there. What comes so often shows only what is its own."""
        if "keep" in entry:
            raise _unacceptable("keep: expected none beside ttl: a reload keeps what is renewed")
        try:
            ttl_s = read_ttl(entry.pop("ttl"))
            name, is_new = await self._steering.register_endpoint(entry, ttl_s=ttl_s)
        except ConfigError as error:
            raise _unacceptable(*error.problems) from None
        except NotLeasedError as error:
            text = f"There is an endpoint {error} that did not register itself."
            raise ApiError(409, "not_registered", text) from None
        shown = self._state.endpoint(name) if is_new else None
        return _json({"name": name, "keep": False, "ttl_s": ttl_s, "endpoint": shown}, 201 if is_new else 200)

    async def _remove(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        before = self._state.find(name)
        try:
            returns = await self._steering.remove_endpoint(name, registered_by=request.query.get("url"))
        except UnknownEntryError:
            self._not_an_entry(name, before)
        except NotLeasedError:
            text = f"The endpoint {name} did not register itself by this URL."
            raise ApiError(409, "not_registered", text) from None
        except ConfigError as error:
            text = f"{name} is the last endpoint: drain it instead."
            raise ApiError(409, "last_endpoint", text, list(error.problems)) from None
        _log("endpoint %s was removed", name)
        left = self._state.find(name)
        running = sum(one.in_flight for one in left)
        return _json({"name": name, "removed": True, "in_flight": running, "note": BACK if returns else None})

    def _not_an_entry(self, name: str, found: Sequence[EndpointSnapshot]) -> NoReturn:
        if not found:
            raise self._unknown(name)
        if found[0].removed:
            running = found[0].in_flight
            raise ApiError(409, "leaving", f"{name} was removed already; {running} requests still run there.")
        raise ApiError(409, "discovered", f"{name} is one address of a name: drain it, or remove the name.")

    async def _drain(self, request: web.Request) -> web.Response:
        if "move_after" not in request.query:
            return self._set_draining(request, draining=True)
        move_after_s = float(_whole(request, "move_after", 0, range(MAX_MOVE_AFTER_S + 1), " seconds"))
        return self._set_draining(request, draining=True, move_after_s=move_after_s)

    async def _undrain(self, request: web.Request) -> web.Response:
        return self._set_draining(request, draining=False)

    async def _wake(self, request: web.Request) -> web.Response:
        return self._set_awake(request, True)

    async def _sleep(self, request: web.Request) -> web.Response:
        return self._set_awake(request, False)

    def _set_awake(self, request: web.Request, awake: bool) -> web.Response:
        name, found = request.match_info["name"], self._named(request)
        problem = self._steering.set_awake(found[0].endpoint.uid, awake)
        what = "be woken" if awake else "be put to sleep"
        if problem is not None:
            raise ApiError(409, "not_possible", f"{name} cannot {what}: {problem}.")
        _log(f"endpoint %s is to {what}", name)
        uid = found[0].endpoint.uid
        return _json({"name": name, "sleep": sleep_fields(self._runtime.snapshot().sleep.get(uid))})

    def _set_draining(self, request: web.Request, *, draining: bool, move_after_s: float = inf) -> web.Response:
        name, found = request.match_info["name"], self._named(request)
        if found[0].removed:
            if draining:
                return _json(drain_progress(name, found, knows_all=self._state.knows_all))
            running = found[0].in_flight
            raise ApiError(404, "unknown_endpoint", f"{name} was removed; {running} requests still run there.")
        for one in found:
            if one.draining and draining and move_after_s < inf:
                self._steering.drain(one.endpoint.uid, draining=True, move_after_s=move_after_s)
            elif one.draining != draining:
                self._steering.drain(one.endpoint.uid, draining=draining, move_after_s=move_after_s)
                text = "endpoint %s is draining" if draining else "endpoint %s takes requests again"
                _log(text, one.endpoint.name)
                self._state.recent.note_drain(one.endpoint.name, one.health, draining=draining)
        return _json(drain_progress(name, self._named(request), knows_all=self._state.knows_all))

    async def _reload(self, _: web.Request) -> web.Response:
        result = await self._steering.reload()
        if result is None:
            raise ApiError(
                409, "no_settings_file", "lbproxy runs without a settings file, so there is nothing to reload."
            )
        if result.problems:
            raise ApiError(
                422, "settings_refused", "The settings are refused, and the old ones stay in force.", result.problems
            )
        endpoints = len(self._runtime.snapshot().endpoints)
        changed = {"changed": result.changed, "at_next_start": result.at_next_start}
        return _json({"reloaded": True, "endpoints": endpoints} | changed)

    async def _put_log_level(self, request: web.Request) -> web.Response:
        level = (await _read_object(request)).get("level")
        if level not in LEVELS or not isinstance(level, str):
            raise ApiError(422, "invalid_level", f"level: expected one of {', '.join(LEVELS)}")
        self._steering.set_log_level(level)
        _log("the log level is %s until a reload", level)
        return _json({"level": level})

    def _named(self, request: web.Request) -> list[EndpointSnapshot]:
        name = request.match_info["name"]
        found = self._state.find(name)
        if not found:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> ApiError:
        names = [one.endpoint.name for one in self._runtime.snapshot().endpoints]
        listed = ", ".join(names[:MAX_NAMED]) or "none"
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return ApiError(404, "unknown_endpoint", f"There is no endpoint {name}. There are: {listed}{more}.")

    def _shown(self, name: str) -> Fields:
        found = self._state.endpoint(name)
        assert found is not None, "nothing awaits in between"
        return found


async def _read_object(request: web.Request) -> dict[str, object]:
    """The body. Raises ApiError."""
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body did not arrive in time.") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, "request_too_large", "The body is too large.") from None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"The body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "The body must be a JSON object.")
    return value


def _whole(request: web.Request, name: str, default: int, allowed: range, unit: str = "") -> int:
    """A whole number in the query. Raises ApiError."""
    text = request.query.get(name, str(default))
    if text.isascii() and text.isdigit() and len(text) < 6 and int(text) in allowed:
        return int(text)
    raise ApiError(400, f"invalid_{name}", f"{name}: expected {allowed[0]} to {allowed[-1]}{unit}")


def _unacceptable(*problems: str) -> ApiError:
    return ApiError(422, "invalid_endpoint", "The endpoint cannot be added.", [*problems])


def _log(text: str, subject: str) -> None:
    logger.warning(text, subject, extra={"event": "admin"})


def _json(value: object, status: int = 200) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(
        status=status, body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
    )
