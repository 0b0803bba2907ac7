# SPDX-License-Identifier: Apache-2.0
"""The simulated server as a paid provider: below a path prefix, with a key, limits a minute and OpenAI's errors.

What api.openai.com and its like have in common, seen from a client: only the API, without /health and /metrics; 401
without the key; 404 for any model but their own and for any other path; 429 with `Retry-After`, and `x-ratelimit-*`
with every response, if there are limits. Bodies are those that the documentation shows and the SDKs parse. The limits
are of the wall clock, whatever `speed` is.

/faults stays where it is: it is of the simulation.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import orjson
from aiohttp import web

from lbproxy.core.capacity.bucket import Bucket, resized
from lbproxy.sim.mock.apis.fields import EngineError, Json
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.sabotage import Handler
from lbproxy.sim.mock.serving.desk import json_response

_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
API = "/v1"
FAULTS = "/faults"


class QuotaRefusal(NamedTuple):
    """Why a request must wait."""

    kind: str
    """`requests` or `tokens`: the limit that it exceeds."""
    limit: int
    used: int
    requested: int
    wait_s: float
    """Until it is accepted if nothing else comes; infinite: never."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of requests and tokens a minute that a paid provider puts on a key, and how it says them.

    A limit is a bucket that holds a minute's worth and fills evenly, as api.openai.com has it: after a pause of a
    minute a whole minute's worth may come at once. A request is charged before it runs, for its prompt and the tokens
    that it may generate; what it uses in the end changes nothing. Refused ones are not charged, and what is larger than
    the bucket is always refused. Pure: `now` is seconds of any clock that begins at 0 or later. None: no limit.
    """

    requests: Bucket | None = None
    tokens: Bucket | None = None

    def take(self, tokens: int, now: float) -> QuotaRefusal | None:
        """Charge one request of so many tokens, or say why not."""
        asked = [("requests", self.requests, 1), ("tokens", self.tokens, tokens)]
        limits = [(kind, bucket, amount) for kind, bucket, amount in asked if bucket is not None]
        for kind, bucket, amount in limits:
            wait_s = inf if amount > bucket.size else bucket.wait_s(amount, now)
            if wait_s > 0.0:
                return QuotaRefusal(kind, int(bucket.size), ceil(bucket.used(now)), amount, wait_s)
        for _, bucket, amount in limits:
            bucket.take(amount, now)
        return None

    def headers(self, now: float) -> dict[str, str]:
        """What every response says of them."""
        said = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                said[f"x-ratelimit-limit-{kind}"] = str(int(bucket.size))
                said[f"x-ratelimit-remaining-{kind}"] = str(int(bucket.size - bucket.used(now)))
                said[f"x-ratelimit-reset-{kind}"] = duration(bucket.wait_s(bucket.size, now))
        return said


def quota(requests_per_minute: int | None, tokens_per_minute: int | None) -> Quota:
    """The limits that options say."""
    return Quota(resized(None, requests_per_minute, 0.0), resized(None, tokens_per_minute, 0.0))


def charged_tokens(fields: Json, body_bytes: int) -> int:
    """What a request is charged: a quarter of its bytes, and the most that it may generate if it says so."""
    lengths = [value for name in _LENGTHS if type(value := fields.get(name)) is int]
    return max(1, body_bytes // 4) + max(0, *lengths, 0)


def duration(seconds: float) -> str:
    """As the headers word it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1.0:
        return f"{ceil(1000.0 * seconds)}ms"
    minutes, rest = divmod(ceil(1000.0 * seconds), 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


class Provider:
    """One provider's door: a middleware, and what of the server's routes is there."""

    def __init__(self, options: MockOptions, created: int) -> None:
        self.prefix = options.path_prefix or API
        self._model = options.model
        self._created = created
        self._key = options.require_key
        self._quota = quota(options.requests_per_minute, options.tokens_per_minute)

    def routes(self, served: Iterable[web.RouteDef]) -> list[web.RouteDef]:
        """The API's routes, where this provider has them, with its own list of models."""
        models = f"{API}/models"
        api = [route for route in served if route.path.startswith(f"{API}/") and route.path != models]
        return [
            *(self._moved(route) for route in api),
            web.get(f"{self.prefix}/models", self._models, allow_head=False),
        ]

    def _moved(self, route: web.RouteDef) -> web.RouteDef:
        return web.RouteDef(route.method, self.prefix + route.path.removeprefix(API), route.handler, route.kwargs)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may, and word every refusal as OpenAI does."""
        if request.path == FAULTS:
            return await handler(request)
        try:
            if request.match_info.http_exception is None:
                self._check_key(request)
                await self._charge(request)
            return await handler(request)
        except _Limited as error:
            return _limited(error.refusal, self._model)
        except EngineError as error:
            code = "model_not_found" if error.kind == "NotFoundError" and error.param == "model" else None
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            return refusal(error.status, error.message, kind=kind, param=error.param, code=code)
        except _Unauthorized as error:
            return refusal(401, error.message, code=error.code)
        except web.HTTPNotFound:
            return refusal(404, f"Invalid URL ({request.method} {request.path})")
        except web.HTTPMethodNotAllowed as error:
            text = f"Not allowed to {request.method} on {request.path}."
            response = refusal(405, text, code="method_not_supported")
            response.headers["Allow"] = error.headers["Allow"]
            return response
        except web.HTTPException as error:
            return refusal(error.status, error.reason)

    async def sign(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Say the limits with a response."""
        response.headers.update(self._quota.headers(asyncio.get_running_loop().time()))

    def _check_key(self, request: web.Request) -> None:
        if self._key is None:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _Unauthorized(
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
                None,
            )
        if not hmac.compare_digest(key.strip().encode("utf-8", "surrogateescape"), self._key.encode()):
            raise _Unauthorized("Incorrect API key provided.", "invalid_api_key")

    async def _charge(self, request: web.Request) -> None:
        """Count a request for the limits. Raises _Limited, and ApiError for one that names no model."""
        if request.method != "POST":
            return
        tokens = 1
        if request.content_type == "application/json":
            body = await request.read()
            fields = _fields(body)
            if fields is not None:
                if "model" not in fields and not request.path.endswith("/cancel"):
                    raise EngineError(400, "you must provide a model parameter", "invalid_request_error")
                tokens = charged_tokens(fields, len(body))
        refused = self._quota.take(tokens, asyncio.get_running_loop().time())
        if refused is not None:
            raise _Limited(refused)

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "system"}
        return json_response(orjson.dumps({"object": "list", "data": [card]}))


