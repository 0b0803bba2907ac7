# SPDX-License-Identifier: Apache-2.0
"""The simulated server behind HTTP: what a vLLM server looks like from outside.

It owns a socket, one model server with its driver (`serving.driver`), and the faults (`sabotage`). Handlers of work
stand in `serving`; those that describe the server or change it are here.

No state outside the objects: any number of servers run in one event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from lbproxy.sim.engine.model_server import ModelServer, make_server
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.ranks import RankedEngine
from lbproxy.sim.mock import families
from lbproxy.sim.mock.adapters import LOAD_PATH, UNLOAD_PATH, Adapters
from lbproxy.sim.mock.apis.fields import EngineError
from lbproxy.sim.mock.connectors.legs import ServerConnector
from lbproxy.sim.mock.connectors.mooncake import Mooncake
from lbproxy.sim.mock.connectors.nixl import Nixl
from lbproxy.sim.mock.connectors.sglang import DEFAULT_PORT, Sglang
from lbproxy.sim.mock.connectors.storage import Storage
from lbproxy.sim.mock.exposition import CONTENT_TYPE, DESCRIPTIONS, Page, describe, models_body, render
from lbproxy.sim.mock.faults import parse_faults
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.on_demand_pages import on_demand_pages
from lbproxy.sim.mock.sabotage import Handler, Saboteur
from lbproxy.sim.mock.serving.desk import Desk, client_request_id, detail, fields_of, json_response
from lbproxy.sim.mock.serving.driver import Driver
from lbproxy.sim.mock.serving.generation import Generation
from lbproxy.sim.mock.serving.ollama import Ollama
from lbproxy.sim.mock.serving.provider import API, Provider
from lbproxy.sim.mock.serving.published import CLEAR_PATH, PublishedKv
from lbproxy.sim.mock.serving.reading import RequestHandlers
from lbproxy.sim.mock.serving.realtime import Realtime
from lbproxy.sim.mock.serving.responses import Responses
from lbproxy.sim.mock.serving.sleep import SleepMode

__all__ = ["MockOptions", "MockServer", "serve"]

VERSION = "0.32.0"
"""The vLLM whose answers were recorded and are imitated."""
MAX_BODY_BYTES = 64 * 2**20
MAX_HEAD_BYTES = 64 * 1024
"""uvicorn's limit for the whole head; here for one line of it."""


