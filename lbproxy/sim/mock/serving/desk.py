# SPDX-License-Identifier: Apache-2.0
"""What every handler needs: whom a request is for, what it is for the engine, and how its response goes out.

A client that goes away, whether it streams or not, aborts its work at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from lbproxy.core.engines.orca import REPORT_HEADER, REQUEST_HEADER
from lbproxy.sim.mock.adapters import Adapters
from lbproxy.sim.mock.apis import call as calls
from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, Writer
from lbproxy.sim.mock.apis.fields import EngineError, Json, bad_request, load_json
from lbproxy.sim.mock.connectors.legs import ServerConnector
from lbproxy.sim.mock.exposition import load_report
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.sabotage import stream_response
from lbproxy.sim.mock.serving.driver import Driver, Flight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


RANK_HEADER = "X-data-parallel-rank"


class Desk:
    """One server's, for all of its handlers."""

    def __init__(self, options: MockOptions, driver: Driver, adapters: Adapters, connector: ServerConnector) -> None:
        self.connector = connector
        self.options = options
        self.driver = driver
        self.adapters = adapters

    @property
    def max_model_len(self) -> int:
        """Prompt and response together, in tokens."""
        return self.driver.engine.max_model_len

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request names; None = the base model. Raises ApiError if it names neither."""
        if model is None or model == self.options.model:
            return None
        if model not in self.adapters:
            raise EngineError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        return model

    def identity(self, request: web.Request, prefix: str, model: str | None, *, own: bool = False) -> Identity:
        """The response's id and what goes with it. `own`: whatever the client called its request."""
        unique = (None if own else client_request_id(request)) or secrets.token_hex(8)
        return Identity(f"{prefix}{unique}", int(time.time()), model or self.options.model)

    def plan(self, call: GenerationCall) -> list[PlannedChoice]:
        """What the engine will do for a call. Raises ApiError."""
        adapter = self.adapter(call.model)
        return calls.plan(call, max_model_len=self.max_model_len, seed=self.options.seed, adapter=adapter)

    def rank(self, request: web.Request) -> int | None:
        """The data-parallel rank that a request names; None = none, or something that is no number. Raises ApiError if
        there is no such rank. As vLLM (v1/engine/input_processor.py of 0.33).
        """
        named = request.headers.get(RANK_HEADER, "")
        if not named.isdecimal():
            return None
        if int(named) >= self.options.ranks:
            text = f"data_parallel_rank {named} is out of range [0, {self.options.ranks})."
            raise bad_request(text)
        return int(named) if self.options.ranks > 1 else None

    @contextmanager
    def flying(self, flight: Flight) -> Iterator[Flight]:
        """The call is at the engine for as long as this lasts."""
        ids = self.driver.submit(flight)
        try:
            yield flight
        finally:
            self.driver.withdraw(ids)

    @asynccontextmanager
    async def begun(self, request: web.Request, fields: Json, call: GenerationCall) -> AsyncIterator[Flight]:
        """A call at the engine, with what its body says of KV that goes from server to server. Raises ApiError."""
        leg = self.connector.leg(fields, call, client_request_id(request) or secrets.token_hex(8))
        try:
            rank = leg.rank(self.rank(request))
            flight = Flight(self.plan(leg.call), per_call=call.n, every_token=call.stream, rank=rank, leg=leg)
            await leg.ready()
            with self.flying(flight):
                if leg.kills:
                    self.driver.die()
                yield flight
        finally:
            leg.close()

    async def generate(
        self, request: web.Request, fields: Json, call: GenerationCall, writer: Writer
    ) -> web.StreamResponse:
        """The response to a call, as `writer` words it."""
        async with self.begun(request, fields, call) as flight:
            if call.stream:
                return await stream(request, writer, flight)
            await flight.news()
            flight.check()
            return await self.complete(request, flight, writer.whole(flight.choices, flight.cached_tokens))

    async def complete(self, request: web.Request, flight: Flight, body: bytes) -> web.Response:
        """The response that is not streamed, once its KV is where it is to be. Raises ApiError."""
        assert flight.leg is not None
        await flight.leg.transferred()
        params = flight.leg.params(flight.cached_tokens)
        response = json_response(body if params is None else with_params(body, params))
        self.add_load(request, response)
        return response

    async def prefill(self, prompts: Sequence[bytes], model: str | None) -> list[PlannedChoice]:
        """Have prompts read of which no text comes. Raises ApiError."""
        adapter = self.adapter(model)
        work = calls.prefills(prompts, max_model_len=self.max_model_len, adapter=adapter)
        with self.flying(Flight(work, per_call=1, every_token=False)) as flight:
            await flight.news()
            flight.check()
        return work

    def add_load(self, request: web.Request, response: web.Response) -> None:
        """vLLM says its load with responses that are complete and good, if the client asks."""
        form = request.headers.get(REQUEST_HEADER)
        if form is not None and self.options.engine == "vllm" and self.options.metric_names == "current":
            report = load_report(form, self.driver.engine.gauges())
            if report is not None:
                response.headers[REPORT_HEADER] = report


async def stream(
    request: web.Request, writer: Writer, flight: Flight, ended: Callable[[], None] | None = None
) -> web.StreamResponse:
    """Write a flight's tokens as they come. `ended` is called before the client can know that it has."""
    response = stream_response(request, writer.content_type)
    # vLLM, too, sends the head as soon as the request is accepted, long before the first token.
    await response.prepare(request)
    accepted = writer.accepted(flight.choices)
    if accepted:
        await response.write(accepted)
    position = [0] * len(flight.choices)
    opening = writer.opening(flight.choices)
    while flight.left or flight.tokens:
        await flight.news()
        if flight.failure is not None:
            break
        batch = [opening]
        opening = b""
        while flight.tokens:
            index = flight.tokens.popleft()
            event = writer.token(flight.choices[index], index, position[index])
            if flight.leg is not None and flight.choices[index].is_last(position[index]):
                params = flight.leg.params(flight.cached_tokens)
                event = event if params is None else events_with_params(event, params)
            batch.append(event)
            position[index] += 1
        events = b"".join(batch)
        if events:
            await response.write(events)
    try:
        flight.check()
        if flight.leg is not None:
            await flight.leg.transferred()
    except EngineError as error:
        await response.write(writer.failed(error))
        await response.write_eof()
        return response
    if ended is not None:
        ended()
    await response.write(writer.closing(flight.choices, flight.cached_tokens))
    await response.write_eof()
    return response


def with_params(body: bytes, params: Json) -> bytes:
    """A body that says where its KV is."""
    return orjson.dumps(orjson.loads(body) | {"kv_transfer_params": params})


def events_with_params(events: bytes, params: Json) -> bytes:
    """The same of the last event of a stream."""
    head, data, last = events.rpartition(b"data: ")
    return head + data + with_params(last, params) + b"\n\n" if data else events


async def fields_of(request: web.Request) -> Json:
    """The JSON object in a request's body."""
    if request.content_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise EngineError(400, message, "Bad Request")
    return load_json(await request.read())


def json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def detail(reason: str, status: int) -> web.Response:
    """FastAPI's words for a route that is not there."""
    return json_response(orjson.dumps({"detail": reason}), status)


def client_request_id(request: web.Request) -> str | None:
    """The client's id for its request, if it gave one that can be sent back."""
    given = request.headers.get("X-Request-Id", "")
    return given if given.isascii() and given.isprintable() and given else None
