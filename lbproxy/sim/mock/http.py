"""The simulated server behind HTTP: what a vLLM server looks like from outside.

With `sabotage.py` this is the only module of the simulation that does I/O. It owns a socket, one model server
(`model_server.py`) and one timer. The timer fires when the engine's step ends, and hands the step's tokens to the calls
they belong to; a handler wakes up once for what has come since, and writes it. A client that goes away, whether it
streams or not, aborts its work at once.

The clock is the event loop's. If the loop is busy, tokens come out late, but the simulated times stay right; how late
they came out stands on /metrics, for whoever wants to reject a measurement.

No state outside the objects: any number of servers run in one event loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web

from lbproxy.core.engines.orca import REPORT_HEADER, REQUEST_HEADER
from lbproxy.sim.engine.model_server import make_server
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.mock import openai_api as api
from lbproxy.sim.mock.adapters import LOAD_PATH, UNLOAD_PATH, Adapters
from lbproxy.sim.mock.description import DESCRIPTIONS, describe
from lbproxy.sim.mock.exposition import CONTENT_TYPE, Page, load_report, render
from lbproxy.sim.mock.faults import parse_faults
from lbproxy.sim.mock.lag import LagMeter
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.sabotage import Handler, Saboteur, stream_response
from lbproxy.sim.mock.text import Answer, to_token_ids

__all__ = ["MockOptions", "MockServer", "serve"]

VERSION = "0.32.0"
"""The vLLM whose answers were recorded and are imitated."""
MAX_BODY_BYTES = 64 * 2**20
MAX_HEAD_BYTES = 64 * 1024
"""uvicorn's limit for the whole head; here for one line of it."""


