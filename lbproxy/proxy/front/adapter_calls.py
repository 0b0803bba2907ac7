# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading LoRA adapters: one client's call, made at every endpoint of a base model.

It is off unless the settings have `lora_management: true`: then every client may load and unload adapters. The client's
request goes to each endpoint unchanged; the response has the highest of their statuses, and the response of each
endpoint. The models of an endpoint that responded are read again before the client gets its response: the adapter can
be used, or is gone, at once.

Bounds: `MAX_CALLS` at a time, each to `MAX_AT_ONCE` endpoints at a time, `timeouts.first_byte` for each of them. A
name is one of a model, as it becomes one; a body is no larger than what is parsed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, cast

import orjson

from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.openai import check_model_name, read_json_body
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import PARSE_AT_ONCE_BYTES
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.fetch import send
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.request.client_request import ClientRequest

logger = logging.getLogger("lbproxy")

MAX_CALLS = 8
MAX_AT_ONCE = 64
MAX_RESPONSE_BYTES = 64 << 10
_STATUSES = {FailureKind.TIMEOUT: 504, FailureKind.EXHAUSTED: 503}
_MESSAGES = {
    504: "The model server did not respond in time.",
    503: "The model server is down, or takes no requests now.",
    502: "The model server could not be reached, or its response was not valid HTTP.",
}


class CallResult(NamedTuple):
    """The result at one endpoint."""

    endpoint: str
    status: int
    body: object
    """The endpoint's response, parsed if it is JSON."""


class AdapterCalls:
    """Makes the calls."""

    def __init__(self, runtime: RequestRuntime, connections: ConnectionPool) -> None:
        self._runtime = runtime
        self._connections = connections
        self._calls = 0

    async def make(
        self, request: ClientRequest, record: RequestRecord, *, timeout_s: float, name_endpoints: bool
    ) -> tuple[int, bytes]:
        """Return the status and the body of the response. Raises LbError if no endpoint was asked.

        If it is cancelled, some of the endpoints may have executed the call.
        """
        if len(request.body) > PARSE_AT_ONCE_BYTES:
            raise LbError(Outcome.TOO_LARGE)
        fields = read_json_body(request.body).fields
        adapter = _name(fields, "lora_name")
        if adapter is None:
            raise LbError(Outcome.MISSING_MODEL, "The request names no `lora_name`.", param="lora_name")
        base = self._base_model(_name(fields, "base_model_name"), adapter, request)
        endpoints = self._runtime.endpoints_of(base)
        if self._calls >= MAX_CALLS:
            raise LbError(Outcome.SATURATED, "Too many adapters are being loaded or unloaded.")
        self._calls += 1
        try:
            slots = asyncio.Semaphore(MAX_AT_ONCE)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask(one, request, record.id, timeout_s, slots)) for one in endpoints]
        finally:
            self._calls -= 1
        results = [task.result() for task in asked]
        counts = dict(Counter(str(one.status) for one in results))
        path = request.target.partition("?")[0]  # a query may have a key
        extra = {"event": "adapters", "adapter": adapter, "path": path, "id": record.request_id, "statuses": counts}
        logger.info("%s of %s: %s", path, adapter, counts, extra=extra)
        data = [{**({"endpoint": one.endpoint} if name_endpoints else {}), **_rest(one)} for one in results]
        return max(one.status for one in results), orjson.dumps({"object": "list", "data": data})

    def _base_model(self, named: str | None, adapter: str, request: ClientRequest) -> str:
        """The base model of an adapter: as named; or as listed, if it is unloaded; or the only base model."""
        bases = self._runtime.serving.base_models()
        if not bases:
            raise LbError(Outcome.NO_ENDPOINTS)
        if named is not None:
            if named not in bases:
                raise LbError(Outcome.MODEL_NOT_FOUND, f"No base model `{named}` is served.", param="base_model_name")
            return named
        if request.target.startswith("/v1/unload"):
            for card in self._runtime.serving.model_cards():
                if card.id == adapter and card.parent in bases:
                    return card.parent
        if len(bases) > 1:
            message = "The request names no `base_model_name`, and more than one is served."
            raise LbError(Outcome.MISSING_MODEL, message, param="base_model_name")
        return bases[0]

    async def _ask(
        self,
        one: tuple[Endpoint, Health],
        request: ClientRequest,
        request_id: str,
        timeout_s: float,
        slots: asyncio.Semaphore,
    ) -> CallResult:
        endpoint, health = one
        if health is Health.DOWN:
            return CallResult(endpoint.server, 503, _MESSAGES[503])
        async with slots:
            try:
                result = await self._send(endpoint, request, request_id, timeout_s)
            except UpstreamError as error:
                status = _STATUSES.get(error.kind, 502)
                return CallResult(endpoint.server, status, _MESSAGES[status])
            if result.status < 500:  # also one that already has it, or does not have it
                await self._runtime.refresh_models(endpoint.uid)
            return result

    async def _send(self, endpoint: Endpoint, request: ClientRequest, request_id: str, timeout_s: float) -> CallResult:
        origin = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
        head = request.head_for(endpoint, request_id)
        what = self._connections, origin, request.method, head, request.body
        response = await send(*what, timeout_s=timeout_s, max_bytes=MAX_RESPONSE_BYTES)
        try:
            orjson.loads(response.body)
        except orjson.JSONDecodeError:
            return CallResult(endpoint.server, response.status, response.body.decode("utf-8", "replace"))
        body = orjson.Fragment(response.body)  # unparsed, however deep it is nested
        return CallResult(endpoint.server, response.status, body)


def _name(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    if value is not None:
        check_model_name(value, key)
    return cast("str | None", value)


def _rest(one: CallResult) -> dict[str, object]:
    return {"status": one.status, "body": one.body}