class MockServer:
    """`start`, or `async with`; then `url` answers until `close`."""

    def __init__(self, options: MockOptions) -> None:
        self.options = options
        self.port = 0
        self._adapters = Adapters(options.model, options.adapters)
        engine = make_server(
            options.hardware(),
            ranks=options.ranks,
            times=options.times(),
            loading=options.loading(),
            max_model_len=options.max_model_len,
            speed=options.speed,
            rng=random.Random(options.seed),
        )
        self.published = PublishedKv(options, engine)
        self.driver = Driver(engine, options.speed, self._stepped)
        self.connector = make_connector(options, self.driver)
        self.sleep = SleepMode(options, self.driver, self.published.clear)
        self._desk = Desk(options, self.driver, self._adapters, self.connector)
        self._started_at = time.time()
        self._created = int(self._started_at)
        self._runner: web.AppRunner | None = None
        faults = parse_faults("\n".join(options.faults))
        self._saboteur = Saboteur(faults, options.seed, self._refuse, self.driver.pace, options.path_prefix or API)

    @property
    def url(self) -> str:
        """`http://host:port`."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be had."""
        runner = web.AppRunner(
            self._application(),
            # Without it aiohttp lets handlers run on after their client has gone, and the work would never be aborted.
            handler_cancellation=True,
            keepalive_timeout=self.options.keep_alive_s,
            # As short as can be: aiohttp takes 0 for no limit.
            shutdown_timeout=0.001,
            access_log=None,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        await runner.setup()
        try:
            self.sleep.start()
            await self.connector.start(self.options.host)
            self.published.start()
            await web.TCPSite(runner, self.options.host, self.options.port).start()
        except BaseException:
            await self.connector.close()
            self.published.close()
            self.sleep.close()
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]
        self.driver.run(True)
        self._saboteur.start()

    async def close(self) -> None:
        """Stop at once: the port closes, running streams are cut. May be called twice."""
        runner, self._runner = self._runner, None
        await self._saboteur.close()
        if runner is not None:
            await runner.cleanup()
        self.driver.run(False)
        await self.connector.close()
        self.published.close()
        self.sleep.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _application(self) -> web.Application:
        api = [
            *Generation(self._desk).routes(),
            *RequestHandlers(self._desk).routes(),
            *Responses(self._desk).routes(),
            *Realtime(self._desk).routes(),
        ]
        if self.options.is_provider:
            provider = Provider(self.options, self._created)
            application = self._bare_application(provider.middleware)
            application.on_response_prepare.append(provider.sign)
            application.add_routes([*provider.routes(api), *self._saboteur.routes()])
            return application
        if self.options.engine == "ollama":
            api += Ollama(self._desk).routes()
        application = self._bare_application(_vllm_errors)
        application.add_routes(
            [
                *api,
                # FastAPI, unlike aiohttp, does not answer HEAD where it answers GET.
                web.get("/health", self._health, allow_head=False),
                web.get("/version", self._version, allow_head=False),
                web.post(CLEAR_PATH, self.published.clear_cache),
                *self.sleep.routes(),
                *self._saboteur.routes(),
            ]
        )
        if self.options.engine == "vllm" or self.options.connector is not None:
            application.router.add_get("/metrics", self._metrics, allow_head=False)
        said = {"/v1/models": self._models} | dict.fromkeys(DESCRIPTIONS.get(self.options.engine, ()), self._describe)
        for path, make in on_demand_pages(self.options, self.driver.engine, self._created).items():
            said[path] = partial(_send, make)
        for path, handler in said.items():
            application.router.add_get(path, handler, allow_head=False)
        if self.options.lora_updates:
            application.router.add_post(LOAD_PATH, self._load_adapter)
            application.router.add_post(UNLOAD_PATH, self._unload_adapter)
        return application

    def _bare_application(self, errors: Middleware) -> web.Application:
        """One without routes. `errors` words what is refused."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._saboteur.middleware, errors])
        application.on_response_prepare.append(_sign)
        return application

    def _stepped(self, adapters: Sequence[str]) -> None:
        self._adapters.stepped(adapters, time.time())
        self.published.publish()

    # What the saboteur needs.

    async def _refuse(self, refuse: bool) -> None:
        """Close the port and every connection, or listen again."""
        runner = self._runner
        if runner is None:
            return
        if not refuse:
            await web.TCPSite(runner, self.options.host, self.port).start()
            return
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        assert isinstance(server, web.Server)
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.close()

    # What describes the server, or changes it.

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        body = models_body(
            self.options.model,
            created=self._created,
            max_model_len=self.driver.engine.max_model_len,
            engine=self.options.engine,
            adapters=self._adapters.cards(self._created),
        )
        return json_response(body)

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._adapters.load(await fields_of(request)))

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        adapter, said = self._adapters.unload(await fields_of(request))
        self.driver.engine.unload_adapter(adapter, now=asyncio.get_running_loop().time())
        return web.Response(text=said)

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        largest, p99 = self.driver.lag.figures(now=asyncio.get_running_loop().time())
        engine = self.driver.engine
        ranks: Sequence[ModelServer] = engine.ranks if isinstance(engine, RankedEngine) else [engine]
        page = Page(
            model=self.options.model,
            kv_blocks=engine.kv_blocks,
            ranks=[one.gauges() for one in ranks],
            finished=self.driver.finished,
            lag_max_s=largest,
            lag_p99_s=p99,
            # vLLM with several processes behind the address does not say it.
            started_at=self._started_at if len(ranks) == 1 else None,
            max_loras=self.options.max_loras,
            adapters=self._adapters.series,
            prefix_cache=self.options.prefix_cache,
            old_names=self.options.metric_names == "old",
        )
        return web.Response(body=self._page(page), headers={"Content-Type": CONTENT_TYPE})

    def _page(self, page: Page) -> bytes:
        """The metrics page, with what the connector adds."""
        options, preset = self.options, self.options.hardware()
        if options.engine == "sglang":
            tokens = page.kv_blocks * BLOCK_TOKENS
            gauges = self.driver.engine.gauges()
            return families.sglang(options.model, options.role, gauges, tokens, self.connector.queues())
        if options.connector is None:
            return render(page) + self.sleep.metrics()
        body = render(page) + self.sleep.metrics() + families.external_cache(options.model, page.ranks)
        if options.connector in ("nixl", "mooncake"):
            times = {"transfer_ms": preset.transfer_ms, "token_ms": preset.transfer_token_ms}
            body += families.vllm(options.model, options.connector, options.role, page.ranks, **times)
        return body

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.driver.is_dead else 200)

    async def _describe(self, _request: web.Request) -> web.StreamResponse:
        tokens, slots = self.driver.engine.kv_blocks * BLOCK_TOKENS, self.options.hardware().max_sequences
        address = self.connector.address
        bootstrap_port = DEFAULT_PORT if address is None else address[1]
        body = describe(self.options.engine, tokens, slots, role=self.options.role, bootstrap_port=bootstrap_port)
        return json_response(body)

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return json_response(orjson.dumps({"version": VERSION}))


def make_connector(options: MockOptions, driver: Driver) -> ServerConnector:
    """What the options say."""
    match options.connector:
        case "nixl":
            return Nixl(options, driver)
        case "mooncake":
            return Mooncake(options, driver)
        case "shared-storage":
            return Storage(options)
        case "sglang" if options.role != "both":
            return Sglang(options, driver)
        case _:
            return ServerConnector()


async def serve(options: MockOptions) -> None:
    """Run one server until cancelled."""
    async with MockServer(options):
        await asyncio.get_running_loop().create_future()


async def _send(make: Callable[[], bytes], _request: web.Request) -> web.StreamResponse:
    return json_response(make())


@web.middleware
async def _vllm_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in the shape that vLLM gives it: its own for the API, FastAPI's for unknown routes."""
    try:
        return await handler(request)
    except EngineError as error:
        return json_response(error.body(), error.status)
    except web.HTTPException as error:
        response = detail(error.reason, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "lbproxy-mock"
    request_id = client_request_id(request)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