class _Flight:
    """A call whose sequences are in the engine. The timer feeds it, one handler empties it."""

    def __init__(self, choices: Sequence[api.Choice], *, per_call: int, every_token: bool) -> None:
        self.choices = choices
        self.every_token = every_token
        self.cached_tokens = 0
        self.left = len(choices)
        """Choices that have not finished."""
        self.tokens: deque[int] = deque()
        """The choice of each token that nobody has taken yet. Bounded by what the call may generate."""
        self._per_prompt = per_call
        self._wake: asyncio.Future[None] | None = None

    def first(self, index: int, cached_tokens: int) -> None:
        """A choice is prefilled. Of the choices that share a prompt only one counts in the usage."""
        if index % self._per_prompt == 0:
            self.cached_tokens += cached_tokens

    def wake(self) -> None:
        """Let the handler look again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def news(self) -> None:
        """Wait for tokens, or for the end; returns at once if there is something."""
        if not self.tokens and self.left:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake


class MockServer:
    """`start`, or `async with`; then `url` answers until `close`."""

    def __init__(self, options: MockOptions) -> None:
        self.options = options
        self.port = 0
        self._engine = make_server(
            options.hardware(),
            ranks=options.ranks,
            times=options.times(),
            max_model_len=options.max_model_len,
            speed=options.speed,
            rng=random.Random(options.seed),
        )
        self._adapters = Adapters(options.model, options.adapters)
        self._lag = LagMeter()
        self._finished: Counter[str] = Counter()
        self._started_at = time.time()
        self._created = int(self._started_at)
        self._calls = 0
        self._flights: dict[str, tuple[_Flight, int]] = {}
        """By the engine's request id: the call, and which of its choices."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer is to fire."""
        self._runner: web.AppRunner | None = None
        self._frozen = False
        self._saboteur = Saboteur(parse_faults("\n".join(options.faults)), options.seed, self._refuse, self._pace)

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
            await web.TCPSite(runner, self.options.host, self.options.port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]
        self._saboteur.start()

    async def close(self) -> None:
        """Stop at once: the port closes, running streams are cut. May be called twice."""
        runner, self._runner = self._runner, None
        await self._saboteur.close()
        if runner is not None:
            await runner.cleanup()
        self._arm()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._saboteur.middleware, _vllm_errors]
        )
        application.on_response_prepare.append(_sign)
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/embeddings", self._embedding),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                # FastAPI, unlike aiohttp, does not answer HEAD where it answers GET.
                web.get("/v1/models", self._models, allow_head=False),
                web.get("/health", self._health, allow_head=False),
                web.get("/version", self._version, allow_head=False),
                *self._saboteur.routes(),
            ]
        )
        if self.options.engine == "vllm":
            application.router.add_get("/metrics", self._metrics, allow_head=False)
        for path in DESCRIPTIONS.get(self.options.engine, ()):
            application.router.add_get(path, self._describe, allow_head=False)
        if self.options.lora_updates:
            application.router.add_post(LOAD_PATH, self._load_adapter)
            application.router.add_post(UNLOAD_PATH, self._unload_adapter)
        return application

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

    def _pace(self, slowness: float | None) -> None:
        """Compute so many times as slowly; None: not at all."""
        self._frozen = slowness is None
        if slowness is not None:
            self._engine.set_speed(self.options.speed / slowness, now=asyncio.get_running_loop().time())
        self._arm()

    # The engine's driver: one timer.

    def _arm(self) -> None:
        """Set the timer for what the engine does next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._engine.next_event()
        if due is not None and self._runner is not None and not self._frozen:
            self._due = due
            self._timer = asyncio.get_running_loop().call_at(due, self._deliver)

    def _deliver(self) -> None:
        """Hand out the tokens of the steps that have ended."""
        # uvloop counts whole milliseconds and fires timers up to one early; waiting for the rest would be a busy loop.
        loop = asyncio.get_running_loop()
        now = max(loop.time(), self._due)
        woken: dict[_Flight, None] = {}
        for step in self._engine.advance(now=now):
            # The handlers write in the loop's next turn, and uvloop sends at its end: what is late is late by then.
            loop.call_soon(loop.call_soon, self._left, step.at)
            for first in step.first:
                if first.id in self._flights:
                    flight, index = self._flights[first.id]
                    flight.first(index, first.cached_tokens)
            for request_id in step.tokens:
                # Absent: aborted after the step had ended, before its tokens could be handed out.
                if request_id in self._flights:
                    flight, index = self._flights[request_id]
                    if flight.every_token:
                        flight.tokens.append(index)
                        woken[flight] = None
            for request_id in step.finished:
                if request_id in self._flights:
                    flight, index = self._flights.pop(request_id)
                    flight.left -= 1
                    self._finished[flight.choices[index].answer.finish_reason] += 1
                    if not flight.left:
                        woken[flight] = None
        self._adapters.stepped(self._engine.gauges().running_adapters, time.time())
        for flight in woken:
            flight.wake()
        self._arm()

    def _left(self, due: float) -> None:
        """A step's tokens have gone out."""
        # Not the loop's clock, which with uvloop stands still within a turn.
        now = time.monotonic()
        self._lag.record(max(0.0, now - due), now=now)

    def _submit(self, flight: _Flight) -> list[str]:
        """Give a call's work to the engine; returns the ids under which it knows it."""
        now = asyncio.get_running_loop().time()
        self._calls += 1
        ids = [f"{self._calls}-{index}" for index in range(len(flight.choices))]
        for index, (request_id, choice) in enumerate(zip(ids, flight.choices, strict=True)):
            self._engine.add(choice.request(request_id), now=now)
            self._flights[request_id] = (flight, index)
        self._arm()
        return ids

    def _withdraw(self, ids: Sequence[str]) -> None:
        """Take back what has not finished: nobody waits for it any more."""
        left = [request_id for request_id in ids if self._flights.pop(request_id, None)]
        if left:
            now = asyncio.get_running_loop().time()
            for request_id in left:
                self._engine.abort(request_id, now=now)
            self._arm()

    # The calls that take time.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, api.parse_chat(await _fields(request)))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, api.parse_completion(await _fields(request)))

    async def _generate(self, request: web.Request, call: api.Call) -> web.StreamResponse:
        adapter = self._adapter(call.model)
        limit = self._engine.max_model_len
        choices = api.plan(call, max_model_len=limit, seed=self.options.seed, adapter=adapter)
        flight = _Flight(choices, per_call=call.n, every_token=call.stream)
        identity = self._identity(request, "chatcmpl" if call.chat else "cmpl", call.model, chat=call.chat)
        ids = self._submit(flight)
        try:
            if call.stream:
                return await self._stream(request, identity, call, flight)
            await flight.news()
            used = api.usage(call, choices, flight.cached_tokens)
            response = _json(api.response_body(identity, choices, used))
            self._add_load(request, response)
            return response
        finally:
            self._withdraw(ids)

    def _add_load(self, request: web.Request, response: web.Response) -> None:
        """vLLM says its load with answers that are whole and good, if the client asks."""
        form = request.headers.get(REQUEST_HEADER)
        if form is not None and self.options.engine == "vllm" and self.options.metric_names == "current":
            report = load_report(form, self._engine.gauges())
            if report is not None:
                response.headers[REPORT_HEADER] = report

    async def _stream(
        self, request: web.Request, identity: api.Identity, call: api.Call, flight: _Flight
    ) -> web.StreamResponse:
        response = stream_response(request)
        # vLLM, too, sends the head as soon as the request is accepted, long before the first token.
        await response.prepare(request)
        events = api.EventWriter(identity)
        position = [0] * len(flight.choices)
        opening = events.opening(len(flight.choices))
        while flight.left or flight.tokens:
            await flight.news()
            batch = [opening]
            opening = b""
            while flight.tokens:
                index = flight.tokens.popleft()
                batch.append(_event(events, flight.choices[index].answer, index, position[index]))
                position[index] += 1
            await response.write(b"".join(batch))
        if call.include_usage:
            await response.write(events.usage(api.usage(call, flight.choices, flight.cached_tokens)))
        await response.write(api.DONE)
        await response.write_eof()
        return response

    async def _embedding(self, request: web.Request) -> web.StreamResponse:
        call = api.parse_embedding(await _fields(request))
        adapter = self._adapter(call.model)
        work = api.embedding_work(call, max_model_len=self._engine.max_model_len, adapter=adapter)
        flight = _Flight(work, per_call=1, every_token=False)
        ids = self._submit(flight)
        try:
            await flight.news()
        finally:
            self._withdraw(ids)
        identity = self._identity(request, "embd", call.model, chat=False)
        return _json(api.embedding_body(identity, call, flight.choices))

    # The calls that do not.

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        model, text = api.parse_tokenize(await _fields(request))
        self._adapter(model)
        ids = to_token_ids(text)
        limit = self._engine.max_model_len
        return _json(orjson.dumps({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        model, text = api.parse_detokenize(await _fields(request))
        self._adapter(model)
        return _json(orjson.dumps({"prompt": text}))

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        body = api.models_body(
            self.options.model,
            created=self._created,
            max_model_len=self._engine.max_model_len,
            engine=self.options.engine,
            adapters=self._adapters.cards(self._created),
        )
        return _json(body)

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._adapters.load(await _fields(request)))

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        adapter, said = self._adapters.unload(await _fields(request))
        self._engine.unload_adapter(adapter, now=asyncio.get_running_loop().time())
        return web.Response(text=said)

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        largest, p99 = self._lag.figures(now=asyncio.get_running_loop().time())
        page = Page(
            model=self.options.model,
            kv_blocks=self._engine.kv_blocks,
            gauges=self._engine.gauges(),
            finished=self._finished,
            lag_max_s=largest,
            lag_p99_s=p99,
            started_at=self._started_at,
            max_loras=self.options.max_loras,
            adapters=self._adapters.series,
            old_names=self.options.metric_names == "old",
        )
        return web.Response(body=render(page), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _describe(self, _request: web.Request) -> web.StreamResponse:
        tokens, slots = self._engine.kv_blocks * BLOCK_TOKENS, self.options.hardware().max_sequences
        return _json(describe(self.options.engine, tokens, slots))

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return _json(orjson.dumps({"version": VERSION}))

    def _adapter(self, model: str | None) -> str | None:
        """The adapter that a request names; None = the base model. Raises ApiError if it names neither."""
        if model is None or model == self.options.model:
            return None
        if model not in self._adapters:
            raise api.ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        return model

    def _identity(self, request: web.Request, prefix: str, model: str | None, *, chat: bool) -> api.Identity:
        unique = _request_id(request) or secrets.token_hex(8)
        return api.Identity(f"{prefix}-{unique}", int(time.time()), model or self.options.model, chat)


async def serve(options: MockOptions) -> None:
    """Run one server until cancelled."""
    async with MockServer(options):
        await asyncio.get_running_loop().create_future()


def _event(events: api.EventWriter, said: Answer, index: int, position: int) -> bytes:
    if position == said.tokens - 1:
        return events.last_token(index, said.token(position), said)
    return events.token(index, said.token(position))


async def _fields(request: web.Request) -> api.Json:
    """The JSON object in a request's body."""
    if request.content_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise api.ApiError(400, message, "Bad Request")
    return api.load_json(await request.read())


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def _vllm_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in the shape that vLLM gives it: its own for the API, FastAPI's for unknown routes."""
    try:
        return await handler(request)
    except api.ApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPException as error:
        response = _json(orjson.dumps({"detail": error.reason}), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "lbproxy-mock"
    request_id = _request_id(request)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id


def _request_id(request: web.Request) -> str | None:
    """The client's id for its request, if it gave one that can be sent back."""
    given = request.headers.get("X-Request-Id", "")
    return given if given.isascii() and given.isprintable() and given else None
