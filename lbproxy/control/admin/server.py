# SPDX-License-Identifier: Apache-2.0
"""The admin listener: /healthz, /readyz, /metrics, the API under /admin/ and the dashboard. A port of its own, so that
it answers while clients fill the other.

Whoever reaches the port may read the first three; everything else is for who may (control/admin/access.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from lbproxy.config.sections.access import Secret
from lbproxy.control.admin.access import AdminAccess
from lbproxy.control.admin.api import Api, ApiError
from lbproxy.control.admin.connections import ACCEPTED_AT_ONCE, AdminConnection, AdminConnections
from lbproxy.control.admin.dashboard.page import Dashboard
from lbproxy.control.admin.made_token import MadeToken
from lbproxy.control.admin.state import Drainable
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import is_serving
from lbproxy.core.requests.openai import REASON_FIELD, error_body
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.driver.runtime import Runtime
from lbproxy.net.listening.bind import bind, bound_port
from lbproxy.net.listening.listener import Listener

logger = logging.getLogger("lbproxy")

KEEP_ALIVE_S = 75.0
MAX_BODY_BYTES = 64 << 10
SERVER = "lbproxy"
PAUSE_AFTER_PAGE = 3.0
"""Times the time that a page took."""
SPARE_DESCRIPTORS = 4
"""Kept for connections here: when clients and endpoints have all others, this is where one looks for the reason."""
_NO_FOLDER = (
    "the admin API changes nothing: set admin.token, or a folder for a token in $RUNTIME_DIRECTORY or $XDG_RUNTIME_DIR"
)
SHUTDOWN_S = 1.0
"""How long a page that is being written may take when lbproxy stops."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages(Protocol):
    """What /metrics shows: telemetry."""

    async def page(self) -> tuple[bytes, str]:
        """The page and its content type."""


class _Page:
    """One page in the making at a time, for all who asked before that began, and a quarter of the time at most: however
    many ask, without a token, clients are served.
    """

    def __init__(self, metrics: Pages) -> None:
        self._metrics = metrics
        self._making = asyncio.Lock()
        self._made: tuple[bytes, str] = (b"", "")
        self._number = 0
        """The number of the page that was made."""
        self._begun = 0
        self._next_at = 0.0
        """When one may be begun."""
        self._asking = 0
        """How many ask for a page; without any it is dropped."""

    async def fresh(self) -> tuple[bytes, str]:
        """A page that was begun after this call, and its content type."""
        after = self._begun
        self._asking += 1
        try:
            async with self._making:
                if self._number <= after:
                    loop = asyncio.get_running_loop()
                    await asyncio.sleep(self._next_at - loop.time())
                    self._begun += 1
                    number, began_at = self._begun, loop.time()
                    try:
                        self._made, self._number = await self._metrics.page(), number
                    finally:
                        now = loop.time()
                        self._next_at = now + PAUSE_AFTER_PAGE * (now - began_at)
            return self._made
        finally:
            self._asking -= 1
            if not self._asking:
                self._made = (b"", "")