class _Unauthorized(Exception):  # noqa: N818 - a response, not a fault
    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class _Limited(Exception):  # noqa: N818 - a response, not a fault
    def __init__(self, refusal: QuotaRefusal) -> None:
        super().__init__(refusal.kind)
        self.refusal = refusal


def _fields(body: bytes) -> Json | None:
    """The object in a body; None: there is none, which its handler says."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def _limited(refused: QuotaRefusal, model: str) -> web.Response:
    """429: how long to wait, in whole seconds, in milliseconds and in words."""
    short = {"requests": "RPM", "tokens": "TPM"}[refused.kind]
    what = f"on {refused.kind} per min ({short}): Limit {refused.limit}"
    if refused.wait_s == inf:
        text = f"Request too large for {model} {what}, Requested {refused.requested}."
        return refusal(429, text, kind=refused.kind, code="rate_limit_exceeded")
    used = f"Used {refused.used}, Requested {refused.requested}"
    text = f"Rate limit reached for {model} {what}, {used}. Please try again in {duration(refused.wait_s)}."
    response = refusal(429, text, kind=refused.kind, code="rate_limit_exceeded")
    response.headers["Retry-After"] = str(ceil(refused.wait_s))
    response.headers["retry-after-ms"] = str(ceil(1000.0 * refused.wait_s))
    return response


def refusal(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> web.Response:
    """An error in OpenAI's form."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json_response(orjson.dumps({"error": error}), status)