class Admin:
    """One listener. `start`, then `close`."""

    def __init__(
        self,
        runtime: Runtime,
        front: Drainable,
        metrics: Pages,
        token: Secret | None = None,
        api: Api | None = None,
        made: MadeToken | None = None,
    ) -> None:
        """`made`: what becomes the token where `token` is None, and there is no Unix socket."""
        self._runtime = runtime
        self._front = front
        self._page = _Page(metrics)
        self._api = api
        self._port: int | None = None
        self.listener: Listener | None = None
        """Set by `start`."""
        self.connections = AdminConnections(runtime.loop, runtime.pulse, _refusal_of_no_request)
        self.access = AdminAccess(token, made)
        middlewares = [_errors_as_json, self.access.middleware]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.on_response_prepare.append(self._before_response)
        for path, handler in (("/healthz", _healthz), ("/readyz", self._readyz), ("/metrics", self._show_metrics)):
            app.router.add_get(path, handler)
        if api is not None:
            api.add_to(app.router)
            Dashboard().add_to(app.router)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,  # the runner's own default is an hour
            shutdown_timeout=SHUTDOWN_S,
            lingering_time=SHUTDOWN_S,
            auto_decompress=False,
        )

    async def start(self, host: str, port: int, inherited: Sequence[socket.socket] = ()) -> int:
        """Accept connections; returns the port (port 0: any free one; 0 of a Unix socket). Raises OSError.

        `inherited`: sockets that listen there already, to use instead.
        """
        sockets = inherited or await bind(host, port)
        self._port = bound_port(sockets)
        await self.settle_token()
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop, options, all_ = asyncio.get_running_loop(), server._kwargs, self.connections
        self.listener = Listener(
            lambda: AdminConnection(all_, server, loop=loop, **options), room=all_.end_longest, spares=SPARE_DESCRIPTORS
        )
        self.listener.batch = lambda _: ACCEPTED_AT_ONCE
        all_.on_closed = self.listener.refill
        self.listener.start(sockets)
        return self._port

    async def settle_token(self) -> None:
        """Have a token of our own where the settings have none, and only there. Not for a Unix socket: its file says
        who may.
        """
        made = self.access.made
        if self.access.token is not None:
            await self._remove_token()
        elif self._port and made.path is None:
            await asyncio.to_thread(made.make, self._port)

    def warn_if_fixed(self) -> None:
        """Say in the log that nobody can change anything here, if that is so."""
        if self._port and self.access.token is None and self.access.made.path is None:
            logger.warning(_NO_FOLDER, extra={"event": "admin"})

    def stop_accepting(self) -> None:
        """Only those who are connected are still answered."""
        if self.listener is not None:
            self.listener.close()

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        assert self._port is not None
        return self._port

    async def close(self) -> None:
        """Stop. Legal also if it was never started."""
        self.stop_accepting()
        if self._api is not None:
            self._api.feed.close()
        await self._runner.cleanup()
        self.connections.close()
        await self._remove_token()

    async def _remove_token(self) -> None:
        """Within a second: its file system may hang, and a thread of an executor would be waited for at exit."""
        thread = threading.Thread(target=self.access.made.remove, daemon=True)
        thread.start()
        until = time.monotonic() + SHUTDOWN_S
        while thread.is_alive() and time.monotonic() < until:  # noqa: ASYNC110 - once in a lifetime
            await asyncio.sleep(0.005)

    async def _before_response(self, _: web.Request, response: web.StreamResponse) -> None:
        self.connections.hold_less()
        response.headers["Server"] = SERVER  # aiohttp would tell its version and Python's

    async def _readyz(self, _: web.Request) -> web.Response:
        """200 while a client finds lbproxy, and its request an endpoint."""
        endpoints = self._runtime.balancer.endpoints
        counts = Counter(one.health for one in endpoints.every())
        serving = sum(is_serving(one, endpoints.serving.is_readmitted(one)) for one in endpoints.members())
        draining = self._front.draining
        ready = serving > 0 and not draining and self._front.url is not None
        facts = {
            "ready": ready,
            "draining": draining,
            "endpoints": {"serving": serving, **{health.value: counts[health] for health in Health}},
        }
        response = _json(200 if ready else 503, orjson.dumps(facts))
        if not ready:
            why = Outcome.DRAINING if draining else Outcome.NO_ENDPOINTS
            response.headers[REASON_FIELD] = why.value.code
        return response

    async def _show_metrics(self, _: web.Request) -> web.Response:
        body, content_type = await self._page.fresh()
        return web.Response(body=body, headers={"Content-Type": content_type})


async def _healthz(_: web.Request) -> web.Response:
    """200 while the process lives and its loop turns."""
    return web.Response(text="ok")


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _refusal_of_no_request(error: LbError) -> web.Response:
    response = _refusal(error)
    response.headers["Server"] = SERVER
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except LbError as error:
        response = _refusal(error)
        if error.outcome is Outcome.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    except web.HTTPMethodNotAllowed as error:
        response = _refusal(LbError(Outcome.METHOD_NOT_ALLOWED))
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except web.HTTPNotFound:
        return _refusal(LbError(Outcome.UNKNOWN_URL))
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:  # what aiohttp itself refuses
        return _refusal(LbError(Outcome.BAD_REQUEST, error.reason), error.status)
    except Exception:
        logger.exception("admin %s failed", request.path)
        return _refusal(LbError(Outcome.INTERNAL_ERROR))


def _refusal(error: LbError, status: int | None = None) -> web.Response:
    facts = error.outcome.value
    response = _json(status or facts.status, error_body(error))
    response.headers[REASON_FIELD] = facts.code
    return response
